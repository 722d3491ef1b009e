"""The report of an incident: what the console says, no stronger than its evidence, and nothing in it but text."""

from __future__ import annotations

import base64
import hashlib
import html as entities
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from markdown_it import MarkdownIt

from bitwitness.cli.main import cli
from bitwitness.evidence import History, Observation
from bitwitness.examples.plan import Settings
from bitwitness.fleet.signals.gather import IDENTITY
from bitwitness.fleet.signals.record import Signal
from bitwitness.runfiles import RunFiles
from bitwitness.topology import Topology
from bitwitness.web.report import gather
from bitwitness.web.report_records import Report
from bitwitness.web.report_redacting import redact
from bitwitness.web.report_rendering import escaped, html, markdown
from bitwitness.web.report_words import standing
from tests.cli import samples
from tests.fleet.rehearsal import Rehearsal

HOSTILE = (
    "<script>alert(1)</script>",
    "a|b|c",
    "`x` ``y``",
    "[click](http://evil.example/x)",
    "![i](http://evil.example/i.png)",
    "@everyone",
    "www.evil.example",
    "http://evil.example/",
    "-->",
    "# top #12",
    "&lt;b&gt; &amp;",
    "$x$ :smile: ~~no~~ *a* _b_",
    "1. one",
    "ops!7 GH-12",
    "\\",
    "'\"><img src=x onerror=alert(1)>",
)
UUID = "GPU-5a8e0b6c-{rank:04d}-4d7e-9f31-0c2b7a91d3{rank:02d}"


def run_with(
    folder: Path,
    repeats: str = samples.BAD,
    nodes: int = 3,
    where: Topology | None = None,
    notes: Sequence[str] = (),
    job: str = "",
) -> RunFiles:
    """A run in which rank 1 was wrong."""
    where = where or samples.topology(nodes, UUID)
    seen = samples.replays(where, 1, repeats)
    samples.write(folder, seen, where, saved=(1,), notes=list(notes), scheduler_job=job)
    return RunFiles(folder)


def resume(run: RunFiles, step: int) -> None:
    """The job goes on from a checkpoint."""
    journal = run.journal(0)
    journal.append("resume", {"step": step, "checkpoint": f"checkpoints/step-{step:08d}", "refused": []})
    journal.close()


def rewrite(run: RunFiles, **changes: object) -> None:
    """Somebody edits its only incident; what is None goes."""
    file = run.incidents()[0] / "incident.json"
    record = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in record.items() if value is not None}))


def command(*words: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, ["report", *(str(one) for one in words)])


