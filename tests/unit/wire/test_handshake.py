from __future__ import annotations

import hashlib
import re
import struct
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from holdfast.defaults import PROTOCOL_VERSION
from holdfast.errors import InternalError
from holdfast.wire import handshake
from holdfast.wire.frames import FrameReader
from holdfast.wire.handshake import (
    JOB_TOKEN_PREFIX,
    ClientHandshake,
    ServerHandshake,
    is_job_token,
    job_token,
    random_nonce,
    refusal,
)
from holdfast.wire.messages import (
    Challenge,
    Goodbye,
    Hello,
    Proof,
    Welcome,
    decode,
    encode,
)
from holdfast.wire.wire_errors import BadMessage, BrokenSeal, HandshakeRefused, NotOurProtocol
from holdfast.wire.wire_limits import HANDSHAKE_FRAME_BYTES_MAX

if TYPE_CHECKING:
    from holdfast.wire.messages import Message

TOKEN = b"the token"


def body_in(frame: bytes) -> bytes:
    (body,) = FrameReader(HANDSHAKE_FRAME_BYTES_MAX).feed(frame)
    return body


def taken_by(machine: ClientHandshake | ServerHandshake, frame: bytes) -> bytes:
    """Return the body that one side's reader finds in the other side's next frame."""
    reader = FrameReader(HANDSHAKE_FRAME_BYTES_MAX, tag_bytes=machine.tag_bytes)
    (taken,) = reader.feed(frame)
    return taken


def message_in(frame: bytes) -> Message:
    return decode(body_in(frame))


def exchange(client: ClientHandshake, server: ServerHandshake) -> None:
    challenge = server.receive(body_in(client.start()))
    proof = client.receive(body_in(challenge))
    assert not client.done
    assert not server.done
    welcome = server.receive(body_in(proof))
    assert server.done
    assert client.receive(taken_by(client, welcome)) == b""
    assert client.done


def refusal_of(client: ClientHandshake, server: ServerHandshake) -> HandshakeRefused:
    with pytest.raises(HandshakeRefused) as raised:
        exchange(client, server)
    assert not client.done
    assert not server.done
    return raised.value


def test_finished_handshake_accepts_no_message() -> None:
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    exchange(client, server)
    for machine in (client, server):
        with pytest.raises(InternalError):
            machine.receive(encode(Goodbye()))


