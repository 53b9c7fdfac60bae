from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from holdfast.errors import UsageError
from holdfast.launcher.config import LaunchConfig

HOLDFAST_ONLY = [
    "stop_signal",
    "capture_stderr",
    "omp_num_threads",
    "exit_barrier_timeout",
    "preload",
    "worker_store",
    "metrics_port",
    "metrics_addr",
    "story",
]


@pytest.fixture(autouse=True)
def _no_timeout_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)


def config(**settings: Any) -> LaunchConfig:
    return LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, **settings)


@pytest.mark.torch
def test_fields_have_the_order_and_defaults_of_torch() -> None:
    from torch.distributed.launcher.api import LaunchConfig as TorchConfig

    theirs = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(TorchConfig)]
    ours = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(LaunchConfig)]
    assert ours[: len(theirs)] == theirs
    assert [name for name, _, _ in ours[len(theirs) :]] == HOLDFAST_ONLY


def test_rendezvous_timeout_is_filled_in_without_touching_the_callers_mapping() -> None:
    given = {"rank": 0}
    assert config(rdzv_configs=given).rdzv_configs == {"rank": 0, "timeout": 900}
    assert given == {"rank": 0}


def test_rdzv_timeout_wins_over_the_configs() -> None:
    given = {"timeout": 5}
    assert config(rdzv_configs=given, rdzv_timeout=7).rdzv_configs == {"timeout": 7}
    assert given == {"timeout": 5}


@pytest.mark.parametrize("value", [-1, -0.5, math.inf, math.nan])
@pytest.mark.parametrize("name", ["shutdown_timeout", "exit_barrier_timeout"])
def test_a_time_that_is_no_deadline_is_refused(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{name}: {value} is not a number of seconds"):
        config(**{name: value})


@pytest.mark.parametrize(("text", "expected"), [("7", 7), ("0", 0), ("1.5", 1.5)])
def test_shutdown_timeout_falls_back_to_the_environment(
    text: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    assert config().shutdown_timeout == expected
    assert config(shutdown_timeout=3).shutdown_timeout == 3


@pytest.mark.parametrize("text", ["-1", "soon", "", "nan", "inf"])
def test_a_bad_timeout_in_the_environment_names_the_variable(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", text)
    with pytest.raises(UsageError, match=f"^TORCH_ELASTIC_SHUTDOWN_TIMEOUT: '{text}' is not"):
        config()


def test_stop_signal_is_checked_and_written_in_full() -> None:
    assert config(stop_signal="USR1").stop_signal == "SIGUSR1"
    with pytest.raises(UsageError, match=r"^stop_signal: 'SIGTREM' is not a signal"):
        config(stop_signal="SIGTREM")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("torch", ("torch",)),
        (" torch , my.module ,auto,torch", ("torch", "my.module", "auto")),
        ("", ()),
        (" ", ()),
        (["torch", "auto", "torch"], ("torch", "auto")),
        ((), ()),
    ],
)
def test_modules_to_preload_are_names_or_text(given: Any, expected: tuple[str, ...]) -> None:
    assert config(preload=given).preload == expected


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("torch,,numpy", ""),
        (",", ""),
        ("torch,", ""),
        ("a b", "a b"),
        ("torch;numpy", "torch;numpy"),
        ("a..b", "a..b"),
        (".a", ".a"),
        ("my-module", "my-module"),
        ("model.py,3d", "3d"),
        (["a,b"], "a,b"),
        ([7], 7),
    ],
)
def test_what_is_not_the_name_of_a_module_is_refused(given: Any, name: object) -> None:
    with pytest.raises(UsageError) as caught:
        config(preload=given)
    assert str(caught.value) == (
        f"preload: {name!r} is not the name of a module; accepted: names as in torch,my.module, "
        "and auto"
    )
