"""The settings of `--rdzv-conf`: `RendezvousParameters` are the user's text, `RendezvousConfig` the parsed values.

`KEYS` is the table of all keys: meaning, values, default. Keys of settings that all nodes must agree on come
from `core.job_settings`. `parse_text` splits the flag's text; `parse` converts the parameters of a job to a
`RendezvousConfig`. If a value is not valid, they raise a `UsageError` of one line. An unknown key causes a warning
that names the most similar key, and is otherwise ignored, as in TorchElastic. If an unknown key may be meant to
protect the job, it is an error. Times are seconds and may be fractional.

`settle` is Holdfast's name for `last_call_timeout`. `timeout` is the join timeout of `static` and etcd only:
every launch sets it, to 900 by default, so elsewhere it would always override the default of `join_timeout`.

The defaults are TorchElastic's, except that the last call is 1 s, not 30. It restarts with each node that
joins, so it only needs to be longer than the gap between two nodes of one start.
"""

from __future__ import annotations

import difflib
import math
import os
from dataclasses import dataclass, field, fields
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from holdfast import console
from holdfast.core.job_settings import DEFAULTS, SETTINGS, TYPES, JobSettings, StoreAccess
from holdfast.core.limits import COUNTER_MAX, NODE_ID_CHARS_MAX, PORT_MAX, check_node_range
from holdfast.core.protocol import check_address
from holdfast.errors import UsageError
from holdfast.net.tls import PSK, TlsFiles, TlsToken
from holdfast.net.token import choose_token
from holdfast.rendezvous.backends import Backend
from holdfast.rendezvous.worker_store import workers_serve_by_environment
from holdfast.wire.handshake import FILE_VARIABLE, VARIABLE

if TYPE_CHECKING:
    from collections.abc import Mapping

FLAG = "--rdzv-conf"
SECONDS_MAX = 10 * 365 * 24 * 3600
"""The limit of a time. A longer time is a mistake, and would overflow a deadline."""

TRUE_WORDS = frozenset({"1", "true", "t", "yes", "y"})
FALSE_WORDS = frozenset({"0", "false", "f", "no", "n"})


class RendezvousParameters:
    """The job, its endpoint, and the settings of the backend as they were given."""

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise UsageError("--rdzv-backend: the name of the rendezvous backend is empty")
        try:
            check_node_range(min_nodes, max_nodes)
        except ValueError as problem:
            raise UsageError(f"--nnodes: {problem}") from None
        if local_addr:
            try:
                check_address(local_addr)
            except ValueError as problem:
                raise UsageError(f"--local-addr: {problem}") from None
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = min_nodes
        self.max_nodes = max_nodes
        self.local_addr = local_addr
        self.config = kwargs

    @property
    def kind(self) -> Backend | None:
        """The built-in backend; None for a plug-in. `c10d` with store_type=file is `file`."""
        known = Backend.named(self.backend)
        is_file = str(self.get("store_type", "")).strip().lower() == "file"
        return Backend.FILE if known is Backend.C10D and is_file else known

    def get(self, key: str, default: Any = None) -> Any:
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """Return a switch: a bool, 1 or 0, or a word for one of them."""
        value = self.get(key, default)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int) and value in (0, 1):
            return value == 1
        if isinstance(value, str):
            if value.lower() in TRUE_WORDS:
                return True
            if value.lower() in FALSE_WORDS:
                return False
        raise self._refusal(key, value, "is neither on nor off", "true, yes, 1, false, no, 0")

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        value = self.get(key, default)
        if value is None:
            return None
        try:
            return int(value)
        except (TypeError, ValueError, OverflowError):
            raise self._refusal(key, value, "is not a whole number", "digits, such as 5") from None

    def get_as_seconds(
        self, key: str, default: float | None = None, *, zero: bool = False
    ) -> float | None:
        """Return a time in seconds, above 0, or from 0 with `zero`."""
        value = self.get(key, default)
        if value is None:
            return None
        try:
            seconds = float(value)
        except (TypeError, ValueError, OverflowError):
            seconds = math.nan
        if isinstance(value, bool) or not (0 < seconds <= SECONDS_MAX or (zero and seconds == 0)):
            accepted = f"seconds {'from' if zero else 'above'} 0, such as 30 or 2.5"
            raise self._refusal(key, value, "is not a time", accepted)
        return seconds

    def _refusal(self, key: str, value: object, what: str, accepted: str) -> UsageError:
        return UsageError(f"--rdzv-conf: {key}: {value!r} {what}; accepted: {accepted}")


