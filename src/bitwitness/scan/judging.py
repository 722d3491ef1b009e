"""Answers -> who is wrong: pure, the only place of a scan that can accuse a device.

What must be told apart is a device that computes wrongly, and everything that looks like one: work that does not repeat, a
configuration of one node that the kind does not name, a golden file of something else, a rare race in software. So

- a right answer is what at least two devices gave each time they were asked, if three were asked and more than half of those gave it;
- somebody who always answers otherwise is accused only where that cannot be the configuration of a node: others agree on the same
  node, or on two other nodes. Who sometimes answers rightly has answered the question of configuration;
- an item that many devices get wrong accuses nobody;
- wrong answers must gather on one device. If they came from software alike on all, each would fall on a device by chance; a device
  is accused only where so many on it have a probability of at most `CHANCE` (binomial, by how much each device computed, times
  the number of devices). One wrong answer is a strike and no more (DESIGN section 3, rule 2).

The bound of an error rate after n right answers is -ln(1 - confidence) / n, about 3 / n at 95 % (the "rule of three", Hanley and
Lippman-Hand, JAMA 1983).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bitwitness.runfiles.answers import Sheet
from bitwitness.scan.chance import tail
from bitwitness.scan.items import Item
from bitwitness.scan.results import DeviceResult, Finding, Judgement, Unjudged

CHANCE = 1e-3
"""At most so probable may it be that wrong answers which fall on devices by chance gather on one as they did."""

_FITS = 0.75
"""Of the golden answers, a device must give so many before the others accuse it: else it is another configuration."""
_LEAST_KNOWN = 3


@dataclass(frozen=True, slots=True)
class Known:
    """A golden answer: the digest, and on how many devices and calls it was learned."""

    digest: str
    devices: int
    calls: int


Golden = Mapping[str, Mapping[str, Known]]
"""By the name of a kind, by the id of an item."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """The right answer to an item, and who backs it: ranks that gave it each time."""

    digest: str
    backers: frozenset[int]
    golden: Known | None


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
        unjudged += one.unjudged()
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
    """The devices of one kind."""

    def __init__(self, sheets: Sequence[Sheet], known: Mapping[str, Known]) -> None:
        self.sheets = sheets
        self.known = known
        self.nodes = {sheet.device.rank: sheet.device.node for sheet in sheets}
        self.items = sorted({item for sheet in sheets for item in sheet.answers})
        self.why: dict[str, str] = {}
        self.references: dict[str, _Reference] = {}
        for item in self.items:
            found = self._reference(item)
            if isinstance(found, str):
                self.why[item] = found
            else:
                self.references[item] = found
        self.findings = {sheet.device.rank: self._findings(sheet) for sheet in sheets}
        self._excuse_what_many_get_wrong()
        self.calls = {sheet.device.rank: self._calls(sheet) for sheet in sheets}

    def unjudged(self) -> list[Unjudged]:
        """The items that judged nobody."""
        return [Unjudged(item, why) for item, why in sorted(self.why.items())]

    # What is right ---------------------------------------------------------------------------------------------------

    def _reference(self, item: str) -> _Reference | str:
        """The right answer, or why there is none."""
        steady: dict[str, set[int]] = defaultdict(set)
        having = 0
        for sheet in self.sheets:
            answers = sheet.answers.get(item)
            if answers is None:
                continue
            having += 1
            if len(answers) == 1 and sum(answers.values()) > 1:
                steady[next(iter(answers))].add(sheet.device.rank)
        known = self.known.get(item)
        for digest, ranks in steady.items():
            if having < 3 or len(ranks) < 2 or 2 * len(ranks) <= having:
                continue
            if known is not None and known.digest != digest:
                return (
                    f"{len(ranks)} devices agree on {digest[:16]}, the golden file says {known.digest[:16]}: it is of another "
                    "configuration than the kind names, or wrong; learn it anew"
                )
            return _Reference(digest, frozenset(ranks), known)
        if known is not None:
            return _Reference(known.digest, frozenset(steady.get(known.digest, ())), known)
        if having < 3:
            return f"{having} device(s) of this kind computed it: three must be compared, or give golden answers"
        if len(steady) > 1:
            return f"the devices are divided between {len(steady)} answers: software or configuration, which the kind does not name"
        return "it does not repeat on most devices: software, or work that cannot be compared"

    # Who is wrong ----------------------------------------------------------------------------------------------------

    def _findings(self, sheet: Sheet) -> list[Finding]:
        fits = self._fits_golden(sheet)
        found = []
        for item, reference in self.references.items():
            answers = sheet.answers.get(item, {})
            if set(answers) <= {reference.digest}:
                continue
            if not self._may_accuse(sheet, reference, answers) and not (reference.golden is not None and fits):
                continue
            backers = [one.device.device for one in self.sheets if one.device.rank in reference.backers]
            found.append(Finding(item, reference.digest, answers, tuple(backers), reference.golden is not None))
        return found

    def _may_accuse(self, sheet: Sheet, reference: _Reference, answers: Mapping[str, int]) -> bool:
        """Whether the others' agreement says that this device is wrong, rather than configured otherwise."""
        backers = reference.backers - {sheet.device.rank}
        if len(backers) < 2:
            return False
        if reference.digest in answers:
            return True
        where = {self.nodes[rank] for rank in backers}
        return sheet.device.node in where or len(where) >= 2

    def _fits_golden(self, sheet: Sheet) -> bool:
        """Whether it answers most of what is known as is known: one that does not is configured otherwise."""
        asked = [item for item in sheet.answers if item in self.known]
        right = sum(self.known[item].digest in sheet.answers[item] for item in asked)
        return len(asked) >= _LEAST_KNOWN and right >= _FITS * len(asked)

    def _excuse_what_many_get_wrong(self) -> None:
        """An item that more than a quarter of the devices get wrong, and more than one, accuses nobody."""
        wrong = Counter(finding.item for found in self.findings.values() for finding in found)
        for item, devices in wrong.items():
            having = sum(item in sheet.answers for sheet in self.sheets)
            if devices > max(1, having // 4):
                self.why[item] = f"{devices} of {having} devices got it wrong: software, or work that does not repeat"
                del self.references[item]
        for rank, found in self.findings.items():
            self.findings[rank] = [finding for finding in found if finding.item in self.references]

    def _calls(self, sheet: Sheet) -> dict[str, int]:
        """How often it computed each item that judges it."""
        accused = {finding.item for finding in self.findings[sheet.device.rank]}
        calls = {}
        for item, reference in self.references.items():
            answers = sheet.answers.get(item, {})
            if item in accused or set(answers) == {reference.digest}:
                calls[item] = sum(answers.values())
        return calls

    def _chance(self, rank: int) -> float:
        """How probable it is that so many of the wrong answers fall on this device by chance."""
        wrong = {one: sum(finding.wrong for finding in found) for one, found in self.findings.items()}
        total, own = sum(wrong.values()), wrong[rank]
        learned = sum(reference.golden.calls for reference in self.references.values() if reference.golden is not None)
        calls = {one: sum(found.values()) for one, found in self.calls.items()}
        share = calls[rank] / (sum(calls.values()) + learned)
        return min(1.0, len(self.sheets) * tail(total, own, share))

    # What is said of it ----------------------------------------------------------------------------------------------

    def result(self, sheet: Sheet, confidence: float, running: bool) -> DeviceResult:
        """What is concluded about one device."""
        who = sheet.device
        findings, calls = self.findings[who.rank], self.calls[who.rank]
        total, wrong = sum(calls.values()), sum(finding.wrong for finding in findings)
        by_kind: Counter[str] = Counter()
        for item, count in calls.items():
            by_kind[_kind_of(item)] += count

        def made(standing: str, reason: str, limit: float | None = None) -> DeviceResult:
            about = (who.rank, who.node, who.device, who.kind_name)
            return DeviceResult(*about, standing, reason, total, wrong, limit, dict(by_kind), tuple(findings))  # type: ignore[arg-type]

        if wrong and self._chance(who.rank) <= CHANCE:
            worst = max(findings, key=lambda finding: finding.wrong)
            said = f"{wrong} of {total} answers were wrong, in {len(findings)} item(s), most of them in {worst.item}"
            return made("fail", f"{said}; {_backing(worst)}")
        if wrong:
            said = f"{wrong} of {total} answers were wrong ({findings[0].item})"
            return made(
                "not judged", f"{said}: too few to tell it from a rare fault of software; scan it again, longer"
            )
        if sheet.ended not in ("", "done"):
            return made("not judged", f"it did not come to its end: {sheet.ended}")
        if not sheet.ended and not running:
            return made("not judged", "it stopped answering, and nothing says why: look at its node")
        if not total:
            return made("not judged", self._why_nothing(sheet))
        limit = bound(total, confidence)
        return made(
            "pass", f"{total} answers right: its error rate is below {limit:.2g} per call ({confidence:.0%})", limit
        )

    def _why_nothing(self, sheet: Sheet) -> str:
        if not sheet.answers:
            return "it has answered nothing"
        if any(item in self.known for item in sheet.answers) and not self._fits_golden(sheet):
            return "it fits too few of the golden answers to be judged by them: its configuration is another one"
        if len(self.sheets) < 3:
            return (
                f"{len(self.sheets)} device(s) of its kind ({sheet.device.kind_name}): three must be compared, or give golden "
                "answers (--golden)"
            )
        why = Counter(
            self.why.get(item, "it answers otherwise than the others, and that may be how its node is set up")
            for item in sheet.answers
        )
        return why.most_common(1)[0][0]


def _backing(finding: Finding) -> str:
    backed = f"{len(finding.backed_by)} device(s) of its kind gave the right one each time" if finding.backed_by else ""
    golden = "the golden file says the same" if finding.golden else ""
    return " and ".join(part for part in (backed, golden) if part)


def _kind_of(item: str) -> str:
    return Item.parse(item).kind
