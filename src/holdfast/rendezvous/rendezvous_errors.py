"""The errors of a rendezvous, under TorchElastic's names.

::

    HoldfastError
    └── RendezvousError                   the nodes could not form a round           exit 78
        ├── RendezvousClosedError         the job has ended and cannot be joined
        ├── RendezvousTimeoutError        timed out
        ├── RendezvousConnectionError     coordinator, etcd or backend cannot be reached
        ├── RendezvousStateError          the stored state of the job cannot be read
        └── RendezvousGracefulExitError   a standby is no longer needed              exit 0

They derive from `HoldfastError`, so the command prints one line and exits with their exit code. Most have the exit
code of an environment problem: the network, a shared file system or another node is at fault. If a user's handler
raises one without a message, the error has the default message of its class.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast import console, plugins
from holdfast.errors import EnvironmentProblem, HoldfastError

if TYPE_CHECKING:
    from collections.abc import Iterator


class RendezvousError(HoldfastError):
    """The nodes of a job could not form a round."""

    exit_code = EnvironmentProblem.exit_code
    default_message = "the nodes of the job could not form a round"

    def __init__(self, message: str = "", *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message or self.default_message, hint=hint, exit_code=exit_code)


class RendezvousClosedError(RendezvousError):
    """The job has ended for all nodes and cannot be joined."""

    default_message = "the job is over and cannot be joined"


class RendezvousTimeoutError(RendezvousError):
    """Joining, closing or a call of the backend timed out."""

    default_message = "the nodes of the job did not form a round in time"


class RendezvousConnectionError(RendezvousError):
    """The coordinator, etcd or backend is unreachable or does not respond."""

    default_message = "the coordinator or backend cannot be reached"


class RendezvousStateError(RendezvousError):
    """The stored state of the job cannot be read: it is damaged, or another program wrote it."""

    default_message = "the stored state of the job cannot be read"


class RendezvousGracefulExitError(RendezvousError):
    """The job has ended and a standby is no longer needed. Nothing failed: the agent exits with 0."""

    exit_code = 0
    default_message = "the job is over; this node was a standby and is no longer needed"


KINDS = {
    kind.__name__: kind
    for kind in (
        RendezvousError,
        RendezvousClosedError,
        RendezvousTimeoutError,
        RendezvousConnectionError,
        RendezvousStateError,
        RendezvousGracefulExitError,
    )
}
TORCH = "torch.distributed.elastic.rendezvous.api"
STORES = ("holdfast.store.store_errors", "torch.distributed")
"""The modules with the errors of stores, `DistError` and its subclasses."""


@contextmanager
def naming(source: object) -> Iterator[None]:
    """If an error of a handler of others leaves this block, raise it as ours too, with its source and its causes.

    A handler that was written for TorchElastic raises torch's rendezvous errors, and its store raises a store's errors.
    Their callers may catch either type. `source` is a description, or the handler.
    """
    try:
        yield
    except Exception as problem:
        kind = _kind_of(problem)
        if kind is None:
            raise
        who = source if isinstance(source, str) else plugins.owner_of(source)
        text, cause = str(problem) or kind.default_message, problem.__cause__
        while cause is not None:
            text, cause = f"{text}: {console.describe(cause)}", cause.__cause__
        raise kind(f"{who}: {text}") from problem


def _kind_of(problem: Exception) -> type[RendezvousError] | None:
    """Return the type for an error that is not ours yet: ours of the same meaning, and its own."""
    if isinstance(problem, RendezvousError):
        return None
    for kind in type(problem).__mro__:
        if kind.__module__ == TORCH and kind.__name__ in KINDS:
            return type(kind.__name__, (KINDS[kind.__name__], kind), {})
        if kind.__module__ in STORES and kind.__name__ == "DistError":
            return type("RendezvousConnectionError", (RendezvousConnectionError, kind), {})
    return None
