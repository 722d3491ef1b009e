from __future__ import annotations

import gzip
import json
import os
import re
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.fleet.signals import collect
from tests.cli import samples
from tests.fleet.signals.lines import NOW, REMAP, SWITCH, codes, syslog

KEYS = ["source", "code", "device", "time", "class", "weight", "reason"]
DOUBLE = "NVRM: Xid (PCI:0000:9b:00): 48, pid=7, An uncorrectable double bit error (DBE) has been detected"
APPLICATION = "NVRM: Xid (PCI:0000:9c:00): 13, pid=8, Graphics Exception"


def signals(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    runner = CliRunner(env={"COLUMNS": "110", "TERM": "dumb"})
    words = ["fleet", "signals", "--now", NOW.isoformat(), *(str(one) for one in arguments)]
    return runner.invoke(cli, words, input=stdin)


def listed(*arguments: str | Path) -> list[dict[str, Any]]:
    done = signals(*arguments, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert isinstance(found, list)
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "messages"
    lines = [syslog(REMAP, 0), syslog(DOUBLE, 60), syslog(APPLICATION, 120, "n2.example.org"), syslog(SWITCH, 180)]
    file.write_text("\n".join([*lines, f"[12.5] {REMAP}", ""]))
    return file


def test_json_is_a_list_of_records_with_these_keys(log: Path) -> None:
    found = listed("--from", log)
    assert [list(one) for one in found] == [KEYS] * 5
    assert [one["code"] for one in found] == ["xid:63", "xid:48", "xid:13", "sxid:12028", "xid:63"]
    assert found[1]["class"] == "memory"
    assert found[1]["weight"] == "strong"
    assert found[1]["time"] == "2026-11-29T11:01:00.000Z"
    assert found[4]["time"] is None
    details = listed("--from", log, "--details")
    assert sorted(details[0]) == sorted([*KEYS, "host", "count", "evidence", "origin"])
    assert details[0]["evidence"] == REMAP
    assert details[0]["origin"] == str(log)


def test_the_page_says_what_weighs_and_why(log: Path) -> None:
    page = signals("--from", log).stdout
    rows = page.splitlines()
    assert rows[0].startswith("Seen, what weighs most first")
    assert rows[2].split()[:5] == ["strong", "memory", "n1", "0000:9b:00", "xid:48"]
    assert "held wrong bits" in rows[2]
    assert "Strong evidence for a fault of this device: xid:48 (0000:9b:00 on n1)." in page
    assert "Weak evidence for a fault of a link, and against blaming one end of it: sxid:12028" in page
    assert "No evidence" not in page
    assert REMAP in signals("--from", log, "--details").stdout


def test_a_terminal_has_room_for_the_sentences(log: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    runner = CliRunner(env={"COLUMNS": "100", "TERM": "xterm", "FORCE_COLOR": "1", "NO_COLOR": None})
    done = runner.invoke(cli, ["fleet", "signals", "--details", str(log), str(tmp_path / "empty")])
    lines = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout).splitlines()]
    assert lines[1].startswith("strong  xid:48  0000:9b:00 on n1  once ")
    assert lines[2].startswith("        memory: an uncorrectable (double bit) ECC error")
    assert any(line == "kernel:empty  it is empty" for line in lines)
    assert max(len(line) for line in lines) <= 100


def test_what_gave_no_evidence_is_on_the_page(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "quiet").write_text(syslog("all is quiet") + "\n")
    done = signals("--from", tmp_path)
    assert done.exit_code == 0
    assert "No signals." in done.stdout
    assert "No evidence, which is not health" in done.stdout
    assert str(tmp_path / "empty") in done.stdout
    assert "no sign of health" in done.stdout
    done = signals("--from", tmp_path / "quiet", "--json")
    assert (done.exit_code, json.loads(done.stdout)) == (0, [])
    assert "no sign of health" in done.stderr


def test_several_files_directories_and_standard_input(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    other.write_text(syslog("NVRM: Xid (PCI:0000:9d:00): 95, pid=1, words") + "\n")
    (tmp_path / "link").symlink_to(log)
    for arguments in (
        ("--from", log, other),
        ("--from", log, "--from", other, log),
        (log, other),
        ("--from", tmp_path),
    ):
        assert len(listed(*arguments)) == 6
    done = signals("--from", "-", "--json", stdin=log.read_bytes())
    assert len(json.loads(done.stdout)) == 5
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)  # nobody ever writes into it: a directory that has one must not wait for that
    assert len(listed("--from", tmp_path)) == 6


def test_windows(log: Path) -> None:
    near = listed("--from", log, "--at", "2026-11-29T11:01:30Z", "--before", "60s", "--after", "45s")
    assert [one["code"] for one in near] == ["xid:48", "xid:13", "xid:63"]  # the last does not say when
    assert len(listed("--from", log, "--at", "2026-11-28T11:01:30Z")) == 1
    for first_or_last in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"):
        assert len(listed("--from", log, "--at", first_or_last, "--before", "99d", "--after", "99d")) == 1
    zoned = listed("--from", log, "--zone", "+01:00", "--at", "2026-11-29T11:01:30", "--before", "1m", "--after", "0")
    assert [one["code"] for one in zoned] == ["xid:48", "xid:63"]


def test_around_an_incident(log: Path, tmp_path: Path) -> None:
    folder = samples.write(tmp_path / "run", samples.replays(samples.topology(), 1, samples.BAD), samples.topology())
    record = json.loads((folder / "incident.json").read_text())
    (folder / "incident.json").write_text(json.dumps({**record, "time": "2026-11-29T11:01:30.000Z"}))
    for given in (folder, folder / "incident.json", tmp_path / "run"):
        near = listed("--from", log, "--incident", given, "--before", "60s", "--after", "45s")
        assert [one["code"] for one in near] == ["xid:48", "xid:13", "xid:63"]
    done = signals("--from", log, "--incident", tmp_path / "nowhere")
    assert (done.exit_code, "does not exist" in done.stderr) == (2, True)


def test_one_node(log: Path) -> None:
    assert [one["code"] for one in listed("--from", log, "--node", "n2")] == ["xid:13", "xid:63"]
    hosts = [one["host"] for one in listed("--from", log, "--node", "n2", "--details")]
    assert hosts == ["n2", "n2"]
    assert len(listed("--from", log, "--node", "n1")) == 4
    assert [one["code"] for one in listed("--from", log, "--node", "n3")] == ["xid:63"]


def test_times_that_are_not_complete(log: Path) -> None:
    assert listed("--from", log, "--zone", "Europe/Berlin")[1]["time"] == "2026-11-29T10:01:00.000Z"
    assert listed("--from", log, "--now", "2020-01-01T00:00:00Z")[1]["time"] == "2019-11-29T11:01:00.000Z"
    for now in ("0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59Z"):
        assert len(listed("--from", log, "--now", now, "--zone", "-08:00", "--boot", now)) == 5
    booted = listed("--from", log, "--boot", "2026-11-29T08:00:00Z")
    assert booted[0]["time"] == "2026-11-29T08:00:12.500Z"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--from", "/nowhere/at/all"), "no such file"),
        (("--from", ""), "is a variable unset?"),
        (("--at", "yesterday"), "no time"),
        (("--zone", "Nowhere"), "no such zone"),
        (("--before", "a while"), "is no time"),
        (("--node", " "), "is a variable unset?"),
        (("--at", "2026-11-29", "--incident", "/tmp"), "not both"),
    ],
)
def test_wrong_asks(arguments: tuple[str, ...], words: str) -> None:
    done = signals(*arguments, *(() if "--from" in arguments else ("--from", __file__)))
    assert done.exit_code == 2
    assert words in done.stderr


