"""A report without names: whatever stands in the files of a run or in the state of a fleet, no name of it comes through."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import BitwitnessError
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.runfiles import RunFiles
from bitwitness.web import report_closed as forms
from bitwitness.web.report import gather
from bitwitness.web.report_records import Report
from bitwitness.web.report_redacting import redact
from bitwitness.web.report_rendering import html, markdown
from bitwitness.web.report_words import standing
from tests.cli import samples
from tests.fleet.incidents import NOW
from tests.fleet.rehearsal import Rehearsal

exhaustive = pytest.mark.skipif(
    not os.environ.get("BITWITNESS_EXHAUSTIVE"), reason="hundreds of reports: only with BITWITNESS_EXHAUSTIVE=1"
)
UUID = "GPU-5a8e0b6c-{rank:04d}-4d7e-9f31-0c2b7a91d3{rank:02d}"
NODES = ("n0.acme.example", "n1", "ip-10-0-3-7.ec2.internal")
FORMS = (
    "{m}",
    "{m}.acmecorp.internal",
    "{m}-ib0",
    "{m}_mlx5_0",
    "{m} (console)",
    "{m}@login7",
    "ops@{m}",
    "{m}:29500",
    "[fe80::1%{m}]",
    "/home/{m}/x",
    "/data/my dir/{m} z",
    "~{m}/x",
    "$HOME/{m}",
    "//filer/vol/{m}",
    "C:\\Users\\{m}",
    "file:///home/{m}/x.pt",
    "s3://bucket/{m}/run",
    "https://{m}.example/x?y",
    "user {m}",
    "key={m}",
    "{m}/cpu-0",
    "torch {m}",
    "NVIDIA {m}",
    "drill: {m}",
    "xid:48 on {m} (kernel, strong): {m}",
    "RuntimeError: {m}",
)


def outputs(report: Report) -> dict[str, str]:
    return {"html": html(report), "markdown": markdown(report), "json": json.dumps(report.to_json())}


@dataclass(frozen=True)
class Files:
    """A run and a state of a fleet, and copies of both as they were made."""

    folder: Path
    run: RunFiles
    state: Path
    nodes: int

    def restore(self) -> None:
        for name in ("run", "state"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
            shutil.copytree(self.folder / f"{name}.master", self.folder / name)

    def gather(self) -> Report:
        return gather(self.run, fleet=self.state)


def made(folder: Path, nodes: int) -> Files:
    """An incident about which everybody has done and said something."""
    play = Rehearsal(folder, nodes=NODES[:nodes])
    where = samples.topology(nodes, UUID, names=NODES[:nodes])
    device = where.placements[1].device
    seen = samples.replays(where, 1, samples.BAD)
    seen[-1] = replace(seen[-1], value="", repeats=(), error="torch.OutOfMemoryError: on n1, of alice")
    told: dict[str, Any] = {
        "time": NOW.isoformat(),
        "notes": ["a note"],
        "scheduler_job": "slurm:4711",
        "supervision": "s",
    }
    name = samples.write(play.run_dir, seen, where, saved=(1,), **told).name
    run = RunFiles(play.run_dir)
    run.write_run({"world_size": 2 * nodes, "run": "20261130T065606Z-fcbb20", "scheduler_job": "slurm:4711", "placement": where.to_json(), "started": NOW.isoformat(), "limits": ["one"]})  # fmt: skip
    (run.incidents()[0] / "core.n1.alice").write_text("x")
    play.signals = [
        Signal("nvml", IDENTITY, device, None, "noise", "none", "x", host=NODES[0], evidence="serial=1650921"),
        Signal("kernel", "xid:48", device, NOW.isoformat(), "memory", "strong", "double-bit error", host=NODES[0]),
    ]
    play.rounds(2)
    play.end()
    run.note_action(name, "judged", judgement="confirmed", who="alice@login7", why="alice asked bob")
    run.note_action(name, "reseated by alice on login7", who="bob", why="secret project")
    run.note_action(name, "restarted", reason="without n1", nodes=["n1"], node="n1", supervision="s")
    run.quarantine.strike(device, incident=name, node=NODES[0], persistence="persistent")
    run.quarantine.deny_devices([device], node=NODES[0], reason="by dave", incident=name)
    run.quarantine.clear([device], who="dave (console)", reason="swapped")
    run.quarantine.deny_node(NODES[0], reason="by dave", incident=name)
    journal = run.journal(0)
    journal.append("start", {"world_size": 2 * nodes, "node": NODES[0]})
    journal.append("resume", {"step": 10, "checkpoint": "/scratch/x/step-00000010", "refused": []})
    journal.close()
    for one in ("run", "state"):
        shutil.copytree(folder / one, folder / f"{one}.master")
    return Files(folder, run, folder / "state", nodes)


# Planting -------------------------------------------------------------------------------------------------------------


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where texts stand in JSON; the places of a list are one."""
    if isinstance(value, str):
        yield path
    elif isinstance(value, Mapping):
        yield (*path, "{}")
        for key, one in value.items():
            yield from leaves(one, (*path, key))
    elif isinstance(value, list):
        for one in value:
            yield from leaves(one, (*path, "[]"))


