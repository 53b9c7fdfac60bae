"""Outside `_impl`, `holdfast.elastic` has names and no code; peers/ compares the names with torch's."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.elastic import timer


def test_submodules_are_attributes_of_their_package_as_with_torch() -> None:
    program = (
        "import holdfast.elastic.multiprocessing as workers\n"
        "import holdfast.elastic.agent.server as agent\n"
        "workers.errors.record, workers.errors.handlers, workers.errors.error_handler\n"
        "workers.api.Std, workers.redirects.redirect, workers.tail_log.TailLog\n"
        "workers.subprocess_handler.handlers, workers.subprocess_handler.subprocess_handler\n"
        "agent.api.Worker, agent.local_elastic_agent.LocalElasticAgent\n"
        "import holdfast.elastic as elastic\n"
        "elastic.utils.logging.get_logger, elastic.utils.data.cycling_iterator.CyclingIterator\n"
        "elastic.agent.server.health_check_server.HealthCheckServer\n"
        "elastic.rendezvous.dynamic_rendezvous.Token, elastic.timer.local_timer.LocalTimerClient\n"
        "elastic.metrics.api.put_metric, elastic.events.handlers, elastic.control_plane.worker_main\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_attribute_that_is_no_submodule_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"elastic\.timer.*'no_such_name'"):
        getattr(timer, "no_such_name")  # noqa: B009 (mypy would report the name)
