"""Several epochs as one iterator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class CyclingIterator(Iterator[T], Generic[T]):
    """The elements of `generator_fn(epoch)` for each epoch from `start_epoch` up to `n - 1`.

    The first epoch is always gone through, also one that is beyond `n`. An epoch's iterator is made
    when the one before has ended, the first at once.
    """

    def __init__(
        self, n: int, generator_fn: Callable[[int], Iterator[T]], start_epoch: int = 0
    ) -> None:
        self._epochs_left = iter(range(start_epoch + 1, n))
        self._make = generator_fn
        self._elements = generator_fn(start_epoch)

    def __iter__(self) -> CyclingIterator[T]:
        return self

    def __next__(self) -> T:
        while True:
            try:
                return next(self._elements)
            except StopIteration:
                # The end of the epochs is the end of this iterator.
                self._elements = self._make(next(self._epochs_left))
