"""Coordinators and nodes over real sockets, in real processes, with whatever can go wrong."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from certificates import Pair, make_ca, make_certificate
from holdfast.core.job_settings import JobSettings
from holdfast.core.protocol import Failure, JobOutcome, NodeInfo, NodePhase, NodeRole, Status
from holdfast.errors import UsageError
from holdfast.membership.interface import JoinRefused
from holdfast.net.tls import TlsFiles
from holdfast.wire import control
from holdfast.wire.messages import Query, Reply
from real_coordinators import (
    LOCAL,
    Coordinator,
    RawClient,
    eventually,
    fault,
    member,
    node,
    started,
    until,
)
from real_teams import free_port
from serving import jobs_in

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"drawn, not thought up"


# Forming, failing, ending.


def test_nodes_form_a_round_and_restart_together() -> None:
    first = node(0, "a", is_host=True)
    first.start()
    second = node(first.endpoint[1], "b")
    with started(second):
        try:
            assert first.hosting
            assert not second.hosting
            views = [until(one, member) for one in (first, second)]
            assert sorted(view.rank for view in views) == [0, 1]
            assert {view.master_addr for view in views} == {LOCAL}
            second.report(NodePhase.FAILED, 0, Failure(node="b", summary="worker 1 failed"))
            for one in (first, second):
                view = until(one, lambda view: view.generation == 1)
                assert (view.restarts, view.why) == (1, "worker 1 failed")
        finally:
            second.close()
            first.close()


def test_the_host_stays_until_all_know_the_end() -> None:
    first = node(0, "a", is_host=True)
    with started(first):
        second = node(first.endpoint[1], "b")
        with started(second):
            for one in (first, second):
                until(one, member)
                one.report(NodePhase.SUCCEEDED, 0)
            assert until(first, lambda view: view.final).outcome is JobOutcome.SUCCEEDED
            closing = threading.Thread(target=first.close, kwargs={"drain_s": 20})
            closing.start()
            assert until(second, lambda view: view.final).outcome is JobOutcome.SUCCEEDED
            eventually(lambda: first._server is None or first._server.connections <= 1)
            second.store("s", timeout_s=2).set("still", "served")
            second.close()
            closing.join(20)
            assert not closing.is_alive()


def test_a_host_whose_job_goes_on_does_not_wait() -> None:
    first = node(0, "a", is_host=True)
    with started(first):
        second = node(first.endpoint[1], "b")
        with started(second):
            until(second, member)
            first.close(drain_s=3600)
            eventually(lambda: second.problem() != "")


def test_a_node_that_leaves_is_missed_at_once() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        settings = JobSettings(min_nodes=1, max_nodes=2, settle_s=0.05)
        first, second = (node(coordinator.port, name, settings=settings) for name in "ab")
        with started(first, second):
            until(first, lambda view: view.size == 2)
            assert second.leave(20)
            view = until(first, lambda view: view.size == 1)
            assert view.why == "b left"


def test_two_jobs_on_one_endpoint_know_nothing_of_each_other() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        jobs = [
            [node(coordinator.port, name, run_id=run_id) for name in "ab"] for run_id in ("x", "y")
        ]
        with started(*jobs[0], *jobs[1]):
            for one in (*jobs[0], *jobs[1]):
                assert until(one, member).run_id == one.run_id
            jobs[0][0].report(NodePhase.FAILED, 0)
            until(jobs[0][1], lambda view: view.generation == 1)
            with RawClient(coordinator.port, run_id="").shake_hands() as asking:
                asking.say(Query(id=7, what=control.STATUS))
                answer = asking.hear()
            assert isinstance(answer, Reply)
            assert {job.run_id: job.generation for job in jobs_in(answer)} == {"x": 1, "y": 0}
            assert {one.node for one in jobs_in(answer)[0].nodes} == {"a", "b"}


def test_a_fenced_node_comes_back_as_another_incarnation() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        settings = JobSettings(min_nodes=1, max_nodes=2, settle_s=0.05)
        first, second = (node(coordinator.port, name, settings=settings) for name in "ab")
        with started(first, second):
            old = until(second, lambda view: view.size == 2).incarnation
            second.report(NodePhase.LEAVING, 0)  # As if the coordinator had lost it.
            until(first, lambda view: view.size == 1)
            second.report(NodePhase.RUNNING, 0)
            until(second, lambda view: view.role is NodeRole.FENCED)
            new = second.rejoin()
            assert new != old
            assert until(second, member).incarnation == new
            until(first, lambda view: view.size == 2)


# The coordinator goes away.


def test_a_coordinator_that_is_killed_and_started_again_finds_the_job_as_it_was() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        nodes = [node(coordinator.port, name, nodes=3) for name in "abc"]
        with started(*nodes):
            for one in nodes:
                until(one, member)
                one.report(NodePhase.RUNNING, 0)
            nodes[0].report(NodePhase.FAILED, 0)
            before = [until(one, lambda view: view.generation == 1) for one in nodes]
            for one in nodes:
                one.report(NodePhase.RUNNING, 1)
            coordinator.end(signal.SIGKILL)
            with Coordinator(f"--endpoint=127.0.0.1:{coordinator.port}"):
                for one, was in zip(nodes, before, strict=True):
                    now = until(one, lambda view, was=was: view.term > was.term)  # type: ignore[misc]
                    assert member(now)
                    assert (now.round, now.generation, now.rank) == (was.round, 1, was.rank)
                    assert now.restarts == 1


def test_another_node_of_the_host_takes_over() -> None:
    port = free_port()
    nodes = [node(port, name, nodes=3, is_host=None) for name in "abc"]
    with started(*nodes):
        assert [one.hosting for one in nodes] == [True, False, False]
        before = [until(one, member) for one in nodes]
        for one in nodes:
            one.report(NodePhase.RUNNING, 0)
        nodes[0].close()
        rest = list(zip(nodes[1:], before[1:], strict=True))
        for one, was in rest:  # Two of three are too few for a round.
            until(one, lambda view, was=was: view.term > was.term)  # type: ignore[misc]
        assert sorted(one.hosting for one in nodes[1:]) == [False, True]
        with started(node(port, "d", nodes=3)):
            for one, _ in rest:
                until(one, lambda view: member(view) and view.generation == 1)


# Who may take part.


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, None), (SECRET, b"another"), (None, SECRET)])
def test_a_wrong_token_is_reported_at_once(theirs: bytes | None, ours: bytes | None) -> None:
    given = {"HOLDFAST_TOKEN": theirs.decode()} if theirs else {}
    with Coordinator("--endpoint=127.0.0.1:0", **given) as coordinator:
        with started(one := node(coordinator.port, "a", token=ours)):
            news = fault(one)
            assert isinstance(news, JoinRefused)
            assert "HOLDFAST_TOKEN" in news.why
            assert one.problem().endswith(f"127.0.0.1:{coordinator.port}: {news.why}")
        _, errors = coordinator.end(signal.SIGTERM)
        assert " 127.0.0.1" in errors
        assert SECRET.decode() not in errors


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Pair, Pair]:
    ca = make_ca(tmp_path)
    return ca, make_certificate(ca, "head")


def test_nodes_meet_over_tls(tls: tuple[Pair, Pair]) -> None:
    ca, head = tls
    files = TlsFiles(cert=head.cert, key=head.key, ca=ca.cert)
    first = node(0, "a", is_host=True, tls=files, token=SECRET)
    with started(first), started(second := node(first.endpoint[1], "b", tls=files, token=SECRET)):
        until(second, member)
        first.store("s").set("key", b"x" * 400_000)
        assert len(second.store("s").get("key")) == 400_000


def test_a_certificate_that_is_not_trusted_is_reported_at_once(
    tls: tuple[Pair, Pair], tmp_path: Path
) -> None:
    _, head = tls
    (tmp_path / "other").mkdir()
    stranger = make_ca(tmp_path / "other")
    conf = f"--rdzv-conf=tls_cert={head.cert},tls_key={head.key}"
    with (
        Coordinator("--endpoint=127.0.0.1:0", conf) as coordinator,
        started(one := node(coordinator.port, "a", tls=TlsFiles(ca=stranger.cert))),
    ):
        news = fault(one)
        assert isinstance(news, JoinRefused)
        assert "tls_ca" in news.why


def test_a_client_without_the_certificate_that_is_asked_for_is_reported(
    tls: tuple[Pair, Pair],
) -> None:
    ca, head = tls
    conf = f"--rdzv-conf=tls_cert={head.cert},tls_key={head.key},tls_ca={ca.cert}"
    with Coordinator("--endpoint=127.0.0.1:0", conf) as coordinator:
        with started(one := node(coordinator.port, "a", tls=TlsFiles(ca=ca.cert))):
            eventually(lambda: "tls_cert and tls_key" in one.problem())
        _, errors = coordinator.end(signal.SIGTERM)
        assert "tls_cert and tls_key" in errors


# Those who misbehave.


def forms_a_round(port: int) -> None:
    nodes = [node(port, name) for name in "ab"]
    with started(*nodes):
        for one in nodes:
            until(one, member)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x05nope!",
        b"\x7f\xff\xff\xff" + b"x" * 100,
        b"\x00\x00\x40\x00" + b"x" * 100,
        b"\x00\x00\x00\x00",
    ],
)
def test_garbage_closes_its_own_connection_only(sent: bytes) -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        with RawClient(coordinator.port) as bystander, RawClient(coordinator.port) as garbled:
            garbled.socket.sendall(sent)
            assert garbled.hear() is None
            bystander.shake_hands()
        forms_a_round(coordinator.port)
        _, errors = coordinator.end(signal.SIGTERM)
        assert errors.count(" 127.0.0.1") == 1


def test_a_newer_connection_of_an_incarnation_replaces_the_older() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        status = Status(
            seq=1,
            run_id="job",
            info=NodeInfo(node="a", incarnation=1),
            settings=JobSettings(min_nodes=1, max_nodes=1),
        )
        with RawClient(coordinator.port).shake_hands() as older:
            older.say(status)
            assert older.hear() is not None
            with RawClient(coordinator.port).shake_hands() as newer:
                newer.say(status)
                assert newer.hear() is not None
                last = older.hear()
                assert "newer connection" in getattr(last, "why", "")
                assert older.hear() is None


# Where.


def test_ipv6_loopback() -> None:
    first = node(0, "a", host="::1", is_host=None)
    with started(first):
        assert first.hosting
        with started(second := node(first.endpoint[1], "b", host="::1")):
            assert until(second, member).master_addr == "::1"


def test_a_host_that_all_addresses_reach() -> None:
    """Bound by a name that is not loopback's, it is there for IPv4 and IPv6."""
    first = node(0, "a", host="0.0.0.0", is_host=True, token=SECRET, nodes=3)
    with started(first):
        port = first.endpoint[1]
        others = [
            node(port, "b", nodes=3, token=SECRET),
            node(port, "c", nodes=3, host="::1", token=SECRET),
        ]
        with started(*others):
            until(others[1], member)


