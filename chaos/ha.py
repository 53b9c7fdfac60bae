"""One long job with `--ha` on five machines, with one fault after the other.

Machines 0, 1 and 2 run the members of its etcd, 3 and 4 do not. The workers train with gloo. A seed
shuffles the faults: each kind hits each machine once before any repeats. The next fault begins when
the job runs on all machines again and all three members are healthy; some faults come in pairs that
a job survives (`docs/concepts/what-fails.md`). `make chaos` uses the default settings.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING

from chaos.job import WORKER, ChaosJob, Plan
from chaos.machine_network import address
from chaos.rules import SMALL_S, is_small, read_looks, violations

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable
    from pathlib import Path

    from chaos.rules import Fault, Look, Record

MACHINES, LISTED = 5, 3
LIST = ",".join(address(number) for number in range(LISTED))
FRESH_S = 2.0
LOOKS_BYTES = 2000
FREEZES_S = (2.0, 10.0, 60.0)
CUTS_S = (3.0, 10.0, 20.0)
DOWNS_S = (0.5, 3.0, 10.0)
PAIRS_SHARE = 0.15
APART_S = 3.0
"""The second fault of a pair begins within this time."""
TOGETHER_S_MAX = 20.0
"""The majority of members may be away for a minute, plus the recovery."""

LOSSES = "kill machine", "replace machine"

Card = tuple[str, int, float]


def make_deck(rng: random.Random) -> list[Card]:
    """Return each kind of fault for each machine, in random order."""
    everywhere = [
        *(("freeze machine", length_s) for length_s in FREEZES_S),
        *((f"{verb} machine", rng.choice(CUTS_S)) for verb in ("cut", "mute", "deafen")),
        *((f"{verb} machine", rng.choice(DOWNS_S)) for verb in ("kill", "replace")),
    ]
    deck = [(kind, number, length_s) for kind, length_s in everywhere for number in range(MACHINES)]
    deck += [("kill member", number, 0.0) for number in range(LISTED)]
    rng.shuffle(deck)
    return deck


def make_plan(seed: int, count: int, *, keeps_data: bool = True) -> Plan:
    """Return a plan of faults; a fault with a time above 0 overlaps the previous fault.

    `keeps_data` is false for an unsafe etcd, which loses its data when it is killed.
    """
    losses = LOSSES if keeps_data else (*LOSSES, "kill member")
    rng = random.Random(seed)
    faults: list[tuple[float, str, int, float]] = []
    deck: list[Card] = []
    while len(faults) < count:
        deck = deck or make_deck(rng)
        first = deck.pop()
        faults.append((0.0, *first))
        if rng.random() < PAIRS_SHARE:
            second = next(
                (one for one in reversed(deck) if survives_both(first, one, losses)), None
            )
            if second is not None:
                deck.remove(second)
                faults.append((rng.uniform(0.1, APART_S), *second))
    return Plan(seed, "ha", 3, MACHINES, 1, 0.3, safe=True, faults=faults[:count])


def survives_both(first: Card, second: Card, losses: tuple[str, ...]) -> bool:
    """Whether a job survives both at once; `losses` are the faults that lose a member's data."""
    (kind, number, length_s), (other_kind, other, other_s) = first, second
    if number == other:
        return False
    if number >= LISTED or other >= LISTED:
        return True
    is_short = max(length_s, other_s) <= TOGETHER_S_MAX
    return is_short and kind not in losses and other_kind not in losses


