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
    LEAST_CHANCE,
    MOST_ELEMENTS,
    MOST_MICRO_BATCHES,
    MOST_RANKS,
    MOST_STEPS,
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

_OPTIONS = ("rank", "node", "during")
_TIMES = ("step", "steps", "every", "p", "from", "micro")

_TAKES = {
    "rank": "rank takes the number of one rank, from 0 on, or * for every rank alike",
    "node": "node takes the name of one node",
    "during": f"during takes one of {', '.join(WORKS)}",
    "step": "step=N is one step, from 0 on; several are steps=A..B, or every=N from=A",
    "steps": "steps=A..B are those from A to B, both included; without an end it is every=1 from=A",
    "every": "every=N is each N-th step",
    "from": "from=N is the first step",
    "p": "p=SHARE is how likely it is in a step, e.g. p=0.1",
    "micro": "micro=K is one micro-batch of a step, from 0 on",
    "n": "n=K takes a number of elements; `all` is every one",
    "rate": "rate=R is how likely it is for an element, e.g. rate=0.001",
    "run": "run=K,stride=S,align=A takes three numbers of elements",
    "groups": "groups=K takes the number of elements in a group",
    "grid": "grid=K,rows=R,columns=C takes three numbers",
    "tile": "a tile is rows times columns, e.g. tile=16x16",
    "frac": "frac=A..B takes shares of all elements, e.g. frac=0.2..0.75",
    "index": "index=I+J+... takes the places of elements, from 0 on, joined by +",
    "bit": "one bit, from 0, the least significant, up or from -1, the uppermost, down; or any",
    "bits": "bits=K takes a number of bits",
    "scale": "scale=F takes a factor, e.g. scale=1e4",
    "add": "add=F takes a share of the element itself, e.g. add=0.01",
    "set": "set=V takes a value, e.g. set=1e17, or inf; `nan` is a mutation of its own",
    "profile": "profile=anatomy",
    "copy": "copy=other or copy=stale",
    "intermittent": "intermittent=P is how likely it is at each opportunity, e.g. intermittent=0.1",
    "if": "if=A..B is a range of magnitudes, from 0 on and ascending; without an end if=A..inf",
}
"""What the value of a word may be, for who wrote something else."""
_TAKES |= dict.fromkeys(("stride", "align"), _TAKES["run"]) | dict.fromkeys(("rows", "columns"), _TAKES["grid"])
_TAKES |= {word: f"{word}=B is {_TAKES['bit']}" for word in ("bit", "stuck0", "stuck1")}

_MEANT = {
    "target": {
        "grad": "grad_w of a parameter, grad_in or grad_out of a module",
        "gradient": "grad_w of a parameter, grad_in or grad_out of a module",
        "weight": "fwd_w as an operand, or param in memory",
        "output": "fwd_out",
        "activation": "fwd_out",
        "batch": "input",
        "checkpoint": "ckpt",
        "optimizer": "exp_avg, exp_avg_sq or momentum_buffer",
    },
    "word of a time": {"to": "steps=A..B", "until": "steps=A..B", "at": "step=N"},
    "mutation": {
        "flip": "bit=B, or sign",
        "bitflip": "bit=B",
        "mul": "scale=F",
        "multiply": "scale=F",
        "value": "set=V",
        "stuck": "stuck0=B or stuck1=B",
        "negate": "sign",
    },
    "word of a persistence": {"p": "intermittent=P", "always": "permanent", "transient": "once", "stuck": "permanent"},
}
"""Words from elsewhere that no spelling is close to, and what is written here."""

_NO_SHARE = 2.0**-54
"""A smaller share of a number more or less is lost in the rounding of every dtype."""

