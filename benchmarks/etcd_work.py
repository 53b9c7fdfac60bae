"""Rows about jobs on etcd, compared with the same jobs at an embedded coordinator.

One turn runs both alternately, so both see the same machine; its sample is the ratio of their
medians. etcd runs on the same machine as all agents, with its data on a disk. The round trip is the
time of a small write.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import time
from functools import partial
from http.client import HTTPConnection
from typing import TYPE_CHECKING, Any

from benchmarks.figures import HOLDFAST
from benchmarks.joining import NS_PER_S
from benchmarks.launching import BenchmarkError, descendants_of
from benchmarks.node_restarts import PAUSE_S
from benchmarks.nodes import LISTENING, Nodes, free_pairs, open_files, sockets
from holdfast.core.etcd.calls import Put, Txn, TxnDone
from holdfast.etcd.etcd_settings import EtcdSettings, parse_endpoints
from holdfast.etcd.job_records import read_job
from holdfast.etcd.local_etcd import LocalEtcd
from holdfast.etcd.sync_client import EtcdClient

if TYPE_CHECKING:
    from benchmarks.launching import Lab, Samples
    from benchmarks.nodes import NodeAgent

PAIRS = {2: 7, 16: 4}
KILLS = 5
TRIPS = 200
IDLE_S = 10.0
FEW, MANY = 4, 16
MEMBERS = 3
# Agents on several machines need a token. On loopback they do not, but use one here too.
AS_ON_A_NETWORK = (
    "--rdzv-conf",
    "auth=token",
)

_jobs = itertools.count()


def measure_start(count: int, lab: Lab, launcher: str) -> Samples:
    """Measure from the start of the agents to the last worker's first line."""
    del launcher
    embedded: list[float] = []
    on_etcd: list[float] = []
    with LocalEtcd() as server:
        trip_s = _round_trip_s(server.get_client())
        for _ in range(PAIRS[count]):
            embedded.append(form_s(lab, count, ()))
            on_etcd.append(form_s(lab, count, _flags(server)))
    return _compared(embedded, on_etcd, trip_s)


def measure_restart(count: int, lab: Lab, launcher: str) -> Samples:
    """Kill workers one after the other; measure from each kill to the last worker's first line."""
    del launcher
    with LocalEtcd() as server:
        trip_s = _round_trip_s(server.get_client())
        return _compared(restart_s(lab, count, ()), restart_s(lab, count, _flags(server)), trip_s)


def measure_ha_start(count: int, lab: Lab, launcher: str) -> Samples:
    """Measure from the start of the last agent until all workers run user code.

    Three of the agents run etcd's members.
    """
    del launcher
    with Nodes(lab, HOLDFAST, f"{count}:{count}", flags=_ha_flags()) as job:
        agents = job.start(count)
        starts = job.formed(count)
        begun_ns = max(agent.started_ns for agent in agents)
        return {"start": [(max(start.reached_ns for start in starts) - begun_ns) / NS_PER_S]}


def measure_ha_restart(count: int, lab: Lab, launcher: str) -> Samples:
    """Kill workers one after the other, with the members on the same machine as all agents."""
    del launcher
    embedded, own = restart_s(lab, count, AS_ON_A_NETWORK), restart_s(lab, count, _ha_flags())
    ratio = statistics.median(own) / statistics.median(embedded)
    return {"embedded": embedded, "ha": own, "ratio": [ratio]}


def measure_writes(lab: Lab, launcher: str) -> Samples:
    """Count the writes to etcd: for a round, in an idle second, and for a restart."""
    del launcher
    with LocalEtcd() as server:
        client = server.get_client()
        few, many = (_writes(lab, count, server, client) for count in (FEW, MANY))
    return {
        "round": [many[0] / MANY],
        "idle": [many[1]],
        "restart": [many[2] / MANY],
        "growth": [(many[0] / MANY) / (few[0] / FEW)],
    }


def measure_lost(lab: Lab, launcher: str) -> Samples:
    """Kill one of the three agents of a `2:3` job: in one run a follower, in another the leader.

    All timeouts have their defaults.
    """
    del launcher
    with LocalEtcd() as server:
        return {
            "follower": [_lost_s(lab, _flags(server), [server.get_endpoint()], leads=False)],
            "leader": [_lost_s(lab, _flags(server), [server.get_endpoint()], leads=True)],
        }


def measure_lost_member(lab: Lab, launcher: str) -> Samples:
    """With `--ha`, kill the leading agent whose etcd member is also the leader of etcd."""
    del launcher
    where = [f"127.0.0.1:{port}" for port in free_pairs(3)]
    name = f"bench-{next(_jobs)}"
    flags = ("--rdzv-backend", "ha", "--rdzv-endpoint", ",".join(where), "--rdzv-id", name)
    return {"member": [_lost_s(lab, flags, where, leads=True)]}


