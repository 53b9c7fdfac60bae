"""The coordinator's server, and an agent's connection to it. `core` makes all decisions."""
