"""Groups of worker processes: start, events, stop, results."""
