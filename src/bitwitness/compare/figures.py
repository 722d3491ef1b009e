"""Where the lines, bars and dots of a comparison's figures lie. What they look like is in the template; numbers come from the record.

Each figure says in words what it shows, for whoever cannot see it. Magnitudes run over twenty decades here (a severity of 1e12 beside a
frequency of 1e-7), so most axes are logarithmic, with a line of its own for 0; thousands of steps are thinned to the lowest and
highest of each stretch, so that a single spike stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitwitness.compare import report_words as words
from bitwitness.compare.records import DECADES
from bitwitness.faults.report import ticks as round_numbers

Record = Mapping[str, Any]
Points = list[tuple[int, float]]

WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 12, 34
NAMES = 300
ROW = 22
MOST_ROWS = 24
MOST_STRETCHES = 300

_LONGEST_NAME = 40
_LOWEST = 1e-300
_ABOVE_USUAL = 3.0
"""Losses beyond this multiple of the leader's highest are drawn at the top: one that explodes must not hide the rest."""

FIELDS: Mapping[str, tuple[int, int]] = {
    "bfloat16": (7, 8),
    "float16": (10, 5),
    "float32": (23, 8),
    "float64": (52, 11),
    "float8_e4m3fn": (3, 4),
    "float8_e5m2": (2, 5),
}
"""By dtype: bits of the mantissa, the lowest, and of the exponent above them; the sign is above both."""


@dataclass(frozen=True, slots=True)
class Tick:
    """A label of an axis, and where."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: `segments` are points of polylines, `dots` are single points, `missing` where a value is not finite."""

    kind: str
    name: str
    segments: tuple[str, ...]
    dots: tuple[tuple[float, float], ...] = ()
    missing: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps."""

    title: str
    unit: str
    description: str
    height: int
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    void: tuple[tuple[float, float], ...] = ()
    note: str = ""
    width: int = WIDTH
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP

    @property
    def bottom(self) -> int:
        """Where the axis of steps lies."""
        return self.height - BOTTOM


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar, or a dot with its interval: places in the drawing, and what it says."""

    x: float
    y: float
    width: float
    height: float
    kind: str
    title: str
    label: str = ""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Bars:
    """Bars, or dots with intervals."""

    title: str
    description: str
    height: float
    bars: tuple[Bar, ...]
    ticks: tuple[Tick, ...] = ()
    names: tuple[Tick, ...] = ()
    zero: float = 0.0
    hidden: int = 0
    note: str = ""
    width: int = WIDTH


# Scales --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """Where values lie between two places of the drawing; beyond its ends at the ends."""

    lowest: float
    highest: float
    first: float
    last: float

    def __call__(self, value: float) -> float:
        """The place of a value."""
        span = self.highest - self.lowest
        share = (min(max(value, self.lowest), self.highest) - self.lowest) / span if span > 0 else 0.5
        return round(self.first + (self.last - self.first) * share, 1)


@dataclass(frozen=True, slots=True)
class Decades:
    """The same for magnitudes: logarithmic over whole decades; 0, and what is less, on a line of its own at the first place."""

    lowest: int
    highest: int
    first: float
    last: float
    with_zero: bool

    @classmethod
    def over(cls, values: Iterable[float], first: float, last: float) -> Decades:
        """That shows all of these."""
        known = list(values)
        powers = [math.log10(max(value, _LOWEST)) for value in known if value > 0]
        low = math.floor(min(powers, default=0.0))
        high = max(math.ceil(max(powers, default=1.0)), low + 1)
        return cls(low, high, first, last, any(value <= 0 for value in known))

    def __call__(self, value: float) -> float:
        """The place of a magnitude."""
        return self._at(math.log10(max(value, _LOWEST))) if value > 0 else self.first

    def _at(self, power: float) -> float:
        start = self.first + (self.last - self.first) * (0.1 if self.with_zero else 0.0)
        return Scale(self.lowest, self.highest, start, self.last)(power)

    def ticks(self, most: int = 6) -> tuple[Tick, ...]:
        """Powers of ten, and 0 where it is shown."""
        stride = max(1, math.ceil((self.highest - self.lowest) / max(1, most - 1)))
        powers = range(self.lowest, self.highest + 1, stride)
        zero = (Tick(self.first, "0"),) if self.with_zero else ()
        return zero + tuple(Tick(self._at(power), f"1e{power}" if power else "1") for power in powers)


