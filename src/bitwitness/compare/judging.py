"""Journals -> what is wrong with the suspect: pure, the only place of a comparison that says that a device computes wrongly.

A suspect *differs* where it computed other bits than at least two healthy devices that agree in everything, in the same step; what counts
as that is decided in `judging_steps`; and in so many steps that work which now and then does not repeat would not have struck it alone. It
has *nothing seen* where it never did, and then with bounds. All else is *not characterised*: references that differ among themselves, a
leader against which others side with the suspect, a suspect that stopped where others went on, or is wrong too seldom to be told from
its work. No name is better than a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bitwitness.compare.intervals import caution, spearman
from bitwitness.compare.judging_answers import results
from bitwitness.compare.judging_rows import BETWEEN, control_series, rows, series
from bitwitness.compare.judging_steps import Seen, Steps, place, read
from bitwitness.compare.patterns import Struck, look
from bitwitness.compare.records import MODES, Account, CompareFiles, Mode, Participant, begins_anew
from bitwitness.compare.results import ModeResult, Outcome, Patterns, Point, Result, Row
from bitwitness.errors import RunFilesError
from bitwitness.runfiles.files import read_json
from bitwitness.scan.chance import tail

_WITHOUT_LEADER = "the leader takes no further part: "
CHANCE = 1e-3
"""That errors which fall on all alike have fallen on the suspect."""
_LEFT_BEHIND = 2
"""Steps that references have done after a suspect that does not say why it stopped: then it did not merely write later than they."""


def judge(files: CompareFiles, suspect: str, confidence: float = 0.95) -> Result:
    """Judge one suspect by what all participants wrote, also of a comparison that still runs or was killed.

    Raises:
        RunFilesError: a file is damaged, or nobody has this name.
    """
    participants = files.introduced()
    accounts: dict[Mode, list[Account]] = {}
    for mode in MODES:
        found = [account for who in participants if (account := files.account(who, mode)) is not None]
        if found:
            accounts[mode] = found
    return judged(accounts, participants, suspect, read_json(files.asked), confidence)


def judged(
    accounts: Mapping[Mode, Sequence[Account]],
    participants: Sequence[Participant],
    suspect: str,
    asked: Mapping[str, Any],
    confidence: float = 0.95,
) -> Result:
    """Judge one suspect.

    Args:
        accounts: by mode, one of each participant that wrote something.
        participants: all.
        suspect: name of the one to judge.
        asked: settings as in compare.json.
        confidence: of intervals and bounds.

    Raises:
        RunFilesError: nobody has this name.
    """
    who = next((one for one in participants if one.name == suspect), None)
    if who is None:
        names = ", ".join(one.name for one in participants) or "nobody"
        raise RunFilesError(f"{suspect!r} takes no part in this comparison: {names} did")
    leader = next((one for one in participants if one.role == "leader"), None)
    others = tuple(one for one in participants if one.role == "reference")
    control = next((one for one in participants if one.role == "control"), None)
    modes: list[_Mode] = []
    if leader is not None and who.role == "suspect":
        for mode in MODES:
            some = accounts.get(mode, ())
            mine = next((one for one in some if one.participant.name == suspect), None)
            if mine is not None:
                modes.append(_Mode.of(mode, some, leader, mine))
    made = tuple(one.result(control, asked, confidence) for one in modes)
    outcome, sentence = _outcome(who, leader, others, modes, made, asked, confidence)
    return Result(
        suspect=who,
        references=(*((leader,) if leader is not None else ()), *others),
        control=control,
        outcome=outcome,
        sentence=sentence,
        modes=made,
        asked=asked,
        confidence=confidence,
        notes=tuple(note for one, result in zip(modes, made, strict=True) for note in _notes(one, result)),
    )


@dataclass(frozen=True, slots=True)
class _Mode:
    """One mode, with all that was written in it."""

    mode: Mode
    accounts: Sequence[Account]
    leader: Participant
    mine: Account
    steps: Steps
    counted: list[Seen]

    @classmethod
    def of(cls, mode: Mode, accounts: Sequence[Account], leader: Participant, mine: Account) -> _Mode:
        steps = read(mode, accounts, leader, mine)
        return cls(mode, accounts, leader, mine, steps, steps.counted())

    @property
    def differing(self) -> list[Seen]:
        """The steps that count in which it differs."""
        return [one for one in self.counted if one.differs]

    def answers_otherwise(self) -> bool:
        """What the task gave is another thing than what it gave to the leader and to all references, though weights may be equal."""
        by_role = {
            role: [one.results for one in self.accounts if one.participant.role == role and one.ended == "done"]
            for role in ("leader", "reference")
        }
        healthy = by_role["leader"] + by_role["reference"]
        alike = bool(by_role["leader"] and by_role["reference"]) and all(one == healthy[0] for one in healthy)
        confirmed = self.mode == "free" and self.mine.ended == "done" and len(self.counted) == len(self.steps.seen)
        return alike and confirmed and bool(healthy[0]) and self.mine.results != healthy[0]

    def cut_short(self) -> str:
        """Why the suspect alone did not come to its end; "" where it did, or nobody did."""
        ended = self.mine.ended
        if ended == "done" or _WITHOUT_LEADER in ended:
            return ""
        if ended not in ("", "interrupted"):
            return ended
        last = max(self.steps.seen, default=-1)
        behind = self.steps.last_confirmed - last >= _LEFT_BEHIND
        return "it stopped where references went on, and nothing says why" if behind else ""

    def ended(self) -> str:
        return self.mine.ended or self.cut_short() or "unfinished"

    def account_of(self, name: str) -> Account | None:
        return next((one for one in self.accounts if one.participant.name == name), None)

    def result(self, control: Participant | None, asked: Mapping[str, Any], confidence: float) -> ModeResult:
        """Its figures."""
        single, groups, total = rows(self.counted, confidence)
        points = series(self.steps)
        noises = [
            (one.step.gradient_noise, one.step.step) for one in self.counted if one.step.gradient_noise is not None
        ]
        noise, at = max(noises, key=lambda pair: (pair[0], -pair[1])) if noises else (None, None)
        free = self.mode == "free"
        return ModeResult(
            mode=self.mode,
            steps=len(self.counted),
            asked=_steps(asked, len(self.steps.seen)),
            void=len(self.steps.seen) - len(self.counted),
            first=self.differing[0].step.step if self.differing else None,
            rows=single,
            groups=groups,
            total=total,
            noise=noise,
            noise_step=at if noise else None,
            gradient_lost=sum(one.step.gradient_lost for one in self.counted),
            series=points,
            control=control_series(self.account_of(control.name), self.steps) if free and control is not None else (),
            patterns=self._patterns() if self.mode == "lock-step" else (),
            correlation=_correlation(points),
            results=results(self.accounts, self.leader.name) if free else {},
            ended=self.ended(),
        )

    def _patterns(self) -> tuple[Patterns, ...]:
        """By dtype, that with most mismatches first."""
        struck = [
            Struck(one.step.step, site, found)
            for one in self.counted
            for site, found in one.differing.items()
            if site.phase != "batch"
        ]
        leader = self.account_of(self.leader.name)
        ranges = (
            {}
            if leader is None
            else {
                leader.sites[number]: counts
                for number, counts in leader.ranges.items()
                if 0 <= number < len(leader.sites)
            }
        )
        wrong: dict[str, int] = {}
        for one in struck:
            wrong[one.site.dtype] = wrong.get(one.site.dtype, 0) + one.difference.mismatches
        return tuple(look(dtype, struck, ranges) for dtype in sorted(wrong, key=lambda dtype: (-wrong[dtype], dtype)))


def _steps(asked: Mapping[str, Any], done: int) -> int:
    steps = asked.get("steps")
    return steps if isinstance(steps, int) and steps >= 0 else done


def _correlation(points: Sequence[Point]) -> dict[str, float | None]:
    counted = [one for one in points if not one.void]
    return {
        "temperature": spearman([(one.temperature, float(one.mismatches)) for one in counted]),
        "clock": spearman([(one.clock, float(one.mismatches)) for one in counted]),
    }


# What is said of it --------------------------------------------------------------------------------------------------


def _outcome(
    suspect: Participant,
    leader: Participant | None,
    references: Sequence[Participant],
    modes: Sequence[_Mode],
    made: Sequence[ModeResult],
    asked: Mapping[str, Any],
    confidence: float,
) -> tuple[Outcome, str]:
    """Whatever keeps one from saying something comes first, but a suspect that is seen to differ did not merely stop."""
    unable = _unable(suspect, leader, references, modes)
    if unable:
        return "not characterised", unable
    if any(one.differing or one.answers_otherwise() for one in modes):
        said = _differs(suspect, references, modes, made)
        alone = _Alone.of(leader, references, modes, made[0].asked)
        return ("differs", said) if alone.convinces() else ("not characterised", f"{said}. {alone.doubt()}")
    for one in modes:
        if one.steps.differs_uncounted():
            return "not characterised", (
                f"{suspect.name} differs from the leader, but only in steps that do not count ({_why_void(one.steps)}): whose fault it is "
                "cannot be said; compare it with other references"
            )
    for one in modes:
        if why := one.cut_short():
            return "not characterised", f"{suspect.name} did not come to its end ({one.mode}): {why}"
        if _WITHOUT_LEADER in one.mine.ended:
            return "not characterised", (
                f"{leader.name if leader else 'the leader'} did not come to its end ({one.mode}), and nothing was wrong with "
                f"{suspect.name} until then: {one.mine.ended.removeprefix(_WITHOUT_LEADER)}"
            )
    unfinished = _unfinished(modes, made, asked)
    if unfinished:
        return "not characterised", f"{unfinished}; nothing was wrong with {suspect.name} in {_steps_that_count(modes)}"
    for one in [one for one in modes if one.counted][:1]:  # the one that says most
        void = len(one.steps.seen) - len(one.counted)
        if void > len(one.counted):
            return "not characterised", (
                f"{void:,} of {len(one.steps.seen):,} steps do not count ({one.mode}: {_why_void(one.steps)}), which is most of them; nothing is "
                f"wrong in those that do. Compare {suspect.name} with other references"
            )
    return "nothing seen", _nothing(suspect, modes, made, confidence)


def _unfinished(modes: Sequence[_Mode], made: Sequence[ModeResult], asked: Mapping[str, Any]) -> str:
    """What of that which was asked for the suspect has not done; "" for nothing."""
    wanted = asked.get("modes") or ()
    missing = [mode for mode in MODES if mode in wanted and mode not in {one.mode for one in modes}]
    if missing:
        return f"{', '.join(missing)}: not begun yet, or its journal is lost"
    for one, result in zip(modes, made, strict=True):
        if len(one.steps.seen) < result.asked:
            return f"{one.mode}: {len(one.steps.seen):,} of {result.asked:,} steps are on record"
    return ""


def _steps_that_count(modes: Sequence[_Mode]) -> str:
    return f"the {sum(len(one.counted) for one in modes):,} steps that count so far"


def _unable(
    suspect: Participant, leader: Participant | None, references: Sequence[Participant], modes: Sequence[_Mode]
) -> str:
    """Why nothing can be said at all; "" where something can."""
    if suspect.role != "suspect":
        return f"{suspect.name} is the {suspect.role} of this comparison and not a suspect: the others are judged by it"
    if leader is None:
        return "no leader takes part: there is nothing to compare with"
    if not any(place(one) != place(leader) for one in references):
        return (
            "there is no reference on another device than the leader's: two healthy devices must agree; name one more"
        )
    siding = sorted({name for one in modes for name in one.steps.against_leader})
    if siding:
        return (
            f"{', '.join(siding)} computed what {suspect.name} computed, and not what {leader.name} did: {leader.name} may be the wrong "
            "one; compare again under another leader"
        )
    if not any(one.counted for one in modes):
        done = [one for one in modes if one.steps.seen]
        if not done:
            return f"{suspect.name} has completed no step"
        return f"no step counts ({_why_void(done[0].steps)}): compare it with other references"
    return ""


def _why_void(steps: Steps) -> str:
    """The commonest reason for which steps do not count, those first in which the suspect differs."""
    words = {
        "references differ": "references differ among themselves",
        "nobody confirms": "no reference besides the leader has done them",
        "others agree": "others that take part compute the same as it does",
        "other batch": "its batch was another than the leader's",
    }
    void = [step for step in steps.seen if steps.reading[step] != "counts"]
    void = [step for step in void if steps.seen[step].differs] or void
    reasons = [steps.reading[step] for step in void]
    return words[max(sorted(set(reasons)), key=reasons.count)]


def _differs(
    suspect: Participant, references: Sequence[Participant], modes: Sequence[_Mode], made: Sequence[ModeResult]
) -> str:
    """The first mode that shows it: in lock-step errors do not spread, so that it says most."""
    number = next((number for number, one in enumerate(modes) if one.differing), None)
    if number is None:
        return (
            f"{suspect.name} trained to the same weights as {len(references) + 1} references that agree, and then gave other results of the "
            "task than they all did"
        )
    one, result = modes[number], made[number]
    said = (
        f"{suspect.name} differs from {len(references) + 1} references that agree, in {len(one.differing):,} of {result.steps:,} steps "
        f"({result.mode}), first in step {result.first}"
    )
    total = result.total
    if total is None or not total.mismatches.count:
        return f"{said}: it did not compute all that they did"
    share = total.mismatches
    worst = max(result.rows, key=lambda row: (row.mismatches.count, row.mismatches.share or 0.0))
    return (
        f"{said}: {share.count:,} of {share.of:,} elements ({share.share:.2g}; {share.low:.2g} to {share.high:.2g} at {share.confidence:.0%}), "
        f"most of them in {_row_name(worst)}"
    )


def _row_name(row: Row) -> str:
    return f"{row.group or 'outside of the chosen modules'} {row.phase}".strip()


def _nothing(suspect: Participant, modes: Sequence[_Mode], made: Sequence[ModeResult], confidence: float) -> str:
    """With the bound of the mode that says most: lock-step, if it was run."""
    result = next(result for one, result in zip(modes, made, strict=True) if one.counted)
    total = result.total
    steps = sum(one.steps for one in made)
    said = f"{suspect.name} computed the same bits as the references in all {steps:,} steps that count"
    if total is None or total.bound is None or total.step_bound is None:
        return said
    return (
        f"{said}: the rate of wrong elements is below {total.bound:.2g} if they come singly, after {total.mismatches.of:,} ({result.mode}), and "
        f"that of steps with one below {total.step_bound:.2g} ({confidence:.0%})"
    )


class _Events:
    """How often something began: what goes on from one step to the next may be one event, until the work was made anew.

    What comes in the same step of two modes is counted once: both do the same work there. A free run has one event.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._begun: set[int] = set()

    def add(self, mode: Mode, struck: Sequence[int]) -> None:
        ordered = sorted(struck)
        known = set(ordered)
        for step in ordered:
            if step - 1 not in known or begins_anew(mode, step, self._steps):
                self._begun.add(step)
                if mode == "free":
                    return

    @property
    def count(self) -> int:
        return len(self._begun)


