from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.signals import detect, kernel
from bitwitness.fleet.signals.times import Clock, iso, parse_time, parse_zone, split
from tests.fleet.signals.lines import NOW, REMAP, syslog

BERLIN = ZoneInfo("Europe/Berlin")
CLOCK = Clock(NOW)


@pytest.mark.parametrize(
    ("stamp", "time", "host"),
    [
        ("[Fri Aug 30 11:11:22 2024] ", "2024-08-30T11:11:22.000Z", ""),
        ("2026-11-29T10:00:00,123456+00:00 ", "2026-11-29T10:00:00.123Z", ""),
        ("2026-11-29 10:00:00.123 n1 kernel: ", "2026-11-29T10:00:00.123Z", "n1"),
        ("2026-11-29T10:00:00+0100 n1 kernel: ", "2026-11-29T09:00:00.000Z", "n1"),
        ("2026-11-29T10:00:00.5-08:00 node.example.org kernel: ", "2026-11-29T18:00:00.500Z", "node.example.org"),
        ("Nov 29 10:00:00 n1 kernel: ", "2026-11-29T10:00:00.000Z", "n1"),
        ("Nov  9 10:00:00 n1 kernel: [ 123.456789] ", "2026-11-09T10:00:00.000Z", "n1"),
        ("Nov 29 10:00:00.654321 n1 kernel: ", "2026-11-29T10:00:00.654Z", "n1"),
        ("<4>Nov 29 10:00:00 n1 kernel: ", "2026-11-29T10:00:00.000Z", "n1"),
        ("<3>1 2026-11-29T10:00:00.000Z n1 kernel - - - ", "2026-11-29T10:00:00.000Z", "n1"),
        ('<3>1 2026-11-29T10:00:00Z n1 app 7 ID [a@1 b="]c"] ', "2026-11-29T10:00:00.000Z", "n1"),
        ("Sun 2026-11-29 10:00:00 UTC n1 kernel: ", "2026-11-29T10:00:00.000Z", "n1"),
        ("E1129 10:00:00.123456    1234 server.go:12] ", "2026-11-29T10:00:00.123Z", ""),
        ("2026-11-29T10:00:00.123456789Z stderr F ", "2026-11-29T10:00:00.123Z", ""),
        ("[2026-11-29 10:00:00.352444][5975153.869131] ", "2026-11-29T10:00:00.352Z", ""),
        ("[12345.678901] ", None, ""),
        ("[12345.678901][  T123] ", None, ""),
        ("[12345.678901] n1 kernel: ", None, "n1"),
        ("1795946400.654321 n1 kernel: ", "2026-11-29T10:00:00.654Z", "n1"),
        ("2026/11/29 10:00:00 ", "2026-11-29T10:00:00.000Z", ""),
        ('time="2026-11-29T10:00:00Z" level=info msg="', "2026-11-29T10:00:00.000Z", ""),
        ("/var/log/messages-20261129:Nov 29 10:00:00 n1 kernel: ", "2026-11-29T10:00:00.000Z", "n1"),
        ("kern.log:17:2026-11-29T10:00:00Z n1 kernel: ", "2026-11-29T10:00:00.000Z", "n1"),
        ("n1: [Sun Nov 29 10:00:00 2026] ", "2026-11-29T10:00:00.000Z", "n1"),
        ("n1: [12345.678901] ", None, "n1"),
        ("kern  :err   : [12345.678901] ", None, ""),
        ("<3>[12345.678901] ", None, ""),
        ("3,1234,5678901,-;", None, ""),
        ("", None, ""),
        ("Nov 31 10:00:00 n1 kernel: ", None, ""),
        ("2026-13-01T10:00:00Z n1 kernel: ", None, ""),
        ("Foo 29 10:00:00 n1 kernel: ", None, ""),
    ],
)
def test_forms_of_stamps(stamp: str, time: str | None, host: str) -> None:
    found = split(stamp + REMAP, CLOCK)
    assert (None if found.time is None else iso(found.time)) == time
    assert found.host == host
    assert found.text.endswith(REMAP)
    assert found.known == bool(stamp and (time or found.relative))