def thinned(points: Points, most: int = MOST_STRETCHES) -> Points:
    """Of each stretch of a long series the lowest and the highest point, in order of steps; a short series as it is."""
    if len(points) <= 2 * most:
        return points
    kept: Points = []
    for number in range(most):
        stretch = points[number * len(points) // most : (number + 1) * len(points) // most]
        ends = {min(stretch, key=lambda one: one[1]), max(stretch, key=lambda one: one[1])}
        kept += sorted(ends)
    return kept


# Curves over steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """What is drawn as one curve; `missing` are the steps in which it is not finite, where the curve is broken."""

    kind: str
    name: str
    points: Points
    missing: list[int] = field(default_factory=list)


def values(points: Sequence[Record], name: str) -> Points:
    """A quantity by step, without the steps that do not have it."""
    return [(point["step"], point[name]) for point in points if point[name] is not None]


def frequencies_by_step(mode: Record) -> Chart | None:
    """The share of elements that differ, step by step."""
    points = mode["series"]
    counted = [point for point in points if not point["void"] and point["elements"] > 0]
    shares = [(point["step"], point["mismatches"] / point["elements"]) for point in counted]
    if not any(share for _, share in shares):
        return None
    hit = [one for one in shares if one[1]]
    highest = max(hit, key=lambda one: one[1])
    return _chart(
        "Share of elements that differ, by step",
        "share",
        f"{len(hit)} of {len(shares)} steps have mismatches; the most in step {highest[0]}: {words.rate(highest[1])} of its elements.",
        [Series("suspect", "suspect", shares)],
        points,
        dotted=True,
    )


def losses(mode: Record) -> Chart | None:
    """Losses of the suspect, the leader and the control."""
    points = mode["series"]
    own, leaders = values(points, "loss"), values(points, "reference_loss")
    control = values(mode["control"], "loss")
    if not own and not leaders:
        return None
    lost = [point["step"] for point in points if point["loss"] is None]
    lines = [Series("leader", "leader", leaders)]
    lines += [Series("control", "control (another seed)", control)] if control else []
    lines += [Series("suspect", "suspect", own, lost)]
    usual = [loss for _, loss in leaders or own]
    told = [
        f"{line.name} from {words.figure(line.points[0][1])} to {words.figure(line.points[-1][1])}"
        for line in lines
        if line.points
    ]
    told += [f"the suspect's is not finite in {len(lost)} steps"] if lost else []
    return _chart("Loss", "loss", "; ".join(told) + ".", lines, points, cap=_cap(usual), log=False)


def _cap(usual: Sequence[float]) -> float:
    """Above the usual losses by a multiple of their range, whatever their sign."""
    low, high = min(usual), max(usual)
    return high + (_ABOVE_USUAL - 1) * max(abs(high), high - low)


def drifts(mode: Record) -> Chart | None:
    """How far the parameters are from the leader's: the suspect's, and those of the control."""
    own, control = values(mode["series"], "drift"), values(mode["control"], "drift")
    if not any(drift for _, drift in own + control):
        return None
    lines = [Series("control", "control (another seed)", control)] if control else []
    lines.append(Series("suspect", "suspect", own))
    ends = [(line.name, line.points[-1][1], max(drift for _, drift in line.points)) for line in lines if line.points]
    told = [f"{name}: {words.figure(last)} in the end, at most {words.figure(most)}" for name, last, most in ends]
    return _chart("Drift of the parameters ‖ŵ - w‖", "drift", "; ".join(told) + ".", lines, mode["series"])


def noises(mode: Record) -> Chart | None:
    """Noise to signal of the gradient over all parameters."""
    own = values(mode["series"], "noise")
    if not any(noise for _, noise in own):
        return None
    step, most = max(own, key=lambda one: one[1])
    told = f"The most is {words.rate(most)}, in step {step}."
    return _chart(
        "Noise to signal of the gradient ‖ĝ - g‖ / ‖g‖",
        "ratio",
        told,
        [Series("suspect", "suspect", own)],
        mode["series"],
        dotted=True,
    )


def readings(mode: Record, name: str, title: str, unit: str) -> Chart | None:
    """Temperature or clock of the suspect; None where nothing told it."""
    own = values(mode["series"], name)
    if not own:
        return None
    low, high = min(value for _, value in own), max(value for _, value in own)
    told = f"Between {words.figure(low)} and {words.figure(high)} {unit}."
    return _chart(title, unit, told, [Series("reading", "suspect", own)], mode["series"], log=False, height=150)


def _chart(
    title: str,
    unit: str,
    description: str,
    series: Sequence[Series],
    steps: Sequence[Record],
    *,
    log: bool = True,
    cap: float = math.inf,
    dotted: bool = False,
    height: int = 240,
) -> Chart:
    every = [step for one in series for step, _ in one.points] + [point["step"] for point in steps]
    known = [value for one in series for _, value in one.points]
    x = Scale(min(every), max(every), LEFT, WIDTH - RIGHT)
    first, last = height - BOTTOM, TOP + 4
    y: Callable[[float], float]
    if log:
        y = decades = Decades.over(known, first, last)
        y_ticks = decades.ticks()
    else:
        low, high = min(known), min(max(known), cap)
        y = Scale(low, high, first, last)
        y_ticks = tuple(Tick(y(value), f"{value:g}") for value in round_numbers(low, high, 5))
    return Chart(
        title,
        unit,
        description,
        height,
        tuple(_line(one, x, y, dotted) for one in series),
        tuple(Tick(x(step), f"{step:g}") for step in round_numbers(min(every), max(every), 8) if step == int(step)),
        y_ticks,
        _void(steps, x),
        f"What is above {words.figure(cap)} is drawn at the top." if max(known) > cap else "",
    )


def _line(one: Series, x: Callable[[float], float], y: Callable[[float], float], dotted: bool) -> Line:
    lost = set(one.missing)
    pieces: list[Points] = [[]]
    for step, value in sorted([*one.points, *((step, math.nan) for step in lost)]):
        if math.isnan(value):
            pieces.append([])
        else:
            pieces[-1].append((step, value))
    whole = sum(map(len, pieces)) or 1
    drawn = [thinned(piece, max(2, MOST_STRETCHES * len(piece) // whole)) for piece in pieces if piece]
    missing = tuple(sorted({x(step) for step in lost}))
    dots = [(x(step), y(value)) for piece in drawn for step, value in piece if dotted and value > 0]
    dots += [(x(piece[0][0]), y(piece[0][1])) for piece in drawn if len(piece) == 1 and not dotted]
    segments = [" ".join(f"{x(step)},{y(value)}" for step, value in piece) for piece in drawn if len(piece) > 1]
    return Line(one.kind, one.name, tuple(segments), tuple(dict.fromkeys(dots)), missing)


def _void(steps: Sequence[Record], x: Callable[[float], float]) -> tuple[tuple[float, float], ...]:
    """Bands (left end, width) over steps that are not judged, neighbours joined."""
    bands: list[list[int]] = []
    for point in steps:
        if not point["void"]:
            continue
        if bands and point["step"] <= bands[-1][1] + 1:
            bands[-1][1] = point["step"]
        else:
            bands.append([point["step"], point["step"]])
    return tuple((x(a - 0.5), max(1.5, round(x(b + 0.5) - x(a - 0.5), 1))) for a, b in bands[:MOST_STRETCHES])


# Dots with intervals -------------------------------------------------------------------------------------------------


def frequencies(mode: Record, confidence: float) -> Bars | None:
    """The worst modules and phases: a dot at the share of elements that differ, a line over its interval."""
    hit = [row for row in words.worst_first(mode["rows"]) if row["mismatches"]["count"] and row["mismatches"]["share"]]
    if not hit:
        return None
    shown = hit[:MOST_ROWS]
    ends = [row["mismatches"][name] for row in shown for name in ("low", "share", "high") if row["mismatches"][name]]
    # An interval whose lower end is 0 would need a line for 0: it begins at the left end instead.
    x = Decades.over([end for end in ends if end > 0], NAMES, WIDTH - 70)
    height = 8 + len(shown) * ROW
    bars = []
    for number, row in enumerate(shown):
        share = row["mismatches"]
        low, high = (x(share[name]) if share[name] else x.first for name in ("low", "high"))
        title = f"{words.place(row)}: {words.rate(share['share'])} ({words.interval(share, confidence)})"
        bars.append(
            Bar(
                low,
                16 + number * ROW,
                max(1.0, round(high - low, 1)),
                0.0,
                "dot",
                title,
                shortened(f"{words.module(row)} · {words.PHASES.get(row['phase'], row['phase'])}"),
                x(share["share"]),
            )
        )
    return Bars(
        "Share of elements that differ, worst first",
        "; ".join(bar.title for bar in bars) + ".",
        height + 26,
        tuple(bars),
        x.ticks(),
        hidden=len(hit) - len(shown),
    )


def shortened(name: str) -> str:
    """A name that fits beside a bar: what tells modules apart are its ends."""
    if len(name) <= _LONGEST_NAME:
        return name
    end = _LONGEST_NAME - 13
    return f"{name[:12]}…{name[-end:]}"


# Histograms ----------------------------------------------------------------------------------------------------------


def bits(patterns: Record) -> Bars | None:
    """Flips of each bit, 0 to 1 upwards and 1 to 0 downwards."""
    flips = patterns["bits"]
    most = max((max(pair) for pair in flips), default=0)
    if not most:
        return None
    middle, reach = 112.0, 86.0
    step = (WIDTH - LEFT - RIGHT) / len(flips)
    bars = []
    for bit, (up, down) in enumerate(flips):
        # The highest bit is at the left, as numbers are written.
        x = round(LEFT + step * (len(flips) - 1 - bit) + 0.1 * step, 1)
        what = bit_field(patterns["dtype"], bit)
        for flipped, kind, title in ((up, "up", "0 to 1"), (down, "down", "1 to 0")):
            height = round(max(1.0, reach * flipped / most), 1) if flipped else 0.0
            if height:
                said = f"bit {bit}{f' ({what})' if what else ''}, {title}: {flipped:,}"
                y = middle - height if kind == "up" else middle
                bars.append(Bar(x, round(y, 1), round(0.8 * step, 1), height, f"{kind} {what}".strip(), said))
    stride = max(1, math.ceil(len(flips) / 32))
    names = tuple(
        Tick(round(LEFT + step * (len(flips) - 0.5 - bit), 1), str(bit)) for bit in range(0, len(flips), stride)
    )
    loudest = sorted(range(len(flips)), key=lambda bit: -sum(flips[bit]))[:3]
    told = ", ".join(f"bit {bit} ({sum(flips[bit]):,})" for bit in loudest if sum(flips[bit]))
    up, down = (sum(pair[way] for pair in flips) for way in (0, 1))
    ticks = (Tick(middle - reach, f"{most:,}"), Tick(middle, "0"), Tick(middle + reach, f"{most:,}"))
    return Bars(
        f"Flipped bits of {patterns['dtype']}: 0 to 1 up, 1 to 0 down",
        f"{up:,} flips from 0 to 1, {down:,} from 1 to 0; most often {told}.",
        232,
        tuple(bars),
        ticks,
        names,
        middle,
    )


def bit_field(dtype: str, bit: int) -> str:
    """`mantissa`, `exponent` or `sign`; "" where the dtype has none."""
    mantissa, exponent = FIELDS.get(dtype.removeprefix("torch."), (0, 0))
    if not mantissa or bit > mantissa + exponent:
        return ""
    return "mantissa" if bit < mantissa else "exponent" if bit < mantissa + exponent else "sign"


def lags(patterns: Record) -> Bars | None:
    """Pairs of wrong elements by their distance: bars for what was seen, a line across for what chance would give."""
    found = patterns["lags"]
    most = max((max(one["pairs"], one["expected"] or 0.0) for one in found), default=0)
    if not most:
        return None
    top, bottom = 12.0, 150.0
    step = (WIDTH - LEFT - RIGHT) / len(found)
    y = Scale(0, most, bottom, top)
    bars = []
    for number, one in enumerate(found):
        expected = one["expected"] or 0.0
        beyond = ", more than chance allows" if one["found"] else ""
        said = f"lag {one['lag']}: {one['pairs']:,} pairs, {words.figure(expected)} by chance{beyond}"
        x, at = round(LEFT + step * (number + 0.1), 1), y(one["pairs"])
        kind = "found" if one["found"] else "usual"
        bars.append(Bar(x, at, round(0.8 * step, 1), round(bottom - at, 1), kind, said, at=y(expected)))
    names = tuple(Tick(round(LEFT + step * (number + 0.5), 1), str(one["lag"])) for number, one in enumerate(found))
    stand_out = [str(one["lag"]) for one in found if one["found"]]
    told = f"More than chance allows at {', '.join(stand_out)}." if stand_out else "None is more than chance allows."
    ticks = tuple(Tick(y(value), f"{value:g}") for value in round_numbers(0, most, 4))
    return Bars("Distance of wrong elements within a tensor", told, 190, tuple(bars), ticks, names, bottom)


def ranges(patterns: Record) -> Bars | None:
    """By magnitude of the right value: the share of elements that differ."""
    rows = [(low or 0.0, of, wrong, wrong / of if of else None) for low, of, wrong in patterns["ranges"] if of or wrong]
    shares = [share for *_, share in rows if share]
    if not shares:
        return None
    x = Decades.over(shares, NAMES, WIDTH - 150)
    bars = []
    for number, (low, of, wrong, share) in enumerate(rows):
        said = f"{range_name(low)}: {wrong:,} of {of:,} differ, {words.rate(share)}"
        kind = "dot" if share else "none"
        at = x(share) if share else x.first
        bars.append(
            Bar(x.first, 16 + number * ROW, max(0.0, round(at - x.first, 1)), 0.0, kind, said, range_name(low), at)
        )
    told = "; ".join(bar.title for bar in bars)
    return Bars(
        "Share that differs, by magnitude of the right value", f"{told}.", 34 + len(rows) * ROW, tuple(bars), x.ticks(4)
    )


def range_name(lower: float) -> str:
    """A range of magnitude by its lower end, as in `records.DECADES`."""
    if lower == 0:
        return "exactly 0"
    above = next((end for end in DECADES if end > lower), None)
    if above is None:
        return f"{words.figure(lower)} and more, or not finite"
    return (
        f"below {words.rate(above)}, not 0"
        if lower <= DECADES[1]
        else f"{words.figure(lower)} to {words.figure(above)}"
    )
