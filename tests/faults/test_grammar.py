from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError
from bitwitness.faults import grammar, presets
from bitwitness.faults.impossible import objection
from bitwitness.faults.spec import LEAST_CHANCE, TARGETS, WORKS, Fault, Mutate, Persist, Select, When, Where

COUNTS = st.integers(1, 10**7)
STEPS = st.integers(0, 10**9)
SHARES = st.floats(0.0, 1.0, exclude_min=True)
CHANCES = st.floats(LEAST_CHANCE, 1.0)
NAMES = st.from_regex(r"[A-Za-z_*?\[\]!][\w.*?\[\]!:/-]{0,12}", fullmatch=True)
FINITE = st.floats(allow_nan=False, allow_infinity=False)


def ordered(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.tuples(values, values).map(lambda pair: tuple(sorted(pair)))


WHERES = st.builds(
    Where,
    st.sampled_from(TARGETS),
    glob=st.just("") | NAMES,
    rank=st.none() | st.just("*") | st.integers(0, 10**4),
    node=st.just("") | NAMES.filter(lambda name: "*" not in name and "?" not in name),
    during=st.none() | st.sampled_from(WORKS),
    each=st.booleans(),
)
WHENS = st.one_of(
    st.builds(When, first=STEPS, every=COUNTS, p=CHANCES, micro=st.none() | STEPS),
    st.builds(
        lambda pair, **rest: When(first=pair[0], last=pair[1], **rest),
        ordered(STEPS),
        every=COUNTS,
        p=CHANCES | st.just(1.0),
        micro=st.none() | STEPS,
    ),
    st.builds(lambda step: When(first=step, last=step), STEPS),
)
SELECTS = st.one_of(
    st.builds(Select, st.sampled_from(["n", "groups"]), count=COUNTS, channels_last=st.booleans()),
    st.builds(Select, st.just("rate"), rate=CHANCES),
    st.builds(Select, st.just("run"), count=COUNTS, stride=COUNTS, align=COUNTS, channels_last=st.booleans()),
    st.builds(
        lambda pair, rows: Select("grid", count=pair[0], rows=rows, columns=pair[1]),
        ordered(st.integers(1, 999)),
        COUNTS,
    ),
    st.builds(lambda rows, columns: Select("tile", count=rows, columns=columns), COUNTS, COUNTS),
    st.builds(
        lambda share, rows: Select("tile", count=rows, columns=rows, low=share[0], high=share[1]),
        ordered(SHARES),
        COUNTS,
    ),
    st.builds(lambda share: Select("frac", low=share[0], high=share[1]), ordered(SHARES)),
    st.builds(Select, st.just("index"), indices=st.lists(STEPS, min_size=1, max_size=5, unique=True).map(tuple)),
    st.builds(Select, st.sampled_from(["row", "largest", "all"]), channels_last=st.booleans()),
)
MUTATES = st.one_of(
    st.builds(Mutate, st.sampled_from(["bit", "stuck0", "stuck1"]), bit=st.none() | st.integers(-140, 140)),
    st.builds(Mutate, st.just("bits"), count=st.integers(1, 140)),
    st.builds(Mutate, st.just("profile"), profile=st.just("anatomy")),
    st.builds(Mutate, st.sampled_from(["zero", "nan", "inf", "random", "swap", "sign"])),
    st.builds(Mutate, st.just("copy"), source=st.sampled_from(["other", "stale"])),
    st.builds(Mutate, st.just("scale"), value=FINITE.filter(lambda factor: factor != 1.0)),
    st.builds(Mutate, st.just("add"), value=FINITE.filter(lambda share: abs(share) >= 2.0**-54)),
    st.builds(Mutate, st.just("set"), value=st.floats(allow_nan=False)),
)
PERSISTS = st.builds(
    lambda kind, p, redraw, only_if: Persist(kind, p if kind == "intermittent" else 1.0, redraw, only_if),
    st.sampled_from(["once", "intermittent", "permanent"]),
    CHANCES,
    st.booleans(),
    st.none() | ordered(st.floats(0.0, allow_nan=False)),
)
FAULTS = st.builds(Fault, WHERES, WHENS, SELECTS, MUTATES, PERSISTS)


@settings(max_examples=500, deadline=None)
@given(FAULTS)
def test_what_is_printed_is_read_back_as_the_same_fault(fault: Fault) -> None:
    wrong = objection(fault)
    if wrong is not None:
        with pytest.raises(ConfigurationError, match=re.escape(wrong[1])):
            grammar.parse(str(fault))
        return
    assert grammar.parse(str(fault)) == fault
    assert str(grammar.parse(str(fault))) == str(fault)


@settings(max_examples=100, deadline=None)
@given(st.lists(FAULTS, min_size=1, max_size=4), st.sampled_from([" & ", "\n", "\n\n# a remark & more\n  "]))
def test_several_faults(faults: list[Fault], joint: str) -> None:
    faults = [fault for fault in faults if objection(fault) is None]
    assume(faults)
    assert grammar.parse_all(joint.join(map(str, faults))) == tuple(faults)


ALPHABET = [
    *"@:;-><=,.0123x*+& \t",
    "step",
    "n=1",
    "->",
    "fwd_out",
    " : ",
    " @ ",
    "bit=",
    "if=",
    "..",
    "rank=",
    "tile=",
    "frac=",
]


@settings(max_examples=500, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), max_size=25).map("".join))
@example("fwd_out @ step=1 : index=+ -> bit=1")
@example("fwd_out @ step=1 : tile=x -> bit=1")
@example("fwd_out @ step=1 : n=1 -> bit=1 ; if=..")
@example("fwd_out @ step=1 : , -> bit=1")
@example("")
def test_whatever_is_no_fault_is_refused_in_words(text: str) -> None:
    try:
        grammar.parse(text)
    except ConfigurationError as error:
        message, line, caret = str(error).split("\n")
        column = re.match(r"column (\d+): ", message)
        assert column is not None
        assert line[2:] == text.rstrip()
        assert caret.index("^") - 2 == int(column[1]) - 1


