"""What the console shows to Prometheus: the runs that go on, as its database holds them at that moment.

Bounded, because a scrape comes every few seconds and for ever: runs that have ended are only counted, and of the others at most
two hundred are told one by one. What is not known is absent and never 0, so that no alert takes it for health; an incident that
is attributed to nobody has a series of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime

from fastapi import APIRouter
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from bitwitness._version import __version__
from bitwitness.store.database import Database
from bitwitness.store.queries.running import GOING_ON, Going, Running, running
from bitwitness.web.context import Data

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MOST = 200
"""Runs that are told of one by one."""
_STATUSES = ("attributed", "unattributed")
_OF_RUN = ("key", "run")
Reads = Callable[[Going], float | None]

router = APIRouter(include_in_schema=False)


@router.get("/metrics")
def metrics(data: Data) -> Response:
    """Everything that is measured, in Prometheus' text format."""
    return Response(exposition(data), media_type=CONTENT_TYPE)


def exposition(database: Database) -> str:
    """The metrics of this moment, in Prometheus' text format.

    Raises:
        StoreError: the database does not answer.
    """
    registry = CollectorRegistry()
    registry.register(_Shown(running(database, most=MOST)))
    return generate_latest(registry).decode()


class _Shown(Collector):
    """One look at the database."""

    def __init__(self, now: Running) -> None:
        self._now = now

    def describe(self) -> list[Metric]:
        """Nothing: the names are those of `collect`."""
        return []

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        now = self._now
        yield _gauge("console_info", "The console: its version.", ("version",), [((__version__,), 1)])
        yield _gauge("console_runs", "Runs, by what they do now.", ("state",), _counts(now.states, now.states))
        text = "Incidents that nobody has judged, and after which no person has acted, over all runs."
        yield _gauge("console_open_incidents", text, ("status",), _counts(_STATUSES, now.open))
        yield _gauge("console_problems", "Files that could not be read, wholly or in part.", (), [((), now.problems)])
        text = "Runs that go on and are not told of one by one, because there are too many."
        yield _gauge("console_runs_left_out", text, (), [((), now.left_out)])
        yield from _of_runs(now.runs)
        yield from _of_checks(now.runs)


def _counts(names: Iterable[str], found: Mapping[str, int]) -> list[tuple[tuple[str], int]]:
    return [((name,), found.get(name, 0)) for name in names]


def _of_runs(runs: Sequence[Going]) -> Iterator[Metric]:
    text = "1 for what the run does now, 0 for what else it could."
    states = [((*_label(one), state), int(one.row.state == state)) for one in runs for state in GOING_ON]
    yield _gauge("run_state", text, (*_OF_RUN, "state"), states)
    yield _each("run_step", "The last step on record.", runs, lambda one: _step(one.row.step))
    text = "The step of the newest checkpoint that is verified, and that no incident casts doubt on."
    yield _each("run_checkpoint_step", text, runs, lambda one: _step(one.row.checkpoint))
    text = "When something of the run was last written, by its writers' clocks."
    yield _each("run_written_timestamp_seconds", text, runs, lambda one: _unix(one.row.seen))
    yield _each("run_ranks", "Ranks of the run.", runs, lambda one: one.row.world_size or None)
    text = "Share of the wall time of training that all checks took."
    yield _each("run_checks_time_ratio", text, runs, lambda one: one.row.cost)
    text = "Loss of rank 0, mean over the newest steps on record."
    yield _each("run_loss", text, runs, lambda one: one.newest.loss if one.newest else None)
    text = "Norm of the gradient, mean over the newest steps on record."
    yield _each("run_gradient_norm", text, runs, lambda one: one.newest.norm if one.newest else None)
    text = "Wall time of a step, mean over the newest steps on record."
    yield _each("run_step_seconds", text, runs, lambda one: one.newest.seconds if one.newest else None)
    text = "Files of the run that could not be read, wholly or in part."
    yield _each("run_problems", text, runs, lambda one: one.row.problems)
    labels = (*_OF_RUN, "status")
    opened = [((*_label(one), status), one.open.get(status, 0)) for one in runs for status in _STATUSES]
    text = "Incidents of the run that nobody has judged, and after which no person has acted."
    yield _gauge("run_open_incidents", text, labels, opened)
    ever = [((*_label(one), status), getattr(one.row, status)) for one in runs for status in _STATUSES]
    yield _gauge("run_incidents", "Incidents of the run, drills and false alarms left out.", labels, ever)


def _of_checks(runs: Sequence[Going]) -> Iterator[Metric]:
    labels = (*_OF_RUN, "check")
    covered = [(one, each) for one in runs for each in one.row.coverage]
    text = "The last step at which the check had passed on every rank."
    last = [((*_label(one), each.check), each.last) for one, each in covered if each.last >= 0]
    yield _gauge("run_verified_step", text, labels, last)
    every = [((*_label(one), check), steps) for one in runs for check, steps in one.every.items()]
    yield _gauge("run_check_interval_steps", "Steps between two of this check, by the policy.", labels, every)
    shares = [((*_label(one), check), share) for one in runs for check, share in one.costs.items()]
    yield _gauge("run_check_time_ratio", "Share of the wall time of training that the check took.", labels, shares)
    text = "Steps of single ranks that are on record, by what the check came to."
    outcomes = [
        ((*_label(one), each.check, outcome), getattr(each, outcome))
        for one, each in covered
        for outcome in ("passed", "unverified", "failed")
    ]
    yield _gauge("run_rank_steps", text, (*labels, "outcome"), outcomes)
    text = "Steps of single ranks that the run has made: what is in no outcome was not verified."
    yield _gauge("run_rank_steps_made", text, labels, [((*_label(one), each.check), each.all) for one, each in covered])


def _each(name: str, text: str, runs: Sequence[Going], value: Reads) -> Metric:
    found = [(_label(one), value(one)) for one in runs]
    return _gauge(name, text, _OF_RUN, [(labels, number) for labels, number in found if number is not None])


def _label(one: Going) -> tuple[str, str]:
    """Two runs may have directories of one name: the key tells them apart."""
    return str(one.row.key), one.row.name


def _step(number: int) -> int | None:
    return number if number >= 0 else None


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _gauge(name: str, text: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    metric = GaugeMetricFamily(f"bitwitness_{name}", text, labels=labels)
    for values, number in samples:
        metric.add_metric(values, number)
    return metric