JOIN_S = 600.0
LAST_CALL_S = DEFAULTS["settle_s"]
CLOSE_S = 30.0
HEARTBEAT_S = 5.0


class RendezvousTimeout:
    """The time limits of a rendezvous.

    join
        How long `next_rendezvous` may take.
    last_call
        How long a round with the minimum of nodes waits for more, after the last node has joined. Each
        regroup waits that long, unless the round is full earlier.
    close
        How long closing or leaving the job may take.
    heartbeat
        How long one response of the backend may take.
    """

    def __init__(
        self,
        join: timedelta | None = None,
        last_call: timedelta | None = None,
        close: timedelta | None = None,
        heartbeat: timedelta | None = None,
    ) -> None:
        self._join = _checked("join", join, JOIN_S)
        self._last_call = _checked("last_call", last_call, LAST_CALL_S)
        self._close = _checked("close", close, CLOSE_S)
        self._heartbeat = _checked("heartbeat", heartbeat, HEARTBEAT_S)

    @property
    def join(self) -> timedelta:
        """How long `next_rendezvous` may take."""
        return self._join

    @property
    def last_call(self) -> timedelta:
        """How long a round that could form waits for more nodes."""
        return self._last_call

    @property
    def close(self) -> timedelta:
        """How long `set_closed` and `shutdown` may take."""
        return self._close

    @property
    def heartbeat(self) -> timedelta:
        """How long one heartbeat may take."""
        return self._heartbeat


@dataclass(repr=False, eq=False, frozen=True)
class RendezvousSettings:
    """The settings of a handler. A node is lost `interval` x `max_attempt` after its last heartbeat."""

    run_id: str
    min_nodes: int
    max_nodes: int
    timeout: RendezvousTimeout
    keep_alive_interval: timedelta
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float = 0.0


def _checked(name: str, given: timedelta | None, default_s: float) -> timedelta:
    if given is None:
        return timedelta(seconds=default_s)
    if given <= timedelta(0):
        raise UsageError(f"RendezvousTimeout: {name}: {given} is not above 0")
    return given


ALL = tuple(Backend)
C10D, STATIC, FILE, ETCD, HA = ((one,) for one in Backend)
WITH_COORDINATOR = tuple(one for one in Backend if one.has_coordinator)
WITHOUT_COORDINATOR = tuple(one for one in Backend if not one.has_coordinator)
ON_ETCD = tuple(one for one in Backend if one.is_on_etcd)
WITH_TOKEN = tuple(one for one in Backend if one.takes_token)


class Key(NamedTuple):
    """One key of `--rdzv-conf`."""

    name: str
    kind: str
    """`seconds`, `count`, `number`, `port`, `switch`, `path`, `text`, `secret`, or the accepted words."""
    default: Any
    backends: tuple[Backend, ...]
    meaning: str
    alias_of: str = ""
    most: float = COUNTER_MAX


def _job_wide(name: str) -> Key:
    """Return the key of a setting that all nodes of a job must agree on."""
    kind, setting = TYPES[name], SETTINGS[name]
    default = None if setting.depends else DEFAULTS[name]
    if issubclass(kind, Enum):
        words = "|".join(one.value for one in kind)
        shown = default.value if isinstance(default, Enum) else default
        return Key(setting.key, words, shown, ALL, setting.meaning)
    numbers = "seconds" if kind is float else "count or 0"
    return Key(setting.key, numbers, default, ALL, setting.meaning, most=setting.most)


JOB_WIDE = {name: setting.key for name, setting in SETTINGS.items() if setting.key}
"""The settings of `core.job_settings` that have a key."""