GOOD = {
    "fwd_out@step=1:n=1->bit=any": "fwd_out @ step=1 : n=1 -> bit=any ; once",
    "  each  rank=2 fwd_out:head @ micro=1 steps=1..1 : n=1 -> bit=-1 ; redraw": (
        "rank=2 each fwd_out:head @ step=1 micro=1 : n=1 -> bit=-1 ; once redraw"
    ),
    "param @ from=3 p=0.5 : run=4,stride=1 -> zero ; if=2 permanent": "param @ p=0.5 from=3 : run=4 -> zero ; permanent if=2.0..2.0",
    "param @ every=1 : frac=.5 -> set=1e17": "param @ every=1 : frac=0.5..0.5 -> set=1e+17 ; once",
    "param @ step=3 : tile=2x2,channels_last,frac=0.2..0.75 -> set=-inf ; intermittent=1": (
        "param @ step=3 : tile=2x2,frac=0.2..0.75,channels_last -> set=-inf ; intermittent=1.0"
    ),
    "comm.pre @ step=8 : all -> scale=4": "comm.pre @ step=8 : all -> scale=4.0 ; once",
}


@pytest.mark.parametrize("text", GOOD)
def test_freely_written_lines_have_one_canonical_form(text: str) -> None:
    assert str(grammar.parse(text)) == GOOD[text]


