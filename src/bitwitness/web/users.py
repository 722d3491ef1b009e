"""Who may sign in, from a file that only its owner can write; it is read again when it changes, so that nobody waits for a restart.

A file that others can change is refused, because whoever writes it gives himself the role of an operator. While it cannot be
read, nobody is signed in: a user who was removed must not stay because the file was damaged at the same time.

No request waits for the file: a thread looks at it, and what it cannot read in time counts as unreadable, so that neither a pipe
in its place nor storage that hangs stops the console.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol, Self, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.web.hashing import OF_TOKEN, digest, hashed, id_of, is_hash, make_token

logger = logging.getLogger(__name__)

Role = Literal["viewer", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
SCHEMA = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LARGEST = 1 << 20
_EVERY = 1.0
"""Seconds between two looks at the file."""
LONGEST_LOOK = 15.0
"""Seconds a look may take: for longer, nobody can know who was removed."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may sign in.

    Attributes:
        name: stands in every record of what was done.
        role: a viewer looks, an operator acts.
        secret: hash of a password, or of a token.
        token: id of the token; "" where it is a password, which is for people only.
        created: when.
    """

    name: str
    role: Role
    secret: str
    token: str = ""
    created: str = ""

    @property
    def fingerprint(self) -> bytes:
        """Changes when the role or the secret does: whoever signed in before that does so again."""
        return digest(json.dumps([self.name, self.role, self.secret, self.token]))


class Users(Protocol):
    """Whoever knows who may sign in. Both methods answer None where nobody is of that kind, or where nobody can be known."""

    def named(self, name: str) -> User | None:
        """The user of a name."""

    def of_token(self, token_id: str) -> User | None:
        """The user of a token's id."""


class OneToken:
    """One operator with a token that was made at the start of this console and is lost with it."""

    def __init__(self, name: str = "operator") -> None:
        self.token, token_id = make_token()
        self._user = User(name, "operator", hashed(self.token, OF_TOKEN), token_id)

    def named(self, name: str) -> User | None:
        """The operator, by name."""
        return self._user if name == self._user.name else None

    def of_token(self, token_id: str) -> User | None:
        """The operator, by the id of the token."""
        return self._user if token_id == self._user.token else None


class UsersFile:
    """The users of a file, as it was within the last seconds.

    In a `with`, a thread looks at it; else whoever asks does so, and waits for it.

    Args:
        path: the file.
        clock: the time.
        seconds: in which a look at it must be over.

    Raises:
        ConfigurationError: it cannot be used.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic, seconds: float = LONGEST_LOOK) -> None:
        self._path, self._clock, self._seconds = path, clock, seconds
        self._looked, self._said = clock(), ""
        self._state: tuple[int, ...] | None = None
        self._names: Mapping[str, User] = {}
        self._tokens: Mapping[str, User] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None
        first = threading.Thread(target=self._look, name="bitwitness-users", daemon=True)
        first.start()
        first.join(seconds)
        if first.is_alive():
            raise ConfigurationError(f"{path} (users) could not be read within {seconds:g} s: look at its storage")
        if self._said:
            raise ConfigurationError(self._said)

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="bitwitness-users", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def named(self, name: str) -> User | None:
        """The user of a name."""
        return self._names.get(name) if self._known() else None

    def of_token(self, token_id: str) -> User | None:
        """The user of a token's id."""
        return self._tokens.get(token_id) if self._known() else None

    def _known(self) -> bool:
        """Whether what is known is new enough."""
        if self._thread is None:
            with self._lock:
                if self._clock() - self._looked >= _EVERY:
                    self._tell(self._look())
        return self._clock() - self._looked < self._seconds

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._tell(self._look())

    def _look(self) -> str:
        """Read the file, if it has changed; what is wrong with it, where that is new."""
        begun, before = self._clock(), self._said
        try:
            state = _state(self._path)
            if state != self._state or self._said:
                self._keep(read(self._path))
                self._state, self._said = state, ""
        except ConfigurationError as error:
            self._keep(())
            self._said = str(error)
        self._looked = begun
        return self._said if self._said != before else ""

    def _tell(self, problem: str) -> None:
        if problem:
            logger.error("nobody can sign in, and nobody is signed in any more: %s", problem)

    def _keep(self, users: Iterable[User]) -> None:
        self._names = {user.name: user for user in users}
        self._tokens = {user.token: user for user in self._names.values() if user.token}


