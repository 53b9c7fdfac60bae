"""`Std`: a choice of a worker's output streams, with TorchElastic's names.

Its text form is one digit for all workers (`3`), or a list of `local_rank:digit` (`0:1,12:2`). A rank may have
several digits.
"""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING

from holdfast.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

# A local rank with more digits than this is a typing error.
RANK_DIGITS_MAX = 6


class Std(IntFlag):
    """None, one or both of the standard output streams of a worker."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = OUT | ERR

    @classmethod
    def from_str(cls, vm: str) -> Std | dict[int, Std]:
        """Parse `vm`: one choice for all local ranks, or a map of local rank to choice.

        In a map the last entry for a rank counts; a rank without an entry has `NONE`.
        Raises `UsageError` for any other text; blanks are not allowed.
        """
        text = vm.removesuffix("\n")
        if _is_choice(text):
            return cls(int(text))
        chosen: dict[int, Std] = {}
        for entry in text.split(","):
            rank, colon, choice = entry.partition(":")
            if not (colon and _is_rank(rank) and _is_choice(choice)):
                raise UsageError(
                    f"{vm!r} is not a valid choice of output streams",
                    hint="use 0 (none), 1 (stdout), 2 (stderr) or 3 (both) for all workers, "
                    "or a list by local rank such as 0:1,1:2",
                )
            chosen[int(rank)] = cls(int(choice))
        return chosen


def _is_choice(text: str) -> bool:
    return text in ("0", "1", "2", "3")


def _is_rank(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= RANK_DIGITS_MAX


def to_map(val_or_map: int | Mapping[int, int], local_world_size: int) -> dict[int, Std]:
    """Return the choice for each local rank from 0 to `local_world_size - 1`; PyTorch's `Std` is accepted too.

    Ranks that the map does not have get `Std.NONE`; higher ranks are dropped.
    """
    if isinstance(val_or_map, int):
        return dict.fromkeys(range(local_world_size), Std(int(val_or_map)))
    return {rank: Std(int(val_or_map.get(rank, 0))) for rank in range(local_world_size)}
