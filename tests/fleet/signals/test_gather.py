from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path

from bitwitness.fleet.signals import Signal, detect, no_evidence
from bitwitness.fleet.signals import gather as module
from bitwitness.fleet.signals.gather import gather, of_node
from bitwitness.fleet.signals.merging import times_of
from bitwitness.fleet.signals.record import within
from bitwitness.fleet.signals.times import iso
from tests.fleet.signals.lines import NOW, REMAP, codes, read_lines, syslog

UUID = "GPU-34d7319c-5b19-1e75-186d-c187099e4fe5"
OTHER = "GPU-99999999-5b19-1e75-186d-c187099e4fe5"


def event(
    second: int = 0, *, host: str = "n1", device: str = "0000:9b:00", evidence: str = "words", origin: str = "log"
) -> Signal:
    time = iso(NOW + timedelta(seconds=second))
    return Signal("kernel", "xid:63", device, time, "memory", "weak", "why", host, 1, evidence, origin)


def identity(uuid: str, second: int | None, host: str = "n1", origin: str = "log") -> Signal:
    time = None if second is None else iso(NOW + timedelta(seconds=second))
    return Signal(
        "nvml", "identity:pci", uuid, time, "noise", "none", "where", host, 1, "pci=0000:9b:00 serial=7", origin
    )