KEYS = (
    *map(_job_wide, JOB_WIDE),
    Key("join_timeout", "seconds", JOIN_S, ALL,
        "how long a node waits for a round with enough nodes"),
    Key("settle", "seconds", LAST_CALL_S, ALL,
        "Holdfast's name for last_call_timeout", "last_call_timeout"),
    Key("close_timeout", "seconds", CLOSE_S, FILE,
        "how long closing the job, or leaving it, may take"),
    Key("heartbeat_timeout", "seconds", HEARTBEAT_S, FILE,
        "how long is_closed waits for a response from the backend"),
    Key("keep_alive_interval", "seconds", 1.0, ALL,
        "the time between two heartbeats of a node"),
    Key("keep_alive_max_attempt", "count", 5, ALL,
        "a node is lost after this many intervals without a heartbeat"),
    Key("cas_backoff_max_seconds", "seconds or 0", 0.0, ALL,
        "with file and your own backends: the longest random pause after two nodes wrote at the same time; 0 is 1 s. "
        "With the others one process decides, so this has no effect"),
    Key("timeout", "seconds", None, (*STATIC, *ON_ETCD),
        "the join_timeout of static, etcd and ha, unless that is given"),
    Key("rank", "number", None, STATIC,
        "the node's number, as given by --node-rank"),
    Key("read_timeout", "seconds", None, (*C10D, *ON_ETCD),
        "how long a node tries to reach the coordinator or etcd for the first time"),
    Key("is_host", "switch", None, C10D,
        "whether this node runs the coordinator; by default the first node that can bind the endpoint does"),
    Key("store_type", "tcp|file", "tcp", C10D,
        "with file, the endpoint is a shared directory or file"),
    Key("reconnect_grace", "seconds or 0", 0.2, WITH_COORDINATOR,
        "how long a node may take to reconnect before it is lost"),
    Key("coordinator_timeout", "seconds", 60.0, ALL,
        "how long agents continue without the coordinator, etcd or the backend"),
    Key("recover_timeout", "seconds", None, WITH_COORDINATOR,
        "how long a new coordinator waits for the nodes of the previous one to reconnect"),
    Key("state_file", "path", None, WITH_COORDINATOR,
        "a file in which the coordinator stores its jobs, so that its successor can read them"),
    Key("on_lost", "stop|run", None, ALL,
        "what a disconnected node does: stop its workers before they may be replaced (the default with "
        "etcd and ha), or let them run (the default with the others)"),
    Key("advertised_port", "port", None, WITH_COORDINATOR,
        "the port that agents connect to, if something forwards it to the coordinator's; needed with a token"),
    Key("token_file", "path", None, WITH_TOKEN,
        "a file with the secret that nodes and coordinator share"),
    Key("auth", "token|none", None, WITH_TOKEN,
        "none accepts every connection; token requires the token, even on loopback"),
    Key("tls", "psk", None, WITH_COORDINATOR,
        "psk: encrypt with keys derived from the token, without certificates; needs Python 3.13 everywhere"),
    Key("tls_cert", "path", None, WITH_TOKEN, "this node's certificate, in PEM"),
    Key("tls_key", "path", None, WITH_TOKEN, "the key of the certificate, in PEM"),
    Key("tls_ca", "path", None, WITH_TOKEN, "the CA certificates to trust, in PEM"),
    Key("tls_server_name", "text", None, (*WITH_TOKEN, *ETCD),
        "the name in the coordinator's or etcd's certificate, if it is not the endpoint's host"),
    Key("label", "text", "", ALL, "the node's location, for rank_order=label"),
    Key("node_id", "text", "", ALL, "the node's id in the job, by default its host name; must differ between nodes"),
    Key("replace", "switch", None, ALL,
        "whether a new agent with the same node_id or --node-rank replaces this one while it is alive"),
    Key("worker_store", "switch", None, ALL,
        "whether the worker of rank 0 hosts the workers' store, as with --worker-store"),
    Key("presence", "on|off", "on", ON_ETCD,
        "whether agents keep connections to each other, so that they detect immediately that an agent exited; "
        "with off, they detect it when its lease expires"),
    Key("control", "on|read-only|off", "on", WITHOUT_COORDINATOR,
        "whether agents open a port at which other machines can watch and steer the job, or only watch it"),
    Key("protocol", "http|https", "http", ETCD, "the protocol of etcd"),
    Key("cert", "path", None, ETCD, "the client certificate for etcd"),
    Key("key", "path", None, ETCD, "the key of that certificate"),
    Key("cacert", "path", None, ETCD, "the CA certificates to trust for etcd"),
    Key("ssl_cert", "path", None, ETCD, "another name for cert", "cert"),
    Key("ssl_cert_key", "path", None, ETCD, "another name for key", "key"),
    Key("ca_cert", "path", None, ETCD, "another name for cacert", "cacert"),
    Key("user", "text", None, ETCD, "the user name for etcd, as with HOLDFAST_ETCD_USER"),
    Key("password", "secret", None, ETCD,
        "the password of that user; HOLDFAST_ETCD_PASSWORD hides it from other users"),
    Key("etcd_prefix", "text", "/torchelastic/p2p", ETCD, "the prefix of the jobs' keys in etcd"),
)  # fmt: skip

