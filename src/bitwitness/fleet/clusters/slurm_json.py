"""Reads what slurmrestd answers, from v0.0.38 (Slurm 22.05) to v0.0.42 (24.11), and scontrol's own `--json` of the latter.

In v0.0.38 a state is one word with its flags beside it, times and codes are plain numbers; later a state is a list, and
numbers are objects that may say that they are not set. An answer that lacks what it must have is an error, never a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from bitwitness.errors import ClusterError
from bitwitness.fleet.clock import stamp
from bitwitness.fleet.clusters.base import Census, JobState, NodeState, one_line
from bitwitness.fleet.clusters.slurm_arrays import Names, chosen
from bitwitness.fleet.clusters.slurm_names import expand
from bitwitness.fleet.clusters.slurm_states import PERSON_HOLDS, awaited, away, flags_of, phase_of, service_of

NO_SUCH_NODE, NO_SUCH_JOB = 2018, 2017
"""Numbers of Slurm's errors."""


def node_state(answer: Any, node: str) -> NodeState:
    """A node, from the answer to `GET node/NODE`.

    Raises:
        ClusterError: it is not that.
    """
    record = _only(answer, "nodes", "name", node)
    words = _state_words(record)
    flags = flags_of(words)
    service = service_of(flags)
    # From 24.11 on the reason of a drain that was taken back stays.
    reason = "" if service == "in" else _text(record.get("reason"))
    return NodeState(
        node=node,
        service=service,
        raw="+".join(word.upper() for word in words),
        reason=reason,
        reason_by="" if service == "in" else _text(record.get("reason_set_by_user")),
        booted=_moment(record.get("boot_time")),
        instance=_text(record.get("instance_id")),
        awaits=awaited(flags, service, reason),
    )


def job_state(answer: Any, job: str) -> JobState:
    """A job, from the answer to `GET job/JOB`; of a task of an array to that for the array, in which it may be `absent`.

    Raises:
        ClusterError: it is not that.
        ConfigurationError: it is an array, or a job of several parts.
    """
    records = _records(answer, "jobs")
    if not records:
        raise ClusterError(f"not understood as the state of job {job}: {one_line(repr(answer))}")
    place = chosen(job, [_names(one) for one in records])
    if place is None:
        return JobState(job, "absent")
    record = records[place]
    words = _words(record.get("job_state"))
    phase = phase_of(words)
    if phase is None:
        raise ClusterError(f"not understood as the state of job {job}: {one_line(repr(words))}")
    why = _text(record.get("state_description")) or _text(record.get("state_reason"))
    return JobState(
        job=job,
        state=phase,
        raw="+".join(words) + (f" ({why})" if why not in {"", "None"} else ""),
        exit_code=_exit_code(record.get("exit_code")) if phase == "ended" else None,
        restarts=_number(record.get("restart_cnt")) or 0,
        excluded=expand(_text(record.get("excluded_nodes"))),
        nodes=expand(_text(record.get("nodes"))),
        requeueable=record.get("requeue") is not False,
        held=why in PERSON_HOLDS,
    )


def _names(record: Mapping[str, Any]) -> Names:
    """0 stands for no array and no parts; tasks that wait together have a text instead of a number."""
    array, parts = (_number(record.get(key)) for key in ("array_job_id", "het_job_id"))
    task = _number(record.get("array_task_id"))
    several = _text(record.get("array_task_string"))
    return Names(str(array or ""), several if several or task is None else str(task), str(parts or ""))


def census(answer: Any) -> Census:
    """How many nodes there are, from the answer to `GET nodes`.

    Raises:
        ClusterError: it is not that, or there is no node.
    """
    states = [flags_of(_state_words(record)) for record in _records(answer, "nodes")]
    there = [flags for flags in states if "FUTURE" not in flags]
    if not there:
        raise ClusterError("the cluster shows no node")
    return Census(total=len(there), out=sum(away(flags) for flags in there))


def names(answer: Any) -> tuple[str, ...]:
    """The names of all nodes, from the same.

    Raises:
        ClusterError: it is not that.
    """
    return tuple(name for record in _records(answer, "nodes") if (name := _text(record.get("name"))))


def errors_of(answer: Any) -> list[tuple[int | None, str]]:
    """The errors that an answer holds: number and words."""
    found = answer.get("errors") if isinstance(answer, Mapping) else None
    errors: list[tuple[int | None, str]] = []
    for one in found if isinstance(found, list) else ():
        if isinstance(one, Mapping):
            number = _number(one.get("error_number", one.get("errno")))
            words = [_text(one.get(key)) for key in ("description", "error")]
            errors.append((number, one_line(": ".join(word for word in words if word and word != "No error"))))
        else:
            errors.append((None, one_line(str(one))))
    return errors


def _records(answer: Any, key: str) -> list[Mapping[str, Any]]:
    records = answer.get(key) if isinstance(answer, Mapping) else None
    if not isinstance(records, list) or not all(isinstance(record, Mapping) for record in records):
        raise ClusterError(f"an answer without {key}: {one_line(repr(answer))}")
    return records


def _only(answer: Any, key: str, name: str, wanted: str) -> Mapping[str, Any]:
    for record in _records(answer, key):
        if record.get(name) == wanted:
            return record
    raise ClusterError(f"an answer about something else than {wanted}: {one_line(repr(answer))}")


def _words(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [word for word in value if isinstance(word, str)] if isinstance(value, list) else []


def _state_words(record: Mapping[str, Any]) -> list[str]:
    words = _words(record.get("state")) + _words(record.get("state_flags"))
    if not words:
        raise ClusterError(f"a node without a state: {one_line(repr(record))}")
    return words


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> int | None:
    """A number, plain or as `{"set": true, "infinite": false, "number": 5}`."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set") is True and value.get("infinite") is not True else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _moment(value: Any) -> str:
    seconds = _number(value)
    try:
        return stamp(datetime.fromtimestamp(seconds, UTC)) if seconds else ""
    except (ValueError, OverflowError, OSError):
        return ""


def _exit_code(value: Any) -> int | None:
    """A code as a shell would say it, from a status as wait() gives it or from an object with code and signal."""
    if isinstance(value, Mapping):
        killed = value.get("signal")
        killed = killed.get("id", killed.get("signal_id")) if isinstance(killed, Mapping) else None
        code, number = _number(value.get("return_code")), _number(killed)
        return 128 + number if number and not code else code
    status = _number(value)
    if status is None or status < 0:
        return None
    return 128 + (status & 0x7F) if status & 0x7F else status >> 8
