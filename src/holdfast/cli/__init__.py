"""The command line: one module per command, and `main`, which picks the command and the exit code."""