def planted(value: Any, wanted: set[tuple[str, ...]], plant: Callable[[str], str], path: tuple[str, ...] = ()) -> Any:
    """The same with other texts at these places; at `{}` a key more."""
    if isinstance(value, str):
        return plant(value) if path in wanted else value
    if isinstance(value, Mapping):
        more = {plant("key"): plant("value")} if (*path, "{}") in wanted else {}
        return {key: planted(one, wanted, plant, (*path, key)) for key, one in value.items()} | more
    if isinstance(value, list):
        return [planted(one, wanted, plant, (*path, "[]")) for one in value]
    return value


Spot = tuple[str, tuple[str, ...]]
"""A file, or a column of a table, and where in its JSON."""


def _documents(files: Files) -> Iterator[tuple[str, Any]]:
    for path in sorted(one for one in files.run.path.rglob("*") if one.suffix in (".json", ".jsonl")):
        name = path.relative_to(files.folder).as_posix()
        text = path.read_text()
        yield name, [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)


def _columns(base: sqlite3.Connection) -> Iterator[tuple[str, str]]:
    for (table,) in base.execute("SELECT name FROM sqlite_master WHERE type='table' AND name NOT LIKE 'sqlite%'").fetchall():  # fmt: skip
        for _, column, kind, *_ in base.execute(f"PRAGMA table_info({table})").fetchall():
            if kind == "TEXT":
                yield table, column


def _told(text: str) -> Any:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return found if isinstance(found, dict | list) else text


def spots(files: Files) -> list[Spot]:
    """Every place of a text."""
    found = {(name, path) for name, document in _documents(files) for path in leaves(document)}
    base = sqlite3.connect(files.state / "state.db")
    for table, column in _columns(base):
        for (text,) in base.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL").fetchall():
            found |= {(f"{table}.{column}", path) for path in leaves(_told(text))}
    base.close()
    return sorted(found)


def plant_all(files: Files, wanted: list[Spot], plant: Callable[[str], str]) -> None:
    for name, document in _documents(files):
        here = {path for one, path in wanted if one == name}
        if here:
            done = planted(document, here, plant)
            text = "".join(json.dumps(line) + "\n" for line in done) if name.endswith("l") else json.dumps(done)
            (files.folder / name).write_text(text)
    base = sqlite3.connect(files.state / "state.db")
    for (trigger,) in base.execute("SELECT name FROM sqlite_master WHERE type='trigger'").fetchall():
        base.execute(f"DROP TRIGGER {trigger}")
    for table, column in _columns(base):
        here = {path for one, path in wanted if one == f"{table}.{column}"}
        for (text,) in base.execute(f"SELECT DISTINCT {column} FROM {table} WHERE {column} IS NOT NULL").fetchall() if here else ():  # fmt: skip
            done = planted(_told(text), here, plant)
            new = done if isinstance(done, str) else json.dumps(done)
            base.execute(f"UPDATE OR IGNORE {table} SET {column} = ? WHERE {column} = ?", (new, text))
    base.commit()
    base.close()


