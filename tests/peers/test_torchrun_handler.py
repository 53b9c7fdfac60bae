"""The plug-in's handler and store, used as torchrun's agent does, but without the agent."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.core.limits import TERMS_PER_ENDPOINT
from holdfast.etcd.runner import hold_port
from real_coordinators import Coordinator, eventually
from real_teams import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.torch

LONG_S = 30.0
EXIT_BARRIER = "torchelastic/agent/terminal_state"


class Job:
    """Handlers of one job, created as torchrun does."""

    def __init__(self, nnodes: str, settle: float) -> None:
        low, _, high = nnodes.partition(":")
        self.settle = settle
        self.size = (int(low), int(high or low))
        self.endpoint = f"127.0.0.1:{free_port()}"
        self.handlers: list[Any] = []

    def node(self, **conf: object) -> Any:
        from torch.distributed.elastic.rendezvous import RendezvousParameters as Torchs
        from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

        # torchrun passes every value as text, and always a timeout. The first node coordinates, unless a test changes
        # that.
        conf = {"settle": self.settle, "is_host": not self.handlers, **conf}
        given = {key: str(value) for key, value in conf.items() if value is not None}
        params = Torchs(
            "holdfast", self.endpoint, "job", *self.size, "127.0.0.1", timeout=900, **given
        )
        self.handlers.append(get_rendezvous_handler(params))
        return self.handlers[-1]


@contextmanager
def job_of(nnodes: str, settle: float = LONG_S) -> Iterator[Job]:
    """A job whose first round has the maximum of nodes, unless it settles soon."""
    job = Job(nnodes, settle)
    try:
        yield job
    finally:
        if job.handlers:  # Together, since the one that coordinates waits for the others.
            with ThreadPoolExecutor(len(job.handlers)) as pool:
                assert all(pool.map(lambda one: one.shutdown(), job.handlers))


def meet(*handlers: Any) -> list[Any]:
    """Return the rounds of all nodes, in order of arrival."""
    with ThreadPoolExecutor(len(handlers)) as pool:
        return list(pool.map(lambda one: one.next_rendezvous(), handlers))


def test_torchs_registry_has_the_plugin_as_one_of_its_handlers() -> None:
    from torch.distributed.elastic import rendezvous

    with job_of("1") as job:
        handler = job.node()
        assert isinstance(handler, rendezvous.RendezvousHandler)
        assert (handler.get_backend(), handler.get_run_id()) == ("holdfast", "job")
        assert handler.use_agent_store is True
        assert (handler.is_closed(), handler.num_nodes_waiting()) == (False, 0)
        info = handler.next_rendezvous()
        assert isinstance(info, rendezvous.RendezvousInfo)
        assert isinstance(info.bootstrap_store_info, rendezvous.RendezvousStoreInfo)
        assert info.bootstrap_store_info.master_addr == "127.0.0.1"
        assert (info.rank, info.world_size) == (0, 1)


def test_coordinator_takeover_restarts_no_worker() -> None:
    with hold_port() as one, hold_port() as other, job_of("2") as job:
        ports = [held.getsockname()[1] for held in (one, other)]
        job.endpoint = ",".join(f"127.0.0.1:{port}" for port in ports)
        with Coordinator(f"--endpoint={job.endpoint}"):
            nodes = [job.node(is_host=False) for _ in range(2)]
            meet(*nodes)
        with Coordinator("--take-over", f"--endpoint={job.endpoint}"):
            memberships = [node._node._membership for node in nodes]
            eventually(lambda: all(one.view.term >= TERMS_PER_ENDPOINT for one in memberships))
            assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
            for node in nodes:
                node.shutdown()


def test_finding_the_plugin_imports_neither_torch_nor_holdfast() -> None:
    program = (
        "import sys; bare = set(sys.modules); import holdfast.torchrun_plugin as plugin;"
        "plugin.creator(); print(*sorted(set(sys.modules) - bare))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = [name for name in done.stdout.split() if name.startswith(("holdfast", "torch"))]
    assert loaded == ["holdfast", "holdfast.torchrun_plugin"]


def test_store_supports_the_calls_of_torchs_agent() -> None:
    from torch.distributed import DistStoreError, PrefixStore
    from torch.distributed.elastic.utils import store as agents

    with job_of("2") as job:
        first, second = meet(job.node(), job.node())
        store, other = first.store, PrefixStore("of", second.store)
        first.store.multi_set(["of/x", "of/y"], ["1", "2"])
        assert other.multi_get(["x", "y"]) == [b"1", b"2"]
        assert other.compare_set("x", "1", "3") == b"3" == store.get("of/x")
        other.append("x", "4")
        assert (store.get("of/x"), store.check(["of/z"]), store.num_keys()) == (b"34", False, 2)
        assert store.delete_key("of/x")
        with ThreadPoolExecutor(2) as pool:
            shared = pool.map(
                lambda info: agents.synchronize(info.store, b"mine", info.rank, 2, "sync"),
                (first, second),
            )
            assert list(shared) == [[b"mine", b"mine"]] * 2
        assert store.timeout == timedelta(seconds=300)
        with pytest.raises(DistStoreError, match="nothing"):
            store.wait(["nothing"], timedelta(seconds=0.05))
        store.set_timeout(timedelta(seconds=0.05))
        with pytest.raises(DistStoreError, match="nothing"):
            store.get("nothing")


def test_wrong_token_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousConnectionError

    with job_of("1:2", settle=0.05) as job:
        monkeypatch.setenv("HOLDFAST_TOKEN", "the one secret")
        job.node().next_rendezvous()
        monkeypatch.setenv("HOLDFAST_TOKEN", "another secret")
        with pytest.raises(RendezvousConnectionError, match=rf"^{job.endpoint}: .*token"):
            job.node().next_rendezvous()


def test_close_reaches_running_and_late_nodes() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    with job_of("2") as job:
        nodes = [job.node(node_id=name) for name in "ab"]
        meet(*nodes)
        nodes[0].set_closed()
        eventually(
            nodes[1].num_nodes_waiting
        )  # The only call of torchrun's agent while workers run.
        assert nodes[1].is_closed()
        for node in (nodes[1], job.node()):
            with pytest.raises(RendezvousClosedError, match=r"^the job 'job' is over: a closed"):
                node.next_rendezvous()


def test_calls_to_the_store_of_an_ended_round_end() -> None:
    from torch.distributed import DistStoreError

    with job_of("1:2") as job, ThreadPoolExecutor(1) as pool:
        stays, goes = job.node(), job.node(node_id="b")
        waiting = pool.submit(meet(stays, goes)[0].store.get, "rank")
        goes.shutdown()
        with pytest.raises(DistStoreError, match=r"^the round is over: b left$"):
            waiting.result(LONG_S)
        eventually(stays.num_nodes_waiting)
        assert stays.next_rendezvous().world_size == 1


def test_finished_node_does_not_wait_for_a_restarting_one() -> None:
    """torchrun cannot restart its workers, so the other node continues without it."""
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.utils.store import barrier

    with job_of("1:2") as job, ThreadPoolExecutor(2) as pool:
        fails, done = job.node(node_id="a"), job.node()
        infos = meet(fails, done)
        waiting = pool.submit(barrier, infos[1].store, 2, EXIT_BARRIER)
        again = pool.submit(fails.next_rendezvous)
        with pytest.raises(DistStoreError, match=r"^the round is over: a requested a restart$"):
            waiting.result(LONG_S)
        done.shutdown()
        assert again.result(LONG_S).world_size == 1


def test_finished_node_stays_while_others_need_it() -> None:
    from torch.distributed import DistStoreError
    from torch.distributed.elastic.utils.store import barrier

    with job_of("2") as job, ThreadPoolExecutor(1) as pool:
        nodes = [job.node(), job.node()]  # The first node coordinates.
        infos = meet(*nodes)
        with pytest.raises(DistStoreError, match=r"0\.05 s"):
            barrier(infos[0].store, 2, EXIT_BARRIER, barrier_timeout=0.05)
        leaving = pool.submit(nodes[0].shutdown)
        infos[1].store.set("late", "1")
        assert infos[1].store.get("late") == b"1"
        assert not leaving.done()
        barrier(infos[1].store, 2, EXIT_BARRIER, barrier_timeout=LONG_S)
        assert nodes[1].shutdown()
        assert leaving.result(LONG_S)


def test_exit_barrier_ends_the_job_and_releases_the_standby() -> None:
    from torch.distributed.elastic.rendezvous import RendezvousGracefulExitError
    from torch.distributed.elastic.utils.store import barrier

    with job_of("2") as job, ThreadPoolExecutor(3) as pool:
        members = [job.node(), job.node()]
        infos = meet(*members)
        spare = job.node()
        standing_by = pool.submit(spare.next_rendezvous)
        eventually(lambda: spare._node._was_standby)
        for done in [pool.submit(barrier, info.store, 2, EXIT_BARRIER) for info in infos]:
            done.result(LONG_S)
        with pytest.raises(
            RendezvousGracefulExitError, match=r"is over: .*; this node was a standby"
        ):
            standing_by.result(LONG_S)
        eventually(members[0].is_closed)
        # torch 2.13 raises an error because such an agent has no result.
        with pytest.raises(SystemExit) as ending:  # noqa: PT012
            try:
                None.is_failed()  # type: ignore[attr-defined]
            finally:
                spare.shutdown()
        assert ending.value.code == 0
