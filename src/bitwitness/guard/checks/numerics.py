"""*numerics*: is every number finite before the all-reduce and after it, and did the reduction end alike everywhere?

Before the all-reduce each rank still holds its own gradient, so whoever had the first NaN is known; after it, NaN is
everywhere. Non-finite numbers name nobody by themselves: they force a replay, which tells a device from software or data.
The gradient norm is computed here and used again for clipping, so it costs nothing; thresholds on it are useless (healthy
training exceeds any that would catch a finite fault; AWS, 2026) and there are none.
"""

from __future__ import annotations

import hashlib
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bitwitness import preemption
from bitwitness.errors import CheckFailed
from bitwitness.evidence import NONFINITE, Observation
from bitwitness.fingerprint import combine, fingerprint_tensors
from bitwitness.guard import metrics
from bitwitness.guard.checks.base import Check
from bitwitness.guard.gradients import named_gradients
from bitwitness.guard.job import Job, Outcome, Step
from bitwitness.guard.workload import largest_magnitude
from bitwitness.verdict import ZERO

_INFINITY = struct.unpack("<q", struct.pack("<d", float("inf")))[0]
_WIDTH = 13
_OVERFLOWS, _WITHIN = 3, 100
"""A rank that alone overflows so many times within so many steps has the next step audited."""


class Numerics(Check):
    """One small reduction a step: largest local gradient, norm and fingerprint of the reduced gradient, who is where."""

    name = "numerics"

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._digest = torch.zeros(3, dtype=torch.int64)
        self._largest = torch.zeros(())
        self._norm = torch.zeros(())
        self._lone_overflows: deque[tuple[int, int]] = deque()

    def before_update(self, step: Step) -> Outcome | None:
        """Measure, agree, and only if something is off ask every rank for what it saw."""
        found = self.job.channel.max(self.name, _WIDTH, lambda: self._measure(step), metrics.OWN).tolist()
        largest, norm = found[:2]
        step.loss, step.norm = metrics.numbers(norm, *found[_WIDTH:])
        agree = found[2:5] == [~value for value in found[5:8]]
        step.uniform = found[8] == ~found[9]
        step.stop_requested = bool(found[12])
        if found[10] != ~found[11]:
            raise CheckFailed(
                f"ranks disagree on the step: {~found[11]} on some, {found[10]} on others. Every rank must call the guard "
                "for the same steps: look at a loop that ends early or skips a batch on some rank"
            )
        if largest == 0:
            return Outcome(self.name, "unverified", reason="every local gradient is zero on every rank")
        if 0 < norm < _INFINITY and largest < _INFINITY and agree:
            return Outcome(self.name, "passed")
        seen = self.job.channel.gather(self.name, self._details)
        step.sum_may_overflow = self._sum_may_overflow(max(one["largest"] for one in seen))
        return self._conclude(step, seen)

    def _measure(self, step: Step) -> Tensor:
        """Everything on the device: int64 `[_WIDTH]`, then what is for the record.

        A value beside its complement gives maximum and minimum.
        """
        gradients = list(named_gradients(self.job.workload).values())
        self._largest = _inf_if_nan(self.job.gradients.take_largest())
        step.gradient_norm = self._norm = torch.nn.utils.get_total_norm(gradients)
        norm = _inf_if_nan(self._norm).to(self._largest.device)
        self._digest = combine(fingerprint_tensors(gradients, self.job.seed), self.job.seed)
        bits = torch.stack([self._largest, norm]).view(torch.int64)
        count = len(step.micros)
        host = torch.tensor([count, ~count, step.index, ~step.index, preemption.requested()], device=bits.device)
        digest = self._digest.to(bits.device)
        return torch.cat([bits, digest, ~digest, host, metrics.measured(self.job, step, bits.device)])

    def _details(self) -> dict[str, Any]:
        """What this rank saw, exactly: only asked for when something is off."""
        gradients = [gradient for gradient in named_gradients(self.job.workload).values() if gradient.numel()]
        reduced = max((float(_inf_if_nan(largest_magnitude(one))) for one in gradients), default=0.0)
        digest = hashlib.blake2b(self._digest.cpu().numpy().tobytes(), digest_size=12).hexdigest()
        return {"largest": float(self._largest), "norm": float(self._norm), "reduced": reduced, "digest": digest}

    def _conclude(self, step: Step, seen: Sequence[dict[str, Any]]) -> Outcome:
        overflowed = tuple(rank for rank, one in enumerate(seen) if one["largest"] == float("inf"))
        if self.job.scaler is not None and all(one["reduced"] == float("inf") for one in seen):
            force = self._note_lone_overflow(step.index, overflowed)
            reason = "gradients overflowed; the GradScaler skips this step"
            return Outcome(self.name, "unverified", reason=reason, force_audit=force)
        if overflowed:
            step.nonfinite = overflowed
            return Outcome(self.name, "failed", tuple(self._local(step, rank, seen[rank]) for rank in overflowed))
        values = [one["digest"] if one["reduced"] < float("inf") else NONFINITE for one in seen]
        if not any(one["reduced"] for one in seen) and self._cannot_vanish(max(one["largest"] for one in seen)):
            values = [ZERO] * len(values)
        if len(set(values)) == 1 and values[0] not in (NONFINITE, ZERO):
            return Outcome(self.name, "passed", reason="the gradient's norm over- or underflows its dtype")
        observations = tuple(
            Observation(self.name, step.index, rank, "reduced", value=value, detail=_numbers(seen[rank]))
            for rank, value in enumerate(values)
        )
        return Outcome(self.name, "failed", observations)

    def _local(self, step: Step, rank: int, seen: dict[str, Any]) -> Observation:
        return Observation(self.name, step.index, rank, "local", value=NONFINITE, detail=_numbers(seen))

    def _note_lone_overflow(self, step: int, ranks: Sequence[int]) -> bool:
        """Whether some rank has now overflowed alone too often to be an accident of the loss scale."""
        if len(ranks) != 1 or self.job.channel.world_size == 1:
            return False
        self._lone_overflows.append((step, ranks[0]))
        while self._lone_overflows[0][0] <= step - _WITHIN:
            self._lone_overflows.popleft()
        if sum(rank == ranks[0] for _, rank in self._lone_overflows) < _OVERFLOWS:
            return False
        self._lone_overflows.clear()
        return True

    def _sum_may_overflow(self, largest: float) -> bool:
        # A user's own hook may compress to fp16.
        formats = [*self._formats(), *([torch.finfo(torch.float16)] if self.job.gradients.inner_hook else [])]
        return largest * self.job.channel.world_size >= min(info.max for info in formats)

    def _cannot_vanish(self, largest: float) -> bool:
        """Whether some local gradient is too large for a correct average to be zero by rounding alone.

        A user's own hook may compress to nothing, and one process has nothing to reduce.
        """
        if self.job.gradients.inner_hook or self.job.channel.world_size == 1:
            return False
        return largest / self.job.channel.world_size > 2 * max(info.tiny for info in self._formats())

    def _formats(self) -> list[torch.finfo]:
        dtypes = {parameter.dtype for parameter in self.job.workload.trained.values()} or {torch.float32}
        return [torch.finfo(dtype) for dtype in dtypes]


def _inf_if_nan(value: Tensor) -> Tensor:
    """In double precision, so that its bits, read as an integer, are ordered as the values are."""
    return torch.nan_to_num(value.double(), nan=float("inf"), posinf=float("inf"))


def _numbers(seen: dict[str, Any]) -> dict[str, Any]:
    # As text, because JSON has no number for Inf.
    return {"largest_local": str(seen["largest"]), "norm_reduced": str(seen["norm"])}
