"""What slices beside a job cost: its step time with and without a request in force, in turns, in one run.

    python -m benchmarks.ripple [--budget 0.005] [--slice-ms 3] [--ranks 3] [--width 512] [--seconds 8] [--rounds 5] [--json]

Ranks are gloo processes on this machine, each its own node. The request is put in force and withdrawn again, over and over, so that
whatever else the machine does falls on both alike. What is promised is the budget; what is seen beyond it is what the job loses to
caches that slices have filled, and to ranks that wait for one another. On a machine that is busy with other things the processor time
says more than the time of a step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, Policy
from bitwitness.guard import between
from bitwitness.runfiles import new_incident_id, read_journal
from bitwitness.runfiles.ripple import Request, RippleFiles
from bitwitness.scan.items import SUITE_VERSION


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Any loss will do."""
    loss: Tensor = model(batch).square().mean()
    return loss


def steps(guard: Guard, batch: Tensor, count: int) -> list[float]:
    """Seconds of each of so many steps."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        guard.forward_backward(batch)
        guard.step()
        taken.append(time.perf_counter() - began)
    return taken


def worker(rank: int, given: argparse.Namespace, folder: str, port: int) -> None:
    """One rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BITWITNESS_NODE": f"n{rank}"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=given.ranks)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(given.width, given.width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    run_dir = Path(folder, "run")
    guard = Guard(DistributedDataParallel(model), optimizer, loss_of, run_dir=run_dir, policy=Policy(audit="off"))
    batch = torch.randn(given.batch, given.width)
    setattr(between, "LOOK_SECONDS", 0.0)  # noqa: B010  (turns are shorter than the time between two looks)
    files = RippleFiles(run_dir)
    request = Request(
        new_incident_id(), 0, 1, time.time() + 1e6, given.slice_ms, given.budget, ("ops",), 1, SUITE_VERSION
    )
    warm = torch.tensor(statistics.median(steps(guard, batch, 30)))
    dist.broadcast(warm, 0)
    count = max(10, int(given.seconds / warm.item()))
    taken: dict[str, list[list[float]]] = {"without": [], "with": []}
    processor: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(2 * given.rounds):
        name = ("without", "with")[turn % 2]
        if rank == 0:
            files.write(request if name == "with" else request.withdrawn())
        dist.barrier()
        for _ in range(3):
            time.sleep(0.1)
            steps(guard, batch, 1)
        began = time.process_time()
        taken[name].append(steps(guard, batch, count))
        processor[name].append(time.process_time() - began)
    guard.close()
    if rank == 0:
        Path(folder, "result.json").write_text(
            json.dumps({"taken": taken, "processor": processor, "answers": answers(files, request)})
        )
    dist.destroy_process_group()


def answers(files: RippleFiles, request: Request) -> dict[str, float]:
    """What rank 0 has written: answers, and seconds of slices."""
    records = [one for start in files.starts(request.id) for one in read_journal(start.answers(0))]
    found = [one for one in records if one["kind"] == "answer"]
    return {"count": sum(one["count"] for one in found), "seconds": sum(one["seconds"] for one in found)}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run it all."""
    with tempfile.TemporaryDirectory() as folder:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = store.port
        del store
        mp.spawn(worker, (given, folder, port), nprocs=given.ranks)
        found = json.loads(Path(folder, "result.json").read_text())
    taken = found["taken"]
    pairs = zip(taken["with"], taken["without"], strict=True)
    ratios = sorted(statistics.fmean(own) / statistics.fmean(other) for own, other in pairs)
    medians = {name: 1000 * statistics.median(chain.from_iterable(taken[name])) for name in taken}
    inside = sum(sum(one) for one in taken["with"])
    return {
        "budget": given.budget,
        "slice_ms": given.slice_ms,
        "steps_of_a_turn": len(taken["with"][0]),
        "median_step_ms_without": round(medians["without"], 3),
        "median_step_ms_with": round(medians["with"], 3),
        "ratio_of_means": round(statistics.median(ratios), 4),
        "ratios": [round(one, 4) for one in ratios],
        "ratio_of_processor_time_of_rank_0": round(
            sum(found["processor"]["with"]) / sum(found["processor"]["without"]), 4
        ),
        "answers_of_rank_0": found["answers"]["count"],
        "share_that_slices_took": round(found["answers"]["seconds"] / inside, 5),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=0.005)
    parser.add_argument("--slice-ms", type=float, default=3.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=8.0, help="of one turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = measure(given)
    lines = json.dumps(result, indent=2) if given.json else "\n".join(f"{name}: {one}" for name, one in result.items())
    sys.stdout.write(lines + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
