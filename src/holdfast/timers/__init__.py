"""Watchdog timers: a worker that misses its own deadline is killed."""
