"""Worker processes: starting, watching, stopping, their streams and their errors."""
