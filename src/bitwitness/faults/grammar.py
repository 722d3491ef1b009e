"""One fault in one line, read.

Campaign files, the environment variable and records all speak of faults in this notation, so a slip of the pen in any of them
ends here, before anything runs: every error shows the line and points at the column. What a line says that could never happen
(an audit's replay of a checkpoint file) is an error as well. `str()` of a fault writes the line back. No torch.

    fault = where "@" when ":" ( select "->" mutate | preset ) [ ";" persist ]
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NoReturn, cast, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.faults import presets
from bitwitness.faults.impossible import objection
from bitwitness.faults.spec import (
    TARGETS,
    WORKS,
    Fault,
    Mutate,
    MutateKind,
    Persist,
    PersistKind,
    Select,
    SelectKind,
    Target,
    When,
    Where,
    Work,
)

_SELECTIONS: dict[SelectKind, tuple[str, ...]] = {
    "run": ("stride", "align"),
    "grid": ("rows", "columns"),
    "tile": ("frac",),
}
"""What may follow a kind, beside `channels_last`."""

_BARE: tuple[MutateKind, ...] = ("zero", "nan", "inf", "random", "swap", "sign")


def parse(text: str) -> Fault:
    """Read one fault.

    Raises:
        ConfigurationError: it is none, or one that could never happen; shows the line and points at the column.
    """
    text = text.strip("\r\n")
    whole = _Piece(text, 0, len(text))
    if "\n" in text:
        whole.fail("one fault is one line; several are read by parse_all")
    where_text, rest = whole.cut("@", "after the target, '@' and a time are missing, e.g. '@ step=8'")
    when_text, body = rest.cut(":", "after the time, ':' and what is hit are missing, e.g. ': n=1 -> bit=any'")
    body, persist_text = body.cut_off(";")
    words = _Words()
    where, when = _where(where_text, words), _when(when_text, words)
    select, mutate, persist, preset = _body(body, words)
    if persist_text is not None:
        persist = _persist(persist_text, words)
    fault = Fault(where, when, select, mutate, persist, preset)
    wrong = objection(fault)
    if wrong is not None:
        words.get(wrong[0], whole).fail(wrong[1])
    return fault


def parse_all(text: str) -> tuple[Fault, ...]:
    """Read several faults, one a line or joined by ` & `; empty lines and those that begin with `#` say nothing.

    Raises:
        ConfigurationError: as `parse`, or there is none.
    """
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    faults = tuple(parse(one) for line in lines if line for one in re.split(r"\s+&\s+", line))
    if not faults:
        raise ConfigurationError("there is no fault in an empty text; one is e.g. 'fwd_out @ step=8 : n=1 -> bit=any'")
    return faults


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the line that knows where it stands."""

    line: str
    start: int
    end: int

    @property
    def text(self) -> str:
        return self.line[self.start : self.end]

    def fail(self, message: str) -> NoReturn:
        piece = self.stripped()
        before = "".join("\t" if letter == "\t" else " " for letter in self.line[: piece.start])
        raise ConfigurationError(f"column {piece.start + 1}: {message}\n  {self.line.rstrip()}\n  {before}^")

    def stripped(self) -> _Piece:
        left = self.start + len(self.text) - len(self.text.lstrip())
        return _Piece(self.line, left, max(left, self.end - (len(self.text) - len(self.text.rstrip()))))

    def cut_off(self, separator: str) -> tuple[_Piece, _Piece | None]:
        """What is before the first separator and what is behind it, if there is one."""
        at = self.line.find(separator, self.start, self.end)
        if at < 0:
            return self.stripped(), None
        behind = _Piece(self.line, at + len(separator), self.end)
        return _Piece(self.line, self.start, at).stripped(), behind.stripped()

    def cut(self, separator: str, missing: str) -> tuple[_Piece, _Piece]:
        before, behind = self.cut_off(separator)
        if behind is None:
            end = len(self.line.rstrip())
            _Piece(self.line, end, end).fail(missing)
        return before, behind

    def pieces(self, pattern: str) -> list[_Piece]:
        """What the pattern matches, in order."""
        found = re.compile(pattern).finditer(self.line, self.start, self.end)
        return [_Piece(self.line, match.start(), match.end()).stripped() for match in found]

    def whole_number(self, least: int | None = 0) -> int:
        if not re.fullmatch(r"-?[0-9]+", self.text):
            self.fail(f"{self.text!r} is no whole number")
        value = int(self.text)
        if least is not None and value < least:
            self.fail(f"{value} is less than {least}")
        return value

    def number(self, *, finite: bool = True) -> float:
        try:
            value = float(self.text)
        except ValueError:
            self.fail(f"{self.text!r} is no number")
        if math.isnan(value) or (finite and math.isinf(value)):
            self.fail(f"{self.text} is no number that can be meant here")
        return value

    def share(self) -> float:
        value = self.number()
        if not 0.0 < value <= 1.0:
            self.fail(f"{self.text} is no share above 0 and up to 1")
        return value

    def limits(self) -> tuple[_Piece, _Piece]:
        """`A..B`, or A alone for both."""
        low, high = self.cut_off("..")
        return low, low if high is None else high

    def keyword(self, known: Iterable[str], what: str) -> str:
        """This piece as one of several words."""
        if self.text not in known:
            names = list(known)
            close = difflib.get_close_matches(self.text, names, n=2, cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}"
            self.fail(f"{self.text!r} is no {what}: {hint}" if self.text else f"{what} is missing: {hint}")
        return self.text


