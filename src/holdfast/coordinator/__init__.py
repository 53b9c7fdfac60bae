"""The embedded coordinator: the server that moves its bytes, and the client each agent has."""