NEEDED = {
    ("placement", "[]", "node"), ("placement", "[]", "device"), ("verdict", "nodes", "[]"), ("verdict", "devices", "[]"),
    ("verdict", "status"), ("verdict", "persistence"), ("denied_devices", "{}"), ("denied_nodes", "{}"), ("strikes", "{}"),
    ("log", "[]", "incident"), ("action",), ("confidence",), ("incident",), ("signals", "[]", "weight"), ("signals", "[]", "class"),
    ("signals", "[]", "time"),
}  # fmt: skip
"""Places without whose word nothing is taken over: a run that is read has none of these changed."""
OF_STATE = {
    "audit.incident",
    "about.value",
    "proposals.updated",
    "proposals.made",
    "incidents.path",
    "intents.tried",
    "about.name",
}
"""Likewise columns of a state."""


class Planter:
    """A secret that nothing else holds, in one form after another."""

    def __init__(self) -> None:
        self.seed = random.SystemRandom().randrange(1 << 32)
        self.chance = random.Random(self.seed)
        self.secret = "zq" + "".join(self.chance.choices("bcdfghjklmnpqrstvwxz", k=8))

    def __call__(self, text: str) -> str:
        form = self.chance.choice(FORMS).replace("{m}", self.chance.choice((self.secret, self.secret.upper())))
        return self.chance.choice((form, form, f"{text} {form}", f"{form} {text}"))

    def check(self, files: Files, part: list[Spot]) -> bool:
        """Plant it at these places; whether a report came of it, which must not show it."""
        files.restore()
        plant_all(files, part, self)
        try:
            report = redact(files.gather())
        except BitwitnessError:
            return False
        for name, said in outputs(report).items():
            found = re.search(rf".{{0,80}}{self.secret}.{{0,40}}", said, re.IGNORECASE)
            assert found is None, f"seed {self.seed}: {name} says {found[0]!r}, of one of {part}"
        page = report.page
        return bool(
            page.proposals and page.observations and {one.source for one in page.history} >= {"fleet", "incident"}
        )


@pytest.mark.parametrize("nodes", [3, 2], ids=["attributed", "unattributed"])
def test_nothing_that_is_planted_anywhere_comes_through(tmp_path: Path, nodes: int) -> None:
    """A secret in every text and every mapping of all files, in many forms at once."""
    files, plant = made(tmp_path, nodes), Planter()
    every = [(name, path) for name, path in spots(files) if path not in NEEDED and name not in OF_STATE]
    assert len(every) > 100
    for share in (1.0, 0.6, 0.6):  # what is planted can keep something else from being shown
        part = [one for one in every if plant.chance.random() < share]
        assert plant.check(files, part), f"seed {plant.seed}: nothing was read, so nothing was tried"


@exhaustive
@pytest.mark.parametrize("nodes", [3, 2], ids=["attributed", "unattributed"])
def test_nor_does_what_keeps_other_things_from_being_read(tmp_path: Path, nodes: int) -> None:
    """Any places together; where nothing is read of them, fewer of them."""
    files, plant = made(tmp_path, nodes), Planter()
    every = spots(files)
    plant.chance.shuffle(every)
    waiting = [every[at::12] for at in range(12)]
    while waiting:
        part = waiting.pop()
        if not plant.check(files, part) and len(part) > 1:
            waiting += [part[::2], part[1::2]]


# What is kept ---------------------------------------------------------------------------------------------------------


