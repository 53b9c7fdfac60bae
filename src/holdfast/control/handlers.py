"""What a worker can be asked for at its control socket: handlers by name.

A handler gets a request and a response, as torch's have them, runs in a thread of the server, and
returns nothing. Those that are here from the start:

==================  ===========================================================================
`ping`              answers `pong`
`dump_traceback`    the stacks of all Python threads
`pyspy_dump`        the same by py-spy, as seen from outside; `?native` with the frames of C
==================  ===========================================================================

In a worker that has imported torch, the handlers that torch knows can be asked for as well.
"""

from __future__ import annotations

import re
import threading
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[["Request", "Response"], object]

HANDLERS_MAX = 256
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


class Request:
    """What was asked."""

    def __init__(self, body: bytes = b"", params: dict[str, str] | None = None) -> None:
        self._body = body
        self._params = params or {}

    def body(self) -> str:
        """Return what came with the request, as text."""
        return self._body.decode(errors="replace")

    def get_param(self, key: str) -> str:
        """Return a parameter of the query, the first of that name; empty if there is none."""
        return self._params.get(key, "")

    def has_param(self, key: str) -> bool:
        """Whether the query has a parameter, with or without a value."""
        return key in self._params


class Response:
    """What is answered: nothing, with status 200, until it is set."""

    def __init__(self) -> None:
        self.status = 200
        self.content = b""
        self.content_type = "text/plain"

    def set_content(self, content: str | bytes, content_type: str) -> None:
        """Set what is sent back."""
        self.content = content.encode() if isinstance(content, str) else bytes(content)
        if any(not " " <= one <= "~" for one in content_type):
            raise ValueError(f"{content_type!r} is no content type")
        self.content_type = content_type

    def set_status(self, status: int) -> None:
        """Set the HTTP status, 200 unless it is set."""
        if not 200 <= status <= 599:
            raise ValueError(f"{status} is not a status from 200 to 599")
        self.status = status


_handlers: dict[str, Handler] = {}
_lock = threading.Lock()


def register_handler(name: str, handler: Handler) -> None:
    """Let a worker be asked for `name`; a name can be taken once."""
    if not NAME.fullmatch(name):
        raise UsageError(f"{name!r} is no name for a handler: letters, digits, '_', '.' and '-'")
    with _lock:
        if name in _handlers:
            raise UsageError(f"handler {name!r} is registered already")
        if len(_handlers) >= HANDLERS_MAX:
            raise UsageError(f"there are {HANDLERS_MAX} handlers already")
        _handlers[name] = handler


def handler_names() -> list[str]:
    """Return all that can be asked for in this process."""
    from holdfast.control.torch_handlers import torch_handler_names

    with _lock:
        own = [*_handlers]
    return sorted({*own, *torch_handler_names()})


def find_handler(name: str) -> Handler | None:
    """Return the handler of a name: one registered here, or one of torch's."""
    from holdfast.control.torch_handlers import torch_handler

    with _lock:
        own = _handlers.get(name)
    return own or torch_handler(name)


def _ping(_request: Request, response: Response) -> None:
    response.set_content("pong", "text/plain")


def _dump_traceback(_request: Request, response: Response) -> None:
    from holdfast.control.own_stacks import stacks_of_this_process

    response.set_content(stacks_of_this_process(), "text/plain")


def _pyspy_dump(request: Request, response: Response) -> None:
    import os

    from holdfast.control.py_spy import CannotSpy, spy

    try:
        stacks = spy(os.getpid(), native=request.has_param("native"), pausing=False)
    except CannotSpy as problem:
        response.set_status(500)
        response.set_content(f"{problem}\n", "text/plain")
    else:
        response.set_content(stacks, "text/plain")


register_handler("ping", _ping)
register_handler("dump_traceback", _dump_traceback)
register_handler("pyspy_dump", _pyspy_dump)
