"""A report without names, made anew from what may be in it: for somebody outside, and of an incident that names nobody.

Every record of it is made here field by field, so what is not mentioned here is not in it. A text comes in only in a closed form (see
`report_closed`), names of nodes and people become words of ours, the same name always the same, and sentences are either made again
from what is known here or left out. The verdict's own words come from `verdict.decide`, which is given the observations with those
words in place of names.

`redact` is for somebody outside. `nameless` is for everybody: the report of an unattributed incident must point at no node and no
device, wherever it goes, but says who acted and where the run lies.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from bitwitness.evidence import History, Observation, Verdict
from bitwitness.policy import REACTIONS
from bitwitness.runfiles import Incident
from bitwitness.store import pages
from bitwitness.topology import Placement, Topology
from bitwitness.verdict import decide
from bitwitness.web import report_closed as forms
from bitwitness.web.report_closed import LEFT_OUT, closed, formed
from bitwitness.web.report_deciding import Decided, Difference, made
from bitwitness.web.report_records import Device, Evidence, Report

_TOO_MANY = 20_000
"""Ranks beyond which the verdict's own words are not made again."""


def redact(report: Report) -> Report:
    """A copy for somebody outside: no names of nodes, paths and people, and nothing that anybody wrote."""
    copy = _Copy(report, outside=True)
    done = copy.report()
    texts = json.dumps(done.to_json()).count(LEFT_OUT)
    return dataclasses.replace(done, redacted={**copy.names.counts, "text": texts})


def nameless(report: Report) -> Report:
    """A copy in which no node and no device is identified; people and the run are."""
    return _Copy(report, outside=False).report()


class _Names:
    """Words of ours in place of names: the same name is the same word everywhere."""

    def __init__(self, nodes: Iterable[str]) -> None:
        self.counts: dict[str, int] = {}
        self._words: dict[tuple[str, str], str] = {}
        self._short: dict[str, set[str]] = {}
        for name in nodes:
            word = self.word("node", name)
            self._short.setdefault(_first_label(name), set()).add(word)

    def word(self, kind: str, name: str) -> str:
        """`NODE-1` and the like."""
        key = kind, name.lower()
        if name and key not in self._words:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self._words[key] = f"{kind.upper()}-{self.counts[kind]}"
        return self._words[key] if name else ""

    def node(self, name: str) -> str:
        """A node: one that somebody else calls by its short or its long name is the same, if no other has that name."""
        alike = self._short.get(_first_label(name), set())
        if ("node", name.lower()) not in self._words and len(alike) == 1:
            self._words["node", name.lower()] = next(iter(alike))
        return self.word("node", name)


def _first_label(name: str) -> str:
    first = name.lower().partition(".")[0]
    return name.lower() if first.isdecimal() else first


