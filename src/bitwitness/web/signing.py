"""Whether a name and a secret, or a token, are somebody's: slowly enough for who guesses, and never so that the owner waits long.

What is counted are wrong tries. One client, one name and all together each have a few at once and then one every some seconds.
A browser in which somebody has signed in before holds a cookie that says so and is counted by itself: whoever tries the name of
an operator from elsewhere, however often, does not keep that operator out. An unknown name costs as long as a known one.
A right token is never refused for the wrong tries of others: nobody guesses 256 random bits, and comparing takes a millisecond.
"""

from __future__ import annotations

import hmac
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import anyio
from anyio.to_thread import run_sync

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.clients import network
from bitwitness.web.hashing import DUMMY, DUMMY_TOKEN, LONGEST, digest, id_of, matches
from bitwitness.web.limiting import Buckets
from bitwitness.web.users import User, Users

WRONG = "the name, the password or the token is wrong"
_AT_ONCE = 2
_WAITING = 8
_KNOWN_SECONDS = 300.0
_MOST_KNOWN = 1000

_Counted = list[tuple[Buckets, object]]


class Refused(BitwitnessError):
    """Nobody is signed in by this. `status`: of the answer; `wait`: seconds after which it may be tried again, or 0."""

    def __init__(self, status: int, text: str, wait: float = 0.0) -> None:
        super().__init__(text)
        self.status, self.wait = status, math.ceil(wait)


@dataclass(frozen=True, slots=True)
class Tries:
    """How many wrong tries there may be at once, and after how many seconds there may be another one."""

    client: tuple[int, float] = (10, 15.0)
    name: tuple[int, float] = (10, 10.0)
    all: tuple[int, float] = (30, 2.0)
    known: tuple[int, float] = (10, 10.0)


class Signing:
    """Checks secrets for one console."""

    def __init__(
        self, users: Users | None, tries: Tries | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        tries = tries or Tries()
        self._users, self._clock = users, clock
        self._clients, self._names = Buckets(*tries.client), Buckets(*tries.name)
        self._all, self._known_browsers = Buckets(*tries.all), Buckets(*tries.known)
        self._key = secrets.token_bytes(32)
        self._limiter, self._inside = anyio.CapacityLimiter(_AT_ONCE), 0
        self._known: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    async def sign_in(self, name: str, secret: str, client: str, browser: str = "") -> User:
        """Whose secret it is. `name` may be empty for a token; `browser`: the cookie of `remember`.

        Raises:
            Refused: 401 wrong; 429 too many wrong ones; 503 too many at once.
        """
        buckets = self._buckets(name, client, browser)
        if id_of(secret) and (owner := self._user(name, secret)) is not None:
            if await self._verify(lambda: owner, secret) is None:
                self._take(buckets)
                raise Refused(401, WRONG)
            return owner
        self._take(buckets)
        user = await self._verify(lambda: self._user(name, secret), secret)
        if user is None:
            raise Refused(401, WRONG)
        self._give_back(buckets)
        return user

    async def bearer(self, token: str, client: str) -> User:
        """Whose token it is.

        Raises:
            Refused: as above.
        """
        token_id = id_of(token)
        user = self._users.of_token(token_id) if self._users is not None and token_id else None
        if user is None:
            raise Refused(401, "the token is wrong or was withdrawn: send it as Authorization: Bearer TOKEN")
        known = self._recall(token)
        if known == user.fingerprint:
            return user
        if await self._verify(lambda: user, token) is None:
            self._take([(self._clients, ("bearer", network(client))), (self._names, ("bearer", token_id))])
            raise Refused(401, "the token is wrong or was withdrawn: send it as Authorization: Bearer TOKEN")
        self._keep(token, user)
        return user

    def remember(self, name: str) -> str:
        """What a browser keeps to show that this name has signed in there."""
        browser = secrets.token_urlsafe(16)
        return f"{browser}.{self.seal('browser', browser, name)}"

    def seal(self, *parts: str) -> str:
        """A value that only this process can have made of these parts."""
        return hmac.digest(self._key, "\n".join(parts).encode(errors="replace"), "sha256").hex()

    def sealed(self, given: str, *parts: str) -> bool:
        """Whether it was made of these parts, by this process."""
        return hmac.compare_digest(given.encode(errors="replace"), self.seal(*parts).encode())

    def _buckets(self, name: str, client: str, browser: str) -> _Counted:
        known, _, seal = browser.partition(".")
        if known and self.sealed(seal, "browser", known, name):
            return [(self._known_browsers, known)]
        return [(self._clients, network(client)), (self._names, digest(name)), (self._all, "")]

    def _take(self, buckets: _Counted) -> None:
        now = self._clock()
        for position, (bucket, key) in enumerate(buckets):
            wait = bucket.take(key, now)
            if wait > 0:
                for taken, other in buckets[:position]:
                    taken.give_back(other, now)
                seconds = max(1, math.ceil(wait))
                raise Refused(429, f"there were too many wrong tries: try again in {seconds} s", seconds)

    def _give_back(self, buckets: _Counted) -> None:
        now = self._clock()
        for bucket, key in buckets:
            bucket.give_back(key, now)

    def _user(self, name: str, secret: str) -> User | None:
        """Whose secret it may be: of a token by its id, of a password by the name."""
        if self._users is None:
            return None
        if token_id := id_of(secret):
            user = self._users.of_token(token_id)
            return user if user is not None and name in ("", user.name) else None
        user = self._users.named(name)
        return user if user is not None and not user.token else None

    async def _verify(self, find: Callable[[], User | None], secret: str) -> User | None:
        """The user, if the secret is right; in a thread, a few at once, because it takes memory and a core."""
        if self._inside >= _AT_ONCE + _WAITING:
            raise Refused(503, "too many sign in at once: try again", 2)

        def compare() -> User | None:
            user = find()
            dummy = DUMMY_TOKEN if id_of(secret) else DUMMY
            right = matches(secret[:LONGEST], user.secret if user is not None else dummy)
            return user if right and len(secret) <= LONGEST else None

        self._inside += 1
        try:
            return await run_sync(compare, limiter=self._limiter)
        finally:
            self._inside -= 1

    def _recall(self, token: str) -> bytes | None:
        with self._lock:
            until, fingerprint = self._known.get(self._digest(token), (-math.inf, b""))
            return fingerprint if self._clock() < until else None

    def _keep(self, token: str, user: User) -> None:
        """Remember for some minutes that a token was right, so that a program pays once."""
        with self._lock:
            self._known[self._digest(token)] = (self._clock() + _KNOWN_SECONDS, user.fingerprint)
            while len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)

    def _digest(self, token: str) -> bytes:
        return hmac.digest(self._key, token.encode(errors="replace"), "sha256")
