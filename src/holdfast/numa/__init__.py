"""CPU binding of workers to CPUs near their GPUs, according to `AffinityMode` and `NumaOptions`.

The names are looked up on first use, because a job's start postpones the import of `binding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.numa import binding

if TYPE_CHECKING:
    from holdfast.numa.binding import AffinityMode, NumaOptions

__all__ = ["AffinityMode", "NumaOptions"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.numa' has no attribute {name!r}")
    return getattr(binding, name)
