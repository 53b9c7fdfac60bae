"""Watchdog timers: a worker says by when it will be done, and is ended if it is not.

`clients` is a script's side, `file_client` and `local_timers` have its two ways to a server.
`file_server` is the agent's: deadlines by one timer, requests by a named pipe, no thread needed.
"""