def said_by(code: str) -> subprocess.CompletedProcess[str]:
    """What the command of a report prints."""
    return subprocess.run(
        shlex.split(code.replace("python", sys.executable, 1)),
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def flat(text: str) -> str:
    """A page as a reader sees it."""
    return " ".join(entities.unescape(re.sub(r"<[^>]+>", " ", text.partition("<body")[2])).split())


# What it is good for --------------------------------------------------------------------------------------------------


def test_a_device_that_is_wrong_again_and_again(tmp_path: Path) -> None:
    report = gather(run_with(tmp_path / "run"))
    assert standing(report).kind == "replacement"
    device = UUID.format(rank=1)
    assert [(one.device, one.rank, one.node, one.model) for one in report.devices] == [(device, 1, "node-0", "device")]
    page, text = flat(html(report)), markdown(report)
    for said in (page, text):
        assert device in said
        assert "not on record: no signal has told it" in said
        assert "Not collected" in said
        assert "no sign of health" in said
        assert samples.BAD in said
        assert "What this does not prove" in said
    assert "<svg" in html(report)
    assert "two are needed to name a rank" in page


def test_the_digests_are_those_of_the_files(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    (folder,) = run.incidents()
    (folder / "link").symlink_to("/etc/passwd")
    report = gather(run)
    assert [one.name for one in report.files] == ["incident.json", "micro-batches-rank-00001.pt"]
    for one in report.files:
        content = (folder / one.name).read_bytes()
        assert (one.bytes, one.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert one.sha256 in html(report)
        assert one.sha256 in markdown(report)


def test_a_transient_is_no_ground_for_a_replacement(tmp_path: Path) -> None:
    report = gather(run_with(tmp_path / "run", repeats=samples.GOOD))
    assert standing(report).kind == "suspicion"
    assert "no ground for a replacement" in flat(html(report))


def test_an_unattributed_incident_names_nobody(tmp_path: Path) -> None:
    report = gather(run_with(tmp_path / "run", nodes=2))
    assert report.page.incident.status == "unattributed"
    assert standing(report).kind == "nobody"
    assert report.devices == ()
    for said in (flat(html(report)), markdown(report)):
        assert "is no request for a replacement (RMA)" in said
        assert "What would settle it" in said
        assert "Run on at least three nodes" in said
        assert not re.search(r"GPU-5a8e", said), "no device is identified"
        assert "Strikes" not in said
        assert "differs;" not in said
    assert 'class="differs"' not in html(report)
    assert "rank-named" not in html(report).partition("</style>")[2]


def test_a_drill_is_none_of_it(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    run.note_action(run.incidents()[0].name, "judged", judgement="drill", who="ada@ops", why="it was me")
    report = gather(run)
    assert standing(report).kind == "drill"
    assert "it says nothing about any device" in flat(html(report))


def test_from_which_checkpoint_the_job_went_on(tmp_path: Path) -> None:
    """A safe checkpoint of then may be gone now: where the journal tells from which one the job went on, that one is said."""
    run = run_with(tmp_path / "run")
    before = gather(run)
    assert (before.page.resumed, before.page.checkpoint) == (-1, -1)
    assert "No checkpoint that is still kept is known to be safe" in markdown(before)
    resume(run, 10)
    after = gather(run)
    assert after.page.resumed == 10
    for said in (flat(html(after)), markdown(after)):
        assert "The job went on from the checkpoint of step 10, as its journal says" in said
    resume(run, 500)  # forward: it went on for another reason
    assert gather(run).page.resumed == 10
    later = run_with(tmp_path / "later")
    resume(later, 500)
    assert gather(later).page.resumed == -1, "it did not go back"


@pytest.mark.parametrize(("fault", "kind"), [("matmul", "drill"), ("none", "replacement")])
def test_the_fault_of_a_demo_is_a_drill(tmp_path: Path, fault: str, kind: str) -> None:
    run = run_with(tmp_path / "guarded")
    Settings(fault, False, 0, 24, 4, 2).write(tmp_path)  # type: ignore[arg-type]  # a text is one of these
    report = gather(run)
    assert standing(report).kind == kind
    for said in (flat(html(report)), markdown(report)):
        assert ("its fault is the demo's own" in said.replace("\\", "")) == (kind == "drill")
        assert ("has no record of a fault" in said) == (kind != "drill")


# The verdict, again ---------------------------------------------------------------------------------------------------


def test_the_verdict_is_decided_again(tmp_path: Path) -> None:
    report = gather(run_with(tmp_path / "run"))
    assert report.decided.outcome == "same"
    done = said_by(report.decided.code)
    assert done.stdout.startswith("True step 12: persistent compute corruption"), done.stderr


@pytest.mark.parametrize("before", [samples.KNOWN, History()], ids=["known", "first"])
def test_what_was_known_before_is_assumed_where_it_is_not_on_record(tmp_path: Path, before: History) -> None:
    where = samples.topology(3, UUID)
    samples.write(tmp_path / "run", samples.replicas(where, 1), where, history=before)
    run = RunFiles(tmp_path / "run")
    rewrite(run, history=None)
    decided = gather(run).decided
    assert decided.outcome == "same, assumed"
    assert "it was assumed that" in decided.text
    assert ("had compared nothing before" in decided.text) == (not before.compared_before)


def test_a_verdict_that_does_not_follow_is_no_request(tmp_path: Path) -> None:
    """Somebody has changed who is named."""
    run = run_with(tmp_path / "run")
    verdict = json.loads((run.incidents()[0] / "incident.json").read_text())["verdict"]
    rewrite(run, verdict=verdict | {"ranks": [3], "nodes": ["node-1"], "devices": [UUID.format(rank=3)]})
    report = gather(run)
    assert report.decided.outcome == "different"
    assert standing(report).kind == "unconfirmed"
    assert "ranks (on record 3, now 1); nodes; devices." in report.decided.text


def test_which_fields_differ_is_said(tmp_path: Path) -> None:
    """The headline alone would be the same on both sides."""
    run = run_with(tmp_path / "run")
    verdict = json.loads((run.incidents()[0] / "incident.json").read_text())["verdict"]
    rewrite(run, verdict=verdict | {"persistences": ["transient"]})
    assert "persistences (on record transient, now persistent)." in gather(run).decided.text
    rewrite(run, verdict=verdict | {"reason": "because"})
    decided = gather(run).decided
    assert (decided.outcome, [one.field for one in decided.differing]) == ("different", ["reason"])
    assert "Only its words differ" in decided.text


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "assumed"])
def test_the_command_that_decides_again_works_where_the_verdict_is_another_one(tmp_path: Path, recorded: bool) -> None:
    run = run_with(tmp_path / "run")
    verdict = json.loads((run.incidents()[0] / "incident.json").read_text())["verdict"]
    rewrite(run, verdict=verdict | {"persistence": "unknown"}, **({} if recorded else {"history": None}))
    decided = gather(run).decided
    assert (decided.outcome, decided.assumed) == ("different", not recorded)
    done = said_by(decided.code)
    assert done.stdout.startswith("False step 12: persistent compute corruption"), done.stderr
    assert "persistence: unknown on record, persistent now" in done.stdout


@pytest.mark.parametrize(
    "history",
    [
        {},
        {"last_passed": {"replay": "x"}},
        7,
        samples.KNOWN.to_json() | {"compared_before": "replay"},
        samples.KNOWN.to_json() | {"reductions_agreed": "yes"},
        samples.KNOWN.to_json() | {"last_passed": {"replay": "9"}},
    ],
    ids=["empty", "half", "number", "checks", "flag", "step"],
)
def test_a_damaged_history_is_no_missing_one(tmp_path: Path, history: object) -> None:
    run = run_with(tmp_path / "run")
    rewrite(run, history=history)
    report = gather(run)
    assert (report.decided.outcome, report.decided.code) == ("impossible", "")
    assert standing(report).kind == "unconfirmed"
    for said in (flat(html(report)), markdown(report)):
        assert "what was known before is on record, but damaged" in said


# The fleet ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    """A controller that has heard of the device, and acted."""
    play = Rehearsal(tmp_path_factory.mktemp("fleet"))
    told = [
        Signal("nvml", IDENTITY, "GPU-n1-0", None, "noise", "none", "x", host="n1", evidence="serial=1650921"),
        Signal(
            "kernel", "xid:48", "GPU-n1-0", "2026-11-29T11:59:00Z", "memory", "strong", "double-bit error", host="n1"
        ),
    ]
    play.signals = told
    play.incident()
    play.rounds(2)
    yield play
    play.end()


def test_the_fleet_says_what_it_heard_and_did(fleet: Rehearsal) -> None:
    report = gather(RunFiles(fleet.run_dir), fleet=fleet.folder / "state")
    assert [one.serial for one in report.devices] == ["1650921"]
    for said in (flat(html(report)), markdown(report)):
        assert "1650921" in said
        assert "Not collected" not in said
        assert "double-bit error" in said
        assert "Nobody has looked at signals" not in said
        assert "drain" in said


def test_without_the_fleet_nothing_was_collected(fleet: Rehearsal, tmp_path: Path) -> None:
    assert "Not collected" in markdown(gather(RunFiles(fleet.run_dir)))
    other = run_with(tmp_path / "run")
    assert "knows nothing of this incident" in markdown(gather(other, fleet=fleet.folder / "state"))
    done = command(other.path, "--fleet", tmp_path)
    assert done.exit_code == 2
    assert "no state of a controller" in done.output


# Nothing but text -----------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def hostile(folder: Path, nodes: int = 3) -> Report:
    """Everything that can have a name has a hostile one."""
    text = " ".join(HOSTILE)
    names = [f"{number} {text}" for number in range(nodes)]
    where = samples.topology(nodes, "GPU-{rank} " + text.replace("{", "").replace("}", ""), names)
    seen: list[Observation] = [
        replace(one, detail={"loss_differs": True, "gradients_differing": 3, "differs": list(HOSTILE)}, error="")
        if one.rank == 1
        else one
        for one in samples.replays(where, 1, samples.BAD)
    ]
    notes = [*HOSTILE]
    samples.write(folder, seen, where, notes=notes, scheduler_job=text, saved=(1,))
    run = RunFiles(folder)
    run.note_action(run.incidents()[0].name, "restarted", reason=text, node=names[0], who=text)
    return gather(run)


@pytest.mark.parametrize("nodes", [3, 2])
def test_a_page_has_nothing_in_it_but_text(tmp_path: Path, nodes: int) -> None:
    page = html(hostile(tmp_path / "run", nodes))
    tags = Tags(page)
    assert not tags.seen & {"script", "a", "img", "link", "iframe", "object", "form", "base", "image", "foreignobject"}
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name in ("style", "src", "href")]
    said = next(value for _, value in tags.attributes if "default-src" in value)
    policy = dict(part.strip().split(" ", 1) for part in said.split(";"))
    assert policy["default-src"] == "'none'"
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy["style-src"] == f"'sha256-{digest}'"
    assert "url(" not in style
    assert "@import" not in style
    assert "<script>alert(1)</script>" in flat(page), "it is still there, as text"


@pytest.mark.parametrize("nodes", [3, 2])
def test_markdown_has_nothing_in_it_but_text(tmp_path: Path, nodes: int) -> None:
    text = markdown(hostile(tmp_path / "run", nodes))
    parser = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])
    tags = Tags(parser.render(text))
    allowed = {"h1", "h2", "h3", "p", "ol", "ul", "li", "table", "thead", "tbody", "tr", "th", "td", "code", "strong"}
    assert tags.seen <= allowed | {"blockquote", "hr"}
    for token in parser.parse(text):
        for child in token.children or ():
            if child.type == "text":  # what trackers look at once more, when Markdown is done with it
                assert not re.search(r"@\w|\w@|https?://|www\.|#\d|!\d|\$|:smile:|GH-\d", child.content), child.content
    rows = [len(re.findall(r"(?<!\\)\|", line)) for line in text.splitlines() if line.startswith("| ")]
    assert set(rows) <= {3, 4, 5, 6, 7}, "no name has made a cell of its own"