RESERVED = frozenset({"backend", "endpoint", "local_addr", "max_nodes", "min_nodes", "run_id"})
"""Settings that have a flag and no key in `--rdzv-conf`."""

KEY_OF = {key.name: key for key in KEYS}

PROTECTING = ("auth", "tls", "token")
"""Unknown keys with these prefixes are errors. TorchElastic has no keys with these prefixes."""

# Every launch sets these keys, even if the user did not.
SET_BY_LAUNCHES = frozenset({"timeout", "rank"})

# Parameters that have caused warnings already; they may be parsed again.
_warned: WeakSet[RendezvousParameters] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """The settings of a job's rendezvous; `KEYS` has their meanings. Times are in seconds."""

    shared: Mapping[str, Any]
    """The settings that all nodes share, for `job_settings`."""
    join_timeout: float
    close_timeout: float
    heartbeat_timeout: float
    keep_alive_interval: float
    keep_alive_max_attempt: int
    cas_backoff_max_seconds: float
    rank: int | None
    read_timeout: float | None
    is_host: bool | None
    store_type: str
    reconnect_grace: float
    coordinator_timeout: float
    recover_timeout: float | None
    state_file: str | None
    on_lost: str | None
    advertised_port: int | None
    token_file: str | None
    auth: str | None
    tls: str | None
    tls_cert: str | None
    tls_key: str | None
    tls_ca: str | None
    tls_server_name: str | None
    label: str
    node_id: str
    replace: bool | None
    worker_store: bool
    presence: str
    control: str
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The keys that the user set."""

    def job_settings(self, max_restarts: int = 0) -> JobSettings:
        """Return the settings that all nodes share; the restart budget is that of the agent."""
        return JobSettings(**self.shared, max_restarts=max_restarts)

    @property
    def certified(self) -> bool:
        """Whether nodes and coordinator authenticate each other by certificates."""
        return self.tls_cert is not None and self.tls_ca is not None

    def token_for(
        self, host: str, environ: Mapping[str, str], *, read_only: bool = False, make: bool = True
    ) -> bytes | None:
        """Return the token for an endpoint at `host`; see `choose_token`."""
        return choose_token(
            host,
            environ,
            token_file=self.token_file,
            auth=self.auth,
            certified=self.certified,
            read_only=read_only,
            make=make,
        )

    def tls_with(self, token: bytes | None, run_id: str = "") -> TlsFiles | TlsToken | None:
        """Return how connections are encrypted: by certificates, by the token, or not at all."""
        if self.tls is not None:
            if token is None:
                raise UsageError(
                    f"--rdzv-conf: {PSK} needs a token",
                    hint="set one for all nodes, or auth=token to use this user's own",
                )
            return TlsToken(token, run_id)
        if not (self.tls_cert or self.tls_key or self.tls_ca):
            return None
        return TlsFiles(
            cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca, server_name=self.tls_server_name
        )

    @property
    def lost_after_s(self) -> float:
        """How long after its last heartbeat a node is lost."""
        return self.keep_alive_interval * self.keep_alive_max_attempt

    def timeouts(self) -> RendezvousTimeout:
        """Return the time limits in TorchElastic's format."""
        return RendezvousTimeout(
            join=timedelta(seconds=self.join_timeout),
            last_call=timedelta(seconds=self.job_settings().settle_s),
            close=timedelta(seconds=self.close_timeout),
            heartbeat=timedelta(seconds=self.heartbeat_timeout),
        )


