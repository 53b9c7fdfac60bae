"""`JobSettings`: the settings that all nodes of a job share.

Each setting is declared here, once: its type, limits, key in `--rdzv-conf` and description. The declaration
generates the key in `rendezvous.rdzv_conf`, the meaning of the flag, the tables of the documentation, the
validation of received values, and the check that all nodes have equal settings. A node that joins its job
builds one `JobSettings`, which passes unchanged to `core.rounds`.

To add a setting, declare it, use it and document it. A setting with a flag also needs a row in the table of
flags, `launcher.config`.
"""

from enum import Enum
from typing import Annotated, Any, NamedTuple, get_args

from holdfast.core.limits import COUNTER_MAX, NODES_MAX, SETTLE_S_MAX, check_node_range
from holdfast.core.ranks import RankOrder
from holdfast.core.values import Value


class StoreAccess(Enum):
    """Which clients may connect to the workers' store, besides this user on the first node's host."""

    HOSTS = "hosts"
    """Clients of this user on hosts that the job's agents attest."""
    OPEN = "open"
    """Every client."""
    PRIVATE = "private"
    """Only the job's agents, which forward the requests of their own workers."""


class Setting(Value):
    """The declaration of one setting."""

    key: str = ""
    """The key in `--rdzv-conf`; empty if there is none."""
    meaning: str = ""
    least: float = 0
    most: float = COUNTER_MAX
    flag: str = ""
    """The flag of `holdfast run`; empty if there is none."""
    depends: bool = False
    """Whether the default depends on the job."""
    agreed: bool = True
    """Whether a node with a different value is refused."""

    @property
    def name(self) -> str:
        """The name that users know: the flag, or else the key."""
        return self.flag or self.key


class JobSettings(NamedTuple):
    """The settings that all nodes of a job share; the first node that joins determines them."""

    min_nodes: Annotated[int, Setting(flag="--nnodes", least=1, most=NODES_MAX)]
    max_nodes: Annotated[int, Setting(flag="--nnodes", least=1, most=NODES_MAX)]
    max_restarts: Annotated[
        int,
        Setting(
            meaning="restart all workers up to N times when one fails",
            least=-COUNTER_MAX,  # A negative number means 0.
            flag="--max-restarts",
        ),
    ] = 0
    spares: Annotated[
        int,
        Setting(
            "spares",
            "number of nodes to keep as standbys, while at least MIN remain to run",
            most=NODES_MAX,
            flag="--spares",
        ),
    ] = 0
    settle_s: Annotated[
        float,
        Setting(
            "last_call_timeout",
            "how long a round with enough nodes waits for more, counted from the last node that joined",
            most=SETTLE_S_MAX,
            agreed=False,
        ),
    ] = 1.0
    order: Annotated[
        RankOrder,
        Setting(
            "rank_order", "how nodes are ranked: as they joined, or grouped by host or by label"
        ),
    ] = RankOrder.STABLE
    store: Annotated[
        StoreAccess,
        Setting(
            "store",
            "who can connect to the workers' store: this user on hosts of the job, any client (the default for one "
            "node), or only agents, which forward their workers' requests",
            depends=True,
        ),
    ] = StoreAccess.HOSTS


def _declared() -> dict[str, tuple[type, Setting]]:
    hints = JobSettings.__annotations__
    return {name: get_args(hint)[:2] for name, hint in hints.items()}


_DECLARED = _declared()
TYPES: dict[str, type] = {name: kind for name, (kind, _) in _DECLARED.items()}
SETTINGS: dict[str, Setting] = {name: setting for name, (_, setting) in _DECLARED.items()}
DEFAULTS: dict[str, Any] = JobSettings._field_defaults
_LIMITS = [
    (name, setting.least, setting.most)
    for name, setting in SETTINGS.items()
    if not issubclass(TYPES[name], Enum)
]


def check_settings(settings: JobSettings) -> None:
    """Raise `ValueError` if the settings are invalid."""
    for name, least, most in _LIMITS:
        value = getattr(settings, name)
        if not least <= value <= most:
            raise ValueError(f"{name} {value} is not between {least} and {most}")
    check_node_range(settings.min_nodes, settings.max_nodes)


def differences(mine: JobSettings, theirs: JobSettings) -> list[tuple[str, str, str]]:
    """Return the settings in which two nodes differ although they must agree: name and both values."""
    shown: dict[str, tuple[list[str], list[str]]] = {}
    for (name, setting), one, other in zip(SETTINGS.items(), mine, theirs, strict=True):
        if setting.agreed:
            left, right = shown.setdefault(setting.name or name, ([], []))
            left.append(_text(one))
            right.append(_text(other))
    return [
        (name, ":".join(left), ":".join(right))
        for name, (left, right) in shown.items()
        if left != right
    ]


def _text(value: object) -> str:
    return str(value.value if isinstance(value, Enum) else value)
