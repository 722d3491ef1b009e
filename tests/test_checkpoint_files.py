"""Checkpoints as files: whole with a label or not to be seen, refused by name when damaged, thinned out but never lost.

No torch: what is in a file is bytes here.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bitwitness.errors import CheckpointError, RunFilesError
from bitwitness.evidence import Verdict
from bitwitness.runfiles import (
    Checkpoints,
    FileDigest,
    Incident,
    Label,
    RunFiles,
    checkpoint_name,
    checkpoint_step,
    digest_file,
    digest_files,
    distrust,
    label_path,
    labelled,
    new_incident_id,
    read_label,
    retained,
    verify_files,
    write_label,
)
from bitwitness.runfiles.label import _checksum
from bitwitness.topology import Topology

TOKEN = "0123abcd"
CONTENT = {"shared.pt": bytes(range(256)) * 40, "rank-00000.pt": b"a" * 100, "rank-00001.pt": b"b" * 100}


def label_of(path: Path, step: int, **changes: Any) -> Label:
    given: dict[str, Any] = {
        "step": step,
        "saved": "2026-11-29T15:38:21.000Z",
        "world_size": 2,
        "placement": ({"rank": 0, "node": "a", "device": "d", "slot": 0},),
        "passed": {"replay": step - 1, "replicas": step - 1},
        "failed": {},
        "incidents": (),
        "seed": 2**63 - 25,
        "tensors": {"model/w": "float32 [2, 3] 01 02 03"},
        "files": digest_files(path),
        "software": {"bitwitness": "0.1.0"},
        "read_back": "by rank 1 on node b",
    }
    return Label(**{**given, **changes})


def save(store: Checkpoints, step: int, content: dict[str, bytes] | None = None, **changes: Any) -> Path:
    staging = store.stage(step, TOKEN)
    for name, held in (content or CONTENT).items():
        (staging / name).write_bytes(held)
    return store.publish(staging, label_of(staging, step, **changes))


def names(store: Checkpoints) -> list[str]:
    return [path.name for path in store.list()]


def hidden(store: Checkpoints) -> list[str]:
    return sorted(path.name for path in store.path.iterdir() if path.name.startswith("."))


def incident(window: tuple[int, int], name: str = "") -> Incident:
    verdict = Verdict("unattributed", window[1], kind="compute", window=window, check="replay")
    return Incident(Path("/run/incidents") / (name or new_incident_id()), verdict, (), Topology(()), {})


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return RunFiles(tmp_path).create().checkpoints


# Publishing ----------------------------------------------------------------------------------------------------------


def test_a_published_checkpoint_can_be_read_and_is_whole(store: Checkpoints) -> None:
    assert store.list() == []
    path = save(store, 100)
    assert path == store.path / "step-00000100"
    label = read_label(path)
    assert label == label_of(path, 100)
    assert label.files["shared.pt"].bytes == 10240
    assert verify_files(path, label) == []
    assert names(store) == ["step-00000100"]
    assert hidden(store) == []


def test_ranks_with_the_same_token_share_one_folder(store: Checkpoints) -> None:
    assert store.stage(100, TOKEN) == store.stage(100, TOKEN) != store.stage(100, "ffffffff")
    with pytest.raises(ValueError, match="8 hexadecimal digits"):
        store.stage(100, "../../etc")
    assert names(store) == [], "what is staged is not to be seen"


def test_names_sort_by_step_and_what_is_no_checkpoint_is_none(store: Checkpoints) -> None:
    for step in (5, 123_456_789, 40):
        save(store, step)
    for stranger in ("step-7", "step-0000000007", "step-00000007.bak", "step-abcdefgh", "latest"):
        (store.path / stranger).mkdir()
    (store.path / "step-00000099").write_text("a file")
    assert names(store) == ["step-123456789", "step-00000040", "step-00000005"]
    assert [checkpoint_step(path) for path in store.list()] == [123_456_789, 40, 5]
    with pytest.raises(ValueError, match="from 0 on"):
        checkpoint_name(-1)


def test_what_had_the_name_makes_way(store: Checkpoints) -> None:
    save(store, 100, {"shared.pt": b"old", "rank-00007.pt": b"old"})
    path = save(store, 100)
    assert sorted(one.name for one in path.iterdir()) == ["label.json", *sorted(CONTENT)]
    assert hidden(store) == []


def test_what_made_way_for_nothing_gets_its_name_back(store: Checkpoints) -> None:
    """A writer that was killed between two renames."""
    path = save(store, 100)
    label = read_label(path)
    path.rename(store.path / ".replaced-step-00000100-0123abcd")
    assert names(store) == []
    store.discard_leftovers()
    assert read_label(path) == label
    save(store, 200, {"shared.pt": b"old"}).rename(store.path / ".replaced-step-00000100-0123abcd")
    store.discard_leftovers()
    assert read_label(path) == label, "it did come"
    assert (names(store), hidden(store)) == (["step-00000100"], [])


@pytest.mark.parametrize("damage", ["missing", "short", "no files", "another step"])
def test_a_half_checkpoint_is_not_published(store: Checkpoints, damage: str) -> None:
    staging = store.stage(100, TOKEN)
    (staging / "shared.pt").write_bytes(b"whole")
    label = label_of(staging, 100)
    if damage == "missing":
        (staging / "shared.pt").unlink()
    elif damage == "short":
        (staging / "shared.pt").write_bytes(b"who")
    elif damage == "no files":
        label = replace(label, files={})
    else:
        label = replace(label, step=200)
    with pytest.raises(CheckpointError, match=r"No such file|3 bytes instead of 5|lists no files|step of 200|step 200"):
        store.publish(staging, label)
    assert names(store) == []
    store.discard(staging)
    assert hidden(store) == []


def refusing(monkeypatch: pytest.MonkeyPatch, name: str, refused: int = -1) -> None:
    """A disk that refuses one call of this name, counted from 0, or all of them."""
    real: Callable[..., Any] = getattr(os, name)
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if refused in (-1, calls - 1):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize(("name", "calls", "least"), [("fsync", 8, 4), ("rename", 2, 2), ("replace", 1, 1)])
def test_a_disk_that_refuses_leaves_the_old_checkpoint(store: Checkpoints, name: str, calls: int, least: int) -> None:
    """At each call in turn. A file system may refuse to flush a folder: then it does so by itself."""
    refused = 0
    for call in range(calls):
        path = save(store, 100)
        kept = read_label(path)
        staging = store.stage(100, TOKEN)
        for part in ("shared.pt", "more.pt"):
            (staging / part).write_bytes(b"new")
        label = label_of(staging, 100)
        with pytest.MonkeyPatch.context() as patch:
            refusing(patch, name, call)
            try:
                store.publish(staging, label)
            except CheckpointError as error:
                assert "No space left on device" in str(error)  # noqa: PT017
                refused += 1
                label = kept
        store.discard(staging)
        assert names(store) == ["step-00000100"]
        assert read_label(path) == label
        assert verify_files(path, label) == []
    assert refused >= least
    store.discard_leftovers()
    assert hidden(store) == []


KILLED = """
import sys
from pathlib import Path
from bitwitness.runfiles import Label, RunFiles, digest_files
store = RunFiles(sys.argv[1]).create().checkpoints
store.discard_leftovers()
print("ready", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    staging = store.stage(100 * (number % 5), f"{number:08x}")
    for rank in range(3):
        (staging / f"rank-{rank:05d}.pt").write_bytes(bytes([number % 256]) * 100_000)
    store.publish(staging, Label(100 * (number % 5), "", 1, (), {}, {}, (), number, {}, digest_files(staging), {}, ""))
    if number % 3 == 0:
        store.remove(store.list()[0])
"""


def test_a_kill_at_any_instant_leaves_checkpoints_whole_or_out_of_sight(store: Checkpoints, seed: int) -> None:
    draw, number, seen, half = random.Random(seed), 0, 0, 0
    for _ in range(12):
        command = [sys.executable, "-c", KILLED, str(store.path.parent), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            assert writer.stderr is not None
            try:
                assert select.select([writer.stdout], [], [], 60)[0], "the writer did not start"
                ready = writer.stdout.readline()
                select.select([writer.stderr], [], [], draw.uniform(0, 0.08))
            finally:
                writer.kill()
            assert (ready, writer.wait()) == ("ready\n", -signal.SIGKILL), writer.stderr.read()
        for path in store.list():
            label = read_label(path)
            assert verify_files(path, label) == []
            assert checkpoint_name(label.step) == path.name
            number = max(number, label.seed)
            seen += 1
        half += len(hidden(store))
    assert seen, "nothing was ever published: the delays prove nothing"
    assert half, "no kill came while a checkpoint was half: the delays prove nothing"
    store.discard_leftovers()
    assert hidden(store) == []


# What is wrong with the files ----------------------------------------------------------------------------------------


def test_every_flipped_bit_of_a_small_file_is_found(store: Checkpoints) -> None:
    path = save(store, 100, {"shared.pt": b"\x00\xff\x10"})
    label = read_label(path)
    for bit in range(24):
        content = bytearray(b"\x00\xff\x10")
        content[bit // 8] ^= 1 << bit % 8
        (path / "shared.pt").write_bytes(content)
        (problem,) = verify_files(path, label)
        assert problem.startswith("shared.pt differs: its SHA-256 is ")


def test_damage_is_named(store: Checkpoints) -> None:
    path = save(store, 100)
    label = read_label(path)
    (path / "shared.pt").write_bytes(CONTENT["shared.pt"][:-1])
    (path / "rank-00000.pt").unlink()
    (path / "rank-00001.pt").write_bytes(b"b" * 101)
    (path / "notes.txt").write_text("mine")
    problems = [
        "rank-00000.pt is missing",
        "rank-00001.pt is too long: 101 bytes instead of 100",
        "shared.pt is truncated: 10239 of 10240 bytes",
    ]
    assert verify_files(path, label) == problems
    assert verify_files(path, label, ["shared.pt"]) == problems[2:]
    assert verify_files(path, label, ["notes.txt"]) == ["notes.txt is not in its label"]
    assert verify_files(path, replace(label, files={})) == ["its label lists no files, so nothing can be verified"]
    (path / "rank-00000.pt").mkdir()
    assert verify_files(path, label, ["rank-00000.pt"])[0].startswith("rank-00000.pt is ")


def test_the_label_of_another_folder_does_not_fit(store: Checkpoints) -> None:
    here, there = save(store, 100), save(store, 200, {**CONTENT, "shared.pt": bytes(10240)})
    (problem,) = verify_files(here, read_label(there))
    assert problem.startswith("shared.pt differs")


def test_links_count_by_what_they_lead_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, blob = tmp_path / "model", tmp_path / "blob"
    (folder / "sub").mkdir(parents=True)
    blob.write_bytes(b"weights")
    (folder / "sub" / "model.bin").symlink_to(blob)
    (folder / "all").symlink_to(tmp_path)
    found = digest_files(folder)
    assert found == {"sub/model.bin": digest_file(blob)}
    assert "all is a link to a folder: what is in it gets no digest" in caplog.text
    label = label_of(folder, 1)
    assert verify_files(folder, label) == []
    blob.write_bytes(b"Weights")
    assert verify_files(folder, label)[0].startswith("sub/model.bin differs")
    blob.unlink()
    assert verify_files(folder, label) == ["sub/model.bin cannot be read: No such file or directory"]
    with pytest.raises(CheckpointError, match=r"model\.bin could not be read"):
        digest_files(folder)


def test_a_linked_checkpoint_is_listed_and_only_its_link_removed(store: Checkpoints, tmp_path: Path) -> None:
    elsewhere = save(Checkpoints(tmp_path / "elsewhere"), 100)
    store.path.mkdir()
    link = store.path / "step-00000100"
    link.symlink_to(elsewhere)
    assert store.list() == [link]
    assert verify_files(link, read_label(link)) == []
    store.remove(link)
    assert (store.list(), hidden(store)) == ([], [])
    assert verify_files(elsewhere, read_label(elsewhere)) == []
    link.symlink_to(elsewhere)
    save(store, 100, {"shared.pt": b"new"})
    assert not link.is_symlink()
    assert verify_files(elsewhere, read_label(elsewhere)) == []


def test_what_belongs_to_a_checkpoint(tmp_path: Path) -> None:
    """The index of torch's distributed checkpoints is a hidden file; labels, what is unfinished and pipes do not count."""
    for name in (
        ".metadata",
        "__0_0.distcp",
        "label.json",
        "x.label.json",
        "y",
        "y.label.json",
        ".nfs01",
        ".y.1.ab.tmp",
    ):
        (tmp_path / name).write_text(name)
    os.mkfifo(tmp_path / "pipe")
    assert sorted(digest_files(tmp_path)) == [".metadata", "__0_0.distcp", "x.label.json", "y"]


# Labels --------------------------------------------------------------------------------------------------------------


def test_a_foreign_file_gets_its_label_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"does not exist, so it gets no label"):
        write_label(file, replace(label_of(tmp_path, 1), files={}))
    file.write_bytes(b"weights")
    label = label_of(file, 7)
    where = write_label(file, label)
    assert where == tmp_path / "model.safetensors.label.json" == label_path(file) == label_path(where)
    assert labelled(where) == labelled(file) == file
    assert read_label(file) == read_label(where) == label
    assert verify_files(file, label) == []
    file.write_bytes(b"weighty")
    assert verify_files(file, label)[0].startswith("model.safetensors differs")
    write_label(file, label_of(file, 8))
    assert verify_files(file, read_label(file)) == []
    two = replace(label, files={"a": FileDigest(1, "b"), "c": FileDigest(1, "d")})
    assert verify_files(file, two) == ["its label lists 2 files, and this is not a folder"]