def test_words_of_a_log_steer_no_terminal(tmp_path: Path) -> None:
    evil = "NVRM: Xid (PCI:0000:9b:00): 63, \x1b]0;owned\x07 [bold]words[/bold] \x9b31m"
    (tmp_path / "log").write_text(syslog(evil, host="n1") + "\n")
    page = signals("--from", tmp_path / "log", "--details").stdout
    assert "\x1b" not in page
    assert "\x9b" not in page
    assert "[bold]words[/bold]" in page


# This machine ---------------------------------------------------------------------------------------------------------


def here(tmp_path: Path, journal: str = "", code: int = 0, ring: str = "") -> collect.Here:
    """A machine whose programs print these texts."""
    (tmp_path / "var" / "log").mkdir(parents=True, exist_ok=True)
    for name, text in (("journal", journal), ("ring", ring)):
        (tmp_path / name).write_text(text)
    show = (
        "import sys; sys.stdout.write(open(sys.argv[1]).read()); sys.stderr.write('words'); sys.exit(int(sys.argv[2]))"
    )
    return collect.Here(
        root=tmp_path,
        journal=(sys.executable, "-c", show, str(tmp_path / "journal"), str(code)),
        ring=(sys.executable, "-c", show, str(tmp_path / "ring"), "0"),
        kmsg=tmp_path / "no-such-device",
        devices=False,
    )


def test_this_machine_by_its_journal(tmp_path: Path) -> None:
    entry = {"__REALTIME_TIMESTAMP": "1795950000000000", "_HOSTNAME": "n1", "MESSAGE": REMAP}
    machine = here(tmp_path, json.dumps(entry) + "\n", ring=f"[1.5] {DOUBLE}\n")
    (tmp_path / "var/log/messages").write_text(syslog(REMAP) + "\n")
    (tmp_path / "var/log/kern.log.1").write_text(syslog(DOUBLE) + "\n")
    (tmp_path / "var/log/unrelated.log").write_text(syslog(DOUBLE, 9) + "\n")
    found = list(collect.read(now=NOW, zone=UTC, host="n1", here=machine))
    assert sorted(codes(found)) == ["xid:48", "xid:63", "xid:63"]
    assert {one.origin for one in found} == {
        "journalctl",
        str(tmp_path / "var/log/messages"),
        str(tmp_path / "var/log/kern.log.1"),
    }
    assert {(one.host, one.time) for one in found} == {("n1", "2026-11-29T11:00:00.000Z")}
    renamed = list(collect.read(now=NOW, zone=UTC, host="as-slurm-calls-it", here=machine))
    assert {one.origin: one.host for one in renamed}["journalctl"] == "as-slurm-calls-it"


