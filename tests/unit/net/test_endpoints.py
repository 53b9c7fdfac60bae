from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.net.endpoints import (
    format_endpoint,
    parse_rendezvous_endpoint,
    parse_rendezvous_endpoints,
)

PORT = 29400


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (None, "localhost", PORT),
        ("  ", "localhost", PORT),
        (" host:1 ", "host", 1),
        ("host:0", "host", 0),
        ("node-1.my_cluster.org:65535", "node-1.my_cluster.org", 65535),
        ("10.0.0.1", "10.0.0.1", PORT),
        ("[::1]", "::1", PORT),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("::", "::", PORT),
        ("fe80::1%eth0", "fe80::1%eth0", PORT),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1", PORT),
        ("fe80::1:29400", "fe80::1", 29400),
    ],
)
def test_valid_endpoints_are_parsed(text: str | None, host: str, port: int) -> None:
    assert parse_rendezvous_endpoint(text, PORT) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "host:", ":1", ":", "host:65536", "host:123456", "host:-1", "host:x", "host:1:2", "a b:1",
        "[::1", "[::1]x", "[::1]:", "[::1]:x", "[host]:1", "[]", "[]:1", "http://host:1",
        "::1:99999",
        "host:٣", "fe80::1%", "::%]", "host\0:1", "::1\0",
    ],
)  # fmt: skip
def test_invalid_endpoint_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: ") as caught:
        parse_rendezvous_endpoint(text, PORT)
    assert "\n" not in str(caught.value)


def test_list_keeps_its_order_and_one_endpoint_is_a_list() -> None:
    places = parse_rendezvous_endpoints(" node0:1, node1 ,[fd00::2]:3", PORT, 3)
    assert places == (("node0", 1), ("node1", PORT), ("fd00::2", 3))
    assert parse_rendezvous_endpoints("host:0", PORT, 3) == (("host", 0),)
    assert parse_rendezvous_endpoints("localhost:1,127.0.0.1:2", PORT, 3)[1] == ("127.0.0.1", 2)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,", "''"),
        ("a,,b", "''"),
        ("a:1,b:0", "'b:0'"),
        ("a:1,b:x", "'b:x'"),
        ("a,b,A:29400", "A:29400"),
        ("a,b,c,d", "4"),
        ("a,localhost", "localhost"),
        ("[::1]:1,a", "::1"),
    ],
)
def test_invalid_list_of_endpoints_is_refused_in_one_line(text: str, named: str) -> None:
    with pytest.raises(UsageError, match=r"^--rdzv-endpoint: ") as caught:
        parse_rendezvous_endpoints(text, PORT, 3)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(alphabet="abc.:-[]%0123456789 \n", max_size=24))
def test_any_text_is_an_endpoint_or_refused(text: str) -> None:
    try:
        host, port = parse_rendezvous_endpoint(text, PORT)
    except UsageError:
        return
    assert host
    assert 0 <= port <= 65535
    assert parse_rendezvous_endpoint(format_endpoint(host, port), PORT) == (host, port)


@pytest.mark.torch
@pytest.mark.parametrize(
    "text",
    [None, "", "host", "host:1", "h:0", "[::1]", "[::1]:29500", "host:", ":1", "host:65536", "h:x",
     "h-1.org:9", "fe80::1:29400"],
)  # fmt: skip
def test_endpoints_are_parsed_as_by_torch_except_bare_ipv6(text: str | None) -> None:
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint as torchs

    def outcome(parse: object) -> object:
        try:
            return parse(text, PORT)  # type: ignore[operator]
        except ValueError:
            return ValueError

    assert outcome(parse_rendezvous_endpoint) == outcome(torchs)
    assert torchs("::1", PORT) == (":", 1)
