"""A person's word about an incident, taken up by the controller: nobody is acted upon because of a drill or a false alarm.

The word is read beside the incident, in turn for all of them and at once for those on which something hangs: before a proposal is made,
before it is acted upon, and before a strike is counted. It ends what is not begun. What was done stays done, because only a person
returns a node; who should do so is told.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from bitwitness.errors import BitwitnessError, RunFilesError
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.damage import DAMAGE
from bitwitness.fleet.decision import Naming, Proposal, propose
from bitwitness.fleet.kept import RETURNED, Book, Kept, Known
from bitwitness.fleet.kept_judgements import Word, Words
from bitwitness.fleet.notify import clean, undo_command
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.telling import Teller
from bitwitness.fleet.watching import Stamp, Trouble, stamp_of
from bitwitness.runfiles import Incident, read_actions, read_incident
from bitwitness.runfiles.faults import injected_into, was_drill
from bitwitness.runfiles.judging import last_judgement
from bitwitness.runfiles.reading import FAULTS

logger = logging.getLogger(__name__)

_A_ROUND = 200
"""Incidents at whose words is looked in one round, besides those on which something hangs."""
_MOST = 500
"""Of these."""
_LARGEST = 4 << 20
"""Bytes of an actions.jsonl, which has a line for each thing that was done about one incident."""
_OUT = "told:judged:"


def word_beside(folder: Path) -> Word | None:
    """What a person has said last of the incident in this folder.

    Raises:
        RunFilesError, OSError: it cannot be read.
    """
    path = folder / "actions.jsonl"
    try:
        seen = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(seen.st_mode) or seen.st_size > _LARGEST:
        raise RunFilesError(f"{path} is no file of notes, or has more than {_LARGEST >> 20} MiB")
    last = last_judgement(read_actions(folder))
    if last is None:
        return None
    who, why, time = (one_line(clean(str(last.get(name) or "")).replace("\n", " ")) for name in ("who", "why", "time"))
    return Word(folder.name, str(last["judgement"]), who or "somebody", why or "no reason was given", time)


def unless_judged(proposal: Proposal, word: Word | None) -> Proposal:
    """What is proposed about an incident; where it is known that nothing was wrong, that nobody acts. Pure."""
    if word is None or not word.is_away or proposal.action == "none":
        return proposal
    wish = f" ({proposal.action}: {proposal.reason})" if proposal.node else ""
    reason = f"{word.text}, so nothing is done{wish}"
    return Proposal(
        proposal.incident, proposal.node, proposal.devices, "contact", None, "low", reason, proposal.signals
    )


def injected(incident: Incident, run: Path) -> Word | None:
    """That an incident was a drill, where the records of injected faults explain all of it."""
    faults = injected_into(run)
    if not faults or not was_drill(incident, faults):
        return None
    why = "faults that were injected on purpose explain all of it (the records in faults/ of its run)"
    return Word(incident.path.name, "drill", "", why, "")


class Judges:
    """Takes up what people say of incidents.

    Args:
        book: what is kept.
        policy: the thresholds.
        teller: tells people.
    """

    def __init__(self, book: Book, policy: FleetPolicy, teller: Teller) -> None:
        self._book, self._policy, self._teller, self._state = book, policy, teller, book.state
        self.words = Words(book.state)
        self._stamps: dict[str, Stamp | None] = {}
        self._wrong: dict[str, tuple[str, str]] = {}
        self._last = ""

    def round(self) -> list[Trouble]:
        """Look at some incidents, and say which nodes are out because of what was judged away; what cannot be read."""
        for name in self._due():
            self.look(name)
        self._tell_out()
        # One a run, and the same as long as it lasts: a directory that cannot be read has many incidents.
        first = dict(sorted(self._wrong.values(), reverse=True))
        return [Trouble(f"judged:{run}", text) for run, text in first.items()]

    def _due(self) -> list[str]:
        """Incidents on which a proposal hangs, and of all others some in turn."""
        pending = dict.fromkeys(one.proposal.incident for one in self._book.proposals(pending=True))
        others = self._book.named_after(self._last, _A_ROUND)
        self._last = others[-1] if len(others) == _A_ROUND else ""
        return list(dict.fromkeys((*list(pending)[:_MOST], *others)))

    def look(self, name: str) -> bool:
        """Look at what was said of an incident; whether something new was taken up."""
        known = self._book.incident(name)
        if known is None:
            return False
        stamp = stamp_of(known.path / "actions.jsonl")
        if name in self._stamps and self._stamps[name] == stamp:
            return False
        try:
            word = word_beside(known.path)
            if word is None and name not in self._stamps and self.words.of(name) is None:
                word = self._injected(known)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            text = f"what was said of incident {name} cannot be read, so that it counts as before: {error}"
            self._wrong[name] = (known.run, text)
            return False
        self._wrong.pop(name, None)
        self._stamps[name] = stamp
        if word is None or word == self.words.of(name):
            return False
        self._take_up(known, word)
        return True

    def first(self, incident: Incident, run: Path) -> Word | None:
        """What is known of an incident that is picked up now: what a person has said, or that injected faults explain it."""
        stamp = stamp_of(incident.path / "actions.jsonl")
        try:
            word = word_beside(incident.path)
            self._stamps[incident.path.name] = stamp
        except (BitwitnessError, OSError, *DAMAGE) as error:  # which is tried again, and said
            logger.warning("what was said of %s cannot be read: %s", incident.path, error)
            word = None
        try:
            return word or (injected(incident, run) if self._policy.drills == "contact" else None)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.warning("whether %s was a drill cannot be told: %s", incident.path, error)
            return None

    def hear(self, proposal: Proposal) -> None:
        """Look at everything on which a proposal rests: its incident, and those that are strikes against its devices."""
        self.look(proposal.incident)
        self.look_at_strikes(proposal.devices, self._book.namings())

    def look_at_strikes(self, devices: Collection[str], namings: Iterable[Naming]) -> bool:
        """Look at incidents that named one of these devices; whether something new was taken up."""
        names = list(dict.fromkeys(one.incident for one in namings if one.device in devices))
        found = [self.look(name) for name in names[-_MOST:]]
        return any(found)

    def against(self, incident: str) -> str:
        """Why nothing more is to be done because of an incident; "" where that is not so."""
        self.look(incident)
        word = self.words.of(incident)
        return word.text if word is not None and word.is_away else ""

    def _injected(self, known: Known) -> Word | None:
        """The same of an incident that was picked up before, once in the life of a process; most runs have no such records."""
        run = Path(known.run)
        if self._policy.drills == "act":
            return None
        return injected(read_incident(known.path), run) if (run / FAULTS).is_dir() else None

    # Taking up ---------------------------------------------------------------------------------------------------------

    def note(self, word: Word, node: str = "", before: Word | None = None) -> None:
        """Keep a word, and that it was heard, inside `State.change`."""
        self.words.put(word)
        text = f"incident {word.incident} was {word.text}"
        if before is not None and before.is_away and not before.who and not word.is_away:
            text += ". Nobody had said that it was a drill: it is proposed anew"
        elif before is not None and before.is_away and not word.is_away:
            text += (
                ". It counts as a strike again for what comes; what was ended stays so, and is not proposed anew: where the node must "
                "be out, take it out by hand"
            )
        record = {"judgement": word.judgement, "by": word.who, "why": word.why, "said": word.time}
        self._state.note("judged", text, incident=word.incident, node=node, record=record)

    def _take_up(self, known: Known, word: Word) -> None:
        before = self.words.of(known.id)
        mine = self._book.proposals(incident=known.id)
        nodes = dict.fromkeys(one.proposal.node for one in mine if one.proposal.node)
        devices = {device for one in mine for device in one.proposal.devices}
        rest = self._resting_on(devices, known.id) if word.is_away else []
        held_back = before is not None and before.is_away and not before.who and not word.is_away and bool(mine)
        incident = self._read(known) if held_back else None
        with self._state.change():
            self.note(word, next(iter(nodes)) if len(nodes) == 1 else "", before)
            if word.is_away:
                for kept in self._book.proposals(incident=known.id):
                    self._end(kept, word.text)
                self._without(rest, word)
            elif before is not None and before.is_away:
                for key in self._state.said(f"{_OUT}{known.id}:"):
                    self._state.unsay(key)
                if incident is not None:  # what the records alone had held back, a person wants done
                    self._propose_anew(incident, known, mine)
                    return
                subject = f"bitwitness: incident {known.id} counts again"
                text = f"incident {known.id} was {word.text}. It counts as a strike again for what comes; nothing is proposed anew"
                self._teller.trouble(f"judged/{known.id}", "warning", subject, text)
        logger.info("incident %s was %s", known.id, word.text)

    def _end(self, kept: Kept, why: str) -> None:
        """End what is not begun, inside `State.change`. What was begun is looked after until it is known what came of it."""
        if self._book.end_unbegun(kept.key, why):
            about = kept.proposal
            self._state.note("ended", why, incident=about.incident, node=about.node, record={"was": kept.status})

    def _read(self, known: Known) -> Incident | None:
        try:
            return read_incident(known.path)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.warning("incident %s cannot be proposed anew: %s", known.id, error)
            return None

    def _propose_anew(self, incident: Incident, known: Known, mine: Sequence[Kept]) -> None:
        """Propose once more what was held back, inside `State.change`; nothing where it was proposed and done meanwhile."""
        if any(one.status in ("acting", "done", "already out", "unclear") for one in mine):
            return
        number = 1 + max((one.number for one in mine if one.number < RETURNED), default=-1)
        for more, proposal in enumerate(self._anew(incident, known, mine[0].proposal, self._book.namings())):
            self._teller.propose(proposal, number + more)

    def _resting_on(self, devices: Collection[str], but: str) -> list[tuple[Kept, Incident, Known]]:
        """What waits, and may rest on a strike against one of these devices, with its incident."""
        found = []
        for kept in self._book.proposals(pending=True):
            about = kept.proposal
            if about.incident == but or kept.number >= RETURNED or not set(about.devices) & set(devices):
                continue
            known = self._book.incident(about.incident)
            try:
                if known is not None:
                    found.append((kept, read_incident(known.path), known))
            except (BitwitnessError, OSError, *DAMAGE) as error:
                logger.warning("whether %s rests on a strike cannot be told: %s", about.incident, error)
        return found

    def _without(self, rest: Sequence[tuple[Kept, Incident, Known]], word: Word) -> None:
        """End what would not be proposed without the strike, inside `State.change`."""
        namings = self._book.namings()
        for kept, incident, known in rest:
            about = kept.proposal
            now = next(
                (one for one in self._anew(incident, known, about, namings) if one.node == about.node),
                None,
            )
            if now is not None and now.act is None:
                self._end(kept, f"incident {word.incident} was {word.text}; without it: {now.reason}")

    def _anew(
        self, incident: Incident, known: Known, about: Proposal, namings: Sequence[Naming]
    ) -> tuple[Proposal, ...]:
        try:
            return propose(incident, known.run, about.signals, namings, self._policy)
        except (BitwitnessError, OSError, *DAMAGE) as error:
            logger.warning("incident %s cannot be decided anew: %s", known.id, error)
            return ()

    def _tell_out(self) -> None:
        """Say once which nodes are out because of nothing but what was judged away."""
        out = self.words.out()
        said = self._state.said(_OUT) if out else {}
        fresh = [(node, word) for node, word in out if f"{_OUT}{word.incident}:{node}" not in said]
        if not fresh:
            return
        with self._state.change():
            for node, word in fresh:
                text = still_out(node, word, str(self._state.folder))
                self._state.say_once(f"{_OUT}{word.incident}:{node}", text)
                self._state.note("still out", text, incident=word.incident, node=node)
                subject = f"bitwitness: {node} is out because of what was no fault"
                self._teller.trouble(f"judged/{word.incident}/{node}", "warning", subject, text)


def still_out(node: str, word: Word, folder: str) -> str:
    """That a node is out because of an incident that was no fault, and how it is returned. Pure."""
    return (
        f"{node} was taken out because of incident {word.incident}, which was {word.text}. It stays out until a person returns it: "
        f"{undo_command(node, folder)}"
    )
