"""Certificates derived from a token: TLS for processes that share a secret.

The key of an authority is derived from the token, so all holders of the token trust the same authority without
exchanging anything, and each signs its own certificate. Both sides require a certificate. This is for
programs that support TLS but no token, such as etcd; it replaces the proof of `wire.handshake`, and
also encrypts.

Anyone who opens a connection sees the authority's public key and can test guesses of the token against it, so
a token must be random.

The required parts of P-256 (FIPS 186-4), ECDSA and X.509 (RFC 5280) are implemented here: the standard library
can use certificates but not create them, and a program that creates them is not always installed. This module
signs only certificates that it created itself, when a job starts, so its timing reveals nothing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import secrets
from typing import TYPE_CHECKING, NamedTuple

from holdfast.net.listening import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

ISSUER, OWNER = "holdfast token authority", "holdfast"
# Always valid: the clocks of machines differ, and a certificate is useless after its job.
NOT_BEFORE, NOT_AFTER = b"20000101000000Z", b"99991231235959Z"


class Certificate(NamedTuple):
    """A certificate with its key and its authority, each in PEM."""

    ca: bytes
    cert: bytes
    key: bytes


def make_certificate(token: bytes, hosts: Sequence[str] = ()) -> Certificate:
    """Return a new certificate for a server with these names and addresses, or for a client if there are none.

    If a client's certificate contains addresses, a server written in Go compares them with the client's address.
    So a client's certificate should have none.
    """
    authority = _derive_key(token)
    issuer_point = _public(authority)
    key = 1 + secrets.randbelow(ORDER - 1)
    ca = _signed_certificate(authority, issuer_point, issuer_point, ISSUER, is_authority=True)
    cert = _signed_certificate(authority, issuer_point, _public(key), OWNER, hosts)
    return Certificate(
        _pem(b"CERTIFICATE", ca),
        _pem(b"CERTIFICATE", cert),
        _pem(b"EC PRIVATE KEY", _encode_key(key)),
    )


def _derive_key(token: bytes) -> int:
    """Return the private key of a token's authority.

    The digest has twice as many bits as the key, so that all keys are equally likely.
    """
    secret = hashlib.sha256(token).digest()
    digest = hmac.digest(secret, b"holdfast certificate authority, P-256", "sha512")
    return 1 + int.from_bytes(digest, "big") % (ORDER - 1)


# P-256.

Point = tuple[int, int]
PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
BASE: Point = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)


def _public(key: int) -> Point:
    """Return the multiple of the base point, by doubling and adding."""
    total: Point | None = None
    addend = BASE
    while key:
        if key & 1:
            total = addend if total is None else _add(total, addend)
        addend = _add(addend, addend)
        key >>= 1
    assert total is not None
    return total


def _add(one: Point, other: Point) -> Point:
    """Return the sum of two points that are not each other's negative; keys are below the order, so none are."""
    (x1, y1), (x2, y2) = one, other
    if one == other:
        slope = 3 * (x1 * x1 - 1) * pow(2 * y1, -1, PRIME)
    else:
        slope = (y2 - y1) * pow(x2 - x1, -1, PRIME)
    x = (slope * slope - x1 - x2) % PRIME
    return x, (slope * (x1 - x) - y1) % PRIME


def _sign(key: int, message: bytes) -> bytes:
    """Return an ECDSA signature with SHA-256."""
    digest = hashlib.sha256(message).digest()
    while True:
        # The seed depends on the key and the message too, so weak randomness does not reveal the key.
        seed = hmac.digest(key.to_bytes(32, "big"), secrets.token_bytes(64) + digest, "sha512")
        nonce = 1 + int.from_bytes(seed, "big") % (ORDER - 1)
        r = _public(nonce)[0] % ORDER
        s = pow(nonce, -1, ORDER) * (int.from_bytes(digest, "big") + r * key) % ORDER
        if r and s:
            return _sequence(_integer(r), _integer(s))


# X.509, in DER.

