"""Watchdog timers: a worker says by when it will be done, and is killed if it is not."""
