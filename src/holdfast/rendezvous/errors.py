"""What can go wrong when nodes meet, under TorchElastic's names.

::

    HoldfastError
    └── RendezvousError                   nodes could not meet                       exit 78
        ├── RendezvousClosedError         the job is over, nobody can join it
        ├── RendezvousTimeoutError        not in the time there was
        ├── RendezvousConnectionError     the place where nodes meet cannot be reached
        ├── RendezvousStateError          what is kept there cannot be read
        └── RendezvousGracefulExitError   a standby is no longer needed              exit 0

They are `HoldfastError` too, so that the command prints one line and ends with their exit code.
That of most is the environment's: the network, a shared file system or another node is at fault,
not this command. TorchElastic's handlers raise some of these without a word; here each has a
message, and one raised bare by a handler of the user's gets the default of its class.
"""

from __future__ import annotations

import time

from holdfast.errors import EnvironmentProblem, HoldfastError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.core.coordinated_supervision import CoordinatorLost
    from holdfast.core.protocol import View


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
    """Joining, closing or a heartbeat took longer than it may."""

    default_message = "the nodes of the job did not meet in time"


class RendezvousConnectionError(RendezvousError):
    """The store, file or coordinator at which nodes meet cannot be reached or does not answer."""

    default_message = "the place where nodes meet cannot be reached"


class RendezvousStateError(RendezvousError):
    """What is stored about the job cannot be read: written by something else, or damaged."""

    default_message = "what is stored about the job cannot be read"


class RendezvousGracefulExitError(RendezvousError):
    """A standby learns that the job is over. Nothing failed: the agent ends well."""

    exit_code = 0
    default_message = "the job is over; this node was a standby and is no longer needed"


# What a person reads when a node waited in vain: for a place to meet, or for enough nodes.
#
# One line each, the same wherever nodes meet. Nothing here decides that it was in vain.


def unreachable(what: str, gave_up: CoordinatorLost) -> str:
    """Return what could not be reached, since when and why."""
    since = time.strftime("%H:%M:%S", time.localtime(time.time() - gave_up.away_s))
    why = f": {gave_up.why}" if gave_up.why else ""
    return f"{what} could not be reached since {since} ({gave_up.away_s:.0f} s){why}"


def too_few(view: View | None, problem: str, where: str, join_timeout_s: float) -> str:
    """Return who was waited for, or what was in the way if this node was told nothing at all."""
    limit = f"{join_timeout_s:g} s"
    if view is None:
        return f"{problem} (join_timeout: {limit})"
    return f"{view.present} of {view.needed} nodes came to {where} within {limit} (join_timeout)"