def parse_text(text: str, source: str = FLAG) -> dict[str, str]:
    """Parse `key=value,key=value`. The last value of a key counts; values stay text."""
    conf: dict[str, str] = {}
    for item in text.split(",") if text.strip() else ():
        key, _, value = (part.strip() for part in item.partition("="))
        if not key or not value:
            raise UsageError(
                f"{source}: {text!r} has the item {item.strip()!r}; accepted: key=value,key=value"
            )
        if key in RESERVED:
            raise UsageError(
                f"{source}: {text!r} sets {key!r}, which has its own flag; accepted: other keys"
            )
        conf[key] = value
    return conf


def parse(params: RendezvousParameters, *, shares_state: bool = False) -> RendezvousConfig:
    """Read all settings of a job; raise `UsageError` for an invalid value.

    With `shares_state`, the backend has the keys of `file`, whatever its name: the nodes share a stored state and
    have no coordinator.
    """
    given = {name for name, value in params.config.items() if value is not None}
    # A plug-in has the keys of a shared state, and perhaps keys of its own.
    backend = Backend.named(params.backend)
    kin = {backend}
    if shares_state or backend is None:
        kin.add(Backend.FILE)
    if backend is not None and params not in _warned:
        _warned.add(params)
        warn_about_unused(params.backend, given, kin, shares_state=shares_state)
    values: dict[str, Any] = {}
    for key in KEYS:
        values[key.name] = key.default if kin.isdisjoint(key.backends) else _value(params, key)
    for key in KEYS:
        if key.alias_of and key.name in given and not kin.isdisjoint(key.backends):
            _take_alias(key, values, given)
    if "join_timeout" not in given and values["timeout"] is not None:
        values["join_timeout"] = values["timeout"]
    if values["worker_store"] is None:
        values["worker_store"] = workers_serve_by_environment()
    if values["store"] is None:
        values["store"] = default_store(params.max_nodes)
    _check_together(params, values)
    known = {one.name for one in fields(RendezvousConfig)}
    chosen = {name: value for name, value in values.items() if name in known}
    shared = {name: TYPES[name](values[key]) for name, key in JOB_WIDE.items()}
    shared |= {"min_nodes": params.min_nodes, "max_nodes": params.max_nodes}
    return RendezvousConfig(**chosen, shared=shared, given=frozenset(given))


def default_store(max_nodes: int) -> str:
    """Return the default of `store`.

    The store of a one-node job is open: a user who sets an endpoint for the job wants other jobs to reach it.
    """
    access = StoreAccess.HOSTS if max_nodes > 1 else StoreAccess.OPEN
    return access.value


