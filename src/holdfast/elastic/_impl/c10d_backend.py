"""The state of a job in a store that can compare and set: `torch.distributed`'s or one of ours.

The key is TorchElastic's. The value has another format, because TorchElastic's is a pickle. Every value
begins with a unique number. So if two nodes write the same state, only one considers itself the writer.
If a key is missing, `compare_set` returns the expected value; this is how the backend notices that the
store's server has restarted and lost the key.
"""

from __future__ import annotations

import binascii
import os
import tempfile
from copy import copy
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.net import addresses, listening
from holdfast.net.endpoints import parse_rendezvous_endpoint
from holdfast.rendezvous.backend_handler import RendezvousBackend, Token
from holdfast.rendezvous.file_backend import job_store
from holdfast.rendezvous.rendezvous_errors import RendezvousConnectionError, RendezvousStateError
from holdfast.store.store_errors import DistError
from holdfast.store.tcp.store_client import TCPStore

if TYPE_CHECKING:
    from holdfast.rendezvous.rdzv_conf import RendezvousParameters
    from holdfast.store.file_store import FileStore
    from holdfast.store.store_interface import ComparingStore

DEFAULT_PORT = 29400
DEFAULT_READ_TIMEOUT_S = 60.0

NUMBER_BYTES = 8
# Means "no state", so that reading the key never waits for a write.
NO_STATE = b"Y2FuaW1hZGFt"


class C10dRendezvousBackend(RendezvousBackend):
    """Keeps the state in one key of a store; the token is the value of that key."""

    def __init__(self, store: ComparingStore, run_id: str) -> None:
        if not run_id:
            raise UsageError("--rdzv-id: the run id is empty")
        self._store = store
        self._key = f"torch.rendezvous.{run_id}"
        self._current()

    @property
    def name(self) -> str:
        """`c10d`, for any kind of store."""
        return "c10d"

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its token, or None if there is none."""
        return self._decoded(self._current())

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Replace the state that `token` names; without a token, store the first state."""
        if token and not isinstance(token, bytes):
            return _not_stored(self.get_state())
        expected = token or NO_STATE
        number = os.urandom(NUMBER_BYTES).hex().encode()
        desired = number + b"." + binascii.b2a_base64(state, newline=False)
        value = self._compare_set(expected, desired)
        if value == expected:  # There is no such key.
            value = self._current()
            if value == NO_STATE and not token:
                value = self._compare_set(NO_STATE, desired)
        if value == desired:
            return state, value, True
        return _not_stored(self._decoded(value))

    def _current(self) -> bytes:
        """Return the value of the key. Set one if there is none, so that this never waits."""
        return self._compare_set(b"", NO_STATE)

    def _compare_set(self, expected: bytes, desired: bytes) -> bytes:
        try:
            return bytes(
                self._store.compare_set(
                    self._key, expected.decode("latin-1"), desired.decode("latin-1")
                )
            )
        except (OSError, RuntimeError, ValueError) as problem:
            # All errors of torch's stores derive from these, including timeouts.
            raise RendezvousConnectionError(
                f"the rendezvous store does not respond for {self._key!r}: {_one_line(problem)}"
            ) from problem

    def _decoded(self, value: bytes) -> tuple[bytes, Token] | None:
        if value == NO_STATE:
            return None
        number, dot, state = value.partition(b".")
        try:
            if not dot or len(number) != 2 * NUMBER_BYTES:
                raise ValueError("it does not begin with a number")
            return binascii.a2b_base64(state, strict_mode=True), value
        except ValueError as problem:
            raise RendezvousStateError(
                f"the value of {self._key!r} in the rendezvous store is not a rendezvous state of Holdfast: {problem}",
                hint="another program uses the same store and run id; choose another --rdzv-id",
            ) from None


def create_backend(params: RendezvousParameters) -> tuple[C10dRendezvousBackend, Any]:
    """Return a backend on a store created from the parameters, and that store.

    With `store_type=file`, the store consists of files at the endpoint, or in a temporary folder if there is
    no endpoint. With `store_type=tcp`, the store speaks the protocol of torch's TCPStore. This process serves it
    if the endpoint belongs to this machine and no other process here serves it yet; `is_host` overrides
    this. The node that serves it must live as long as the job: unlike a coordinator, it has no successor.
    """
    store_type = str(params.get("store_type", "tcp")).strip().lower()
    if store_type == "file":
        store: Any = _file_store(params)
    elif store_type == "tcp":
        store = _tcp_store(params)
    else:
        raise UsageError(f"--rdzv-conf: store_type: {store_type!r} is unknown; accepted: tcp, file")
    return C10dRendezvousBackend(store, params.run_id), store


def _file_store(params: RendezvousParameters) -> FileStore:
    """Return a store at the endpoint; without one, in a temporary folder of this node alone."""
    try:
        if not params.endpoint.strip():
            params = copy(params)
            params.endpoint = tempfile.mkdtemp(prefix="holdfast-store-")
        store = job_store(params)
    except (EnvironmentProblem, OSError) as problem:
        raise RendezvousConnectionError(
            f"cannot create files for the rendezvous store: {problem}"
        ) from problem
    store.path = params.endpoint.strip()
    return store


def _tcp_store(params: RendezvousParameters) -> TCPStore:
    host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
    seconds = params.get_as_seconds("read_timeout", DEFAULT_READ_TIMEOUT_S)
    timeout = timedelta(seconds=seconds or DEFAULT_READ_TIMEOUT_S)
    is_host = params.get_as_bool("is_host")
    try:
        if is_host:
            addresses.resolve(host, port)  # The other nodes must be able to resolve this name.
        if is_host or (is_host is None and _is_this_machine(host, port)):
            try:
                return TCPStore(host, port, is_master=True, timeout=timeout, multi_tenant=True)
            except DistError:
                if is_host:
                    raise
        return TCPStore(host, port, timeout=timeout)
    except (DistError, OSError) as problem:
        raise RendezvousConnectionError(
            f"the rendezvous store at {params.endpoint}: {problem}"
        ) from problem


def _is_this_machine(host: str, port: int) -> bool:
    """Whether all addresses of an endpoint are this machine's."""
    try:
        found = addresses.resolve(host, port)
    except OSError:
        return False  # A name that does not resolve yet does not belong to this machine.
    return bool(found) and all(listening.is_local(one) for one in found)


def _not_stored(current: tuple[bytes, Token] | None) -> tuple[bytes, Token, bool] | None:
    return None if current is None else (*current, False)


def _one_line(problem: BaseException) -> str:
    """Return the first line of a message; torch adds the stack of its C++ code to some."""
    lines = str(problem).strip().splitlines()
    return lines[0] if lines else type(problem).__name__
