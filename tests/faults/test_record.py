"""Records of faults: written by jobs that die at any moment, read by whoever wants the very same again."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bitwitness.cli.fault import _compared
from bitwitness.cli.main import cli
from bitwitness.errors import ConfigurationError
from bitwitness.faults import record
from bitwitness.faults.active import made
from bitwitness.faults.damage import Change
from bitwitness.faults.record import Site, Strike, pack
from bitwitness.mutate import words_of
from bitwitness.runfiles.supervision import Session, Stop, SupervisionFiles

SPEC = "rank=1 fwd_out:head @ step=2 : n=1 -> bit=26 ; once"


DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
)
DTYPES += (torch.complex128, torch.int64, torch.int8, torch.uint8, torch.bool)


def strike(dtype: torch.dtype = torch.float32, spec: str = SPEC, **site: Any) -> Strike:
    """Two elements of a tensor of three by two, changed."""
    tensor, indices = torch.arange(6).reshape(3, 2).to(dtype), torch.tensor([4, 1])
    before = words_of(tensor, indices)
    usual = {
        "fault": 0,
        "rank": 1,
        "step": 2,
        "micro": 0,
        "work": "train",
        "target": "fwd_out",
        "name": "head",
        "call": 0,
    }
    where = Site(**{**usual, **site})
    return made(where, spec, "n1", tensor, Change(indices, before, before ^ 1))


def read(path: Path, text: str | bytes) -> tuple[Strike, ...]:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return record.read(path)


# Torn by a death ---------------------------------------------------------------------------------------------------------


def test_what_was_appended_after_a_torn_line_is_read(tmp_path: Path) -> None:
    """At whichever byte a writer was killed, the first line or a later one: all whole strikes are there, and no others."""
    path, strikes = tmp_path / "record.jsonl", [strike(step=step) for step in range(3)]
    whole = json.dumps(strikes[0].to_json()).encode()
    for kept in (0, 1, 2, 50, len(whole) - 1, len(whole)):
        for first in (b"", whole + b"\n"):
            path.write_bytes(first + b"\n" + whole[:kept])
            before = record.landed(path)
            assert before == tuple(strikes[:1]) * (bool(first) + (kept == len(whole)))
            for one in strikes[1:]:
                record.append(path, one)
            assert record.landed(path) == (*before, *strikes[1:])
            assert path.read_bytes().endswith(b"\n")


def test_a_line_is_one_system_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    (tmp_path / "record.jsonl").write_text('{"torn')

    def write(_: int, line: bytes) -> int:
        written.append(line)
        return len(line)

    monkeypatch.setattr(os, "write", write)
    record.append(tmp_path / "record.jsonl", strike())
    (line,) = written
    assert (line[:1], line[-1:]) == (b"\n", b"\n")


def test_what_is_torn_or_absent_is_nothing_landed_and_no_record(tmp_path: Path) -> None:
    assert record.landed(tmp_path / "absent") == ()
    for text in ("", "\n", '{"sche', '{"sche\n{"schema": 1, "si'):
        (tmp_path / "rank-00000.jsonl").write_text(text)
        assert record.landed(tmp_path) == record.landed(tmp_path / "rank-00000.jsonl") == ()
        with pytest.raises(ConfigurationError, match=f"{tmp_path} holds no record"):
            record.read(tmp_path)
    record.append(tmp_path / "rank-00001.jsonl", strike())
    assert record.read(tmp_path) == (strike(),)  # the other rank was killed at its first line
    with pytest.raises(ConfigurationError, match="there is no record"):
        record.read(tmp_path / "absent")


@pytest.mark.parametrize("content", [b"nonsense\n", b"\n# faults\n", b"\x93NUMPY\xff\xfe\n\x00", "ä".encode("latin1")])
def test_a_file_of_something_else_is_said_to_be_none(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"other\.jsonl, line \d: no record of a fault: it is not JSON"):
        read(tmp_path / "other.jsonl", content)
    record.append(tmp_path / "rank-00000.jsonl", strike())
    with pytest.raises(ConfigurationError, match=r"other\.jsonl"):
        record.landed(tmp_path)


# Edited, or of another version -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_strike_is_read_as_it_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    written = strike(dtype, start=3)
    record.append(tmp_path / "record.jsonl", written)
    assert record.read(tmp_path / "record.jsonl") == (written,)


def test_a_record_from_before_starts_were_counted_is_of_the_first() -> None:
    written = strike().to_json()
    del written["site"]["start"]
    written["time"] = "whenever"
    assert Strike.from_json(written) == strike()


def test_a_scalar_can_have_been_hit() -> None:
    loss = torch.tensor(2.0)
    before = words_of(loss, [0])
    site = replace(strike().site, target="loss", name="loss")
    written = made(site, "loss @ step=2 : n=1 -> bit=3", "", loss, Change(torch.tensor([0]), before, before ^ 8))
    assert Strike.from_json(written.to_json()) == written


def _site(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda whole: whole["site"].update(changed)


def _set(**changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda whole: whole.update(changed)


def _without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda whole: whole.pop(name)


def _words(*numbers: int) -> str:
    return pack(torch.tensor(numbers, dtype=torch.int64))


DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "schema": (_set(schema=2), "schema is 2, this version reads 1"),
    "no schema": (_without("schema"), "schema is None"),
    "schema true": (_set(schema=True), "schema is True"),
    "no site": (_without("site"), "site is None"),
    "site": (_set(site=[1]), r"site is \[1\]"),
    "rank": (_site(rank="1"), "rank is '1', must be a whole number, at least 0"),
    "fault": (_site(fault=-1), "fault is -1"),
    "step": (_site(step=2.0), "step is 2.0"),
    "step true": (_site(step=True), "step is True"),
    "micro": (_site(micro=None), "micro is None"),
    "call": (_site(call=math.nan), "call is nan"),
    "start": (_site(start=0), "start is 0, must be a whole number, at least 1"),
    "work": (_site(work="play"), "there is no work 'play': it is train, "),
    "work type": (_site(work=["train"]), r"work is \['train'\], must be a text"),
    "target": (_site(target="weight"), "target is 'weight', and that of its fault 'fwd_out'"),
    "other target": (_site(target="fwd_in"), "target is 'fwd_in', and that of its fault 'fwd_out'"),
    "name": (_site(name=3), "name is 3, must be a text"),
    "spec": (_set(spec="fwd_out @ nonsense"), "spec is no fault: column"),
    "spec type": (_set(spec=None), "spec is None"),
    "node": (_set(node=None), "node is None"),
    "shape": (_set(shape="32"), "shape is '32'"),
    "negative shape": (_set(shape=[-3, -2]), r"shape is \[-3, -2\]"),
    "small shape": (_set(shape=[2, 2]), r"index 4 is outside of the shape \[2, 2\]"),
    "dtype": (_set(dtype="torch.float33"), "there is no dtype 'torch.float33'"),
    "no dtype": (_set(dtype="torch.nn"), "there is no dtype 'torch.nn'"),
    "short dtype": (_set(dtype="float32"), "there is no dtype 'float32'"),
    "narrow dtype": (_set(dtype="torch.float16"), "a word of before is wider than the 16 bits of torch.float16"),
    "wide dtype": (_set(dtype="torch.complex128"), "before has 2 words, and 2 elements of torch.complex128 have 4"),
    "count": (_set(count=3), "count is 3, and there are 2 indices"),
    "no elements": (_set(count=0, indices=_words()), "count is 0, must be a whole number, at least 1"),
    "indices": (_set(indices="%%"), "indices: packed integers cannot be unpacked"),
    "cut indices": (_set(indices=pack(torch.tensor([1]))[:-6]), "indices: packed integers cannot be unpacked"),
    "indices type": (_set(indices=[4, 1]), r"indices is \[4, 1\], must be a text"),
    "index twice": (_set(indices=_words(4, 4)), "an index stands in it twice"),
    "negative index": (_set(indices=_words(4, -1)), "index -1 is outside"),
    "before": (_set(before=_words(1)), "before has 1 words, and 2 elements of torch.float32 have 2"),
    "after": (_set(after=_words(1, 2, 3, 4)), "after has 4 words"),
    "negative word": (_set(after=_words(1, -2)), "a word of after is wider"),
    "the same bits": (lambda whole: whole.update(after=whole["before"]), "the same bits before and after"),
    "no example": (_set(example=None), "example is None"),
    "example": (_set(example={"index": 4}), "before is None, must be a text"),
    "index of the example": (_set(example={"index": 2, "before": "", "after": ""}), "index of the example"),
}


def _damaged(name: str) -> str:
    whole = json.loads(json.dumps(strike().to_json()))
    DAMAGE[name][0](whole)
    return json.dumps(strike(step=1).to_json()) + "\n" + json.dumps(whole) + "\n"


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_have_landed_is_refused_by_file_and_line(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"record\.jsonl, line 2: no record of a fault: .*" + DAMAGE[name][1]):
        read(tmp_path / "record.jsonl", _damaged(name))


@pytest.mark.parametrize("line", ["[]", '"text"', "7", "null", "{}", '{"schema": 1}'])
def test_json_that_is_no_strike_is_refused(line: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"record\.jsonl, line 2: no record of a fault"):
        read(tmp_path / "record.jsonl", json.dumps(strike().to_json()) + "\n" + line)


def test_the_records_of_two_runs_in_one_folder_can_be_shown_and_not_be_had_again(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record.append(path, strike())
    record.append(path, strike(spec=SPEC.replace("26", "25"), step=3))
    with pytest.raises(ConfigurationError, match=r"of several runs .fault 0 is .*bit=26.* and also .*bit=25"):
        record.read(path)
    assert len(record.read(path, of_one_run=False)) == 2
    path.unlink()
    for _ in range(2):
        record.append(path, strike())
    with pytest.raises(ConfigurationError, match="step 2 on rank 1 stands in it twice"):
        record.read(path)


# The commands ------------------------------------------------------------------------------------------------------------


def _fault(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["fault", *map(str, words)])


@pytest.mark.parametrize("name", ["dtype", "example", "wide dtype", "spec"])
def test_a_damaged_record_is_no_traceback_and_nothing_is_run(name: str, tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text(_damaged(name))
    show: list[str | Path] = ["show", tmp_path / "record.jsonl"]
    replay: list[str | Path] = ["replay", tmp_path / "record.jsonl", "touch", tmp_path / "ran"]
    for words in (show, replay):
        done = _fault(*words)
        assert done.exit_code == 2
        assert "record.jsonl, line 2" in " ".join(done.stderr.split())
        assert "Traceback" not in done.output
        assert not (tmp_path / "ran").exists()


def _replay(folder: Path, script: str, *, code: int | None = None) -> Mapping[str, Any]:
    """A command that records what it likes: what `fault replay` makes of it."""
    record.append(folder / "run" / "faults" / "rank-00001.jsonl", strike())
    if code is not None:
        _supervised(folder / "run", code)
    lines = {
        "same": json.dumps(strike().to_json()),
        "other": json.dumps(strike(start=2).to_json()),
    }
    for name, line in lines.items():
        (folder / name).write_text(line + "\n")
    done = _fault("replay", "--json", folder / "run" / "faults", "sh", "-c", f"cd {folder}; {script}")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.exit_code == (0 if found["reproduced"] else 1)
    return found


def _supervised(run_dir: Path, code: int) -> None:
    files = SupervisionFiles(run_dir)
    files.create("s")
    files.write_session(Session("s"))
    files.write_stop("s", Stop(code, "failed"))


@pytest.mark.parametrize(
    ("script", "reproduced", "words"),
    [
        ("cat same > $R/a.jsonl", True, "^1 strikes again, bit for bit$"),
        ("cat same > $R/a.jsonl; exit 160", True, "again, bit for bit; sh ended with exit code 160$"),
        ("cat same > $R/a.jsonl; exit 3", True, "exit code 3"),
        ("cat same > $R/a.jsonl; exit 1", False, "again, bit for bit; sh ended with exit code 1$"),
        ("cat same > $R/a.jsonl; kill -9 $$", False, "again, bit for bit; sh was ended by signal 9$"),
        ("true", False, "^1 of 1 recorded strikes were not met, the first at step 2 on rank 1 .fwd_out head.*ranks.$"),
        ("exit 2", False, "^1 of 1 recorded .*exit code 2$"),
        ("cat same other > $R/a.jsonl", False, "but 1 landed that the record does not have, .*at step 2 of start 2"),
        ("cat other > $R/a.jsonl", False, "^1 of 1 recorded .* 1 landed that the record does not have"),
    ],
)
def test_a_replay_is_compared_both_ways_and_by_its_end(
    script: str, reproduced: bool, words: str, tmp_path: Path
) -> None:
    found = _replay(tmp_path, script.replace("$R", "$BITWITNESS_FAULT_RECORD"))
    assert found["reproduced"] is reproduced
    assert re.search(words, found["words"]), found["words"]


@pytest.mark.parametrize(("code", "reproduced"), [(1, True), (7, False), (0, True)])
def test_a_run_that_had_failed_may_fail_again_by_the_same_code(code: int, reproduced: bool, tmp_path: Path) -> None:
    found = _replay(tmp_path, f"cat same > $BITWITNESS_FAULT_RECORD/a.jsonl; exit {code}", code=1)
    assert found["reproduced"] is reproduced
    assert ("the recorded run with 1" in found["words"]) == (code != 1)
    assert (found["exit_code"], found["recorded_exit_code"]) == (code, 1)


def test_the_same_site_with_other_bits_is_no_replay() -> None:
    other = strike(torch.float64)
    found = _compared([strike()], [other])
    assert (found["reproduced"], found["missing"], found["additional"]) == (False, 1, 0)