@dataclass(slots=True)
class _Words:
    """Where each word of a line stands, each said once."""

    found: dict[str, _Piece] = field(default_factory=dict)

    def note(self, name: str, piece: _Piece) -> None:
        if name in self.found:
            piece.fail(f"{name} is said twice")
        self.found[name] = piece

    def get(self, name: str, otherwise: _Piece) -> _Piece:
        return self.found.get(name, otherwise)

    def items(self, pieces: list[_Piece], known: Iterable[str], what: str) -> dict[str, _Piece]:
        """`key=value` and bare words, as the pieces of their values."""
        values = {}
        for piece in pieces:
            key, value = piece.cut_off("=")
            key.keyword(known, what)
            self.note(key.text, piece)
            values[key.text] = _Piece(piece.line, piece.end, piece.end) if value is None else value
            if value is not None and not value.text:
                value.fail(f"after {key.text}= a value is missing")
        return values


def _where(text: _Piece, words: _Words) -> Where:
    options = ("rank", "node", "during")
    settings, target = [], None
    for piece in text.pieces(r"\S+"):
        key = piece.cut_off("=")[0].text
        if key in options or key == "each":
            settings.append(piece)
            continue
        named, glob = piece.cut_off(":")
        if "=" in named.text:
            piece.cut_off("=")[0].keyword((*options, "each"), "word of a place")
        named.keyword(TARGETS, "target")
        words.note("target", named)
        if glob is not None:
            words.note("glob", glob)
            if not glob.text:
                glob.fail("after ':' a name or a glob is missing")
        target = Where(cast("Target", named.text), glob.text if glob is not None else "")
    if target is None:
        end = _Piece(text.line, text.end, text.end)
        end.fail(f"the target is missing: there are {', '.join(TARGETS)}")
    values = words.items(settings, (*options, "each"), "word of a place")
    rank, node, during = (values.get(option) for option in options)
    _refuse_value(values.get("each"))
    return Where(
        target.target,
        target.glob,
        rank=None if rank is None else "*" if rank.text == "*" else rank.whole_number(),
        node="" if node is None else _filled(node),
        during=None if during is None else cast("Work", during.keyword(WORKS, "work")),
        each="each" in values,
    )


def _filled(value: _Piece) -> str:
    if not value.text:
        value.fail("a value is missing: write NAME=VALUE")
    return value.text


def _refuse_value(value: _Piece | None) -> None:
    if value is not None and value.text:
        value.fail("this word takes no value")


def _when(text: _Piece, words: _Words) -> When:
    if not text.text:
        text.fail("a time is missing: step=N, steps=A..B, every=N or p=SHARE")
    values = words.items(text.pieces(r"\S+"), ("step", "steps", "every", "p", "from", "micro"), "word of a time")
    made: dict[str, Any] = {}
    if "step" in values:
        made["first"] = made["last"] = values["step"].whole_number()
    if "steps" in values:
        if made:
            values["steps"].fail("either step=N or steps=A..B")
        low, high = values["steps"].limits()
        made["first"] = low.whole_number()
        made["last"] = high.whole_number(least=made["first"])
    if "from" in values:
        if made:
            values["from"].fail("from=N goes with every=N and p=SHARE, not with step and steps")
        made["first"] = values["from"].whole_number()
    if "every" in values:
        made["every"] = values["every"].whole_number(least=1)
    if "p" in values:
        made["p"] = values["p"].share()
    if not {"step", "steps", "every", "p"} & set(values):
        text.fail("a time is missing: step=N, steps=A..B, every=N or p=SHARE")
    if "micro" in values:
        made["micro"] = values["micro"].whole_number()
    return When(**made)