# Each with a part of the message, and the column marked by the letter above it.
WRONG = [
    ("fwd_ou @ step=1 : n=1 -> bit=1", "did you mean fwd_out", 0),
    ("rank=2 @ step=1 : n=1 -> bit=1", "the target is missing", 6),
    ("rank=x param @ step=1 : n=1 -> bit=1", "rank takes the number of one rank, from 0 on, or *", 5),
    ("rank=-1 param @ step=1 : n=1 -> bit=1", "-1 is less than 0", 5),
    ("rank= param @ step=1 : n=1 -> bit=1", "a value is missing", 5),
    ("rnk=2 param @ step=1 : n=1 -> bit=1", "did you mean rank", 0),
    ("rank=1 rank=2 param @ step=1 : n=1 -> bit=1", "rank is said twice", 7),
    ("param loss @ step=1 : n=1 -> bit=1", "target is said twice", 6),
    ("each=1 param @ step=1 : n=1 -> bit=1", "takes no value", 5),
    ("fwd_out: @ step=1 : n=1 -> bit=1", "a name or a glob is missing", 8),
    ("during=reply loss @ step=1 : n=1 -> bit=1", "did you mean replay", 7),
    ("param step=1 : n=1 -> bit=1", "'@' and a time are missing", 27),
    ("param @ step=1", "':' and what is hit are missing", 14),
    ("param @ : n=1 -> bit=1", "a time is missing", 8),
    ("param @ from=3 : n=1 -> bit=1", "a time is missing", 8),
    ("param @ step=1 steps=1..2 : n=1 -> bit=1", "either step=N or steps", 21),
    ("param @ step=1 from=2 : n=1 -> bit=1", "from=N goes with", 20),
    ("param @ steps=4..2 : n=1 -> bit=1", "2 is less than 4", 17),
    ("param @ every=0 : n=1 -> bit=1", "0 is less than 1", 14),
    ("param @ p=0 : n=1 -> bit=1", "no share above 0", 10),
    ("param @ p=1.5 : n=1 -> bit=1", "no share above 0 and up to 1", 10),
    ("param @ step 8 : n=1 -> bit=1", "'8' is no word of a time", 13),
    ("param @ step=1 : n=1", "'->' and what becomes", 20),
    ("param @ step=1 : he2023.rbflop", "did you mean he2023.rbflip", 17),
    ("param @ step=1 : all ; once", "'->' and what becomes", 20),
    ("param @ step=1 : nn=1 -> bit=1", "no selection", 17),
    ("param @ step=1 : -> bit=1", "a selection is missing", 17),
    ("param @ step=1 : n=0 -> bit=1", "0 is less than 1", 19),
    ("param @ step=1 : n -> bit=1", "a number is missing: n=K", 18),
    ("param @ step=1 : n=1,stride=2 -> bit=1", "no part of a selection by n", 21),
    ("param @ step=1 : run=2,stride=2,stride=2 -> bit=1", "stride is said twice", 32),
    ("param @ step=1 : tile=3 -> bit=1", "rows times columns", 22),
    ("param @ step=1 : grid=4,rows=2 -> bit=1", "K in every C columns", 22),
    ("param @ step=1 : grid=4,rows=2,columns=3 -> bit=1", "C is K at least", 22),
    ("param @ step=1 : frac=0.7..0.2 -> bit=1", "larger than the second", 22),
    ("param @ step=1 : index=1+1 -> bit=1", "given twice", 23),
    ("param @ step=1 : index=1+-1 -> bit=1", "-1 is less than 0", 25),
    ("param @ step=1 : all=3 -> bit=1", "takes no value", 21),
    ("param @ step=1 : n=1 -> bitt=1", "did you mean bit", 24),
    ("param @ step=1 : n=1 -> bit", "bit needs a value", 27),
    ("param @ step=1 : n=1 -> bit=x", "no whole number", 28),
    ("param @ step=1 : n=1 -> zero=1", "takes no value", 29),
    ("param @ step=1 : n=1 -> set=nan", "can be meant here", 28),
    ("param @ step=1 : n=1 -> scale=inf", "can be meant here", 30),
    ("param @ step=1 : n=1 -> scale=1", "changes nothing", 30),
    ("param @ step=1 : n=1 -> add=0", "changes nothing", 28),
    ("param @ step=1 : n=1 -> copy=olde", "source of a copy", 29),
    ("param @ step=1 : n=1 -> profile=anatomi", "did you mean anatomy", 32),
    ("param @ step=1 : n=1 -> zero ; ", "a persistence is missing", 30),
    ("param @ step=1 : n=1 -> zero ; forever", "no word of a persistence", 31),
    ("param @ step=1 : n=1 -> zero ; once permanent", "either once or permanent", 36),
    ("param @ step=1 : n=1 -> zero ; intermittent", "a number is missing: intermittent=P", 43),
    ("param @ step=1 : n=1 -> zero ; if=2..1", "range of magnitudes", 34),
    ("param @ step=1 : n=1 -> zero ; if=-1..1", "range of magnitudes", 34),
    # Slips: the message says what would be right.
    ("rank=-1 param @ step=1 : n=1 -> bit=1", "rank takes the number of one rank, from 0 on, or *", 5),
    ("rank 2 param @ step=1 : n=1 -> bit=1", "write rank=...", 4),
    ("rank:2 param @ step=1 : n=1 -> bit=1", "write rank=2, with '='", 0),
    ("node=* param @ step=1 : n=1 -> bit=1", "the name of one node, and no glob", 5),
    ("Fwd_out @ step=1 : n=1 -> bit=1", "did you mean fwd_out?", 0),
    ("fwd_out head @ step=1 : n=1 -> bit=1", "without blanks: fwd_out:head", 8),
    ("fwd_out : head @ step=1 : n=1 -> bit=1", "without blanks: fwd_out:head", 8),
    ("fwd_out: head @ step=1 : n=1 -> bit=1", "follows without a blank", 8),
    ("fwd_out.head @ step=1 : n=1 -> bit=1", "fwd_out:head", 0),
    ("fwd_out=head @ step=1 : n=1 -> bit=1", "follows ':': fwd_out:head", 0),
    ("step=1 param @ step=1 : n=1 -> bit=1", "step is a word of a time", 0),
    ("weight @ step=1 : n=1 -> bit=1", "fwd_w as an operand, or param", 0),
    ("param @ 8 : n=1 -> bit=1", "write step=8", 8),
    ("param @ step = 8 : n=1 -> bit=1", "without blanks: step=8", 13),
    ("param @ step=8..9 : n=1 -> bit=1", "several are steps=A..B", 13),
    ("param @ steps=8.. : n=1 -> bit=1", "without an end it is every=1 from=A", 17),
    ("param @ step=8, every=2 : n=1 -> bit=1", "separated by blanks", 14),
    ("param @ p=10% : n=1 -> bit=1", "0.1 for 10 %", 10),
    ("param @ p=.1 to=9 : n=1 -> bit=1", "did you mean steps=A..B", 13),
    ("param @ step=8 n=1 -> bit=1", "':' is missing before what is hit", 15),
    ("param : n=1 -> bit=1 @ step=8", "the time comes before what is hit", 21),
    ("param @ step=1 : n=1 => bit=1", "'=>' is no '->'", 21),
    ("param @ step=1 : n=1 > bit=1", "'>' is no '->'", 21),
    ("param @ step=1 : bit=1", "e.g. 'n=1 -> bit=1'", 17),
    ("param @ step=1 : 1 -> bit=1", "write n=1", 17),
    ("param @ step=1 : index=1,2 -> bit=1", "joined by '+': index=1+2", 25),
    ("param @ step=1 : run=4 stride=2 -> bit=1", "joined by ','", 23),
    ("param @ step=1 : n=all -> bit=1", "`all` is every one", 19),
    ("param @ step=1 : anatomy -> bit=1", "a preset stands alone", 17),
    ("param @ step=1 : anatomy permanent", "after a preset, ';'", 25),
    ("param @ step=1 : n=1 -> bit 3", "'=' is missing: bit=3", 28),
    ("param @ step=1 : n=1 -> 0", "write set=0", 24),
    ("param @ step=1 : n=1 -> flip=3", "did you mean bit=B", 24),
    ("param @ step=1 : n=1 -> bit=3,zero", "a fault has one mutation", 30),
    ("param @ step=1 : n=1 -> bit=3 permanent", "before permanent, ';' is missing", 30),
    ("param @ step=1 : n=1 -> bit=3 & loss @ step=1 : all -> zero", "several are read by parse_all", 30),
    ("param @ step=1 : n=1 -> bit=3 ; permanent, redraw", "separated by blanks", 41),
    ("param @ step=1 : n=1 -> bit=3 ; permanent ; redraw", "';' stands once", 42),
    ("param @ step=1 : n=1 -> bit=3 ; p=0.5", "did you mean intermittent=P", 32),
    # Numbers that mean nothing.
    ("param @ step=1 : n=1 -> set=1e999", "more than double precision holds", 28),
    ("param @ step=1 : n=1 -> set=1e-999", "less than double precision tells from 0", 28),
    ("param @ step=1 : n=1 -> set=1_0", "no number", 28),
    ("param @ step=1 : n=1 -> add=1e-17", "changes nothing", 28),
    ("param @ step=1 : n=1 -> zero ; if=1..1e999", "or write inf", 37),
    ("param @ step=1 : n=1 -> zero ; if=nan", "can be meant here", 34),
    ("param @ p=1e-30 : n=1 -> zero", "comes in no job", 10),
    ("param @ p=nan : n=1 -> zero", "can be meant here", 10),
    ("param @ step=1 : rate=1e-30 -> zero", "comes in no job", 22),
    # What can never happen.
    ("param @ step=1 : n=1 -> bit=128", "no dtype has more than", 24),
    ("param @ step=1 : n=1 -> stuck1=-129", "no dtype has more than", 24),
    ("param @ step=1 : n=1 -> bits=129", "no dtype has more than 128 bits", 24),
    ("loss @ step=1 : n=1 -> bit=64", "the loss is a real number", 23),
    ("loss @ step=1 : n=2 -> zero", "the loss is one number", 16),
    ("loss @ step=1 : index=0+1 -> zero", "there is no index 1", 16),
    ("loss @ step=1 : n=1 -> swap", "no other element", 23),
    ("loss @ step=1 : he2023.rd_correct", "no other element", 16),
    ("rng @ step=1 : n=1 -> bit=32", "rng:cuda has 64 bits", 22),
    ("rng:* @ step=1 : n=1 -> bits=33", "rng:cuda has 64 bits", 24),
    ("rng:cuda @ step=1 : n=1 -> bit=64", "bits 0 to 63", 27),
    ("rng:cuda @ step=1 : index=2 -> zero", "has 2 words", 20),
    ("rng @ step=1 : index=624 -> zero", "the last is 623", 15),
    ("rng @ step=1 : n=625 -> zero", "n=624 is the most", 15),
    ("rng @ step=1 : n=1 -> set=5e9", "whole numbers from", 22),
    ("digest @ step=1 : n=1 -> bit=64", "the bits 0 to 63", 25),
    ("digest @ step=1 : n=1 -> nan", "know no nan", 25),
    ("digest @ step=1 : n=1 -> scale=0.5", "whole factors", 25),
    ("ckpt @ step=1 : n=1 -> bits=9", "8 bits", 23),
    ("ckpt @ step=1 : n=1 -> set=256", "from 0 to 255", 23),
    ("ckpt @ step=1 : n=1 -> set=0.5", "from 0 to 255", 23),
    ("loss:x @ step=1 : n=1 -> zero", "loss has no names", 5),
    ("each comm.post @ step=1 : n=1 -> zero", "comm.post has no names", 0),
    ("rng:rust @ step=1 : n=1 -> zero", "that of torch, cuda, numpy, python", 4),
    ("during=replay ckpt @ step=1 : n=1 -> zero", "ckpt takes no part", 0),
    ("during=rerun comm.pre @ step=1 : n=1 -> zero", "it does in train", 0),
    ("during=update fwd_out @ step=1 : n=1 -> zero", "fwd_out takes no part", 0),
    ("during=replay exp_avg @ step=1 : n=1 -> zero", "exp_avg takes no part", 0),
    ("param @ step=1 micro=0 : n=1 -> zero", "param is stored", 15),
    ("ckpt @ micro=0 step=1 : n=1 -> zero", "ckpt is stored", 7),
    ("rank=2 comm.reduce @ step=1 : n=1 -> zero", "leave out rank, or hit one rank by comm.post", 0),
    ("rank=* node=a comm.reduce @ step=1 : n=1 -> zero", "leave out node", 7),
    ("ckpt @ step=1 : n=1 -> nan", "bytes, which know no nan", 23),
    ("ckpt @ step=1 : n=1 -> bit=8", "the bits 0 to 7", 23),
    ("ckpt @ step=1 : largest -> zero", "magnitude means nothing", 16),
    ("rng @ step=1 : all -> zero ; if=1..2", "magnitude means nothing", 29),
]


