from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from bitwitness.fleet.signals import catalogue, detect, kernel
from bitwitness.fleet.signals.catalogue import pci_address
from tests.fleet.signals.lines import NOW, REMAP, SWITCH, codes, read_file, read_lines, syslog

UUID = "GPU-34d7319c-5b19-1e75-186d-c187099e4fe5"
FALLEN = "GPU has fallen off the bus."


def xid(number: int, more: str = "pid='<unknown>', name=<unknown>, words", at: str = "PCI:0000:9b:00") -> str:
    return f"NVRM: Xid ({at}): {number}, {more}"


@pytest.mark.parametrize(
    ("kind", "weight", "numbers"),
    [
        ("memory", "strong", (48, 64, 95, 140, 171, 172)),
        ("memory", "medium", (92, 94)),
        ("memory", "weak", (63,)),
        ("link", "weak", (74, *range(144, 151))),
        ("loud", "none", (46, 54, 62, 79, 109, 110, 119, 120, 136, 142, 143, 151, 154, 155, 156, 158, 999)),
        ("application", "none", (13, 31, 43)),
        ("noise", "none", (45,)),
    ],
)
def test_weights_of_xids(kind: str, weight: str, numbers: tuple[int, ...]) -> None:
    found = read_lines(*(syslog(xid(number), second) for second, number in enumerate(numbers)))
    assert codes(found) == [f"xid:{number}" for number in numbers]
    assert {(one.kind, one.weight, one.device, one.host) for one in found} == {(kind, weight, "0000:9b:00", "n1")}
    assert all(one.reason and one.evidence.startswith("NVRM: Xid") for one in found)


def test_weights_of_switches() -> None:
    (one,) = read_lines(f"[11.5] {SWITCH}")
    assert (one.code, one.device, one.kind, one.weight, one.time) == (
        "sxid:12028",
        "0000:05:00",
        "link",
        "weak",
        None,
    )
    for number in (12022, 12023):
        (one,) = read_lines(SWITCH.replace("12028", str(number)))
        assert (one.code, one.kind, one.weight) == (f"sxid:{number}", "link", "medium")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("PCI:0000:9B:00", "0000:9b:00"),
        ("PCI:0000:05:00.0", "0000:05:00"),
        ("00000000:9B:00.0", "0000:9b:00"),
        ("00000018:01:00.0", "0018:01:00"),
        ("0000:01:00", "0000:01:00"),
        ("01:00", "0000:01:00"),
        ("PCI:0000:01:00 GPU-I:05", "0000:01:00"),
        ("PCI:0000:9", ""),
        ("PCI:0000:9\ufffd:00", ""),
        ("", ""),
    ],
)
def test_addresses(text: str, address: str) -> None:
    assert pci_address(text) == address


def test_a_catalogue_of_all_codes() -> None:
    for code in ("xid:48", "xid:12345", "sxid:20034", "edac:ue", "edac:ce", "mce:uncorrected", "mce:corrected"):
        assert catalogue.entry(code).reason
    with pytest.raises(KeyError):
        catalogue.entry("dcgm:395")


def test_slices_are_told_by_their_device() -> None:
    (one,) = read_lines(syslog(xid(94, at="PCI:0000:9b:00 GPU-I:05")))
    assert (one.code, one.device) == ("xid:94", "0000:9b:00")


def test_what_the_driver_asks_for_is_told() -> None:
    (one,) = read_lines(syslog(xid(154, "GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")))
    assert "Node Reboot Required" in one.reason
    assert "Node Reboot Required" in one.evidence


def test_fallen_off_the_bus_is_an_xid_that_was_not_logged() -> None:
    (one,) = read_lines(syslog(f"NVRM: GPU 0000:9b:00.0: {FALLEN}"))
    assert (one.code, one.device, one.kind) == ("xid:79", "0000:9b:00", "loud")
    (one,) = read_lines(syslog(xid(79, f"pid=1, {FALLEN}")))
    assert one.code == "xid:79"
    several = ("NVRM: The NVIDIA GPU 0000:b3:00.0", "NVRM: (PCI ID: 10de:26b5) installed in this system has")
    last = "NVRM: fallen off the bus and is not responding to commands."
    (one,) = read_lines(*(syslog(line) for line in (*several, last)))
    assert (one.code, one.device) == ("xid:79", "0000:b3:00")
    (one,) = read_lines(syslog(several[0]), syslog(last, host="n2"))
    assert one.device == ""
    assert not read_lines(syslog("usb 1-1: the hub has fallen off the bus"))


