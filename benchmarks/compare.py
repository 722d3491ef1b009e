"""What `bitwitness compare` measures of faults whose rate is known, and what watching costs.

    python benchmarks/compare.py [--trials 20] [--seed 0] [--json]

First: rates that were planted in one result, drawn anew in each step, through whole comparisons; how many of the intervals hold the
planted rate (95 % of them are to), and how wide they are. `bursts`: the fault is at work in one step of four, with four times the rate,
so that wrong elements come together; `tiles`: 4 x 4 neighbours at once. Then: the time of a participant's step in each mode as a multiple of
a plain step of the same model on the same data, side by side in this run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bitwitness.compare import workload
from bitwitness.compare.judging import judge
from bitwitness.compare.lineup import Runner, Seat, settled
from bitwitness.compare.records import MODES, CompareFiles
from bitwitness.compare.settings import Settings
from bitwitness.compare.tape import Tape
from tests.compare.lineups import CPU, compared, seats
from tests.compare.test_planted import sheet

RATES = {1e-6: (1024, 12), 1e-5: (512, 10), 1e-4: (128, 10), 1e-3: (32, 10), 1e-2: (32, 10)}
"""Rate: rows of 1,024 elements, and steps."""


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    planted = [
        row(name, rate, given.trials, given.seed, fault)
        for name, fault in (("scattered", scattered), ("bursts", bursts), ("tiles", tiles))
        for rate in RATES
        if name != "bursts" or rate <= 1e-3
    ]
    costs = {mode: cost(mode) for mode in MODES}
    if given.json:
        sys.stdout.write(json.dumps({"planted": planted, "times a plain step": costs}, indent=1) + "\n")
        return
    print(f"{'kind':10} {'planted':>8} {'measured':>9} {'elements':>9} {'held':>8} {'high / low':>10}")
    for one in planted:
        held = f"{one['held']}/{one['trials']}"
        print(
            f"{one['kind']:10} {one['planted']:8.0e} {one['measured']:9.2e} {one['elements']:9d} {held:>8} {one['width']:10.2f}"
        )
    print("\nA step, as a multiple of a plain one: the leader's, and that of one who follows")
    for mode, (leader, follower) in costs.items():
        print(f"{mode:10} {leader:5.2f} {follower:5.2f}")


def scattered(rate: float) -> str:
    """Each element by itself."""
    return f"fwd_out:work @ every=1 : rate={rate} -> bit=20 ; permanent redraw"


def bursts(rate: float) -> str:
    """In one step of four, on average."""
    return f"fwd_out:work @ p=0.25 : rate={4 * rate} -> bit=20 ; permanent redraw"


def tiles(rate: float) -> str:
    """Sixteen at once. How many tiles a step has follows from the rate; below one, in a share of the steps."""
    count, _ = RATES[rate]
    tiles_a_step = rate * count * 1024 / 16
    if tiles_a_step <= 1:
        return f"fwd_out:work @ p={tiles_a_step} : tile=4x4 -> bit=20 ; permanent redraw"
    return " & ".join(
        [f"fwd_out:work @ every=1 : tile=4x4 -> bit={bit} ; permanent redraw" for bit in range(round(tiles_a_step))]
    )


def row(kind: str, rate: float, trials: int, seed: int, fault: Callable[[float], str]) -> dict[str, Any]:
    """One line of the first table."""
    count, steps = RATES[rate]
    shares = []
    for trial in range(trials):
        with tempfile.TemporaryDirectory() as folder:
            files = compared(
                Path(folder), fault(rate), make=sheet(count), modes=["lock-step"], steps=steps, seed=seed + trial
            )
            (mode,) = judge(files, "suspect", 0.95).modes
            shares.append(next(one for one in mode.rows if (one.group, one.phase) == ("work", "fwd_out")).mismatches)
    return {
        "kind": kind,
        "planted": rate,
        "measured": sum(one.count for one in shares) / sum(one.of for one in shares),
        "elements": shares[0].of,
        "trials": trials,
        "held": sum(one.low <= rate <= one.high for one in shares),
        "width": median(one.high / one.low if one.low else float("inf") for one in shares),
    }


def cost(mode: Any) -> tuple[float, float]:
    """The median time of a step of the leader and of a follower, each over that of a plain step, taken in turns."""
    make = workload.load("gpt", {"width": "128", "context": "64", "batch": "8"})
    lineup = [Seat(seat.participant, CPU, make) for seat in seats({})]
    times: dict[str, list[float]] = {"plain": [], "leader": [], "follower": []}
    with tempfile.TemporaryDirectory() as folder, settled(lineup):
        files = CompareFiles(Path(folder))
        files.create()
        settings = Settings("benchmark", "gpt", steps=30)
        leader, follower = (Runner(seat, mode, settings, files.journal(seat.participant, mode)) for seat in lineup[:2])
        plain = make(CPU, 0)
        for step in range(30):
            times["plain"].append(_timed(partial(_plain, plain, step))[0])
            spent, tape = _timed(partial(leader.record, step))
            times["leader"].append(spent)
            times["follower"].append(_timed(partial(follower.follow, step, tape))[0])
            assert isinstance(tape, Tape)
        leader.end()
        follower.end()
    usual = median(times["plain"][3:])
    return median(times["leader"][3:]) / usual, median(times["follower"][3:]) / usual


def _plain(one: workload.Workload, step: int) -> None:
    one.model.zero_grad()
    one.loss_fn(one.model, one.batch(step)).backward()
    for optimizer in one.all_optimizers:
        optimizer.step()


def _timed(do: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = do()
    return time.perf_counter() - start, result


if __name__ == "__main__":
    main()
