"""Workers on CPUs near their GPUs: `AffinityMode` and `NumaOptions` say how."""

from holdfast.numa.binding import AffinityMode, NumaOptions

__all__ = ["AffinityMode", "NumaOptions"]
