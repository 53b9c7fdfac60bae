"""The text against the parser of Prometheus's own client: what we write, it reads."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from holdfast.observe.metrics.families import LABEL_CHARS_MAX, Family, Histogram, number, render


def read(*families: Family) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Return what the parser finds, by the name of the family."""
    text = render(families).decode()
    return {
        found.name: [(one.name, one.labels, one.value) for one in found.samples]
        for found in text_string_to_metric_families(text)
    }


def test_the_text_to_the_letter() -> None:
    times = Histogram((0.5, 2.0))
    times.observe(1.25)
    families = [
        Family("up", "gauge", "Whether it\nis \\ up").add(1, host="a").add(0, host="b"),
        Family("seen_total", "counter", "How many").add(3),
        Family("took_seconds", "histogram", "How long").add(times, stage="stop"),
        Family("empty", "gauge", "Nothing yet"),
    ]
    assert render(families).decode().splitlines() == [
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


def test_the_parser_finds_kinds_and_meanings() -> None:
    families = [
        Family("up", "gauge", 'It\'s "up" \\ here\nor there').add(1),
        Family("seen_total", "counter", "How many").add(3),
        Family("took_seconds", "histogram", "How long").add(Histogram()),
    ]
    found = [*text_string_to_metric_families(render(families).decode())]
    assert [(one.name, one.type) for one in found] == [
        ("up", "gauge"),
        ("seen", "counter"),
        ("took_seconds", "histogram"),
    ]
    assert found[0].documentation == families[0].meaning


texts = st.text(max_size=LABEL_CHARS_MAX)


@given(st.dictionaries(st.sampled_from(["a", "b_2", "run_id"]), texts, min_size=1))
def test_labels_come_back_as_they_were(labels: dict[str, str]) -> None:
    [(name, found, value)] = read(Family("up", "gauge", "Up").add(2.5, **labels))["up"]
    assert (name, found, value) == ("up", labels, 2.5)


@given(st.text(alphabet='\\"\n{}=, n', max_size=12), st.text(alphabet='\\"\n{}=, n', max_size=12))
def test_nothing_in_a_label_ends_it(one: str, other: str) -> None:
    [(_, found, _)] = read(Family("up", "gauge", "Up").add(1, one=one, other=other))["up"]
    assert found == {"one": one, "other": other}


@given(st.floats())
def test_numbers_come_back_as_they_were(value: float) -> None:
    [(_, _, found)] = read(Family("up", "gauge", "Up").add(value))["up"]
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_numbers_are_written_as_people_do() -> None:
    values = (3.0, 0.25, 2.0**60, math.inf, -math.inf, math.nan, True)
    assert [number(one) for one in values] == [
        "3", "0.25", "1.152921504606847e+18", "+Inf", "-Inf", "NaN", "1",
    ]  # fmt: skip


def test_a_long_label_is_cut_and_a_strange_character_replaced() -> None:
    [(_, found, _)] = read(Family("up", "gauge", "Up").add(1, a="x" * 999, b="\ud800"))["up"]
    assert found == {"a": "x" * LABEL_CHARS_MAX, "b": "?"}


@pytest.mark.parametrize(
    ("name", "kind", "label"),
    [
        ("no-dash", "gauge", "a"),
        ("1st", "gauge", "a"),
        ("up", "meter", "a"),
        ("up", "counter", "a"),
        ("up_total", "gauge", "a"),
        ("up", "gauge", "no-dash"),
        ("up", "gauge", "__name__"),
        ("up", "gauge", "le"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, kind: str, label: str) -> None:
    with pytest.raises(ValueError, match=r"called|counter"):
        Family(name, kind, "").add(1, **{label: 1})