def test_a_foreign_folder_gets_its_label_inside_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert write_label(tmp_path, label_of(tmp_path, 1)) == tmp_path / "label.json"
    assert labelled(tmp_path / "label.json") == tmp_path
    assert verify_files(tmp_path, read_label(tmp_path)) == []
    (tmp_path / "label.json").write_text('{"0": "cat", "1": "dog"}')
    with pytest.raises(CheckpointError, match=r"label\.json is in the way, and no label of ours"):
        write_label(tmp_path, label_of(tmp_path, 1))
    assert "cat" in (tmp_path / "label.json").read_text()


def test_no_label(store: Checkpoints, tmp_path: Path) -> None:
    path = save(store, 100)
    (path / "label.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000100 has no label \(label\.json\).*do not resume from it"):
        read_label(path)
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        read_label(tmp_path / "nowhere")


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {key: value for key, value in record.items() if key != name}


DAMAGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "torn": (lambda record: json.dumps(record)[:-9], "is not JSON"),
    "empty": (lambda record: "", "is not JSON"),
    "foreign": (lambda record: {"0": "cat"}, "has schema None"),
    "a newer schema": (lambda record: {**record, "schema": 2}, "has schema 2, this version reads 1"),
    "ours, and another file": (lambda record: {"schema": 1, "verdict": {}}, "is no label of a checkpoint"),
    **{f"no {name}": (without(name), f"no '{name}' in it") for name in ("step", "files", "incidents", "failed")},
    "a step of words": (lambda record: {**record, "step": "100"}, "'step' is no count: '100'"),
    "a step below 0": (lambda record: {**record, "step": -1}, "'step' is no count"),
    "a step that is true": (lambda record: {**record, "step": True}, "'step' is no count"),
    "passed of words": (lambda record: {**record, "passed": {"replay": "yes"}}, "'passed' is no integer"),
    "failed of numbers": (lambda record: {**record, "failed": {"replay": 3}}, "'failed' is no text"),
    "one incident": (lambda record: {**record, "incidents": "x"}, "'incidents' is no list"),
    "a place of words": (lambda record: {**record, "placement": ["a"]}, "'placement' is no object"),
    "no digest": (lambda record: {**record, "files": {"a": {"bytes": 1}}}, "'files' is without size or digest for 'a'"),
    "a size below 0": (lambda record: {**record, "files": {"a": {"bytes": -1, "sha256": ""}}}, "'files' is no count"),
    "a way out": (lambda record: {**record, "files": {"../a": {"bytes": 1, "sha256": ""}}}, "no list of files of this"),
    "a path": (lambda record: {**record, "files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "no list of files of"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_damaged_label_is_named(store: Checkpoints, damage: str) -> None:
    file = save(store, 100) / "label.json"
    change, said = DAMAGES[damage]
    content = change(json.loads(file.read_text()))
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(CheckpointError) as caught:
        read_label(file.parent)
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_labels_from_a_newer_version_can_be_read(store: Checkpoints) -> None:
    file = save(store, 100) / "label.json"
    record = {**json.loads(file.read_text()), "invented": 1}
    record["checksum"] = _checksum(record)
    file.write_text(json.dumps(record))
    assert read_label(file) == label_of(file.parent, 100)


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 4, 7])
def test_no_bit_of_a_label_flips_unnoticed(store: Checkpoints, bit: int) -> None:
    """Nor does one that flips in white space, or the checksum's own name, make another label of it."""
    file = save(store, 100) / "label.json"
    content, label = file.read_bytes(), read_label(file)
    for position in range(bit, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        file.write_bytes(changed)
        with suppress(CheckpointError):
            assert read_label(file) == label, f"bit {bit} of byte {position}"


def test_a_huge_label(store: Checkpoints) -> None:
    """That of 10,000 ranks is read; a file beyond any label is refused unread."""
    files = {f"rank-{rank:05d}.pt": FileDigest(1, "ab" * 32) for rank in range(10_000)}
    placement = tuple(
        {"rank": rank, "node": f"node-{rank // 8}", "device": "x" * 40, "slot": 0} for rank in range(10_000)
    )
    path = save(store, 100)
    label = label_of(path, 100, files=files, placement=placement, extra={"a": [1, {"b": None}]})
    assert read_label(write_label(path, label)) == label
    with (path / "label.json").open("r+b") as file:
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match="larger than 256 MiB"):
        read_label(path)