EC_KEY, P256 = "1.2.840.10045.2.1", "1.2.840.10045.3.1.7"
ECDSA_WITH_SHA256 = "1.2.840.10045.4.3.2"
ORGANIZATION = "2.5.4.10"
SUBJECT_KEY, KEY_USAGE, ALTERNATIVE, CONSTRAINTS, AUTHORITY_KEY = (
    f"2.5.29.{number}" for number in (14, 15, 17, 19, 35)
)
CERT_SIGN = b"\x02\x04"  # The number of unused bits, and the bit of `keyCertSign`.
SIGNATURE = b"\x07\x80"


def _signed_certificate(
    authority: int,
    issuer_point: Point,
    point: Point,
    name: str,
    hosts: Sequence[str] = (),
    *,
    is_authority: bool = False,
) -> bytes:
    encoded = _encode_point(point)
    extensions = [
        _extension(
            CONSTRAINTS, _sequence(*([_der(1, b"\xff")] if is_authority else [])), critical=True
        ),
        _extension(KEY_USAGE, _der(3, CERT_SIGN if is_authority else SIGNATURE), critical=True),
        _extension(SUBJECT_KEY, _der(4, _key_id(encoded))),
        _extension(AUTHORITY_KEY, _sequence(_der(0x80, _key_id(_encode_point(issuer_point))))),
    ]
    if hosts:
        extensions.append(_extension(ALTERNATIVE, _sequence(*map(_alternative, hosts))))
    algorithm = _sequence(_identifier(ECDSA_WITH_SHA256))
    body = _sequence(
        _der(0xA0, _integer(2)),  # Version 3.
        _integer(1 if is_authority else secrets.randbits(126) | 1 << 126),
        algorithm,
        _name(ISSUER),
        _sequence(_der(24, NOT_BEFORE), _der(24, NOT_AFTER)),
        _name(name),
        _sequence(_sequence(_identifier(EC_KEY), _identifier(P256)), _bits(encoded)),
        _der(0xA3, _sequence(*extensions)),
    )
    return _sequence(body, algorithm, _bits(_sign(authority, body)))


def _alternative(host: str) -> bytes:
    if address_of(host) == host:
        return _der(0x87, ipaddress.ip_address(host).packed)
    return _der(0x82, host.encode("idna") if not host.isascii() else host.encode())


def _extension(identifier: str, value: bytes, *, critical: bool = False) -> bytes:
    flag = [_der(1, b"\xff")] if critical else []
    return _sequence(_identifier(identifier), *flag, _der(4, value))


def _encode_key(key: int) -> bytes:
    """Return a private key in the form of RFC 5915."""
    return _sequence(
        _integer(1),
        _der(4, key.to_bytes(32, "big")),
        _der(0xA0, _identifier(P256)),
        _der(0xA1, _bits(_encode_point(_public(key)))),
    )


def _encode_point(point: Point) -> bytes:
    return b"\x04" + b"".join(one.to_bytes(32, "big") for one in point)


def _key_id(encoded: bytes) -> bytes:
    return hashlib.sha256(encoded).digest()[:20]


def _name(organization: str) -> bytes:
    return _sequence(
        _der(0x31, _sequence(_identifier(ORGANIZATION), _der(12, organization.encode())))
    )


def _identifier(dotted: str) -> bytes:
    first, second, *rest = map(int, dotted.split("."))
    encoded = bytearray([40 * first + second])
    for number in rest:
        groups = [number & 0x7F]
        while number := number >> 7:
            groups.append(number & 0x7F | 0x80)
        encoded += bytes(reversed(groups))
    return _der(6, bytes(encoded))


def _integer(number: int) -> bytes:
    return _der(2, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _bits(data: bytes) -> bytes:
    return _der(3, b"\0" + data)


def _sequence(*parts: bytes) -> bytes:
    return _der(0x30, b"".join(parts))


def _der(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _pem(kind: bytes, der: bytes) -> bytes:
    lines = base64.b64encode(der)
    wrapped = b"\n".join(lines[start : start + 64] for start in range(0, len(lines), 64))
    return b"-----BEGIN %b-----\n%b\n-----END %b-----\n" % (kind, wrapped, kind)
