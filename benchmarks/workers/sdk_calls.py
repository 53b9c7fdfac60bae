"""Calls the functions of `holdfast.worker` very often, on a real page, and prints the cost of one call.

sdk_calls.py CALLS REPEATS
"""

from __future__ import annotations

import time

_before = time.perf_counter_ns()
from holdfast import worker  # noqa: E402 (how long this takes is measured)

IMPORT_NS = time.perf_counter_ns() - _before

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import timeit  # noqa: E402

from holdfast.processes.workers.pages import WorkerPages  # noqa: E402

CALLS = {
    "heartbeat": "worker.heartbeat()",
    "progress": "worker.progress(12345)",
    "section": "with worker.section('forward and backward', timeout=60): pass",
    "section_again": "with made_before: pass",
}


def main() -> None:
    calls, repeats = map(int, sys.argv[1:])
    pages = WorkerPages()
    pages.begin([0])
    os.environ.update(pages.environment(0))
    names = {"worker": worker, "made_before": worker.section("forward and backward", timeout=60)}
    worker.heartbeat()
    # As with a real agent that has read the page and will read it again later.
    with worker.section("first", timeout=30):
        pages.take(time.monotonic())
    found = {"import_ms": IMPORT_NS / 1e6}
    for name, call in CALLS.items():
        took = timeit.repeat(call, globals=names, number=calls, repeat=repeats)
        found[name] = min(took) / calls * 1e9
    assert pages.progress(0).step == 12345
    pages.close()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
