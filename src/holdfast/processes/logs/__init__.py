"""Workers' output: its destinations, following, filters and the console."""