def test_which_device_is_in_which_slot() -> None:
    (one,) = read_lines(syslog(f"NVRM: GPU at PCI:0000:9b:00: {UUID}"))
    assert (one.code, one.device, one.evidence, one.weight) == ("identity:pci", UUID, "pci=0000:9b:00", "none")
    assert not read_lines(syslog(f"NVRM: GPU at PCI:0000:9b:00: {UUID[:-1]}"))


@pytest.mark.parametrize(
    ("line", "code", "device", "count"),
    [
        (
            'EDAC MC0: CE page 0x283, offset 0xce0, grain 8, syndrome 0x6ec3, row 0, channel 1 "DIMM_B1": amd76x_edac',
            "edac:ce",
            "DIMM_B1",
            1,
        ),
        (
            "EDAC MC3: 12 UE memory read error on CPU_SrcID#0_MC#3_Chan#0_DIMM#0 (channel:0 slot:0 page:0x7e025e)",
            "edac:ue",
            "CPU_SrcID#0_MC#3_Chan#0_DIMM#0",
            12,
        ),
        ("EDAC MC1: UE - no information available: i82975x", "edac:ue", "mc1", 1),
        ("EDAC MC1: 1 CE memory scrubbing error on CPU_SrcID#0_Ma", "edac:ce", "mc1", 1),
        ("mce: [Hardware Error]: Machine check events logged", "mce:logged", "", 1),
        (
            "mce: [Hardware Error]: CPU 15: Machine Check Exception: 5 Bank 6: bb80000000000e0b",
            "mce:uncorrected",
            "cpu15",
            1,
        ),
        ("mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 7: 8c00004000010090", "mce:corrected", "cpu2", 1),
        ("mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 7: ae00004000010090", "mce:uncorrected", "cpu2", 1),
        ("mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 7: 8c0000", "mce:logged", "cpu2", 1),
        ("[Hardware Error]: Corrected error, no action required.", "mce:corrected", "", 1),
        ("[Hardware Error]: Uncorrected, software restartable error.", "mce:uncorrected", "", 1),
        ("[Hardware Error]: Deferred error, no action required.", "mce:deferred", "", 1),
        ("Memory failure: 0x1a2b3c: recovery action for dirty LRU page: Recovered", "mce:uncorrected", "", 1),
    ],
)
def test_errors_of_the_host(line: str, code: str, device: str, count: int) -> None:
    for stamped in (line, syslog(line), f"[   77.633608] {line}"):
        (one,) = read_lines(stamped)
        assert (one.source, one.code, one.device, one.count) == (code.split(":", maxsplit=1)[0], code, device, count)
        assert one.kind == "memory"
        weights = {"ue": "strong", "uncorrected": "strong", "deferred": "medium"}
        assert one.weight == weights.get(code.split(":")[1], "weak")


def firmware(section: str, severity: str = "recoverable", number: int = 1) -> list[str]:
    """A record of ACPI APEI in the kernel's log."""
    lines = (
        "Hardware error from APEI Generic Hardware Error Source: 4",
        f"event severity: {severity}",
        f" Error 0, type: {severity}",
        *([f"  section_type: {section}"] if section else []),
        *(["  port_type: 4, root port", "  device_id: 0000:3b:00.0"] if "PCIe" in section else []),
    )
    return [syslog(f"{{{number}}}[Hardware Error]: {line}") for line in lines]