def warn_about_unused(
    backend: str, given: set[str], kin: set[Backend | None], *, shares_state: bool = False
) -> None:
    """Warn about each given key, and about a token, that is unknown or has no effect here.

    Raises `UsageError` for an unknown key that may be meant to protect the job.
    """
    for name in sorted(given):
        key, protects = KEY_OF.get(name), name.startswith(PROTECTING)
        if key is None:
            near = difflib.get_close_matches(name, KEY_OF, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            if protects:
                raise UsageError(f"--rdzv-conf: {name} is unknown{hint}")
            console.warning(f"--rdzv-conf: {name} is unknown and has no effect{hint}")
        elif name not in SET_BY_LAUNCHES and (
            kin.isdisjoint(key.backends) or (shares_state and protects)
        ):
            console.warning(f"--rdzv-conf: {name} has no effect with {_where(backend)}")
    if shares_state or kin.isdisjoint(WITH_TOKEN):
        for variable in (FILE_VARIABLE, VARIABLE):
            if variable in os.environ:
                console.warning(
                    f"{variable} protects only the control ports of agents with {_where(backend)}: "
                    "anyone who can write to that endpoint can join the job"
                )


def _where(backend: str) -> str:
    known = Backend.named(backend)
    has_coordinator = known is not None and known.has_coordinator
    return "store_type=file" if has_coordinator else f"--rdzv-backend {backend}"


def value_of(params: RendezvousParameters, name: str) -> Any:
    """Read one setting, by its name or an alias."""
    values = {one.name: _value(params, one) for one in KEYS if name in (one.name, one.alias_of)}
    given = {one for one in values if params.get(one) is not None}
    for one in given - {name}:
        _take_alias(KEY_OF[one], values, given)
    return values[name]


def _value(params: RendezvousParameters, key: Key) -> Any:
    value = params.get(key.name)
    if value is None:
        return key.default
    match key.kind:
        case "seconds" | "seconds or 0":
            seconds = params.get_as_seconds(key.name, zero=key.kind != "seconds")
            if seconds is not None and seconds > key.most:
                raise _refusal(key, value, f"up to {key.most:g} seconds")
            return seconds
        case "switch":
            return params.get_as_bool(key.name)
        case "count":
            return _at_least(1, params, key)
        case "count or 0" | "number":
            return _at_least(0, params, key)
        case "port":
            number = params.get_as_int(key.name)
            if number is None or not 1 <= number <= PORT_MAX:
                raise _refusal(key, value, f"a port from 1 to {PORT_MAX}")
            return number
        case "path" | "text":
            return _text(value, key)
        case "secret":
            return str(value)  # No message shows it.
        case words:
            word = str(value).strip().lower()
            if word not in words.split("|"):
                raise _refusal(key, value, words.replace("|", ", "))
            return word


def _at_least(least: int, params: RendezvousParameters, key: Key) -> int:
    number = params.get_as_int(key.name)
    assert number is not None
    if not least <= number <= key.most:
        to = "" if key.most == COUNTER_MAX else f" to {key.most}"
        raise _refusal(key, number, f"a whole number from {least}{to}")
    return number


def _text(value: object, key: Key) -> str:
    text = str(value).strip()
    if key.kind == "text" and (len(text) > NODE_ID_CHARS_MAX or not text.isprintable()):
        raise _refusal(key, value, f"up to {NODE_ID_CHARS_MAX} printable characters")
    if not text:
        raise _refusal(key, value, "a path" if key.kind == "path" else "some text")
    return text


def _take_alias(key: Key, values: dict[str, Any], given: set[str]) -> None:
    if key.alias_of in given and values[key.name] != values[key.alias_of]:
        raise UsageError(
            f"--rdzv-conf: {key.name}={_shown(values[key.name])} and {key.alias_of}="
            f"{_shown(values[key.alias_of])} are the same setting; set one of them"
        )
    values[key.alias_of] = values[key.name]


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check_together(params: RendezvousParameters, values: dict[str, Any]) -> None:
    if bool(values["tls_cert"]) != bool(values["tls_key"]):
        there, missing = ("tls_cert", "tls_key") if values["tls_cert"] else ("tls_key", "tls_cert")
        raise UsageError(f"--rdzv-conf: {there} requires {missing}")
    if values["tls"] and (values["tls_cert"] or values["tls_ca"]):
        other = "tls_cert" if values["tls_cert"] else "tls_ca"
        raise UsageError(
            f"--rdzv-conf: tls={values['tls']} and {other} are two ways to encrypt; set one of them"
        )
    if values["store"] == "private" and values["worker_store"]:
        raise UsageError(
            "--rdzv-conf: store=private conflicts with worker_store (--worker-store): the store of a "
            "worker is open"
        )
    if values["spares"] >= params.max_nodes:
        raise UsageError(
            f"--spares: {values['spares']} of at most {params.max_nodes} nodes leave "
            "none to run; accepted: fewer than the maximum of --nnodes"
        )


def _refusal(key: Key, value: object, accepted: str) -> UsageError:
    return UsageError(f"--rdzv-conf: {key.name}: {value!r} is not valid; accepted: {accepted}")
