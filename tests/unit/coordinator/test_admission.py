from __future__ import annotations

from typing import TYPE_CHECKING, Any

from serving import run, serving, soon, status

from holdfast.coordinator import admission
from holdfast.core.protocol import View

if TYPE_CHECKING:
    import socket

    import pytest


def test_a_handshake_has_a_time_limit() -> None:
    async def work() -> None:
        async with serving(handshake_s=0.02) as served:
            with served.silent():
                await soon(lambda: bool(served.complaints))
                assert "no handshake within 0.02 s" in served.complaints[0]
                await soon(lambda: served.server.connections == 0)

    run(work())


def test_the_oldest_unfinished_handshakes_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "HALF_OPEN_MIN_S", 0.02)

    async def work() -> None:
        async with serving(half_open_max=10) as served:
            silent = [served.silent() for _ in range(30)]
            try:
                talk = await served.link()  # It has to wait in the queue, and is served.
                talk.say(status("a"))
                assert isinstance(await talk.hear(), View)
                assert served.server.connections <= 11
            finally:
                for one in silent:
                    one.close()

    run(work())


def test_without_descriptors_it_waits_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "NO_ROOM_S", 0.01)

    class Full:
        """A listening socket that has no descriptor for the first two who come."""

        def __init__(self, whole: socket.socket) -> None:
            self.whole = whole
            self.left = 2

        def accept(self) -> Any:
            if self.left:
                self.left -= 1
                raise OSError(24, "Too many open files")
            return self.whole.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.whole, name)

    async def work() -> None:
        async with serving() as served:
            acceptor = served.server._acceptor
            monkeypatch.setattr(acceptor, "_listener", Full(acceptor._listener))
            await served.link()
            assert "Too many open files" in served.complaints[0]

    run(work())