def read(path: Path) -> tuple[User, ...]:
    """The users of a file.

    Raises:
        ConfigurationError: it cannot be read, others can change or read it, or it is not of this form.
    """
    try:
        # A link is followed, once: secrets of Kubernetes are mounted as such. The folders of both are looked at.
        number = os.open(path.resolve(), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(number, "rb") as file:
            _check(path, os.fstat(number))
            content = file.read(_LARGEST + 1)
    except (OSError, RuntimeError) as error:  # a loop of links is the latter
        made = "; `bitwitness console user add` makes one" if isinstance(error, FileNotFoundError) else ""
        said = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"{path} (users) cannot be read: {said}{made}") from error
    if len(content) > _LARGEST:
        raise _too_large(path)
    try:
        return _parse(json.loads(content))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigurationError(f"{path} (users) is damaged or not a users file: {_why(error)}") from error


def add(path: Path, name: str, role: Role, password: str = "") -> str:
    """Add a user, or give one a new secret and role; the token where no password is given, which is shown this once, else "".

    Raises:
        ConfigurationError: the name cannot be one, or the file cannot be used.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{name!r:.80} cannot be a name: letters, digits and . _ @ - (64 at most), a letter or digit first"
        )
    token, token_id = ("", "") if password else make_token()
    secret = hashed(password) if password else hashed(token, OF_TOKEN)
    user = User(name, role, secret, token_id, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
    with _locked(path):
        before = read(path) if path.exists() else ()
        write(path, (*(one for one in before if one.name != name), user))
    return token


def remove(path: Path, name: str) -> None:
    """Remove a user, whose sessions end.

    Raises:
        ConfigurationError: there is none of that name, or the file cannot be used.
    """
    with _locked(path):
        before = read(path)
        if all(one.name != name for one in before):
            raise ConfigurationError(
                f"{path} has no user {name!r:.80}; it has {', '.join(one.name for one in before) or 'nobody'}"
            )
        write(path, tuple(one for one in before if one.name != name))


def write(path: Path, users: Iterable[User]) -> None:
    """Write a users file as a whole, or not at all; only its owner can read it, from its first byte on."""
    content = json.dumps({"schema": SCHEMA, "users": [asdict(user) for user in users]}, indent=2)
    target = path.resolve()
    number, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            file.write(content + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


class _locked:  # noqa: N801 - used as a statement
    """Two commands at once must not lose one of their users."""

    def __init__(self, path: Path) -> None:
        self._folder = path.resolve().parent

    def __enter__(self) -> None:
        import fcntl  # noqa: PLC0415 - only commands that write need it

        try:
            self._number = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigurationError(f"{self._folder}: {error.strerror or error}") from error
        fcntl.flock(self._number, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._number)


def _check(path: Path, state: os.stat_result) -> None:
    if not stat.S_ISREG(state.st_mode):
        raise ConfigurationError(f"{path} (users) is not a regular file")
    if state.st_size > _LARGEST:
        raise _too_large(path)
    mode = stat.S_IMODE(state.st_mode)
    if mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigurationError(
            f"{path} (users) can be changed or read by others than its owner (mode {mode:04o}): look who is in it, and chmod 600 {path}"
        )
    if state.st_uid not in (os.geteuid(), 0):
        raise ConfigurationError(
            f"{path} (users) belongs to another user (uid {state.st_uid}): who owns it can change it"
        )
    for folder in {path.absolute().parent, path.resolve().parent}:
        found = folder.stat().st_mode
        if found & stat.S_IWOTH and not found & stat.S_ISVTX:
            raise ConfigurationError(
                f"{path} (users) is in a folder that everybody can write to, so that anybody can replace it: chmod o-w {folder}"
            )


def _too_large(path: Path) -> ConfigurationError:
    return ConfigurationError(f"{path} (users) is larger than {_LARGEST >> 20} MiB")


def _state(path: Path) -> tuple[int, ...]:
    """What differs when a file was written again."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_dev, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_mode)


def _parse(content: Any) -> tuple[User, ...]:
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    users = tuple(_user(one) for one in content["users"])
    for what in ([user.name for user in users], [user.token for user in users if user.token]):
        if len(set(what)) != len(what):
            raise ValueError("a name or a token is in it twice")
    return users


def _user(entry: Mapping[str, Any]) -> User:
    user = User(**{name: str(value) for name, value in entry.items()})  # type: ignore[arg-type]  # looked at below
    if not _NAME.fullmatch(user.name):
        raise ValueError("a name in it cannot be one")
    if user.role not in ROLES:
        raise ValueError(f"{user.name} has no role that there is: {' or '.join(ROLES)}")
    if not is_hash(user.secret):
        raise ValueError(f"the secret of {user.name} is no hash")
    if user.token and id_of(f"bwt-{user.token}-x") != user.token:
        raise ValueError(f"the token of {user.name} has no id")
    return user


def _why(error: Exception) -> str:
    """Why, without what stands in the file: it may hold a secret in the wrong place."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON in line {error.lineno}"
    if type(error) is ValueError:
        return str(error)
    return "an entry has not the fields name, role and secret"
