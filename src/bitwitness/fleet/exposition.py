"""What the controller shows to Prometheus, to a health check and on its page: one set of figures, read when they are asked for.

They come from the database at every scrape, so that they are right after a restart. No label holds an incident, a step or a
node: those are without number, and `fleet status` tells them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal, get_args

from bitwitness._version import __version__
from bitwitness.errors import MissingExtra
from bitwitness.fleet.budget import HoldReason
from bitwitness.fleet.pulse import SILENT_AFTER, pulse

try:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
    from prometheus_client.registry import Collector
except ImportError as missing:
    raise MissingExtra(f"the metrics of fleet need {missing.name}: pip install 'bitwitness[fleet]'") from missing

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_STATUSES = ("attributed", "unattributed")
_HOLDS = get_args(HoldReason)
TROUBLES = ("asked", "back", "cluster", "condemned", "damaged", "gone", "incidents", "run", "start", "twin")
"""What can be wrong with what is watched, by the first part of its key; `other` for what is none of these."""
_ANSWERS = (200, 201, 400, 401, 408, 409, 413, 415, 429, 503, 507)
"""From 0 on: the first of a kind would not be an increase otherwise."""
_OUTCOMES = ("done", "already out", "failed", "unclear", "expired")


@dataclass(frozen=True, slots=True)
class Recent:
    """A line of the page: what became of a proposal lately."""

    time: str
    incident: str
    node: str
    action: str
    status: str
    reason: str


@dataclass(frozen=True, slots=True)
class Figures:
    """What a controller has seen and done, as its database holds it now.

    Attributes:
        mode: `observe`, or `act` where the policy lets it.
        cluster: kind of cluster, e.g. `slurm`.
        incidents: status of the verdict -> incidents ever seen.
        proposals: (action, where it stands) -> proposals that are there now, e.g. ("drain", "held").
        acts: (act, outcome) -> acts that have ended so, ever, e.g. ("drain", "done").
        held: why -> proposals that wait now.
        troubles: kind -> things that are wrong with what is watched now.
        unsettled: acts begun whose outcome is not known yet.
        budget_used: nodes acted upon within the last hour.
        budget_limit: nodes that may be.
        last_round: unix time of the last pass that came to its end; None before the first.
        started: unix time of the start of the process.
        round_seconds: how long the last pass took.
        condemned: devices that were taken out for good.
        returned: those of them that were seen again.
        messages_pending: messages that wait to be delivered.
        messages_failed: of these, messages whose last attempt failed.
        oldest_message: unix time of the oldest that waits; None where none does.
        recent: for the page, newest first.
    """

    mode: Literal["observe", "act"] = "observe"
    cluster: str = ""
    incidents: Mapping[str, int] = field(default_factory=dict)
    proposals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    acts: Mapping[tuple[str, str], int] = field(default_factory=dict)
    held: Mapping[str, int] = field(default_factory=dict)
    troubles: Mapping[str, int] = field(default_factory=dict)
    unsettled: int = 0
    budget_used: int = 0
    budget_limit: int = 0
    last_round: float | None = None
    started: float | None = None
    round_seconds: float | None = None
    condemned: int = 0
    returned: int = 0
    messages_pending: int = 0
    messages_failed: int = 0
    oldest_message: float | None = None
    recent: tuple[Recent, ...] = ()


class Exposition(Collector):
    """A collector that asks for the figures at every scrape, and counts what the inbox answered in this process."""

    def __init__(self, figures: Callable[[], Figures]) -> None:
        self._figures = figures
        self._answers = dict.fromkeys(_ANSWERS, 0)
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_answer(self, status: int) -> None:
        """Note an answer of the inbox."""
        self._answers[status] = self._answers.get(status, 0) + 1

    def text(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not read a database."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        now = self._figures()
        info = {"version": __version__, "mode": now.mode, "cluster": now.cluster}
        yield _gauge("info", "The controller: its version, whether it acts, and on which kind of cluster.", info, 1)
        yield from _counted(now)
        yield from _times(now)
        answers = CounterMetricFamily(_name("inbox_answers"), "Answers of the inbox since the start.", labels=("code",))
        for status, count in sorted(self._answers.items()):
            answers.add_metric((str(status),), count)
        yield answers


def _counted(now: Figures) -> Iterator[Metric]:
    incidents = CounterMetricFamily(
        _name("incidents"), "Incidents seen, by the status of the verdict.", labels=("status",)
    )
    for status in sorted({*_STATUSES, *now.incidents}):
        incidents.add_metric((status,), now.incidents.get(status, 0))
    yield incidents
    acts = CounterMetricFamily(_name("acts"), "Acts that have ended, by their outcome.", labels=("act", "outcome"))
    for act, outcome in sorted({*(("drain", one) for one in _OUTCOMES), *now.acts}):
        acts.add_metric((act, outcome), now.acts.get((act, outcome), 0))
    yield acts
    proposals = GaugeMetricFamily(_name("proposals"), "Proposals, by where they stand.", labels=("action", "status"))
    for (action, status), count in sorted(now.proposals.items()):
        proposals.add_metric((action, status), count)
    yield proposals
    held = GaugeMetricFamily(_name("held"), "Proposals that wait, by what holds them.", labels=("why",))
    for why in sorted({*_HOLDS, *now.held}):
        held.add_metric((why,), now.held.get(why, 0))
    yield held
    troubles = GaugeMetricFamily(_name("troubles"), "What is wrong now with what is watched.", labels=("kind",))
    for kind in sorted({*TROUBLES, "other", *now.troubles}):
        troubles.add_metric((kind,), now.troubles.get(kind, 0))
    yield troubles
    yield _gauge("unsettled", "Acts begun whose outcome is not known yet.", {}, now.unsettled)
    yield _gauge("budget_used", "Nodes acted upon within the last hour.", {}, now.budget_used)
    yield _gauge("budget_limit", "Nodes that may be acted upon within an hour.", {}, now.budget_limit)
    yield _gauge("condemned_devices", "Devices that were taken out for good.", {}, now.condemned)
    yield _gauge("returned_devices", "Condemned devices that were seen in service again.", {}, now.returned)
    yield _gauge("messages_pending", "Messages that wait to be delivered.", {}, now.messages_pending)
    yield _gauge("messages_failed", "Waiting messages whose last attempt failed.", {}, now.messages_failed)


def _times(now: Figures) -> Iterator[Metric]:
    """Points in time; what has not happened is absent, because 0 would be 1970."""
    known = (
        ("last_round_timestamp_seconds", "When the last pass came to its end.", now.last_round),
        ("start_timestamp_seconds", "When the controller started.", now.started),
        ("round_seconds", "How long the last pass took.", now.round_seconds),
        ("oldest_message_timestamp_seconds", "Since when the oldest waiting message waits.", now.oldest_message),
    )
    for name, text, value in known:
        if value is not None:
            yield _gauge(name, text, {}, value)


def _name(name: str) -> str:
    return f"bitwitness_fleet_{name}"


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    metric = GaugeMetricFamily(_name(name), text, labels=tuple(labels))
    metric.add_metric(tuple(labels.values()), value)
    return metric


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the controller does its rounds: the answer of `/healthz`."""

    ok: bool
    status: Literal["ok", "starting", "silent"]
    text: str
    age_seconds: float | None
    mode: str

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values."""
        age = None if self.age_seconds is None else round(self.age_seconds, 1)
        return {"status": self.status, "text": self.text, "age_seconds": age, "mode": self.mode, "version": __version__}


def health(figures: Figures, now: datetime, silent_after: timedelta = SILENT_AFTER) -> Health:
    """How the controller is. Before its first pass it has as long to end one; with no start known it is silent. Pure."""
    seen = pulse(figures.started, figures.last_round, now.timestamp(), silent_after)
    if seen.age is None:
        return Health(False, "silent", "no pass has come to its end yet", None, figures.mode)
    if seen.silent:
        text = f"the last pass ended {seen.age:.0f} s ago: more than {silent_after.total_seconds():.0f} s"
        if seen.first:
            text = f"started {seen.age:.0f} s ago, and no pass has come to its end"
        return Health(False, "silent", text, seen.age, figures.mode)
    if seen.first:
        return Health(True, "starting", "the first pass is under way", seen.age, figures.mode)
    return Health(True, "ok", f"the last pass ended {seen.age:.0f} s ago", seen.age, figures.mode)
