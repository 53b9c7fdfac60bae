"""The keeper: the process below which all workers run, and the agent's client of it."""
