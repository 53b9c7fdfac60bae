"""Which of a worker's two output streams something applies to: `Std`, and its text form.

The one thing to know: the text form is one digit for all workers (`3`), or a list of
`local_rank:digit` (`0:1,12:2`), with any number of digits in the rank.
It does not open or move any stream; `holdfast.processes.logs` turns a choice into paths.

Beside `to_map`, which makes a map by local rank whole, stands `require_every_rank`, which checks
any such map that a caller gives.
"""

from __future__ import annotations

from enum import IntFlag

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# A local rank of more digits than this is a typing error, not a machine.
RANK_DIGITS_MAX = 6


class Std(IntFlag):
    """None, one or both of the standard output streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Read `vm`: one choice for all local ranks, or a map of local rank to choice.

        In a map the last entry for a rank counts, and a rank that is not named has `NONE`.
        Raises `UsageError` for any other text; blanks are not allowed.
        """
        text = vm.removesuffix("\n")
        if _is_choice(text):
            return cls(int(text))
        chosen: dict[int, Std] = {}
        for entry in text.split(","):
            rank, colon, choice = entry.partition(":")
            if not (colon and _is_rank(rank) and _is_choice(choice)):
                from holdfast.errors import UsageError

                raise UsageError(
                    f"{vm!r} does not say which output streams are meant",
                    hint="give 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, "
                    "or a list by local rank such as 0:1,1:2",
                )
            chosen[int(rank)] = cls(int(choice))
        return chosen


def _is_choice(text: str) -> bool:
    return text in ("0", "1", "2", "3")


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= RANK_DIGITS_MAX


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """Spread a choice over the local ranks `0 .. local_world_size - 1`.

    Ranks a map does not name get `Std.NONE`; ranks beyond the world are dropped.
    """
    # Tested as plain integers, so that PyTorch's own `Std` is understood as well.
    if isinstance(val_or_map, int):
        return dict.fromkeys(range(local_world_size), Std(int(val_or_map)))
    return {rank: Std(int(val_or_map.get(rank, 0))) for rank in range(local_world_size)}


def require_every_rank(mapping: Mapping[int, object], nprocs: int, what: str) -> None:
    """Raise unless the map has exactly the local ranks of this node as keys."""
    if set(mapping) != set(range(nprocs)):
        raise RuntimeError(
            f"{what}: expected one entry for each local rank {list(range(nprocs))}, "
            f"got {sorted(mapping)}"
        )
