"""The errors of a store, under PyTorch's names.

```text
RuntimeError
└── DistError
    ├── DistNetworkError         the store is unreachable, or the connection was lost
    └── DistStoreError           the store was reached, but the operation failed
        ├── StoreTimeoutError    a wait timed out (also a TimeoutError)
        │   └── SilentServerError    the server never responds (also a DistNetworkError)
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
    """The server accepted the connection and never responded; torch reports a network error."""


class QueueEmptyError(DistStoreError):
    """A queue was empty."""