_WHOLE = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"[+-]?(?:(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[+-]?[0-9]+)?|inf(?:inity)?|nan)", re.IGNORECASE)
_NO_ARROW = re.compile(r"=>|-\s+>|\u2192|[\u2013\u2014]>|>")


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
    _refuse_other_order(where_text, rest)
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

    def word(self) -> str:
        """The text as a message shows it."""
        return repr(self.text if len(self.text) <= 40 else f"{self.text[:30]}...")

    def whole_number(self, takes: str, least: int | None = 0, most: int = MOST_ELEMENTS) -> int:
        """This piece as a whole number; `takes`: the word whose value it is."""
        hint = _TAKES[takes]
        if not self.text:
            self.fail(f"a number is missing: {hint}")
        if not _WHOLE.fullmatch(self.text):
            self.fail(f"{self.word()} is no whole number: {hint}")
        # Not read if too long: Python refuses thousands of digits by another error.
        long = len(self.text.lstrip("-0")) > len(str(most))
        value = (-1 if self.text.startswith("-") else 1) * 10 * most if long else int(self.text)
        if least is not None and value < least:
            self.fail(f"{self.text if len(self.text) <= 40 else self.word()} is less than {least}: {hint}")
        if abs(value) > most:
            self.fail(f"{self.word()} is more than {most}, which no job has: {hint}")
        return value

    def number(self, takes: str, *, finite: bool = True) -> float:
        """This piece as a number; one that double precision would turn into infinity or 0 is none."""
        hint = _TAKES[takes]
        if not self.text:
            self.fail(f"a number is missing: {hint}")
        if self.text.endswith("%"):
            self.fail(f"{self.word()} is no number: write 0.1 for 10 %; {hint}")
        if not _NUMBER.fullmatch(self.text):
            self.fail(f"{self.word()} is no number: {hint}")
        value = float(self.text)
        if math.isinf(value) and "n" not in self.text.lower():
            self.fail(
                f"{self.word()} is more than double precision holds, 1.8e308" + ("" if finite else "; or write inf")
            )
        if not value and re.search(r"[1-9]", re.split("e", self.text, flags=re.IGNORECASE)[0]):
            self.fail(f"{self.word()} is less than double precision tells from 0, 5e-324")
        if math.isnan(value) or (finite and math.isinf(value)):
            self.fail(f"{self.word()} is no number that can be meant here: {hint}")
        return value

    def share(self, takes: str, least: float = 0.0) -> float:
        value = self.number(takes)
        if not 0.0 < value <= 1.0:
            self.fail(f"{self.word()} is no share above 0 and up to 1: {_TAKES[takes]}")
        if value < least:
            self.fail(f"{self.word()} is so small that it comes in no job; the least is {least}")
        return value

    def limits(self) -> tuple[_Piece, _Piece]:
        """`A..B`, or A alone for both."""
        low, high = self.cut_off("..")
        return low, low if high is None else high

    def keyword(self, known: Iterable[str], what: str) -> str:
        """This piece as one of several words."""
        if self.text not in known:
            names, lower = list(known), self.text.lower()
            close = [lower] if lower in names else difflib.get_close_matches(lower, names, n=2, cutoff=0.6)
            meant = _MEANT.get(what, {}).get(lower) or " or ".join(close)
            hint = f"did you mean {meant}?" if meant else f"there are {', '.join(names)}"
            self.fail(f"{self.word()} is no {what}: {hint}" if self.text else f"a {what} is missing: {hint}")
        return self.text

    def last(self, length: int = 0) -> _Piece:
        """The end of this piece, to point at."""
        return _Piece(self.line, self.end - length, self.end)


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
            if value is not None and not key.text:
                piece.fail("'=' stands between a word and its value, without blanks: step=8")
            if piece.text.endswith(","):
                piece.last(1).fail("words are separated by blanks here, without ','")
            key.keyword(known, what)
            self.note(key.text, piece)
            values[key.text] = _Piece(piece.line, piece.end, piece.end) if value is None else value
            if value is not None and not value.text:
                value.fail(f"after {key.text}= a value is missing" + _hint(key.text))
            if value is not None and re.search(r"\s", value.text):
                value.pieces(r"\s\S+")[0].fail("parts of a selection are joined by ',': run=8,stride=2")
        return values


def _refuse_other_order(where: _Piece, rest: _Piece) -> None:
    """What is all there, but in another order or with a separator left out."""
    if "->" in where.text:
        _Piece(rest.line, rest.line.index("@"), rest.end).fail(
            "the time comes before what is hit: fwd_out @ step=8 : n=1 -> bit=any"
        )
    if ":" not in rest.text:
        for piece in rest.pieces(r"\S+"):
            key, value = piece.cut_off("=")
            if value is not None and key.text in get_args(SelectKind):
                piece.fail("after the time, ':' is missing before what is hit, e.g. '@ step=8 : n=1 -> bit=any'")


