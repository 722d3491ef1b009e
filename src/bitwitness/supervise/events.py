"""What happens in a supervised run, as it happens: one line for people and one record for the log each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import utc_now
from bitwitness.runfiles.supervision import SupervisionFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened: when (UTC), of what kind, in one line, what else to show below it, and as data."""

    time: str
    kind: str
    text: str
    details: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


Show = Callable[[Event], None]


def tell(show: Show, kind: str, text: str, *details: str, **fields: Any) -> Event:
    """Show an event that is not logged."""
    event = Event(utc_now(), kind, text, details, fields)
    show(event)
    return event


class Events:
    """The leader's: shown, and written to supervise/log.jsonl."""

    def __init__(self, files: SupervisionFiles, session: str, show: Show) -> None:
        self._files, self._session, self._show = files, session, show

    def __call__(self, kind: str, text: str, *details: str, **fields: Any) -> None:
        """Tell of an event. A log that cannot be written stops no job."""
        tell(self._show, kind, text, *details, **fields)
        more = {"details": list(details)} if details else {}
        try:
            self._files.log(self._session, kind, text=text, **more, **fields)
        except RunFilesError as error:
            logger.warning("%s", error)
