from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from holdfast.rendezvous.config import RendezvousSettings, RendezvousTimeout

ZERO = timedelta(0)


def test_defaults() -> None:
    times = RendezvousTimeout()
    assert times.join == timedelta(seconds=600)
    assert times.last_call == timedelta(seconds=1)
    assert times.close == timedelta(seconds=30)
    assert times.heartbeat == timedelta(seconds=5)


@pytest.mark.torch
def test_defaults_are_torchs_but_for_the_last_call() -> None:
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousTimeout as Torch

    ours, theirs = RendezvousTimeout(), Torch()
    assert (ours.join, ours.close, ours.heartbeat) == (theirs.join, theirs.close, theirs.heartbeat)
    assert theirs.last_call == timedelta(seconds=30)


def test_what_is_given_holds_and_cannot_be_changed() -> None:
    given = [timedelta(milliseconds=one) for one in (1, 2, 3, 4)]
    times: Any = RendezvousTimeout(*given)
    assert [times.join, times.last_call, times.close, times.heartbeat] == given
    with pytest.raises(AttributeError):
        times.join = ZERO


@pytest.mark.parametrize("name", ["join", "last_call", "close", "heartbeat"])
@pytest.mark.parametrize("value", [ZERO, timedelta(seconds=-1)])
def test_a_time_of_nothing_is_refused(name: str, value: timedelta) -> None:
    with pytest.raises(ValueError, match=f"RendezvousTimeout: {name}: "):
        RendezvousTimeout(**{name: value})


def test_settings_are_frozen() -> None:
    settings: Any = RendezvousSettings("job", 1, 2, RendezvousTimeout(), timedelta(seconds=5), 3)
    assert (settings.run_id, settings.min_nodes, settings.max_nodes) == ("job", 1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.min_nodes = 2
