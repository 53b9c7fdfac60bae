"""What a session at etcd wants done, and what it tells the node: the effects of `EtcdSession`."""

from __future__ import annotations

import msgspec

from holdfast.core.etcd_asking import Doing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from holdfast.core.news import Ack, View


class Opened(msgspec.Struct, frozen=True):
    """The session is there."""


class Closed(msgspec.Struct, frozen=True):
    """The session is gone, or could not be opened."""

    why: str
    permanent: bool = False
    """Trying again does not help."""


class Heard(msgspec.Struct, frozen=True):
    """Something for the node: what it is told, or that what it said is stored."""

    message: View | Ack


class Left(msgspec.Struct, frozen=True):
    """Nothing of this node is left in etcd."""


Effect = Doing | Opened | Closed | Heard | Left
