"""Writing an incident so that it is durable before any rank raises.

One rank that is not blamed writes it; the owners of what went wrong add what is needed to reproduce it. A disk that
refuses must not hide the corruption: then the incident has no path, and the exception says so.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bitwitness._version import __version__
from bitwitness.errors import RunFilesError
from bitwitness.evidence import NONFINITE, History, Observation, Verdict
from bitwitness.guard import start
from bitwitness.guard.job import Job, Step
from bitwitness.runfiles import RunFiles, new_incident_id, utc_now, write_bytes
from bitwitness.topology import scheduler_job

logger = logging.getLogger(__name__)

_WEIGHTS_SAVED = 256 << 20
"""Bytes of parameters up to which they are saved beside the micro-batches; larger ones come from a checkpoint."""

_OWNERS_SAVED = 2
"""How many owners save their micro-batches: with a fault of a node there may be many, and one or two show it."""


def write_incident(
    job: Job,
    files: RunFiles,
    step: Step | None,
    verdict: Verdict,
    observations: Sequence[Observation],
    history: History,
) -> tuple[Path | None, str]:
    """Write an incident, on all ranks together; its path, or None and why there is none. `step`: what can be saved of it."""
    channel = job.channel
    writer = next((rank for rank in range(channel.world_size) if rank not in verdict.ranks), 0)
    incident_id = channel.gather("incident id", new_incident_id)[writer]
    owners = _owners(verdict, observations) if step is not None else ()

    def save() -> str:
        if step is None or job.rank not in owners:
            return ""
        try:
            _save_reproduction(job, files.stage_incident(incident_id), step)
        except (RunFilesError, OSError, RuntimeError) as error:
            return f"rank {job.rank} could not save its micro-batches: {error}"
        return ""

    notes = [note for note in channel.gather("incident evidence", save) if note]

    def commit() -> str:
        if job.rank != writer:
            return ""
        record = _record(job, incident_id, verdict, observations, history, notes)
        try:
            files.commit_incident(incident_id, record)
        except (RunFilesError, OSError, ValueError) as error:
            return f"the incident could not be written: {error}"
        return ""

    problem = channel.gather("incident", commit)[writer]
    if problem:
        logger.error("%s", problem)
        return None, problem
    return files.path / "incidents" / incident_id, ""


def _owners(verdict: Verdict, observations: Sequence[Observation]) -> tuple[int, ...]:
    """Whose micro-batches are worth keeping: those on which somebody was wrong, the named rank's own first."""
    groups: dict[int, set[str]] = {}
    for seen in observations:
        if seen.owner is not None:
            groups.setdefault(seen.owner, set()).update(seen.runs)
    wrong = [owner for owner, values in sorted(groups.items()) if len(values) > 1 or NONFINITE in values]
    return tuple(sorted(wrong, key=lambda owner: owner not in verdict.ranks)[:_OWNERS_SAVED])


def _save_reproduction(job: Job, folder: Path, step: Step) -> None:
    """What is needed to run this rank's micro-batches again: inputs, random state, buffers, what came out."""
    content = io.BytesIO()
    micros = [
        {
            **micro.state(True, ship_all_buffers=True),
            "random": {name: getattr(micro.random, name) for name in micro.random.__slots__},
            "ambient": micro.ambient.autocast,
            "loss": micro.loss,
            "gradient_digests": micro.gradients,
        }
        for micro in step.micros
    ]
    record = {"rank": job.rank, "step": step.index, "seed": job.seed, "micro_batches": micros}
    parameters = dict(job.module.named_parameters())
    if sum(one.numel() * one.element_size() for one in parameters.values()) <= _WEIGHTS_SAVED:
        record["parameters"] = {name: one.detach() for name, one in parameters.items()}
    torch.save(record, content)
    write_bytes(folder / f"micro-batches-rank-{job.rank:05d}.pt", content.getvalue())


def _record(
    job: Job,
    incident_id: str,
    verdict: Verdict,
    observations: Sequence[Observation],
    history: History,
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "id": incident_id,
        "time": utc_now(),
        "bitwitness": __version__,
        "verdict": verdict.to_json(),
        "observations": [seen.to_json() for seen in observations],
        "history": history.to_json(),  # with these three the verdict can be decided again
        "placement": job.topology.to_json(),
        "policy": job.policy.to_json(),
        "scheduler_job": scheduler_job(os.environ),
        "start_id": job.start_id,
        **start.supervision(),
        "notes": list(notes),
    }
