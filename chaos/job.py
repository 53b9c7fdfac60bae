"""One job under chaos: its machines, its plan of faults, and its record.

A machine is a network namespace and every process with its mark in the environment, which child
processes inherit. The job restarts an agent that fails during the faults, as Slurm or Kubernetes
would.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from chaos.machine_network import SWITCH_ADDRESS, MachineNetwork, address
from chaos.rules import End, Entry, Fault, Record, read_ledger
from holdfast.etcd.runner import environment, find_binary

PORT = 29400
ETCD_PORT = 2379
POLL_S = 0.02
GOING_S_MAX = 60.0
GOING_FOR_S = 0.5
END_S_MAX = 60.0
GONE_S_MAX = 15.0
# Short waits, for many faults per job.
SETTINGS = "settle=0.3,keep_alive_interval=0.4,keep_alive_max_attempt=5,coordinator_timeout=20"
SAFE_SHARE = 0.75
WORKER = Path(__file__).with_name("ledger_worker.py")
BACKENDS = ("c10d", "coordinator", "etcd")
KINDS = (
    "kill worker", "fail worker", "kill keeper", "kill agent", "stop agent", "freeze agent",
    "freeze machine", "cut machine", "mute machine", "kill machine", "kill coordinator",
)  # fmt: skip


# Faults that end all processes of a machine.
DOWN = ("kill machine", "replace machine")


class Plan(NamedTuple):
    """What the seed determines."""

    seed: int
    backend: str
    nodes_min: int
    nodes: int
    workers: int
    stop_s: float
    safe: bool
    """Whether all rules apply: nodes that are cut off stop, and the coordinator has a state file."""
    faults: list[tuple[float, str, int, float]]
    """A fault: time, kind, machine and duration."""

    def __str__(self) -> str:
        size = f"{self.nodes_min}:{self.nodes} nodes x {self.workers}"
        faults = ", ".join(what for _, what, _, _ in self.faults)
        return f"{self.backend:11} {'' if self.safe else 'default '}{size}, {faults}"


def make_plan(seed: int, backend: str = "", faults_max: int = 5) -> Plan:
    rng = random.Random(seed)
    chosen = rng.choice(BACKENDS)
    nodes = rng.randint(2, 4)
    faults = []
    at_s = 0.0
    for _ in range(rng.randint(1, faults_max)):
        at_s += rng.choice((0.0, rng.uniform(0, 0.5), rng.uniform(0.5, 3)))
        length_s = rng.choice((rng.uniform(0.1, 1.5), rng.uniform(1.5, 6)))
        faults.append((at_s, rng.choice(KINDS), rng.randrange(nodes), length_s))
    return Plan(
        seed,
        backend or chosen,
        rng.randint(1, nodes),
        nodes,
        rng.randint(1, 2),
        rng.choice((0.0, 0.0, rng.uniform(0.1, 2))),
        rng.random() < SAFE_SHARE,
        faults,
    )


class ChaosMachine:
    """One machine of a job, with the agent that runs on it."""

    def __init__(self, job: ChaosJob, number: int) -> None:
        self.job = job
        self.number = number
        self.agent: subprocess.Popen[bytes] | None = None
        self.ended_by = ""
        self.ends: list[End] = []
        self._console = Path()

    @property
    def mark(self) -> str:
        return f"CHAOS_MARK={self.job.mark}-{self.number}"

    def start(self) -> None:
        self._console = self.job.folder / f"machine{self.number}-{len(self.ends)}.txt"
        self.ended_by = ""
        with self._console.open("wb") as console:
            self.agent = self.job.run_on(self.number, self.job.agent_command(), console)

    def check_agent(self, *, start_again: bool) -> None:
        """Record an agent that has exited; restart one that failed."""
        if self.agent is not None and self.agent.poll() is not None:
            self.note_end()
        if self.agent is None and start_again and self.ends[-1].code:
            self.start()

    def note_end(self) -> None:
        if self.agent is None:
            return
        printed = self._console.read_text(errors="replace")
        self.ends.append(End(self.number, self.agent.poll(), self.ended_by, printed))
        self.agent = None

    def processes(self) -> list[int]:
        return marked(self.mark)

    @property
    def temporary(self) -> Path:
        """Its folder for temporary files."""
        return self.job.folder / "tmp" / str(self.number)

    def workers(self) -> list[int]:
        return [pid for pid in self.processes() if b"\0RANK=" in _read(pid, "environ")]

    def keepers(self) -> list[int]:
        return [pid for pid in self.processes() if b"keeper of agent" in _read(pid, "cmdline")]

    def members(self) -> list[int]:
        return [
            pid for pid in self.processes() if b"--initial-cluster-token" in _read(pid, "cmdline")
        ]

    def signal_all(self, signum: int) -> None:
        for pid in self.processes():
            send(pid, signum)

    def wipe(self) -> None:
        """Lose all files."""
        shutil.rmtree(self.temporary)
        self.temporary.mkdir()


class ChaosJob:
    """A job that runs once and leaves nothing behind."""

    going_s_max = GOING_S_MAX

    def __init__(self, plan: Plan, folder: Path, tries: int = 0) -> None:
        self.plan = plan
        self.folder = folder
        self.mark = f"{os.getpid()}-{plan.seed}-{tries}"
        self.faults: list[Fault] = []
        self._ledger = folder / "ledger"
        self._goal = folder / "goal"
        self._ledger.touch()
        self._network = MachineNetwork(plan.nodes)
        self.machines = [ChaosMachine(self, number) for number in range(plan.nodes)]
        for machine in self.machines:
            machine.temporary.mkdir(parents=True)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._etcd: subprocess.Popen[bytes] | None = None
        self._undo: list[tuple[float, str, int]] = []

    # The job.

    def run(self) -> Record:
        """Run the job through its faults to its end, and return its record."""
        stalled = ""
        try:
            self._start_services()
            for machine in self.machines:
                machine.start()
            stalled = self._await_progress("the job did not start")
            if not stalled:
                stalled = self._inject_faults()
            if not stalled:
                self._goal.touch()
                stalled = self._await_ends()
        finally:
            self.close()
        return self.record(self._left(), stalled)

    def record(self, left: list[str], stalled: str) -> Record:
        """Return the record of the job so far."""
        ends = [end for machine in self.machines for end in machine.ends]
        entries = read_ledger(self._ledger.read_text().splitlines())
        return Record(entries, self.faults, ends, left, stalled, self.plan.safe)

    def close(self) -> None:
        for _, kind, number in self._undo:
            self._undo_fault(kind, number)
        self._undo.clear()
        for machine in self.machines:
            machine.signal_all(signal.SIGCONT)
        for process in (self._coordinator, self._etcd):
            if process is not None:
                process.kill()
                process.wait()
        for machine in self.machines:
            if machine.agent is not None:
                machine.ended_by = machine.ended_by or "the end of the chaos"
                machine.signal_all(signal.SIGKILL)
                machine.agent.wait()
                machine.note_end()
        self._network.close()

    def agent_command(self) -> list[str]:
        plan = self.plan
        backend = "etcd" if plan.backend == "etcd" else "c10d"
        endpoint = f"{SWITCH_ADDRESS}:{ETCD_PORT}" if backend == "etcd" else self._endpoint()
        return [
            sys.executable, "-m", "holdfast", "run",
            "--nnodes", f"{plan.nodes_min}:{plan.nodes}",
            "--nproc-per-node", str(plan.workers),
            "--max-restarts", "100",
            "--rdzv-id", f"chaos{plan.seed}",
            "--rdzv-backend", backend,
            "--rdzv-endpoint", endpoint,
            "--rdzv-conf", self._settings(),
            str(WORKER),
        ]  # fmt: skip

    def run_on(self, number: int, command: list[str], console: BinaryIO) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "CHAOS_MARK": f"{self.mark}-{number}",
            "CHAOS_MACHINE": str(number),
            "CHAOS_LEDGER": str(self._ledger),
            "CHAOS_GOAL": str(self._goal),
            "CHAOS_STOP_S": str(self.plan.stop_s),
            "TMPDIR": str(self.machines[number].temporary),
            "HOME": str(self.folder),  # The token file of all machines of a job.
            **self._variables(),
        }
        # If the driver is killed, so is the agent, and its keeper cleans up.
        words = ["setpriv", "--pdeathsig", "KILL", *self._network.inside(number), *command]
        null = subprocess.DEVNULL
        return subprocess.Popen(words, stdin=null, stdout=console, stderr=console, env=env)

    def _variables(self) -> dict[str, str]:
        """Return additional environment variables of agents and workers."""
        return {}

    def _settings(self) -> str:
        if not self.plan.safe:
            return SETTINGS
        state = "" if self.plan.backend == "etcd" else f",state_file={self.folder / 'state.json'}"
        return f"{SETTINGS},on_lost=stop{state}"

    def _endpoint(self) -> str:
        host = SWITCH_ADDRESS if self.plan.backend == "coordinator" else address(0)
        return f"{host}:{PORT}"

    def _start_services(self) -> None:
        if self.plan.backend == "etcd":
            self._etcd = self._in_switch(
                "etcd.txt",
                find_binary(),
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls=http://{SWITCH_ADDRESS}:{ETCD_PORT}",
                f"--advertise-client-urls=http://{SWITCH_ADDRESS}:{ETCD_PORT}",
                "--listen-peer-urls=http://127.0.0.1:2380",
            )
        elif self.plan.backend == "coordinator":
            self._start_coordinator()

    def _start_coordinator(self) -> None:
        command = (sys.executable, "-m", "holdfast", "coordinator")
        where = ("--endpoint", self._endpoint(), "--rdzv-conf", self._settings())
        self._coordinator = self._in_switch("coordinator.txt", *command, *where)

    def _in_switch(self, console: str, *command: str) -> subprocess.Popen[bytes]:
        enter = ("setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self._network.switch), "-n")
        env = {**environment(), "HOME": str(self.folder)}
        with (self.folder / console).open("ab") as output:
            return subprocess.Popen([*enter, *command], stdout=output, stderr=output, env=env)

    # Faults.

    def _inject_faults(self) -> str:
        """Execute the plan; return the problem, if the job does not recover afterwards."""
        self._do_faults(self.plan.faults)
        return self._await_progress("the job does not continue after the faults")

    def _do_faults(self, faults: list[tuple[float, str, int, float]]) -> None:
        """Begin and end the faults at their times."""
        begin = time.monotonic()
        coming = list(faults)
        while coming or self._undo:
            now = time.monotonic()
            for fault in [one for one in coming if begin + one[0] <= now]:
                coming.remove(fault)
                self._do_fault(*fault[1:])
            for one in [one for one in self._undo if one[0] <= now]:
                self._undo.remove(one)
                self._undo_fault(*one[1:])
            for machine in self.machines:
                machine.check_agent(start_again=not self._is_down(machine.number))
            time.sleep(POLL_S)

    def _is_down(self, number: int) -> bool:
        return any(kind in DOWN and which == number for _, kind, which in self._undo)

    def _is_disturbed(self, number: int) -> bool:
        return any(which == number for _, _, which in self._undo)

    def _do_fault(self, kind: str, number: int, length_s: float) -> None:
        machine = self.machines[number]
        if self._is_disturbed(number) or machine.agent is None:
            return  # A machine has at most one fault at a time; several machines may have one.
        now = time.monotonic()
        lasts = kind.split(maxsplit=1)[0] in ("freeze", "cut", "mute", "deafen") or kind in DOWN
        if kind == "kill coordinator" and self._coordinator is None:
            kind = "kill agent"
        self.faults.append(Fault(now, kind, number, now + length_s if lasts else now))
        if lasts or kind == "kill coordinator":
            self._undo.append((now + length_s, kind, number))
        match kind:
            case "kill worker" | "fail worker":
                found = machine.workers()
                if found:
                    send(found[0], signal.SIGKILL if kind == "kill worker" else signal.SIGUSR1)
            case "kill keeper":
                for pid in machine.keepers():
                    send(pid, signal.SIGKILL)
            case "kill agent":
                machine.ended_by = kind
                machine.agent.kill()
            case "stop agent":
                machine.ended_by = kind
                machine.agent.terminate()
            case "freeze agent":
                send(machine.agent.pid, signal.SIGSTOP)
            case "freeze machine":
                machine.signal_all(signal.SIGSTOP)
            case "cut machine":
                self._network.cut(number)
            case "mute machine" | "deafen machine":
                for one, other in self._one_way(kind, number):
                    self._network.silence(one, other)
            case "kill member":
                for pid in machine.members():
                    send(pid, signal.SIGKILL)
            case "kill machine" | "replace machine":
                machine.ended_by = kind
                self._network.cut(number)  # A machine that loses its power sends nothing.
                for signum in (signal.SIGSTOP, signal.SIGKILL):
                    machine.signal_all(signum)
            case "kill coordinator":
                assert self._coordinator is not None
                self._coordinator.kill()
                self._coordinator.wait()

    def _undo_fault(self, kind: str, number: int) -> None:
        machine = self.machines[number]
        match kind:
            case "freeze agent" | "freeze machine":
                machine.signal_all(signal.SIGCONT)
            case "cut machine" | "kill machine":
                self._network.heal(number)
            case "replace machine":
                machine.wipe()
                self._network.heal(number)
            case "mute machine" | "deafen machine":
                for one, other in self._one_way(kind, number):
                    with suppress(AssertionError):
                        self._network.unsilence(one, other)
            case "kill coordinator":
                self._start_coordinator()

    def _one_way(self, kind: str, number: int) -> list[tuple[int, int]]:
        """Return the blocked directions between machines."""
        others = [other for other in range(self.plan.nodes) if other != number]
        mutes = kind == "mute machine"
        return [(number, other) if mutes else (other, number) for other in others]

    # Waits.

    def _await_progress(self, otherwise: str) -> str:
        """Wait until every machine has workers of one generation that make steps."""
        begin = time.monotonic()
        while time.monotonic() < begin + self.going_s_max:
            for machine in self.machines:
                machine.check_agent(start_again=True)
            now = time.monotonic()
            recent = [one for one in self._entries_since(now - GOING_FOR_S) if one.event == "step"]
            newest = max((one.generation for one in recent), default=0)
            ranks = {one.rank for one in recent if one.generation == newest}
            is_whole = len(ranks) == self.plan.nodes * self.plan.workers
            # Workers of a killed agent may make one more step; stopping workers may make several.
            is_over = now > begin + 2 * GOING_FOR_S and not any(
                machine.ended_by for machine in self.machines
            )
            if is_whole and is_over and self._is_healthy():
                return ""
            time.sleep(POLL_S)
        return f"{otherwise} within {self.going_s_max:g} s"

    def _is_healthy(self) -> bool:
        """Whether the job is healthy, apart from its workers."""
        return True

    def _await_ends(self) -> str:
        begin = time.monotonic()
        while time.monotonic() < begin + END_S_MAX:
            for machine in self.machines:
                machine.check_agent(start_again=False)
            if all(machine.agent is None for machine in self.machines):
                codes = [machine.ends[-1].code for machine in self.machines]
                return f"the agents exited with {codes}" if any(codes) else ""
            time.sleep(POLL_S)
        return f"the job did not end {END_S_MAX:g} s after its work was finished"

    def _entries_since(self, since: float) -> list[Entry]:
        size = self._ledger.stat().st_size
        with self._ledger.open("rb") as ledger:
            ledger.seek(max(0, size - 32768))
            # The first line may be cut, and the last one incomplete.
            lines = ledger.read().decode().split("\n")[1:-1]
        return [one for one in read_ledger(lines) if one.at_s >= since]

    def _left(self) -> list[str]:
        """Return the processes and files that are left of the job."""
        deadline = time.monotonic() + GONE_S_MAX
        while True:
            pids = marked(f"CHAOS_MARK={self.mark}-")
            if not pids or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        left = [f"process {pid}: {_read(pid, 'cmdline')[:80]!r}" for pid in pids]
        for pid in pids:
            send(pid, signal.SIGKILL)
        return left


def marked(mark: str) -> list[int]:
    """Return the processes with this in their environment."""
    wanted = mark.encode()
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and _has(name, wanted)]


def _has(pid: str, wanted: bytes) -> bool:
    words = _read(int(pid), "environ").split(b"\0")
    return any(one == wanted or (wanted.endswith(b"-") and one.startswith(wanted)) for one in words)


def _read(pid: int, what: str) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:
        return b""


def send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
