"""One request to slurmrestd, over HTTP or its Unix socket. The only place that sees the token.

The token is read from its file for each request, since sites renew it every few minutes. It is shown nowhere: not in an error,
which names the method and the address; not in a log; and not to a proxy of the environment, which is not asked.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bitwitness.errors import ClusterError, ConfigurationError, MissingExtra
from bitwitness.fleet.clusters.base import one_line

try:
    import httpx
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("slurmrestd is asked through httpx: pip install 'bitwitness[fleet]'") from error

_TOKEN = "X-SLURM-USER-TOKEN"  # noqa: S105 - the name of a header
_MOST = 128 * 2**20
"""Bytes of an answer: 10,000 nodes take some 30 MB."""
_HEADER = re.compile(r"[\x21-\x7e]{1,16384}")


class Http:
    """slurmrestd at one address.

    Args:
        where: `unix:/run/slurmrestd.sock`, or `http://host:6820`, also with https and a path before `/slurm`.
        user: on whose behalf; empty: that of the connection.
        token_file: a file with the token (`scontrol token`); None where the socket says who one is.
        timeout: seconds for a request.

    Raises:
        ConfigurationError: an address, a user or a time that cannot be.
    """

    def __init__(self, where: str, user: str, token_file: Path | None, timeout: float) -> None:
        self._user, self._token_file, self._timeout = user, token_file, timeout
        if user and not _HEADER.fullmatch(user):
            raise ConfigurationError(f"no name of a user: {user!r:.80}")
        if not timeout > 0:
            raise ConfigurationError(f"a request needs more than {timeout:g} s")
        if where.startswith("unix:"):
            path = "/" + where.removeprefix("unix:").lstrip("/")
            self.where, self._base = f"unix:{path}:", "http://localhost"
            self._socket: str | None = path
        else:
            parts = urlsplit(where)
            if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username is not None:
                raise ConfigurationError(f"slurmrestd is at unix:/PATH or http(s)://HOST:PORT, not {where!r:.200}")
            self.where = self._base = where.rstrip("/")
            self._socket = None

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of the answer; None for the latter where it is no JSON.

        Raises:
            ClusterError: no answer in time, or one that is too large.
        """
        what = f"{method} {self.where}{path}"
        headers = self._headers(what)
        if self._socket is not None and not Path(self._socket).is_socket():
            raise ClusterError(f"{what}: {self._socket} is no socket: does slurmrestd run?")
        # Reading the certificates of all authorities takes longer than most answers, and nobody shows one without TLS.
        transport = httpx.HTTPTransport(uds=self._socket, verify=self._base.startswith("https:"))
        try:
            with (
                httpx.Client(transport=transport, timeout=self._timeout, trust_env=False) as client,
                client.stream(method, self._base + path, headers=headers, json=body) as answer,
            ):
                content, end = bytearray(), time.monotonic() + self._timeout
                for piece in answer.iter_bytes():
                    content += piece
                    if time.monotonic() > end:  # httpx bounds the wait for each piece only
                        raise ClusterError(f"{what} was not answered within {self._timeout:g} s")
                    if len(content) > _MOST:
                        raise ClusterError(f"{what} answered more than {_MOST >> 20} MiB")
                status = answer.status_code
        except httpx.TimeoutException as error:
            raise ClusterError(f"{what} was not answered within {self._timeout:g} s") from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            raise ClusterError(f"{what}: {one_line(str(error)) or type(error).__name__}") from error
        if token := headers.get(_TOKEN):  # an answer may repeat what it does not like, and ends up in errors
            content = content.replace(token.encode(), b"[token]")
        try:
            return status, json.loads(content)
        except (ValueError, RecursionError):
            return status, None

    def _headers(self, what: str) -> dict[str, str]:
        headers = {"Accept": "application/json"}
        if self._user:
            headers["X-SLURM-USER-NAME"] = self._user
        if self._token_file is None:
            return headers
        try:
            text = self._token_file.read_text(encoding="ascii", errors="replace").strip().removeprefix("SLURM_JWT=")
        except OSError as error:
            raise ClusterError(f"{what}: the token cannot be read: {error}") from error
        if not _HEADER.fullmatch(text):
            raise ClusterError(f"{what}: {self._token_file} holds no token of one line (scontrol token)")
        return headers | {_TOKEN: text}
