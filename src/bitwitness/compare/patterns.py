"""What wrong elements have in common: the bits, the places and the values by which a broken unit is known. Pure, no torch, no numpy.

Numbers are given for whatever was looked at; a sentence is written only where chance is no explanation. The kinds of patterns are those
of the field: one XOR mask in more than 5 % of records (Wang et al., SOSP 2023), strides of 2 to 16 (Anatomy of SDC, DSN 2026), tiles of
3 x 3 and whole rows (LLM-PRISM), four in a row that repeat along both axes (AEGIS), values that are zero, stale or negated, and ranges
of operands (SDCHunter).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwitness.compare.patterns_periods import periods
from bitwitness.compare.patterns_places import CHANCE, Places, Tile, lags, places, stride, tiles, to_look_at
from bitwitness.compare.patterns_words import magnitude, mantissa, range_of, width
from bitwitness.compare.records import DECADES, Difference, Site
from bitwitness.compare.results import Lag, Patterns, Period
from bitwitness.faults.statistics import wilson
from bitwitness.scan.chance import tail

_MASKS = 50
_REMARKABLE_MASK = 0.05
"""Of all records: Wang et al., SOSP 2023."""
_MASKS_NAMED, _RESIDUES_NAMED = 4, 8
_ONE_WAY = 0.95
_REMARKABLE_CLASS = 0.25
_REMARKABLE_TILES = 0.05
_LEAST = 3
_TILES = 20
_MORE_OFTEN = 2.0
"""A range of values is named where it is hit this many times as often as the rest."""
_WHOLE = 0.5

_CLASS_WORDS = {
    "zero": "are 0 instead of what is right",
    "special": "are NaN or infinite",
    "sign": "are the right value with the other sign",
    "stale": "are what was right in this place one step before",
    "moved": "are right for another place of the same tensor",
}


@dataclass(frozen=True, slots=True)
class Struck:
    """One tensor in one step in which elements are wrong: the difference, and the site that its number stands for."""

    step: int
    site: Site
    difference: Difference


def look(dtype: str, struck: Sequence[Struck], ranges: Mapping[Site, Sequence[int]] | None = None) -> Patterns:
    """Look for patterns in the wrong elements of one dtype.

    Args:
        dtype: whose; those of another in `struck` are left out.
        struck: by step and tensor.
        ranges: by site, how many right elements were in each range of `records.DECADES`, over all steps.
    """
    mine = [one for one in struck if one.site.dtype == dtype]
    known = {site: counts for site, counts in (ranges or {}).items() if site.dtype == dtype}
    masks, bits, records = _words(dtype, mine)
    found = [
        places(one.site.shape, [index for index, _, _ in one.difference.elements], one.difference.mismatches)
        for one in mine
    ]
    looked, recurring = to_look_at([one for one in found if one.indices])
    apart, blocks, repeating = lags(looked), tiles(looked), periods(looked)
    classes = Counter[str]()
    for one in mine:
        classes.update(one.difference.classes)
    total = sum(one.difference.mismatches for one in mine)
    sentences = (
        *_about_masks(masks, records, width(dtype)),
        *_about_bits(bits, dtype),
        *_about_places(looked, apart, blocks, repeating),
        *_about_wholes(mine),
        *_about_recurring(recurring, sum(len(one.indices) for one in found)),
        *_about_classes(classes, total, dtype),
        *_about_ranges(dtype, mine, known),
    )
    return Patterns(
        dtype=dtype,
        records=records,
        truncated=records < total,
        masks=tuple(masks.most_common(_MASKS)),
        mask_kinds=len(masks),
        bits=bits,
        lags=apart,
        tiles=tuple((one.rows, one.columns, one.count) for one in blocks[:_TILES]),
        periods=repeating,
        classes=dict(sorted(classes.items())),
        ranges=_ranges(dtype, mine, known),
        findings=sentences,
    )


# Bits ----------------------------------------------------------------------------------------------------------------


def _words(dtype: str, struck: Sequence[Struck]) -> tuple[Counter[int], tuple[tuple[int, int], ...], int]:
    """Masks, flips by bit and direction, and how many records they are of."""
    pairs = Counter((right ^ seen, right) for one in struck for _, right, seen in one.difference.elements)
    masks: Counter[int] = Counter()
    up, down = [0] * width(dtype), [0] * width(dtype)
    for (mask, right), count in pairs.items():
        masks[mask] += count
        for bit in range(len(up)):
            if mask >> bit & 1:
                if right >> bit & 1:
                    down[bit] += count
                else:
                    up[bit] += count
    return masks, tuple(zip(up, down, strict=True)), masks.total()


def _about_masks(masks: Counter[int], records: int, bits: int) -> Iterator[str]:
    """Those in more than 5 % of records; one bit alone must have more than chance gives it, where all bits are flipped alike."""
    named = 0
    for mask, count in masks.most_common():
        if count < _LEAST or wilson(count, records).low <= _REMARKABLE_MASK or named == _MASKS_NAMED:
            break
        if mask.bit_count() == 1 and bits * tail(records, count, 1 / bits) > CHANCE:
            continue
        named += 1
        what = f"bit {mask.bit_length() - 1}" if mask.bit_count() == 1 else f"{mask.bit_count()} bits"
        yield f"XOR mask 0x{mask:0{-(-bits // 4)}x} ({what}) in {count:,} of {records:,} records ({count / records:.0%})"


def _about_bits(bits: Sequence[tuple[int, int]], dtype: str) -> Iterator[str]:
    """One direction only, of bits of a mantissa, which are 0 as often as 1; those of an exponent are not."""
    fraction = mantissa(dtype)
    for bit, (up, down) in enumerate(bits[:fraction]):
        most, flips = max(up, down), up + down
        if flips < _LEAST or most < _ONE_WAY * flips or fraction * 2 * tail(flips, most, 0.5) > CHANCE:
            continue
        way, stuck = ("0 to 1", 1) if up > down else ("1 to 0", 0)
        yield f"bit {bit} flips from {way} in {most:,} of {flips:,} cases, as if it were stuck at {stuck}"


# Places --------------------------------------------------------------------------------------------------------------


def _about_places(
    looked: Sequence[Places], apart: Sequence[Lag], blocks: Sequence[Tile], repeating: Sequence[Period]
) -> Iterator[str]:
    total = sum(len(one.indices) for one in looked)
    tile = next((one for one in blocks if one.found and _covers(one, total)), None)
    step = stride(apart)
    if tile is not None and step in (None, tile.width):
        yield _tile_words(tile)
    elif step is not None:
        (lag,) = (one for one in apart if one.lag == step)
        yield f"stride {step}: {lag.pairs:,} pairs of wrong elements lie {step} apart, where chance would bring {_few(lag.expected)}"
    elif near := [one for one in apart if one.found]:
        some = ", ".join(str(one.lag) for one in near[:_RESIDUES_NAMED])
        more = f" and {len(near) - _RESIDUES_NAMED} more" if len(near) > _RESIDUES_NAMED else ""
        what = (
            "wrong elements are neighbours more often than chance brings"
            if near[0].lag == 1
            else "distances that recur"
        )
        yield f"{what}: found at distances of {some}{more}"
    for period in repeating:
        at = ", ".join(str(phase) for phase in period.phases[:_RESIDUES_NAMED])
        more = f" and {len(period.phases) - _RESIDUES_NAMED} more" if len(period.phases) > _RESIDUES_NAMED else ""
        yield (
            f"{period.axis}s repeat with period {period.period} (at {at}{more}): {period.share:.0%} of wrong elements, "
            f"where chance would bring {period.expected:.0%}"
        )


def _covers(tile: Tile, total: int) -> bool:
    return tile.count * tile.rows * tile.columns >= _REMARKABLE_TILES * total


def _tile_words(tile: Tile) -> str:
    times = f"{tile.count:,} of them" if tile.count > 1 else "one"
    if tile.width > 1 and tile.columns == tile.width and tile.height > tile.rows:
        return f"whole rows are wrong: {tile.rows} of {tile.width} elements each, {times}"
    if tile.height > 1 and tile.rows == tile.height and tile.width > tile.columns:
        return f"whole columns are wrong: {tile.columns} of {tile.height} elements each, {times}"
    if tile.rows == 1:
        return f"runs of {tile.columns} neighbours along a row, {times}"
    if tile.columns == 1:
        return f"runs of {tile.rows} neighbours along a column, {times}"
    return f"tiles of {tile.rows} × {tile.columns} neighbours, {times}"


def _about_wholes(struck: Sequence[Struck]) -> Iterator[str]:
    whole = sum(one.difference.mismatches == one.site.elements >= _LEAST for one in struck)
    if whole >= _LEAST and whole >= _WHOLE * len(struck):
        yield f"{whole:,} of {len(struck):,} tensors that differ are wrong in every element"


def _about_recurring(recurring: int, total: int) -> Iterator[str]:
    if recurring and recurring >= _REMARKABLE_CLASS * total:
        yield f"the same places again and again: {recurring:,} wrong elements lie where others of tensors of this shape were wrong"


def _few(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


# Values --------------------------------------------------------------------------------------------------------------


def _about_classes(classes: Mapping[str, int], total: int, dtype: str) -> Iterator[str]:
    for name, words in _CLASS_WORDS.items():
        count = classes.get(name, 0)
        # In a narrow dtype most values stand in some other place too.
        if count >= _LEAST and count >= _REMARKABLE_CLASS * total and not (name == "moved" and width(dtype) < 32):
            yield f"{count:,} of {total:,} wrong elements ({count / total:.0%}) {words}"


def _hits(dtype: str, elements: Sequence[tuple[int, int, int]]) -> Counter[int]:
    sizes = [magnitude(right, dtype) for _, right, _ in elements]
    return Counter(range_of(size) for size in sizes if size is not None)


def _ranges(
    dtype: str, struck: Sequence[Struck], known: Mapping[Site, Sequence[int]]
) -> tuple[tuple[float, int, int], ...]:
    """By range of the right value: its lower end, elements seen, mismatches among those that were kept."""
    hits: Counter[int] = Counter()
    for one in struck:
        hits.update(_hits(dtype, one.difference.elements))
    seen = [sum(counts[number] for counts in known.values() if number < len(counts)) for number in range(len(DECADES))]
    return tuple(
        (low, seen[number], hits[number]) for number, low in enumerate(DECADES) if seen[number] or hits[number]
    )


def _about_ranges(dtype: str, struck: Sequence[Struck], known: Mapping[Site, Sequence[int]]) -> Iterator[str]:
    """Ranges that are hit more often than the others of the same tensors; a place that is hit again and again counts once."""
    hits: Counter[int] = Counter()
    expected = [0.0] * len(DECADES)
    seen: set[tuple[Site, int]] = set()
    for one in struck:
        counts = known.get(one.site)
        if counts is None or not sum(counts):
            continue
        fresh = [element for element in one.difference.elements if (one.site, element[0]) not in seen]
        seen.update((one.site, index) for index, _, _ in fresh)
        hits.update(_hits(dtype, fresh))
        whole = sum(counts)
        for number, count in enumerate(counts[: len(DECADES)]):
            expected[number] += len(fresh) * count / whole
    total = hits.total()
    for number, low in enumerate(DECADES):
        if hits[number] < _LEAST or not math.isfinite(expected[number]) or expected[number] >= total:
            continue
        inside, outside = (
            hits[number] / max(expected[number], 1e-300),
            (total - hits[number]) / (total - expected[number]),
        )
        chance = len(DECADES) * tail(total, hits[number], expected[number] / total)
        if chance <= CHANCE and inside >= _MORE_OFTEN * outside:
            yield (
                f"right values {_range_words(number, low)} have {hits[number]:,} of {total:,} wrong elements, "
                f"where chance would bring {_few(expected[number])}"
            )


def _range_words(number: int, low: float) -> str:
    if number == 0:
        return "of exactly 0"
    if number == len(DECADES) - 1:
        return f"of {low:g} and more"
    below = DECADES[number + 1]
    return f"below {below:g}" if number == 1 else f"from {low:g} to {below:g}"
