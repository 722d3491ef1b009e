"""A PostgreSQL server of one's own, for tests: real, on a socket in a private folder, and gone when they end.

Debian's package is used where it lies. The server refuses to run as root, so root lends it to another user. Nothing waits for a
disk: what is tested is SQL and locks, not the server's own durability.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Self

import psycopg

_HOMES = "/usr/lib/postgresql"
_USER = "bitwitness"
_PATIENCE = 60.0


def binaries() -> Path | None:
    """The folder of initdb and postgres; None where PostgreSQL is not installed."""
    found = shutil.which("initdb")
    homes = sorted(
        Path(_HOMES).glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]) if path.parts[-3].isdigit() else 0
    )
    if found is not None and not homes:
        return Path(found).parent
    return homes[-1].parent if homes else None


class Postgres:
    """A running server; `fresh` makes an empty database in it.

    Args:
        home: of the programs.
    """

    def __init__(self, home: Path) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="bw-postgres-"))
        self._names = count()
        data = self._folder / "data"
        self._as: dict[str, int] = {}
        if os.geteuid() == 0:
            lent = pwd.getpwnam("nobody")
            os.chown(self._folder, lent.pw_uid, lent.pw_gid)
            self._as = {"user": lent.pw_uid, "group": lent.pw_gid}
        try:
            made = [home / "initdb", "-D", data, "-U", _USER, "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
            self._run([str(part) for part in made])
            settings = {
                "listen_addresses": "",
                "unix_socket_directories": str(self._folder),
                "fsync": "off",
                "synchronous_commit": "off",
                "full_page_writes": "off",
                "shared_buffers": "64MB",
                "max_connections": "60",
                "timezone": "UTC",
            }
            arguments = [f"--{name}={value}" for name, value in settings.items()]
            with (self._folder / "log").open("wb") as log:
                self._process = subprocess.Popen(
                    [str(home / "postgres"), "-D", str(data), *arguments],
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    extra_groups=[] if self._as else None,
                    **self._as,  # type: ignore[call-overload]
                )
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._wait()

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self._folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            extra_groups=[] if self._as else None,
            **self._as,  # type: ignore[call-overload]
        )
        assert done.returncode == 0, f"initdb: {done.stdout}{done.stderr}"

    def _wait(self) -> None:
        until = time.monotonic() + _PATIENCE
        while True:
            try:
                psycopg.connect(self.url("postgres")).close()
                return
            except psycopg.OperationalError:
                said = (self._folder / "log").read_text(errors="replace")
                running = self._process.poll() is None and time.monotonic() < until
                assert running, f"PostgreSQL does not start: {said}"
                time.sleep(0.05)

    def url(self, name: str) -> str:
        """The address of a database."""
        return f"postgresql://{_USER}@/{name}?host={self._folder}"

    def fresh(self) -> str:
        """The address of a database that is new and empty."""
        name = f"test_{next(self._names)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return self.url(name)

    def stop(self) -> None:
        """Stop the server, and remove all of it."""
        self._process.send_signal(signal.SIGQUIT)  # at once: nothing of it is kept
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()