def test_copies_and_repeated_reads_count_nothing_twice(tmp_path: Path) -> None:
    lines = [syslog(REMAP, 1), syslog(REMAP, 2), syslog(REMAP, 2), syslog(REMAP.replace("1896", "7"), 2)]
    (tmp_path / "a").write_text("\n".join(lines) + "\n")
    shutil.copy(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").hardlink_to(tmp_path / "a")
    (tmp_path / "d").symlink_to(tmp_path / "a")
    files = [tmp_path / name for name in "abcd"]
    once = gather(detect.read(tmp_path / "a", now=NOW))
    assert codes(once) == ["xid:63"] * 3
    for paths in (files, files * 2, [tmp_path], [tmp_path, *files]):
        assert [one.to_json() for one in gather(detect.read_all(paths, now=NOW))] == [one.to_json() for one in once]


def test_the_same_event_by_other_ways_is_one() -> None:
    ways = (
        syslog(REMAP, 3),
        f"2026-11-29T11:00:03.75Z n1 kernel: {REMAP}",
        f"2026-11-29T12:00:03+01:00 n1 kernel: [ 77.5] {REMAP}",
        f'Nov 29 11:00:03 n1 kubelet[7]: E1129 11:00:03.5 1 a.go:1] "{REMAP}"',
    )
    assert len(read_lines(*ways)) == 4
    (one,) = gather(read_lines(*ways))
    assert one.count == 1


def test_other_seconds_hosts_and_devices_are_others() -> None:
    several = [event(), event(1), event(host="n2"), event(device="0000:9c:00"), event(evidence="else")]
    assert len(gather(several + several)) == 5


def test_undated_ones_are_told_apart_by_their_place() -> None:
    ring = [f"[{second}.5] {REMAP}" for second in range(3)]
    assert len(gather(read_lines(*ring, *ring))) == 3
    bare = [replace(one, origin=name) for name in ("a", "b") for one in read_lines(REMAP, REMAP)]
    assert len(gather(bare)) == 2


def test_bus_loss_is_said_twice_and_counted_once() -> None:
    fallen = "GPU has fallen off the bus."
    lines = [syslog(f"NVRM: GPU 0000:9b:00.0: {fallen}"), syslog(f"NVRM: Xid (PCI:0000:9b:00): 79, pid=1, {fallen}")]
    assert codes(gather(read_lines(*lines))) == ["xid:79"]
    assert codes(gather(read_lines(*lines, *(line.replace("9b:00", "9c:00") for line in lines)))) == ["xid:79"] * 2
    ring = [f"[55.{place}] {line.partition('kernel: ')[2]}" for place, line in enumerate(lines)]
    assert codes(gather(read_lines(*ring, ring[0].replace("55", "70")))) == ["xid:79"] * 2


def test_addresses_become_uuids_where_the_same_host_tells_both() -> None:
    found = gather([event(), event(host="n2"), identity(UUID, None)])
    assert {(one.host, one.device) for one in found} == {("n1", UUID), ("n2", "0000:9b:00")}
    assert "identity:pci" in codes(gather([event(), identity(UUID, None)], identities=True))
    nameless = [event(host="", origin="a"), event(1, host="", origin="b"), identity(UUID, None, host="", origin="a")]
    assert [one.device for one in gather(nameless)] == [UUID, "0000:9b:00"]


def test_a_device_that_came_later_is_not_blamed_in_silence() -> None:
    (one,) = gather([event(60), identity(UUID, 0)])
    assert (one.device, "may have been another" in one.reason) == (UUID, False)
    for told, when in ((90, "later"), (None, "at a time that is not known")):
        (one,) = gather([event(60), identity(UUID, told)])
        assert one.device == UUID
        assert f"it says 0000:9b:00; that this device is there was told {when}" in one.reason
    for first, second in ((-90, 90), (None, None), (-90, None)):
        (one,) = gather([event(60), identity(UUID, first), identity(OTHER, second)])
        assert one.device == "0000:9b:00"
        assert "several devices are told to be 0000:9b:00" in one.reason


def test_numbers_and_slices_become_their_device() -> None:
    told = replace(identity(UUID, -90), evidence="pci=0000:9b:00 serial=7 index=3 mig=MIG-1,MIG-2")
    for name in ("gpu:3", "MIG-1", "MIG-2", "0000:9b:00"):
        (one,) = gather([event(device=name), told])
        assert one.device == UUID
    (one,) = gather([event(device="gpu:3"), told, replace(identity(OTHER, -90), evidence="index=3")])
    assert one.device == "gpu:3"
    (one,) = gather([event(device="gpu:3", host="n2"), told])
    assert one.device == "gpu:3"


def test_files_of_two_nodes_that_name_no_host_stay_apart() -> None:
    for stamp in ("", "[Sun Nov 29 10:00:00 2026] "):
        found = []
        for origin, uuid in (("a.dmesg", UUID), ("b.dmesg", OTHER)):
            lines = (f"{stamp}NVRM: GPU at PCI:0000:9b:00: {uuid}", f"{stamp}{REMAP}")
            found += [replace(one, origin=origin) for one in read_lines(*lines)]
        assert sorted(one.device for one in gather(found)) == [UUID, OTHER]


def test_a_host_is_one_by_all_its_names() -> None:
    several = [event(host=host) for host in ("n17", "N17", "n17.cluster.local")]
    assert [one.host for one in gather(several)] == ["n17"]
    assert [one.host for one in gather(several[1:2])] == ["N17"]
    assert len(gather([event(host="n17.a.example"), event(host="n17.b.example")])) == 2
    assert len(gather([event(host="10.0.0.1"), event(host="10.0.0.2")])) == 2
    assert [one.host for one in of_node(several, "n17")] == ["n17"] * 3


def test_one_line_by_the_clocks_of_several_programs_is_one() -> None:
    ring = f"[12345.678901] {REMAP}"
    ways = {
        "ring": ring,
        "syslog": f"Nov 29 10:00:00 n17 kernel: {ring}",
        "dmesg": f"[Sun Nov 29 10:00:01 2026] {REMAP}",
    }
    found = [replace(one, origin=name, host="n17") for name, line in ways.items() for one in read_lines(line)]
    assert len(found) == 3
    (one,) = gather(found)
    assert (one.time, one.count) == ("2026-11-29T10:00:00.000Z", 1)
    # In one and the same file they are two.
    assert len(gather([event(0), event(1)])) == 2


def test_a_contained_error_that_comes_again_is_strong() -> None:
    errors = [replace(event(second), code="xid:94", weight="medium") for second in (0, 1, 600)]
    assert [one.weight for one in gather(errors)] == ["medium", "medium", "strong"]
    elsewhere = [errors[0], replace(errors[2], device="0000:9c:00"), replace(errors[2], weight="none")]
    assert {one.weight for one in gather(elsewhere)} == {"medium", "none"}


def test_counters_are_not_summed() -> None:
    counter = replace(event(), source="dcgm", code="dcgm:311", time=None)
    slices = [replace(counter, count=2, evidence=f"slice {number}") for number in (1, 2)]
    assert times_of(gather(slices)) == 2
    scrapes = [replace(event(second), source="dcgm", count=count) for second, count in ((0, 3), (60, 2))]
    assert times_of(scrapes) == 2  # it was reset: the newest counts
    assert times_of([event(), replace(event(1), count=5)]) == 6
    logged = replace(event(), source="edac", evidence="EDAC MC0: 1 CE", count=1)
    counted = replace(logged, time=None, evidence="mc0/ce_count is 3", count=3)
    assert times_of([logged, logged, counted]) == 3


def test_our_own_output_beside_the_log_counts_nothing_twice(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join([REMAP, REMAP, f"[1.5] {REMAP}", syslog(REMAP), syslog(REMAP, 7), ""]))
    first = gather(detect.read(log, now=NOW))
    assert len(first) == 5
    for details in (True, False):
        ours = tmp_path / f"{details}.json"
        ours.write_text(json.dumps([one.to_json(details=details) for one in first], indent=2))
        for files in ([log, ours], [ours, log]):
            assert len(gather(detect.read_all(files, now=NOW))) == 5


def test_our_own_output_is_a_source_again(tmp_path: Path) -> None:
    first = gather([event(), event(5), no_evidence("nvml", "nvml:absent", "no driver")])
    for details in (False, True):
        file = tmp_path / f"list-{details}.json"
        file.write_text(json.dumps([one.to_json(details=details) for one in first], indent=2))
        again = gather(detect.read(file, now=NOW))
        assert [one.to_json() for one in again] == [one.to_json() for one in first]
        both = gather(chain([event(), event(5)], detect.read(file, now=NOW)))
        assert codes(both) == ["xid:63", "xid:63", "nvml:absent"]
        file.write_text(file.read_text()[:-150])
        assert codes(gather(detect.read(file, now=NOW)))[:2] == ["xid:63"] * 2
        assert "signals:damaged" in codes(detect.read(file, now=NOW))
    (tmp_path / "none.json").write_text("[]")
    assert list(detect.read(tmp_path / "none.json")) == []


def test_of_one_node() -> None:
    several = [event(host=host) for host in ("n1", "n1.rack.example.org", "n2", "")]
    assert [one.host for one in of_node(several, "n1")] == ["n1", "n1", ""]
    assert [one.host for one in of_node(several, "n1.rack.example.org")] == ["n1.rack.example.org"] * 2 + [""]
    assert [one.host for one in of_node(several, "n1.other.example.org")] == ["n1.other.example.org", ""]
    assert [one.host for one in of_node(several, "n")] == [""]


def test_order_and_window() -> None:
    silent = no_evidence("nvml", "nvml:absent", "no driver")
    undated = replace(event(), time=None)
    found = gather([silent, undated, event(9), event(-9)])
    assert [(one.kind, one.time is None) for one in found] == [
        ("memory", False),
        ("memory", False),
        ("memory", True),
        ("no-evidence", True),
    ]
    assert found[0].time == event(-9).time
    near = within(found, NOW, timedelta(seconds=5), timedelta(seconds=10))
    assert [one.time for one in near] == [event(9).time, None, None]


def test_the_newest_are_kept_and_the_others_counted() -> None:
    events = [event(second, evidence=f"words {second}") for second in range(module.EVENTS_MAX + 50)]
    copies = [replace(one, origin="copy") for one in events]
    for order in (events, events[::-1], events + copies):
        found = gather(order)
        assert len(found) == module.EVENTS_MAX
        assert {one.time for one in found} == {one.time for one in events[50:]}
        assert "more than 1000" in found[-1].reason
        assert "at least 50 older ones" in found[-1].reason


def test_the_number_of_kinds_is_bounded() -> None:
    found = gather(event(device=f"0000:{number:05x}") for number in range(module.GROUPS_MAX + 7))
    assert len(found) == module.GROUPS_MAX + 1
    assert found[-1].code == "signals:too-many"
    assert "7 signals" in found[-1].reason


def million() -> Iterator[bytes]:
    """10^6 lines, of which 5,000 are events of one device."""
    for number in range(1_000_000):
        if number % 200 == 0:
            day, second = divmod(number, 86_400)
            stamp = f"Nov {1 + day:2d} {second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
            yield f"{stamp} n1 kernel: NVRM: Xid (PCI:0000:9b:00): 63, pid={number}, words".encode()
        else:
            yield b"Nov 28 10:00:00 n1 systemd[1]: Started a session of somebody. Words to fill the line up to its length"


_READ_MILLION = """
import resource, sys
from bitwitness.fleet.signals import kernel
from bitwitness.fleet.signals.gather import gather
from bitwitness.fleet.signals.times import Clock
from tests.fleet.signals.lines import NOW
from tests.fleet.signals.test_gather import million

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = gather(kernel.read(million(), Clock(NOW), origin="log"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sys.stdout.write(f"{len(found)} {after - before} {found[-1].reason}")
"""


def test_a_million_lines_in_bounded_memory() -> None:
    """In a process of its own, whose highest memory nobody else has raised."""
    top = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", _READ_MILLION]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=top)
    count, kibibytes, reason = done.stdout.split(" ", 2)
    assert int(count) == module.EVENTS_MAX
    assert "at least 4000 older" in reason
    assert int(kibibytes) < 16 * 1024