def test_a_node_that_no_coordinator_would_take_is_refused_here() -> None:
    with pytest.raises(UsageError, match="fixed_rank"):
        node(1, "a", info=NodeInfo(node="a", incarnation=1, fixed_rank=-7)).start()


def test_port_0_is_no_endpoint_to_connect_to() -> None:
    with pytest.raises(UsageError, match="port"):
        node(0, "a").start()


# The store.


def test_the_store_is_shared_between_nodes() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        first, second = (node(coordinator.port, name) for name in "ab")
        with started(first, second):
            until(first, member)
            until(second, member)
            mine, yours = first.store("round 0"), second.store("round 0")
            setting = threading.Timer(0.05, yours.set, ("late", "value"))
            setting.start()
            assert mine.get("late") == b"value"  # It waited for it.
            setting.join()
            assert mine.add("count", 2) == 2
            assert yours.add("count", 3) == 5
            assert yours.compare_set("late", "value", "new") == b"new"
            assert mine.compare_set("late", "value", "newer") == b"new"
            mine.append("list", "x")
            yours.append("list", "x")
            assert mine.multi_get(["list", "late"]) == [b"xx", b"new"]
            mine.multi_set(["p", "q"], ["1", b"2"])
            assert yours.check(["p", "q"])
            assert not yours.check(["p", "r"])
            assert yours.num_keys() == 5
            assert mine.delete_key("p")
            assert not mine.delete_key("p")
            assert first.store("round 1").num_keys() == 0
            with pytest.raises(TimeoutError, match="for: never"):
                mine.wait(["q", "never"], timedelta(seconds=0.05))
            with pytest.raises(ValueError, match="over"):
                mine.set("k", b"x" * 1_000_000)
            with pytest.raises(RuntimeError, match="late"):
                mine.add("late", 1)


def test_a_wait_outlasts_a_coordinator_that_is_started_again() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        first, second = (node(coordinator.port, name) for name in "ab")
        with started(first, second):
            until(first, member)
            until(second, member)
            got: list[bytes] = []
            waiting = threading.Thread(target=lambda: got.append(first.store("s").get("key")))
            waiting.start()
            coordinator.end(signal.SIGKILL)
            with Coordinator(f"--endpoint=127.0.0.1:{coordinator.port}"):
                second.store("s").set("key", "value")
                waiting.join(20)
            assert got == [b"value"]
