"""What can go wrong when nodes meet, under TorchElastic's names.

::

    HoldfastError
    └── RendezvousError                   nodes could not meet                       exit 78
        ├── RendezvousClosedError         the job is over, nobody can join it
        ├── RendezvousTimeoutError        not in the time there was
        ├── RendezvousConnectionError     coordinator, etcd or backend cannot be reached
        ├── RendezvousStateError          the stored state of the job cannot be read
        └── RendezvousGracefulExitError   a standby is no longer needed              exit 0

They derive from `HoldfastError`, so the command prints one line and ends with their exit code: for
most that of an environment problem, since the network, a shared file system or another node is at
fault. TorchElastic raises some of these without a message; here each has one, and one raised bare by
a handler of the user's gets the default of its class.
"""

from __future__ import annotations

from holdfast.errors import EnvironmentProblem, HoldfastError


class RendezvousError(HoldfastError):
    """The nodes of a job could not meet."""

    exit_code = EnvironmentProblem.exit_code
    default_message = "the nodes of the job could not meet"

    def __init__(self, message: str = "", *, hint: str = "", exit_code: int | None = None) -> None:
        super().__init__(message or self.default_message, hint=hint, exit_code=exit_code)


class RendezvousClosedError(RendezvousError):
    """The job is over for all nodes; there is nothing left to join."""

    default_message = "the job is over and cannot be joined"


class RendezvousTimeoutError(RendezvousError):
    """Joining, closing or an answer of the backend took too long."""

    default_message = "the nodes of the job did not meet in time"


class RendezvousConnectionError(RendezvousError):
    """The coordinator, etcd or backend cannot be reached or does not answer."""

    default_message = "the coordinator or backend cannot be reached"


class RendezvousStateError(RendezvousError):
    """The stored state of the job cannot be read: written by something else, or damaged."""

    default_message = "the stored state of the job cannot be read"


class RendezvousGracefulExitError(RendezvousError):
    """The job is over and a standby is no longer needed. Nothing failed: the agent ends well."""

    exit_code = 0
    default_message = "the job is over; this node was a standby and is no longer needed"
