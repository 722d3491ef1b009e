"""What a person should do next about the files of an incident: `bitwitness.advice`, asked for what lies in a directory."""

from __future__ import annotations

from pathlib import Path

from bitwitness.advice import Advice, Matter, advise
from bitwitness.runfiles import Incident

__all__ = ["Advice", "next_steps", "saved_micro_batches"]


def next_steps(incident: Incident) -> list[Advice]:
    """What to do, most urgent first.

    Raises:
        LookupError: it names a rank that its own world does not have.
    """
    verdict = incident.verdict
    incident.topology.nodes_of(verdict.ranks)
    return advise(
        Matter(
            id=incident.path.name,
            status=verdict.status,
            step=verdict.step,
            ranks=verdict.ranks,
            candidates=verdict.candidates,
            kind=verdict.kind or "",
            persistence=verdict.persistence,
            persistences=verdict.persistences,
            window=verdict.window,
            check=verdict.check or "",
            places=dict(enumerate(incident.topology.placements)),
            nodes=len(incident.topology.nodes),
            on_detection=str(incident.record.get("policy", {}).get("on_detection") or "raise"),
            saved=tuple(str(file.absolute()) for file in saved_micro_batches(incident)),
        )
    )


def saved_micro_batches(incident: Incident) -> list[Path]:
    """The files from which the owners' micro-batches can be run again."""
    return sorted(incident.path.glob("micro-batches-rank-*.pt"))
