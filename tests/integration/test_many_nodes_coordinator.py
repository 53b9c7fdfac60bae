"""Real jobs whose coordinator is killed, restarts, stays unreachable or never starts."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import struct
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from real_jobs import Watched, children
from real_teams import OBEY, Cluster, finish_all

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

KILLED = -signal.SIGKILL
ELSEWHERE = "is_host=false"


class Proxy:
    """Forwards connections to a port; once cut, resets all of them and every new one."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._is_cut = False
        self._open: list[socket.socket] = []
        self._threads = [Thread(target=self._accept)]
        self._threads[0].start()

    def reset(self) -> None:
        """Reset the open connections."""
        while self._open:
            one = self._open.pop()
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one.shutdown(socket.SHUT_RD)  # This wakes the thread that reads it.
            one.close()

    def cut(self) -> None:
        """Reset the open connections, and all later ones."""
        self._is_cut = True
        self.reset()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._to)
            except ConnectionRefusedError:
                near.close()
                continue
            self._open += [near, far]
            if self._is_cut:
                self.reset()
                continue
            for one, other in ((near, far), (far, near)):
                self._threads.append(Thread(target=self._pass_on, args=(one, other)))
                self._threads[-1].start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join()


def test_finished_node_without_a_coordinator_exits_with_its_workers_outcome(tmp_path: Path) -> None:
    conf = "reconnect_grace=0,coordinator_timeout=1"
    with Cluster(tmp_path, OBEY, nnodes="2", backend="static", conf=conf) as cluster:
        cluster.start_host("a", "--node-rank=0")
        with Proxy(cluster.port) as proxy:
            endpoint = f"--rdzv-endpoint=127.0.0.1:{proxy.port}"
            b = cluster.start("b", "--node-rank=1", endpoint, conf=ELSEWHERE)
            starts = cluster.generation(2)
            starts["b"].finish()
            b.wait_for_output("this node's workers have finished")
            # When it is cut off, it has been lost and has rejoined, but it is not in the round.
            proxy.reset()
            b.wait_for_output("standing by")
            proxy.cut()
            starts["a"].finish()
            assert cluster.agents["a"].end()[0] == 0
            assert b.end()[0] == 0
        assert cluster.codes() == {"a": 0, "b": 0}


def test_another_agent_of_the_host_takes_over_from_a_killed_coordinator(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="2:3") as cluster:
        before = cluster.form_at_host("a", "b", "c")
        cluster.agents["a"].kill()
        smaller = cluster.generation(2)
        assert smaller["b"].generation > before["b"].generation
        assert smaller["b"].restarts == 0
        smaller["c"].fail()
        again = cluster.generation(2)
        assert again["b"].restarts == 1
        cluster.start("d")
        after = cluster.generation(3)
        for name in "bc":
            assert after[name].rank == again[name].rank == smaller[name].rank
        assert cluster.finish(after) == {"a": KILLED, "b": 0, "c": 0, "d": 0}


def test_restarted_agent_of_the_coordinator_waits_for_slow_nodes(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="1:3") as cluster:
        cluster.start_host("a", conf="settle=60")  # Until all have joined.
        cluster.start_all("b", "c", conf=ELSEWHERE)
        before = cluster.generation(3)
        for name in "bc":
            cluster.agents[name].freeze()
        cluster.agents["a"].kill()
        again = cluster.start("again")
        # Without a record it would start generation 0 after the settle time, beside the workers of b and c.
        again.wait_for_output("waiting up to 5 s for the nodes of round 0")
        for name in "bc":
            cluster.agents[name].signal(signal.SIGCONT)
        after = cluster.generation(3)
        assert after["again"].generation == before["a"].generation + 1
        assert {start.restarts for start in after.values()} == {0}
        assert cluster.finish(after) == {"a": KILLED, "again": 0, "b": 0, "c": 0}


def test_restarted_coordinator_restarts_no_worker(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="2:3") as cluster:
        cluster.start_coordinator("first")
        before = cluster.form("a", "b", conf=ELSEWHERE)
        cluster.agents["first"].kill()
        second = cluster.start_coordinator("second")
        second.wait_for_output(": all nodes reconnected after the coordinator was lost")
        assert cluster.is_quiet()
        # It knows the state of the job: failures, joins and the end are handled as usual.
        before["a"].fail()
        again = cluster.generation(2)
        for name, start in again.items():
            assert start.rank == before[name].rank
            assert (start.generation, start.restarts) == (before[name].generation + 1, 1)
        cluster.start("c", conf=ELSEWHERE)
        after = cluster.generation(3)
        assert {start.restarts for start in after.values()} == {1}
        finish_all(after.values())
        for name in "abc":
            assert cluster.agents[name].end()[0] == 0
        second.signal(signal.SIGTERM)
        assert second.end()[0] == 128 + signal.SIGTERM
        assert cluster.codes()["first"] == KILLED


def test_job_that_ends_during_an_outage_succeeds_after_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_coordinator("first")
        starts = cluster.form("a", "b", conf=ELSEWHERE)
        cluster.agents["first"].kill()
        ended = Watched(*(start.pid for start in starts.values()))
        finish_all(starts.values())
        ended.wait_until_exited()
        cluster.agents["a"].wait_for_output(
            f"lost the connection to the coordinator at {cluster.endpoint},"
        )
        second = cluster.start_coordinator("second")
        cluster.agents["a"].wait_for_output(f"reconnected to the coordinator at {cluster.endpoint}")
        assert cluster.agents["a"].end()[0] == cluster.agents["b"].end()[0] == 0
        second.signal(signal.SIGINT)
        assert cluster.codes()["second"] == 128 + signal.SIGINT
        assert cluster.is_quiet()