def test_a_report_without_names_still_serves(tmp_path: Path) -> None:
    files = made(tmp_path, 3)
    plain = files.gather()
    assert plain.decided.outcome == "same"
    report = redact(plain)
    device = UUID.format(rank=1)
    assert (standing(report).kind, standing(report).title) == (
        "replacement",
        f"Silent data corruption on device {device}",
    )
    one, (named,) = report.page.incident, report.devices
    assert (named.device, named.serial, named.node, named.software) == (device, "1650921", "NODE-1", "torch")
    assert one.headline == "step 12: persistent compute corruption on rank 1 (node NODE-1)"
    assert one.reason.startswith(
        f"rank 1 on node NODE-1 (device {device}) alone differs in the result of micro-batch 0"
    )
    assert (one.status, one.kind, one.persistence) == ("attributed", "compute", "persistent")
    (proposal,) = report.page.proposals
    assert proposal.signals == (f"xid:48 on {device} at 2026-11-29T12:00:00+00:00 (kernel, strong)",)
    assert (proposal.node, proposal.status) == ("NODE-1", plain.page.proposals[0].status)
    deeds = [(row.who, row.what, row.node, row.text) for row in report.page.history]
    assert ("PERSON-1", "judged", "", "confirmed: [left out]") in deeds
    assert ("PERSON-2", "[left out]", "", "[left out]") in deeds
    for row in report.page.observations:
        assert row.value in (samples.GOOD, samples.BAD) or row.error == "OutOfMemoryError: [left out]"
    for said in outputs(report).values():
        assert "head.weight" in said
        for name in (*NODES, "n0", "alice", "bob", "dave", "login7", "4711", str(tmp_path)):
            assert not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", said), name
    assert report.redacted is not None
    assert report.redacted["node"] == 3
    again = [name for name in report.decided.code.split() if "RUN_DIR" in name]
    assert again, "the command names no path of ours"


@pytest.mark.parametrize("without", [False, True], ids=["inside", "outside"])
def test_an_unattributed_report_identifies_no_node_and_no_device(tmp_path: Path, without: bool) -> None:
    report = made(tmp_path, 2).gather()
    report = redact(report) if without else report
    assert report.page.incident.status == "unattributed"
    for name, said in outputs(report).items():
        assert not re.search(r"n0\.acme|GPU-|(?<!\w)n[01](?!\w)", said), name
        assert ("alice@login7" in said) != without, "who acted is told inside"
    for said in (html(report), markdown(report)):
        text = " ".join(re.sub(r"<[^>]+>|[*|`\\]", " ", said).split())
        assert "This is the report of an unattributed incident" in text
        assert not re.search(r"\branks? \d", text.partition("What would settle it")[2].partition("To check")[0]), (
            "counted, not named"
        )
        assert "NODE-" not in text
        assert not re.search(
            r"differs|agrees|rarer value|majority", text.partition("Evidence")[2].partition("To check")[0]
        )
        assert re.search(r"A b{24} 1 1|A a{24} \d \d", text), "letters, digests, ranks, nodes"


def test_an_unattributed_report_whose_verdict_is_another_one_points_at_nobody_either(tmp_path: Path) -> None:
    """Decided again, it names a rank: that says something of the file, and must not be read as a verdict."""
    files = made(tmp_path, 3)
    (folder,) = files.run.incidents()
    record = json.loads((folder / "incident.json").read_text())
    nobody = {"status": "unattributed", "ranks": [], "nodes": [], "devices": [], "candidates": [1], "persistences": []}
    record["verdict"] |= nobody | {"persistence": "unknown"}
    (folder / "incident.json").write_text(json.dumps(record))
    report = files.gather()
    assert (standing(report).kind, report.decided.outcome) == ("nobody", "different")
    assert "status; ranks; nodes; devices; candidates" in report.decided.text


def test_one_node_by_two_names_is_one_node(tmp_path: Path) -> None:
    """A cluster may call it by its short name, and a guard by the long one, or the other way round."""
    files = made(tmp_path, 3)
    run = files.run
    (folder,) = run.incidents()
    for name in ("n0", "n1.acme.example", "ip-10-0-3-7", "ip-10-0-3-8"):
        run.note_action(folder.name, "restarted", node=name, supervision="s")
    report = redact(files.gather())
    assert [row.node for row in report.page.history if row.what == "restarted"][-4:] == [
        "NODE-1",
        "NODE-2",
        "NODE-3",
        "NODE-4",
    ]


