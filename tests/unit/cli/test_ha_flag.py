"""`--ha`: what it means for the rendezvous, and what it cannot go with."""

from __future__ import annotations

import pytest

from holdfast.cli import coordinator
from holdfast.cli.run import config_from_args, parse_args, run
from holdfast.errors import UsageError

ELSEWHERE = "192.0.2.1"


def test_it_is_a_backend_whose_endpoint_is_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(
        "holdfast.cli.run.elastic_launch",
        lambda config, entrypoint: lambda *_: launched.append((config, entrypoint)),
    )
    run(parse_args(["--ha", "node0,node1,node2", "--nnodes", "2:8", "--no-python", "true"]))
    ((config, _),) = launched
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("ha", "node0,node1,node2")
    words = ["--rdzv-backend", "ha", "--rdzv-endpoint", "node0", "--no-python", "true"]
    assert config_from_args(parse_args(words))[0].rdzv_backend == "ha"


def test_an_empty_list_is_no_way_to_do_without() -> None:
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
def test_another_rendezvous_beside_it_is_refused(flags: list[str], named: str) -> None:
    with pytest.raises(UsageError, match=f"^{named}: .*conflicts"):
        run(parse_args(["--ha", "node0", *flags, "--no-python", "true"]))


@pytest.mark.parametrize(
    "flags",
    [["--endpoint", "node0"], ["--state", "file"], ["--take-over"], []],
    ids=["endpoint", "state", "take-over", "another machine's list"],
)
def test_a_member_alone_is_on_a_machine_of_the_list_and_nothing_else(flags: list[str]) -> None:
    words = ["--ha", ELSEWHERE, "--rdzv-conf", "auth=none", *flags]
    with pytest.raises(UsageError, match="--ha"):
        coordinator.execute(coordinator.build_parser("coordinator").parse_args(words))
