"""The endpoint over real sockets."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from holdfast.errors import EnvironmentProblem
from holdfast.observe.metrics.families import Family
from holdfast.observe.metrics.prometheus import MetricsEndpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 20


def collect() -> list[Family]:
    return [Family("up", "gauge", "Up").add(1, job='"quoted"')]


@pytest.fixture
def endpoint() -> Iterator[MetricsEndpoint]:
    serving = MetricsEndpoint(collect)
    serving.start()
    yield serving
    serving.close()


def test_what_is_fetched_is_what_prometheus_reads(
    endpoint: MetricsEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with urllib.request.urlopen(endpoint.url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        [family] = text_string_to_metric_families(answer.read().decode())
    assert family.samples[0].labels == {"job": '"quoted"'}


def test_nothing_else_is_there(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(endpoint.url + "/more", timeout=PATIENCE_S)
    caught.value.close()


def test_it_is_on_this_host_alone_and_tells_where(caplog: pytest.LogCaptureFixture) -> None:
    serving = MetricsEndpoint(collect)
    caplog.set_level("INFO", "holdfast")
    serving.start()
    assert serving.port
    assert serving.url == f"http://127.0.0.1:{serving.port}/metrics"
    assert caplog.messages == [f"metrics: {serving.url}"]
    serving.close()


def test_an_address_with_colons_is_written_in_brackets() -> None:
    assert MetricsEndpoint(collect, host="::1", port=9400).url == "http://[::1]:9400/metrics"


def test_a_port_in_use_names_the_flag(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(EnvironmentProblem, match=r"^--metrics-port: cannot listen .*in use"):
        MetricsEndpoint(collect, port=endpoint.port).start()


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_that_is_not_ours_names_its_own_flag(host: str) -> None:
    with pytest.raises(EnvironmentProblem, match=rf"^--metrics-addr: cannot listen at {host}: "):
        MetricsEndpoint(collect, host=host).start()
