"""An agent and a workers' store prove to each other that they belong to one generation."""

from __future__ import annotations

import pytest

from holdfast.store.tcp.tcp_protocol import OPERATIONS, PROOF
from holdfast.wire import store_proof
from holdfast.wire.store_proof import (
    CHUNK_BYTES,
    FORWARD,
    AgentProof,
    SealedStream,
    StoreProof,
)
from holdfast.wire.wire_errors import BrokenSeal, ProofRefused

KEY, OTHER_KEY = bytes(32), bytes(31) + b"\1"


def exchange(agent: AgentProof, store: StoreProof, piece: int = 1000) -> None:
    """Deliver the bytes of each side to the other, in pieces, until both are done."""
    to_store, to_agent = agent.start(), b""
    while to_store or to_agent:
        taken, to_store = to_store[:piece], to_store[piece:]
        if taken:
            to_agent += store.receive(taken)
        taken, to_agent = to_agent[:piece], to_agent[piece:]
        if taken:
            to_store += agent.receive(taken)
    assert agent.done
    assert store.done


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_correct_key_is_accepted_however_the_network_splits_the_bytes(piece: int) -> None:
    exchange(AgentProof(KEY, 3), StoreProof(KEY, 3), piece)


def test_first_byte_is_not_a_store_operation() -> None:
    assert AgentProof(KEY, 0).start()[0] == PROOF == store_proof.FIRST_BYTE
    assert PROOF >= OPERATIONS


@pytest.mark.parametrize(
    ("agent", "store"),
    [
        (AgentProof(OTHER_KEY, 3), StoreProof(KEY, 3)),
        (AgentProof(KEY, 3), StoreProof(KEY, 4)),
        (AgentProof(KEY, 3, FORWARD), StoreProof(KEY, 3)),
    ],
    ids=["key", "generation", "purpose"],
)
def test_other_generation_or_purpose_is_refused(agent: AgentProof, store: StoreProof) -> None:
    with pytest.raises(ProofRefused):
        exchange(agent, store)
    assert not agent.done
    assert not store.done


def test_store_without_the_key_receives_no_proof() -> None:
    """Otherwise a program at the port could relay the proof to the real store."""
    agent = AgentProof(KEY, 3)
    challenge = StoreProof(OTHER_KEY, 3).receive(agent.start())
    with pytest.raises(ProofRefused):
        agent.receive(challenge)


def test_proof_is_valid_only_once() -> None:
    agent, first, second = AgentProof(KEY, 3), StoreProof(KEY, 3), StoreProof(KEY, 3)
    hello = agent.start()
    proof = agent.receive(first.receive(hello))
    second.receive(hello)
    first.receive(proof)
    assert first.done
    with pytest.raises(ProofRefused):
        second.receive(proof)


def test_reflected_store_proof_is_refused() -> None:
    store = StoreProof(KEY, 3)
    challenge = store.receive(AgentProof(KEY, 3).start())
    with pytest.raises(ProofRefused):
        store.receive(challenge[-store_proof.PROOF_BYTES :])


def test_more_than_one_message_at_once_is_refused() -> None:
    with pytest.raises(ProofRefused):
        StoreProof(KEY, 3).receive(AgentProof(KEY, 3).start() + b"x")


def streams() -> tuple[SealedStream, SealedStream]:
    agent, store = AgentProof(KEY, 3, FORWARD), StoreProof(KEY, 3, FORWARD)
    exchange(agent, store)
    return agent.stream(), store.stream()


@pytest.mark.parametrize("size", [1, CHUNK_BYTES, 3 * CHUNK_BYTES + 5])
def test_sealed_stream_delivers_both_directions_unchanged(size: int) -> None:
    output = bytes(range(256)) * (size // 256) + bytes(size % 256)
    for sends, receives in (streams(), streams()[::-1]):
        sealed = sends.seal(output) + sends.seal(b"more")
        pieces = [sealed[at : at + 70_001] for at in range(0, len(sealed), 70_001)]
        assert b"".join(map(receives.open, pieces)) == output + b"more"


@pytest.mark.parametrize(
    "change", ["a bit", "left out", "twice", "sent back", "another connection"]
)
def test_changed_sealed_stream_is_detected(change: str) -> None:
    agent, store = streams()
    first, second = agent.seal(b"first"), agent.seal(b"second")
    receives = {"sent back": agent, "another connection": streams()[1]}.get(change, store)
    tampered = {
        "a bit": first[:5] + bytes([first[5] ^ 1]) + first[6:],
        "left out": second,
        "twice": first + first,
    }.get(change, first)
    with pytest.raises(BrokenSeal):
        receives.open(tampered)
