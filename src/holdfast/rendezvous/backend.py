"""`RendezvousBackend`: a place for one value that can be compared and set. Derive your own from it.

The one thing to know: the token is the fence. A write names the state it was made from, and is
refused if another node wrote since; so nodes that never talk to each other agree on one history.
What the state says is nobody's business here; `dynamic` has the handler that works on any of these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

Token = Any
"""Names one state that was stored; only the backend that gave it knows what it is."""

STATE_BYTES_MAX = 4 * 1024 * 1024
"""A state larger than this is not read: about ten thousand nodes, and what TCPStore can hold."""


class RendezvousBackend(ABC):
    """Keeps the state of one job where all of its nodes can reach it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the backend, as it is asked for by `--rdzv-backend`."""

    @abstractmethod
    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """

    @abstractmethod
    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without one, be the first to store any.

        Returns what is stored after the call, its token, and whether that is the new state: if
        another node was faster it is the other's. None if nothing is stored at all.

        Raises `RendezvousConnectionError` or `RendezvousStateError`.
        """