def test_a_label_that_is_no_regular_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "label.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_label(tmp_path)
    (tmp_path / "label.json").unlink()
    (tmp_path / "label.json").symlink_to("nowhere")
    with pytest.raises(RunFilesError, match="does not exist"):
        read_label(tmp_path)


# Trust ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "step", "allowed"),
    [
        ((40, 50), 40, True),
        ((40, 50), 41, True),  # holds the updates 0..40: the check had passed at step 40
        ((40, 50), 42, False),
        ((40, 50), 51, False),
        ((40, 50), 900, False),
        ((-1, 50), 0, True),
        ((-1, 50), 1, False),
    ],
)
def test_distrust_at_the_borders_of_the_window(
    tmp_path: Path, window: tuple[int, int], step: int, allowed: bool
) -> None:
    label = label_of(tmp_path, step)
    seen = incident(window)
    reason = distrust(label, [incident((1000, 1001)), seen])
    assert (reason == "") is allowed
    if reason:
        assert seen.path.name in reason
        assert f"up to step {step - 1}" in reason
    assert distrust(replace(label, incidents=("x", seen.path.name)), [seen]) == "", "it was known when it was saved"


def test_a_checkpoint_whose_checks_had_failed_is_not_trusted(tmp_path: Path) -> None:
    label = label_of(tmp_path, 5, failed={"replay": "rank 3 differs"})
    assert distrust(label, []) == "it is not a verified one: replay had failed when it was saved (rank 3 differs)"


