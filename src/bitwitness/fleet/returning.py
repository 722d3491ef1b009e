"""Devices that were taken out and are seen again: every start of a job, and every incident, is a chance to see one.

What counts as a return is in `identity`; here the starts are read, each once, and a return is said, loudly and once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from bitwitness.errors import BitwitnessError
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.decision import Naming, Proposal
from bitwitness.fleet.identity import Return, Sighting, returned, sightings_in, sightings_of
from bitwitness.fleet.kept import RETURNED, Book, Known
from bitwitness.fleet.kept_judgements import Words
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import Stamp, Trouble, check_size, stamp_of
from bitwitness.runfiles import Incident, RunFiles

logger = logging.getLogger(__name__)


class Returns:
    """Looks for condemned devices.

    Args:
        book: what is kept.
        teller: tells people.
    """

    def __init__(self, book: Book, teller: Teller) -> None:
        self._book, self._teller, self._state = book, teller, book.state
        self._seen_runs: dict[Path, Stamp | None] = {}
        self._sightings: dict[Path, list[Sighting] | Trouble] = {}

    def round(self, files: Sequence[RunFiles]) -> list[Trouble]:
        """Compare the devices of every start of a run with those that were taken out; which starts cannot be read."""
        for run in files:
            stamp = stamp_of(run.path / "run.json")
            if run.path not in self._seen_runs or self._seen_runs[run.path] != stamp:
                try:
                    check_size(run.path / "run.json")
                    self._sightings[run.path] = sightings_of(run)
                except (BitwitnessError, OSError) as error:
                    self._sightings[run.path] = Trouble(f"start:{run.path}", str(error))
                self._seen_runs[run.path] = stamp
        each = [self._sightings[run.path] for run in files]
        seen = [one for some in each if not isinstance(some, Trouble) for one in some]
        told = {(one["device"], one["incident"], one["node"], one["since"]) for one in self._book.returns()}
        new = [
            back
            for back in self._returned(seen)
            if (back.condemned.device, back.condemned.incident, back.sighting.node, back.condemned.time) not in told
        ]
        if new:
            with self._state.change():
                self.tell(new)
        return [one for one in each if isinstance(one, Trouble)]

    def _returned(self, seen: Sequence[Sighting]) -> list[Return]:
        away = Words(
            self._state
        ).away()  # nothing was wrong with these, though they stay out until a person returns them
        condemned = [one for one in self._book.condemned() if one.incident not in away]
        if not condemned or not seen:
            return []
        kin = self._book.kin()
        return returned(condemned, [replace(one, aliases=kin(one.device)) for one in seen])

    def seen_in(self, incident: Incident, known: Known, namings: Sequence[Naming]) -> list[Return]:
        """Devices that were taken out and that the job of an incident had: one that came over the network has no start to be read.

        In the node that they were taken out of, a job that was there before may still run: there an incident of the same run
        or job is no proof that they came back, and of a run that tells its starts these are the proof.
        """
        try:
            time = namings[0].time if namings else known.time
            found = self._returned(sightings_in(incident, time)) if datetime.fromisoformat(time).tzinfo else []
        except (*DAMAGE, BitwitnessError):
            return []
        return [one for one in found if not self._may_be_there_still(one, known)]

    def _may_be_there_still(self, back: Return, known: Known) -> bool:
        was = self._book.incident(back.condemned.incident)
        same = was is not None and (was.run == known.run or (bool(known.job) and was.job == known.job))
        told = (Path(known.run) / "run.json").exists()
        return back.condemned.node == back.sighting.node and (same or told)

    def tell(self, found: Sequence[Return]) -> None:
        """Say loudly, and propose, inside `State.change`; once each, and only of what nobody has cleared meanwhile."""
        still = {(one.device, one.incident, one.time) for one in self._book.condemned()} if found else set()
        for back in found:
            if (back.condemned.device, back.condemned.incident, back.condemned.time) not in still:
                continue
            if not self._book.add_return(back):
                continue
            was, now = back.condemned, back.sighting
            logger.critical("%s", back.text)
            record = {"device": was.device, "was": was.node}
            self._state.note("returned", back.text, incident=was.incident, node=now.node, record=record)
            self._teller.back(back)
            number = max(RETURNED, *(one.number + 1 for one in self._book.proposals(incident=was.incident)))
            devices = (now.device or was.device,)
            self._teller.propose(Proposal(was.incident, now.node, devices, "drain", "drain", "high", back.text), number)
