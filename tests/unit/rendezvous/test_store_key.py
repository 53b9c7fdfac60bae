"""The key of the workers' store cannot be derived from the views that a third party may read."""

from __future__ import annotations

from holdfast.core.phases import NodeRole
from holdfast.core.protocol import View
from holdfast.rendezvous.worker_store import key_of
from holdfast.wire.handshake import job_token

VIEW = View(
    run_id="job",
    node="a",
    incarnation=1,
    term=1,
    revision=1,
    role=NodeRole.MEMBER,
    store_key=bytes(32),
)


def key_with(token: bytes, run_id: str = "job") -> bytes:
    return key_of(VIEW, job_token(token, run_id) if token else b"")


def test_store_key_depends_on_the_job_token() -> None:
    token = b"a token of all these nodes"
    assert key_with(b"") == VIEW.store_key
    assert len({key_with(token), key_with(b"another token"), VIEW.store_key}) == 3
    assert key_with(token) != key_with(token, "another job")
    # Some agents may have only the job's token.
    assert key_with(token) == key_with(job_token(token, "job"))