@pytest.mark.parametrize(
    ("now", "stamp", "year"),
    [
        ("2026-11-29T12:00:00Z", "Nov 29 11:59:59", 2026),
        ("2026-11-29T12:00:00Z", "Jan  1 00:00:00", 2026),
        ("2026-11-29T12:00:00Z", "Dec 31 23:59:59", 2025),
        ("2027-01-01T00:05:00Z", "Dec 31 23:59:59", 2026),
        ("2027-01-01T00:05:00Z", "Jan  1 00:04:00", 2027),
        ("2026-12-31T23:50:00Z", "Jan  1 00:10:00", 2027),  # a clock that is a little ahead
        ("2026-11-29T12:00:00Z", "Feb 29 10:00:00", 2024),
    ],
)
def test_without_a_year_it_lies_before_now(now: str, stamp: str, year: int) -> None:
    found = split(f"{stamp} n1 kernel: words", Clock(datetime.fromisoformat(now)))
    assert found.time is not None
    assert found.time.year == year


def test_without_a_zone_it_is_in_the_zone_that_was_given() -> None:
    clock = Clock(NOW, BERLIN)
    for stamp, hour in (("Jul  1 10:00:00", 8), ("Nov 29 10:00:00", 9), ("2026-07-01T10:00:00", 8)):
        found = split(f"{stamp} n1 kernel: words", clock)
        assert found.time is not None
        assert found.time.hour == hour
    known = split("2026-07-01T10:00:00Z n1 kernel: words", clock)
    assert known.time == datetime(2026, 7, 1, 10, tzinfo=UTC)
    edge = split("Jan  1 00:30:00 n1 kernel: words", Clock(datetime(2026, 12, 31, 23, 45, tzinfo=UTC), BERLIN))
    assert edge.time == datetime(2026, 12, 31, 23, 30, tzinfo=UTC)


def test_from_boot_on() -> None:
    boot = datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
    assert split("[3600.5] words", Clock(NOW, boot=boot)).time == boot + timedelta(seconds=3600.5)
    assert split("6,339,5140900,-;words", Clock(NOW, boot=boot)).time == boot + timedelta(seconds=5.1409)
    assert split("[999999999999.0] words", Clock(NOW, boot=boot)).time is None
    assert split("[12.5] words", CLOCK).relative == "12.5"


def test_lengths_of_time_are_no_time() -> None:
    for stamp in ("[Nov29 10:00] ", "[  +0.000012] ", "[<    0.000012>] "):
        found = split(f"{stamp}words", CLOCK)
        assert (found.text, found.time, found.known) == ("words", None, True)


@pytest.mark.parametrize(
    ("line", "zone", "time"),
    [
        ("2026-11-29T11:00:00.5Z stdout F 2026-11-29T10:00:00+00:00 n1 kernel: words", UTC, "2026-11-29T10:00:00"),
        ("2026-11-29T11:00:00.0Z stdout F Nov 28 10:00:00 n1 kernel: words", UTC, "2026-11-28T10:00:00"),
        ("2026-11-29T09:30:15.1Z stdout F [Sun Nov 22 09:30:15 2026] words", UTC, "2026-11-22T09:30:15"),
        ("2026-11-29T11:20:00.0Z Nov 22 09:30:15 n17 kernel: words", UTC, "2026-11-22T09:30:15"),
        (
            "2026-11-29T09:30:17.1Z stdout F [Sun Nov 29 10:30:15 2026] words",
            UTC,
            "2026-11-29T09:30:17",
        ),  # its own zone
        ("2026-11-29T09:30:17.1Z stdout F [Sun Nov 29 10:30:15 2026] words", BERLIN, "2026-11-29T09:30:15"),
    ],
)
def test_of_several_stamps_the_innermost_counts(line: str, zone: tzinfo, time: str) -> None:
    found = split(line, Clock(NOW, zone))
    assert found.time is not None
    assert iso(found.time)[:19] == time
    assert found.text == "words"


