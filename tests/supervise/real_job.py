"""A real job for `bitwitness run`: a tiny model under a guard, with checkpoints. `real_job.py RUN_DIR OUT [PAUSE]`.

Each rank leaves a digest of what it ends with as `OUT/rank-0`; with PAUSE a step takes at least so many seconds. Each start leaves
`OUT/training-PID` when it begins to train.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, Policy

if TYPE_CHECKING:
    from tests.guard.harness import Rank, Seen

STEPS, EVERY = 12, 2


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Noise from dropout and from the batch."""
    loss: Tensor = nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True))
    return loss


def main(run_dir: str, out: str, pause: str = "0") -> None:
    """Train from wherever it can go on."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.2), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    policy = Policy.every_step(checkpoint_every=EVERY, timeout=20)
    guard = Guard(DistributedDataParallel(module), optimizer, loss_of, run_dir=run_dir, policy=policy)
    torch.manual_seed(100 + rank)
    start = guard.resume()
    (Path(out) / f"training-{os.getpid()}").touch()
    for step in range(start, STEPS):
        guard.forward_backward(torch.randn(4, 8))
        guard.step(max_grad_norm=1.0)
        time.sleep(float(pause))
        if (step + 1) % EVERY == 0 or guard.should_stop:
            guard.save_checkpoint()
        if guard.should_stop:
            return
    guard.close()
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in module.parameters())).hexdigest()
    final = Path(out) / f"rank-{rank}"
    final.with_suffix(f".{os.getpid()}").write_text(digest)
    final.with_suffix(f".{os.getpid()}").replace(final)


def alone(place: Rank, out: str) -> Seen:
    """The same as a scenario of the tests of the guard: nobody supervises it, and torch is imported already."""
    main(str(place.run_dir), out)
    return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
