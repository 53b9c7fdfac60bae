"""The text format, checked with the parser of Prometheus's client, and the endpoint over real sockets."""

from __future__ import annotations

import math
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from holdfast.errors import EnvironmentProblem
from holdfast.observe.metrics.families import SECONDS, Family, Histogram
from holdfast.observe.metrics.prometheus import LABEL_CHARS_MAX, MetricsEndpoint, render

PATIENCE_S = 20


def read(family: Family) -> tuple[dict[str, str], float]:
    """Return labels and value of a family's only sample, as parsed."""
    [found] = text_string_to_metric_families(render([family]).decode())
    [sample] = found.samples
    return sample.labels, sample.value


def test_text_format_is_exact() -> None:
    times = Histogram((0.5, 2.0))
    times.observe(1.25)
    families = [
        Family("up", "gauge", "Whether it\nis \\ up").add(1, host="a").add(0, host="b"),
        Family("seen_total", "counter", "How many").add(3),
        Family("took_seconds", "histogram", "How long").add(times, stage="stop"),
        Family("empty", "gauge", "Nothing yet"),
    ]
    text = render(families).decode()
    assert text.splitlines() == [
        r"# HELP up Whether it\nis \\ up",
        "# TYPE up gauge",
        'up{host="a"} 1',
        'up{host="b"} 0',
        "# HELP seen_total How many",
        "# TYPE seen_total counter",
        "seen_total 3",
        "# HELP took_seconds How long",
        "# TYPE took_seconds histogram",
        'took_seconds_bucket{stage="stop",le="0.5"} 0',
        'took_seconds_bucket{stage="stop",le="2"} 1',
        'took_seconds_bucket{stage="stop",le="+Inf"} 1',
        'took_seconds_sum{stage="stop"} 1.25',
        'took_seconds_count{stage="stop"} 1',
    ]
    assert [one.documentation for one in text_string_to_metric_families(text)] == [
        one.help_text for one in families[:3]
    ]


LABELS = st.text(max_size=LABEL_CHARS_MAX) | st.text(alphabet='\\"\n{}=, n', max_size=12)


@given(st.dictionaries(st.sampled_from(["a", "b_2", "run_id"]), LABELS, min_size=1), st.floats())
def test_labels_and_numbers_survive_a_round_trip(labels: dict[str, str], value: float) -> None:
    found, number = read(Family("up", "gauge", "Up").add(value, **labels))
    assert found == labels
    assert number == value or (math.isnan(number) and math.isnan(value))


@given(st.lists(st.floats(0, 1e6) | st.sampled_from(SECONDS)))
def test_histogram_counts_up_to_each_bound(values: list[float]) -> None:
    times = Histogram(SECONDS)
    before = times.copy()
    for value in values:
        times.observe(value)
    counts = [count for _, count in times.cumulative()]
    assert counts == [sum(one <= bound for one in values) for bound in (*SECONDS, math.inf)]
    assert times.count == len(values)
    assert times.sum == pytest.approx(sum(values))
    assert before.count == sum(before.counts) == 0


def test_endpoint_serves_prometheus_on_this_host(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "holdfast")
    endpoint = MetricsEndpoint(lambda: [Family("up", "gauge", "Up").add(1, job='"quoted"')])
    endpoint.start()
    assert endpoint.url == f"http://127.0.0.1:{endpoint.port}/metrics"
    assert endpoint.url in caplog.text
    with urllib.request.urlopen(endpoint.url, timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        [family] = text_string_to_metric_families(answer.read().decode())
    assert family.samples[0].labels == {"job": '"quoted"'}
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(endpoint.url + "/more", timeout=PATIENCE_S)
    caught.value.close()
    with pytest.raises(EnvironmentProblem, match=r"^--metrics-port: "):
        MetricsEndpoint(list, port=endpoint.port).start()
    endpoint.close()
    assert MetricsEndpoint(list, host="::1", port=9400).url == "http://[::1]:9400/metrics"
