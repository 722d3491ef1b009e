"""Reads what scontrol and sinfo print. The same keys stand in 22.05 and in 24.11; their order and their lines do not.

What is not understood is an error that says so: a state that was guessed could take a node out of service.
"""

from __future__ import annotations

import re

from bitwitness.errors import ClusterError
from bitwitness.fleet.clusters.base import Census, JobState, NodeState, one_line
from bitwitness.fleet.clusters.slurm_arrays import Names, chosen
from bitwitness.fleet.clusters.slurm_names import expand
from bitwitness.fleet.clusters.slurm_states import (
    PERSON_HOLDS,
    awaited,
    away,
    flags_of,
    moment,
    phase_of,
    service_of,
    split_reason,
)

_ABSENT = {"", "(null)", "None", "N/A", "n/a"}
_EXIT = re.compile(r"([0-9]{1,5}):([0-9]{1,5})")


def node_state(text: str, node: str, jobs: tuple[str, ...] = ()) -> NodeState:
    """A node, from `scontrol show node NODE`.

    Raises:
        ClusterError: it is not that.
    """
    fields = _fields(text)
    if fields.get("NodeName") != node or not fields.get("State"):
        raise ClusterError(f"not understood as the state of node {node}: {one_line(text)!r}")
    flags = flags_of(fields["State"])
    service = service_of(flags)
    # From 24.11 on the reason of a drain that was taken back stays until something else overwrites it.
    reason, by = ("", "") if service == "in" else split_reason(_line(text, "Reason"))
    return NodeState(
        node=node,
        service=service,
        raw=fields["State"],
        reason=reason,
        reason_by=by,
        booted=moment(fields.get("BootTime", "")),
        instance=_known(fields.get("InstanceId", "")),
        jobs=jobs,
        awaits=awaited(flags, service, reason),
    )


def job_state(text: str, job: str) -> JobState:
    """A job, from `scontrol show job JOB`.

    Raises:
        ClusterError: it is not that.
        ConfigurationError: it is an array, or a job of several parts.
    """
    records = _records(text)
    place = chosen(job, [_names(one) for one in records])
    fields = {} if place is None else records[place]
    word = fields.get("JobState", "")
    phase = phase_of([word])
    if not fields.get("JobId") or phase is None:
        raise ClusterError(f"not understood as the state of job {job}: {one_line(text)!r}")
    why = _known(fields.get("Reason", ""))
    restarts = fields.get("Restarts", "0")
    return JobState(
        job=job,
        state=phase,
        raw=f"{word} ({why})" if why else word,
        exit_code=_exit_code(fields.get("ExitCode", "")) if phase == "ended" else None,
        restarts=int(restarts) if restarts.isascii() and restarts.isdigit() else 0,
        excluded=expand(fields.get("ExcNodeList", "")),
        nodes=expand(fields.get("NodeList", "")),
        requeueable=fields.get("Requeue", "") != "0",
        held=why in PERSON_HOLDS,
    )


def _records(text: str) -> list[dict[str, str]]:
    """The fields of each job: a line that is not indented begins one. The name of a job may say anything."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("JobId="):
            found.append([line.partition(" JobName=")[0]])
        elif found:
            found[-1].append(line)
    return [_fields("\n".join(lines)) for lines in found]


def _names(fields: dict[str, str]) -> Names:
    keys = ("ArrayJobId", "ArrayTaskId", "HetJobId")
    array, task, parts = (_known(fields.get(key, "")) for key in keys)
    return Names(array, task, parts)


def census(text: str) -> Census:
    """How many nodes there are, from lines of a name and a state; a node in several partitions is one.

    Raises:
        ClusterError: it is not that, or there is no node.
    """
    states: dict[str, frozenset[str]] = {}
    for line in text.splitlines():
        words = line.split()
        if words and len(words) != 2:
            raise ClusterError(f"not understood as a node and its state: {one_line(line)!r}")
        if words:
            states[words[0]] = flags_of(words[1])
    there = [flags for flags in states.values() if "FUTURE" not in flags]
    if not there:
        raise ClusterError("the cluster shows no node")
    return Census(total=len(there), out=sum(away(flags) for flags in there))


def _fields(text: str) -> dict[str, str]:
    """`Key=value` pairs by key; of several with one key the first. What stands behind `Reason=` of a node is free text."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip().startswith(("Reason=", "Comment=", "Extra=")):
            continue
        for word in line.split():
            key, equals, value = word.partition("=")
            if equals:
                fields.setdefault(key, value)
    return fields


def _line(text: str, key: str) -> str:
    """What stands behind a key that has a line of its own."""
    for line in text.splitlines():
        if line.strip().startswith(f"{key}="):
            return _known(line.strip().removeprefix(f"{key}="))
    return ""


def _known(value: str) -> str:
    return "" if value.strip() in _ABSENT else value


def _exit_code(text: str) -> int | None:
    """A code as a shell would say it, from `160:0` (ended) or `0:9` (killed by a signal)."""
    found = _EXIT.fullmatch(text)
    if found is None:
        return None
    code, killed = int(found[1]), int(found[2])
    return 128 + killed if killed and not code else code
