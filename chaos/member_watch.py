"""Observes the members of a job's own etcd from the switch.

    python -m chaos.member_watch RUN_ID HOST,HOST,HOST

A line is ``time cluster/has_leader ...``, one word for each machine; ``-`` stands for a machine
that is not a member.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import TYPE_CHECKING

from holdfast.core.etcd.cluster import Serving
from holdfast.etcd.cluster_list import Certificates, cluster_list, parse_machines
from holdfast.etcd.probe import Probe, probe_member

if TYPE_CHECKING:
    import ssl

    from holdfast.etcd.cluster_list import ClusterList

POLL_S = 0.25


async def main(run_id: str, machines: str) -> None:
    of = cluster_list(parse_machines(machines), run_id, environ=os.environ)
    tls = Certificates(of).client_context()
    while True:
        at_ns = time.monotonic_ns()
        seen = await asyncio.gather(*(see(of, number, tls) for number in range(len(of.machines))))
        print(at_ns, *seen, flush=True)
        await asyncio.sleep(POLL_S)


async def see(of: ClusterList, number: int, tls: ssl.SSLContext | None) -> str:
    host, port = of.machines[number]
    result = await probe_member(host, port, Probe(of.run_id, of.names), tls=tls)
    one = result.state
    return f"{one.cluster}/{int(one.has_leader)}" if isinstance(one, Serving) else "-"


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
