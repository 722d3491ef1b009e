"""From the files of a scan to its result: what the judge says of answers and of links, and of whom nothing can be said.

Apart from the coordinator, because `scan show` concludes from files alone, also where no coordinator came to it. Whatever is
missing makes a device *not judged* here; nothing here accuses anybody that the judges have not.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Sheet
from bitwitness.runfiles.files import utc_now
from bitwitness.scan.evidence import read
from bitwitness.scan.exiting import Drill
from bitwitness.scan.following import Follower
from bitwitness.scan.golden import GoldenFile, explain
from bitwitness.scan.items import Item
from bitwitness.scan.judging import bound, judge
from bitwitness.scan.linking import judge_transfers
from bitwitness.scan.results import DeviceResult, Judgement, Voice
from bitwitness.scan.settings import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Conclusion:
    """What is concluded, and on what it rests.

    Attributes:
        judgement: who passes, fails, or is not judged.
        sheets: the answers.
        skipped: items that devices left out, with the reason and by how many.
        celsius: by rank, the lowest and the highest temperature seen.
        coverage: by suite, what was done by all devices together.
        evidence: files of wrong outputs; those of devices that fail first.
        seconds: that the scan took.
        interrupted: whether it was ended before its time.
    """

    judgement: Judgement
    sheets: Sequence[Sheet]
    skipped: Sequence[Mapping[str, Any]] = ()
    celsius: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    coverage: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    evidence: Sequence[Mapping[str, Any]] = ()
    seconds: float = 0.0
    interrupted: bool = False

    def drill_outcome(self, settings: Settings) -> Drill | None:
        """Of a scan with faults on purpose: whether just these were found."""
        if not settings.drills:
            return None
        made = {frozenset(one.ranks) for one in settings.drills}
        found = {frozenset({one.rank}) for one in self.judgement.devices if one.standing == "fail"}
        found |= {frozenset(one.ranks) for one in self.judgement.links if one.standing == "fail"}
        return "found" if found == made else "missed"

    def to_json(self, settings: Settings) -> dict[str, Any]:
        """As JSON values: what `result.json` holds."""
        return {
            **settings.to_json(),
            **self.judgement.to_json(),
            "interrupted": self.interrupted,
            "ended": utc_now(),
            "took_seconds": round(self.seconds, 1),
            "drill_outcome": self.drill_outcome(settings),
            "coverage": self.coverage,
            "skipped": [dict(one) for one in self.skipped],
            "celsius": {str(rank): list(span) for rank, span in self.celsius.items()},
            "evidence": [dict(one) for one in self.evidence],
        }


def conclude(
    files: AnswerFiles,
    settings: Settings,
    follower: Follower,
    *,
    golden: GoldenFile | None = None,
    voices: Sequence[Voice] = (),
    ended_as: Mapping[int, str] | None = None,
    running: bool = False,
    seconds: float = 0.0,
    interrupted: bool = False,
) -> Conclusion:
    """Judge what lies in the files of a scan.

    Args:
        files: of the scan.
        settings: what was asked.
        follower: of the journals.
        golden: answers that are known.
        voices: of vendors' diagnostics.
        ended_as: by rank, how it ended where that is known from elsewhere than its journal.
        running: whether ranks still work.
        seconds: that the scan took.
        interrupted: whether it was ended before its time.

    Raises:
        RunFilesError: a file cannot be read.
    """
    sheets = follower.sheets()
    records = follower.records
    ended_as = {**follower.damaged, **(ended_as or {})}
    for sheet in sheets:
        if sheet.ended != "done" and (why := ended_as.get(sheet.device.rank)):
            sheet.ended = f"{sheet.ended}; {why}" if sheet.ended else why
    judged = judge(sheets, golden, confidence=settings.confidence, running=running)
    if golden is not None:
        by_rank = {sheet.device.rank: sheet for sheet in sheets}
        judged = replace(
            judged, devices=tuple(_with_kind_explained(one, by_rank[one.rank], golden) for one in judged.devices)
        )
    skipped = _skipped(records)
    judged = replace(judged, devices=tuple(_with_errors(one, records, skipped) for one in judged.devices))
    if "comm" in settings.suites and settings.world > 1:
        judged = _with_links(judged, sheets, records, running=running, alone=settings.suites == ("comm",))
    judged = _with_the_missing(judged, settings, ended_as, running=running)
    return Conclusion(
        judgement=replace(judged, voices=tuple(voices)),
        sheets=sheets,
        skipped=skipped,
        celsius=_celsius(records),
        coverage=_coverage(sheets, records, settings),
        evidence=_evidence(files, judged),
        seconds=seconds,
        interrupted=interrupted,
    )


Records = Mapping[int, Sequence[Mapping[str, Any]]]


def _with_kind_explained(result: DeviceResult, sheet: Sheet, golden: GoldenFile) -> DeviceResult:
    """Say why golden answers do not judge a device of a kind that they do not know."""
    why = explain(golden, sheet.device.kind)
    if result.standing != "not judged" or result.wrong or not why:
        return result
    return replace(result, reason=f"{result.reason}. {why}")


def _with_errors(result: DeviceResult, records: Records, skipped: Sequence[Mapping[str, Any]]) -> DeviceResult:
    """A device that ended in an error where others of the scan did not has not passed."""
    total = len(records)
    own = {
        str(one.get("item")) for one in records[result.rank] if one.get("kind") == "skip" and one.get("what") == "error"
    }
    alone = [one for one in skipped if one["what"] == "error" and one["item"] in own and 2 * one["devices"] < total]
    if result.standing != "pass" or not alone:
        return result
    said = f"it ended in an error at {alone[0]['item']}, as {alone[0]['devices']} of {total} devices did: {alone[0]['why']}"
    return replace(result, standing="not judged", reason=said, bound=None)


def _with_links(
    judged: Judgement, sheets: Sequence[Sheet], records: Records, *, running: bool, alone: bool
) -> Judgement:
    """What was received, and who fails because of that; where nothing else was asked for, who passes as well."""
    everything = [record for found in records.values() for record in found]
    communicated = any(record.get("kind") in ("link", "collective", "no-link") for record in everything)
    if running and not communicated:
        return judged
    devices = [sheet.device for sheet in sheets]
    found = judge_transfers(devices, everything)
    results = []
    for one in judged.devices:
        why = found.failed.get(one.rank)
        if why is not None:
            both = f"{why}; also, {one.reason}" if one.standing == "fail" else why
            results.append(replace(one, standing="fail", reason=both, bound=None))
        else:
            results.append(one)
    judged = replace(judged, devices=tuple(results), links=found.links, unjudged=(*judged.unjudged, *found.unjudged))
    return _by_transfers(judged, sheets, found.right) if alone else judged


def _by_transfers(judged: Judgement, sheets: Sequence[Sheet], right: Mapping[int, int]) -> Judgement:
    """Where nothing but transfers was asked for, they judge devices: who received all right, from and with all, has passed."""
    ended = {sheet.device.rank for sheet in sheets if sheet.ended == "done" and not sheet.answers}
    results = []
    for one in judged.devices:
        count = right.get(one.rank, 0)
        if one.standing == "not judged" and one.rank in ended and count:
            limit = bound(count, judged.confidence)
            said = f"{count} transfers received right: their error rate is below {limit:.2g} ({judged.confidence:.0%})"
            results.append(replace(one, standing="pass", reason=said, calls=count, bound=limit))
        else:
            results.append(one)
    return replace(judged, devices=tuple(results))


def _with_the_missing(
    judged: Judgement, settings: Settings, ended_as: Mapping[int, str], *, running: bool
) -> Judgement:
    """Who never appeared is not judged, and is in the result."""
    there = {one.rank for one in judged.devices}
    unsaid = "it has not begun yet" if running else "nothing says why"
    missing = [
        DeviceResult(
            rank,
            f"node-{rank // settings.ranks_per_node}" if settings.played else "?",
            "?",
            "?",
            "not judged",
            f"it never appeared: {ended_as.get(rank) or unsaid}",
        )
        for rank in range(settings.world)
        if rank not in there
    ]
    return replace(judged, devices=tuple(sorted((*judged.devices, *missing), key=lambda one: one.rank)))


def _skipped(records: Records) -> tuple[Mapping[str, Any], ...]:
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for journal in records.values():
        for item, what, why in {
            (str(one.get("item")), str(one.get("what")), str(one.get("why")))
            for one in journal
            if one.get("kind") == "skip"
        }:
            found[item, what].append(why)
    return tuple(
        {"item": item, "what": what, "why": Counter(why).most_common(1)[0][0], "devices": len(why)}
        for (item, what), why in sorted(found.items())
    )


def _celsius(records: Records) -> dict[int, tuple[float, float]]:
    spans = {}
    for rank, journal in records.items():
        seen = [one["celsius"] for one in journal if isinstance(one.get("celsius"), int | float)]
        if seen:
            spans[rank] = (min(seen), max(seen))
    return spans


def _evidence(files: AnswerFiles, judged: Judgement) -> tuple[Mapping[str, Any], ...]:
    """The files of wrong outputs: those that show what a device fails for, then what else ranks thought worth keeping."""
    about = {(one.rank, finding.item): one.standing == "fail" for one in judged.devices for finding in one.findings}
    found = []
    for path in sorted(files.evidence.glob("rank-*.json")):
        with suppress(RunFilesError):
            one = read(path)
            key = (one.device.rank, one.item.id)
            standing = "fail" if about.get(key) else "wrong" if key in about else "unjudged"
            found.append({"path": str(path), "rank": key[0], "item": key[1], "standing": standing})
    order = ("fail", "wrong", "unjudged")
    return tuple(sorted(found, key=lambda one: (order.index(str(one["standing"])), str(one["path"]))))


def _coverage(sheets: Iterable[Sheet], records: Records, settings: Settings) -> dict[str, dict[str, int]]:
    items: dict[str, set[str]] = {suite: set() for suite in settings.suites if suite != "comm"}
    calls: Counter[str] = Counter()
    for sheet in sheets:
        for name, answers in sheet.answers.items():
            with suppress(ConfigurationError):
                suite = Item.parse(name).suite
                items.setdefault(suite, set()).add(name)
                calls[suite] += sum(answers.values())
    found = {suite: {"items": len(names), "calls": calls[suite]} for suite, names in items.items()}
    if "comm" in settings.suites:
        seen: Counter[str] = Counter()
        for record in (record for journal in records.values() for record in journal):
            right, wrong = record.get("right"), record.get("wrong")
            if isinstance(right, int) and isinstance(wrong, int):
                seen[str(record.get("kind"))] += right + wrong
        found["comm"] = {"transfers": seen["link"], "collectives": seen["collective"]}
    return found


def refuse_used(path: Path) -> None:
    """Refuse a directory in which there is something: a scan must not mix with another.

    Raises:
        ConfigurationError: there is something in it.
        RunFilesError: it cannot be looked into.
    """
    try:
        used = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise RunFilesError(f"{path} cannot be looked into: {error.strerror or error}") from error
    if used:
        raise ConfigurationError(f"{path} is not empty: choose a new directory; nothing is overwritten")
