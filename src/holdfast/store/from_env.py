"""Finding the store of a job: for a worker without torch, and as TorchElastic's programs do.

The one thing to know: a worker learns from its environment where the store is and who serves it.
Under `holdfast run` and `torchrun` that is an agent, mostly; else it is the worker of rank 0.
"""

from __future__ import annotations

import os
from datetime import timedelta

from holdfast import console
from holdfast.errors import UsageError
from holdfast.store.tcp.client import DEFAULT_TIMEOUT, PORT_MAX, TCPStore

MEMBERS = "_tcp_store/num_members"
"""The prefix of torch's keys for the clients of `create_c10d_store` that wait for each other."""


def from_environment(timeout: timedelta = DEFAULT_TIMEOUT) -> TCPStore:
    """Return the store that all workers of this job share, connected.

    `MASTER_ADDR` and `MASTER_PORT` say where it is. If `TORCHELASTIC_USE_AGENT_STORE` is not
    `True`, the worker with `RANK` 0 serves it and waits until all `WORLD_SIZE` have come, as
    torch's do with `env://`; workers with torch and without may be mixed. Raises `UsageError` if a
    variable is missing, and what `TCPStore` raises.
    """
    host, port = _variable("MASTER_ADDR"), _number("MASTER_PORT", most=PORT_MAX)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return TCPStore(host, port, timeout=timeout)
    world_size = _number("WORLD_SIZE", least=1)
    rank = _number("RANK", most=world_size - 1)
    return TCPStore(host, port, world_size, rank == 0, timeout, multi_tenant=True)


def create_c10d_store(
    is_server: bool,
    server_addr: str,
    server_port: int = -1,
    world_size: int = 1,
    timeout: float = 60 * 10,
    wait_for_workers: bool = True,
    retries: int = 3,  # noqa: ARG001 (torch's signature)
    use_libuv: bool | None = None,
) -> TCPStore:
    """Return a store at an endpoint, or serve one there; port -1 is any that is free.

    If it is to wait for the workers, all `world_size` of them have come when this returns. Nothing
    has to be tried again, whatever `retries` says: the kernel chooses a port that is free.
    """
    if use_libuv is not None:
        console.warning("create_c10d_store: use_libuv has no effect")
    if server_port == -1 and world_size > 1:
        raise UsageError(f"server_port: missing; {world_size} processes cannot guess the same one")
    if server_port == -1 and not is_server:
        raise UsageError("server_port: missing; a client has to know where its server is")
    store = TCPStore(
        server_addr,
        0 if server_port == -1 else server_port,
        world_size,
        is_server,
        timedelta(seconds=timeout),
        wait_for_workers,
    )
    try:
        if wait_for_workers:
            _meet(store, world_size)
    except BaseException:
        store.close()
        raise
    return store


def _meet(store: TCPStore, world_size: int) -> None:
    """Wait for the others, with the keys that torch's processes use for it."""
    if store.add(f"{MEMBERS}/num_members", 1) == world_size:
        store.set(f"{MEMBERS}/last_member", "<val_ignored>")
    store.wait([f"{MEMBERS}/last_member"])


def _variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not value:
        raise UsageError(
            f"{name}: the variable is not set; was this process started by holdfast run or "
            "torchrun?"
        )
    return value


def _number(name: str, *, least: int = 0, most: int | None = None) -> int:
    text = _variable(name)
    number = int(text) if text.isascii() and text.isdigit() else -1
    if number < least or (most is not None and number > most):
        accepted = f"from {least}" if most is None else f"{least} to {most}"
        raise UsageError(
            f"{name}: {text!r} in the environment cannot be used; accepted: {accepted}"
        )
    return number
