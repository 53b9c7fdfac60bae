"""What a person reads when a node waited in vain."""

from __future__ import annotations

import re

from holdfast.core.coordinated_supervision import CoordinatorLost
from holdfast.core.protocol import NodeRole, View
from holdfast.rendezvous import errors


def test_a_place_that_was_given_up_is_named_with_time_and_reason() -> None:
    said = errors.unreachable("the coordinator at host:1", CoordinatorLost("no route", 61.4))
    shape = (
        r"the coordinator at host:1 could not be reached since \d\d:\d\d:\d\d \(61 s\): no route"
    )
    assert re.fullmatch(shape, said)
    assert errors.unreachable("it", CoordinatorLost("", 1.0)).endswith("(1 s)")


def test_too_few_nodes_are_counted() -> None:
    view = View(
        run_id="job",
        node="a",
        incarnation=1,
        term=1,
        revision=1,
        role=NodeRole.WAITING,
        present=1,
        needed=3,
    )
    said = errors.too_few(view, "", "/folder", 2.5)
    assert said == "1 of 3 nodes came to /folder within 2.5 s (join_timeout)"


def test_without_any_word_the_problem_is_what_is_said() -> None:
    assert errors.too_few(None, "no word", "x", 600) == "no word (join_timeout: 600 s)"