def _body(text: _Piece, words: _Words) -> tuple[Select, Mutate, Persist, str]:
    selected, mutation = text.cut_off("->")
    if mutation is not None:
        return _select(selected, words), _mutate(mutation, words), Persist(), ""
    if not re.fullmatch(r"[a-z][\w.-]*", text.text) or text.text in get_args(SelectKind):
        end = _Piece(text.line, text.end, text.end)
        end.fail("'->' and what becomes of the elements are missing, e.g. '-> bit=any'; or give a preset alone")
    preset = presets.get(text.keyword(presets.NAMES, "preset"))
    words.note("mutate", text)
    words.note("select", text)
    return preset.select, preset.mutate, preset.persist, text.text


def _select(text: _Piece, words: _Words) -> Select:
    words.note("select", text)
    items = text.pieces(r"[^,]+")
    if not items:
        text.fail(f"a selection is missing: there are {', '.join(get_args(SelectKind))}")
    kind = cast("SelectKind", items[0].cut_off("=")[0].keyword(get_args(SelectKind), "selection"))
    values = _Words().items(
        items, (kind, *_SELECTIONS.get(kind, ()), "channels_last"), f"part of a selection by {kind}"
    )
    made: dict[str, Any] = {"channels_last": "channels_last" in values}
    _refuse_value(values.get("channels_last"))
    value = values[kind]
    match kind:
        case "n" | "run" | "groups" | "grid":
            made["count"] = value.whole_number(least=1)
        case "rate":
            made["rate"] = value.share()
        case "tile":
            rows, columns = value.cut_off("x")
            if columns is None:
                value.fail("a tile is rows times columns, e.g. tile=16x16")
            made["count"], made["columns"] = rows.whole_number(least=1), columns.whole_number(least=1)
        case "index":
            made["indices"] = _indices(value)
        case "row" | "largest" | "all":
            _refuse_value(value)
        case "frac":
            pass
    for name in ("stride", "align", "rows", "columns"):
        if name in values:
            made[name] = values[name].whole_number(least=1)
    if kind == "grid" and not (values.keys() >= {"rows", "columns"} and made["columns"] >= made["count"]):
        value.fail("a grid is K in every C columns of every R-th row: grid=K,rows=R,columns=C, where C is K at least")
    if "frac" in values:
        low, high = (limit.share() for limit in values["frac"].limits())
        if low > high:
            values["frac"].fail("the first share is larger than the second")
        made["low"], made["high"] = low, high
    return Select(kind, **made)


def _indices(value: _Piece) -> tuple[int, ...]:
    if not value.text:
        value.fail("index=I+J+... needs at least one element")
    parts = [part.whole_number() for part in value.pieces(r"[^+]+")]
    if len(set(parts)) != len(parts):
        value.fail("an element is given twice")
    return tuple(parts)


def _mutate(text: _Piece, words: _Words) -> Mutate:
    words.note("mutate", text)
    key, value = text.cut_off("=")
    kind = cast("MutateKind", key.keyword(get_args(MutateKind), "mutation"))
    if kind in _BARE:
        _refuse_value(value)
        return Mutate(kind)
    if value is None or not value.text:
        _Piece(text.line, text.end, text.end).fail(f"{kind} needs a value: {kind}=...")
    match kind:
        case "bit" | "stuck0" | "stuck1":
            return Mutate(kind, bit=None if value.text == "any" else value.whole_number(least=None))
        case "bits":
            return Mutate(kind, count=value.whole_number(least=1))
        case "profile":
            return Mutate(kind, profile=value.keyword(("anatomy",), "profile"))
        case "copy":
            source = value.keyword(("other", "stale"), "source of a copy")
            return Mutate(kind, source="other" if source == "other" else "stale")
        case _:
            number = value.number(finite=kind != "set")
            if number == {"scale": 1.0, "add": 0.0}.get(kind):
                value.fail(f"{kind}={value.text} changes nothing")
            return Mutate(kind, value=number)


def _persist(text: _Piece, words: _Words) -> Persist:
    kinds = get_args(PersistKind)
    pieces = text.pieces(r"\S+")
    if not pieces:
        text.fail(f"after ';' a persistence is missing: {', '.join(kinds)}")
    values = words.items(pieces, (*kinds, "redraw", "if"), "word of a persistence")
    said = [kind for kind in kinds if kind in values]
    if len(said) > 1:
        words.get(said[1], text).fail(f"either {said[0]} or {said[1]}")
    kind = cast("PersistKind", said[0] if said else "once")
    for name in ("once", "permanent", "redraw"):
        _refuse_value(values.get(name))
    only_if = None
    if "if" in values:
        low, high = values["if"].limits()
        only_if = low.number(finite=False), high.number(finite=False)
        if not 0.0 <= only_if[0] <= only_if[1]:
            values["if"].fail("if=A..B is a range of magnitudes, from 0 on and ascending")
    p = values["intermittent"].share() if kind == "intermittent" else 1.0
    return Persist(kind, p=p, redraw="redraw" in values, only_if=only_if)
