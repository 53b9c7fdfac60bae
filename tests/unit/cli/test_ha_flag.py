"""`--ha`: its meaning for the rendezvous, and the flags that conflict with it."""

from __future__ import annotations

import pytest

from holdfast.cli import coordinator_command
from holdfast.cli.run_command import config_from_args, parse_args, run
from holdfast.errors import UsageError

ELSEWHERE = "192.0.2.1"


def test_ha_flag_is_the_ha_backend_with_the_list_as_endpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched = []
    monkeypatch.setattr(
        "holdfast.cli.run_command.elastic_launch",
        lambda config, entrypoint: lambda *_: launched.append((config, entrypoint)),
    )
    run(parse_args(["--ha", "node0,node1,node2", "--nnodes", "2:8", "--no-python", "true"]))
    ((config, _),) = launched
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("ha", "node0,node1,node2")
    words = ["--rdzv-backend", "ha", "--rdzv-endpoint", "node0", "--no-python", "true"]
    assert config_from_args(parse_args(words))[0].rdzv_backend == "ha"


def test_empty_ha_list_is_refused() -> None:
    with pytest.raises(UsageError, match="--ha"):
        run(parse_args(["--ha", "", "--no-python", "true"]))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--rdzv-backend", "c10d"], "--ha"),
        (["--standalone"], "--ha"),
        (["--rdzv-endpoint", "node0"], "--rdzv-endpoint"),
    ],
)
def test_ha_with_another_rendezvous_is_refused(flags: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: .*conflicts"):
        run(parse_args(["--ha", "node0", *flags, "--no-python", "true"]))


@pytest.mark.parametrize(
    "flags",
    [["--endpoint", "node0"], ["--state", "file"], ["--take-over"], []],
    ids=["endpoint", "state", "take-over", "another machine's list"],
)
def test_member_without_agent_runs_only_on_a_listed_machine(flags: list[str]) -> None:
    words = ["--ha", ELSEWHERE, "--rdzv-conf", "auth=none", *flags]
    with pytest.raises(UsageError, match="--ha"):
        coordinator_command.execute(
            coordinator_command.build_parser("coordinator").parse_args(words)
        )
