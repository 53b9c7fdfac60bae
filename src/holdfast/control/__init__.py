"""The control plane of a worker: a socket that answers requests while it runs.

`worker_main()` around a main function opens it, if `TORCH_WORKER_SERVER_SOCKET` names a path;
`register_handler` adds a request. `dump_stacks` shows the stacks of any worker, with or without.
Each name is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.control.handlers import Request, Response, handler_names, register_handler
    from holdfast.control.server import WorkerServer
    from holdfast.control.stacks import dump_into_log, dump_stacks
    from holdfast.control.worker_entry import worker_main

__all__ = [
    "Request",
    "Response",
    "WorkerServer",
    "dump_into_log",
    "dump_stacks",
    "handler_names",
    "register_handler",
    "worker_main",
]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    match name:
        case "WorkerServer":
            home = "server"
        case "dump_into_log" | "dump_stacks":
            home = "stacks"
        case "worker_main":
            home = "worker_entry"
        case _:
            home = "handlers"
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
