"""Errors about the data that the other side of a connection sent.

::

    WireError                 one line for the user
    ├── FrameTooLarge         a frame exceeds the limit
    ├── EmptyFrame            a frame has no body
    ├── BadMessage            the body of a frame is not a valid message
    ├── BrokenSeal            a frame was changed, repeated or dropped in transit
    ├── NotOurProtocol        the other side speaks another protocol: TLS, HTTP, ...
    ├── HandshakeRefused      one side rejects the other: token, version, ...
    └── ProofRefused          an agent and a workers' store belong to different generations

The peer is at fault, or the two sides are configured differently. The owner of the connection closes it and
reports the error. No error ever contains a token.
"""

from __future__ import annotations


class WireError(Exception):
    """Base of all errors about the other side of a connection. `str(error)` is one line."""


class FrameTooLarge(WireError):
    """A frame exceeds the limit; known from its header, before its body arrives."""

    def __init__(self, frame_bytes: int, frame_bytes_max: int) -> None:
        super().__init__(f"a frame of {frame_bytes} bytes exceeds the limit of {frame_bytes_max}")
        self.frame_bytes = frame_bytes
        self.frame_bytes_max = frame_bytes_max


class EmptyFrame(WireError):
    """A frame announces an empty body."""

    def __init__(self) -> None:
        super().__init__("a frame without a body")


class BadMessage(WireError):
    """A frame's body is not a message, or a value in it is out of range."""


class BrokenSeal(WireError):
    """A received frame is not the next frame that the other side sent."""

    def __init__(self) -> None:
        super().__init__(
            "a frame was changed, repeated or dropped in transit: a program in the middle interferes"
        )


class NotOurProtocol(WireError):
    """The first bytes belong to another protocol. `why` names the protocol and the setting to change."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class HandshakeRefused(WireError):
    """One side rejects the other.

    `permanent` is false if retrying may help. The owner of the connection sends `reply`, if it can, before
    it closes, so that the other side's user sees the reason too. `is_probe` means that the other side only
    checks regularly which coordinator listens here; this causes no warning.
    """

    def __init__(
        self, why: str, *, permanent: bool = True, reply: bytes = b"", is_probe: bool = False
    ) -> None:
        super().__init__(why)
        self.why = why
        self.permanent = permanent
        self.reply = reply
        self.is_probe = is_probe


class ProofRefused(WireError):
    """The other side did not prove that it belongs to the same generation."""