# Retention -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", [1, 3])
@pytest.mark.parametrize("every", [1, 250])
def test_retention_over_thousands_of_saves(newest: int, every: int) -> None:
    kept: set[int] = set()
    for number in range(1, 4001):
        kept = retained([*kept, number * every], newest)
        ages = sorted(number - step // every for step in kept)
        assert ages[:newest] == list(range(min(newest, number)))
        assert len(kept) <= newest + 2 + math.log2(number)
        assert all(older <= 3 * younger for younger, older in pairwise(ages) if younger), (number, ages)
        assert 4 * ages[-1] >= number - 1, "there must always be one that is old"
        assert retained(sorted(kept), newest) == kept, "keeping once more removes nothing"


def test_retention_at_irregular_steps(seed: int) -> None:
    """Saves at random distances, some of them right after another, as when a job is told to stop."""
    draw, step, kept = random.Random(seed), 0, set[int]()
    protected = 777
    for number in range(2000):
        step = protected if number == 7 else step + draw.choice((1, 100, 100, 100, 500))
        before = [*kept, step]
        kept = retained(before, 2, {protected, 12345678})
        assert kept <= set(before)
        assert set(sorted(before)[-2:]) <= kept
        assert protected in kept or protected not in before
        assert len(kept) <= 5 + math.log2(step + 1)
    assert len(kept) > 5
    with pytest.raises(ValueError, match="newest=0"):
        retained([1, 2], 0)
    assert retained([], 1) == set()
    assert retained([5], 3) == {5}


def test_prune(store: Checkpoints, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(1, 13):
        save(store, 10 * number, {"shared.pt": b"x"}, passed={"replay": 10 * number - (1 if number == 7 else 5)})
    (store.path / "step-00000050" / "label.json").unlink()
    (store.path / "step-00000030" / "shared.pt").unlink()  # of the files it knows nothing: verifying is dear
    gone = store.prune(2)
    kept = [checkpoint_step(path) for path in store.list()]
    # newest two; 50 cannot be read; 70 is audited to its end; of ages 1, 2-3, 4-7, 8-15 the oldest
    assert kept == [120, 110, 90, 70, 60, 50, 10]
    assert sorted([*gone, *store.list()]) == sorted(store.path / checkpoint_name(10 * one) for one in range(1, 13))
    assert "step-00000050 has no label" in caplog.text
    assert store.prune(2) == []
    assert hidden(store) == []


def test_what_an_incident_forbids_does_not_push_out_what_it_does_not(store: Checkpoints) -> None:
    for step in (10, 20, 30, 40, 50):
        save(store, step, {"shared.pt": b"x"})
    seen = incident((25, 55))
    assert store.prune(1, [seen]) == []
    save(store, 21, {"shared.pt": b"x"}, incidents=(seen.path.name,))
    store.prune(1, [seen])
    kept = [checkpoint_step(path) for path in store.list()]
    assert 21 in kept, "the one just saved, although there are higher steps"
    assert 50 in kept, "nothing trusted is as far yet"
    save(store, 60, {"shared.pt": b"x"}, incidents=(seen.path.name,))
    store.prune(1, [seen])
    steps = [checkpoint_step(path) for path in store.list()]
    assert steps[0] == 60
    assert not {30, 40, 50} & set(steps)


def test_shadow_mode_does_not_fill_the_disk(store: Checkpoints) -> None:
    for number in range(1, 60):
        save(store, number, {"shared.pt": b"x"}, failed={"replay": "differs"} if number > 5 else {})
        store.prune(2)
    steps = [checkpoint_step(path) or 0 for path in store.list()]
    assert len(steps) <= 2 * (2 + 2 + math.log2(60))
    assert steps[:2] == [59, 58]
    assert 5 in steps, "the newest verified one"


def test_remove_takes_nothing_else(store: Checkpoints, tmp_path: Path) -> None:
    path = save(store, 100)
    for stranger in (tmp_path, store.path, store.path / "latest", tmp_path / "step-00000100", path / "step-00000100"):
        with pytest.raises(CheckpointError, match="is no checkpoint in"):
            store.remove(stranger)
    store.discard(path)  # not staged
    assert names(store) == ["step-00000100"]
    store.remove(path)
    with pytest.raises(CheckpointError, match="could not be removed: No such file"):
        store.remove(path)


def test_a_removal_that_is_refused_is_a_warning_and_tried_again(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4, 5):
        save(store, step, {"shared.pt": b"x"})
    with monkeypatch.context() as patch:
        refusing(patch, "rename")
        assert store.prune(1) == []
    assert "could not be removed: No space left on device" in caplog.text
    assert len(store.list()) == 5
    caplog.set_level(logging.CRITICAL)
    with monkeypatch.context() as patch:
        refusing(patch, "unlink")
        gone = store.prune(1)
    assert len(store.list()) == 5 - len(gone) < 5
    assert hidden(store), "out of sight, although its files are still there"
    store.discard_leftovers()
    assert hidden(store) == []


def test_listing_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="checkpoints could not be read: Not a directory"):
        RunFiles(tmp_path).checkpoints.list()
