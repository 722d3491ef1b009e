"""Comparing, bit for bit, what several ranks should hold alike.

Two checks need it: *replicas* for what the update left behind, and *replay* for the premises of a comparison. Usually
everything agrees, and then one reduction of digests says so at a cost that does not grow with the number of ranks; who
holds what is only asked for when something differs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bitwitness.evidence import NONFINITE, Observation
from bitwitness.fingerprint import fingerprint_tensors
from bitwitness.guard.agreement import Channel
from bitwitness.guard.workload import largest_magnitude

_ROWS = 4096
"""At most so many differing tensors are looked at one by one."""


def digest_table(tensors: Sequence[Tensor], seed: int) -> Tensor:
    """Fingerprints of tensors that may live on several devices: int64 `[tensors, 3]`, on their device if it is one."""
    devices: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        devices.setdefault(tensor.device, []).append(index)
    if len(devices) <= 1:
        return fingerprint_tensors(tensors, seed)
    table = torch.empty(len(tensors), 3, dtype=torch.int64)
    for indices in devices.values():
        table[indices] = fingerprint_tensors([tensors[index] for index in indices], seed).cpu()
    return table


def compare(
    channel: Channel, phase: str, step: int, collect: Callable[[], Mapping[str, Tensor]], seed: int
) -> list[Observation]:
    """Compare tensors by name across all ranks; one observation a rank if anything differs, none if all agree.

    Raises:
        CheckFailed, RankLost: as `Channel.max`.
    """
    tensors: dict[str, Tensor] = {}

    def count() -> Sequence[int]:
        tensors.update(collect())
        digest = hashlib.blake2b("\n".join(tensors).encode(), digest_size=7).digest()
        names = int.from_bytes(digest, "little")
        return [len(tensors), ~len(tensors), names, ~names]

    most, least, name, other_name = channel.max(phase, 4, count).tolist()
    if most != ~least or name != ~other_name:
        return _different_sets(channel, phase, step, tuple(tensors))
    table = torch.empty(0)

    def digests() -> Tensor:
        nonlocal table
        table = digest_table(list(tensors.values()), seed)
        flat = table.flatten()
        return torch.cat([flat, ~flat])

    highest, lowest = channel.max(phase, 6 * most, digests).split(3 * most)
    rows = (highest != ~lowest).view(most, 3).any(dim=1).nonzero().flatten()
    if not len(rows):
        return []
    shown = rows[:_ROWS]
    names = [list(tensors)[row] for row in shown.tolist()]
    held = channel.gather(phase, lambda: (_rows(table, shown), [_is_finite(tensors[name]) for name in names]))
    return _observations(step, names, len(rows), held)


def _rows(table: Tensor, shown: Tensor) -> list[list[int]]:
    rows: list[list[int]] = table.cpu()[shown].tolist()
    return rows


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    return bool(torch.isfinite(largest_magnitude(tensor)))


def _observations(
    step: int, names: Sequence[str], total: int, held: Sequence[tuple[list[list[int]], list[bool]]]
) -> list[Observation]:
    """One observation a rank, with the names of the tensors in which it differs from the commonest value.

    A state that holds NaN or Inf in a tensor that differs is `NONFINITE`: ranks that agree on it are no majority.
    """
    common = [Counter(map(tuple, rows)).most_common(1)[0][0] for rows in zip(*(rows for rows, _ in held), strict=True)]
    observations = []
    for rank, (rows, finite) in enumerate(held):
        differs = [name for name, row, usual in zip(names, rows, common, strict=True) if tuple(row) != usual]
        value = hashlib.blake2b(repr(rows).encode(), digest_size=12).hexdigest() if all(finite) else NONFINITE
        detail = {"differs": differs[:20], "differing": len(differs), "compared_unequal": total} if differs else {}
        observations.append(Observation("replicas", step, rank, "state", value=value, detail=detail))
    return observations


def _different_sets(channel: Channel, phase: str, step: int, names: tuple[str, ...]) -> list[Observation]:
    """Ranks that hold different sets of tensors: somebody's optimizer state is missing, or the models differ."""
    held = channel.gather(phase, lambda: names)
    usual = set(Counter(held).most_common(1)[0][0])
    observations = []
    for rank, own in enumerate(held):
        differs = sorted(set(own) ^ usual)
        value = hashlib.blake2b("\n".join(own).encode(), digest_size=12).hexdigest()
        detail = {"differs": differs[:20], "differing": len(differs)} if differs else {}
        # No device loses a tensor: this is the program, and an observation with an error blames nobody.
        error = (
            f"it holds {len(own)} tensors, others {len(usual)}; the sets differ in {', '.join(differs[:3])}"
            if differs
            else ""
        )
        observations.append(Observation("replicas", step, rank, "state", value=value, error=error, detail=detail))
    return observations
