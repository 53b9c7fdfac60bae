"""`holdfast run` has the flags of the real torchrun and parses command lines in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import argparse

pytestmark = pytest.mark.torch


def test_command_line_has_the_same_flags() -> None:
    import torch.distributed.run

    import holdfast.run

    theirs = flags(torch.distributed.run.get_args_parser())
    ours = flags(holdfast.run.get_args_parser())
    for flags_here in (theirs, ours):  # A shell more is no difference.
        for flag in SHELL_FLAGS & flags_here.keys():
            *rest, shells, required = flags_here[flag]
            flags_here[flag] = (*rest, [one for one in shells if one != "fish"], required)
    assert {flag: ours.get(flag) for flag in theirs} == theirs


SHELL_FLAGS = {"--print-completion", "--print_completion"}


def flags(parser: argparse.ArgumentParser) -> dict[str, tuple[Any, ...]]:
    """Return the meaning of each spelling of each flag, and of each positional argument."""
    return {
        name: (one.dest, one.nargs, one.default, list(one.choices or ()), one.required)
        for one in parser._actions
        for name in one.option_strings or [one.dest]
    }


@pytest.mark.parametrize(
    ("line", "environment"),
    [
        ("train.py", {}),
        ("--nproc-per-node 4 --nnodes 1:4 train.py --nnodes 7 -- -r 3", {}),
        ("--nproc_per_node=gpu --rdzv_backend=c10d --rdzv_endpoint=h:1 train.py", {}),
        ("--rdzv-conf a=1,b=2 --rdzv-id job --max-restarts 3 -- train.py -- x", {}),
        ("train.py -- a -- b", {}),
        ("-m -r 3 -t 0:1,1:2 pkg.train --standalone", {}),
        ("-mr3 -t1 pkg.train", {}),
        ("--max-r 2 --monitor-i 0.5 --no-py ./train -h", {}),
        ("--duplicate-stdout-filters a,,b,c --duplicate-stderr-filters x train.py", {}),
        ("--local-ranks-filter 0,1 --signals-to-handle SIGTERM --role r train.py", {}),
        ("--run-path --start-method fork --virtual-local-rank train.py a", {}),
        ("--master-addr h --master-port 1 --node-rank 2 --local-addr l train.py", {}),
        ("--shutdown-timeout 5 --log-dir logs --logs-specs default train.py", {}),
        ("--numa-binding node --event-log-handler console train.py", {}),
        ("train.py", {"PET_NPROC_PER_NODE": "8", "PET_MAX_RESTARTS": "2", "PET_STANDALONE": "1"}),
        ("train.py", {"PET_MODULE": "0", "PET_DUPLICATE_STDOUT_FILTERS": "a,b", "PET_TEE": "3"}),
        ("--tee 1 --max_restarts 1 train.py", {"PET_TEE": "3", "PET_MAX_RESTARTS": "2"}),
    ],
)
def test_command_lines_are_parsed_in_the_same_way(
    line: str, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed.run

    import holdfast.run

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    theirs = vars(torch.distributed.run.parse_args(line.split()))
    ours = vars(holdfast.run.parse_args(line.split()))
    assert {name: ours.get(name) for name in theirs} == theirs
