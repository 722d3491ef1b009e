"""Jobs of several ranks that are hit, as scenarios for one launch: what a test of one process cannot show."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import CorruptionDetected, Guard, Policy
from bitwitness.faults import Injector
from tests.guard.harness import Rank, Seen

STEPS = 4


def compute_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
    return loss


def train(place: Rank, given: tuple[str, bool]) -> Seen:
    """Plain or guarded, hit by these faults; what landed, what was said, and the weights."""
    faults, guarded = given
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    seen: Seen = {"verdict": None}
    with Injector(faults, model, optimizer, node=f"n{place.rank}") as injector:
        guard = None
        if guarded:
            guard = Guard(model, optimizer, compute_loss, run_dir=place.run_dir, policy=Policy.every_step(timeout=30.0))
        try:
            for step in range(STEPS):
                batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
                if guard is not None:
                    guard.forward_backward(batch)
                    guard.step()
                else:
                    compute_loss(model, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except CorruptionDetected as error:
            seen["verdict"] = error.verdict.to_json()
        finally:
            if guard is not None:
                guard.close()
    seen["strikes"] = [one.to_json() for one in injector.strikes]
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    seen["weights"] = hashlib.sha256(weights).hexdigest()
    return seen
