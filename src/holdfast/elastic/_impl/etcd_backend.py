"""`EtcdRendezvousBackend`: the state of a job in one key of etcd; the token is its revision.

The names are TorchElastic's, over etcd's API v3 instead of v2. The key has a lease of its last writer,
which each write renews. So the state of a job that is over disappears when the lease expires. The value
begins with a mark, which distinguishes a state from another program's value.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from msgspec.structs import replace

from holdfast.core.etcd.calls import Compare, Field, Get, KeyValue, Put, Txn, TxnDone
from holdfast.elastic._impl.etcd_v2_client import DEFAULT_READ_TIMEOUT_S, EtcdV2Client, adapted
from holdfast.errors import UsageError
from holdfast.etcd.etcd_store import EtcdStore
from holdfast.etcd.lease import WriteLease, transact
from holdfast.etcd.sync_client import EtcdError
from holdfast.rendezvous.backend_handler import RendezvousBackend, Token
from holdfast.rendezvous.etcd_handler import etcd_settings_of
from holdfast.rendezvous.rendezvous_errors import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

if TYPE_CHECKING:
    from holdfast.etcd.sync_client import EtcdClient
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters

DEFAULT_TTL_S = 7200
KEY_PREFIX = "/torch/elastic/rendezvous"
STORE_PREFIX = "/torch/elastic/store"

MAGIC = b"holdfast rendezvous 1\n"
REVISION_MAX = (1 << 63) - 1


class EtcdRendezvousBackend(RendezvousBackend):
    """Keeps the state of one job at `<key_prefix>/<run_id>`, for `ttl` seconds after a write.

    The client may be one of python-etcd; this class uses only its endpoint and certificates.
    """

    def __init__(
        self,
        client: EtcdClient,
        run_id: str,
        key_prefix: str | None = None,
        ttl: int | None = None,
    ) -> None:
        if not run_id:
            raise UsageError("--rdzv-id: the run id is empty")
        self._client = adapted(client)
        if self._client is not client:
            weakref.finalize(self, self._client.close)
        self._key = (f"{key_prefix}/{run_id}" if key_prefix else run_id).encode()
        self._lease = WriteLease(self._client, ttl if ttl and ttl > 0 else DEFAULT_TTL_S)

    @property
    def name(self) -> str:
        """TorchElastic's name for a state in etcd."""
        return "etcd-v2"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""
        try:
            done = self._client.txn(Txn(success=(Get(self._key),)))
        except EtcdError as problem:
            raise self._unreachable(problem) from None
        return self._decoded(done.results[0])

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without a token, store the first state."""
        revision = _revision(token)
        if revision is None:
            return _not_stored(self.get_state())
        try:
            done = self._write(state, revision)
        except EtcdError as problem:
            raise self._unreachable(problem) from None
        if done.succeeded:
            return state, done.revision, True
        return _not_stored(self._decoded(done.results[0]))

    def _write(self, state: bytes, revision: int) -> TxnDone:
        txn = Txn(
            compare=(Compare(self._key, Field.MOD, revision),),
            success=(Put(self._key, MAGIC + state),),
            failure=(Get(self._key),),
        )
        return transact(self._client, txn, self._lease)

    def _decoded(self, found: tuple[KeyValue, ...]) -> tuple[bytes, Token] | None:
        if not found:
            return None
        if not found[0].value.startswith(MAGIC):
            raise RendezvousStateError(
                f"the value of {self._key.decode()!r} in etcd is not a rendezvous state of Holdfast",
                hint="another program uses the same etcd and run id; choose another --rdzv-id",
            )
        return found[0].value[len(MAGIC) :], found[0].mod_revision

    def _unreachable(self, problem: EtcdError) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"cannot access the rendezvous state {self._key.decode()!r}: {problem}"
        )


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """Return the etcd backend for these parameters, and the store that the agents share.

    Both use one client, which the store's `close` closes. Written keys have a TTL of two hours. Writing
    the state renews it, and so does the store while it is open.
    """
    settings = etcd_settings_of(params)
    if params.get("read_timeout") is None:
        settings = replace(settings, call_s=DEFAULT_READ_TIMEOUT_S)
    client = EtcdV2Client(settings)
    try:
        backend = EtcdRendezvousBackend(client, params.run_id, KEY_PREFIX)
        backend.get_state()  # Raises if the endpoint is wrong.
    except (RendezvousError, UsageError):
        client.close()
        raise
    return backend, EtcdStore(client, STORE_PREFIX, ttl_s=DEFAULT_TTL_S, closes_client=True)


def _revision(token: Token | None) -> int | None:
    """Return the revision of a token, 0 for no token; None if it is not one of our tokens."""
    try:
        revision = int(token or 0)
    except (TypeError, ValueError):
        return None
    return revision if 0 <= revision <= REVISION_MAX else None


def _not_stored(current: tuple[bytes, Token] | None) -> tuple[bytes, Token, bool] | None:
    return None if current is None else (*current, False)
