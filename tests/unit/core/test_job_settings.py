from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import pytest

from holdfast.core.job_settings import (
    SETTINGS,
    TYPES,
    JobSettings,
    check_settings,
    differences,
)
from holdfast.core.ranks import RankOrder

NUMBERS = [name for name, kind in TYPES.items() if not issubclass(kind, Enum)]
TWO = JobSettings(1, 2)


@pytest.mark.parametrize("name", NUMBERS)
def test_number_outside_its_limits_is_rejected(name: str) -> None:
    setting = SETTINGS[name]
    check_settings(TWO)
    for value in (setting.least - 1, setting.most * 2, float("nan")):
        given: dict[str, Any] = {name: value}
        with pytest.raises(ValueError, match=name):
            check_settings(TWO._replace(**given))


def test_minimum_above_maximum_is_rejected() -> None:
    with pytest.raises(ValueError, match="3:2 is not a range of nodes"):
        check_settings(JobSettings(3, 2))


def test_every_setting_but_the_settle_time_must_be_the_same_on_all_nodes() -> None:
    assert differences(TWO, TWO._replace(settle_s=9.0)) == []
    assert differences(TWO, JobSettings(1, 3, spares=1, order=RankOrder.HOST)) == [
        ("--nnodes", "1:2", "1:3"),
        ("--spares", "0", "1"),
        ("rank_order", "stable", "host"),
    ]


def test_encoded_settings_are_decoded_and_unknown_ones_are_rejected() -> None:
    settings = TWO._replace(order=RankOrder.LABEL)
    wire = msgspec.msgpack.encode(settings)
    assert msgspec.msgpack.decode(wire, type=JobSettings) == settings
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode([*TWO, 0]), type=JobSettings)
