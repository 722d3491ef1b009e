"""Who is signed in. Only digests of what browsers hold are kept, in memory: a copy of this process's files lets nobody in.

A session ends when nobody has used it for a while, after a day's work at the latest, and as soon as its user is removed or has
another role or secret.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from bitwitness.web.hashing import digest
from bitwitness.web.users import Role, User, Users

IDLE_SECONDS = 2 * 3600.0
LONGEST_SECONDS = 12 * 3600.0
_MOST, _MOST_OF_ONE = 1000, 20


@dataclass(frozen=True, slots=True)
class Session:
    """Somebody who is signed in.

    Attributes:
        name, role: of the user.
        csrf: what a form of ours must send back; "" for a program, which sends its token with each request.
    """

    name: str
    role: Role
    csrf: str


@dataclass(slots=True)
class _Kept:
    session: Session
    fingerprint: bytes
    begun: float
    used: float


class Sessions:
    """The sessions of one console; safe in threads."""

    def __init__(self, users: Users | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._users, self._clock = users, clock
        self._kept: dict[bytes, _Kept] = {}
        self._lock = threading.Lock()

    def begin(self, user: User) -> str:
        """Begin a session for somebody whose secret was right; what the browser is to hold, always a new one."""
        key, now = secrets.token_urlsafe(32), self._clock()
        session = Session(user.name, user.role, secrets.token_urlsafe(32))
        with self._lock:
            self._drop_old(now, user.name)
            self._kept[digest(key)] = _Kept(session, user.fingerprint, now, now)
        return key

    def of(self, key: str, used: bool = True) -> Session | None:
        """The session of what a browser holds. `used`: whether a person is behind the request, and not a page that refreshes."""
        name, now = digest(key), self._clock()
        with self._lock:
            kept = self._kept.get(name)
            if kept is None:
                return None
            if self._over(kept, now):
                del self._kept[name]
                return None
        user = self._users.named(kept.session.name) if self._users is not None else None
        if user is None or user.fingerprint != kept.fingerprint:
            return None  # kept, because the file may be unreadable just now; it counts again only for the same user
        if used:
            kept.used = now
        return kept.session

    def end(self, key: str) -> None:
        """End a session. Harmless where there is none."""
        with self._lock:
            self._kept.pop(digest(key), None)

    def __len__(self) -> int:
        return len(self._kept)

    def _over(self, kept: _Kept, now: float) -> bool:
        return now - kept.used > IDLE_SECONDS or now - kept.begun > LONGEST_SECONDS

    def _drop_old(self, now: float, user: str) -> None:
        """Make room: whoever signs in again and again loses his oldest sessions."""
        self._kept = {name: kept for name, kept in self._kept.items() if not self._over(kept, now)}
        for most, names in (
            (_MOST_OF_ONE, [name for name, kept in self._kept.items() if kept.session.name == user]),
            (_MOST, list(self._kept)),
        ):
            for name in names[: max(0, len(names) - most + 1)]:
                self._kept.pop(name, None)
