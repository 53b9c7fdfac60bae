"""CPU binding: workers on CPUs near their GPUs, as `AffinityMode` and `NumaOptions` say."""

from holdfast.numa.binding import AffinityMode, NumaOptions

__all__ = ["AffinityMode", "NumaOptions"]