class _Copy:
    """One report, made anew."""

    def __init__(self, report: Report, *, outside: bool) -> None:
        self._from = report
        self._outside = outside
        self._attributed = report.page.incident.status == "attributed"
        found = report.source
        placed = found.topology.nodes if found is not None else (place.node for place in report.page.placement)
        self.names = _Names(str(name) for name in placed)
        self._values: dict[str, str] = {}
        self._source = self._incident_files()

    def report(self) -> Report:
        """All of it."""
        old = self._from
        page = self._page(old.page)
        return Report(
            page=page,
            devices=tuple(map(self._device_named, old.devices)),
            nodes=old.nodes,
            software=self._made(old.software, forms.software),
            decided=self._decided(old.decided, page.path),
            files=tuple(
                Evidence(
                    self._file(one.name), one.bytes, formed(one.sha256, forms.DIGEST), LEFT_OUT if one.problem else ""
                )
                for one in old.files
            ),
            injected=tuple(map(self._drill, old.injected)),
            recorded=old.recorded,
            demo=old.demo,
            strikes=tuple(map(self._strike, old.strikes)) if self._attributed else (),
            denied=tuple(f"it is denied in this run: {LEFT_OUT}" for _ in old.denied) if self._attributed else (),
            fleet=old.fleet,
            incidents=tuple(formed(one, forms.IDENTIFIER) for one in old.incidents),
            newest=old.newest,
            made=formed(old.made, forms.MOMENT),
            version=formed(old.version, forms.VERSION),
            source=self._source,
        )

    # Words -----------------------------------------------------------------------------------------------------------

    def _kept(self, text: str, instead: str) -> str:
        """What is no name of a node or a device: kept for those inside."""
        return text if not self._outside else instead if text else ""

    def _made(self, text: str, form: Any) -> str:
        return form(text) if self._outside else text

    def _node(self, name: str) -> str:
        return self.names.node(name)

    def _about(self, node: str) -> str:
        """The node that something is about: of an unattributed incident nothing is about a node."""
        return self._node(node) if self._attributed else ""

    def _device(self, name: str) -> str:
        return self._identity(name) if self._attributed else ""

    def _identity(self, name: str) -> str:
        """The identity of a device, without which there is nothing to give back; a processor goes by its node."""
        if not name or (self._attributed and forms.DEVICE.fullmatch(name)):
            return name
        part = forms.PROCESSOR.fullmatch(name)
        return f"{self._node(part['node'])}/{part['slot']}" if part else self.names.word("device", name)

    def _who(self, who: str) -> str:
        if not self._outside or who in forms.PROGRAMS:
            return who
        return self.names.word("person", who)

    def _file(self, name: str) -> str:
        return name if forms.EVIDENCE.fullmatch(name) or name == "..." else self.names.word("file", name)

    def _value(self, value: str) -> str:
        if forms.value(value):
            return value
        return self._values.setdefault(value, f"value-{len(self._values) + 1}")

    # The page of the incident ----------------------------------------------------------------------------------------

    def _page(self, old: pages.IncidentPage) -> pages.IncidentPage:
        run = self._kept(old.run.path, "RUN_DIR")
        incident = self._row(old.incident)
        return pages.IncidentPage(
            incident=incident,
            run=self._run(old.run),
            observations=tuple(map(self._seen, old.observations)),
            placement=tuple(map(self._place, old.placement)),
            world_size=old.world_size,
            nodes=old.nodes,
            checkpoint=old.checkpoint,
            proposals=tuple(map(self._proposal, old.proposals)),
            history=tuple(map(self._deed, old.history)),
            notes=(f"{len(old.notes)} × {LEFT_OUT}",) if old.notes else (),
            files={self._file(name): size for name, size in old.files.items()},
            path=self._kept(old.path, f"{run}/incidents/{incident.id}"),
            pruned=old.pruned,
            on_detection=closed(old.on_detection, REACTIONS),
            resumed=old.resumed,
        )

    def _row(self, old: pages.IncidentRow) -> pages.IncidentRow:
        again = self._again()
        nodes = tuple(dict.fromkeys(map(self._node, old.nodes)))
        kind, how = closed(old.kind, forms.KINDS), closed(old.persistence, forms.PERSISTENCES, "unknown")
        row: Any = {"status": old.status, "step": old.step, "ranks": old.ranks, "nodes": nodes}
        headline = Verdict(**row, kind=cast(Any, kind or LEFT_OUT), persistence=cast(Any, how or "unknown")).headline()
        texts: dict[str, Any] = {
            "id": formed(old.id, forms.IDENTIFIER),
            "run_name": self._kept(old.run_name, "RUN"),
            "time": formed(old.time, forms.MOMENT),
            "check": closed(old.check, forms.CHECKS),
            "kind": kind,
            "status": old.status,
            "persistence": how,
            "headline": headline,
            "reason": again.reason if again is not None and self._attributed else LEFT_OUT,
            "ranks": old.ranks,
            "nodes": nodes,
            "devices": tuple(map(self._device, old.devices)),
            "candidates": old.candidates,
            "window": old.window,
            "judgement": closed(old.judgement, forms.JUDGEMENTS, ""),
            "action": old.action if forms.standing(old.action) else LEFT_OUT,
            "run_path": self._kept(old.run_path, "RUN_DIR"),
        }
        return pages.IncidentRow(**_numbers(old) | texts)

    def _run(self, old: pages.RunRow) -> pages.RunRow:
        texts: dict[str, Any] = {
            "name": self._kept(old.name, "RUN"),
            "path": self._kept(old.path, "RUN_DIR"),
            "run": formed(old.run, forms.IDENTIFIER),
            "job": self._kept(old.job, "JOB"),
            "state": closed(old.state, forms.STATES),
            "state_text": LEFT_OUT if old.state_text else "",
            "started": formed(old.started, forms.MOMENT),
            "seen": formed(old.seen, forms.MOMENT),
            "coverage": tuple(
                pages.Coverage(one.check, one.passed, one.unverified, one.failed, one.all, one.last)
                for one in old.coverage
                if one.check in forms.CHECKS
            ),
        }
        return pages.RunRow(**_numbers(old) | texts)

    def _seen(self, old: pages.Seen) -> pages.Seen:
        return pages.Seen(
            check=closed(old.check, forms.CHECKS),
            step=old.step,
            rank=old.rank,
            place=closed(old.place, forms.PLACES),
            value=self._value(old.value),
            repeats=tuple(map(self._value, old.repeats)),
            owner=old.owner,
            micro=old.micro,
            error=forms.error(old.error),
            detail=forms.detail(old.detail),
        )

    def _place(self, old: pages.Place) -> pages.Place:
        model, pod = self._made(old.model, forms.model), self._pod(old.pod)
        return pages.Place(old.rank, self._node(old.node), self._device(old.device), old.slot, model, pod)

    def _pod(self, pod: str) -> str:
        return self.names.word("pod", pod) if self._attributed else ""

    def _proposal(self, old: pages.ProposalRow) -> pages.ProposalRow:
        signals = tuple(dict.fromkeys(map(self._signal, old.signals)))
        return pages.ProposalRow(
            key=old.key,
            incident=formed(old.incident, forms.IDENTIFIER),
            node=self._about(old.node),
            devices=tuple(map(self._device, old.devices)) if self._attributed else (),
            action=closed(old.action, forms.ACTIONS),
            confidence=closed(old.confidence, forms.CONFIDENCES),
            reason=LEFT_OUT if old.reason else "",
            act=closed(old.act, forms.ACTS),
            status=closed(old.status, forms.STANDS),
            hold=closed(old.hold, forms.HOLDS),
            why=LEFT_OUT if old.why else "",
            updated=formed(old.updated, forms.MOMENT),
            signals=signals if self._attributed else (),
            waits=old.waits,
            controller=old.controller,
            question="",
            state="",
        )

    def _signal(self, text: str) -> str:
        code, device, when, source = forms.signal(text)
        if not code:
            return LEFT_OUT
        where = f" on {self._device(device)}" if device else ""
        return f"{code}{where}{when}{source}"

    def _deed(self, old: pages.AuditRow) -> pages.AuditRow:
        said = LEFT_OUT if old.text else ""
        if old.what == "judged":
            judgement, colon, _ = old.text.partition(":")
            said = judgement + (f": {LEFT_OUT}" if colon else "") if judgement in forms.JUDGEMENTS else said
        return pages.AuditRow(
            time=formed(old.time, forms.MOMENT),
            who=self._who(old.who),
            what=closed(old.what, forms.DEEDS),
            incident=formed(old.incident, forms.IDENTIFIER),
            node=self._about(old.node),
            text=said,
            source=closed(old.source, forms.SOURCES),
        )

    # What a report has besides ---------------------------------------------------------------------------------------

    def _device_named(self, old: Device) -> Device:
        return Device(
            rank=old.rank,
            node=self._node(old.node),
            device=self._device(old.device),
            slot=old.slot,
            model=self._made(old.model, forms.model),
            pod=self._pod(old.pod),
            software=self._made(old.software, forms.software),
            serial=formed(old.serial, forms.SERIAL),
        )

    def _drill(self, old: pages.DrillRow) -> pages.DrillRow:
        return pages.DrillRow(
            time=formed(old.time, forms.MOMENT),
            run=old.run,
            run_name=self._kept(old.run_name, "RUN"),
            fault=LEFT_OUT,
            rank=old.rank,
            node=self._about(old.node),
            step=old.step,
            outcome=closed(old.outcome, forms.OUTCOMES),
            check=closed(old.check, forms.CHECKS),
            incident=formed(old.incident, forms.IDENTIFIER),
            late=old.late,
            run_path=self._kept(old.run_path, "RUN_DIR"),
        )

    def _strike(self, old: pages.StrikeRow) -> pages.StrikeRow:
        return pages.StrikeRow(
            time=formed(old.time, forms.MOMENT),
            incident=formed(old.incident, forms.IDENTIFIER),
            run=old.run,
            run_name=self._kept(old.run_name, "RUN"),
            rank=old.rank,
            device=self._device(old.device),
            node=self._node(old.node),
            persistence=closed(old.persistence, forms.PERSISTENCES),
            counts=old.counts,
            cleared=LEFT_OUT if old.cleared else "",
            judgement=cast(Any, closed(old.judgement, forms.JUDGEMENTS, "")),
            run_path=self._kept(old.run_path, "RUN_DIR"),
        )

    # The verdict, again ----------------------------------------------------------------------------------------------

    def _decided(self, old: Decided, path: str) -> Decided:
        history = _history(old.history)
        return made(
            old.outcome,
            path,
            old.observations,
            formed(old.by, forms.VERSION),
            differing=tuple(map(self._difference, old.differing)),
            history=history,
            assumed=old.assumed,
        )

    def _difference(self, old: Difference) -> Difference:
        """Of an unattributed incident not whom the verdict would name now."""
        shown = map(_word, (old.recorded, old.again)) if self._attributed else ("", "")
        return Difference(closed(old.field, {one.name for one in dataclasses.fields(Verdict)}), *shown)

    def _incident_files(self) -> Incident | None:
        """What the verdict is decided from, with words of ours in place of names; None where that is not possible."""
        found = self._from.source
        if found is None or len(found.topology.placements) > _TOO_MANY:
            return None
        makes: dict[tuple[Any, Any], str] = {}
        try:
            placed = tuple(
                Placement(
                    place.rank,
                    self._node(str(place.node)),
                    self._identity(str(place.device)),
                    place.slot,
                    makes.setdefault((place.model, place.software), f"make-{len(makes) + 1}"),
                )
                for place in found.topology.placements
            )
            seen = tuple(map(self._observation, found.observations))
            return dataclasses.replace(found, observations=seen, topology=Topology(placed))
        except Exception:  # noqa: BLE001  (what is damaged has no words of ours)
            return None

    def _observation(self, old: Observation) -> Observation:
        if old.check not in forms.CHECKS or old.place not in forms.PLACES:
            raise ValueError("not one of ours")
        values = {"value": self._value(old.value), "repeats": tuple(map(self._value, old.repeats))}
        words: Any = {**values, "error": forms.error(old.error), "detail": forms.detail(old.detail)}
        return Observation(old.check, old.step, old.rank, old.place, owner=old.owner, micro=old.micro, **words)

    def _again(self) -> Verdict | None:
        """The verdict in words of ours, where it is the one on record."""
        decided, found = self._from.decided, self._source
        history = _history(decided.history)
        if found is None or history is None or decided.outcome not in ("same", "same, assumed"):
            return None
        try:
            again = decide(found.observations, found.topology, history, found.verdict.step)
        except (ArithmeticError, AssertionError, LookupError, TypeError, ValueError, AttributeError):
            return None
        return again if again.ranks == self._from.page.incident.ranks else None


def _numbers(record: Any) -> dict[str, Any]:
    """What of a record is a number, a truth, or nothing."""
    every = {one.name: getattr(record, one.name) for one in dataclasses.fields(record)}
    return {name: value for name, value in every.items() if value is None or isinstance(value, int | float)}


def _history(known: Mapping[str, Any] | None) -> History | None:
    """What was known before, if it holds nothing but checks of ours."""
    if known is None:
        return None
    history = History.from_json(known)
    return history if {*history.last_passed, *history.compared_before} <= forms.CHECKS else None


def _word(text: str) -> str:
    words = forms.CHECKS | forms.KINDS | forms.PERSISTENCES | forms.STATUSES | {"clean", "none"}
    return text if all(part in words or part.lstrip("-").isdecimal() for part in _parts(text)) else LEFT_OUT


def _parts(text: str) -> Iterator[str]:
    yield from text.split(", ") if text else ()
