"""What others can know of a run: lifecycle events of the agent, and the events, metrics and health checks made of them."""
