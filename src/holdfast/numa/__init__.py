"""CPU binding of workers to CPUs near their GPUs, according to `AffinityMode` and `NumaOptions`.

The names are imported on first use: every agent needs `visible_devices`, but few need `dataclasses`, which takes a
megabyte.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.numa.binding import AffinityMode, NumaOptions

__all__ = ["AffinityMode", "NumaOptions"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.numa' has no attribute {name!r}")
    from holdfast.numa import binding

    return getattr(binding, name)
