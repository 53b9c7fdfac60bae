"""Which worker failed first: a table of cases. Each worker has a trace, and times in ms."""

from __future__ import annotations

import pytest

from holdfast.core.blame import FailureTrace, Suspect, blame

MS = 1_000_000
KILLED, OWN, SILENT, PEER, STOPPED = (
    FailureTrace.KILLED,
    FailureTrace.OWN,
    FailureTrace.SILENT,
    FailureTrace.PEER,
    FailureTrace.STOPPED,
)
Case = tuple[
    FailureTrace, int, int, bool
]  # Trace, time of the traceback or 0, exit time, if stopped.

CASES: dict[str, tuple[list[Case], list[int]]] = {
    "a single failure": ([(SILENT, 0, 5, False)], [0]),
    "an error of its own precedes peer errors, however late the worker exits": (
        [(PEER, 101, 105, False), (OWN, 100, 900, True), (PEER, 102, 106, False)],
        [1],
    ),
    "a peer error stays a consequence even if it came first": (
        [(PEER, 100, 105, False), (OWN, 103, 140, False)],
        [1],
    ),
    "a silent exit precedes peer errors": (
        [(PEER, 100, 105, False), (SILENT, 0, 110, False)],
        [1],
    ),
    "a silent exit long after a peer error does not precede it": (
        [(PEER, 100, 105, False), (SILENT, 0, 2200, False)],
        [0],
    ),
    "a killed worker precedes workers that failed while it was torn down": (
        [(SILENT, 0, 100, False), (KILLED, 0, 300, False), (PEER, 101, 110, False)],
        [1],
    ),
    "a killed worker does not precede earlier failures": (
        [(OWN, 100, 110, False), (KILLED, 0, 400, False)],
        [0],
    ),
    "of two errors, the earlier one is first": (
        [(OWN, 110, 111, False), (OWN, 100, 150, False)],
        [1],
    ),
    "of two simultaneous errors, either may be first": (
        [(OWN, 101, 111, False), (OWN, 100, 150, False)],
        [1, 0],
    ),
    "of two peer errors, the earlier one is first": (
        [(PEER, 100, 111, False), (PEER, 109, 112, False)],
        [0],
    ),
    "an error just before a silent exit: either may be first": (
        [(OWN, 100, 120, False), (SILENT, 0, 108, False)],
        [0, 1],
    ),
    "an error long before a silent exit is first": (
        [(OWN, 100, 120, False), (SILENT, 0, 160, False)],
        [0],
    ),
    "a silent exit just before an error: either may be first": (
        [(OWN, 130, 140, False), (SILENT, 0, 99, False)],
        [1, 0],
    ),
    "a silent exit long before an error is first": (
        [(OWN, 160, 170, False), (SILENT, 0, 99, False)],
        [1],
    ),
    "of silent exits, any within the time that an exit takes may be first": (
        [(SILENT, 0, 100, False), (SILENT, 0, 140, False), (SILENT, 0, 160, False)],
        [0, 1],
    ),
    "all have peer errors, and one was stopped before its traceback": (
        [(PEER, 100, 105, False), (STOPPED, 0, 120, True), (PEER, 110, 130, True)],
        [0, 1],
    ),
    "all have peer errors, and one was stopped during its traceback": (
        [(PEER, 100, 105, False), (STOPPED, 99, 120, False), (PEER, 103, 107, False)],
        [0, 1],
    ),
    "all have peer errors, and one shows another error after the stop": (
        [(PEER, 100, 105, False), (OWN, 140, 150, True)],
        [1],
    ),
    "a silent exit just after the stop began may be first": (
        [(SILENT, 0, 100, False), (SILENT, 0, 102, True)],
        [0, 1],
    ),
    "a worker that the stop ended is never first": (
        [(STOPPED, 0, 90, True), (SILENT, 0, 100, False)],
        [1],
    ),
    "unless the stop ended all workers": ([(STOPPED, 0, 90, True), (STOPPED, 0, 80, True)], [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_blame_finds_the_first_failure(name: str) -> None:
    workers, expected = CASES[name]
    ends = sorted(ended for _trace, _traceback, ended, _stopped in workers)
    suspects = [
        Suspect(rank, trace, ended * MS, traceback * MS, ends.index(ended), stopped)
        for rank, (trace, traceback, ended, stopped) in enumerate(workers)
    ]
    for given in (suspects, suspects[::-1]):
        verdict = blame(given)
        assert [verdict.first.rank, *(one.rank for one in verdict.rivals)] == expected
        assert {one.rank for one in verdict.order} == set(range(len(workers)))
