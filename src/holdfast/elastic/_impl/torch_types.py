"""Errors that are also torch's if torch is loaded, for code that catches torch's."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from holdfast.store.store_errors import DistError

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def as_torch_store_errors() -> Iterator[None]:
    """If a store's error leaves this block, raise it with torch's type of the same name as well."""
    try:
        yield
    except DistError as problem:
        torch = sys.modules.get("torch.distributed")
        names = [kind.__name__ for kind in type(problem).__mro__ if issubclass(kind, DistError)]
        theirs = next((getattr(torch, name) for name in names if hasattr(torch, name)), None)
        if theirs is None or isinstance(problem, theirs):
            raise
        kind = type(type(problem).__name__, (type(problem), theirs), {})
        raise kind(*problem.args) from problem