def test_failure_during_an_outage_is_handled_after_it(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="2") as cluster:
        cluster.start_coordinator("first")
        starts = cluster.form("a", "b", conf=ELSEWHERE)
        cluster.agents["first"].kill()
        ended = Watched(starts["a"].pid)
        starts["a"].fail()
        ended.wait_until_exited()
        cluster.start_coordinator("second")
        again = cluster.generation(2)
        assert {start.restarts for start in again.values()} == {1}
        again["b"].fail()
        assert cluster.agents["a"].end()[0] == cluster.agents["b"].end()[0] == 1
        cluster.agents["second"].signal(signal.SIGTERM)
        cluster.end()


def test_node_lost_with_the_coordinator_is_detected_after_the_outage(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2:3") as cluster:
        cluster.start_coordinator("first")
        before = cluster.form("a", "b", "c", conf=ELSEWHERE)
        cluster.agents["first"].kill()
        victim = next(name for name, start in before.items() if start.rank == 1)
        cluster.agents[victim].kill()
        cluster.start_coordinator("second", conf="recover_timeout=0.5")
        after = cluster.generation(2)
        assert victim not in after
        assert {start.restarts for start in after.values()} == {0}
        order = sorted(after, key=lambda name: before[name].rank)
        assert [after[name].rank for name in order] == [0, 1]
        finish_all(after.values())
        for name in after:
            assert cluster.agents[name].end()[0] == 0
        cluster.agents["second"].signal(signal.SIGTERM)
        cluster.end()


def test_agents_exit_if_the_coordinator_stays_unreachable(tmp_path: Path) -> None:
    conf = f"coordinator_timeout=3,{ELSEWHERE}"
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_coordinator("coordinator")
        cluster.form("a", "b", conf=conf)
        cluster.agents["coordinator"].kill()
        ends = cluster.end()
        for name in "ab":
            code, output = ends[name]
            assert code == 78
            line = output.splitlines()[-1]
            assert re.fullmatch(
                rf"holdfast run: error: the coordinator at {re.escape(cluster.endpoint)} has "
                r"been unreachable since \d\d:\d\d:\d\d \(\d+ s\): connection refused",
                line,
            ), line


def test_early_agents_wait_for_the_coordinator(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        cluster.start_all("a", "b", conf=ELSEWHERE)
        output = cluster.agents["a"].wait_for_output("waiting: no connection to the coordinator at")
        assert cluster.endpoint in output
        cluster.start_coordinator("coordinator")
        finish_all(cluster.generation(2).values())
        assert cluster.agents["a"].end()[0] == cluster.agents["b"].end()[0] == 0
        cluster.agents["coordinator"].signal(signal.SIGTERM)
        cluster.end()


def test_agent_reports_a_coordinator_that_never_starts(tmp_path: Path) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2", conf=f"join_timeout=0.5,{ELSEWHERE}") as cluster:
        cluster.start("a")
        code, output = cluster.end()["a"]
        assert code == 78
        assert len(output.splitlines()) == 1, output
        assert output.startswith("holdfast run: error: ")
        assert cluster.endpoint in output
        assert "connection refused" in output


def soft_limit_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


def test_coordinator_raises_its_descriptor_limit_but_not_that_of_workers(tmp_path: Path) -> None:
    given = 200
    fewer = ("sh", "-c", f'ulimit -Sn {given}; exec "$@"', "sh")
    with Cluster(tmp_path, OBEY, "--max-restarts=1", nnodes="1") as cluster:
        agent = cluster.start("a", before=fewer, conf="is_host=true")
        (start,) = cluster.ranks(1)
        assert soft_limit_of(agent.pid) > given
        assert soft_limit_of(start.pid) == given
        (keeper,) = children(agent.pid)
        os.kill(keeper, signal.SIGKILL)
        (start,) = cluster.ranks(1)
        # Its keeper was started after the limit was raised.
        assert soft_limit_of(start.pid) == given
        start.finish()
        assert cluster.codes() == {"a": 0}


@pytest.mark.parametrize("by", ["another program", "a coordinator"])
def test_busy_port_is_reported_to_the_node_that_must_coordinate(tmp_path: Path, by: str) -> None:
    with Cluster(tmp_path, OBEY, nnodes="2") as cluster:
        if by == "a coordinator":
            owner = cluster.start_coordinator("coordinator").pid
            listener = None
        else:
            listener = socket.create_server((cluster.host, cluster.port))
            owner = os.getpid()
        cluster.start("a", conf="is_host=true")
        code, output = cluster.agents["a"].end()
        assert code == 78
        assert output.count("\n") == 1
        assert f"port {cluster.port} is in use" in output
        assert str(owner) in output
        if listener is not None:
            listener.close()
        else:
            cluster.agents["coordinator"].signal(signal.SIGTERM)
        cluster.end()


def test_agent_at_another_programs_port_reports_that_it_is_not_a_coordinator(
    tmp_path: Path,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Cluster(tmp_path, OBEY, nnodes="2", port=port) as cluster:
            agent = cluster.start("a")
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                code, output = agent.end()
            assert code == 78
            assert output.count("\n") == 1
            assert cluster.endpoint in output