def test_the_printed_record_says_no_path(tmp_path: Path) -> None:
    files = made(tmp_path, 3)
    page = tmp_path / "for-vendor.html"
    words = ["report", str(files.run.path), "--fleet", str(files.state), "--redact", "--json", "--html", str(page)]
    done = CliRunner(env={"TERM": "dumb"}).invoke(cli, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["standing"] == "replacement"
    assert str(tmp_path) not in done.stdout
    assert str(tmp_path) not in page.read_text()


# Closed forms ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA GB200", "AMD Instinct MI300X", "AMD EPYC (AVX512)", "Tesla V100-SXM2-32GB",
        "Intel(R) Xeon(R) Platinum 8480+ (AVX512)", "AMD EPYC 7742 64-Core Processor (AVX2)", "NVIDIA GeForce RTX 4090", "NVIDIA L40S", "device", "",
    ],
)  # fmt: skip
def test_models_of_devices_are_kept(text: str) -> None:
    assert forms.model(text) == text


@pytest.mark.parametrize(
    "text", ["H100 of gpu-2.acmecorp.internal", "NVIDIA alice", "alice", "NVIDIA H100 /home/x", "gpu-2"]
)
def test_what_is_no_model_is_left_out(text: str) -> None:
    assert forms.model(text) == forms.LEFT_OUT


def test_software_is_kept_in_parts() -> None:
    text = "torch 2.13.0+cpu, float32 matmul precision highest, threads 1, oneDNN True"
    gpu = "torch 2.9.0a0+git1a2b3c4, float32 matmul precision high, cuDNN (True, False, False), attention kernels (True, True, True, True), CUDA 12.8, cuDNN 91002, driver 570.86.15"  # fmt: skip
    assert (forms.software(text), forms.software(gpu), forms.software("")) == (text, gpu, "")
    assert forms.software("torch 2.13 built by alice@acme.com, threads 1") == "[left out], threads 1"
    assert forms.software("torch 2.13.0+alice") == "[left out]"


def test_names_of_tensors_are_told_from_hosts() -> None:
    assert all(map(forms.tensor, ("head.weight", "blocks.0.attention.qkv.bias", "layers.3.exp_avg_sq", "norm.running_mean", "weight_ih_l0")))  # fmt: skip
    assert not any(
        map(forms.tensor, ("login7.acmecorp.internal", "/home/a/weight", "gpu-2.weight", "alice", "a b.weight", ""))
    )


def test_a_signal_is_told_by_its_number() -> None:
    told = "xid:48 on GPU-1 at 2026-11-29T12:00:00Z, 3 times (kernel, strong): GPU 1 of gpu-2 said so"
    assert forms.signal(told) == ("xid:48", "GPU-1", " at 2026-11-29T12:00:00Z, 3 times", " (kernel, strong)")
    assert forms.signal("dcgm:alice on x (dcgm, weak): y")[0] == "dcgm"
    assert forms.signal("alice:1 (dcgm, weak): y")[0] == "something"
    for text in ("xid:48 (alice, strong): x", "xid:48 (kernel, alice): x", "alice", ""):
        assert forms.signal(text) == ("", "", "", "")


def test_other_closed_forms() -> None:
    assert [forms.formed(text, forms.SERIAL) for text in ("1650921012345", "692231000131", "rack7.x", "ALICE")] == [
        "1650921012345", "692231000131", forms.LEFT_OUT, forms.LEFT_OUT,
    ]  # fmt: skip
    assert forms.error("torch.OutOfMemoryError: on n1") == "OutOfMemoryError: [left out]"
    assert (forms.error("alice: x"), forms.error("")) == (forms.LEFT_OUT, "")
    assert [forms.standing(text) for text in ("drain: waits for approval", "quarantined", "drain: alice", "")] == [
        True,
        True,
        False,
        True,
    ]
