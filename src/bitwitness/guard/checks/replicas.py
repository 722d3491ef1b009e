"""*replicas*: do all ranks still hold the same parameters and optimizer state, bit for bit?

It sees what happened to weights and moments at the update or in memory since: there one replica differs from the others,
while a fault before the reduction makes all replicas equally wrong. Agreement is therefore not correctness.
"""

from __future__ import annotations

from bitwitness.errors import ConfigurationError
from bitwitness.guard.checks.base import Check
from bitwitness.guard.job import Outcome, Step
from bitwitness.guard.replication import compare


class Replicas(Check):
    """Fingerprints of parameters and optimizer state across the replicas, every `check_every` steps."""

    name = "replicas"

    def start(self) -> None:
        """Refuse to start from replicas that differ: that is configuration, and later it would look like a fault."""
        job = self.job
        differing = compare(job.channel, "replicas at the start", -1, job.replicated_tensors, job.seed)
        if differing:
            names = [name for seen in differing for name in seen.detail.get("differs", ())]
            ranks = [seen.rank for seen in differing if seen.detail]
            raise ConfigurationError(
                f"ranks {ranks} hold other values than the rest before the first step, e.g. of {names[0] if names else '?'}: "
                "load the same checkpoint and initialise from the same seed on every rank, before the guard is made"
            )

    def after_update(self, step: Step) -> Outcome | None:
        """Compare if due."""
        return self.look(step.index) if self.job.policy.replicas_due(step.index) else None

    def look(self, step: int) -> Outcome:
        """Compare now, after the update of `step`."""
        job = self.job
        differing = compare(job.channel, self.name, step, job.replicated_tensors, job.seed)
        return Outcome(self.name, "failed" if differing else "passed", tuple(differing))