def _lost_s(lab: Lab, flags: tuple[str, ...], where: list[str], *, leads: bool) -> float:
    with Nodes(lab, HOLDFAST, "2:3", flags=flags) as job:
        job.start(3)
        job.formed(3)
        settings = EtcdSettings(endpoints=parse_endpoints(",".join(where))[0])
        with EtcdClient(settings) as client:
            _summary, name = read_job(client, flags[-1])
        leader = next(one for one in job.agents if str(one.pid) in name.split("-"))
        if len(where) > 1:
            _move_etcd_leader(job, leader, where)
        time.sleep(random.uniform(*PAUSE_S))
        victim = leader if leads else next(one for one in job.agents if one is not leader)
        since_ns = victim.kill()
        left = [one for one in job.agents if one is not victim]
        starts = job.wait_for(left, since_ns=since_ns)
        return (max(one.reached_ns for one in starts) - since_ns) / NS_PER_S


def _move_etcd_leader(job: Nodes, to: NodeAgent, where: list[str]) -> None:
    """Make an agent's etcd member the leader of etcd, because its loss is the worst case."""
    below = descendants_of(to.pid)
    status = {one: _post(one, "/v3/maintenance/status", {}) for one in where}
    for one, its in status.items():
        port = int(one.rpartition(":")[2])
        if any(sockets(LISTENING, port) & open_files(pid) for pid in below):
            target = its["header"]["member_id"]
            of = next(
                at for at, each in status.items() if each["header"]["member_id"] == its["leader"]
            )
            if its["leader"] != target:
                _post(of, "/v3/maintenance/transfer-leadership", {"targetID": target})
            return
    raise BenchmarkError(f"the leader has no member of the cluster{job.output_ends()}")


def _post(endpoint: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    connection = HTTPConnection(endpoint, timeout=5.0)
    try:
        connection.request("POST", path, json.dumps(body))
        response: dict[str, Any] = json.load(connection.getresponse())
    finally:
        connection.close()
    return response


def _flags(server: LocalEtcd) -> tuple[str, ...]:
    # A run id that ended stays closed for a while.
    name = f"bench-{next(_jobs)}"
    endpoint = server.get_endpoint()
    return ("--rdzv-backend", "etcd", "--rdzv-endpoint", endpoint, "--rdzv-id", name)


def _ha_flags() -> tuple[str, ...]:
    """Return flags that list three machines, all of which are this one."""
    listed = ",".join(f"127.0.0.1:{port}" for port in free_pairs(MEMBERS))
    return ("--rdzv-backend", "ha", "--rdzv-endpoint", listed, *AS_ON_A_NETWORK)


def form_s(lab: Lab, count: int, flags: tuple[str, ...]) -> float:
    with Nodes(lab, HOLDFAST, f"{count}:{count}", flags=flags) as job:
        agents = job.start(count)
        starts = job.formed(count)
        begun_ns = min(agent.started_ns for agent in agents)
        return (max(start.reached_ns for start in starts) - begun_ns) / NS_PER_S


def restart_s(lab: Lab, count: int, flags: tuple[str, ...]) -> list[float]:
    flags = ("--max-restarts", str(KILLS), *flags)
    with Nodes(lab, HOLDFAST, f"{count}:{count}", flags=flags) as job:
        job.start(count)
        job.formed(count)
        samples = []
        for kill in range(KILLS):
            time.sleep(random.uniform(*PAUSE_S))
            samples.append(_kill_one(job, kill % count, count))
        return samples


def _kill_one(job: Nodes, node: int, count: int) -> float:
    killed_ns = time.monotonic_ns()
    os.kill(job.latest(job.agents[node]).pid, signal.SIGKILL)
    starts = job.formed(count, since_ns=killed_ns)
    return (max(one.reached_ns for one in starts) - killed_ns) / NS_PER_S


def _writes(
    lab: Lab, count: int, server: LocalEtcd, client: EtcdClient
) -> tuple[float, float, float]:
    """Return the number of writes for the first round, in an idle second, and for a restart."""
    flags = ("--max-restarts", "1", *_flags(server))
    with Nodes(lab, HOLDFAST, f"{count}:{count}", flags=flags) as job:
        before = _revision(client)
        job.start(count)
        job.formed(count)
        time.sleep(1.0)
        formed = _revision(client)
        time.sleep(IDLE_S)
        idle = _revision(client)
        _kill_one(job, 0, count)
        time.sleep(1.0)
        return formed - before, (idle - formed) / IDLE_S, _revision(client) - idle


def _revision(client: EtcdClient) -> int:
    answer = client.call(Txn())
    assert isinstance(answer, TxnDone)
    return answer.revision


def _round_trip_s(client: EtcdClient) -> float:
    trips = []
    for number in range(TRIPS):
        begun = time.perf_counter()
        client.call(Txn((), (Put(b"/bench/trip", str(number).encode()),)))
        trips.append(time.perf_counter() - begun)
    return statistics.median(trips)


def _compared(embedded: list[float], on_etcd: list[float], trip_s: float) -> Samples:
    here, there = statistics.median(embedded), statistics.median(on_etcd)
    return {
        "embedded": embedded,
        "etcd": on_etcd,
        "trip": [trip_s],
        "ratio": [(there - trip_s) / here],
    }


measure_start_2 = partial(measure_start, 2)
measure_start_16 = partial(measure_start, 16)
measure_ha_start_3 = partial(measure_ha_start, 3)
measure_ha_start_8 = partial(measure_ha_start, 8)
measure_ha_restart_16 = partial(measure_ha_restart, 16)
measure_restart_16 = partial(measure_restart, 16)
