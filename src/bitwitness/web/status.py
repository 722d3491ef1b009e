"""What the import and the database are doing, for whoever looks: a failing import must be seen on every page, and end nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that everybody should know now.

    Attributes:
        kind: `error` or `progress`.
        text: a sentence.
    """

    kind: Literal["error", "progress"]
    text: str


@dataclass(slots=True)
class Status:
    """The state of a console's work behind the pages; safe in threads.

    Attributes:
        imports: whether this console imports at all.
        changes: goes up whenever something else is to be said, so that open pages look again; of a later console it is larger.
    """

    imports: bool = False
    changes: int = field(default_factory=lambda: int(time.time()))
    _notices: dict[str, Notice] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, what: str, kind: Literal["error", "progress"], text: str) -> bool:
        """Say something about a part (`import`, `database`, `retention`) in place of what was said before; whether it is new."""
        with self._lock:
            before, now = self._notices.get(what), Notice(kind, text)
            self._notices[what] = now
            self.changes += before != now
            return before != now

    def clear(self, what: str) -> bool:
        """Nothing is to be said about a part any more; whether there was."""
        with self._lock:
            had = self._notices.pop(what, None) is not None
            self.changes += had
            return had

    def notices(self) -> tuple[Notice, ...]:
        """What is to be said, errors first."""
        with self._lock:
            return tuple(sorted(self._notices.values(), key=lambda one: one.kind))

    def to_json(self) -> Mapping[str, Any]:
        """The same for programs."""
        found = self.notices()
        return {
            "imports": self.imports,
            "errors": [one.text for one in found if one.kind == "error"],
            "progress": [one.text for one in found if one.kind == "progress"],
        }
