"""Faults in the files of a checkpoint: bytes that rot on a disk, or are damaged between memory and disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor


def names(folder: Path, rank: int) -> tuple[str, ...]:
    """The files that this rank may hit: its own, and the first rank those of all. So two ranks never write into one."""
    files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
    own = f"rank-{rank:05d}.pt"
    return tuple(
        name
        for name in (path.name if path == folder else str(path.relative_to(folder)) for path in files)
        if name != "label.json" and (name == own or (rank == 0 and not name.startswith("rank-")))
    )


def hit(path: Path, strike: Callable[[Tensor], bool]) -> None:
    """Have the bytes of a file changed, as uint8; only changed ones are written, in place and durably."""
    before = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    after = before.clone()
    if not len(before) or not strike(after):
        return
    with path.open("r+b") as file:
        for position in (before != after).nonzero().flatten().tolist():
            os.pwrite(file.fileno(), bytes([int(after[position])]), position)
        os.fsync(file.fileno())
