"""The loop of a rank: everything twice first, what is in focus half of the time, and what it leaves when something is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwitness.runfiles.answers import AnswerFiles, Device
from bitwitness.runfiles.files import write_json
from bitwitness.runfiles.journal import read_journal
from bitwitness.scan import working
from bitwitness.scan.drill import Drill
from bitwitness.scan.evidence import read
from bitwitness.scan.items import Item
from bitwitness.scan.launching import place_of_heartbeat
from bitwitness.scan.settings import Settings
from bitwitness.scan.work import Unsupported, digest

CPU = torch.device("cpu")
ITEMS = tuple(Item.parse(f"ops/add/float32/{size}") for size in (1, 2, 3, 4))
WHO = Device(0, "node-0", "cpu-0", {"model": "m"})

Compute = Callable[[], list[torch.Tensor]]


class After(working.Asked):
    """Asked to stop after so many looks."""

    def __init__(self, looks: int) -> None:
        super().__init__(Path("/nowhere"))
        self.left = looks

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left < 0


class Lab:
    """A worker whose items are made of nothing, in a folder of its own."""

    def __init__(self, path: Path) -> None:
        self.files = AnswerFiles(path)
        self.files.create()
        self.made: Counter[str] = Counter()
        self.order: list[str] = []
        self.trouble: dict[str, BaseException] = {}
        self.outputs: dict[str, Iterator[float]] = {}

    def prepare(self, item: Item, device: torch.device) -> Compute:
        self.made[item.id] += 1
        if item.id in self.trouble:
            raise self.trouble[item.id]

        def compute() -> list[torch.Tensor]:
            self.order.append(item.id)
            return [torch.full(item.shape, next(self.outputs[item.id]) if item.id in self.outputs else 1.0)]

        return compute

    def run(self, looks: int, drills: Sequence[Drill] = ()) -> list[dict[str, Any]]:
        settings = Settings(id="s", world=1, seconds=3600.0, suites=("ops",), drills=tuple(drills), seed=1)
        journal = self.files.introduce(WHO)
        try:
            working.Worker(self.files, settings, WHO, CPU, journal, After(looks)).run()
        finally:
            journal.close()
        return self.records()

    def records(self) -> list[dict[str, Any]]:
        return list(read_journal(self.files.answers(0)))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    made = Lab(tmp_path)
    monkeypatch.setattr(working, "prepare", made.prepare)
    monkeypatch.setattr("bitwitness.scan.suites.items", lambda suites, kind: ITEMS)
    monkeypatch.setattr(working, "_BATCH", 0.0)
    monkeypatch.setattr(working, "_RECORDED", 0.0)
    return made


def test_everything_twice_in_order_and_then_in_laps(lab: Lab) -> None:
    records = lab.run(400)
    assert lab.order[:8] == [item.id for item in ITEMS for _ in range(2)]
    assert {item.id for item in ITEMS} <= set(lab.order[8:])
    assert records[0]["items"] == 4
    assert (records[-1]["kind"], records[-1]["why"]) == ("end", "done")
    sheet = lab.files.sheet(0)
    assert {item: sum(found.values()) for item, found in sheet.answers.items()} == Counter(lab.order)
    assert all(len(found) == 1 for found in sheet.answers.values())


def test_operands_are_made_anew_for_each_batch(lab: Lab) -> None:
    lab.run(400)
    assert min(lab.made.values()) > 1
    assert place_of_heartbeat(lab.files, 0).read_text().strip() in {item.id for item in ITEMS}


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (Unsupported("no kernel"), "unsupported"),
        (torch.OutOfMemoryError("no memory"), "memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "memory"),
        (RuntimeError("shapes"), "error"),
    ],
)
def test_what_cannot_be_computed_is_left_out_and_said(lab: Lab, error: BaseException, what: str) -> None:
    lab.trouble[ITEMS[1].id] = error
    records = lab.run(400)
    skipped = [record for record in records if record["kind"] == "skip"]
    assert [(one["item"], one["what"]) for one in skipped] == [(ITEMS[1].id, what)]
    assert lab.made[ITEMS[1].id] == 1
    assert records[-1]["why"] == "done"


def test_a_device_that_can_no_more_does_not_come_to_its_end(lab: Lab) -> None:
    lab.trouble = {item.id: RuntimeError("broken") for item in ITEMS}
    with pytest.raises(RuntimeError, match="broken"):
        lab.run(400)
    assert "end" not in {record["kind"] for record in lab.records()}


def test_an_answer_unlike_its_own_is_kept(lab: Lab) -> None:
    def values() -> Iterator[float]:
        yield from (1.0, 1.0, 1.0, 2.0)
        while True:
            yield 1.0

    lab.outputs[ITEMS[2].id] = values()
    lab.run(400)
    evidence = read(lab.files.evidence / "rank-00000-1.json")
    assert (evidence.item, evidence.expected_by, evidence.differing) == (ITEMS[2], "itself", 3)
    assert evidence.wrong == digest([torch.full((3,), 2.0)])
    assert not (lab.files.evidence / "rank-00000-2.json").exists()


def test_what_is_in_focus_is_repeated_and_kept_where_it_differs(lab: Lab) -> None:
    item, other = ITEMS[3].id, ITEMS[0].id
    kinds = {WHO.kind_name: {item: "0" * 32}, "model other": {other: "0" * 32}}
    write_json(lab.files.focus, {"items": {item: "0" * 32}, "kinds": kinds})
    lab.run(1200)
    counts = Counter(lab.order)
    assert counts[item] > 2 * counts[other]
    kept = [read(path) for path in sorted(lab.files.evidence.glob("*.json"))]
    assert [(one.item.id, one.expected_by, one.differing) for one in kept] == [(item, "others", None)] * 2


def test_a_drill_shows_in_the_answers(lab: Lab) -> None:
    records = lab.run(600, [Drill(0.3, rank=0)])
    sheet = lab.files.sheet(0)
    assert any(len(found) > 1 for found in sheet.answers.values())
    assert records[-1]["struck"] > 0