@pytest.mark.parametrize(
    ("section", "severity", "code", "kind", "weight", "device"),
    [
        ("PCIe error", "recoverable", "mce:pcie", "link", "weak", "0000:3b:00"),
        ("PCIe error", "corrected", "mce:pcie", "link", "none", "0000:3b:00"),
        ("memory error", "recoverable", "mce:uncorrected", "memory", "strong", ""),
        ("general processor error", "corrected", "mce:corrected", "memory", "weak", ""),
        ("", "fatal", "mce:uncorrected", "memory", "weak", ""),  # it may have been of PCI Express
    ],
)
def test_what_the_firmware_tells_of(
    section: str, severity: str, code: str, kind: str, weight: str, device: str
) -> None:
    (one,) = read_lines(*firmware(section, severity))
    assert (one.code, one.kind, one.weight, one.device) == (code, kind, weight, device)
    assert one.time == "2026-11-29T11:00:00.000Z"


def test_several_records_of_the_firmware() -> None:
    several = [*firmware("PCIe error")[:-1], *firmware("memory error", number=2), *firmware("", number=2)]
    assert sorted(codes(read_lines(*several))) == ["mce:pcie", "mce:uncorrected", "mce:uncorrected"]


@pytest.mark.parametrize(
    "line",
    [
        "\x1b[32m[Sun Nov 29 09:30:15 2026] \x1b[0m\x1b[33mNVRM: \x1b[0mXid (PCI:0000:01:00): 48, words",
        "#033[32m[Sun Nov 29 09:30:15 2026] #033[0m#033[33mNVRM: #033[0mXid (PCI:0000:01:00): 48, words",
        json.dumps({"log": "\x1b[33mNVRM: \x1b[0mXid (PCI:0000:01:00): 48, words", "time": "2026-11-29T09:30:15Z"}),
    ],
)
def test_colours_hide_nothing(line: str) -> None:
    (one,) = read_lines(line)
    assert (one.code, one.device, one.time) == ("xid:48", "0000:01:00", "2026-11-29T09:30:15.000Z")
    (one,) = read_lines("\x1b[33mEDAC MC0: \x1b[0m1 UE memory read error on DIMM_A1 (channel:0 slot:0)")
    assert one.code == "edac:ue"


@pytest.mark.parametrize("program", ["sshd[1]", "sudo[7]", "python3", "evil/kernel-like[3]", "audit[5]"])
def test_what_any_program_quotes_weighs_nothing(program: str) -> None:
    for text in (xid(48), f"bob : COMMAND=/usr/bin/logger {xid(48)}", syslog(xid(48))):
        (one,) = read_lines(syslog(text, program=program))
        assert (one.code, one.weight) == ("xid:48", "none")
        assert f"written by {program.partition('[')[0]}, which may quote anything" in one.reason
    assert not read_lines(syslog(f"NVRM: GPU at PCI:0000:9b:00: {UUID}", program=program))


@pytest.mark.parametrize("program", ["kernel", "kubelet[1]", "node-problem-detector[2]", "nv-fabricmanager[3]"])
def test_what_hands_on_the_words_of_the_kernel_weighs_as_they_do(program: str) -> None:
    (one,) = read_lines(syslog(xid(48), program=program))
    assert one.weight == "strong"


