from __future__ import annotations

from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.rendezvous.config import SECONDS_MAX, RendezvousParameters


def with_value(value: object) -> RendezvousParameters:
    return RendezvousParameters("c10d", "host:1", "job", 1, 2, key=value)


def test_what_was_given_is_there() -> None:
    params = RendezvousParameters("c10d", "host:1", "job", 1, 2, "10.0.0.1", a=1, b="2")
    assert (params.backend, params.endpoint, params.run_id) == ("c10d", "host:1", "job")
    assert (params.min_nodes, params.max_nodes, params.local_addr) == (1, 2, "10.0.0.1")
    assert params.config == {"a": 1, "b": "2"}
    assert params.get("a") == 1
    assert params.get("c") is None
    assert params.get("c", 3) == 3


@pytest.mark.parametrize(
    ("backend", "least", "most", "named"),
    [("", 1, 1, "--rdzv-backend"), ("c10d", 0, 1, "--nnodes"), ("c10d", 3, 2, "--nnodes")],
)
def test_what_no_job_can_have_is_refused(backend: str, least: int, most: int, named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: "):
        RendezvousParameters(backend, "", "job", least, most)


@pytest.mark.parametrize("value", [True, 1, "1", "true", "T", "YES", "y"])
def test_words_for_on(value: object) -> None:
    assert with_value(value).get_as_bool("key") is True


@pytest.mark.parametrize("value", [False, 0, "0", "false", "F", "NO", "n"])
def test_words_for_off(value: object) -> None:
    assert with_value(value).get_as_bool("key") is False


@pytest.mark.parametrize("value", [2, -1, "on", "", " true", 1.0, [], b"1"])
def test_other_words_are_neither(value: object) -> None:
    with pytest.raises(ValueError, match=r"^--rdzv-conf: key: .* neither on nor off; accepted: "):
        with_value(value).get_as_bool("key")


@pytest.mark.parametrize(("value", "number"), [(3, 3), ("3", 3), (" -3 ", -3), (3.9, 3)])
def test_whole_numbers(value: object, number: int) -> None:
    assert with_value(value).get_as_int("key") == number


@pytest.mark.parametrize("value", ["3.5", "", "x", [], float("inf")])
def test_no_whole_numbers(value: object) -> None:
    with pytest.raises(ValueError, match=r"^--rdzv-conf: key: .* is not a whole number"):
        with_value(value).get_as_int("key")


@pytest.mark.parametrize(
    ("value", "seconds"), [(3, 3.0), ("0.25", 0.25), (SECONDS_MAX, SECONDS_MAX)]
)
def test_seconds_may_be_fractional(value: object, seconds: float) -> None:
    assert with_value(value).get_as_seconds("key") == seconds


@pytest.mark.parametrize(
    "value", [0, "0", -1, "nan", "inf", "x", "", True, [], SECONDS_MAX + 1, "1 s", 10**400]
)
def test_no_times(value: object) -> None:
    with pytest.raises(ValueError, match=r"^--rdzv-conf: key: .* is not a time; accepted: seconds"):
        with_value(value).get_as_seconds("key")


def test_a_time_of_nothing_where_that_makes_sense() -> None:
    assert with_value("0").get_as_seconds("key", zero=True) == 0
    with pytest.raises(ValueError, match="from 0"):
        with_value("-1").get_as_seconds("key", zero=True)


@pytest.mark.parametrize("method", ["get_as_bool", "get_as_int", "get_as_seconds"])
def test_defaults_hold_for_what_was_not_given(method: str) -> None:
    params: Any = RendezvousParameters("c10d", "", "job", 1, 1, none=None)
    assert getattr(params, method)("missing") is None
    assert getattr(params, method)("missing", 1) == 1
    assert getattr(params, method)("none", 1) is None


@pytest.mark.torch
@pytest.mark.parametrize("method", ["get_as_bool", "get_as_int"])
@pytest.mark.parametrize("value", [True, 0, 1, 2, "1", "Yes", "f", "2", "x", "", None, 1.5])
def test_values_are_read_as_torch_reads_them(method: str, value: object) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters as Torch

    def read(kind: Any) -> object:
        try:
            return getattr(kind("c10d", "", "job", 1, 1, key=value), method)("key")
        except ValueError:
            return ValueError

    assert read(RendezvousParameters) == read(Torch)