@pytest.mark.parametrize("text", HOSTILE)
def test_escaped_text_reads_as_it_was(text: str) -> None:
    shown = Tags  # for its parser only
    rendered = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).renderInline(escaped(text))
    assert entities.unescape(re.sub(r"</?code>", "", rendered)) == text
    assert shown(rendered).seen <= {"code"}


# Without names --------------------------------------------------------------------------------------------------------


def test_a_redacted_report_has_no_names(tmp_path: Path) -> None:
    where = samples.topology(3, UUID, names=["ip-10-0-3-7.ec2.internal", "alpha", "rack-b-12"])
    folder = tmp_path / "secret-project" / "run-of-ada"
    note = "rank 1 could not save: /home/ada/data on Alpha and 10.0.3.7, tell ada@corp.example"
    run = run_with(folder, where=where, notes=[note], job="slurm:secret-job")
    name = run.incidents()[0].name
    run.note_action(name, "judged", judgement="confirmed", who="ada@login-3", why="Ada swapped it on rack-b-12")
    run.note_action(name, "restarted", reason="without alpha", nodes=["rack-b-12"])
    plain = gather(run)
    assert "ada@login-3" in markdown(plain).replace("`", "")
    report = redact(plain)
    for said in (html(report), markdown(report), json.dumps(report.to_json())):
        for secret in ("ip-10-0-3-7", "ec2.internal", "alpha", "Alpha", "rack-b-12", "secret", "/home", "10.0.3.7"):
            assert secret not in said, secret
        assert not re.search(r"\bada\b", said, re.IGNORECASE)
        assert str(tmp_path) not in said
        assert "login-3" not in said
        assert UUID.format(rank=1) in said, "there would be nothing to return"
    assert report.page.incident.status == "attributed"
    assert report.devices[0].node == report.page.incident.nodes[0]
    assert len({place.node for place in report.page.placement}) == 3, "different nodes stay different"
    assert report.decided.outcome == "same"
    assert standing(report).kind == "replacement"


