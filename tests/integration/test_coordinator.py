"""A node's connection to a coordinator in another process: the end of a job, certificates, addresses, the store."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from certificates import Pair, make_ca, make_certificate
from holdfast.core.job_settings import JobSettings
from holdfast.core.phases import JobOutcome, NodePhase
from holdfast.core.protocol import NodeInfo, Status
from holdfast.errors import UsageError
from holdfast.membership.interface import JoinRefused
from holdfast.net.tls import TlsFiles
from real_coordinators import (
    Coordinator,
    RawClient,
    eventually,
    fault,
    member,
    node,
    started,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path

SECRET = b"drawn, not thought up"


# Forming, failing, ending.


def test_host_waits_until_all_nodes_know_the_end() -> None:
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


def test_host_of_an_unfinished_job_does_not_wait() -> None:
    first = node(0, "a", is_host=True)
    with started(first):
        second = node(first.endpoint[1], "b")
        with started(second):
            until(second, member)
            first.close(drain_s=3600)
            eventually(lambda: second.problem() != "")


# Admission.


@pytest.fixture
def tls(tmp_path: Path) -> tuple[Pair, Pair]:
    ca = make_ca(tmp_path)
    return ca, make_certificate(ca, "head")


def test_untrusted_certificate_is_reported_immediately(
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
        refusal = fault(one)
        assert isinstance(refusal, JoinRefused)
        assert "tls_ca" in refusal.why


def test_missing_client_certificate_is_reported(tls: tuple[Pair, Pair]) -> None:
    ca, head = tls
    conf = f"--rdzv-conf=tls_cert={head.cert},tls_key={head.key},tls_ca={ca.cert}"
    with Coordinator("--endpoint=127.0.0.1:0", conf) as coordinator:
        with started(one := node(coordinator.port, "a", tls=TlsFiles(ca=ca.cert))):
            eventually(lambda: "tls_cert and tls_key" in one.problem())
        _, errors = coordinator.end(signal.SIGTERM)
        assert "tls_cert and tls_key" in errors


def test_newer_connection_of_an_incarnation_replaces_the_older() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        status = Status(
            seq=1,
            run_id="job",
            info=NodeInfo(node="a", incarnation=1),
            settings=JobSettings(min_nodes=1, max_nodes=1),
        )
        with RawClient(coordinator.port).complete_handshake() as older:
            older.send_message(status)
            assert older.receive() is not None
            with RawClient(coordinator.port).complete_handshake() as newer:
                newer.send_message(status)
                assert newer.receive() is not None
                last = older.receive()
                assert "newer connection" in getattr(last, "why", "")
                assert older.receive() is None


# Addresses.


def test_coordinator_is_reachable_at_all_addresses_of_its_host() -> None:
    """With a name that is not loopback, it listens on IPv4 and IPv6."""
    first = node(0, "a", host="0.0.0.0", is_host=True, token=SECRET, nodes=3)
    with started(first):
        port = first.endpoint[1]
        others = [
            node(port, "b", nodes=3, token=SECRET),
            node(port, "c", nodes=3, host="::1", token=SECRET),
        ]
        with started(*others):
            until(others[1], member)


def test_invalid_node_is_refused_locally() -> None:
    with pytest.raises(UsageError, match="fixed_rank"):
        node(1, "a", info=NodeInfo(node="a", incarnation=1, fixed_rank=-7)).start()


def test_port_0_is_not_an_endpoint_to_connect_to() -> None:
    with pytest.raises(UsageError, match="port"):
        node(0, "a").start()


# The store.


def test_store_is_shared_between_nodes() -> None:
    with Coordinator("--endpoint=127.0.0.1:0") as coordinator:
        first, second = (node(coordinator.port, name) for name in "ab")
        with started(first, second):
            until(first, member)
            until(second, member)
            mine, yours = first.store("round 0"), second.store("round 0")
            setting = threading.Timer(0.05, yours.set, ("late", "value"))
            setting.start()
            assert mine.get("late") == b"value"  # The call waited for the key.
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
            with pytest.raises(ValueError, match="limit"):
                mine.set("k", b"x" * 1_000_000)
            with pytest.raises(RuntimeError, match="late"):
                mine.add("late", 1)
