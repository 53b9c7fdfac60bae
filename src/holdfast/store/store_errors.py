"""The errors of a store, under PyTorch's names.

```text
RuntimeError
└── DistError
    ├── DistNetworkError         the store is unreachable, or the connection was lost
    └── DistStoreError           the store was reached, but the operation failed
        ├── StoreTimeoutError    a wait timed out (also a TimeoutError)
        │   └── SilentServerError    nobody answers at the other end (also a DistNetworkError)
        └── QueueEmptyError      a queue was empty
```
"""

from __future__ import annotations


class DistError(RuntimeError):
    """Base of all errors of stores."""


class DistNetworkError(DistError):
    """The store is unreachable, or the connection to it was lost."""


class DistStoreError(DistError):
    """The store was reached, but the operation failed."""


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A wait timed out."""


class SilentServerError(DistNetworkError, StoreTimeoutError):
    """Something accepted the connection and never said a word; torch has it as a network error."""


class QueueEmptyError(DistStoreError):
    """A queue was empty."""
