"""The etcd client that TorchElastic's classes accept, with the methods of the package python-etcd.

Text keys are paths, as in etcd's API v2, but the client stores everything with API v3: a directory is
the common prefix of keys, and exists as long as they do. Bytes keys are those of the base class
`EtcdClient`. The client does not support `wait` and `watch`, `append`, or empty directories.
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, overload

from holdfast.core.etcd.calls import Compare, Delete, Field, Get, Put, Txn, end_of_prefix
from holdfast.errors import EnvironmentProblem, UsageError
from holdfast.etcd.etcd_settings import EtcdSettings
from holdfast.etcd.sync_client import EtcdClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.core.etcd.calls import KeyValue, Op

DEFAULT_READ_TIMEOUT_S = 60.0


class EtcdException(Exception):
    """Base of the exceptions for paths. If python-etcd is loaded, they also have python-etcd's types."""


class EtcdKeyNotFound(EtcdException, KeyError):
    """There is no such path."""

    __str__ = Exception.__str__


class EtcdAlreadyExist(EtcdException, KeyError):
    """The path exists already."""

    __str__ = Exception.__str__


class EtcdNotFile(EtcdException, KeyError):
    """The path is a directory, but the call is not for directories."""

    __str__ = Exception.__str__


class EtcdCompareFailed(EtcdException, ValueError):
    """The path does not have the expected value or index."""


class EtcdResult:
    """The state of a path after a read or a write. Indices are etcd's revisions."""

    def __init__(self, action: str, key: str, found: KeyValue | None, ttl: int | None) -> None:
        self.action = action
        self.key = key
        self.value = None if found is None else found.value.decode(errors="surrogateescape")
        self.dir = found is None
        self.ttl = ttl
        self.createdIndex = 0 if found is None else found.create_revision
        self.modifiedIndex = 0 if found is None else found.mod_revision
        self.newKey = found is not None and action != "get" and found.version == 1
        self._below: list[EtcdResult] = []

    @property
    def children(self) -> Iterator[EtcdResult]:
        """The entries below a directory. If the path is not a directory, it is its own only child."""
        yield from self._below or [self]

    leaves = children


