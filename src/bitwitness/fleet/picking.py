"""Incidents, from the file to what is proposed: read, checked, decided upon, and noted in one transaction.

One that is damaged stops no other, is said once, and is read again when it changes. What a person has answered by returning a
node to service is answered for every incident that is older, also one that turns up late.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bitwitness.errors import BitwitnessError, ConfigurationError
from bitwitness.fleet.checked import check_incident
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.decision import Naming, Proposal, namings_of, propose
from bitwitness.fleet.identity import slices_of, words_of
from bitwitness.fleet.judgements import Judges, unless_judged
from bitwitness.fleet.kept import Book, Cleared, Known
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.reconsidering import later_look
from bitwitness.fleet.returning import Returns
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import ReadSignals, Stamp, Trouble, check_size, stamp_of
from bitwitness.runfiles import Incident, RunFiles, read_incident

logger = logging.getLogger(__name__)

BATCH = 100
"""Incidents that are picked up in one round: acts must not wait for the last of a storm."""


class Picker:
    """Picks incidents up.

    Args:
        book: what is kept.
        policy: the thresholds.
        teller: tells people.
        returns: looks whether an incident shows a device that was taken out.
        judges: know what people have said of incidents.
        read_signals: what the hardware says around an incident.

    Attributes:
        backlog: whether there are more than one round takes.
    """

    def __init__(
        self,
        book: Book,
        policy: FleetPolicy,
        teller: Teller,
        returns: Returns,
        judges: Judges,
        read_signals: ReadSignals,
    ) -> None:
        self._book, self._policy, self._teller, self._state = book, policy, teller, book.state
        self._returns, self._judges, self._signals = returns, judges, read_signals
        self._known: set[str] = set()
        self._twins: dict[Path, str] = {}
        self._history: list[Naming] = []
        self._cleared: list[Cleared] = []
        self._damaged: dict[Path, Stamp | None] = {}
        self.backlog = False

    def round(self, files: Sequence[RunFiles]) -> list[Trouble]:
        """Read what is new, decide, and note both together; what is wrong with others."""
        if not self._known:
            self._known = self._book.known()
        troubles: list[Trouble] = []
        new: dict[str, tuple[Path, RunFiles]] = {}
        for run in files:
            try:
                for path in run.incidents():
                    if path.name not in self._known:
                        new.setdefault(path.name, (path, run))
                    elif path not in self._twins:
                        self._twins[path] = self._twin(path)
            except (BitwitnessError, OSError) as error:
                troubles.append(
                    Trouble(f"incidents:{run.path}", f"the incidents of {run.path} cannot be read: {error}")
                )
        troubles += [Trouble(f"twin:{path}", text) for path, text in self._twins.items() if text and path.is_dir()]
        if new:
            self._remember()
        taken, said = 0, self._state.said("damaged:")
        for name in sorted(new):
            path, run = new[name]
            key = f"damaged:{path}"
            if taken < BATCH:
                trouble = self._take(path, run)
            elif key in said:  # as far as anybody knows; it is read in its turn
                trouble = Trouble(key, said[key][0])
            else:
                continue
            if trouble is None:
                taken += 1
            else:
                troubles.append(trouble)
        self.backlog = len(new) - len([one for one in troubles if one.key.startswith("damaged:")]) > taken
        return troubles

    def _twin(self, path: Path) -> str:
        """What is wrong where an incident was picked up elsewhere under the same id; "" if it is the same."""
        known = self._book.incident(path.name)
        if known is None or known.path == path:
            return ""
        try:
            check_size(path / "incident.json")
            other = read_incident(path)
            if (other.verdict.headline(), str(other.record.get("time", ""))) == (known.headline, known.time):
                return ""
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.debug("%s: %s", path, error)
        return f"{path} has the id of another incident, {known.path}: nothing is done about it; a person must look"

    def _remember(self) -> None:
        """What counts against whom, anew: a person may have cleared some of it."""
        self._history, self._cleared = self._book.namings(), self._book.clears()

    def _take(self, path: Path, run: RunFiles) -> Trouble | None:
        """Pick up one incident; what is wrong with it, if it cannot be read. One that is damaged is read again once it changes."""
        key, stamp = f"damaged:{path}", stamp_of(path / "incident.json")
        said = self._state.said(key).get(key)
        if said is not None and path in self._damaged and self._damaged[path] == stamp:
            return Trouble(key, said[0])
        try:
            check_size(path / "incident.json")
            incident = read_incident(path)
            check_incident(incident.record, self._state.clock.now())
            if incident.record["id"] != path.name:
                raise ConfigurationError(f"it calls itself {incident.record['id']}: was the folder renamed or copied?")
            namings = namings_of(incident, str(run.path))
        except (BitwitnessError, OSError, *DAMAGE) as error:
            self._damaged[path] = stamp
            return Trouble(key, f"incident {path} cannot be read, and nothing is done about it: {error}")
        self._damaged.pop(path, None)
        self._decide(incident, run, namings)
        return None

    def _decide(self, incident: Incident, run: RunFiles, namings: Sequence[Naming]) -> None:
        name, verdict = incident.path.name, incident.verdict
        heard = self._hear(incident) if namings else ()
        word = self._judges.first(incident, run.path)
        if self._judges.look_at_strikes([one.device for one in namings], self._history):
            self._remember()
        proposals = self._proposals(incident, run, namings, heard)
        known = Known(
            name,
            str(run.path),
            incident.path,
            verdict.status,
            verdict.headline(),
            str(incident.record.get("scheduler_job") or ""),
            str(incident.record.get("time", "")),
        )
        with self._state.change():
            if self._book.clears() != self._cleared:
                # While it was being decided: nobody is acted upon for what was forgotten.
                self._remember()
                proposals = self._proposals(incident, run, namings, heard)
            now = self._state.clock.now()
            answered = [one for one in namings if any(clear.answers(one, now) for clear in self._cleared)]
            later = later_look(known, heard, now, self._policy) if namings else None
            self._book.add_incident(known, later)
            self._book.add_namings(namings, answered)
            self._book.add_serials(_serials(heard))
            self._book.add_aliases(_aliases(heard))
            self._state.note("incident", f"{verdict.headline()} in {run.path}", incident=name)
            if word is not None:
                self._judges.note(word)
            for number, proposal in enumerate(proposals):
                self._teller.propose(unless_judged(self._unless_answered(proposal, namings), word), number)
            self._returns.tell(self._returns.seen_in(incident, known, namings))
        self._known.add(name)
        self._history += [one for one in namings if one not in answered and not (word is not None and word.is_away)]

    def _hear(self, incident: Incident) -> Sequence[Signal]:
        """What the hardware says around an incident."""
        try:
            return self._signals(incident)
        except (BitwitnessError, OSError, *DAMAGE):
            logger.exception("the signals around %s", incident.path)
            return ()

    def _proposals(
        self, incident: Incident, run: RunFiles, namings: Sequence[Naming], heard: Sequence[Signal]
    ) -> tuple[Proposal, ...]:
        """What to do about it; where that cannot be said, that a person must."""
        try:
            return propose(incident, str(run.path), heard, [*self._history, *namings], self._policy)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.exception("incident %s", incident.path)
            text = f"nothing can be decided about it ({error!r:.200}): a person must look"
            return (Proposal(incident.path.name, "", (), "contact", None, "low", text),)

    def _unless_answered(self, proposal: Proposal, namings: Sequence[Naming]) -> Proposal:
        """The proposal, but where a person has returned the node, or all of its devices, since: they have answered it."""
        mine = [one for one in namings if one.node == proposal.node and one.device in proposal.devices]
        now = self._state.clock.now()
        by = [next((clear for clear in reversed(self._cleared) if clear.answers(one, now)), None) for one in mine]
        if not mine or proposal.action in ("none", "contact") or None in by:
            return proposal
        last = max((one for one in by if one is not None), key=lambda one: one.time)
        what = last.device or last.node
        text = f"found before {what} was returned to service at {last.time} by {last.who}, so nothing is done ({proposal.action}: {proposal.reason})"
        return replace(proposal, action="contact", act=None, reason=text)


def _serials(signals: Sequence[Signal]) -> dict[str, str]:
    """Serial numbers of devices, from signals that tell which device is where."""
    told = {one.device: words_of(one.evidence).get("serial", "") for one in signals if one.code == IDENTITY}
    return {device: serial for device, serial in told.items() if device and serial}


def _aliases(signals: Sequence[Signal]) -> dict[str, str]:
    """Which slice is of which device, from the same."""
    told = [one for one in signals if one.code == IDENTITY and one.device]
    return {alias: one.device for one in told for alias in slices_of(one.evidence)}