@pytest.mark.parametrize(
    ("stamp", "zone", "time"),
    [
        ("Sun 2026-11-29 09:30:15 EST", UTC, "2026-11-29T14:30:15"),
        ("Sun 2026-11-29 09:30:15 PDT", BERLIN, "2026-11-29T16:30:15"),
        ("2026-11-29 09:30:15 PST", BERLIN, "2026-11-29T17:30:15"),
        ("Nov 29 09:30:15 CET", UTC, "2026-11-29T08:30:15"),
        ("Sun 2026-11-29 09:30:15 -03", UTC, "2026-11-29T12:30:15"),
        ("Sun 2026-11-29 09:30:15 IST", ZoneInfo("Asia/Kolkata"), "2026-11-29T04:00:15"),
        ("Sun 2026-11-29 09:30:15 IST", UTC, None),
        ("Sun 2026-11-29 09:30:15 XYZ", UTC, None),
        ("2026-11-29T09:30:15+99:99", UTC, None),
        ("0000-11-29T09:30:15Z", UTC, None),
    ],
)
def test_words_for_zones_are_kept_to_or_leave_no_time(stamp: str, zone: tzinfo, time: str | None) -> None:
    found = split(f"{stamp} n17 kernel: words", Clock(NOW, zone))
    assert (None if found.time is None else iso(found.time)[:19]) == time
    assert (found.host, found.text, found.known) == ("n17", "words", True)
    assert bool(found.doubt) == (time is None)
    (one,) = kernel.read([f"{stamp} n17 kernel: {REMAP}".encode()], Clock(NOW, zone))
    assert (one.time is None) == (time is None)
    assert ("its time is not known" in one.reason) == (time is None)


def test_who_wrote_a_line() -> None:
    assert split('Nov 29 10:00:00 n1 kubelet[7]: E1129 10:00:00.1 1 a.go:1] "x', CLOCK).programs == ("kubelet",)
    assert split("<3>1 2026-11-29T10:00:00Z n1 app 7 - - Nov 29 10:00:00 n1 kernel: x", CLOCK).programs == (
        "app",
        "kernel",
    )
    assert split("Nov 29 10:00:00 n1 NVRM: x", CLOCK).text == "NVRM: x"
    assert split("2026-11-29 10:00:00,123 INFO server: x", CLOCK).host == ""


def test_the_year_is_the_one_in_which_the_file_was_written(tmp_path: Path) -> None:
    log = tmp_path / "messages.1"
    log.write_text(syslog(REMAP) + "\n")
    written = datetime(2024, 12, 2, tzinfo=UTC).timestamp()
    os.utime(log, (written, written))
    (one,) = detect.read(log)
    assert one.time == "2024-11-29T11:00:00.000Z"
    (one,) = detect.read(log, now=NOW, zone=BERLIN)
    assert one.time == "2026-11-29T10:00:00.000Z"
    (one,) = detect.read(log, now=datetime(2027, 3, 1, tzinfo=UTC))
    assert one.time == "2026-11-29T11:00:00.000Z"


def test_zones_and_times_that_people_give() -> None:
    assert parse_zone("Europe/Berlin") == BERLIN
    assert parse_zone("+02:00") == parse_zone("+0200") == timezone(timedelta(hours=2))
    assert parse_zone("-05:30") == timezone(-timedelta(hours=5, minutes=30))
    assert parse_zone("local").utcoffset(NOW.replace(tzinfo=None)) is not None
    assert parse_time("2026-11-29T10:00:00", BERLIN) == parse_time("2026-11-29T09:00:00Z")
    for wrong in ("", "Nowhere/Else", "../../etc/passwd", "+99:00", "/etc/localtime"):
        with pytest.raises(ConfigurationError, match="no such zone"):
            parse_zone(wrong)
    for wrong in ("", "yesterday", "2026-13-01"):
        with pytest.raises(ConfigurationError, match="no time"):
            parse_time(wrong)