@pytest.mark.parametrize(("text", "message", "column"), WRONG, ids=[text for text, *_ in WRONG])
def test_an_error_points_at_the_column(text: str, message: str, column: int) -> None:
    with pytest.raises(ConfigurationError) as raised:
        grammar.parse(text)
    said, line, caret = str(raised.value).split("\n")
    assert message in said
    assert said.startswith(f"column {column + 1}: ")
    assert (line, caret) == (f"  {text.rstrip()}", f"  {' ' * column}^")
    assert raised.value.exit_code == 2


PLACES = {  # every number of a line, each with the largest that it may be
    "rank={} param @ step=1 : n=1 -> zero": 10**7,
    "param @ step={} : n=1 -> zero": 10**12,
    "param @ steps=0..{} : n=1 -> zero": 10**12,
    "param @ every={} : n=1 -> zero": 10**12,
    "param @ every=1 from={} : n=1 -> zero": 10**12,
    "grad_w @ step=1 micro={} : n=1 -> zero": 10**9,
    "param @ step=1 : n={} -> zero": 10**15,
    "param @ step=1 : run={} -> zero": 10**15,
    "param @ step=1 : run=2,stride={} -> zero": 10**15,
    "param @ step=1 : run=2,align={} -> zero": 10**15,
    "param @ step=1 : groups={} -> zero": 10**15,
    "param @ step=1 : grid={},rows=1,columns=1000000000000000 -> zero": 10**15,
    "param @ step=1 : grid=1,rows={},columns=1 -> zero": 10**15,
    "param @ step=1 : grid=1,rows=1,columns={} -> zero": 10**15,
    "param @ step=1 : tile={}x1 -> zero": 10**15,
    "param @ step=1 : tile=1x{} -> zero": 10**15,
    "param @ step=1 : index={} -> zero": 10**15,
    "param @ step=1 : n=1 -> bit={}": 127,
    "param @ step=1 : n=1 -> stuck0={}": 127,
    "param @ step=1 : n=1 -> bits={}": 128,
    "param @ p={} : n=1 -> zero": 1,
    "param @ step=1 : rate={} -> zero": 1,
    "param @ step=1 : frac={} -> zero": 1,
    "param @ step=1 : tile=2x2,frac={} -> zero": 1,
    "param @ step=1 : n=1 -> zero ; intermittent={}": 1,
    "param @ step=1 : n=1 -> scale={}": 10**308,
    "param @ step=1 : n=1 -> add={}": 10**308,
    "param @ step=1 : n=1 -> set={}": 10**308,
    "param @ step=1 : n=1 -> zero ; if=0..{}": 10**308,
}


