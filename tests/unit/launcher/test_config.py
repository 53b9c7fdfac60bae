from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.launcher.config import SHUTDOWN_TIMEOUT_ENV, LaunchConfig


@pytest.fixture(autouse=True)
def _no_timeout_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHUTDOWN_TIMEOUT_ENV, raising=False)


def config(**settings: Any) -> LaunchConfig:
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, **settings)


@pytest.mark.torch
def test_fields_have_the_order_and_defaults_of_torch() -> None:
    from torch.distributed.launcher.api import LaunchConfig as TorchConfig

    def described(kind: Any) -> list[Any]:
        return [(one.name, one.default, one.default_factory) for one in dataclasses.fields(kind)]

    theirs = described(TorchConfig)
    assert described(LaunchConfig)[: len(theirs)] == theirs
    assert all(one.kw_only for one in dataclasses.fields(LaunchConfig)[len(theirs) :])


def test_rendezvous_timeout_is_set_in_a_copy_of_the_callers_mapping() -> None:
    given = {"rank": 0}
    assert config(rdzv_configs=given).rdzv_configs == {"rank": 0, "timeout": 900}
    assert config(rdzv_configs=given, rdzv_timeout=7).rdzv_configs == {"rank": 0, "timeout": 7}
    assert given == {"rank": 0}


@pytest.mark.parametrize("value", [-0.5, math.inf, math.nan])
@pytest.mark.parametrize("name", ["shutdown_timeout", "failure_grace", "exit_barrier_timeout"])
def test_invalid_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{name}: {value} "):
        config(**{name: value})


def test_failure_grace_is_at_most_the_shutdown_timeout_unless_it_is_set() -> None:
    assert config().failure_grace == 10
    assert config(shutdown_timeout=3).failure_grace == 3
    assert config(shutdown_timeout=3, failure_grace=60).failure_grace == 60


def test_the_shutdown_timeout_falls_back_to_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert config().shutdown_timeout == 30
    for text, expected in (("7", 7), ("0", 0), ("1.5", 1.5)):
        monkeypatch.setenv(SHUTDOWN_TIMEOUT_ENV, text)
        assert config().shutdown_timeout == expected
        assert config(shutdown_timeout=3).shutdown_timeout == 3
    for text in ("-1", "soon", "", "nan"):
        monkeypatch.setenv(SHUTDOWN_TIMEOUT_ENV, text)
        with pytest.raises(UsageError, match=f"^{SHUTDOWN_TIMEOUT_ENV}: '{text}' "):
            config()


@pytest.mark.parametrize("given", ["torch,,numpy", ",", "a b", "a..b", "my-module", ["a,b"], [7]])
def test_invalid_module_name_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^preload: "):
        config(preload=given)
