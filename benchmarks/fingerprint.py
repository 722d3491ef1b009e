"""What a fingerprint costs and what it catches, next to the digests people use instead: DESIGN section 7 in numbers.

    python benchmarks/fingerprint.py [--elements 2**26] [--trials 1000] [--seed 0] [--threads N] [--json]

Costs are measured in one interleaved run and the best of the rounds is printed. On a machine that does other work they
mean little, with several threads least of all, because each operation waits for the slowest: look at "load before".
The "plain" rows are how the sums are usually written: every element widened to int64 and multiplied by an index tensor.
The strength table counts, of random tensors of 4096 normals damaged in one way, how many a digest does not tell from the
clean one (patterns: Ma et al. arXiv 2502.12340; AEGIS, OSDI'26).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bitwitness.fingerprint import fingerprint_tensors
from bitwitness.fingerprint.row_sums import int8_products_are_exact
from bitwitness.fingerprint.two_sums import two_sums

PLAIN_CHUNK = 1 << 24
PLAIN_ROUNDS = 2
FAST_ROUNDS = 12
TABLE_ROUNDS = 6
SIDE = 64
_LAYER = (
    (256,),
    (256,),
    (768, 256),
    (768,),
    (256, 256),
    (256,),
    (256,),
    (256,),
    (1024, 256),
    (1024,),
    (256, 1024),
    (256,),
)
GPT_SHAPES = ((65, 256), (256, 256), *_LAYER * 4, (256,), (256,))
TrialRow = dict[str, str | int | float]


def plain(tensor: Tensor, seeded: bool) -> Tensor:
    """Two sums, and the seeded hash with a table of weights, the usual way: int64 [2 or 3]."""
    out = torch.zeros(3 if seeded else 2, dtype=torch.int64)
    weights = torch.randint(-(2**62), 2**62, (PLAIN_CHUNK,)) if seeded else None
    for start in range(0, tensor.numel(), PLAIN_CHUNK):
        values = tensor[start : start + PLAIN_CHUNK].view(torch.int32).to(torch.int64)
        out[0] += values.sum()
        out[1] += (values * torch.arange(start + 1, start + 1 + values.numel())).sum()
        if weights is not None:
            out[2] += (values * weights[: values.numel()]).sum()
    return out


def interleaved(cases: dict[str, Callable[[], Any]], rounds: dict[str, int]) -> dict[str, float]:
    """Seconds of the fastest run of each case; in every round each case that still has rounds runs once."""
    best = dict.fromkeys(cases, float("inf"))
    for number in range(max(rounds.values()) + 1):
        for name, run in cases.items():
            if number <= rounds[name]:
                start = time.perf_counter()
                run()
                # The first round only warms up.
                best[name] = min(best[name], time.perf_counter() - start) if number else best[name]
    return best


def cost_of_one(elements: int) -> list[TrialRow]:
    """One fp32 tensor of `elements`: seconds, GB/s read, and times as fast as the plain two sums."""
    tensor = torch.randn(elements)
    target = torch.empty_like(tensor)
    cases: dict[str, Callable[[], Any]] = {
        "ours: sums and seeded hash": lambda: fingerprint_tensors([tensor], 1),
        "ours: two sums": lambda: two_sums(tensor),
        "torch.hash_tensor (XOR)": lambda: torch.hash_tensor(tensor),
        "tensor.sum()": tensor.sum,
        "a copy": lambda: target.copy_(tensor),
        "plain: two sums": lambda: plain(tensor, seeded=False),
        "plain: sums and seeded hash": lambda: plain(tensor, seeded=True),
    }
    rounds = {name: PLAIN_ROUNDS if name.startswith("plain") else FAST_ROUNDS for name in cases}
    best = interleaved(cases, rounds)
    return [
        {
            "case": name,
            "ms": 1e3 * seconds,
            "GB/s": tensor.nbytes / seconds / 1e9,
            "x plain two sums": best["plain: two sums"] / seconds,
            "x plain same digest": best["plain: " + name.removeprefix("ours: ")] / seconds if "ours" in name else 1.0,
        }
        for name, seconds in best.items()
    ]


def cost_of_tables() -> list[TrialRow]:
    """Tables of tensors, as those of a training are, in one call and one by one: microseconds a tensor."""
    tables = {
        "1000 x 768 fp32": [torch.randn(768) for _ in range(1000)],
        "1000 different sizes": [torch.randn(100 + index) for index in range(1000)],
        "1000 x 768 bf16": [torch.randn(768).to(torch.bfloat16) for _ in range(1000)],
        "300 x 128x128 fp32": [torch.randn(128, 128) for _ in range(300)],
        "50 x 768x768 fp32": [torch.randn(768, 768) for _ in range(50)],
        "gradients of a GPT, width 256": [torch.randn(shape) for shape in GPT_SHAPES],
        "its parameters and Adam's state": [torch.randn(shape) for shape in GPT_SHAPES * 3 + ((),) * len(GPT_SHAPES)],
    }
    together = {name: _whole(tensors) for name, tensors in tables.items()}
    apart = {f"{name}, one by one": _one_by_one(tensors) for name, tensors in tables.items()}
    best = interleaved(together | apart, dict.fromkeys(together, TABLE_ROUNDS) | dict.fromkeys(apart, 1))
    return [
        {
            "case": name,
            "ms": 1e3 * best[name],
            "us a tensor": 1e6 * best[name] / len(tensors),
            "GB/s": sum(tensor.nbytes for tensor in tensors) / best[name] / 1e9,
            "x one by one": best[f"{name}, one by one"] / best[name],
        }
        for name, tensors in tables.items()
    ]


def _whole(tensors: list[Tensor]) -> Callable[[], Any]:
    return lambda: fingerprint_tensors(tensors, 1)


def _one_by_one(tensors: list[Tensor]) -> Callable[[], Any]:
    return lambda: [fingerprint_tensors([tensor], 1) for tensor in tensors]


def _flip(bits: Tensor, places: list[int], mask: int) -> None:
    bits[places] ^= mask


def _damage(bits: Tensor, pattern: str, draw: Callable[[int], int]) -> None:
    """Damage `bits`, the 4096 elements of one trial as integers, in place."""
    width = 8 * bits.element_size()
    bit = draw(width - 1)
    mask = 1 << bit
    start = draw(512)
    if pattern.startswith("same bit"):
        stride = draw(64) + 2
        places = {
            "same bit in 2 elements": [start, start + stride],
            "same bit in 4 consecutive": list(range(start, start + 4)),
            "same bit in 4 strided": list(range(start, start + 4 * stride, stride)),
            "same bit in 8 strided": list(range(start, start + 8 * stride, stride)),
            "same bit in a 3x3 patch": [start + SIDE * row + column for row in range(3) for column in range(3)],
        }
        _flip(bits, places[pattern], mask)
    elif pattern == "stuck at 1, run of 32":
        bits[start : start + 32] |= mask
    elif pattern == "swap of 2":
        other = start + 1 + draw(512)
        bits[[start, other]] = bits[[other, start]]
    elif pattern == "rotation of 32":
        bits[start : start + 32] = bits[start : start + 32].roll(1)
    else:
        rows = bits.view(SIDE, SIDE)
        first, second = draw(32), 32 + draw(32)
        rows[[first, second]] = rows[[second, first]]


PATTERNS = (
    "same bit in 2 elements", "same bit in 4 consecutive", "same bit in 4 strided", "same bit in 8 strided",
    "same bit in a 3x3 patch", "stuck at 1, run of 32", "swap of 2", "rotation of 32", "exchange of rows",
)  # fmt: skip


def strength(trials: int, seed: int) -> list[TrialRow]:
    """Share of the trials that each digest misses, for fp32 and bf16."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for pattern in PATTERNS:
            clean = torch.randn(trials, SIDE * SIDE, generator=generator).to(dtype)
            damaged = clean.clone()
            for bits in damaged.view(torch.int32 if dtype == torch.float32 else torch.int16):
                _damage(bits, pattern, draw)
            rows.append(_misses(clean, damaged, seed, {"dtype": str(dtype).removeprefix("torch."), "pattern": pattern}))
    return rows


