"""How one tensor differs from the leader's: exact counts and sums over all of its elements, and some elements themselves.

On the host, always: a device that is suspected of wrong arithmetic is not asked whether it is right.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from bitwitness.compare.records import DECADES, Difference

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOVED_WITHIN = 1 << 16
"""Elements of a tensor in which a word that stands elsewhere as well is worth a remark; in a larger one chance alone brings it."""
_BOUNDARIES = torch.tensor(DECADES[2:], dtype=torch.float64)


def difference(
    site: int, observed: Tensor, expected: Tensor, previous: Tensor | None = None, keep: int = 2048
) -> Difference | None:
    """Compare bit for bit. Nothing that is given is written to, here and in all of this module: the tape is everybody's.

    Args:
        site: number to write down.
        observed: the follower's, as `tape.host` makes it.
        expected: the leader's, of the same shape and dtype.
        previous: what was right in this place in the step before, if it was of this shape.
        keep: so many wrong elements are written down, from the first.

    Returns:
        None where all bits are equal.

    Definitions of mismatch and severity: Ma et al., ACL 2025.
    """
    seen, right = _words(observed), _words(expected)
    if torch.equal(seen, right):
        return None
    where = (seen != right).nonzero().flatten()
    y_seen, y_right = observed.flatten()[where].to(torch.float64), expected.flatten()[where].to(torch.float64)
    finite = y_seen.isfinite() & y_right.isfinite()
    error = (y_seen - y_right).abs()
    counted = finite & (y_right != 0)
    severity = error[counted] / y_right[counted].abs()
    zero = finite & (y_right == 0)
    # A copy: of this dtype already, it would be the leader's own memory.
    everything = expected.flatten().to(torch.float64, copy=True)
    lost = ~finite
    everything[where[lost]] = 0.0
    everything = everything.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return Difference(
        site=site,
        mismatches=len(where),
        severity_sum=float(severity.sum()),
        severity_of=int(counted.sum()),
        severity_largest=float(severity.max()) if len(severity) else 0.0,
        zeros=int(zero.sum()),
        zero_largest=float(y_seen[zero].abs().max()) if bool(zero.any()) else 0.0,
        nonfinite=int(lost.sum()),
        ulp_largest=_ulps(seen[where][finite], right[where][finite], observed.dtype),
        noise=float(error[finite].square().sum()),
        signal=float(everything.square().sum()),
        classes=_classes(seen, right, where, y_seen, y_right, previous),
        elements=_elements(where[:keep], seen, right, 8 * observed.element_size()),
        answer=_digest(seen),
    )


def spread(site: int, observed: Tensor, expected: Tensor) -> Difference | None:
    """The same where errors spread, and nearly every element is another: how many differ, and by how much in all."""
    seen, right = _words(observed), _words(expected)
    if torch.equal(seen, right):
        return None
    y_seen, y_right = observed.flatten().to(torch.float64), expected.flatten().to(torch.float64)
    error = y_seen - y_right
    finite, wrong = y_seen.isfinite() & y_right.isfinite(), seen != right
    return Difference(
        site=site,
        mismatches=int(wrong.sum()),
        nonfinite=int((wrong & ~finite).sum()),
        noise=float(error.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum()),
        signal=float(torch.where(finite, y_right, 0.0).square().sum()),
        answer=_digest(seen),
    )


def ranges(expected: Tensor) -> Tensor:
    """How many elements are in each range of `records.DECADES`: int64 `[len(DECADES)]`."""
    size = expected.flatten().to(torch.float64).abs()
    place = torch.bucketize(size, _BOUNDARIES, right=True) + 1
    place[size == 0] = 0
    place[size.isnan()] = len(DECADES) - 1
    return torch.bincount(place, minlength=len(DECADES))


def squares(tensor: Tensor) -> float:
    """The sum of squares of what is finite, in double precision."""
    return float(tensor.to(torch.float64).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square().sum())


def distance(observed: Tensor, expected: Tensor) -> float:
    """The sum of squared differences of elements with other bits, in double precision; infinite where one of those is not finite."""
    seen, right = _words(observed), _words(expected)
    if torch.equal(seen, right):
        return 0.0
    where = seen != right  # a NaN on both sides is no difference
    error = observed.flatten()[where].to(torch.float64) - expected.flatten()[where].to(torch.float64)
    total = float(error.square().sum())
    return total if math.isfinite(total) else math.inf


def _digest(words: Tensor) -> str:
    return hashlib.blake2b(words.numpy().tobytes(), digest_size=8).hexdigest()


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten()
    return flat.view(_INTEGERS[flat.element_size()])


def _elements(where: Tensor, seen: Tensor, right: Tensor, width: int) -> tuple[tuple[int, int, int], ...]:
    mask = (1 << width) - 1
    rows = zip(where.tolist(), right[where].tolist(), seen[where].tolist(), strict=True)
    return tuple((index, expected & mask, observed & mask) for index, expected, observed in rows)


def _ulps(seen: Tensor, right: Tensor, dtype: torch.dtype) -> int:
    """The most representable numbers that lie between two, by the order of their words."""
    if not len(seen):
        return 0
    width = seen.element_size()
    if dtype.is_floating_point:
        seen, right = _ordered(seen), _ordered(right)
    if width < 8:
        return int((seen.to(torch.int64) - right.to(torch.int64)).abs().max())
    apart = [abs(int(a) - int(b)) for a, b in zip(seen.tolist(), right.tolist(), strict=True)]
    return max(apart)


def _ordered(words: Tensor) -> Tensor:
    """Words of floating-point numbers as integers in the order of the numbers, both zeros being one."""
    lowest = torch.iinfo(words.dtype).min
    wide = words.to(torch.int64)
    return torch.where(wide >= 0, wide, lowest - wide)


def _classes(
    seen: Tensor, right: Tensor, where: Tensor, y_seen: Tensor, y_right: Tensor, previous: Tensor | None
) -> dict[str, int]:
    words = seen[where]
    stale = torch.zeros_like(y_seen, dtype=torch.bool)
    before = None if previous is None else _words(previous)
    if before is not None and before.shape == seen.shape and before.dtype == seen.dtype:
        stale = words == before[where]
    moved = torch.zeros_like(stale)
    if seen.element_size() >= 4 and len(seen) <= _MOVED_WITHIN:
        moved = torch.isin(words, right)
    found: dict[str, int] = {}
    left = torch.ones_like(stale)
    for name, holds in (
        ("zero", (y_seen == 0) & (y_right != 0)),
        ("special", ~y_seen.isfinite()),
        ("sign", y_seen == -y_right),
        ("stale", stale),
        ("moved", moved),
        ("other", torch.ones_like(stale)),
    ):
        count = int((holds & left).sum())
        if count:
            found[name] = count
        left &= ~holds
    return found
