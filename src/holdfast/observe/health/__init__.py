"""Health checks over HTTP: whether the agent's loop turns and its workers run."""
