"""One-time forms: a form that is sent twice is answered twice with what the first did, and is done once.

Kept in memory and bounded. A form of a console that has ended is not taken: what it showed has to be looked at again.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import takewhile

from bitwitness.web.acting_offers import Done

_MOST = 2000
_LONGEST = 2 * 3600.0


@dataclass(slots=True)
class _Form:
    address: str
    user: str
    made: float
    running: bool = False
    done: Done | None = None


class Stale(Exception):
    """The form is not known here: too old, of somebody else, or of a console that has ended."""


class UnderWay(Exception):
    """The same form was sent before, and that is not over yet."""


class Forms:
    """The forms of one console; safe in threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._forms: OrderedDict[str, _Form] = OrderedDict()

    def issue(self, address: str, user: str) -> str:
        """The token of a new form."""
        token, now = secrets.token_urlsafe(24), self._clock()
        with self._lock:
            old = takewhile(lambda item: now - item[1].made > _LONGEST, self._forms.items())  # the oldest are first
            for name in [name for name, one in old if not one.running]:
                del self._forms[name]
            while len(self._forms) >= _MOST:
                oldest = next((name for name, one in self._forms.items() if not one.running), None)
                if oldest is None:
                    break
                del self._forms[oldest]
            self._forms[token] = _Form(address, user, now)
        return token

    def claim(self, token: str, address: str, user: str) -> Done | None:
        """Begin what a form asks for; what it did, where it was done before.

        Raises:
            Stale: there is no such form.
            UnderWay: it was begun by another click.
        """
        with self._lock:
            form = self._forms.get(token)
            if form is None or (form.address, form.user) != (address, user) or self._clock() - form.made > _LONGEST:
                raise Stale
            if form.done is not None:
                return replace(form.done, again=True)
            if form.running:
                raise UnderWay
            form.running = True
            return None

    def finish(self, token: str, done: Done) -> None:
        """Keep what became of it."""
        with self._lock:
            if form := self._forms.get(token):
                form.running, form.done = False, done

    def release(self, token: str) -> None:
        """Nothing was begun: the form may be sent again."""
        with self._lock:
            if form := self._forms.get(token):
                form.running = False