@dataclass(frozen=True, slots=True)
class _Alone:
    """Whether it is the suspect that is wrong, and not the work that now and then does not repeat.

    A race in the software, a counter that all share, a first call that is unlike the others: such work is wrong now and then on whoever
    runs it, so that its errors fall on each participant alike. The chance that so many of all fall on the suspect must be small.

    Attributes:
        mine: how often the suspect alone began to be wrong, see `_Events`.
        others: how often references did.
        participants: devices on which they may fall.
        steps: in which the mine were seen.
    """

    mine: int
    others: int
    participants: int
    steps: int

    @classmethod
    def of(
        cls, leader: Participant | None, references: Sequence[Participant], modes: Sequence[_Mode], steps: int
    ) -> _Alone:
        mine = _Events(steps)
        others = _Events(steps)
        counted = 0
        for one in modes:
            odd = [step for step, reading in one.steps.reading.items() if reading == "references differ"]
            others.add(one.mode, odd)
            mine.add(one.mode, [seen.step.step for seen in one.differing])
            if one.answers_otherwise():
                mine.add("free", [steps])
            counted += 0 if one.mode == "free" else len(one.counted)
        devices = {place(one) for one in (*references, *((leader,) if leader is not None else ()))}
        return cls(mine.count, others.count, len(devices) + 1, counted)

    def convinces(self) -> bool:
        """Chance would not have it so."""
        return self._by_chance(self.mine) <= CHANCE

    def _by_chance(self, mine: int) -> float:
        return tail(mine + self.others, mine, 1 / self.participants)

    def doubt(self) -> str:
        """What is missing."""
        needed = self.mine
        while self._by_chance(needed) > CHANCE:
            needed += 1
        longer = f", about {math.ceil(self.steps * needed / self.mine):,} steps" if self.steps else ""
        others = f", and references differed in {self.others:,}" if self.others else ""
        return (
            f"That may be the device, or work that now and then does not repeat, which would strike each of {self.participants} participants "
            f"alike: it was seen {self.mine:,} time{'s' if self.mine != 1 else ''}{others}, and {needed:,} times would tell. Compare "
            f"longer{longer}"
        )


