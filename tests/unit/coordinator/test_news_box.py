from __future__ import annotations

import select
from typing import TYPE_CHECKING

import pytest

from holdfast.coordinator.agent_connection import LOSSES_MAX, JoinRefused, Mailbox
from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import NodeRole, View

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def box() -> Iterator[Mailbox]:
    one = Mailbox()
    one.open()
    yield one
    one.close()


def view(revision: int) -> View:
    return View(
        run_id="job", node="a", incarnation=1, term=1, revision=revision, role=NodeRole.WAITING
    )


def readable(box: Mailbox) -> bool:
    return bool(select.select([box], [], [], 0)[0])


def test_the_descriptor_is_readable_until_all_is_taken(box: Mailbox) -> None:
    assert not readable(box)
    box.put(view(1))
    box.put(JoinRefused("no"))
    assert readable(box)
    assert box.take() == [view(1), JoinRefused("no")]
    assert not readable(box)
    assert box.take() == []


def test_of_views_the_newest_is_kept(box: Mailbox) -> None:
    for revision in range(3):
        box.put(view(revision))
    assert box.take() == [view(2)]


def test_of_faults_the_first_are_kept(box: Mailbox) -> None:
    for number in range(100):
        box.put(CoordinatorLost(str(number)))
    assert box.take() == [CoordinatorLost(str(number)) for number in range(LOSSES_MAX)]
    box.put(CoordinatorLost("later"))
    assert box.take() == [CoordinatorLost("later")]


def test_a_view_that_is_forgotten_is_not_taken(box: Mailbox) -> None:
    box.put(view(1))
    box.put(CoordinatorLost("why"))
    box.forget_view()
    assert box.take() == [CoordinatorLost("why")]


def test_what_comes_while_it_is_closed_is_kept() -> None:
    box = Mailbox()
    box.put(view(1))
    assert box.fileno() == -1
    box.open()
    box.close()
    box.close()
    box.put(CoordinatorLost("why"))
    assert box.take() == [view(1), CoordinatorLost("why")]
