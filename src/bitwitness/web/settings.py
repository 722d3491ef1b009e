"""What a console is started with, in one record, so that no part of it reads options or the environment by itself."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from bitwitness.errors import ConfigurationError
from bitwitness.web.users import Users

EVERYWHERE = ("0.0.0.0", "::", "")  # noqa: S104 - compared, not bound
"""Hosts that stand for all addresses of this machine: to listen on, not to be opened."""
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Settings:
    """How a console is to behave.

    Attributes:
        allow_actions: whether anything can be done from it, by those who may.
        fleets: state folders of fleet controllers, for acts.
        users: who may sign in; None where nobody can.
        open: whether looking needs no sign-in.
        hosts: names that requests may be addressed to, lower case, without a port; `*ip` stands for every IP address.
        origins: addresses as browsers name them where a proxy stands before us, e.g. `https://console.example.org`.
        runs, parents: directories that are imported, for acts that write beside them.
    """

    allow_actions: bool = False
    fleets: tuple[Path, ...] = ()
    users: Users | None = None
    open: bool = True
    hosts: frozenset[str] = _LOCAL
    origins: frozenset[str] = frozenset()
    runs: tuple[Path, ...] = ()
    parents: tuple[Path, ...] = field(default=())


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches what listens there."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(host: str, public: Sequence[str], machine: Sequence[str] = ()) -> frozenset[str]:
    """The names that a request may be addressed to, when we listen on `host`.

    A page of somebody else whose name is made to lead here (DNS rebinding) still sends that name. An address in figures is no
    name that somebody could point elsewhere, so that where we listen on all addresses, each is taken.

    Args:
        host: where we listen.
        public: addresses by which people reach us.
        machine: names of this machine.
    """
    named = {str(urlsplit(origin_of(one)).hostname) for one in public}
    if is_loopback(host):
        return frozenset(_LOCAL | {host.lower()} | named)
    if host in EVERYWHERE:
        return frozenset(_LOCAL | {"*ip"} | {one.lower() for one in machine if one} | named)
    return frozenset({host.lower()} | named)


def origin_of(url: str) -> str:
    """The origin of an address as a browser names it: scheme, host, and the port where it is not the usual one.

    Raises:
        ConfigurationError: it is no address of a web site, or has more than scheme, host and port.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigurationError(f"--public {url}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ConfigurationError(f"--public {url} is no address: give e.g. https://console.example.org")
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ConfigurationError(f"--public {url}: the console needs a host of its own, and no path below one")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{host}" + ("" if port in (None, usual) else f":{port}")
