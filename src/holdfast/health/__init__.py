"""Health checks: whether the agent lives and its workers run, for those who ask by HTTP."""