@pytest.mark.parametrize("line", PLACES)
def test_every_number_has_a_bound(line: str) -> None:
    most, column = PLACES[line], line.index("{}") + 1
    assert grammar.parse(str(grammar.parse(line.format(most)))) == grammar.parse(line.format(most))
    bits = "bit" in line or "stuck" in line
    for text in (
        str(most * 10),
        str(most + 1) if most < 10**300 else "9e308",
        "9" * 5000,
        "-" + "9" * 5000,
        "1e999",
        "nan",
    ):
        with pytest.raises(ConfigurationError) as raised:
            grammar.parse(line.format(text))
        said = int(str(raised.value).split(":")[0].removeprefix("column "))
        assert said == column or (bits and said == line.index("->") + 4)
        assert len(str(raised.value).split("\n")[0]) < 300


def test_a_tab_keeps_the_caret_below_its_column() -> None:
    with pytest.raises(ConfigurationError, match=r"\n  \t     \^$"):
        grammar.parse("\tloss:x @ step=1 : n=1 -> zero")


def test_no_fault_at_all() -> None:
    for text in ("", "\n", "# nothing\n"):
        with pytest.raises(ConfigurationError, match="there is no fault"):
            grammar.parse_all(text)
    with pytest.raises(ConfigurationError, match="parse_all"):
        grammar.parse("loss @ step=1 : n=1 -> zero\nloss @ step=1 : n=1 -> zero")


@pytest.mark.parametrize("name", presets.NAMES)
def test_a_preset_stands_for_what_is_behind_the_colon(name: str) -> None:
    preset = presets.get(name)
    fault = grammar.parse(f"rank=2 fwd_out:head @ step=8 micro=1 : {name}")
    assert (fault.select, fault.mutate, fault.persist, fault.preset) == (
        preset.select,
        preset.mutate,
        preset.persist,
        name,
    )
    assert str(fault) == f"rank=2 fwd_out:head @ step=8 micro=1 : {preset}"
    assert grammar.parse(str(fault)) == fault


def test_a_preset_may_last_otherwise() -> None:
    fault = grammar.parse("fwd_out @ step=8 : he2023.rbflip ; permanent redraw")
    assert str(fault) == "fwd_out @ step=8 : n=1 -> bit=any ; permanent redraw"
    assert fault.preset == "he2023.rbflip"


def test_a_preset_that_can_never_happen() -> None:
    with pytest.raises(ConfigurationError, match=r"column 17: ckpt is bytes"):
        grammar.parse("ckpt @ step=1 : anatomy")


def test_neither_torch_nor_numpy_is_loaded() -> None:
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from bitwitness.faults import grammar; grammar.parse('loss @ step=1 : hbm-1bit')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