def test_this_machine_without_a_journal(tmp_path: Path) -> None:
    found = list(collect.read(now=NOW, here=here(tmp_path, ring=f"[1.5] {DOUBLE}\n"), host="n1"))
    assert codes(found) == ["kernel:no-journal", "xid:48", "kernel:no-logs"]
    assert found[1].time is not None
    assert datetime.fromisoformat(found[1].time) < datetime.now(UTC)
    assert {one.host for one in found} == {"n1"}
    found = list(collect.read(now=NOW, here=here(tmp_path, code=3)))
    assert codes(found) == ["kernel:no-journal", "kernel:unreadable", "kernel:no-logs"]
    assert "words" in found[0].reason
    absent = replace(here(tmp_path), journal=("/no/such/program",), root=tmp_path / "nowhere")
    found = list(collect.read(now=NOW, here=absent))
    assert "cannot be started" in found[0].reason
    assert {one.kind for one in found} == {"no-evidence"}


def test_this_machine_as_it_is() -> None:
    """Whatever it has: a list, and no source that is silently left out."""
    done = CliRunner().invoke(cli, ["fleet", "signals", "--json"])
    assert done.exit_code == 0, done.output
    sources = {one["source"] for one in json.loads(done.stdout)}
    assert {"edac", "nvml", "rasdaemon"} <= sources


# Which reader a file is for -------------------------------------------------------------------------------------------

_DIAGNOSTIC = {
    "DCGM Diagnostic": {
        "test_categories": [
            {
                "category": "Hardware",
                "tests": [
                    {
                        "name": "memory",
                        "results": [
                            {
                                "entity_group": "GPU",
                                "entity_id": 3,
                                "status": "Fail",
                                "warnings": [
                                    {"warning": "words", "error_id": 52, "error_category": 10, "error_severity": 2}
                                ],
                            }
                        ],
                    }
                ],
            }
        ]
    },
    "metadata": {"version": "4.6.0"},
}
_LABELS = 'gpu="0",UUID="GPU-34d7319c-5b19-1e75-186d-c187099e4fe5",pci_bus_id="00000000:9B:00.0",Hostname="n1"'
_SCRAPE = f"# TYPE DCGM_FI_DEV_XID_ERRORS gauge\nDCGM_FI_DEV_XID_ERRORS{{{_LABELS}}} 63\n"


def test_files_are_told_by_their_content(tmp_path: Path) -> None:
    (tmp_path / "a").write_text(_SCRAPE)
    (tmp_path / "b").write_text(f"words before it\n{json.dumps(_DIAGNOSTIC)}")
    (tmp_path / "c").write_text(syslog(f"{DOUBLE} DCGM_FI_DEV_XID_ERRORS") + "\n")
    (tmp_path / "d.gz").write_bytes(gzip.compress(_SCRAPE.encode()))
    (tmp_path / "e").write_text(json.dumps([{"gpu": 0, "ecc": {"total_uncorrectable_count": 2}}]))
    with closing(sqlite3.connect(tmp_path / "f")) as database:
        database.execute("CREATE TABLE mc_event(id, timestamp, err_count, err_type, err_msg, label, mc)")
        database.execute(
            "INSERT INTO mc_event VALUES (1, '2026-11-29 10:00:00 +0000', 3, 'Corrected', 'read', 'A1', 0)"
        )
        database.commit()
    (tmp_path / "g.gz").write_bytes(gzip.compress((tmp_path / "f").read_bytes()))
    told = {file.name: {one["source"] for one in listed("--from", file)} for file in tmp_path.iterdir()}
    assert told == {
        "a": {"dcgm"},
        "b": {"dcgm-diag"},
        "c": {"kernel"},
        "d.gz": {"dcgm"},
        "e": {"amd-smi"},
        "f": {"rasdaemon"},
        "g.gz": {"rasdaemon"},
    }
    assert "unpack" in listed("--from", tmp_path / "g.gz")[0]["reason"]


def test_a_slot_that_a_scrape_knows_is_told_by_its_device(tmp_path: Path) -> None:
    (tmp_path / "scrape").write_text(_SCRAPE)
    (tmp_path / "log").write_text(syslog(DOUBLE) + "\n" + syslog(DOUBLE, host="n2") + "\n")
    found = [one for one in listed("--from", tmp_path) if one["code"] == "xid:48"]
    assert sorted(one["device"] for one in found) == ["0000:9b:00", "GPU-34d7319c-5b19-1e75-186d-c187099e4fe5"]
