"""What a person says that an incident was: noted beside it, so that whoever reads the run knows it, with or without a console.

A verdict is what was found, and stays. Whether it was a drill, a false alarm, or was confirmed by a test or a repair is known later and
by somebody else, and that may change: every word is kept, and the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.run import RunFiles

Judgement = Literal["false alarm", "confirmed", "drill"]

JUDGED = "judged"
"""The action in actions.jsonl."""
JUDGEMENTS = ("false-alarm", "confirmed", "drill")
"""As they are given on a command line."""
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a word about an incident."""

    judgement: Judgement
    text: str
    new: bool

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        return {"judgement": self.judgement, "text": self.text, "new": self.new}


def said(word: str) -> Judgement:
    """The judgement of a word of `JUDGEMENTS`.

    Raises:
        ConfigurationError: it is none of them.
    """
    if word not in JUDGEMENTS:
        raise ConfigurationError(f"{word!r:.40} is no judgement: {', '.join(JUDGEMENTS)}")
    return cast("Judgement", word.replace("-", " "))


def note_judgement(files: RunFiles, incident: str, judgement: Judgement, why: str, who: str) -> Judged:
    """Note what an incident was; the same again, by the same person and for the same reason, is not noted twice.

    Raises:
        ConfigurationError: there is no reason.
        RunFilesError: there is no such incident, or it cannot be written beside it.
    """
    why = " ".join("".join(char if char.isprintable() else " " for char in why).split())[:_LONGEST]
    if not why:
        raise ConfigurationError("a judgement needs a reason, which is kept: how is it known?")
    last = last_judgement(files.actions(incident))
    same = {"judgement": judgement, "why": why, "who": who}
    if last is not None and same.items() <= last.items():
        return Judged(
            judgement, f"{incident} was judged so by {who} at {last.get('time', '?')}: {judgement}", new=False
        )
    files.note_action(incident, JUDGED, **same)
    before = f"; before it was {last.get('judgement')}, by {last.get('who')}" if last is not None else ""
    return Judged(judgement, f"{incident} is judged: {judgement}{before}", new=True)


def last_judgement(actions: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The word that counts; None where nobody has said one. One that is none of ours counts as not said."""
    words = {word.replace("-", " ") for word in JUDGEMENTS}
    found = [one for one in actions if one.get("action") == JUDGED and one.get("judgement") in words]
    return found[-1] if found else None