def _where(text: _Piece, words: _Words) -> Where:
    settings, target = [], None
    for piece in text.pieces(r"\S+"):
        key, value = piece.cut_off("=")
        if key.text in _OPTIONS or key.text == "each":
            if value is None and key.text != "each":
                piece.last().fail(f"a value is missing: write {key.text}=...; {_TAKES[key.text]}")
            settings.append(piece)
            continue
        named, glob = piece.cut_off(":")
        _refuse_unlike_a_target(piece, named, target)
        words.note("target", named)
        if glob is not None:
            words.note("glob", glob)
            if not glob.text:
                glob.fail("after ':' a name or a glob is missing, which follows without a blank: fwd_out:head")
        target = Where(cast("Target", named.text), glob.text if glob is not None else "")
    if target is None:
        text.last().fail(f"the target is missing: there are {', '.join(TARGETS)}")
    values = words.items(settings, (*_OPTIONS, "each"), "word of a place")
    rank, node, during = (values.get(option) for option in _OPTIONS)
    _refuse_value(values, "each")
    if node is not None and re.search(r"[*?]", node.text):
        node.fail(f"{node.word()} is no node: {_TAKES['node']}, and no glob")
    return Where(
        target.target,
        target.glob,
        rank=None if rank is None else "*" if rank.text == "*" else rank.whole_number("rank", most=MOST_RANKS),
        node="" if node is None else node.text,
        during=None if during is None else cast("Work", during.keyword(WORKS, "work")),
        each="each" in values,
    )


def _refuse_unlike_a_target(piece: _Piece, named: _Piece, before: Where | None) -> None:
    """What is no target, in words that know how targets and their names are written."""
    key = piece.cut_off("=")[0].text
    if named.text in TARGETS:
        return
    if key in TARGETS:
        piece.fail(f"the name of what is hit follows ':': {key}:{piece.text[len(key) + 1 :] or 'NAME'}")
    if named.text in (*_OPTIONS, "each"):
        piece.fail(f"write {named.text}={piece.text[len(named.text) + 1 :]}, with '='; ':' is for the names of targets")
    if "=" in named.text:
        piece.cut_off("=")[0].keyword((*_OPTIONS, "each", *_TIMES), "word of a place")
        piece.fail(f"{key} is a word of a time, which follows '@': fwd_out @ step=8")
    if before is not None:
        name = piece.text.lstrip(":")
        joined = f"{before.target}:{name}" if name else f"{before.target}:head"
        piece.fail(f"{piece.word()} is no second target; the name of one follows ':' without blanks: {joined}")
    for target in TARGETS:
        if named.text.startswith(f"{target}.") and len(named.text) > len(target) + 1:
            piece.fail(f"{named.word()} is no target: a name follows ':', {target}:{named.text[len(target) + 1 :]}")
    named.keyword(TARGETS, "target")


def _hint(word: str) -> str:
    return f": {_TAKES[word]}" if word in _TAKES else ""


def _refuse_value(values: dict[str, _Piece], word: str) -> None:
    if word in values and values[word].text:
        values[word].fail(f"{word} takes no value")


def _when(text: _Piece, words: _Words) -> When:
    if not text.text:
        text.fail("a time is missing: step=N, steps=A..B, every=N or p=SHARE")
    pieces = text.pieces(r"\S+")
    if _WHOLE.fullmatch(pieces[0].text):
        pieces[0].fail(f"{pieces[0].word()} is no time: write step={pieces[0].text}")
    values = words.items(pieces, _TIMES, "word of a time")

    def step(piece: _Piece, word: str, least: int = 0) -> int:
        return piece.whole_number(word, least, MOST_STEPS)

    made: dict[str, Any] = {}
    if "step" in values:
        made["first"] = made["last"] = step(values["step"], "step")
    if "steps" in values:
        if made:
            values["steps"].fail("either step=N or steps=A..B")
        low, high = values["steps"].limits()
        made["first"], made["last"] = step(low, "steps"), step(high, "steps")
        if made["last"] < made["first"]:
            high.fail(f"{made['last']} is less than {made['first']}, so there is no step: {_TAKES['steps']}")
    if "from" in values:
        if made:
            values["from"].fail("from=N goes with every=N and p=SHARE, not with step and steps")
        made["first"] = step(values["from"], "from")
    if "every" in values:
        made["every"] = step(values["every"], "every", least=1)
    if "p" in values:
        made["p"] = values["p"].share("p", LEAST_CHANCE)
    if not {"step", "steps", "every", "p"} & set(values):
        text.fail("a time is missing: step=N, steps=A..B, every=N or p=SHARE")
    if "micro" in values:
        made["micro"] = values["micro"].whole_number("micro", most=MOST_MICRO_BATCHES)
    return When(**made)


