"""The control plane of a worker: a socket at which it can be asked things while it runs.

`worker_main()` around a main function opens it, where `TORCH_WORKER_SERVER_SOCKET` names a place;
`register_handler` adds things to ask for. `dump_stacks` shows where any worker is, with or without.

Importing this package loads nothing but this file; each name is fetched when it is first used.
"""

from __future__ import annotations

TYPE_CHECKING = False
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

_HOMES = {
    "Request": "holdfast.control.handlers",
    "Response": "holdfast.control.handlers",
    "WorkerServer": "holdfast.control.server",
    "dump_into_log": "holdfast.control.stacks",
    "dump_stacks": "holdfast.control.stacks",
    "handler_names": "holdfast.control.handlers",
    "register_handler": "holdfast.control.handlers",
    "worker_main": "holdfast.control.worker_entry",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.control' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
