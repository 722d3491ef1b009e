"""What the checks are about: the job's model, optimizers and placement, and the step under way.

Checks are handed these and nothing else, so that what they know of each other can be read off one page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from bitwitness.evidence import CheckName, Observation
from bitwitness.guard.agreement import Channel
from bitwitness.guard.gradients import LocalGradients
from bitwitness.guard.workload import MicroBatch, Workload
from bitwitness.policy import Policy
from bitwitness.topology import Topology

RebuildBatch = Callable[[int, int, int], Any]
"""`rebuild_batch(step, rank, micro) -> batch`: the batch that this rank should have had, made anew from the data."""


@dataclass
class Job:
    """The guarded job, as the checks see it.

    Attributes:
        model: as the user gave it; `module`: what is inside DDP, or the same.
        optimizers: at least one.
        scaler: an enabled GradScaler, or None.
        policy, topology, channel: how to check, who stands where, how to talk.
        workload: how to run a micro-batch again; None where replays are off.
        gradients: the local gradient, before it is averaged.
        rebuild_batch: the user's, or None.
        seed: of the fingerprints, the same on every rank.
        device: where the model lives.
        can_rerun: whether the guard was given what it takes to run a micro-batch of training again.
        start_id: what names this start of the job, the same on every rank; see `start.start_id`.
    """

    model: nn.Module
    module: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: GradScaler | None
    policy: Policy
    topology: Topology
    channel: Channel
    workload: Workload
    gradients: LocalGradients
    rebuild_batch: RebuildBatch | None
    seed: int
    device: torch.device
    can_rerun: bool = False
    start_id: str = ""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.channel.rank

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The model, if it is DDP."""
        return self.model if isinstance(self.model, DistributedDataParallel) else None

    @property
    def broadcasts_buffers(self) -> bool:
        """Whether DDP makes the buffers of all ranks equal at the beginning of a forward."""
        return self.ddp is not None and bool(self.ddp.broadcast_buffers)

    def replicated_tensors(self) -> dict[str, Tensor]:
        """The tensors of which every rank holds a replica, by name: parameters and optimizer state, buffers by option.

        This is the seam for sharded models, where the ranks that hold a replica of a tensor are fewer than all.
        """
        found: dict[str, Tensor] = dict(self.module.named_parameters())
        if self.policy.replica_buffers:
            found |= {f"buffer {name}": buffer for name, buffer in self.module.named_buffers()}
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for index, optimizer in enumerate(self.optimizers):
            prefix = f"optimizer {index} " if len(self.optimizers) > 1 else ""
            numbers: dict[str, list[Any]] = defaultdict(list)
            for position, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                name = names.get(id(parameter), f"parameter {position}")
                for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                    if isinstance(value, int | float) or (isinstance(value, Tensor) and value.dim() == 0):
                        numbers[key].append(value)
                    elif isinstance(value, Tensor):
                        found[f"{prefix}{key} of {name}"] = value
            found |= {f"{prefix}{key} of each parameter": _together(values) for key, values in numbers.items()}
        return found


def _together(values: Sequence[Any]) -> Tensor:
    """Single numbers as one tensor: to look at hundreds of them one by one costs more than all the moments."""
    if all(isinstance(value, Tensor) for value in values) and len({(one.dtype, one.device) for one in values}) == 1:
        return torch.stack(list(values))
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


@dataclass
class Step:
    """The step under way: what was run, and what one check has found out that another needs.

    Attributes:
        index: from 0.
        micros: the micro-batches so far.
        audit: whether a replay is due, by schedule or because something forced it; known before the first forward.
        deterministic: whether its micro-batches run under deterministic algorithms.
        retried: whether this is the second attempt at this step.
        audited: index of the micro-batch that is audited, chosen by the seed before its forward.
        nonfinite: set by *numerics*: the ranks whose local gradient is not finite.
        uniform: set by *numerics*: whether every rank ran the same number of micro-batches.
        sum_may_overflow: set by *numerics*, see `verdict.History`.
        stop_requested: set by *numerics*: whether some rank was asked to stop (see `preemption`).
        gradient_norm: set by *numerics*: the norm of the reduced gradient as `clip_grad_norm_` computes it (scaled, if
            there is a scaler), so that clipping need not read the gradients again.
        loss, norm: set by *numerics* for the record: mean loss of this rank's micro-batches, and the norm without the scale, as
            numbers; None where they are not known.
    """

    index: int
    audit: bool
    audited: int
    deterministic: bool = False
    retried: bool = False
    micros: list[MicroBatch] = field(default_factory=list)
    nonfinite: tuple[int, ...] = ()
    uniform: bool = True
    sum_may_overflow: bool = False
    stop_requested: bool = False
    gradient_norm: Tensor | None = None
    loss: float | None = None
    norm: float | None = None


@dataclass(frozen=True)
class Outcome:
    """What a check has to say of a step, the same on every rank.

    `observations` are for the verdict; a check that is neither `passed` nor `failed` leaves a gap in the ledger, with
    its reason. `force_audit`: audit the next step, whatever the schedule says.
    """

    check: CheckName
    outcome: Literal["passed", "failed", "unverified"]
    observations: tuple[Observation, ...] = ()
    reason: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    force_audit: bool = False


def draw(seed: int, index: int) -> int:
    """A number that looks random, the same on every rank (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    mask = (1 << 64) - 1
    value = (seed + (index + 1) * 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
