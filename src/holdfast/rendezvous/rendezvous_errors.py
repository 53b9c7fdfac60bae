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

from holdfast.errors import EnvironmentProblem, HoldfastError


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
