from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.errors import InternalError
from holdfast.wire.errors import HandshakeRefused, NotOurProtocol
from holdfast.wire.frames import FrameReader
from holdfast.wire.handshake import (
    JOB_TOKEN_PREFIX,
    ClientHandshake,
    ServerHandshake,
    draw_nonce,
    is_job_token,
    job_token,
    refusal,
)
from holdfast.wire.limits import HANDSHAKE_FRAME_BYTES_MAX
from holdfast.wire.messages import (
    PROTOCOL_VERSION,
    Challenge,
    Goodbye,
    Hello,
    Proof,
    Refusal,
    decode,
)

if TYPE_CHECKING:
    from holdfast.wire.messages import Message

TOKEN = b"the token"


def message_in(frame: bytes) -> Message:
    (body,) = FrameReader(HANDSHAKE_FRAME_BYTES_MAX).feed(frame)
    return decode(body)


def shake(client: ClientHandshake, server: ServerHandshake) -> None:
    challenge = server.receive(message_in(client.start()))
    proof = client.receive(message_in(challenge))
    assert not client.done
    assert not server.done
    welcome = server.receive(message_in(proof))
    assert server.done
    assert client.receive(message_in(welcome)) == b""
    assert client.done


def refusal_of(client: ClientHandshake, server: ServerHandshake) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as raised:
        shake(client, server)
    assert not client.done
    assert not server.done
    return raised.value


def test_the_newest_version_that_both_speak_is_spoken() -> None:
    client = ClientHandshake(TOKEN, versions=(1, 4))
    server = ServerHandshake(TOKEN, versions=(2, 3))
    shake(client, server)
    assert client.version == server.version == 3
    for machine in (client, server):
        with pytest.raises(InternalError):
            machine.receive(Goodbye())
    client = ClientHandshake(None)
    client.start()
    with pytest.raises(HandshakeRefused):  # It was not offered.
        client.receive(Challenge(version=PROTOCOL_VERSION + 1, nonce=bytes(32), token_wanted=False))


@pytest.mark.parametrize(("theirs", "ours"), [((1, 2), (3, 4)), ((5, 5), (3, 4)), ((4, 3), (3, 4))])
def test_no_common_version(theirs: tuple[int, int], ours: tuple[int, int]) -> None:
    refused = refusal_of(
        ClientHandshake(None, versions=theirs), ServerHandshake(None, versions=ours)
    )
    assert refused.permanent
    told = message_in(refused.reply)
    assert isinstance(told, Refusal)
    assert told.why == refused.why


def test_each_side_learns_why_the_other_ended_it() -> None:
    client, server = ClientHandshake(None), ServerHandshake(TOKEN)
    refused = refusal_of(client, server)
    with pytest.raises(HandshakeRefused, match=re.escape(refused.why)):
        server.receive(message_in(refused.reply))
    client = ClientHandshake(None)
    client.start()
    with pytest.raises(HandshakeRefused, match="too many connections") as raised:
        client.receive(message_in(refusal("too many connections", permanent=False)))
    assert not raised.value.permanent


def test_a_proof_that_was_not_asked_for_and_another_magic_are_refused() -> None:
    server = ServerHandshake(None)
    server.receive(Hello(nonce=draw_nonce()))
    with pytest.raises(HandshakeRefused):
        server.receive(Proof(proof=bytes(32)))
    with pytest.raises(NotOurProtocol):
        ServerHandshake(None).receive(Hello(magic="holdslow", nonce=bytes(32)))


def test_a_server_that_does_not_know_the_token_is_left() -> None:
    for challenge in (
        Challenge(version=PROTOCOL_VERSION, nonce=bytes(32), token_wanted=True, proof=bytes(32)),
        Challenge(version=PROTOCOL_VERSION, nonce=bytes(32), token_wanted=True),
        Challenge(version=PROTOCOL_VERSION, nonce=bytes(32), token_wanted=False, proof=bytes(32)),
    ):
        client = ClientHandshake(TOKEN)
        client.start()
        with pytest.raises(HandshakeRefused):
            client.receive(challenge)


def test_a_proof_sent_back_proves_nothing() -> None:
    """Somebody without the token lets the server prove it, and sends that very proof."""
    nonce = bytes(range(32))
    server = ServerHandshake(TOKEN, nonce=lambda: nonce)
    challenge = message_in(server.receive(Hello(nonce=nonce)))
    assert isinstance(challenge, Challenge)
    with pytest.raises(HandshakeRefused):
        server.receive(Proof(proof=challenge.proof))


def test_a_proof_of_an_earlier_connection_proves_nothing() -> None:
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    hello = message_in(client.start())
    old = message_in(client.receive(message_in(server.receive(hello))))
    again = ServerHandshake(TOKEN)
    again.receive(hello)
    with pytest.raises(HandshakeRefused):
        again.receive(old)


def test_nobody_in_between_can_take_the_newer_version_away() -> None:
    client = ClientHandshake(TOKEN, versions=(1, 2))
    server = ServerHandshake(TOKEN, versions=(1, 2))
    hello: Any = message_in(client.start())
    lowered = Hello(version_min=1, version_max=1, nonce=hello.nonce)
    with pytest.raises(HandshakeRefused):
        client.receive(message_in(server.receive(lowered)))


def test_the_token_is_not_in_anything_that_may_be_printed() -> None:
    secret = b"not-to-be-seen"
    machines = (ClientHandshake(secret), ServerHandshake(secret))
    for machine in machines:
        assert b"not-to-be-seen" not in repr(machine).encode() + str(machine).encode()
    hello = machines[0].start()
    challenge = machines[1].receive(message_in(hello))
    proof = machines[0].receive(message_in(challenge))
    assert secret not in hello + challenge + proof


def test_the_token_of_a_job_is_always_the_same_and_no_other_jobs() -> None:
    # Written down: a coordinator and a node of different versions must derive the same.
    expected = JOB_TOKEN_PREFIX + (
        b"12e9b33858cd29b95df58c319e94796e02df21f24bcc2a03bfdafbc1f0cf641b"
    )
    assert job_token(b"master", "bert") == expected
    others = {job_token(b"master", "bert2"), job_token(b"master2", "bert"), job_token(b"x", "")}
    assert len(others | {expected}) == 4
    assert all(is_job_token(one) for one in others)
    assert not is_job_token(b"master")


def test_the_token_of_a_job_stays_as_it_is() -> None:
    bert = job_token(b"master", "bert")
    assert job_token(bert, "gpt") == bert
