"""A report without names of nodes, paths and people, for somebody outside: the same name is the same word everywhere.

Names are replaced in every text of the report, because sentences hold them too, before anything is drawn from it. What a person wrote
by hand may hold anything, so that is left out. Identities of devices stay: without them there is nothing to return.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bitwitness.store.pages import AuditRow
from bitwitness.web.report import Report
from bitwitness.web.report_words import CONTROLLER, LEFT_OUT

Record = TypeVar("Record")

_WORDS = frozenset(
    {"status", "state", "kind", "persistence", "check", "place", "judgement", "source", "outcome", "what", "life", "id"}
    | {"sha256", "version", "made", "time", "started", "seen_at", "value", "repeats", "model", "software", "serial"}
)
"""Fields that hold words of our own, digests or identities: a node that is called `attributed` must not change what is drawn."""

_WHO = re.compile(r"[A-Za-z0-9_.+-]+@[A-Za-z0-9_.-]+")
_PATH = re.compile(r"(?<![\w./~-])~?/(?:[\w.@~+=,:-]+/)*[\w.@~+=,-]+/?")
_ADDRESS = re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])")
_SUFFIX = r"(?:\.[A-Za-z0-9-]+)*(?![\w-])"
_COMMON = {"root", "user", "admin", "localhost"}


@dataclass
class _Names:
    """What replaces what; the same name always by the same word."""

    counts: dict[str, int] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)

    def word(self, kind: str, name: str) -> str:
        key = name.lower()
        if key not in self.words:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.words[key] = f"{kind.upper().replace(' ', '-')}-{self.counts[kind]}"
        return self.words[key]


def redact(report: Report) -> Report:
    """A copy in which names are replaced."""
    names = _Names()
    page = report.page
    fixed = {path: "RUN_DIR" for path in (page.run.path, *_run_dirs(report)) if path.strip("/")}
    for kind, name in _known(report):
        if name:
            names.word(kind, name)
    known = sorted(names.words, key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w-])(?:{'|'.join(map(re.escape, known))}){_SUFFIX}", re.IGNORECASE) if known else None

    def known_word(match: re.Match[str]) -> str:
        text = match[0].lower()
        return names.words[next(name for name in known if text.startswith(name))]

    def replaced(text: str) -> str:
        for path in sorted(fixed, key=len, reverse=True):
            text = text.replace(path, fixed[path])
        text = _WHO.sub(lambda match: names.word("person", match[0]), text)
        if pattern is not None:
            text = pattern.sub(known_word, text)
        text = _PATH.sub(lambda match: names.word("path", match[0]), text)
        return _ADDRESS.sub(lambda match: names.word("address", match[0]), text)

    silent = dataclasses.replace(page, history=tuple(_said(one) for one in page.history))
    done: Report = _mapped(dataclasses.replace(report, page=silent), replaced)
    run = dataclasses.replace(done.page.run, name="RUN", job="JOB" if page.run.job else "")
    incident = dataclasses.replace(done.page.incident, run_name="RUN")
    kept = {**names.counts, **({"path": names.counts.get("path", 0) + 1} if fixed else {})}
    return dataclasses.replace(done, page=dataclasses.replace(done.page, run=run, incident=incident), redacted=kept)


def _run_dirs(report: Report) -> Iterator[str]:
    """The directory of the run, however it is written."""
    inside = f"/incidents/{report.page.incident.id}"
    if report.page.path.endswith(inside):
        yield report.page.path.removesuffix(inside)
    found = re.search(r"(/[^'\"]*)" + re.escape(inside), report.decided.code)
    if found is not None:
        yield found[1]


def _known(report: Report) -> Iterator[tuple[str, str]]:
    """Every name that a field says is one, with its kind."""
    page = report.page
    for place in page.placement:
        yield "node", place.node
        yield from _pod(place.pod)
    for device in report.devices:
        yield "node", device.node
        yield from _pod(device.pod)
    yield from (("node", node) for node in page.incident.nodes)
    for nodes in (page.proposals, page.history, report.strikes, report.injected):
        yield from (("node", one.node) for one in nodes)
    yield from (("job", part) for part in (page.run.job, page.run.job.partition(":")[2]))
    for one in page.history:
        user, at, host = one.who.partition("@")
        yield "person", one.who if at else ""
        yield "person", user if at and len(user) > 2 and user.lower() not in _COMMON else ""
        yield "host", host if len(host) > 1 and host.lower() not in _COMMON else ""
    yield "run", page.run.name if len(page.run.name) > 2 else ""


def _pod(pod: str) -> Iterator[tuple[str, str]]:
    yield "pod", pod
    yield "pod", pod.rpartition("/")[2]


def _said(one: AuditRow) -> AuditRow:
    """What a person did is kept, what it wrote is not."""
    if one.who in ("", CONTROLLER):
        return one
    return dataclasses.replace(one, text=LEFT_OUT if one.text else "")


def _mapped(value: Any, replaced: Any) -> Any:
    """The same, with every text replaced."""
    if isinstance(value, str):
        return replaced(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(one, replaced) for one in value)
    if isinstance(value, Mapping):
        return {key: _mapped(one, replaced) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changes = {
            one.name: _mapped(getattr(value, one.name), replaced)
            for one in dataclasses.fields(value)
            if one.name not in _WORDS
        }
        return dataclasses.replace(value, **changes)
    return value
