"""Health checks over HTTP: whether the agent's loop responds and its workers run."""
