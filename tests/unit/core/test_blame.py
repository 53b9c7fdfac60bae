"""Who failed first: a table of cases, each of workers with what they show and when, in ms."""

from __future__ import annotations

import pytest

from holdfast.core.blame import Suspect, Trace, blame

MS = 1_000_000
KILLED, OWN, SILENT, PEER, STOPPED = (
    Trace.KILLED,
    Trace.OWN,
    Trace.SILENT,
    Trace.PEER,
    Trace.STOPPED,
)
Case = tuple[Trace, int, int, bool]  # Its trace, when it spoke (or 0) and ended, and if stopped.

CASES: dict[str, tuple[list[Case], list[int]]] = {
    "one alone": ([(SILENT, 0, 5, False)], [0]),
    "its own words go before complaints, however late it ends": (
        [(PEER, 101, 105, False), (OWN, 100, 900, True), (PEER, 102, 106, False)],
        [1],
    ),
    "a complaint that came first all the same is one": (
        [(PEER, 100, 105, False), (OWN, 103, 140, False)],
        [1],
    ),
    "a quiet exit goes before complaints": (
        [(PEER, 100, 105, False), (SILENT, 0, 110, False)],
        [1],
    ),
    "not if it comes much later": ([(PEER, 100, 105, False), (SILENT, 0, 2200, False)], [0]),
    "who was killed goes before who had noticed": (
        [(SILENT, 0, 100, False), (KILLED, 0, 300, False), (PEER, 101, 110, False)],
        [1],
    ),
    "but not before what was over by then": (
        [(OWN, 100, 110, False), (KILLED, 0, 400, False)],
        [0],
    ),
    "of two with words the earlier": ([(OWN, 110, 111, False), (OWN, 100, 150, False)], [1]),
    "of two with words at one moment, either": (
        [(OWN, 101, 111, False), (OWN, 100, 150, False)],
        [1, 0],
    ),
    "of two that complain, the earlier": (
        [(PEER, 100, 111, False), (PEER, 109, 112, False)],
        [0],
    ),
    "words just before a quiet exit: either": (
        [(OWN, 100, 120, False), (SILENT, 0, 108, False)],
        [0, 1],
    ),
    "words long before a quiet exit": ([(OWN, 100, 120, False), (SILENT, 0, 160, False)], [0]),
    "a quiet exit just before another's words: either": (
        [(OWN, 130, 140, False), (SILENT, 0, 99, False)],
        [1, 0],
    ),
    "a quiet exit long before another's words": (
        [(OWN, 160, 170, False), (SILENT, 0, 99, False)],
        [1],
    ),
    "of quiet exits, any within the time that an exit takes": (
        [(SILENT, 0, 100, False), (SILENT, 0, 140, False), (SILENT, 0, 160, False)],
        [0, 1],
    ),
    "all complain, and one had no time to speak": (
        [(PEER, 100, 105, False), (STOPPED, 0, 120, True), (PEER, 110, 130, True)],
        [0, 1],
    ),
    "all complain, and one was cut off in the middle of its words": (
        [(PEER, 100, 105, False), (STOPPED, 99, 120, False), (PEER, 103, 107, False)],
        [0, 1],
    ),
    "all complain, and one speaks of something else after the stop": (
        [(PEER, 100, 105, False), (OWN, 140, 150, True)],
        [1],
    ),
    "a quiet exit that the stop only overtook": (
        [(SILENT, 0, 100, False), (SILENT, 0, 102, True)],
        [0, 1],
    ),
    "what the stop has done is never first": (
        [(STOPPED, 0, 90, True), (SILENT, 0, 100, False)],
        [1],
    ),
    "unless it is all there is": ([(STOPPED, 0, 90, True), (STOPPED, 0, 80, True)], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_who_failed_first(name: str) -> None:
    workers, expected = CASES[name]
    ends = sorted(ended for _trace, _spoke, ended, _stopped in workers)
    suspects = [
        Suspect(rank, trace, ended * MS, spoke * MS, ends.index(ended), stopped)
        for rank, (trace, spoke, ended, stopped) in enumerate(workers)
    ]
    for given in (suspects, suspects[::-1]):
        verdict = blame(given)
        assert [verdict.first.rank, *(one.rank for one in verdict.rivals)] == expected
        assert {one.rank for one in verdict.order} == set(range(len(workers)))
