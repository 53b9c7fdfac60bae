"""Outside `_impl`, `holdfast.elastic` has names and no code; peers/ compares the names with torch's."""

from __future__ import annotations

import subprocess
import sys


def test_submodules_are_attributes_of_their_package_as_with_torch() -> None:
    program = (
        "import holdfast.elastic.multiprocessing as workers\n"
        "import holdfast.elastic.agent.server as agent\n"
        "workers.errors.record, workers.errors.handlers, workers.errors.error_handler\n"
        "workers.api.Std, workers.redirects.redirect, workers.tail_log.TailLog\n"
        "workers.subprocess_handler.handlers, workers.subprocess_handler.subprocess_handler\n"
        "agent.api.Worker, agent.local_elastic_agent.LocalElasticAgent\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