class LongJob(ChaosJob):
    """The job; it calls `report` with a line after each fault."""

    going_s_max = 120.0  # A machine that left several times in some minutes is excluded for 30 s.

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        report: Callable[[str], None],
        until: float = float("inf"),
        flags: tuple[str, ...] = (),
    ) -> None:
        super().__init__(plan, folder)
        self._report, self._until, self._flags = report, until, flags
        self._watcher: subprocess.Popen[bytes] | None = None
        self._looks = folder / "members.txt"

    def agent_command(self) -> list[str]:
        plan = self.plan
        return [
            sys.executable, "-m", "holdfast", "run",
            "--ha", LIST,
            "--nnodes", f"{plan.nodes_min}:{plan.nodes}",
            "--max-restarts", "3",
            "--rdzv-id", self._run_id,
            "--preload", "torch.distributed",
            *self._flags,
            str(WORKER),
        ]  # fmt: skip

    @property
    def _run_id(self) -> str:
        return f"chaos{self.plan.seed}"

    def record(self, left: list[str], stalled: str) -> Record:
        looks = read_looks(self._looks.read_text().splitlines()) if self._looks.exists() else []
        return super().record(left, stalled)._replace(looks=tuple(looks))

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.kill()
            self._watcher.wait()
            self._watcher = None
        super().close()

    def _variables(self) -> dict[str, str]:
        return {
            "CHAOS_CHECKPOINTS": str(self.folder / "checkpoints"),
            "GLOO_SOCKET_IFNAME": "eth0",
            "HOLDFAST_DEBUG": str(self.folder / "story"),
            "LOGLEVEL": "INFO",
            "OMP_NUM_THREADS": "1",
        }

    def _start_services(self) -> None:
        command = (sys.executable, "-m", "chaos.member_watch", self._run_id, LIST)
        self._watcher = self._in_switch(self._looks.name, *command)

    def _inject_faults(self) -> str:
        coming = list(self.plan.faults)
        done = 0
        while coming and time.monotonic() < self._until:
            now = [coming.pop(0)]
            while coming and coming[0][0]:
                now.append(coming.pop(0))
            begin, before = time.monotonic(), len(self.faults)
            self._do_faults(now)
            if any(map(is_small, self.faults[before:])):
                self._wait(SMALL_S)
            over = time.monotonic()
            stalled = self._await_progress(
                f"the job does not continue after {describe_faults(now)}"
            )
            done += len(now)
            found = violations(self.record([], stalled))
            took = f"{over - begin:5.1f} s, and {time.monotonic() - over:4.1f} s until recovery"
            verdict = f"BROKEN: {'; '.join(found)}" if found else "ok"
            self._report(f"{done:4}  {describe_faults(now):60}  {took}  {verdict}")
            if found:
                return stalled or "the rest of the plan was skipped"
        return ""

    def _wait(self, length_s: float) -> None:
        end = time.monotonic() + length_s
        while time.monotonic() < end:
            for machine in self.machines:
                machine.check_agent(start_again=True)
            time.sleep(0.1)

    def _is_healthy(self) -> bool:
        last = self._last_look()
        if last is None or time.monotonic() - last.at_s > FRESH_S:
            return False
        return all(has_leader for _, has_leader in last.members)

    def _last_look(self) -> Look | None:
        with self._looks.open("rb") as looks:
            looks.seek(max(0, self._looks.stat().st_size - LOOKS_BYTES))
            lines = looks.read().decode().split("\n")[:-1]
        found = read_looks(lines[-1:])
        return found[0] if found else None

    def _left(self) -> list[str]:
        """Return what is left, including folders of members from before a machine was killed."""
        left = super()._left()
        for machine in self.machines:
            if not machine.ends[-1].by:
                left += [f"folder {one}" for one in machine.temporary.glob("holdfast-ha-*")]
        return left


def describe_faults(faults: list[tuple[float, str, int, float]]) -> str:
    return " with ".join(
        f"{kind} {number}" + (f" for {length_s:g} s" if length_s else "")
        for _, kind, number, length_s in faults
    )


def summary(record: Record) -> str:
    """Return one line for each kind of fault."""
    kinds = Counter(describe(fault) for fault in record.faults)
    machines = {
        kind: {fault.machine for fault in record.faults if describe(fault) == kind}
        for kind in kinds
    }
    lines = [
        f"  {kind:24} {count:4} on machines {', '.join(map(str, sorted(machines[kind])))}"
        for kind, count in sorted(kinds.items())
    ]
    starts = [one for one in record.entries if one.event == "start"]
    steps = max((one.step for one in record.entries), default=0)
    charged = max((one.restarts for one in starts), default=0)
    head = (
        f"{len(record.faults)} faults, {len({one.generation for one in starts})} generations, "
        f"{steps} steps of training, {charged} restarts charged, {len(violations(record))} rules broken"
    )
    return "\n".join((head, *lines))


def describe(fault: Fault) -> str:
    if fault.kind != "freeze machine":
        return fault.kind
    return f"{fault.kind} for {fault.until_s - fault.at_s:.0f} s"
