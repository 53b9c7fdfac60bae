from __future__ import annotations

import os
import socket

from holdfast.net.listening import COMMAND_CHARS_MAX, owner_of


def test_the_process_that_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        owner = owner_of(listening.getsockname()[1])
    assert owner.startswith(f"pid {os.getpid()}, ")
    assert len(owner) <= COMMAND_CHARS_MAX + 20


def test_ipv6_counts_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listening:
        assert owner_of(listening.getsockname()[1]).startswith(f"pid {os.getpid()}")


def test_a_port_that_is_bound_and_not_listened_at_has_no_owner() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert owner_of(bound.getsockname()[1]) == ""
