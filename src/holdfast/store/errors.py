"""What goes wrong with a store, under the names that PyTorch has for it.

```text
RuntimeError
└── DistError
    ├── DistNetworkError         the store cannot be reached, or the connection was lost
    └── DistStoreError           the store was reached, and could not do it
        ├── StoreTimeoutError    time was over before a key came (also a TimeoutError)
        └── QueueEmptyError      a queue had nothing to give
```
"""

from __future__ import annotations


class DistError(RuntimeError):
    """Something about what processes share went wrong."""


class DistNetworkError(DistError):
    """The store cannot be reached, or the connection to it was lost."""


class DistStoreError(DistError):
    """The store was reached, and could not do what it was asked for."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """Time was over before what was waited for came."""


class QueueEmptyError(DistStoreError):
    """A queue had nothing to give."""
