"""Whatever is in a file: reading it never crashes, invents no code, and never passes damage off as a log without errors."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bitwitness.fleet.signals import Signal, detect
from bitwitness.fleet.signals.gather import gather
from bitwitness.fleet.signals.times import Clock, split
from tests.fleet.signals.lines import NOW, REMAP, SWITCH, codes, read_lines, syslog

CODES = (13, 31, 45, 48, 63, 64, 74, 79, 94, 95, 119, 154)
WORDS = st.sampled_from(
    [
        "NVRM: Xid (",
        "PCI:0000:9b:00",
        "): ",
        "63, ",
        "11",
        "SXid (",
        "EDAC MC0: ",
        "1 CE ",
        "UE",
        ' "DIMM_A1"',
        "mce: [Hardware Error]: CPU 1: Machine Check: 0 Bank 1: ",
        "bb80000000000e0b",
        "fallen off the bus",
        "Nov 29 11:00:00 n1 kernel: ",
        "[12.5] ",
        "2026-11-29T11:00:00Z ",
        '{"MESSAGE": ',
        '{"log": "',
        "[",
        "]",
        "}",
        '"',
        "__CURSOR=",
        "\n",
        "\r\n",
        "\0",
        "<3>1 ",
        "E1129 11:00:00.1 1 a.go:1] ",
        "GPU at PCI:0000:9b:00",
        "message repeated 9 times: [ ",
        "{1}[Hardware Error]: event severity: fatal",
        "{1}[Hardware Error]:  section_type: PCIe error",
        "device_id: 0000:3b:00.0",
        "XidCriticalError: Xid=48 on Device=",
        "last message repeated 7 times",
        "\x1b[33m",
        "sshd[1]: ",
        "Sun 2026-11-29 09:30:15 EST ",
        '[1795946400.5, {"log": "',
        "\\u004e",
        "\ud800",
        "99999999999999999999",
    ]
)
SOUP = st.lists(st.one_of(WORDS, st.text(max_size=8)), max_size=40).map("".join)
FUZZ = settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])


def xid(number: int, second: int) -> str:
    return syslog(f"NVRM: Xid (PCI:0000:9b:00): {number}, pid={second}, words of the driver", second)


def read_bytes(path: Path, data: bytes) -> list[Signal]:
    path.write_bytes(data)
    found = list(detect.read(path, now=NOW))
    for one in gather(found, identities=True):
        json.dumps(one.to_json(details=True)).encode()
        assert Signal.from_json(one.to_json(details=True)) == one
    return found


@FUZZ
@given(st.one_of(st.binary(max_size=600), SOUP.map(lambda text: text.encode("utf-8", "surrogatepass"))))
@example(b"")
@example(b"{" * 600)
@example(b"[" * 600)
@example(b"\x1f\x8b\x08")
@example(b"\x1f\x8b\x08\xff" + b"x" * 70_000)
@example(b"BZh9")
@example(b"\xfd7zXZ\x00")
@example(b"\xff\xfe\x00")
@example(b"SQLite format 3\x00" + bytes(100))
@example(b'[{"source": 1, "code": null, "class": [], "weight": {}}]')
@example(b'{"MESSAGE": [256, -1, true], "__REALTIME_TIMESTAMP": "9"}')
@example(b'{"MESSAGE": [78, 86], "__REALTIME_TIMESTAMP": "99999999999999999999999"}')
def test_nothing_crashes_and_nothing_is_fine(tmp_path: Path, data: bytes) -> None:
    for pack in (bytes, gzip.compress):
        found = read_bytes(tmp_path / "file", pack(data))
        if not data.strip():
            assert {one.kind for one in found} == {"no-evidence"}


@FUZZ
@given(SOUP)
def test_stamps_never_crash(line: str) -> None:
    found = split(line, Clock(NOW))
    assert line.endswith(found.text)


@FUZZ
@given(
    st.lists(st.sampled_from(CODES), min_size=1, max_size=6),
    st.integers(0, 10_000),
    st.binary(min_size=1, max_size=20).filter(lambda data: not set(data) & set(b"0123456789")),
)
def test_what_is_not_damaged_is_still_read(tmp_path: Path, numbers: list[int], place: int, damage: bytes) -> None:
    """Something without a digit is thrown into a log: no code is invented, and other lines lose nothing."""
    lines = [xid(number, second) for second, number in enumerate(numbers)]
    whole = ("\n".join(lines) + "\n").encode()
    at = place % len(whole)
    found = read_bytes(tmp_path / "log", whole[:at] + damage + whole[at:])
    hit = whole[:at].count(b"\n")
    true = {f"xid:{number}" for number in numbers}
    told = [one for one in found if one.kind != "no-evidence"]
    assert {one.code for one in told} <= true
    assert {f"xid:{number}" for second, number in enumerate(numbers) if second != hit} <= {one.code for one in told}
    if len(told) < len(numbers) and b"NVRM: Xid (" in (whole[:at] + damage + whole[at:]).split(b"\n")[hit]:
        assert {one.kind for one in found} >= {"no-evidence"}


@FUZZ
@given(st.lists(st.sampled_from(CODES), min_size=1, max_size=6), st.integers(0, 10_000))
def test_a_log_that_is_cut_off_says_what_it_still_has(tmp_path: Path, numbers: list[int], place: int) -> None:
    whole = "\n".join([xid(number, second) for second, number in enumerate(numbers)])
    cut = whole[: place % len(whole)]
    found = read_bytes(tmp_path / "log", cut.encode())
    left = [f"xid:{number}" for number in numbers][
        : cut.count("), ") + sum(f"): {n}," in line for n, line in zip(numbers, cut.split("\n"), strict=False))
    ]
    assert [one for one in codes(found) if one.startswith("xid")] == left


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
@FUZZ
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), length=st.integers(0, 10_000))
def test_a_packed_file_that_is_damaged_is_never_taken_for_whole(
    tmp_path: Path, pack: type[bytes], place: int, bit: int, length: int
) -> None:
    text = "\n".join([xid(number, second) for second, number in enumerate(CODES * 4)]).encode()
    packed = bytearray(pack(text))
    true = {f"xid:{number}" for number in CODES}
    cut = read_bytes(tmp_path / "cut", bytes(packed[: length % len(packed)]))
    assert "no-evidence" in {one.kind for one in cut}
    assert {one.code for one in cut if one.kind != "no-evidence"} <= true
    packed[place % len(packed)] ^= 1 << bit
    flipped = read_bytes(tmp_path / "flipped", bytes(packed))
    weights = {one.weight for one in flipped if one.kind != "no-evidence"}
    damage = [one.reason for one in flipped if one.kind == "no-evidence"]
    if any("checksum" in reason or "damaged where" in reason for reason in damage):
        assert weights <= {"none"}
    elif not damage:  # a bit of the header that says nothing about the content, such as when it was packed
        assert codes(flipped) == [f"xid:{number}" for number in CODES * 4]


@FUZZ
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 4))
def test_reading_again_changes_nothing(seconds: list[int], times: int) -> None:
    messages = (
        REMAP,
        SWITCH,
        "EDAC MC0: 2 CE error on DIMM_A (channel:0)",
        "mce: [Hardware Error]: Machine check events logged",
    )
    lines = [syslog(messages[second], second) for second in seconds]
    once = gather(read_lines(*lines))
    assert gather(one for _ in range(times) for one in read_lines(*lines)) == once
    assert len(once) == len(set(seconds))
