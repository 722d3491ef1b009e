"""What wrong elements have in common: the bits, the places and the values by which a broken unit is known. Pure, no torch, no numpy.

Numbers are given for whatever was looked at; a sentence is written only where chance is no explanation. The kinds of patterns are those
of the field: one XOR mask in more than 5 % of records (Wang et al., SOSP 2023), strides of 2 to 16 (Anatomy of SDC, DSN 2026), tiles of
3 x 3 and whole rows (LLM-PRISM), four in a row that repeat along both axes (AEGIS), values that are zero, stale or negated, and ranges
of operands (SDCHunter).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bitwitness.compare.patterns_lags import lags, stride
from bitwitness.compare.patterns_periods import periods
from bitwitness.compare.patterns_places import CHANCE, Places, alike, places, recurring, to_look_at
from bitwitness.compare.patterns_tiles import Tile, tiles
from bitwitness.compare.patterns_words import magnitude, mantissa, range_of, width
from bitwitness.compare.records import DECADES, Difference, Site
from bitwitness.compare.results import Lag, Patterns, Period
from bitwitness.faults.statistics import wilson
from bitwitness.scan.chance import tail

_MASKS = 50
_REMARKABLE_MASK = 0.05
"""Of all records: Wang et al., SOSP 2023."""
_MASKS_NAMED, _NUMBERS_NAMED = 4, 8
_ONE_WAY = 0.95
_REMARKABLE_CLASS = 0.25
_REMARKABLE_TILES = 0.05
_LEAST = 3
_TILES = 20
_MORE_OFTEN = 3.0
_FEWEST_STEPS = 8
"""A range of values is named where it is hit so many times as often as chance would, and in no fewer steps."""
_WHOLE = 0.5

_CLASS_WORDS = {
    "zero": "are 0 instead of what is right, which is not 0",
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
    masks, bits = _words(dtype, (element for one in mine for element in one.difference.elements))
    fresh = _first_of_each_place(mine)
    records = masks.total()
    found = [
        places(one.site.shape, [index for index, _, _ in one.difference.elements], one.difference.mismatches, one.step)
        for one in mine
    ]
    # What strikes several tensors of a step at the same places repeats whatever chance has made of them.
    unlike = {(struck.step, one.shape, one.indices): one for struck, one in zip(mine, found, strict=True)}
    looked = to_look_at([one for one in unlike.values() if one.indices])
    apart, blocks, repeating = lags(looked), tiles(looked), periods(looked)
    classes = Counter[str]()
    for one in mine:
        classes.update(_classes_of(one.difference, dtype))
    total = sum(one.difference.mismatches for one in mine)
    sentences = (
        *_about_masks(masks, records, width(dtype)),
        *_about_bits(_words(dtype, (element for _, elements in fresh for element in elements))[1], dtype),
        *_about_places(looked, apart, blocks, repeating),
        *_about_wholes(mine),
        *_about_recurring(found),
        *_about_classes(classes, total, dtype),
        *_about_ranges(dtype, fresh, known),
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


def _words(dtype: str, elements: Iterable[tuple[int, int, int]]) -> tuple[Counter[int], tuple[tuple[int, int], ...]]:
    """Masks, and flips by bit and direction."""
    pairs = Counter((right ^ seen, right) for _, right, seen in elements)
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
    return masks, tuple(zip(up, down, strict=True))


def _first_of_each_place(struck: Sequence[Struck]) -> list[tuple[Struck, tuple[tuple[int, int, int], ...]]]:
    """Of each tensor in each step the elements at places that were not wrong before: a value that stays is asked once."""
    seen: dict[Site, set[int]] = {}
    found = []
    for one in struck:
        before = seen.setdefault(one.site, set())
        fresh = tuple(element for element in one.difference.elements if element[0] not in before)
        before.update(index for index, _, _ in fresh)
        found.append((one, fresh))
    return found


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
    ways: dict[str, list[int]] = {}
    for bit, (up, down) in enumerate(bits[:fraction]):
        most, flips = max(up, down), up + down
        if flips >= _LEAST and most >= _ONE_WAY * flips and fraction * 2 * tail(flips, most, 0.5) <= CHANCE:
            ways.setdefault("0 to 1" if up > down else "1 to 0", []).append(bit)
    for way, some in ways.items():
        if len(some) > 1:
            yield f"{len(some)} of the {fraction} bits of the mantissa flip from {way} only: {_listed(some)}"
            continue
        cases = sum(bits[some[0]])
        yield f"bit {some[0]} flips from {way}, in {max(bits[some[0]]):,} of {cases:,} places, as if it were stuck at {way[-1]}"


def _listed(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _NUMBERS_NAMED} more" if len(numbers) > _NUMBERS_NAMED else ""
    return ", ".join(str(number) for number in numbers[:_NUMBERS_NAMED]) + more


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
        what = (
            "wrong elements are neighbours more often than chance brings"
            if near[0].lag == 1
            else "distances that recur"
        )
        yield f"{what}: found at distances of {_listed([one.lag for one in near])}"
    for period in repeating:
        yield (
            f"{period.axis}s repeat with period {period.period} (at {_listed(period.phases)}): {period.share:.0%} of wrong elements, "
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


def _about_recurring(found: Sequence[Places]) -> Iterator[str]:
    total, again, at_once = sum(len(one.indices) for one in found), recurring(found), alike(found)
    if again and again >= _REMARKABLE_CLASS * total:
        yield f"the same places again and again: {again:,} wrong elements lie where tensors of this shape were wrong in other steps too"
    elif at_once and at_once >= _REMARKABLE_CLASS * total:
        yield (
            f"tensors of one step are wrong at the same places: {at_once:,} wrong elements lie where another of this shape was wrong in the "
            "same step"
        )


def _few(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


# Values --------------------------------------------------------------------------------------------------------------


def _classes_of(one: Difference, dtype: str) -> dict[str, int]:
    """As they were counted, but 0 in place of -0 is no zero for what is right: it has the other sign."""
    classes = dict(one.classes)
    zeros = [magnitude(right, dtype) == 0 for _, right, seen in one.elements if magnitude(seen, dtype) == 0]
    if not sum(zeros) or not classes.get("zero"):
        return classes
    more = one.mismatches / len(one.elements)
    least, other = round(more * zeros.count(False)), round(more * sum(zeros))
    zero = min(classes["zero"], max(least, classes["zero"] - other))
    classes["sign"] = classes.get("sign", 0) + classes["zero"] - zero
    classes["zero"] = zero
    return {name: count for name, count in classes.items() if count}


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


def _about_ranges(
    dtype: str,
    fresh: Sequence[tuple[Struck, tuple[tuple[int, int, int], ...]]],
    known: Mapping[Site, Sequence[int]],
) -> Iterator[str]:
    """Ranges of operands that are hit far more often than the others of the same tensors.

    Values of one tensor in one step have much in common, so that one of them is asked. And values change while a model learns: what is
    known of them is of all steps together, so that hits must come from half of the run at least, and be more than twice what this
    could explain.
    """
    hits: Counter[int] = Counter()
    expected = [0.0] * len(DECADES)
    steps = [one.step for one, elements in fresh if elements]
    run = 0.0
    for one, elements in fresh:
        counts = known.get(one.site)
        if not elements or counts is None or not (whole := sum(counts)):
            continue
        run = max(run, whole / max(1, one.site.elements))
        hits.update(_hits(dtype, (elements[len(elements) // 2],)))
        for number, count in enumerate(counts[: len(DECADES)]):
            expected[number] += count / whole
    total = hits.total()
    if len(set(steps)) < _FEWEST_STEPS or max(steps) - min(steps) < run / 2:
        return
    for number, low in enumerate(DECADES):
        count, mean = hits[number], expected[number]
        if count > _MORE_OFTEN * mean and len(DECADES) * tail(total, count, mean / total) <= CHANCE:
            yield (
                f"right values {_range_words(number, low)} are hit in {count:,} of {total:,} tensors, where chance would "
                f"bring {_few(mean)}"
            )


def _range_words(number: int, low: float) -> str:
    if number == 0:
        return "of exactly 0"
    if number == len(DECADES) - 1:
        return f"of {low:g} and more"
    below = DECADES[number + 1]
    return f"below {below:g}" if number == 1 else f"from {low:g} to {below:g}"
