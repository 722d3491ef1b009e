"""Answers -> who is wrong: pure, the only place of a scan that can accuse a device of what it computed.

What must be told apart is a device that computes wrongly, and everything that looks like one: work that does not repeat, a
configuration of one node that the kind does not name, a golden file of something else, a rare race in software, one set of operands
that was damaged in memory. So

- a right answer is what at least two devices gave each time they were asked, if three were asked and more than half of those gave it;
- somebody who always answers otherwise is accused only where that cannot be the configuration of a node: others agree on the same
  node, or on two other nodes. Who sometimes answers rightly has answered the question of configuration;
- an item that many devices get wrong accuses nobody, and golden answers that all devices contradict accuse nobody;
- wrong answers from one set of operands are one event, and events must gather on one device (`concentrating`). One is a strike and no
  more (DESIGN section 3, rule 2);
- who answered otherwise and is not accused has not passed.

The bound of an error rate after n right answers is -ln(1 - confidence) / n, about 3 / n at 95 % (the "rule of three", Hanley and
Lippman-Hand, JAMA 1983).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.answers import Sheet
from bitwitness.scan.chance import CHANCE, LEAST
from bitwitness.scan.concentrating import Events
from bitwitness.scan.items import Item
from bitwitness.scan.results import DeviceResult, Finding, Judgement, Standing, Unjudged

_FITS = 0.75
"""Of the golden answers, a device must give so many before the others accuse it: else it is another configuration."""
_LEAST_KNOWN = 3
_ENOUGH = 0.5
"""Of the items that a device computed, so many must have a right answer before it passes by them."""
_NAMED = 8
"""Devices that are named as backing an answer; of all there is the number."""


@dataclass(frozen=True, slots=True)
class Known:
    """A golden answer: the digest, and on how many devices and calls it was learned."""

    digest: str
    devices: int
    calls: int


Golden = Mapping[str, Mapping[str, Known]]
"""By the name of a kind, by the id of an item."""


def judge(
    sheets: Sequence[Sheet], golden: Golden | None = None, *, confidence: float = 0.95, running: bool = False
) -> Judgement:
    """Judge each device by its answers, those of the others of its kind, and golden answers.

    Args:
        sheets: one a rank.
        golden: answers that are known.
        confidence: of the upper bounds.
        running: whether they still work, so that who has not ended is judged all the same.
    """
    kinds: dict[str, list[Sheet]] = defaultdict(list)
    for sheet in sorted(sheets, key=lambda sheet: sheet.device.rank):
        kinds[sheet.device.kind_name].append(sheet)
    results: list[DeviceResult] = []
    unjudged: list[Unjudged] = []
    for name, group in kinds.items():
        one = _Kind(group, (golden or {}).get(name, {}))
        results += [one.result(sheet, confidence, running) for sheet in group]
        unjudged += [Unjudged(item, why) for item, why in sorted(one.why.items())]
    return Judgement(
        tuple(sorted(results, key=lambda result: result.rank)), unjudged=tuple(unjudged), confidence=confidence
    )


def wrong_items(sheets: Sequence[Sheet], golden: Golden | None = None) -> dict[str, str]:
    """The items that some device got wrong and that judge somebody, with the right answer: those to repeat."""
    judged = judge(sheets, golden, running=True)
    return {finding.item: finding.expected for result in judged.devices for finding in result.findings}


def bound(calls: int, confidence: float) -> float:
    """Upper bound of a rate of which nothing was seen in so many calls."""
    return min(1.0, -math.log1p(-confidence) / calls) if calls else 1.0


class _Kind:
    """The devices of one kind.

    A look at ten thousand devices and five hundred items must not take minutes: each answer is looked at a few times, and whatever is
    about wrong ones is made for the items that have some.
    """

    def __init__(self, sheets: Sequence[Sheet], known: Mapping[str, Known]) -> None:
        self.sheets = sheets
        self.known = known
        self.why: dict[str, str] = {}
        devices = Counter(sheet.device.device for sheet in sheets)
        self.shared = {sheet.device.rank for sheet in sheets if devices[sheet.device.device] > 1}
        self.voters = [sheet for sheet in sheets if sheet.device.rank not in self.shared]
        self.contradicted: set[str] = set()
        self.right = self._right_answers()
        odd = self._odd()
        self.events = Events(self.voters, {item: self.right[item] for items in odd.values() for item in items}, known)
        excused = self._excused(odd)
        self.events.excuse(excused)
        self.findings: dict[int, list[Finding]] = {}
        self.doubts: dict[int, list[str]] = {}
        for sheet in self.voters:
            self._look_at(sheet, odd[sheet.device.rank], excused)
        self.convicted = self._convicted()

    # What is right ---------------------------------------------------------------------------------------------------

    def _right_answers(self) -> dict[str, str]:
        """The right answer to each item that has one; why the others have none is noted."""
        having: Counter[str] = Counter()
        steady: dict[str, Counter[str]] = defaultdict(Counter)
        for sheet in self.voters:
            for item, answers in sheet.answers.items():
                having[item] += 1
                if len(answers) == 1:
                    ((digest, calls),) = answers.items()
                    if calls > 1:
                        steady[item][digest] += 1
        right = {}
        for item in sorted(having):
            found = self._right_answer(item, having[item], steady[item])
            if found is not None:
                right[item] = found
        return right

    def _right_answer(self, item: str, having: int, steady: Mapping[str, int]) -> str | None:
        known = self.known.get(item)
        for digest, devices in steady.items():
            if having < 3 or devices < 2 or 2 * devices <= having:
                continue
            if known is not None and known.digest != digest:
                self.contradicted.add(item)
                self.why[item] = (
                    f"{devices} devices agree on {digest[:16]}, the golden file says {known.digest[:16]}: it is of another "
                    "configuration than the kind names, or wrong; learn it anew"
                )
                return None
            return digest
        if known is not None:
            return known.digest
        if having < 3:
            why = f"{having} device(s) of this kind computed it: three must be compared, or give golden answers"
        elif len(steady) > 1:
            why = f"the devices are divided between {len(steady)} answers: software or configuration, which the kind does not name"
        else:
            why = "it does not repeat on most devices: software, or work that cannot be compared"
        self.why[item] = why
        return None

    # Who is wrong ----------------------------------------------------------------------------------------------------

    def _odd(self) -> dict[int, list[str]]:
        """By rank, the items that it answered otherwise than rightly at least once."""
        right = self.right
        return {
            sheet.device.rank: [
                item
                for item, answers in sheet.answers.items()
                if item in right and not (len(answers) == 1 and right[item] in answers)
            ]
            for sheet in self.voters
        }

    def _excused(self, odd: Mapping[int, list[str]]) -> set[str]:
        """Items that more than a quarter of the devices, and more than one, get wrong: they have no right answer any more."""
        wrong = Counter(item for items in odd.values() for item in items)
        excused = set()
        for item, devices in wrong.items():
            having = self.events.having(item)
            if devices > max(1, having // 4):
                excused.add(item)
                self.why[item] = f"{devices} of {having} devices got it wrong: software, or work that does not repeat"
                del self.right[item]
        return excused

    def _look_at(self, sheet: Sheet, odd: Sequence[str], excused: set[str]) -> None:
        """What one device is accused of, and what keeps it from passing."""
        rank, findings, doubts = sheet.device.rank, [], []
        fits = bool(odd) and self._fits_golden(sheet)
        for item in odd:
            if item in excused:
                doubts.append(f"it got {item} wrong, as many others did, so that nobody is judged by that")
                continue
            backers = self.events.backers(item)
            if self._may_accuse(sheet, item, backers) or (item in self.known and fits):
                names = tuple(device for device, _ in backers[:_NAMED])
                answers = sheet.answers[item]
                findings.append(
                    Finding(
                        item,
                        self.right[item],
                        answers,
                        names,
                        item in self.known,
                        len(backers),
                        self.events.of(item, rank),
                    )
                )
            else:
                doubts.append(
                    f"it always answers {item} otherwise than the others, and that may be how its node is set up"
                    if backers
                    else f"it answers {item} otherwise than golden answers say, and too few others like them: another configuration"
                )
        if self.contradicted:
            against = [item for item in self.contradicted if item in sheet.answers]
            doubts += [f"it contradicts the golden answer to {item}, as the others do" for item in against[:1]]
        self.findings[rank], self.doubts[rank] = findings, doubts

    def _may_accuse(self, sheet: Sheet, item: str, backers: Sequence[tuple[str, str]]) -> bool:
        """Whether the others' agreement says that this device is wrong, rather than configured otherwise."""
        if len(backers) < 2:
            return False
        if self.right[item] in sheet.answers[item]:
            return True
        nodes = {node for _, node in backers}
        return sheet.device.node in nodes or len(nodes) >= 2

    def _fits_golden(self, sheet: Sheet) -> bool:
        """Whether it answers most of what is known as is known: one that does not is configured otherwise."""
        asked = [item for item in sheet.answers if item in self.known]
        right = sum(self.known[item].digest in sheet.answers[item] for item in asked)
        return len(asked) >= _LEAST_KNOWN and right >= _FITS * len(asked)

    def _convicted(self) -> set[int]:
        """The ranks on which wrong answers gather; once it is known whose some were, they no longer hide those of another."""
        accused = {
            sheet.device.rank: sheet.device
            for sheet in self.voters
            if sum(finding.events for finding in self.findings[sheet.device.rank]) >= LEAST
        }
        convicted: set[int] = set()
        while True:
            now = {
                rank
                for rank, device in accused.items()
                if rank not in convicted and self.events.chance(device) <= CHANCE
            }
            if not now:
                return convicted
            convicted |= now
            self.events.leave_out(now)

    # What is said of it ----------------------------------------------------------------------------------------------

    def result(self, sheet: Sheet, confidence: float, running: bool) -> DeviceResult:
        """What is concluded about one device."""
        rank = sheet.device.rank
        findings, doubts = self.findings.get(rank, []), self.doubts.get(rank, [])
        items, by_kind = self._judged_by(sheet)
        calls, wrong = sum(by_kind.values()), sum(finding.wrong for finding in findings)
        limit = bound(calls, confidence)
        standing, reason = self._standing(sheet, findings, doubts, items, calls, limit, confidence, running)
        return DeviceResult(
            rank,
            sheet.device.node,
            sheet.device.device,
            sheet.device.kind_name,
            standing,
            reason,
            calls,
            wrong,
            limit if standing == "pass" else None,
            by_kind,
            tuple(findings),
        )

    def _judged_by(self, sheet: Sheet) -> tuple[int, dict[str, int]]:
        """How many items judge it, and how often it computed them, by what was computed."""
        if sheet.device.rank in self.shared:
            return 0, {}
        items, found = 0, dict[str, int]()
        for item, answers in sheet.answers.items():
            if item in self.right:
                items += 1
                kind = _kind_of(item)
                found[kind] = found.get(kind, 0) + sum(answers.values())
        return items, dict(sorted(found.items()))

    def _standing(
        self,
        sheet: Sheet,
        findings: Sequence[Finding],
        doubts: Sequence[str],
        items: int,
        calls: int,
        limit: float,
        confidence: float,
        running: bool,
    ) -> tuple[Standing, str]:
        """Its standing, and why: an accusation first, then whatever keeps it from passing."""
        if sheet.device.rank in self.shared:
            return "not judged", (
                f"other ranks of this scan are the same device ({sheet.device.device}): agreement with oneself is no evidence; "
                "give each rank a device of its own"
            )
        if findings:
            return self._accused(sheet, findings, calls)
        if doubts:
            more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
            return "not judged", f"{doubts[0]}{more}"
        if sheet.ended not in ("", "done"):
            return "not judged", f"it did not come to its end: {sheet.ended}"
        if not sheet.ended and not running:
            return "not judged", "it stopped answering, and nothing says why: look at its node"
        if not calls:
            return "not judged", self._why_nothing(sheet)
        if items < _ENOUGH * len(sheet.answers):
            return "not judged", f"only {items} of {len(sheet.answers)} items judge it: {self._why_nothing(sheet)}"
        if limit >= 1:
            return "not judged", f"{calls} answers are too few to say anything: scan it longer"
        return "pass", f"{calls} answers right: its error rate is below {limit:.2g} per call ({confidence:.0%})"

    def _accused(self, sheet: Sheet, findings: Sequence[Finding], calls: int) -> tuple[Standing, str]:
        """Whether its wrong answers are enough to say that it is the device."""
        wrong, events = sum(finding.wrong for finding in findings), sum(finding.events for finding in findings)
        worst = max(findings, key=lambda finding: (finding.wrong, finding.item))
        said = f"{wrong} of {calls} answers were wrong"
        if sheet.device.rank in self.convicted:
            return "fail", f"{said}, in {len(findings)} item(s), most of them in {worst.item}; {_backing(worst)}"
        beside = self.events.elsewhere_on_node(sheet.device, [one.item for one in findings])
        if beside:
            return "not judged", (
                f"{said} ({worst.item}), and so were answers of {beside} other device(s) of node {sheet.device.node}: what these "
                "share, or how the node is set up; look at the node"
            )
        return "not judged", (
            f"{said} ({worst.item}), from {events} set(s) of operands: that does not tell it from a rare fault of software, or from one "
            "that others have too; scan it again, longer"
        )

    def _why_nothing(self, sheet: Sheet) -> str:
        if not sheet.answers:
            return "it has answered nothing"
        if any(item in self.known for item in sheet.answers) and not self._fits_golden(sheet):
            return "it fits too few of the golden answers to be judged by them: its configuration is another one"
        if len(self.voters) < 3:
            return (
                f"{len(self.voters)} device(s) of its kind ({sheet.device.kind_name}): three must be compared, or give golden "
                "answers (--golden)"
            )
        why = Counter(self.why[item] for item in sheet.answers if item in self.why)
        return why.most_common(1)[0][0] if why else "nothing that it computed has a right answer"


def _backing(finding: Finding) -> str:
    backed = f"{finding.backers} device(s) of its kind gave the right one each time" if finding.backers else ""
    golden = "the golden file says the same" if finding.golden else ""
    return " and ".join(part for part in (backed, golden) if part)


@lru_cache(maxsize=100_000)
def _kind_of(item: str) -> str:
    """What an item is counted with; it is asked for each item of each device, so that names are taken apart once."""
    try:
        return Item.parse(item).kind
    except ConfigurationError:
        return "other"
