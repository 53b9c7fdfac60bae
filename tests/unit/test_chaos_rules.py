"""The rules of chaos jobs find violations in ledgers written by hand."""

from __future__ import annotations

import pytest

from chaos import ha
from chaos.job import make_plan
from chaos.rules import End, Fault, Record, read_ledger, read_looks, violations

GOOD = """\
1000000000 start 0 10 0 2 0 0 1
1010000000 start 1 11 1 2 0 0 1
1020000000 step 0 10 0 2 0 0 1
1030000000 failing 1 11 1 2 0 0 1
1040000000 saving 0 10 0 2 0 0 1
2000000000 start 0 12 0 2 1 1 2
2010000000 start 1 13 1 2 1 1 2
2020000000 done 0 12 0 2 1 1 2
"""
FAILURE = Fault(1.03, "fail worker", 1, 1.03)


def record(
    ledger: str = GOOD,
    faults: tuple[Fault, ...] = (FAILURE,),
    ends: tuple[End, ...] = (End(0, 0, "", ""),),
    left: tuple[str, ...] = (),
    stalled: str = "",
) -> Record:
    return Record(read_ledger(ledger.splitlines()), [*faults], [*ends], [*left], stalled)


def test_good_job_breaks_no_rule() -> None:
    assert violations(record()) == []


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (record(GOOD + "2030000000 start 1 14 1 3 1 1 2"), "generations agree"),
        (record(GOOD + "2030000000 start 2 14 1 2 1 1 2"), "generations agree"),
        (record(GOOD + "2030000000 start 2 14 5 2 2 1 3"), "generations agree"),
        (record(GOOD + "2030000000 start 0 14 0 2 0 1 2"), "numbers do not decrease"),
        (record(GOOD + "2030000000 start 0 14 0 2 2 1 1"), "numbers do not decrease"),
        (record(GOOD + "2030000000 start 0 14 0 2 2 0 3"), "numbers do not decrease"),
        (record(GOOD + "2030000000 saving 1 11 1 2 0 0 1"), "generations do not overlap"),
        (record(faults=()), "restarts are failures"),
        (record(stalled="it stands still"), "job continues"),
        (record(ends=(End(0, None, "", ""),)), "job continues"),
        (record(ends=(End(0, 70, "", "x"),)), "exits are documented"),
        (
            record(ends=(End(0, 1, "", "Traceback (most recent call last)"),)),
            "exits are documented",
        ),
        (record(left=("process 7",)), "nothing is left"),
    ],
)
def test_violation_names_the_rule(broken: Record, rule: str) -> None:
    assert rule in {one.partition(":")[0] for one in violations(broken)}


def test_resumed_worker_may_make_one_more_step() -> None:
    late = GOOD + "2030000000 step 1 11 1 2 0 0 1"
    freeze = Fault(1.5, "freeze machine", 1, 2.0)
    assert violations(record(late, (FAILURE, freeze))) == []
    assert violations(record(late, (FAILURE, freeze._replace(machine=0))))
    assert violations(record(late, (FAILURE, freeze._replace(until_s=1.0))))


def test_seed_determines_the_plan() -> None:
    assert make_plan(3) == make_plan(3)
    assert len({str(make_plan(seed)) for seed in range(50)}) > 40


TRAINING = """\
1000000000 start 0 10 0 2 0 0 1 0
1010000000 start 1 11 1 2 0 0 1 0
1020000000 step 0 10 0 2 0 0 1 1
1030000000 step 1 11 1 2 0 0 1 1
"""
LOOKS = """\
[holdfast] made a token
900000000 - - -
1000000000 a/1 a/1 -
1050000000 a/1 a/0 b/0
"""


def training(
    more: str = "",
    looks: str = "",
    faults: tuple[Fault, ...] = (),
    ends: tuple[End, ...] = (End(0, 0, "", ""),),
) -> Record:
    job = record(TRAINING + more, faults, ends)
    return job._replace(looks=tuple(read_looks((LOOKS + looks).splitlines())))


def test_good_job_with_ha_breaks_no_rule() -> None:
    assert violations(training("2000000000 step 0 12 0 1 1 0 2 2")) == []
    killed = End(0, -9, "kill machine", "")
    assert violations(training(ends=(killed,))) == []


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (training("1040000000 wrong 0 10 0 2 0 0 1 2"), "sums are right"),
        (training("2000000000 step 0 12 0 1 1 0 2 1"), "progress is kept"),
        (training("2000000000 step 0 12 0 1 1 0 2 4"), "progress is kept"),
        (training(ends=(End(0, 78, "", "lost the cluster"),)), "no job is lost"),
        (training(looks="1100000000 b/1 - b/1"), "one cluster decides"),
        (
            training(
                "2000000000 start 0 12 0 1 1 0 2 0", faults=(Fault(1.1, "freeze machine", 1, 3.1),)
            ),
            "small faults cost nothing",
        ),
    ],
)
def test_violation_with_ha_names_the_rule(broken: Record, rule: str) -> None:
    assert {one.partition(":")[0] for one in violations(broken)} == {rule}


def test_long_freeze_may_cost_a_generation() -> None:
    start = "2000000000 start 0 12 0 1 1 0 2 0"
    assert violations(training(start, faults=(Fault(1.1, "freeze machine", 1, 11.1),))) == []


def test_every_kind_of_fault_hits_every_machine() -> None:
    faults = ha.make_plan(5, 43).faults
    met = {(kind, number, length if "freeze" in kind else 0) for _, kind, number, length in faults}
    assert len(met) == len(faults) == 43
    assert ha.make_plan(5, 43) == ha.make_plan(5, 43)


def test_node_that_is_cut_off_may_keep_running_with_default_settings() -> None:
    late = record(GOOD + "2030000000 step 1 11 1 2 0 0 1")
    cut = Fault(1.5, "cut machine", 1, 5.0)
    assert violations(late._replace(faults=[FAILURE, cut]))
    assert violations(late._replace(faults=[FAILURE], safe=False))
    assert violations(late._replace(faults=[FAILURE, cut], safe=False)) == []