def test_a_node_with_the_name_of_a_word_changes_nothing(tmp_path: Path) -> None:
    where = samples.topology(3, UUID, names=["attributed", "compute", "witness"])
    report = redact(gather(run_with(tmp_path / "run", where=where)))
    assert (report.page.incident.status, report.page.incident.kind) == ("attributed", "compute")
    assert {one.place for one in report.page.observations} == {"original", "witness"}
    assert "<svg" in html(report)


# The command ----------------------------------------------------------------------------------------------------------


def test_it_writes_prints_and_says_which(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    older = run.incidents()[0]
    newer = older.rename(older.with_name("20200101T000000Z-000000"))
    record = json.loads((newer / "incident.json").read_text())
    (newer / "incident.json").write_text(json.dumps(record | {"id": newer.name}))
    samples.write(run.path, samples.replays(samples.topology(2), 1, samples.BAD), samples.topology(2))
    newest = run.incidents()[-1].name
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    done = command(run.path, "--html", page, "--markdown", text)
    assert done.exit_code == 0, done.output
    assert f"Incident {newest}: the newest of 2" in done.stderr
    assert newest in page.read_text()
    done = command(run.path, "--incident", newer.name, "--markdown", "-")
    assert done.stdout.startswith("# Silent data corruption on device GPU-")
    done = command(run.path, "--json", "--html", page)  # its own may be overwritten
    said = json.loads(done.stdout)
    assert (said["standing"], said["page"]["incident"]["id"]) == ("nobody", newest)
    assert said["written"] == [str(page)]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_report_that_is_overwritten_is_whole_whenever_its_writer_dies(tmp_path: Path) -> None:
    """The one before or the one after: a real writer, killed after a random time."""
    report = gather(run_with(tmp_path / "run"))
    both = [html(report).encode(), html(redact(report)).encode()]
    for number, content in enumerate(both):
        (tmp_path / f"{number}.html").write_bytes(content)
    (tmp_path / "r.html").write_bytes(both[0])
    script = (
        "import sys; from pathlib import Path; from bitwitness.runfiles import write_bytes; folder = Path(sys.argv[1]); "
        "both = [(folder / f'{n}.html').read_bytes() for n in (0, 1)]; print('ready', flush=True)\n"
        "while True:\n for one in both: write_bytes(folder / 'r.html', one)"
    )
    seed = random.SystemRandom().randrange(1 << 32)
    chance = random.Random(seed)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for _ in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            time.sleep(chance.uniform(0.01, 0.1))
            writer.kill()
        assert (tmp_path / "r.html").read_bytes() in both, f"seed {seed}"


def test_what_it_refuses(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run")
    mine = tmp_path / "thesis.md"
    mine.write_text("years of work")
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "link").symlink_to(mine)
    for words, said in [
        ((run.path, "--markdown", mine), "is no report"),
        ((run.path, "--markdown", tmp_path / "link", "--force"), "no regular file"),
        ((run.path, "--html", folder), "no regular file"),
        ((run.path, "--html", tmp_path / "absent" / "r.html"), "is no directory"),
        ((run.path, "--html", mine, "--markdown", mine, "--force"), "the same file"),
        ((run.path, "--incident", "20200101T000000Z-000000"), "has no incident"),
        ((run.path, "--incident", "../../etc"), "has no incident"),
        ((run.path, "--json", "--markdown", "-"), "both print"),
        ((tmp_path,), "no run.json"),
    ]:
        done = command(*words)
        assert (done.exit_code, mine.read_text()) == (2, "years of work"), words
        assert said in " ".join(done.output.split()), words
    empty = RunFiles(tmp_path / "empty").create()
    empty.write_run({"world_size": 1})
    done = command(empty.path)
    assert done.exit_code == 2
    assert "nothing was found in this run" in done.output
    assert command(run.path, "--markdown", mine, "--force").exit_code == 0
    assert "Silent data corruption" in mine.read_text()
