"""The command line: one module per verb, and `main`, which picks the verb and the exit code."""
