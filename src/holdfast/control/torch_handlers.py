"""The handlers that torch has, in a worker that has imported it; torch is never imported for them.

Torch keeps a table of its own: its flight recorder is there, its profiler, and whatever the
person's program registered with torch. They are called with requests and responses of torch's
kind, which can be derived from, so that nothing of torch's own server is needed.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from holdfast.control.handlers import Handler, Request, Response

MODULE = "torch._C._distributed_c10d"


def torch_handler_names() -> list[str]:
    """Return what torch can be asked for in this process; nothing where it is not imported."""
    try:
        return [str(name) for name in sys.modules[MODULE]._get_handler_names()]
    except (KeyError, AttributeError):
        return []  # No torch, or one that has no such table.


def torch_handler(name: str) -> Handler | None:
    """Return one of torch's handlers, to be called like those of our own."""
    if name not in torch_handler_names():
        return None
    torch: Any = sys.modules[MODULE]

    class TorchRequest(torch._Request):  # type: ignore[misc]
        def __init__(self, request: Request) -> None:
            super().__init__()
            self._request = request

        def body(self) -> str:
            return self._request.body()

        def get_param(self, key: str) -> str:
            return self._request.get_param(key)

    class TorchResponse(torch._Response):  # type: ignore[misc]
        def __init__(self, response: Response) -> None:
            super().__init__()
            self._response = response

        def set_content(self, content: str | bytes, content_type: str) -> None:
            self._response.set_content(content, content_type)

        def set_status(self, status: int) -> None:
            self._response.set_status(status)

    handler = torch._get_handler(name)

    def call(request: Request, response: Response) -> None:
        handler(TorchRequest(request), TorchResponse(response))

    return call
