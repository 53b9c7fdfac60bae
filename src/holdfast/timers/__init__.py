"""Watchdog timers: a worker sets a deadline, and is killed if it misses it."""
