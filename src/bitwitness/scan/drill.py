"""Faults on purpose in a scan: proof that it would find one, for whoever must trust it.

Apart from the loop of a rank, because what is asked for is read where nothing is computed, and a slip in it must cost nothing.
A scan with a drill is marked as one wherever its result goes, and nobody acts upon it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from bitwitness.errors import ConfigurationError

_FORM = 'give "rank=5 p=0.001", or "link=3-7 p=0.1"'


@dataclass(frozen=True, slots=True)
class Drill:
    """A fault on purpose.

    Attributes:
        probability: that it strikes, per call or per transfer.
        rank: whose outputs it strikes; None where it is a link's.
        link: the two ends of the link whose transfers it strikes.
    """

    probability: float
    rank: int | None = None
    link: tuple[int, int] | None = None

    def __str__(self) -> str:
        """As `parse` reads it."""
        where = f"rank={self.rank}" if self.link is None else f"link={self.link[0]}-{self.link[1]}"
        return f"{where} p={self.probability:g}"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whom it is about."""
        return self.link if self.link is not None else (self.rank or 0,)


def parse(text: str) -> Drill:
    """Read `rank=5 p=0.001` or `link=3-7 p=0.1`; without `p` it strikes each time.

    Raises:
        ConfigurationError: it is none of these.
    """
    given: dict[str, str] = {}
    for word in re.split(r"[\s,]+", text.strip()):
        name, separator, value = word.partition("=")
        if not separator or name in given or name not in ("rank", "link", "p"):
            raise ConfigurationError(f"--drill {text!r:.80}: {word!r:.40} is not understood: {_FORM}")
        given[name] = value
    if ("rank" in given) == ("link" in given):
        raise ConfigurationError(f"--drill {text!r:.80} names no rank and no link, or both: {_FORM}")
    try:
        probability = float(given.get("p", "1"))
    except ValueError:
        probability = -1.0
    if not 0 < probability <= 1:
        raise ConfigurationError(f"--drill {text!r:.80}: p is a probability above 0 and at most 1: {_FORM}")
    if "rank" in given:
        if not re.fullmatch(r"\d{1,6}", given["rank"]):
            raise ConfigurationError(f"--drill {text!r:.80}: {given['rank']!r:.40} is no rank: {_FORM}")
        return Drill(probability, rank=int(given["rank"]))
    ends = re.fullmatch(r"(\d{1,6})-(\d{1,6})", given["link"])
    if ends is None or ends[1] == ends[2]:
        raise ConfigurationError(f"--drill {text!r:.80}: {given['link']!r:.40} are not two different ranks: {_FORM}")
    return Drill(probability, link=(int(ends[1]), int(ends[2])))


def check(drills: Sequence[Drill], world: int) -> None:
    """Refuse what could never strike.

    Raises:
        ConfigurationError: a rank is none of this scan.
    """
    for drill in drills:
        if max(drill.ranks) >= world:
            raise ConfigurationError(f'--drill "{drill}": ranks of this scan are 0 to {world - 1}')
