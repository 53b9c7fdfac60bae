"""Workers' output: where it goes, how it is followed, filtered and shown."""
