"""The handlers of requests to a worker's control socket, by name.

A handler gets a request and a response object, as torch's handlers do. It runs in a thread of the
server, and returns nothing. Built-in handlers:

==================  ===========================================================================
`ping`              responds with `pong`
`dump_traceback`    the stacks of all Python threads
`pyspy_dump`        the same, read by py-spy from outside; `?native` adds C frames
==================  ===========================================================================

If a worker has imported torch, torch's own handlers are available too (`torch_handlers`).
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING

from holdfast.elastic._impl import torch_handlers
from holdfast.errors import UsageError
from holdfast.processes.stacks import PySpyFailed, run_py_spy

if TYPE_CHECKING:
    from collections.abc import Callable

    Handler = Callable[["Request", "Response"], object]


FRAMES_MAX = 200
"""The innermost frames of one thread; an endless recursion is cut."""
THREADS_MAX = 500


def stacks_of_this_process() -> str:
    """Return the stacks of all threads, the main one first, the most recent call last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    numbers = sorted(frames, key=lambda ident: (ident != main, ident))
    parts = []
    for ident in numbers[:THREADS_MAX]:
        frame = frames[ident]
        lines = traceback.StackSummary.extract(traceback.walk_stack(frame), limit=FRAMES_MAX)
        lines.reverse()
        head = f'Thread {ident:#x} "{names.get(ident, "?")}" (most recent call last):\n'
        parts.append(head + "".join(lines.format()))
    if len(numbers) > THREADS_MAX:
        parts.append(f"... and {len(numbers) - THREADS_MAX} more threads\n")
    return "\n".join(parts) or "no other thread runs Python\n"


HANDLERS_MAX = 256
NAME = re.compile(r"[A-Za-z0-9_.\-]{1,100}")


class Request:
    """A client's request."""

    def __init__(
        self, body: bytes = b"", params: dict[str, str] | None = None, query: str = ""
    ) -> None:
        self.content, self.query = body, query
        self._params = params or {}

    def body(self) -> str:
        """Return the body as text."""
        return self.content.decode(errors="replace")

    def get_param(self, key: str) -> str:
        """Return the first parameter of that name in the query; empty if there is none."""
        return self._params.get(key, "")

    def has_param(self, key: str) -> bool:
        """Whether the query has a parameter, with or without a value."""
        return key in self._params


class Response:
    """The response to a client; by default an empty body with status 200."""

    def __init__(self) -> None:
        self.status = 200
        self.content = b""
        self.content_type = "text/plain"

    def set_content(self, content: str | bytes, content_type: str) -> None:
        """Set the body and its type."""
        self.content = content.encode() if isinstance(content, str) else bytes(content)
        if any(not " " <= one <= "~" for one in content_type):
            raise ValueError(f"{content_type!r} is not a content type")
        self.content_type = content_type

    def set_status(self, status: int) -> None:
        """Set the HTTP status, 200 by default."""
        if not 200 <= status <= 599:
            raise ValueError(f"{status} is not a status from 200 to 599")
        self.status = status


_handlers: dict[str, Handler] = {}
_lock = threading.Lock()


def register_handler(name: str, handler: Handler) -> None:
    """Register the handler of requests for `name`. A name can be registered once."""
    if not NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is not a handler name; accepted: letters, digits, '_', '.' and '-'"
        )
    with _lock:
        if name in _handlers:
            raise UsageError(f"handler {name!r} is already registered")
        if len(_handlers) >= HANDLERS_MAX:
            raise UsageError(f"there are {HANDLERS_MAX} handlers already")
        _handlers[name] = handler


def handler_names() -> list[str]:
    """Return the names of all handlers in this process."""

    with _lock:
        own = [*_handlers]
    return sorted({*own, *torch_handlers.torch_handler_names()})


def find_handler(name: str) -> Handler | None:
    """Return the handler of a name, ours or torch's; None if there is none."""

    with _lock:
        own = _handlers.get(name)
    if own is None and name in torch_handlers.torch_handler_names():
        return partial(torch_handlers.forward, name)
    return own


def _ping(_request: Request, response: Response) -> None:
    response.set_content("pong", "text/plain")


def _dump_traceback(_request: Request, response: Response) -> None:

    response.set_content(stacks_of_this_process(), "text/plain")


def _pyspy_dump(request: Request, response: Response) -> None:
    try:
        stacks = run_py_spy(os.getpid(), native=request.has_param("native"), pausing=False)
    except PySpyFailed as problem:
        response.set_status(500)
        response.set_content(f"{problem}\n", "text/plain")
    else:
        response.set_content(stacks, "text/plain")


register_handler("ping", _ping)
register_handler("dump_traceback", _dump_traceback)
register_handler("pyspy_dump", _pyspy_dump)
