"""Keys and signatures of what decides whom a scan blames: Ed25519 (RFC 8032), so that nobody else's file is believed.

Apart from the golden answers, because what a signature covers must not depend on who reads it: the bytes of a file are those that
`canonical` makes of its content, to the last one, so that one bit of it that is another makes it another file. It needs an extra, so
whoever needs it imports it then: the rest of a scan works without.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError, MissingExtra, RunFilesError
from bitwitness.runfiles.files import exists, write_bytes

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ModuleNotFoundError as error:
    raise MissingExtra("golden answers are signed, which needs cryptography: pip install 'bitwitness[scan]'") from error

_CONTEXT = b"bitwitness golden answers, schema 1\n"
"""In front of what is signed: a signature that the same key made of something else is none of this."""
_LARGEST_KEY = 64 << 10
_OTHERS = 0o007


def canonical(record: Mapping[str, Any]) -> bytes:
    """The one way in which a record is written."""
    return (json.dumps(record, allow_nan=False, ensure_ascii=True, indent=1, sort_keys=True) + "\n").encode("ascii")


def make_key(path: Path) -> Path:
    """Make a pair of keys: the private one in `path`, readable by its owner alone, the public one in `path`.pub.

    Returns:
        The file of the public key.

    Raises:
        ConfigurationError: one of the files is there already; a key is never overwritten.
        RunFilesError: they cannot be written.
    """
    public = path.with_name(path.name + ".pub")
    for file in (path, public):
        if exists(file):
            raise ConfigurationError(f"{file} is there already, and a key is never overwritten: give another name")
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    told = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    write_bytes(path, private, mode=0o600)
    write_bytes(public, told)
    return public


def private_key(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        ConfigurationError: it is none, is of another kind or encrypted, or everybody on the machine can read it.
        RunFilesError: it cannot be read.
    """
    content = _content(path)
    try:
        key = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path} is no private key without a password ({_said(error)}): make one with `bitwitness scan key FILE`"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigurationError(f"{path} is no Ed25519 key: make one with `bitwitness scan key FILE`")
    if path.stat().st_mode & _OTHERS:
        raise ConfigurationError(
            f"{path} can be read by everybody on this machine: chmod 600 {path}, or make a new key"
        )
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """Read a public key.

    Raises:
        ConfigurationError: it is none, or of another kind.
        RunFilesError: it cannot be read.
    """
    content = _content(path)
    if b"PRIVATE KEY" in content:
        raise ConfigurationError(
            f"{path} is a private key, which belongs to whoever learns: give the public one, {path}.pub"
        )
    try:
        key = serialization.load_pem_public_key(content)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(
            f"{path} is no public key ({_said(error)}): give the .pub file of `bitwitness scan key`"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise ConfigurationError(f"{path} is no Ed25519 key: give the .pub file of `bitwitness scan key`")
    return key


def key_id(key: Ed25519PublicKey) -> str:
    """By what a key is called in a file and in messages: SHA-256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def sign(record: Mapping[str, Any], key: Ed25519PrivateKey) -> dict[str, Any]:
    """The record with the id of the key and a signature of all of it."""
    body = dict(record) | {"key": key_id(key.public_key())}
    return body | {"signature": key.sign(_CONTEXT + canonical(body)).hex()}


def is_signed(record: Mapping[str, Any], key: Ed25519PublicKey) -> bool:
    """Whether the signature in a record is of this key and of this content."""
    body = {name: value for name, value in record.items() if name != "signature"}
    try:
        signature = bytes.fromhex(record["signature"])
        if signature.hex() != record["signature"]:  # capitals, or blanks, would be a second way to write it
            return False
        key.verify(signature, _CONTEXT + canonical(body))
    except (InvalidSignature, KeyError, TypeError, ValueError):
        return False
    return body.get("key") == key_id(key)


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_KEY + 1)
    except OSError as error:
        raise RunFilesError(f"the key {path} cannot be read: {error.strerror or error}") from error
    if len(content) > _LARGEST_KEY:
        raise ConfigurationError(f"{path} is larger than any key")
    return content


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:100] or type(error).__name__
