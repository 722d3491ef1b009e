"""Why this rank, or why nobody: every sentence is checked against the observations it is made from, over real verdicts."""

from __future__ import annotations

import dataclasses
import random
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.evidence import NONFINITE, Observation, Verdict
from bitwitness.store import pages
from bitwitness.topology import Topology
from bitwitness.verdict import decide
from bitwitness.web import reasons
from bitwitness.web.acting_offers import sentence as as_sentence
from tests.cli import samples
from tests.web import records


def page_of(observations: Sequence[Observation], where: Topology, verdict: Verdict | None = None) -> pages.IncidentPage:
    """The page of what the guard would have concluded from these observations."""
    found = verdict or decide(observations, where, samples.KNOWN, samples.STEP)
    assert found.status != "clean"
    row = records.incident(
        step=found.step, check=found.check or "", kind=found.kind or "", status=found.status, persistence=found.persistence,
        headline=found.headline(), reason=found.reason, ranks=found.ranks, nodes=found.nodes, devices=found.devices, candidates=found.candidates,
        window=found.window,
    )  # fmt: skip
    seen = tuple(
        pages.Seen(
            one.check,
            one.step,
            one.rank,
            one.place,
            one.value,
            one.repeats,
            one.owner,
            one.micro,
            one.error,
            one.detail,
        )
        for one in observations
    )
    places = tuple(
        pages.Place(one.rank, one.node, one.device, one.slot, one.model, one.pod) for one in where.placements
    )
    run = records.run(world_size=where.world_size, nodes=3 if len(where.nodes) < 3 else 1)  # it has moved since
    return records.incident_page(
        incident=row,
        run=run,
        observations=seen,
        placement=places,
        world_size=where.world_size,
        nodes=len(where.nodes),
    )


def said(page: pages.IncidentPage) -> str:
    return " ".join(reasons.why(page))


def test_a_persistent_rank() -> None:
    where = samples.topology()
    text = said(page_of(samples.replays(where, 4, samples.BAD), where))
    assert "Rank 4 on node-2 got bbbbbbbbbb… for its own micro-batch 0." in text
    assert (
        "Rank 0 on node-0 and rank 2 on node-1 did the same work and got aaaaaaaaaa…, 4 times each, bit for bit."
        in text
    )
    assert "So 2 other nodes agree with each other and not with rank 4" in text
    assert "wrong 3 times. The verdict calls it persistent." in text
    assert "On 5 further micro-batches of this step every run agreed bit for bit." in text


def test_a_transient_rank() -> None:
    where = samples.topology()
    text = said(page_of(samples.replays(where, 4, samples.GOOD), where))
    assert "right every time" in text
    assert "The verdict calls it transient." in text


def test_two_nodes_name_nobody() -> None:
    where = samples.topology(2)
    text = said(page_of(samples.replays(where, 2, samples.BAD), where))
    assert "The job has 2 nodes" in text
    assert "three are needed" in text
    assert "So nobody is named" in text
    assert "no blame" in text


def test_a_batch_that_is_not_finite_wherever_it_runs() -> None:
    where = samples.topology()
    observations = [
        dataclasses.replace(one, value=NONFINITE, repeats=(NONFINITE,) * 3)
        for one in samples.replays(where, 0, samples.GOOD, samples.GOOD)
        if one.owner == 0
    ]
    text = said(page_of(observations, where))
    assert "holds NaN or Inf, wherever it ran" in text
    assert "So nobody is named" in text


def test_results_that_do_not_repeat_on_several_nodes_are_software() -> None:
    where = samples.topology()
    observations = [
        dataclasses.replace(one, repeats=(f"{one.rank:024x}", f"{one.rank + 9:024x}", one.value))
        for one in samples.replays(where, 0, samples.BAD)
    ]
    text = said(page_of(observations, where))
    assert "did not repeat even their own results" in text
    assert "software or data, not a device" in text


def test_replicas_that_parted() -> None:
    where = samples.topology(4)
    text = said(page_of(samples.replicas(where, 3), where))
    assert "Rank 3 on node-1 got bbbbbbbbbb… for its parameters and optimizer state." in text
    assert "hold aaaaaaaaaa… for the same" in text


def test_what_the_observations_do_not_show_is_not_said() -> None:
    where = samples.topology()
    observations = samples.replays(where, 4, samples.BAD)
    page = page_of(observations, where)
    lone = dataclasses.replace(
        page, observations=tuple(one for one in page.observations if one.owner == 4 and one.rank in (4, 0))
    )
    text = said(lone)
    assert "do not show by themselves which two other nodes" in text
    assert "agree with each other" not in text
    pruned = dataclasses.replace(page, observations=(), pruned=True)
    assert reasons.why(pruned) == [
        "The observations it was decided from were removed by retention, so only the verdict's own words are left."
    ]


