from __future__ import annotations

from holdfast.core.protocol import (
    NODE_ID_CHARS_MAX,
    RUN_ID_CHARS_MAX,
    Failure,
    JobSettings,
    NodeInfo,
    NodePhase,
    Status,
)
from holdfast.wire import limits
from holdfast.wire.frames import encode_frame
from holdfast.wire.limits import clip
from holdfast.wire.messages import StoreCall, decode


def test_clip_leaves_what_fits_as_it_is() -> None:
    assert clip("four", 4) == "four"
    assert clip("", 4) == ""


def test_clip_shortens_and_says_so() -> None:
    assert clip("abcdefgh", 6) == "abc..."


def test_clip_replaces_what_cannot_be_sent() -> None:
    assert clip("name \udcff", 10) == "name ?"


def test_the_largest_status_fits_into_a_frame() -> None:
    """Characters of four bytes: the limits of text are in characters, those of frames in bytes."""
    wide = "\N{ROCKET}"
    name = wide * limits.NAME_CHARS_MAX
    node = wide * NODE_ID_CHARS_MAX
    status = Status(
        seq=limits.COUNTER_MAX,
        run_id=wide * RUN_ID_CHARS_MAX,
        info=NodeInfo(
            node=node,
            incarnation=limits.INCARNATION_MAX,
            role=name,
            host=name,
            label=name,
            address=name,
        ),
        settings=JobSettings(min_nodes=1, max_nodes=limits.NODES_MAX),
        phase=NodePhase.FAILED,
        failure=Failure(node=node, host=name, summary=wide * limits.SUMMARY_CHARS_MAX),
        report=b"x" * limits.REPORT_BYTES_MAX,
    )
    assert decode(encode_frame(status)[4:]) == status


def test_the_largest_compare_set_fits_into_a_frame() -> None:
    wide = "\N{ROCKET}"
    call = StoreCall(
        id=limits.COUNTER_MAX,
        run_id=wide * RUN_ID_CHARS_MAX,
        scope=wide * limits.STORE_SCOPE_CHARS_MAX,
        op="compare_set",
        keys=(wide * limits.STORE_KEY_CHARS_MAX,),
        value=b"x" * limits.STORE_VALUE_BYTES_MAX,
        expected=b"y" * limits.STORE_VALUE_BYTES_MAX,
    )
    assert decode(encode_frame(call)[4:]) == call