def _body(text: _Piece, words: _Words) -> tuple[Select, Mutate, Persist, str]:
    selected, mutation = text.cut_off("->")
    if mutation is not None:
        return _select(selected, words), _mutate(mutation, words), Persist(), ""
    first, *others = text.pieces(r"\S+") or [text]
    if others and first.text in presets.NAMES:
        others[0].fail(f"after a preset, ';' and a persistence may follow: {first.text} ; permanent")
    if not re.fullmatch(r"[A-Za-z][\w.-]*", text.text) or text.text in get_args(SelectKind):
        unlike = text.pieces(_NO_ARROW.pattern)
        if unlike:
            unlike[0].fail(f"{unlike[0].word()} is no '->', which stands between a selection and a mutation")
        if text.cut_off("=")[0].text in get_args(MutateKind):
            text.fail("before a mutation, a selection and '->' are missing, e.g. 'n=1 -> " + text.text + "'")
        text.last().fail("'->' and what becomes of the elements are missing, e.g. '-> bit=any'; or give a preset alone")
    preset = presets.get(text.keyword(presets.NAMES, "preset"))
    words.note("mutate", text)
    words.note("select", text)
    return preset.select, preset.mutate, preset.persist, text.text


def _select(text: _Piece, words: _Words) -> Select:
    words.note("select", text)
    items = text.pieces(r"[^,]+")
    kind = _selection(text, items)
    values = _Words().items(
        items, (kind, *_SELECTIONS.get(kind, ()), "channels_last"), f"part of a selection by {kind}"
    )
    made: dict[str, Any] = {"channels_last": "channels_last" in values}
    _refuse_value(values, "channels_last")
    value = values[kind]
    match kind:
        case "n" | "run" | "groups" | "grid":
            made["count"] = value.whole_number(kind, least=1)
        case "rate":
            made["rate"] = value.share("rate", LEAST_CHANCE)
        case "tile":
            rows, columns = value.cut_off("x")
            if columns is None:
                value.fail(f"{value.word()} is none: {_TAKES['tile']}")
            made["count"], made["columns"] = (side.whole_number("tile", least=1) for side in (rows, columns))
        case "index":
            made["indices"] = _indices(value)
        case "row" | "largest" | "all":
            _refuse_value(values, kind)
        case "frac":
            pass
    for name in ("stride", "align", "rows", "columns"):
        if name in values:
            made[name] = values[name].whole_number(name, least=1)
    if kind == "grid" and not (values.keys() >= {"rows", "columns"} and made["columns"] >= made["count"]):
        value.fail("a grid is K in every C columns of every R-th row: grid=K,rows=R,columns=C, where C is K at least")
    if "frac" in values:
        low, high = (limit.share("frac") for limit in values["frac"].limits())
        if low > high:
            values["frac"].fail("the first share is larger than the second")
        made["low"], made["high"] = low, high
    return Select(kind, **made)


def _selection(text: _Piece, items: list[_Piece]) -> SelectKind:
    """The kind of a selection, or what is wrong with how it is written."""
    if not items:
        text.fail(f"a selection is missing: there are {', '.join(get_args(SelectKind))}")
    if text.text in presets.NAMES:
        text.fail(f"a preset stands alone, without '->' and a mutation: {text.text}")
    if _WHOLE.fullmatch(items[0].text):
        items[0].fail(f"{items[0].word()} is no selection: write n={items[0].text}, or index={items[0].text}")
    kind = items[0].cut_off("=")[0].keyword(get_args(SelectKind), "selection")
    if kind == "index" and len(items) > 1 and _WHOLE.fullmatch(items[1].text):
        items[1].fail(f"the places of elements are joined by '+': {items[0].text}+{items[1].text}")
    return cast("SelectKind", kind)


