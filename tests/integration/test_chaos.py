"""A few jobs of `make chaos`, one on each backend, and a short one with `--ha`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from chaos import ha
from chaos.job import BACKENDS, ChaosJob, make_plan
from chaos.machine_network import missing
from chaos.rules import violations
from holdfast.etcd.runner import BINARY_VARIABLE
from real_etcd import SAFE, etcd_that_reports

if TYPE_CHECKING:
    from pathlib import Path

# A worker fails, a machine is cut off, and an agent is killed during that.
FAULTS = [(0.0, "fail worker", 0, 0.0), (0.3, "cut machine", 1, 1.0), (0.6, "kill agent", 2, 0.0)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_job_under_chaos_breaks_no_rule(tmp_path: Path, backend: str) -> None:
    reason = missing()
    if reason:
        pytest.skip(reason)
    plan = make_plan(1, backend)._replace(
        nodes_min=2, nodes=3, workers=1, stop_s=0.3, safe=True, faults=FAULTS
    )
    record = ChaosJob(plan, tmp_path).run()
    assert {fault.kind for fault in record.faults} >= {"fail worker", "cut machine"}
    assert violations(record) == []


# Two of the three members are killed at once, twice. Then a machine returns without its data while another is cut off.
# A member that is killed again before it is ready waits longer each time, so the kills are in two batches; the second
# batch begins when the job has recovered from the first.
HA_FAULTS = [
    (0.0, "kill member", 0, 0.0),
    (0.1, "kill member", 1, 0.0),
    (0.0, "kill member", 1, 0.0),
    (0.1, "kill member", 2, 0.0),
    (0.0, "replace machine", 1, 0.5),
    (0.2, "cut machine", 3, 14.0),
]
# A busy machine may need longer to restart two members than the 4 s that workers may run without etcd by default.
PATIENT = ("--rdzv-conf", "keep_alive_max_attempt=12")


def test_job_with_ha_under_chaos_breaks_no_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an etcd whose members restart with their data."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv(BINARY_VARIABLE, etcd_that_reports(SAFE, tmp_path))
    output: list[str] = []
    plan = ha.make_plan(1, 0)._replace(faults=HA_FAULTS)
    record = ha.LongJob(plan, tmp_path, output.append, flags=PATIENT).run()
    assert violations(record) == []
    assert len(record.faults) == len(HA_FAULTS), output
    first_kill, replaced = record.faults[0], record.faults[4]
    starts = [one.at_s for one in record.entries if one.event == "start"]
    assert not [at_s for at_s in starts if first_kill.at_s < at_s < replaced.at_s]
    assert [at_s for at_s in starts if at_s > replaced.at_s]