def _misses(clean: Tensor, damaged: Tensor, seed: int, row: TrialRow) -> TrialRow:
    """Add to `row` how many trials changed a bit, and the share of them that shows in no number of a digest."""
    bits = torch.int32 if clean.dtype == torch.float32 else torch.int16
    changed = clean.view(bits).ne(damaged.view(bits)).any(1)
    clean, damaged = clean[changed], damaged[changed]
    ours = fingerprint_tensors(list(clean), seed).eq(fingerprint_tensors(list(damaged), seed))
    xor = torch.hash_tensor(clean, 1).view(torch.int64).eq(torch.hash_tensor(damaged, 1).view(torch.int64))
    missed = {"XOR": xor, "sum": ours[:, 0], "sum+weighted": ours[:, :2].all(1), "ours": ours.all(1)}
    return {**row, "trials": len(clean), **{name: float(miss.double().mean()) for name, miss in missed.items()}}


def table(title: str, rows: list[TrialRow]) -> str:
    """`rows` as text in columns."""
    head = list(rows[0])
    cells = [head] + [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    return "\n".join([f"\n{title}", *lines])


def _integer(text: str) -> int:
    base, _, exponent = text.partition("**")
    value: int = int(base) ** int(exponent or 1)
    return value


def main() -> None:
    """Run everything and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--elements", type=_integer, default=2**26, help="of the one large tensor, a multiple of 2 (2**26)"
    )
    parser.add_argument("--trials", type=int, default=1000, help="for each pattern and dtype")
    parser.add_argument("--seed", type=int, default=0, help="of trials and hash")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": torch.get_num_threads(),
        "8-bit dot products": int8_products_are_exact(), "seed": options.seed, "load before": os.getloadavg()[0],
    }  # fmt: skip
    result = {
        f"cost of one fp32 tensor of {options.elements} elements": cost_of_one(options.elements),
        "cost of a table": cost_of_tables(),
        f"share of damage missed, seed {options.seed}": strength(options.trials, options.seed),
    }
    if options.json:
        json.dump({"setting": machine, **result}, sys.stdout, indent=1)
    else:
        print(machine, *(table(title, rows) for title, rows in result.items()), sep="\n")


if __name__ == "__main__":
    main()
