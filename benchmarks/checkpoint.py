"""What a verified save and a verified resume cost, next to `torch.save` with fsync and `torch.load` of the same state.

    python -m benchmarks.checkpoint [--megabytes 256] [--ranks 2] [--rounds 5] [--folder DIR] [--json]

Ranks are gloo processes on this machine, each its own node, so a file is read back by another process and from the disk. The
plain save is what one rank of a DDP job does without us: model and optimizer, one file, flushed. All are timed in turns, in one
run, and the medians are printed with their ratio. What the storage does is most of it: give `--folder` on the one you mean.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, Policy


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Any loss will do."""
    loss: Tensor = model(batch).square().mean()
    return loss


def make(folder: Path, megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer, Guard]:
    """A job whose weights and moments take about so many megabytes."""
    width = 512
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Linear(width, width) for _ in range(max(1, megabytes * 2**20 // (3 * 4 * width * width))))
    )
    optimizer = torch.optim.AdamW(module.parameters())
    policy = Policy(audit="off", keep_checkpoints=1)
    return module, optimizer, Guard(DistributedDataParallel(module), optimizer, loss_of, run_dir=folder, policy=policy)


def plain_save(folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As a job does it that knows nothing of us."""
    if dist.get_rank() == 0:
        with (folder / "plain.pt").open("wb") as file:
            torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()


def timed(work: Callable[[], Any]) -> float:
    """Seconds, from all ranks being there to all being done."""
    dist.barrier()
    started = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - started


def measure(rank: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank: everything in turns; the first rank leaves the times."""
    os.environ |= {"BITWITNESS_NODE": f"node-{rank}", "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    module, optimizer, guard = make(folder / "run", options.megabytes)
    guard.forward_backward(torch.randn(2, 512))
    guard.step()
    times: dict[str, list[float]] = {"plain save": [], "verified save": [], "plain load": [], "verified resume": []}
    for _ in range(options.rounds):
        times["plain save"].append(timed(lambda: plain_save(folder, module, optimizer)))
        times["verified save"].append(timed(guard.save_checkpoint))
        times["plain load"].append(timed(lambda: torch.load(folder / "plain.pt", weights_only=False)))
        guard.close()
        again = Guard(guard.job.model, optimizer, loss_of, run_dir=folder / "run", policy=guard.policy)
        times["verified resume"].append(timed(again.resume))
        guard = again
    guard.close()
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    os._exit(0)


def main() -> None:
    """Run it and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256, help="of weights and moments")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the system's temporary folder")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        mp.spawn(measure, (options, Path(folder)), options.ranks)
        times = {
            name: statistics.median(of) for name, of in json.loads((Path(folder) / "times.json").read_text()).items()
        }
    ratios = {
        "save": times["verified save"] / times["plain save"],
        "resume": times["verified resume"] / times["plain load"],
    }
    if options.json:
        json.dump(
            {"megabytes": options.megabytes, "ranks": options.ranks, "seconds": times, "ratios": ratios}, sys.stdout
        )
        return
    print(f"{options.megabytes} MiB of weights and moments, {options.ranks} ranks, medians of {options.rounds} rounds")
    for name, seconds in times.items():
        print(f"{name:16} {seconds:7.3f} s")
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x plain")


if __name__ == "__main__":
    main()
