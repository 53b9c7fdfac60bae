"""The coordinator as a server, and an agent's connection to it; `core` decides."""