def test_who_wrote_an_entry_of_the_journal() -> None:
    entry = {"MESSAGE": xid(48), "_HOSTNAME": "n1", "SYSLOG_IDENTIFIER": "sshd"}
    (one,) = read_lines(json.dumps(entry))
    assert (one.weight, "written by sshd" in one.reason) == ("none", True)
    (one,) = read_lines(json.dumps({**entry, "SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "kernel"}))
    assert one.weight == "strong"
    (one,) = read_lines(f"n17 sshd[1]: grep '{xid(48)}'")
    assert one.weight == "none"
    (one,) = read_lines(syslog(f"audit: type=1123 msg='{xid(48)}'"))
    assert one.weight == "none"


@pytest.mark.parametrize(
    "record",
    [
        {"msg": "kernel message", "line": xid(48), "time": "2026-11-29T10:00:00Z"},
        {"message": "x", "event": {"original": xid(48)}, "@timestamp": "2026-11-29T10:00:00Z"},
        {"message": "kmsg", "record": {"message": xid(48)}, "ts": 1795946400},
        {"short_message": xid(48)[:48], "full_message": xid(48), "timestamp": 1795946400.0},
        {"textPayload": xid(48), "timestamp": "2026-11-29T10:00:00Z"},
        {"_raw": xid(48), "_time": "1795946400.000"},
        {"body": {"stringValue": xid(48)}, "timeUnixNano": "1795946400000000000"},
        {"events": [{"timestamp": 1795946400000, "message": xid(48)}]},
        {"streams": [{"values": [["1795946400000000000", xid(48)]]}]},
        [1795946400.0, {"log": xid(48)}],
    ],
)
def test_the_field_of_a_record_does_not_matter(record: object) -> None:
    (one,) = read_lines(json.dumps(record))
    assert (one.code, one.time) == ("xid:48", "2026-11-29T10:00:00.000Z")
    (one,) = read_lines(json.dumps(record).replace("NVRM", "\\u004eVRM"))
    assert one.code == "xid:48"


def test_old_lines_that_are_forwarded_keep_their_time() -> None:
    old = f"[Sun Nov 22 09:30:15 2026] {xid(48)}"
    for line in (
        json.dumps({"log": old, "time": "2026-11-29T09:40:15.123Z"}),
        f"2026-11-29T09:40:15.123Z stdout F {old}",
        f"2026-11-29T11:20:00.5Z Nov 22 09:30:15 n17 kernel: {xid(48)}",
    ):
        (one,) = read_lines(line)
        assert one.time == "2026-11-22T09:30:15.000Z"
    ring = f"[12345.678901] {xid(48)}"
    for line in (json.dumps({"log": ring, "time": "2026-11-29T09:40:15Z"}), f"2026-11-29T09:40:15Z stdout F {ring}"):
        (one,) = read_lines(line)
        assert (one.time, "when it was forwarded" in one.reason) == ("2026-11-29T09:40:15.000Z", True)
    for line in (syslog(ring), f"[2026-11-29 09:40:15.5]{ring}", f"2026-11-29T09:40:15Z stdout F {syslog(ring)}"):
        (one,) = read_lines(line)
        assert "forwarded" not in one.reason


def test_what_the_device_plugin_of_kubernetes_heard() -> None:
    line = f"E1129 10:00:00.1 1 health.go:9] XidCriticalError: Xid=48 on Device={UUID}; marking device as unhealthy."
    (one,) = read_lines(line)
    assert (one.source, one.code, one.device, one.weight) == ("nvml", "xid:48", UUID, "strong")
    assert one.time == "2026-11-29T10:00:00.100Z"
    for length in range(line.index("Xid=") + 4, line.index(";")):
        assert codes(read_lines(line[:length])) == ["kernel:cut-off"]


def test_a_line_that_says_that_the_last_came_again() -> None:
    again = "Nov 29 11:00:05 n1 last message repeated 7 times"
    first, second = read_lines(syslog(REMAP), again)
    assert (first.count, second.code, second.count, second.device) == (1, "xid:63", 7, "0000:9b:00")
    assert second.time == "2026-11-29T11:00:05.000Z"
    for between in (syslog("something else"), again.replace("n1", "n2")):
        assert len(read_lines(syslog(REMAP), between, *([again] if "else" in between else []))) == 1


def test_ordinary_lines_are_none() -> None:
    ordinary = (
        "EDAC MC: Ver: 3.0.0",
        "EDAC MC0: Giving out device to module skx_edac controller Skylake",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.65.06",
        "mce: CPU0: Core temperature is above threshold, cpu clock is throttled",
        "mce: [Hardware Error]: TSC 0 ADDR 13",
        "{1}[Hardware Error]:   section_type: memory error",
    )
    assert read_lines(*(syslog(line) for line in ordinary)) == []


# Damage ---------------------------------------------------------------------------------------------------------------


def test_a_line_that_is_cut_off_yields_no_wrong_code() -> None:
    """At no place may `119` be read as `1` or `11`; what is cut before its comma is told as no evidence."""
    whole = syslog(xid(119))
    begins, comma = whole.index("NVRM: Xi") + len("NVRM: X"), whole.index("119,") + 3
    for length in range(len(whole) + 1):
        found = read_lines(whole[:length])
        if length > comma:
            assert codes(found) == ["xid:119"]
        else:
            assert all(one.kind == "no-evidence" for one in found)
            assert codes(found) == ["kernel:cut-off"] or length < begins


@pytest.mark.parametrize("hole", [b"\0", b"\0\0\0", b"\xff", b"\r", b"\xe2\x82"])
def test_a_hole_in_a_line_yields_no_wrong_code(tmp_path: Path, hole: bytes) -> None:
    whole = syslog(xid(119)).encode()
    for at in range(len(whole)):
        found = read_file(tmp_path / "log", syslog(REMAP, 9).encode() + b"\n" + whole[:at] + hole + whole[at:] + b"\n")
        assert set(codes(found)) - {"kernel:cut-off", "kernel:damaged", "xid:119"} == {"xid:63"}
        if hole == b"\0":
            assert "kernel:damaged" in codes(found)


def test_two_lines_that_ran_into_one_are_two(tmp_path: Path) -> None:
    found = read_file(tmp_path / "log", [syslog(REMAP) + syslog(xid(48), 1)])
    assert codes(found) == ["xid:63", "xid:48"]
    assert "48" not in found[0].evidence.removesuffix(syslog(""))


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress])
def test_packed_files(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    text = "\n".join(
        [syslog(REMAP), *(syslog(f"something else {n * 7919 % 10007} {n}", n) for n in range(3000))]
    ).encode()
    packed = pack(text + b"\n")
    assert codes(read_file(tmp_path / "whole", packed)) == ["xid:63"]
    assert codes(read_file(tmp_path / "twice", packed + pack(syslog(xid(48)).encode()))) == ["xid:63", "xid:48"]
    cut = read_file(tmp_path / "cut", packed[: len(packed) * 3 // 4])
    assert [one for one in codes(cut) if one != "xid:63"] == ["kernel:damaged"]
    if pack is not bz2.compress:  # it packs 900 kB at a time, all or nothing
        assert cut[0].weight == "weak"
    damaged = bytearray(packed)
    damaged[-7] ^= 0x40  # in the sum at the end, or in the index
    found = read_file(tmp_path / "damaged", bytes(damaged))
    assert "kernel:damaged" in codes(found)
    assert all(one.weight == "none" for one in found)
    assert any("may be wrong" in one.reason for one in found if one.code == "xid:63") or pack is bz2.compress


@pytest.mark.parametrize(
    ("content", "code", "word"),
    [
        (b"", "kernel:empty", "empty"),
        (b"\n\n \n", "kernel:empty", "empty"),
        (gzip.compress(b"", mtime=0), "kernel:empty", "empty"),
        (b"\x28\xb5\x2f\xfd" + b"\x04\x00" * 40, "kernel:unreadable", "zstd -d"),
        (b"LPKSHHRH" + bytes(200), "kernel:unreadable", "journalctl --file"),
        (b"PK\x03\x04" + bytes(200), "kernel:unreadable", "unpack"),
        (bytes(range(256)) * 40, "kernel:unreadable", "no text"),
        (b"# A page\n\nthat is about something else.\n", "kernel:foreign", "none of the formats"),
        (b'{"a": [1, 2, 3]}\n', "kernel:foreign", "none of the formats"),
    ],
)
def test_what_is_no_log_is_no_evidence(tmp_path: Path, content: bytes, code: str, word: str) -> None:
    found = read_file(tmp_path / "file", content)
    assert code in codes(found)
    assert {one.kind for one in found} == {"no-evidence"}
    assert any(word in one.reason for one in found)
    assert {one.origin for one in found} == {str(tmp_path / "file")}


def test_a_log_without_errors_is_neither_damage_nor_health(tmp_path: Path) -> None:
    assert read_file(tmp_path / "log", [syslog("all is quiet")]) == []


def test_text_of_other_systems(tmp_path: Path) -> None:
    text = "\n".join([syslog(REMAP), syslog(xid(48), 1), ""])
    for content in (
        text.replace("\n", "\r\n").encode(),
        text.encode("utf-16"),
        text.encode("utf-16-le"),
        text.encode("utf-16-be"),
        text.encode("utf-8-sig"),
    ):
        assert codes(read_file(tmp_path / "log", content)) == ["xid:63", "xid:48"]


def test_long_lines_are_cut(tmp_path: Path) -> None:
    found = read_file(tmp_path / "log", [syslog("x" * 200_000 + xid(48)), syslog(REMAP), "y" * 70_000])
    assert codes(found) == ["xid:63", "kernel:damaged"]
    assert "2 line(s)" in found[1].reason
    assert "64 KiB" in found[1].reason


def test_holes_of_many_gigabytes_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "lastlog"
    with log.open("wb") as file:
        file.write(syslog(REMAP).encode() + b"\n")
        file.seek(200 << 30)
        file.write(b"\n" + syslog(xid(48)).encode() + b"\n")
        file.truncate(400 << 30)
    found = list(detect.read(log, now=NOW))
    assert codes(found)[:2] == ["xid:63", "xid:48"]
    assert {one.kind for one in found[2:]} == {"no-evidence"}


# What lines are wrapped in --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"__REALTIME_TIMESTAMP": "1795946400000000", "_HOSTNAME": "n1", "MESSAGE": REMAP}),
        json.dumps({"__REALTIME_TIMESTAMP": "1795946400000000", "_HOSTNAME": "n1", "MESSAGE": list(REMAP.encode())}),
        "data: " + json.dumps({"__REALTIME_TIMESTAMP": "1795946400000000", "_HOSTNAME": "n1", "MESSAGE": REMAP}),
        json.dumps(
            {"log": f"{REMAP}\n", "stream": "stderr", "time": "2026-11-29T10:00:00.000000001Z", "hostname": "n1"}
        ),
        f'2026-11-29T10:00:00.5Z stderr F {{"level":"warn","msg":"{REMAP}","host":"n1"}}',
        f"2026-11-29T10:00:00.123456789Z stdout F 2026-11-29T11:00:00+01:00 n1 kernel: {REMAP}",
        f'Nov 29 10:00:00 n1 kubelet[123]: E1129 10:00:00.123456    1234 file.go:12] "{REMAP}"',
    ],
)
def test_wrapped_lines(line: str) -> None:
    (one,) = read_lines(line)
    assert (one.code, one.host, (one.time or "")[:19]) == ("xid:63", "n1", "2026-11-29T10:00:00")
    assert one.evidence == REMAP


def test_a_wrapped_line_that_is_cut_off() -> None:
    whole = json.dumps({"MESSAGE": xid(119), "_HOSTNAME": "n1"})
    for length in range(len(whole)):
        assert {one.code for one in read_lines(whole[:length])} <= {"xid:119", "kernel:cut-off", "kernel:foreign"}
    (one,) = read_lines(json.dumps({"MESSAGE": list(REMAP.encode())})[:-9])
    assert one.code == "kernel:cut-off"


def test_entries_of_the_journal_as_it_exports_them(tmp_path: Path) -> None:
    entry = "__CURSOR=s=1;i=2\n__REALTIME_TIMESTAMP=1795946400000000\nMESSAGE={}\nPRIORITY=3\n_HOSTNAME=n1\n\n"
    length = len(REMAP).to_bytes(8, "little")
    binary = entry.encode().replace(b"MESSAGE={}", b"MESSAGE\n" + length + REMAP.encode())
    found = read_file(tmp_path / "export", entry.format(xid(48)).encode() + binary)
    assert codes(found)[:2] == ["xid:48", "xid:63"]
    assert {(one.host, one.time) for one in found[:2]} == {("n1", "2026-11-29T10:00:00.000Z")}
    assert kernel.is_export(entry.encode())


def test_repeated_messages_are_counted() -> None:
    (one,) = read_lines(syslog(f"message repeated 5 times: [ {REMAP}]", program="rsyslogd"))
    assert (one.code, one.count, one.evidence) == ("xid:63", 5, REMAP)


def test_the_future_is_kept_and_told() -> None:
    (one,) = read_lines(f"2027-01-01T00:00:00Z n1 kernel: {REMAP}")
    assert one.time == "2027-01-01T00:00:00.000Z"
    assert "future" in one.reason
    assert NOW.year == 2026
