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
from bitwitness.fleet.signals import collect, opening
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
    found = listed("--from", tmp_path)
    assert len(found) == 7
    assert (found[-1]["code"], "is a pipe" in found[-1]["reason"]) == ("kernel:skipped", True)


def test_windows(log: Path) -> None:
    near = listed("--from", log, "--at", "2026-11-29T11:01:30Z", "--before", "60s", "--after", "45s")
    assert [one["code"] for one in near] == ["xid:48", "xid:13", "xid:63"]  # the last does not say when
    early = listed("--from", log, "--at", "2026-11-28T11:01:30Z")
    assert [one["code"] for one in early] == ["xid:63", "kernel:other-time"]
    assert "begins at 2026-11-29T11:00:00.000Z, after" in early[1]["reason"]
    for first_or_last in ("0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"):
        assert len(listed("--from", log, "--at", first_or_last, "--before", "99d", "--after", "99d")) == 2
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
    found = listed("--from", log, "--node", "n2", "--details")
    assert [(one["code"], one["host"]) for one in found] == [("xid:13", "n2"), ("kernel:nameless", "n2")]
    assert len(listed("--from", log, "--node", "n1")) == 4
    done = signals("--from", log, "--node", "n71", "--json")
    assert [one["code"] for one in json.loads(done.stdout)] == ["kernel:nameless", "kernel:other-node"]
    assert "Read and not listed: 4 of other nodes (n1, n2.example.org)." in done.stderr
    assert "not listed: 4 of other nodes" in signals("--from", log, "--node", "n71").stdout


def test_lines_without_a_host_are_of_the_node_that_their_file_is_of(tmp_path: Path) -> None:
    quiet, ring = tmp_path / "quiet", tmp_path / "ring"
    quiet.write_text("\n".join([f"[ 12.3] {DOUBLE}", *(syslog("words", second, "n17") for second in range(9)), ""]))
    ring.write_text(f"[ 12.3] {DOUBLE}\n")
    for node, expected in (("n17", ["xid:48"]), ("n71", ["kernel:nameless", "kernel:other-node"])):
        assert [one["code"] for one in listed("--from", quiet, "--node", node)] == expected
        assert [one["code"] for one in listed("--from", ring, "--node", node)] == ["xid:48"]


def test_a_log_that_ends_before_the_time_that_is_asked_about(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join("Nov 20 11:00:00 n17 kernel: words" for _ in range(30)) + "\n")
    (one,) = listed("--from", log, "--at", "2026-11-29T09:40:00Z")
    assert (one["code"], one["class"]) == ("kernel:other-time", "no-evidence")
    assert "ends at 2026-11-20T11:00:00.000Z, before" in one["reason"]
    assert listed("--from", log, "--at", "2026-11-20T11:40:00Z") == []
    log.write_text("Nov 20 11:00:00 n17 kernel: words\n" + syslog(DOUBLE) + "\n")
    done = signals("--from", log, "--at", "2026-11-20T11:40:00Z")
    assert "Read and not listed: 1 of other times." in done.stdout


def test_one_that_cannot_be_read_hides_no_other(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "secret"
    secret.write_text("words")
    plain = Path.open

    def refusing(path: Path, *arguments: Any, **named: Any) -> Any:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refusing)
    monkeypatch.setattr(os, "access", lambda path, mode, **_: "secret" not in str(path))
    found = listed("--from", log, secret)
    assert [one["code"] for one in found[-2:]] == ["xid:63", "kernel:unreadable"]
    assert len(found) == 6


def test_directories_that_tell_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    (one,) = listed("--from", tmp_path)
    assert one["code"] == "kernel:empty"
    plain = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("inner"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", refusing)
    (one,) = listed("--from", tmp_path, "--details")
    assert (one["code"], one["origin"]) == ("kernel:unreadable", str(tmp_path / "inner"))


def test_counters_that_were_copied_off_another_machine(tmp_path: Path) -> None:
    for name, text in {"ue_count": "1", "ce_count": "0", "seconds_since_reset": "7200", "mc_name": "skx"}.items():
        (tmp_path / "report/edac/mc/mc0").mkdir(parents=True, exist_ok=True)
        (tmp_path / "report/edac/mc/mc0" / name).write_text(f"{text}\n")
    for given in ("report", "report/edac/mc"):
        found = listed("--from", tmp_path / given, "--node", "n9", "--details")
        assert [(one["code"], one["host"]) for one in found] == [("edac:ue", "n9")]


def test_nothing_is_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_PATIENCE", 0.05)
    os.mkfifo(tmp_path / "pipe")
    (one,) = listed("--from", tmp_path / "pipe")
    assert "nobody wrote" in one["reason"]
    (one,) = listed("--from", "/dev/zero")
    assert "device" in one["reason"]
    read, write = os.pipe()
    os.write(write, f"[12.5] {DOUBLE}\n".encode())
    os.close(write)
    assert [one["code"] for one in listed("--from", f"/dev/fd/{read}")] == ["xid:48"]
    os.close(read)


def test_the_last_lines_say_what_is_not_known(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(f"[12.5] {DOUBLE}\n[13.5] EDAC MC0: 1 UE memory read error on DIMM_A1 (channel:0 slot:0)\n")
    page = signals("--from", log).stdout
    assert "Strong evidence for a fault of this device: xid:48 (0000:9b:00); the time is not known." in page
    assert "fault of the host's memory or processor, not of an accelerator: edac:ue (DIMM_A1); the time is" in page
    page = signals("--from", log, "--at", "2026-11-29T10:00:00Z").stdout
    assert "the time is not known, and may be another than the one asked about." in page


def test_what_weighs_nothing_hides_nothing(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join([syslog(DOUBLE), syslog(DOUBLE, 60, program="sshd[1]"), syslog(APPLICATION), ""]))
    row = signals("--from", log).stdout.splitlines()[2]
    assert row.split()[:5] == ["strong", "memory", "n1", "0000:9b:00", "xid:48"]
    assert "held wrong bits" in row


def test_counters_are_shown_by_their_newest_reading(tmp_path: Path) -> None:
    record = {
        "source": "dcgm",
        "code": "dcgm:311",
        "device": "GPU-1",
        "class": "memory",
        "weight": "strong",
        "reason": "r",
    }
    several = [{**record, "time": f"2026-11-29T10:0{n}:00Z", "count": n, "evidence": f"is {n}"} for n in (2, 3)]
    (tmp_path / "ours").write_text(json.dumps(several))
    row = signals("--from", tmp_path / "ours").stdout.splitlines()[2]
    assert row.split()[:6] == ["strong", "memory", "GPU-1", "dcgm:311", "3", "2026-11-29T10:03:00Z"]


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