def _notes(one: _Mode, result: ModeResult) -> list[str]:
    """What else must be known of a mode."""
    steps, mode = one.steps, one.mode
    notes = [
        f"{mode}: {name} differs from the leader in {count:,} steps; one of the two is wrong, and which cannot be said from this"
        for name, count in sorted(steps.parted.items())
    ]
    if result.void:
        notes.append(f"{mode}: {result.void:,} of {len(steps.seen):,} steps do not count: {_why_void(steps)}")
    uneven = caution([(point.mismatches, point.elements) for point in result.series if not point.void])
    if uneven and mode == "lock-step":
        notes.append(f"{mode}: {uneven}")
    if steps.agreeing:
        notes.append(
            f"{mode}: {', '.join(sorted(steps.agreeing))} gave the same other answer in some steps; these are not counted"
        )
    batches = sum(any(site.phase == "batch" for site in seen.differing) for seen in steps.seen.values())
    if batches:
        notes.append(
            f"{mode}: its batch was another than the leader's in {batches:,} steps: the data, or how they come to the device"
        )
    missing = [seen for seen in one.counted if seen.missing]
    if missing:
        example = min(str(site) for site in missing[0].missing)
        notes.append(
            f"{mode}: in {len(missing):,} steps it did not compute all that the references did, or in another shape: first {example} in "
            f"step {missing[0].step.step}"
        )
    wrong = sorted({row.phase for row in result.rows if row.phase in BETWEEN and row.mismatches.count})
    if mode == "lock-step" and wrong:
        notes.append(f"{mode}: what the code between the chosen modules computes is wrong too ({', '.join(wrong)})")
    if result.ended != "done":
        notes.append(f"{mode}: the suspect has done {len(steps.seen):,} of {result.asked:,} steps: {result.ended}")
    return notes