def _indices(value: _Piece) -> tuple[int, ...]:
    if not value.text:
        value.fail("index=I+J+... needs at least one element")
    parts = [part.whole_number("index") for part in value.pieces(r"[^+]+")]
    if len(set(parts)) != len(parts):
        value.fail("an element is given twice")
    return tuple(parts)


def _mutate(text: _Piece, words: _Words) -> Mutate:
    words.note("mutate", text)
    _refuse_more_than_a_mutation(text)
    key, value = text.cut_off("=")
    if _NUMBER.fullmatch(text.text) and key.text not in get_args(MutateKind):
        text.fail(f"{text.word()} is no mutation: write set={text.text}")
    kind = cast("MutateKind", key.keyword(get_args(MutateKind), "mutation"))
    if kind in _BARE:
        if value is not None and value.text:
            value.fail(f"{kind} takes no value")
        return Mutate(kind)
    if value is None or not value.text:
        text.last().fail(f"{kind} needs a value: {_TAKES[kind]}")
    match kind:
        case "bit" | "stuck0" | "stuck1":
            return Mutate(kind, bit=None if value.text == "any" else value.whole_number(kind, least=None))
        case "bits":
            return Mutate(kind, count=value.whole_number("bits", least=1))
        case "profile":
            return Mutate(kind, profile=value.keyword(("anatomy",), "profile"))
        case "copy":
            source = value.keyword(("other", "stale"), "source of a copy")
            return Mutate(kind, source="other" if source == "other" else "stale")
        case _:
            number = value.number(kind, finite=kind != "set")
            if (kind == "scale" and number == 1.0) or (kind == "add" and abs(number) < _NO_SHARE):
                value.fail(f"{kind}={value.text} changes nothing")
            return Mutate(kind, value=number)


def _refuse_more_than_a_mutation(text: _Piece) -> None:
    """What follows the one mutation of a fault without the ';' or the '&' that it needs."""
    first, *others = text.pieces(r"[^\s,]+") or [text]
    for piece in others:
        if first.text in get_args(MutateKind) and first.text not in _BARE and _NUMBER.fullmatch(piece.text):
            piece.fail(f"between {first.text} and its value, '=' is missing: {first.text}={piece.text}")
        word = piece.cut_off("=")[0].text
        if piece.text == "&":
            piece.fail("one fault is read here; several are read by parse_all")
        if word in (*get_args(PersistKind), "redraw", "if"):
            piece.fail(f"before {word}, ';' is missing: '; {piece.text}'")
        if word in get_args(MutateKind):
            piece.fail("a fault has one mutation; two are two faults, joined by ' & '")


def _persist(text: _Piece, words: _Words) -> Persist:
    kinds = get_args(PersistKind)
    pieces = text.pieces(r"[^\s;]+|;")
    for piece in pieces:
        if piece.text == ";":
            piece.fail("';' stands once; what follows it is separated by blanks: ; permanent redraw")
    if not pieces:
        text.fail(f"after ';' a persistence is missing: {', '.join(kinds)}")
    values = words.items(pieces, (*kinds, "redraw", "if"), "word of a persistence")
    said = [kind for kind in kinds if kind in values]
    if len(said) > 1:
        words.get(said[1], text).fail(f"either {said[0]} or {said[1]}")
    kind = cast("PersistKind", said[0] if said else "once")
    for name in ("once", "permanent", "redraw"):
        _refuse_value(values, name)
    only_if = None
    if "if" in values:
        low, high = values["if"].limits()
        only_if = low.number("if", finite=False), high.number("if", finite=False)
        if not 0.0 <= only_if[0] <= only_if[1]:
            values["if"].fail(_TAKES["if"])
    p = values["intermittent"].share("intermittent", LEAST_CHANCE) if kind == "intermittent" else 1.0
    return Persist(kind, p=p, redraw="redraw" in values, only_if=only_if)
