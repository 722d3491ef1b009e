"""Evidence: what is kept of a wrong output, that it can be read for ever, and what computing it again says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Device
from bitwitness.scan import devices, work
from bitwitness.scan.evidence import Evidence, differences, read, write, wrong_output
from bitwitness.scan.items import Item
from bitwitness.scan.keeping import Keeper, raw, split
from bitwitness.scan.replaying import replay
from bitwitness.scan.settings import Settings

CPU = torch.device("cpu")
ITEM = Item.parse("ops/add/float32/8192")


@pytest.fixture
def who() -> Device:
    return devices.this_device(3, CPU, "node-3", 0)


@pytest.fixture
def kept(tmp_path: Path, who: Device) -> tuple[Path, str, str]:
    """Evidence of one flipped bit: its path, the right digest, the wrong one."""
    with work.settled(CPU):
        right = work.prepare(ITEM, CPU)()
    wrong = [output.clone() for output in right]
    wrong[0].view(torch.int32)[7] ^= 1 << 20
    expected, other = work.digest(right), work.digest(wrong)
    files = AnswerFiles(tmp_path)
    files.create()
    settings = Settings(id="s", world=4, seconds=1.0, played=True)
    Keeper(files, settings, who).keep(ITEM, expected, True, other, {expected: 9, other: 1}, wrong, right, None)
    return files.evidence / "rank-00003-1.json", expected, other


def test_the_differing_element_is_named(kept: tuple[Path, str, str]) -> None:
    evidence = read(kept[0])
    assert (evidence.item, evidence.expected, evidence.wrong, evidence.differing) == (ITEM, kept[1], kept[2], 1)
    assert [(one.output, one.index, one.xor) for one in evidence.elements] == [(0, (7,), "00100000")]
    bits = wrong_output(kept[0], evidence)
    assert bits is not None
    assert len(bits[0]) == evidence.parts[0].size == 8192 * 4


def test_another_device_gives_the_expected_answer(kept: tuple[Path, str, str], who: Device) -> None:
    seen = replay(kept[0], read(kept[0]), who, CPU, 5)
    assert (seen.outcome, seen.answers, seen.differing) == ("expected", {kept[1]: 5}, 1)


def test_another_kind_concludes_nothing(kept: tuple[Path, str, str], who: Device) -> None:
    other = replace(who, kind={**who.kind, "torch": "0.1"})
    seen = replay(kept[0], read(kept[0]), other, CPU, 2)
    assert seen.outcome == "cannot conclude"
    assert "torch: 0.1 here" in seen.reason


def test_the_same_answer_blames_neither(kept: tuple[Path, str, str], who: Device) -> None:
    evidence = read(kept[0])
    swapped = replace(evidence, expected=evidence.wrong, wrong=evidence.expected)
    seen = replay(kept[0], swapped, who, CPU, 2)
    assert seen.outcome == "same as the suspect"
    assert "third" in seen.reason


def test_neither_answer_concludes_nothing(kept: tuple[Path, str, str], who: Device) -> None:
    seen = replay(kept[0], replace(read(kept[0]), expected="0" * 32), who, CPU, 2)
    assert (seen.outcome, "neither" in seen.reason) == ("cannot conclude", True)


def test_the_suspect_itself_concludes_nothing_by_right_answers(kept: tuple[Path, str, str], who: Device) -> None:
    seen = replay(kept[0], replace(read(kept[0]), played=False), who, CPU, 2)
    assert (seen.outcome, "suspect itself" in seen.reason) == ("cannot conclude", True)


def test_what_was_damaged_is_said(kept: tuple[Path, str, str], tmp_path: Path) -> None:
    evidence = read(kept[0])
    (kept[0].parent / evidence.file).write_bytes(b"short")
    with pytest.raises(RunFilesError, match="damaged"):
        wrong_output(kept[0], evidence)
    for name, content in (("a.json", "{"), ("b.json", '{"schema": 1}'), ("c.json", '{"schema": 1, "item": 3}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(RunFilesError, match=name):
            read(tmp_path / name)


def test_a_file_elsewhere_is_never_read(kept: tuple[Path, str, str]) -> None:
    (kept[0].parent.parent / "secret").write_bytes(b"x" * 8192 * 4)
    with pytest.raises(RunFilesError, match="evidence/secret"):
        wrong_output(kept[0], replace(read(kept[0]), file="../secret"))


def test_written_and_read(kept: tuple[Path, str, str], tmp_path: Path) -> None:
    evidence = replace(read(kept[0]), file="", parts=())
    assert read(write(tmp_path, "again", evidence, None)) == evidence
    assert isinstance(evidence, Evidence)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6, dtype=torch.int64).reshape(2, 3).t(),
        torch.zeros(2, dtype=torch.complex128),
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.arange(9000, dtype=torch.bfloat16),
    ],
)
def test_bits_of_any_output(tensor: torch.Tensor) -> None:
    parts, content = raw([tensor])
    assert parts[0].size == tensor.numel() * tensor.element_size() == len(content)
    same = split(content, parts)
    assert differences(same, same, parts) == (0, ())
    if content:
        flipped = bytes([*content[:-1], content[-1] ^ 1])
        count, elements = differences(same, split(flipped, parts), parts)
        assert (count, elements[0].index) == (1, tuple(size - 1 for size in tensor.shape))
