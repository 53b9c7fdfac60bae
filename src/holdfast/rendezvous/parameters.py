"""`RendezvousParameters`: what a handler is made from, with values read as what they should be.

Values may come from a command line, where all are text, or from Python. This module knows no key;
`config` has the table of those that Holdfast's own backends understand.
"""

from __future__ import annotations

import math
from typing import Any

from holdfast.errors import UsageError

SECONDS_MAX = 10 * 365 * 24 * 3600
"""Longer than any job; a time beyond it is a slip, and would overflow a deadline somewhere."""

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n"})


class RendezvousParameters:
    """The job, the place to meet, and the settings of the backend as they were given."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise UsageError("--rdzv-backend: the name of the rendezvous backend is empty")
        if min_nodes < 1:
            raise UsageError(f"--nnodes: {min_nodes} nodes are too few; accepted: from 1")
        if max_nodes < min_nodes:
            raise UsageError(
                f"--nnodes: {min_nodes}:{max_nodes}: the largest number of nodes is below the least"
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a setting as it was given."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a setting that is on or off: a bool, 1 or 0, or a word for one of them."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return value == 1
        if isinstance(value, str):
            if value.lower() in TRUE_WORDS:
                return True
            if value.lower() in FALSE_WORDS:
                return False
        raise self._refusal(key, value, "is neither on nor off", "true, yes, 1, false, no, 0")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """Return a setting that is a whole number."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refusal(key, value, "is not a whole number", "digits, such as 5") from None

    def get_as_seconds(
        self, key: str, default: float | None = None, *, zero: bool = False
    ) -> float | None:
        """Return a setting that is a time: seconds above 0, or from 0 where `zero` says so."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            seconds = float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if isinstance(value, bool) or not (0 < seconds <= SECONDS_MAX or (zero and seconds == 0)):
            accepted = f"seconds {'from' if zero else 'above'} 0, such as 30 or 2.5"
            raise self._refusal(key, value, "is not a time", accepted)
        return seconds

    def _refusal(self, key: str, value: object, what: str, accepted: str) -> UsageError:
        return UsageError(f"--rdzv-conf: {key}: {value!r} {what}; accepted: {accepted}")