@pytest.mark.parametrize("token", [None, TOKEN])
def test_client_of_another_version_gives_up_with_one_line(
    monkeypatch: pytest.MonkeyPatch, token: bytes | None
) -> None:
    monkeypatch.setattr(handshake, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
    client, server = ClientHandshake(token), ServerHandshake(token)
    proof = client.receive(body_in(server.receive(body_in(client.start()))))
    with pytest.raises(HandshakeRefused) as refused:
        server.receive(body_in(proof))
    with pytest.raises(HandshakeRefused) as received:
        client.receive(taken_by(client, refused.value.reply))
    assert received.value.permanent
    assert received.value.why == (
        f"the coordinator refused: the client speaks protocol version {PROTOCOL_VERSION}, the "
        f"coordinator {PROTOCOL_VERSION + 1}: install the same Holdfast on both sides"
    )


def test_each_side_learns_why_the_other_ended_the_handshake() -> None:
    client, server = ClientHandshake(None), ServerHandshake(TOKEN)
    refused = refusal_of(client, server)
    with pytest.raises(HandshakeRefused, match=re.escape(refused.why)):
        server.receive(body_in(refused.reply))
    client = ClientHandshake(None)
    client.start()
    with pytest.raises(HandshakeRefused, match="too many connections") as raised:
        client.receive(body_in(refusal("too many connections", permanent=False)))
    assert not raised.value.permanent


def test_unrequested_proof_and_wrong_magic_are_refused() -> None:
    server = ServerHandshake(None)
    server.receive(encode(Hello(nonce=random_nonce())))
    with pytest.raises(HandshakeRefused):
        server.receive(encode(Proof(proof=bytes(32))))
    with pytest.raises(NotOurProtocol):
        ServerHandshake(None).receive(encode(Hello(magic="holdslow", nonce=bytes(32))))


def test_client_leaves_a_server_without_the_token() -> None:
    for challenge in (
        Challenge(nonce=bytes(32), token_wanted=True, proof=bytes(32)),
        Challenge(nonce=bytes(32), token_wanted=True),
        Challenge(nonce=bytes(32), token_wanted=False, proof=bytes(32)),
    ):
        client = ClientHandshake(TOKEN)
        client.start()
        with pytest.raises(HandshakeRefused):
            client.receive(encode(challenge))
        with pytest.raises(BadMessage):  # Continuing with a welcome does not help either.
            client.receive(encode(Welcome()))
        assert not client.done


def test_reflected_proof_is_refused() -> None:
    """A client without the token sends the server's own proof back."""
    nonce = bytes(range(32))
    server = ServerHandshake(TOKEN, nonce=lambda: nonce)
    challenge = message_in(server.receive(encode(Hello(nonce=nonce))))
    assert isinstance(challenge, Challenge)
    with pytest.raises(HandshakeRefused):
        server.receive(encode(Proof(proof=challenge.proof)))


def test_replayed_proof_is_refused() -> None:
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    hello = body_in(client.start())
    old = body_in(client.receive(body_in(server.receive(hello))))
    again = ServerHandshake(TOKEN)
    again.receive(hello)
    with pytest.raises(HandshakeRefused):
        again.receive(old)


@pytest.mark.parametrize(
    "changes",
    [
        {"run_id": "another"},
        {"run_id": ""},
        {"host": "elsewhere"},
        {"port": 1},
    ],
)
def test_changed_hello_is_detected(changes: dict[str, Any]) -> None:
    client = ClientHandshake(TOKEN, run_id="job", host="head", port=29400)
    server = ServerHandshake(TOKEN)
    changed = msgspec.structs.replace(message_in(client.start()), **changes)
    with pytest.raises(HandshakeRefused) as raised:
        client.receive(body_in(server.receive(encode(changed))))
    assert "token" in raised.value.why


def test_proof_covers_unknown_fields_of_the_hello() -> None:
    """Even a server that does not know the field detects its removal."""
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    fields = msgspec.msgpack.decode(body_in(client.start()))
    newer = msgspec.msgpack.encode(fields | {"colour": "blue"})
    with pytest.raises(HandshakeRefused):
        client.receive(body_in(server.receive(newer)))


def test_proof_for_one_job_is_invalid_for_another() -> None:
    tokens = {"master": TOKEN, "a": job_token(TOKEN, "a"), "b": job_token(TOKEN, "b")}
    for ours, theirs in (("master", "a"), ("a", "master"), ("a", "a")):
        exchange(ClientHandshake(tokens[ours], run_id="a"), ServerHandshake(tokens[theirs]))
    for ours, theirs in (("b", "master"), ("master", "b"), ("a", "b")):
        refusal_of(ClientHandshake(tokens[ours], run_id="a"), ServerHandshake(tokens[theirs]))


def test_refusal_of_an_authenticated_server_is_permanent() -> None:
    def check_hello(hello: Hello) -> None:
        raise HandshakeRefused(f"{hello.run_id} is not served")

    for token in (TOKEN, None):
        client = ClientHandshake(token, run_id="job")
        server = ServerHandshake(token, check_hello=check_hello)
        proof = body_in(client.receive(body_in(server.receive(body_in(client.start())))))
        with pytest.raises(HandshakeRefused) as refused:
            server.receive(proof)
        with pytest.raises(HandshakeRefused, match="job is not served") as received:
            client.receive(taken_by(client, refused.value.reply))
        assert received.value.permanent


@pytest.mark.parametrize("is_late", [False, True])
def test_refusal_of_an_unauthenticated_server_is_not_permanent(is_late: bool) -> None:
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    challenge = body_in(server.receive(body_in(client.start())))
    if is_late:
        client.receive(challenge)
    with pytest.raises(BrokenSeal if is_late else HandshakeRefused) as raised:
        client.receive(body_in(refusal("go away")))
    assert not getattr(raised.value, "permanent", False)


def test_each_direction_is_sealed_with_its_own_key() -> None:
    client, server = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    exchange(client, server)
    assert client.seals is not None
    assert server.seals is not None
    frame = refusal("x")
    sealed = [machine.seals[0].seal(frame) for machine in (client, server)]  # type: ignore[index]
    assert sealed[0] != sealed[1]
    assert server.seals[1].open(taken_by(server, sealed[0])) == body_in(frame)
    assert client.seals[1].open(taken_by(client, sealed[1])) == body_in(frame)
    again = ClientHandshake(TOKEN), ServerHandshake(TOKEN)
    exchange(*again)
    with pytest.raises(BrokenSeal):
        again[1].seals[1].open(sealed[0])  # type: ignore[index]
    plain = ClientHandshake(None), ServerHandshake(None)
    exchange(*plain)
    assert (plain[0].seals, plain[1].seals) == (None, None)


def test_token_appears_in_no_message_or_repr() -> None:
    secret = b"not-to-be-seen"
    machines = (ClientHandshake(secret), ServerHandshake(secret))
    for machine in machines:
        assert b"not-to-be-seen" not in repr(machine).encode() + str(machine).encode()
    hello = machines[0].start()
    challenge = machines[1].receive(body_in(hello))
    proof = machines[0].receive(body_in(challenge))
    assert secret not in hello + challenge + proof


def test_handshake_bytes_match_an_independent_computation() -> None:
    """The computation is repeated here, so that a change is detected: both sides must agree on these bytes."""

    def mac(text: bytes) -> bytes:
        key = hashlib.sha256(job_token(TOKEN, "job")).digest()
        return hashlib.blake2b(text, key=key).digest()

    client = ClientHandshake(TOKEN, run_id="job", host="head", port=1, nonce=lambda: b"c" * 32)
    server = ServerHandshake(TOKEN, nonce=lambda: b"s" * 32)
    hello = client.start()
    challenge = server.receive(body_in(hello))
    proof = client.receive(body_in(challenge))
    first, second = message_in(challenge), message_in(proof)
    assert isinstance(first, Challenge)
    assert isinstance(second, Proof)
    assert first.proof == mac(hello + b"holdfast coordinator " + b"s" * 32)[:32]
    assert second.proof == mac(hello + challenge)[:32]
    welcome = server.receive(body_in(proof))
    client.receive(welcome)
    assert server.seals is not None
    (length,) = struct.unpack("!I", welcome[:4])
    sent = welcome[: 4 + length] + b"\0\0\0\4view"
    key = mac(hello + challenge + proof)[32:]
    tag = hashlib.blake2b(sent, digest_size=16, key=key).digest()
    assert server.seals[0].seal(b"\0\0\0\4view") == b"\0\0\0\4view" + tag


def test_job_tokens_are_deterministic_and_distinct() -> None:
    # Literal values: a coordinator and a node of different versions must derive the same token.
    expected = JOB_TOKEN_PREFIX + (
        b"12e9b33858cd29b95df58c319e94796e02df21f24bcc2a03bfdafbc1f0cf641b"
    )
    assert job_token(b"master", "bert") == expected
    others = {job_token(b"master", "bert2"), job_token(b"master2", "bert"), job_token(b"x", "")}
    assert len(others | {expected}) == 4
    assert all(is_job_token(one) for one in others)
    assert not is_job_token(b"master")


def test_token_derived_from_a_job_token_is_unchanged() -> None:
    bert = job_token(b"master", "bert")
    assert job_token(bert, "gpt") == bert
