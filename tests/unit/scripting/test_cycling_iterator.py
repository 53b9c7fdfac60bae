from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.scripting.cycling_iterator import CyclingIterator

if TYPE_CHECKING:
    from collections.abc import Iterator


def torchs() -> Any:
    from torch.distributed.elastic.utils.data import CyclingIterator as Theirs

    return Theirs


@pytest.fixture(params=[lambda: CyclingIterator, pytest.param(torchs, marks=pytest.mark.torch)])
def kind(request: pytest.FixtureRequest) -> Any:
    """Ours, and torch's in its place."""
    return request.param()


def epoch(number: int) -> Iterator[tuple[int, str]]:
    return iter([(number, "a"), (number, "b")])


def nothing_in_some(number: int) -> Iterator[int]:
    return iter([number] if number % 3 == 0 else [])


def test_epoch_after_epoch(kind: Any) -> None:
    assert list(kind(2, epoch)) == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    assert list(kind(n=4, generator_fn=epoch, start_epoch=3)) == [(3, "a"), (3, "b")]


def test_an_epoch_without_elements_is_passed_over(kind: Any) -> None:
    assert list(kind(8, nothing_in_some)) == [0, 3, 6]


def test_the_first_epoch_is_there_even_beyond_the_last(kind: Any) -> None:
    assert list(kind(2, epoch, start_epoch=7)) == [(7, "a"), (7, "b")]


def test_an_epoch_is_made_when_it_begins(kind: Any) -> None:
    made = []

    def make(number: int) -> Iterator[int]:
        made.append(number)
        return iter([number])

    elements = kind(3, make)
    assert (next(elements), made) == (0, [0])
    assert (next(elements), made) == (1, [0, 1])


def test_it_stays_at_its_end(kind: Any) -> None:
    elements = kind(1, epoch)
    assert iter(elements) is elements
    assert len(list(elements)) == 2
    assert list(elements) == []


def test_many_empty_epochs_are_no_deep_recursion() -> None:
    """With torch's they are."""
    assert list(CyclingIterator(10_000, lambda number: iter([]))) == []
