"""Shared code of the scripts in this folder: real torchrun agents, real handlers, and their evidence.

A script's process exits as soon as it has printed its result, which also ends threads that hang in a store call
forever, as in several defects.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

# Agents as processes, and their cleanup, come from the benchmarks.
sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.launching import WORKERS, Lab, clean_environment
from benchmarks.nodes import Nodes, NotReached, free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.nodes import NodeAgent

__all__ = ["WORKERS", "Evidence", "Lab", "Nodes", "NotReached", "Outcome", "free_port"]

HERE = Path(__file__).parent
# The workaround for `join_kills_job`: the worker with rank 0 serves the workers' store, not its agent.
WORKAROUND = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Evidence(NamedTuple):
    """Whether the defect occurred, and the observation."""

    shown: bool
    text: str


class Outcome(NamedTuple):
    """The outcome of a call that may hang; both fields are None until it returns."""

    value: Any = None
    error: BaseException | None = None
    took_s: float | None = None


class Call:
    """A call in its own thread, which is abandoned if it takes too long."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._began = time.monotonic()
        threading.Thread(target=self._run, args=(function,), daemon=True).start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            value, error = function(), None
        except BaseException as problem:
            value, error = None, problem
        self._done.put(Outcome(value, error, time.monotonic() - self._began))

    def result(self, within_s: float) -> Outcome:
        try:
            return self._done.get(timeout=max(0.001, within_s))
        except queue.Empty:
            return Outcome()


def together(calls: Sequence[Callable[[], Any]], within_s: float = 30.0) -> list[Outcome]:
    """Make all calls concurrently and return the outcome of each."""
    running = [Call(one) for one in calls]
    deadline = time.monotonic() + within_s
    return [one.result(deadline - time.monotonic()) for one in running]


def handler(port: int, nnodes: str, *, addr: str = "127.0.0.1", **conf: object) -> Any:
    """Return torch's own handler for c10d, created as torchrun does; the first one hosts the store."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    low, _, high = nnodes.partition(":")
    return get_rendezvous_handler(
        RendezvousParameters(
            "c10d", f"127.0.0.1:{port}", "defect", int(low), int(high or low), addr, **conf
        )
    )


def state_of(port: int, run_id: str) -> Any:
    """Return the state that torch's agents share, read in the same way."""
    import pickle
    from base64 import b64decode

    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return pickle.loads(b64decode(store.get(f"torch.rendezvous.{run_id}")))


def watch(nodes: Nodes, for_s: float) -> None:
    """Wait, and read the reports of workers meanwhile."""
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        time.sleep(0.05)
        nodes.take()


def alive(pid: int) -> bool:
    """Whether a process runs: it exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def log_tail(agent: NodeAgent) -> str:
    """Return the last line of an agent's console."""
    lines = [line.strip() for line in agent.output().splitlines() if line.strip()]
    return lines[-1] if lines else "(nothing)"


def present(show: Callable[[], Evidence]) -> None:
    """Run a script and print its evidence; the exit code is 0 if the defect occurs."""
    os.environ.update(env := clean_environment())
    for name in set(os.environ) - set(env):
        del os.environ[name]
    try:
        shown, text = show()
    except Exception:
        traceback.print_exc()
        shown, text = False, "the script itself failed"
    print(f"{'shown' if shown else 'not shown'}: {text}", flush=True)
    os._exit(0 if shown else 1)
