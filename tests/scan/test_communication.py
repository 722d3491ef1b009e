"""Four real ranks over gloo: what reaches whom is verified bit by bit, and who does not answer is waited for no longer than said."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bitwitness.runfiles.journal import Journal, read_journal
from bitwitness.scan import collectives, payloads
from bitwitness.scan.communication import run
from bitwitness.scan.drill import parse
from bitwitness.scan.items import Item
from bitwitness.scan.payloads import PATTERNS, LinkStriker, Message, compare, payload, poisoned
from tests.conftest import ROOT
from tests.scan.communicating import DEVICES, SCENARIOS, WORLD
from tests.scan.linked import judge_collectives, judge_links

Records = Mapping[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Records]:
    """The journals of all scenarios, by name and rank."""
    folder = tmp_path_factory.mktemp("communicating")
    command = [sys.executable, "-m", "tests.scan.communicating", str(folder), *SCENARIOS]
    subprocess.run(command, cwd=ROOT, check=True, timeout=160)
    return {
        name: {rank: list(read_journal(folder / name / f"{rank}.jsonl")) for rank in range(WORLD)} for name in SCENARIOS
    }


def of_kind(records: Records, kind: str) -> list[dict[str, Any]]:
    return [record for found in records.values() for record in found if record["kind"] == kind]


def flat(records: Records) -> list[dict[str, Any]]:
    return [record for found in records.values() for record in found]


def examples(records: Records, rank: int) -> list[str]:
    return [record["example"]["what"] for record in records[rank] if "example" in record]


def test_what_is_right_is_right_in_every_pair_and_in_every_collective(played: dict[str, Records]) -> None:
    records = played["healthy"]
    links = of_kind(records, "link")
    assert {(record["rank"], record["peer"]) for record in links} == {
        (a, b) for a in range(WORLD) for b in range(WORLD) if a != b
    }
    assert {Item.parse(record["item"]).variant for record in links} == set(PATTERNS)
    assert {Item.parse(record["item"]).operation for record in of_kind(records, "collective")} == {
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "barrier")
    }
    assert sum(record["wrong"] for record in flat(records) if "wrong" in record) == 0
    assert [record["played"] for record in of_kind(records, "end")] == [4] * WORLD
    assert judge_links(DEVICES, flat(records)) == ((), {})
    assert judge_collectives(DEVICES, flat(records)) == ()


def test_a_bad_link_is_found_and_neither_end_is_named(played: dict[str, Records]) -> None:
    (link,), failed = judge_links(DEVICES, flat(played["bad_link"]))
    assert (link.ranks, link.standing, failed) == ((1, 2), "fail", {})
    assert "node-1 (rank 1) -> node-2 (rank 2)" in link.reason


def test_a_bad_receiver_is_found(played: dict[str, Records]) -> None:
    links, failed = judge_links(DEVICES, flat(played["bad_receiver"]))
    assert list(failed) == [2]
    assert "its device or its network card" in failed[2]
    assert {link.standing for link in links} == {"not judged"}
    assert {rank for link in links for rank in link.ranks if rank != 2} == {0, 1, 3}


def test_zeros_that_all_received_alike_are_no_agreement(played: dict[str, Records]) -> None:
    records = flat(played["zeros_for_all"])
    said = judge_collectives(DEVICES, records)
    assert len(said) >= 10
    assert any("all ranks received the same wrong bytes" in one.reason for one in said)
    links, failed = judge_links(DEVICES, records)
    assert ({link.standing for link in links}, failed) == ({"not judged"}, {})
    assert {rank for link in links for rank in link.ranks} == {0, 1, 2, 3}


def test_who_alone_received_otherwise_is_a_candidate_and_no_more(played: dict[str, Records]) -> None:
    records = flat(played["zeros_for_one"])
    assert all("rank 1 (node-1, cpu-1) alone" in one.reason for one in judge_collectives(DEVICES, records))
    links, failed = judge_links(DEVICES, records)
    assert ([link.ranks for link in links], failed) == ([(0, 1), (1, 2), (1, 3)], {})
    assert {link.standing for link in links} == {"not judged"}


def test_a_stale_payload_is_seen_as_one(played: dict[str, Records]) -> None:
    found = examples(played["not_what_was_sent"], 1)
    assert found
    assert any(what.startswith("stale: the payload from rank") for what in found)
    assert all("instead of that from rank" in what for what in found)


def test_a_payload_of_somebody_else_is_seen_as_one(played: dict[str, Records]) -> None:
    found = examples(played["not_what_was_sent"], 2)
    assert found
    assert all(what.startswith("the payload from rank") and "instead of that from rank" in what for what in found)


def test_what_never_arrived_is_seen_in_the_buffer(played: dict[str, Records]) -> None:
    assert set(examples(played["not_what_was_sent"], 0)) == {"nothing arrived: the buffer is as it was"}


@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_a_lost_rank_ends_the_suite_for_all_with_the_reason(played: dict[str, Records], name: str) -> None:
    records = played[name]
    for rank in range(WORLD - 1):
        assert [record["kind"] for record in records[rank]].count("no-link") == 1
        assert records[rank][-1]["kind"] == "end"
    assert not [record for record in records[WORLD - 1] if record["kind"] == "end"]
    links, failed = judge_links(DEVICES, flat(records))
    assert failed == {}
    assert {link.standing for link in links} == {"not judged"}
    gaps = [link for link in links if link.transfers < 2]
    assert any(3 in link.ranks or re.search(r"rank\(s\) [0-9, ]*3", link.reason) for link in gaps)
    assert any("rank" in link.reason and "no answer" in link.reason for link in links)


def test_who_does_not_come_is_not_judged_and_the_others_go_on(played: dict[str, Records]) -> None:
    records = played["absent"]
    assert [record["played"] for record in of_kind(records, "end")] == [2] * (WORLD - 1)
    links, failed = judge_links(DEVICES, flat(records))
    assert failed == {}
    (link,) = [link for link in links if 3 in link.ranks]
    assert (link.ranks, link.standing) == ((0, 3), "not judged")
    assert "nobody exchanged anything with rank(s) 3" in link.reason
    assert "it did not come within 3 s" in link.reason


@pytest.mark.parametrize("name", ["healthy", "by_environment", "own_group"])
def test_a_group_is_left_as_it_was_found(played: dict[str, Records], name: str) -> None:
    ends = of_kind(played[name], "end")
    assert [record["group"] for record in ends] == [name == "own_group"] * WORLD
    assert [record["played"] for record in ends] == [SCENARIOS[name].most] * WORLD
    assert judge_links(DEVICES, flat(played[name])) == ((), {})


def test_one_rank_alone_has_nobody_to_send_to(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "0.jsonl", 0)
    assert run(DEVICES[0], torch.device("cpu"), 1, journal, seconds=1, seed=0, meeting=tmp_path) == 0
    journal.close()
    (record,) = read_journal(tmp_path / "0.jsonl")
    assert (record["kind"], record["why"]) == ("no-link", "there is no other rank")


def test_nobody_names_a_place_to_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    journal = Journal(tmp_path / "0.jsonl", 0)
    assert run(DEVICES[0], torch.device("cpu"), 2, journal, seconds=1, seed=0, meeting=None, begin=5) == 5
    journal.close()
    (record,) = read_journal(tmp_path / "0.jsonl")
    assert "start it by torchrun" in record["why"]


def message(**changed: Any) -> Message:
    fields: dict[str, Any] = {"seed": (1, 0), "sender": 3, "receiver": 5, "step": 2, "size": 1_003, "pattern": "random"}
    return Message(**{**fields, **changed})


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_payload_is_a_function_of_everything_that_names_it(pattern: payloads.Pattern) -> None:
    own = payload(message(pattern=pattern))
    assert own.numel() == 1_003
    assert torch.equal(own, payload(message(pattern=pattern)))
    others = [message(pattern=pattern, **other) for other in ({"sender": 4}, {"receiver": 4}, {"step": 3})]
    assert not any(torch.equal(own, payload(other)) for other in others)
    assert not torch.equal(own, payload(message(pattern=pattern, seed=(1, 1)))) or pattern in (
        "zeros",
        "ones",
        "walking",
    )


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_flipped_bit_is_seen(pattern: payloads.Pattern) -> None:
    sent = message(pattern=pattern, size=64)
    for bit in range(0, 64 * 8, 5):
        received = payload(sent)
        received[bit // 8] ^= 1 << (bit % 8)
        found = compare(received, payload(sent), sent)
        assert found is not None
        assert (found["bits"], found["first"]) == (1, bit // 8)
    assert compare(payload(sent), payload(sent), sent) is None
    assert not ((poisoned(payload(sent)) ^ payload(sent)) != 255).any()


def test_what_came_is_said_in_words() -> None:
    sent = message()
    right = payload(sent)
    cases = {
        "all zeros": torch.zeros_like(right),
        "nothing arrived: the buffer is as it was": poisoned(right),
        f"stale: the payload {message(step=1)} instead of that {sent}": payload(message(step=1)),
        f"the payload {message(sender=9)} instead of that {sent}": payload(message(sender=9)),
    }
    for what, received in cases.items():
        found = compare(received, right, sent)
        assert found is not None
        assert found["what"] == what


@pytest.mark.parametrize("size", [2, 5, 16, 300, 1_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_sums_are_exact_in_any_order(size: int, dtype: torch.dtype) -> None:
    from datetime import timedelta

    place = collectives.Place(0, size, (1, 0), 0, torch.device("cpu"), timedelta(seconds=1))
    given = collectives._contributions(place, "comm/x", dtype, "sum", 50)
    assert given.abs().sum(0).max() <= collectives._EXACT[dtype]
    exact = given.sum(0)
    for order in (torch.arange(size), torch.arange(size).flip(0), torch.randperm(size, generator=torch.Generator())):
        total = torch.zeros(50, dtype=dtype)
        for row in order.tolist():
            total += given[row].to(dtype)
        assert torch.equal(total.to(torch.int64), exact)
    assert given.any()


def test_products_stay_finite_in_any_order() -> None:
    from datetime import timedelta

    place = collectives.Place(0, 1_000, (1, 0), 0, torch.device("cpu"), timedelta(seconds=1))
    exponents = collectives._contributions(place, "comm/x", torch.bfloat16, "product", 50)
    assert exponents.abs().sum(0).max() <= 126
    assert torch.equal(collectives._as(exponents.sum(0), torch.bfloat16, "product").log2().long(), exponents.sum(0))


def test_a_drill_strikes_its_link_only_and_the_same_transfers_each_time() -> None:
    def struck() -> list[bool]:
        striker = LinkStriker([parse("link=3-5 p=0.5")], 5, seed=1)
        found = []
        for sender in (3, 4, -1) * 30:
            received = torch.zeros(10, dtype=torch.uint8)
            striker(received, sender, 5)
            found.append(bool(received.any()))
        assert striker.struck == sum(found)
        return found

    found = struck()
    assert found == struck()
    assert 5 <= sum(found[::3]) <= 25
    assert not any(found[1::3] + found[2::3])


def test_who_is_asked_to_stop_waits_for_nobody(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "0.jsonl", 0)
    cpu, meeting = torch.device("cpu"), tmp_path / "meeting"
    assert run(DEVICES[0], cpu, 2, journal, seconds=100, seed=0, meeting=meeting, stop=lambda: True) == 0
    journal.close()
    (record,) = read_journal(tmp_path / "0.jsonl")
    assert record["why"] == "the ranks could not meet: asked to stop"
