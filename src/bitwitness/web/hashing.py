"""Secrets of people and programs: how they are made, hashed and compared. Nothing else sees one for longer than a request.

Hashing is slow on purpose, so that a stolen users file is of little use. It takes memory and a core, so whoever calls `matches`
bounds how many at once. Whoever has no secret
here is compared as well, against `DUMMY` or `DUMMY_TOKEN`: the time tells the form of what was given, and never who is known.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass

SHORTEST = 12
"""Characters of a password that a person chooses."""
LONGEST = 1024
_PREFIX = "bwt"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one comparison takes: 2**`log_n` blocks of 128 * `r` bytes, gone through `p` times; here 32 MiB."""

    log_n: int = 15
    r: int = 8
    p: int = 3


USUAL = Cost()
OF_TOKEN = Cost(10, 8, 1)
"""A token is made of 256 random bits: no hash needs to be slow for it, and a program shows one with each request."""
_MOST = Cost(17, 16, 8)
"""A users file that asks for more is a mistake or an attack."""


def make_token(token_id: str = "") -> tuple[str, str]:
    """A new token and the id in it, by which its owner is found without trying all."""
    token_id = token_id or secrets.token_hex(6)
    return f"{_PREFIX}-{token_id}-{secrets.token_urlsafe(32)}", token_id


def id_of(token: str) -> str:
    """The id in a token; "" if it is none."""
    prefix, _, rest = token.partition("-")
    token_id, dash, secret = rest.partition("-")
    return token_id if prefix == _PREFIX and dash and secret else ""


def hashed(secret: str, cost: Cost = USUAL) -> str:
    """A secret as it may be kept: with a salt of its own, and what it costs to compare."""
    salt = secrets.token_bytes(16)
    parts = (base64.b64encode(part).decode() for part in (salt, _derive(secret, salt, cost)))
    return "$".join(("scrypt", f"{cost.log_n}:{cost.r}:{cost.p}", *parts))


def matches(secret: str, kept: str) -> bool:
    """Whether a secret is the one that is kept; the time does not tell where they differ."""
    cost, salt, expected = _parse(kept)
    return hmac.compare_digest(_derive(secret, salt, cost), expected)


def is_hash(kept: str) -> bool:
    """Whether `matches` can compare with it."""
    try:
        _parse(kept)
    except ValueError:
        return False
    return True


def same(given: str, expected: str) -> bool:
    """Compare two random values; the time does not tell where they differ."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def digest(secret: str) -> bytes:
    """Of a random value that is too long to be guessed: what memory keeps instead of it."""
    return hashlib.sha256(secret.encode(errors="replace")).digest()


def _derive(secret: str, salt: bytes, cost: Cost) -> bytes:
    return hashlib.scrypt(
        secret.encode(errors="replace"),
        salt=salt,
        n=1 << cost.log_n,
        r=cost.r,
        p=cost.p,
        maxmem=(1 << cost.log_n) * cost.r * 256 + (1 << 20),
        dklen=32,
    )


def _parse(kept: str) -> tuple[Cost, bytes, bytes]:
    try:
        kind, cost, salt, value = kept.split("$")
        log_n, r, p = (int(part) for part in cost.split(":"))
        parsed = Cost(log_n, r, p), base64.b64decode(salt, validate=True), base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error) as error:
        raise ValueError("not a hash of ours") from error
    fits = 1 <= log_n <= _MOST.log_n and 1 <= r <= _MOST.r and 1 <= p <= _MOST.p
    if kind != "scrypt" or not fits or len(parsed[1]) < 8 or len(parsed[2]) != 32:
        raise ValueError("not a hash of ours")
    return parsed


def _dummy(cost: Cost) -> str:
    salt, value = (base64.b64encode(bytes(size)).decode() for size in (16, 32))
    return f"scrypt${cost.log_n}:{cost.r}:{cost.p}${salt}${value}"


DUMMY, DUMMY_TOKEN = _dummy(USUAL), _dummy(OF_TOKEN)
"""What a password or a token is compared with where nobody has it: nothing is known that gives 32 zeros."""