class EtcdV2Client(EtcdClient):
    """Any thread may call it, until `close`, with python-etcd's paths or with keys of bytes."""

    @property
    def host(self) -> str:
        return self.settings.endpoints[0][0]

    @property
    def port(self) -> int:
        return self.settings.endpoints[0][1]

    @property
    def protocol(self) -> str:
        return "https" if self.settings.tls else "http"

    @property
    def base_uri(self) -> str:
        return f"{self.protocol}://{self.settings.where.split(',')[0]}"

    @property
    def read_timeout(self) -> float:
        """Limit of one call, in seconds."""
        return self.settings.call_s

    @property
    def version(self) -> str:
        """The version of the etcd that responds."""
        try:
            with urllib.request.urlopen(  # noqa: S310 (the user's own endpoint)
                f"{self.base_uri}/version",
                timeout=self.read_timeout,
                context=self.settings.tls_context(),
            ) as response:
                return str(json.load(response)["etcdserver"])
        except (OSError, ValueError, KeyError) as problem:
            raise EnvironmentProblem(f"etcd at {self.base_uri}: {problem}") from problem

    @overload
    def get(self, key: bytes) -> KeyValue | None: ...
    @overload
    def get(self, key: str) -> EtcdResult: ...
    def get(self, key: bytes | str) -> Any:
        """Return the entry at a path, or at a key of bytes."""
        return super().get(key) if isinstance(key, bytes) else self.read(key)

    def __contains__(self, key: str) -> bool:
        try:
            self.read(key)
        except EtcdKeyNotFound:
            return False
        return True

    def read(self, key: str, *, recursive: bool = False, quorum: bool = True) -> EtcdResult:  # noqa: ARG002
        """Return the entry at a path; for a directory, everything below it.

        `recursive` and `quorum` have no effect: every read is recursive and has a quorum.
        """
        at, below = _key_of_path(key), _range_below(key)
        found, under = self.txn(Txn(success=(Get(at), Get(*below)))).results
        if found:
            return EtcdResult("get", key, found[0], None)
        if not under:
            raise _error("EtcdKeyNotFound", f"{key}: there is no such key in etcd")
        result = EtcdResult("get", key, None, None)
        result._below = [EtcdResult("get", one.key.decode(), one, None) for one in under]
        return result

    def write(
        self,
        key: str,
        value: object,
        ttl: int | None = None,
        *,
        prevExist: bool | None = None,  # noqa: N803 (python-etcd's names)
        prevValue: object = None,  # noqa: N803
        prevIndex: int | None = None,  # noqa: N803
    ) -> EtcdResult:
        """Store a value for `ttl` seconds, or permanently, if the conditions hold."""
        at = _key_of_path(key)
        lease = self.grant(ttl).lease if ttl else 0
        data = value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")
        ops = (Put(at, data, lease), Get(at))
        found = self._do_if(key, ops, prevExist, prevValue, prevIndex)[-1]
        return EtcdResult("set", key, found[0], ttl)

    def set(self, key: str, value: object, ttl: int | None = None) -> EtcdResult:
        """Store a value for `ttl` seconds, or permanently."""
        return self.write(key, value, ttl)

    def test_and_set(
        self, key: str, value: object, prev_value: object, ttl: int | None = None
    ) -> EtcdResult:
        """Replace one value by another."""
        return self.write(key, value, ttl, prevValue=prev_value)

    def delete(
        self,
        key: str,
        recursive: bool | None = None,
        dir: bool | None = None,  # noqa: A002 (python-etcd's name)
        *,
        prevValue: object = None,  # noqa: N803
        prevIndex: int | None = None,  # noqa: N803
    ) -> EtcdResult:
        """Remove a path; with `recursive` or `dir`, everything below it too."""
        was = self.read(key)
        if was.dir and not (recursive or dir):
            raise _error("EtcdNotFile", f"{key}: is a directory in etcd; delete it with recursive")
        ops: tuple[Op, ...] = (Delete(_key_of_path(key)),)
        if was.dir:
            ops = (*ops, Delete(*_range_below(key)))
        self._do_if(key, ops, None, prevValue, prevIndex)
        was.action = "delete"
        return was

    def _do_if(
        self,
        key: str,
        ops: tuple[Op, ...],
        exists: bool | None,
        value: object,
        index: int | None,
    ) -> tuple[Any, ...]:
        at = _key_of_path(key)
        compare: list[Compare] = []
        if value is not None:
            data = value if isinstance(value, bytes) else str(value).encode()
            compare.append(Compare(at, Field.VALUE, data))
        if index is not None:
            compare.append(Compare(at, Field.MOD, index))
        if exists is False:
            compare.append(Compare(at, Field.CREATE, 0))
        if exists or ((value is not None or index is not None) and exists is None):
            self.read(key)  # Raises if there is nothing to compare with.
        done = self.txn(Txn(tuple(compare), ops))
        if done.succeeded:
            return done.results
        if exists is False:
            raise _error("EtcdAlreadyExist", f"{key}: already exists in etcd")
        expected = value if value is not None else f"index {index}"
        raise _error("EtcdCompareFailed", f"{key}: is not {expected} in etcd")


def adapted(client: Any) -> EtcdClient:
    """Return our client for a client of python-etcd: same endpoint and certificates."""
    if isinstance(client, EtcdClient):
        return client
    try:
        host, port, protocol = client.host, client.port, client.protocol
    except AttributeError:
        raise UsageError(
            f"client: {type(client).__name__} is not an etcd client; accepted: the result of "
            "EtcdServer().get_client(), or a Client of python-etcd"
        ) from None
    pool: dict[str, Any] = getattr(getattr(client, "http", None), "connection_pool_kw", {})
    tls = protocol == "https"
    return EtcdV2Client(
        EtcdSettings(
            endpoints=((host, int(port)),),
            user=getattr(client, "username", None) or "",
            password=getattr(client, "password", None) or "",
            tls=tls,
            ca=(pool.get("ca_certs") or "") if tls else "",
            cert=(pool.get("cert_file") or "") if tls else "",
            key=(pool.get("key_file") or "") if tls else "",
            call_s=float(getattr(client, "read_timeout", None) or DEFAULT_READ_TIMEOUT_S),
        )
    )


def _key_of_path(key: str) -> bytes:
    """Return the key of a path, which begins with a slash as in python-etcd."""
    return f"/{key.strip('/')}".encode()


def _range_below(key: str) -> tuple[bytes, bytes]:
    begin = f"/{key.strip('/')}/".encode() if key.strip("/") else b"/"
    return begin, end_of_prefix(begin)


def _error(name: str, text: str) -> Exception:
    """Return one of our errors. If python-etcd is loaded, it also has python-etcd's type."""
    ours: type[Exception] = globals()[name]
    theirs = getattr(sys.modules.get("etcd"), name, None)
    if isinstance(theirs, type):
        ours = type(name, (ours, theirs), {})
    return ours(text)