@pytest.mark.parametrize("seed", range(60))
def test_whoever_is_said_to_agree_does(seed: int) -> None:
    """Random faults on random placements: each backer named in a sentence holds that value on another node, in every run."""
    chance = random.Random(seed)
    where = samples.topology(chance.randint(2, 5))
    values = [samples.GOOD, samples.BAD, "c" * 24, NONFINITE]

    def struck(one: Observation) -> Observation:
        if chance.random() >= 0.12:
            return one
        value = chance.choice(values)
        return dataclasses.replace(
            one, value=value, repeats=tuple(chance.choice((value, samples.GOOD)) for _ in range(3))
        )

    observations = [struck(one) for one in samples.replays(where, 0, samples.GOOD, samples.GOOD)]
    verdict = decide(observations, where, samples.KNOWN, samples.STEP)
    if verdict.status == "clean":
        return
    page = page_of(observations, where, verdict)
    for sentence in reasons.why(page):
        found = re.match(r"(.*) did the same work and got (\w+)…, (\d+) times each", sentence)
        if found:
            ranks = [int(rank) for rank in re.findall(r"[Rr]ank (\d+)", found[1])]
            nodes = Counter(where.node_of(rank) for rank in ranks)
            assert len(nodes) >= 2
            assert not set(ranks) & set(verdict.ranks)
            for rank in ranks:
                assert any(
                    one.rank == rank and set(one.runs) == {one.value} and one.value.startswith(found[2])
                    for one in observations
                )
        if verdict.status == "unattributed":
            assert "not with rank" not in sentence


def test_tables_show_what_differs_and_leave_out_only_what_is_alike() -> None:
    where = samples.topology(40)
    made = reasons.tables(
        page_of(
            samples.replicas(where, 3, 70),
            where,
            Verdict("unattributed", samples.STEP, kind="memory", candidates=(3, 70)),
        )
    )
    (table,) = made.differ
    assert {row.differs for row in table.rows} == {None}
    assert [(row.rank, row.letters) for row in table.rows if row.letters != "A"] == [(3, "B"), (70, "B")]
    assert len(table.rows) + table.hidden == 80
    assert table.left_out == "56 with A"
    assert not any(row.about for row in table.rows)
    assert [row.rank for row in table.rows] == sorted(row.rank for row in table.rows)


def test_only_who_is_named_is_marked_and_those_who_are_like_the_reference() -> None:
    (table, *_) = reasons.tables(records.incident_page()).differ
    named = [row for row in table.rows if row.named]
    assert [(row.rank, row.differs) for row in named] == [(4, True)]
    assert {row.differs for row in table.rows if not row.named} == {False}
    nobody = records.incident_page(incident=records.incident(status="unattributed", ranks=(4,), candidates=(0, 2, 4)))
    for each in reasons.tables(nobody).differ:
        assert {(row.named, row.differs) for row in each.rows} == {(False, None)}
        assert len({row.letters for row in each.rows}) > 1


def test_advice_is_that_of_the_command_line_and_survives_a_rank_without_a_place() -> None:
    where = samples.topology()
    page = page_of(samples.replays(where, 4, samples.BAD), where)
    assert any("scontrol update nodename=node-2" in line for step in reasons.advice(page) for line in step.commands)
    assert any("micro-batches-rank-00004.pt" in line for step in reasons.advice(page) for line in step.commands)
    lost = reasons.advice(dataclasses.replace(page, placement=()))
    assert "its place is not on record" in lost[0].text
    assert not [line for step in lost for line in step.commands if "scontrol" in line]


def test_commands_can_be_pasted_whatever_a_directory_is_called() -> None:
    page = records.incident_page(path="/runs/a b; rm -rf ~/incidents/x", run=records.run(path="/runs/$(reboot)"))
    assert reasons.commands(page)[0] == "bitwitness incident show '/runs/a b; rm -rf ~/incidents/x'"
    assert reasons.commands(page)[1] == "bitwitness checkpoint list '/runs/$(reboot)'"


def test_every_command_that_a_page_shows_is_one(tmp_path: Path) -> None:
    """What a person pastes at night must not end in a usage error."""
    where = samples.topology()
    path = samples.write(tmp_path / "run", samples.replays(where, 4, samples.BAD), where)
    run = records.run(path=str(path.parent.parent))
    page = records.incident_page(path=str(path), run=run, incident=records.incident(id=path.name))
    for line in [*reasons.commands(page), reasons.judge(page)]:
        words = shlex.split(line.replace("incident.html", shlex.quote(str(tmp_path / "incident.html"))))
        assert words[0] == "bitwitness"
        done = CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, words[1:])
        assert done.exit_code == 0, (line, done.output)


def test_no_sentence_changes_a_name() -> None:
    assert as_sentence("n1 is IDLE") == "n1 is IDLE."
    assert as_sentence("is it?") == "is it?"
    page = records.incident_page()
    named = dataclasses.replace(
        page, placement=tuple(dataclasses.replace(one, node=f"iBM-{one.node}") for one in page.placement)
    )
    said = " ".join(reasons.why(named))
    assert "Rank 4 on iBM-node-2 got" in said
    assert "IBM" not in said
    assert reasons.why(named) == [one.replace("node-", "iBM-node-") for one in reasons.why(page)]
