"""`Std`: a choice of a worker's output streams, with TorchElastic's names."""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING

from holdfast.processes.logs.specs import by_rank, parse_streams

if TYPE_CHECKING:
    from collections.abc import Mapping


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
        return as_std(parse_streams(vm))


def as_std(chosen: int | Mapping[int, int]) -> Std | dict[int, Std]:
    """Return a choice of streams as `Std`, for all local ranks or by local rank."""
    if isinstance(chosen, int):
        return Std(chosen)
    return {rank: Std(choice) for rank, choice in chosen.items()}


def to_map(val_or_map: Std | dict[int, Std], local_world_size: int) -> dict[int, Std]:
    """Return the choice for each local rank from 0 to `local_world_size - 1`.

    Ranks that the map does not have get `Std.NONE`; higher ranks are dropped.
    """
    return {rank: Std(choice) for rank, choice in by_rank(val_or_map, local_world_size).items()}
