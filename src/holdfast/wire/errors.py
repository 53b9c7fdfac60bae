"""What can be wrong with what the other side sent, or with what it answered.

::

    WireError                 one line for the user
    ├── FrameTooLarge         a frame is announced that is longer than allowed
    ├── EmptyFrame            a frame without a body: Holdfast sends none
    ├── BadMessage            the body of a frame is not a message, or has absurd values in it
    ├── BrokenSeal            a frame was changed, repeated or left out on its way
    ├── NotOurProtocol        the other side speaks something else: TLS, HTTP, ...
    ├── HandshakeRefused      one side does not accept the other: token, version, ...
    └── ProofRefused          an agent and a workers' store are not of one generation of a job

They are the peer's fault, or come of two sides that are configured differently. The owner of the
connection closes it and decides whom to tell. None of them ever holds a token.
"""

from __future__ import annotations


class WireError(Exception):
    """Base of all errors about the other side of a connection. `str(error)` is one line."""


class FrameTooLarge(WireError):
    """A frame is longer than is allowed; known from its length, before its body is there."""

    def __init__(self, frame_bytes: int, frame_bytes_max: int) -> None:
        super().__init__(f"a frame of {frame_bytes} bytes, where {frame_bytes_max} are allowed")
        self.frame_bytes = frame_bytes
        self.frame_bytes_max = frame_bytes_max


class EmptyFrame(WireError):
    """A frame announces a body of no bytes."""

    def __init__(self) -> None:
        super().__init__("a frame without a body")


class BadMessage(WireError):
    """A frame's body is not a message, or a value in it is out of its range."""


class BrokenSeal(WireError):
    """A frame is not the one that the other side sent next."""

    def __init__(self) -> None:
        super().__init__(
            "a frame was changed, repeated or left out on its way: somebody is in between"
        )


class NotOurProtocol(WireError):
    """The first bytes are not Holdfast's. `why` names what they look like and what to do."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class HandshakeRefused(WireError):
    """The two sides do not fit together.

    `permanent` is false where trying again may help. `reply` is what the owner of the connection
    sends, if it can, before it closes: the other side's user then learns the reason too. `is_probe`
    means that the other side only checks who listens, regularly: that is not worth a warning.
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
    """The other side did not prove that it is of the same generation of a job."""
