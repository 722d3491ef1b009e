"""Whether a record is an incident on which anybody may act, wherever it came from.

`read_incident` reads whatever can be shown to a person. Here a machine that other people use may be taken out because of it: a
verdict that contradicts its own placement, a rank that is no number or a date next year is an error of somebody's, and an
error must name no node.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.evidence import Kind, Observation, Persistence, Verdict
from bitwitness.fleet.clusters.base import one_line
from bitwitness.topology import Topology, is_kubernetes_job

_LARGEST_NUMBER = 2**53
_EARLIEST = 2000
_AHEAD = timedelta(days=1)
_ID = re.compile(r"[0-9]{8}T[0-9]{6}Z-[0-9a-f]{6}")
_LONGEST_POD = 63 + 1 + 253
"""Characters of a namespace, a slash and the name of a pod (RFC 1123)."""
_JOB = re.compile(r"[a-z]{1,20}:[A-Za-z0-9_.+-]{1,80}")


def check_incident(record: Mapping[str, Any], now: datetime) -> None:
    """Check every part of an incident that anybody acts upon.

    Args:
        record: the content of incident.json.
        now: the time, by which one that lies ahead is told.

    Raises:
        ConfigurationError: a part is missing, of another kind, or contradicts another; says which.
    """
    try:
        _check(record, now)
    except ConfigurationError:
        raise
    except KeyError as error:
        raise ConfigurationError(f"it is no incident that can be acted upon: {error} is missing") from error
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigurationError(f"it is no incident that can be acted upon: {one_line(str(error), 400)}") from error


def _check(record: Mapping[str, Any], now: datetime) -> None:
    """Raise whatever fits where a part is missing or of another kind."""
    if not isinstance(record["id"], str) or not _ID.fullmatch(record["id"]):
        raise ValueError(f"{record['id']!r:.120} is no id of an incident, such as 20261129T093015Z-4be1d2")
    datetime.strptime(record["id"][:16], "%Y%m%dT%H%M%S%z")
    time = datetime.fromisoformat(record["time"])
    if time.tzinfo is None or time.year < _EARLIEST:
        raise ValueError(f"its time has no zone, or is in another age: {record['time']!r:.60}")
    if time - now > _AHEAD:
        raise ValueError(f"it is dated {record['time']:.60}, more than a day from now: whose clock is wrong?")
    job = record.get("scheduler_job")
    if job and not (isinstance(job, str) and _is_job(job)):
        raise ValueError(
            f"{job!r:.120} is no job of a scheduler, such as slurm:1234 or kubernetes:research/pytorchjob/train"
        )
    for seen in _list(record["observations"]):
        Observation.from_json(seen)
    placement = _list(record["placement"])
    for place in placement:
        _whole(place["rank"], place["slot"])
        _names(place["node"], place["device"], place.get("model", ""), place.get("software", ""))
        _names(place.get("pod", ""), most=_LONGEST_POD)
    _check_verdict(record["verdict"], Topology.from_json(placement))


def _check_verdict(record: Mapping[str, Any], topology: Topology) -> None:
    for name in ("ranks", "nodes", "devices", "candidates", "persistences"):
        _list(record.get(name, []))
    verdict = Verdict.from_json(record)
    _whole(verdict.step, *verdict.ranks, *verdict.candidates, *verdict.window)
    _names(*verdict.nodes, *verdict.devices)
    if not isinstance(verdict.reason, str) or len(verdict.reason) > 10_000:
        raise TypeError(f"its reason is no text, or too long: {verdict.reason!r:.80}")
    if verdict.status == "clean":
        raise ValueError("its verdict is clean: nothing has happened")
    if verdict.kind not in get_args(Kind) or any(one not in get_args(Persistence) for one in verdict.persistences):
        raise ValueError("its verdict is of an unknown kind or persistence")
    if len(set(verdict.ranks)) != len(verdict.ranks) or len(verdict.persistences) not in (0, len(verdict.ranks)):
        raise ValueError("its verdict names a rank twice, or does not say of each how it was")
    if verdict.status != "attributed" and (verdict.nodes or verdict.devices):
        raise ValueError("its verdict names nobody, and yet has nodes or devices")
    if not all(0 <= rank < topology.world_size for rank in (*verdict.ranks, *verdict.candidates)):
        raise ValueError("its verdict names a rank that the placement does not have")
    if set(verdict.nodes) != set(topology.nodes_of(verdict.ranks)):
        raise ValueError("its verdict names other nodes than those of its ranks")
    if set(verdict.devices) != {topology.device_of(rank) for rank in verdict.ranks}:
        raise ValueError("its verdict names other devices than those of its ranks")


def _is_job(job: str) -> bool:
    return is_kubernetes_job(job) if job.startswith("kubernetes:") else bool(_JOB.fullmatch(job))


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"no list: {value!r:.80}")
    return value


def _whole(*values: Any) -> None:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) > _LARGEST_NUMBER:
            raise TypeError("no whole number, or one too large")


def _names(*values: Any, most: int = 300) -> None:
    for value in values:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise TypeError(f"no name: {value!r:.80}")
