"""Every rule of what follows from what was seen, on every combination of what can be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from bitwitness.evidence import Persistence, Verdict
from bitwitness.supervise.decisions import (
    OUTCOMES,
    PORT_RETRIES,
    Action,
    Blame,
    Evidence,
    Failure,
    Hang,
    Hit,
    Named,
    Outcome,
    Past,
    Status,
    arrange,
    blame,
    cause,
    decide,
    ended,
    exit_code_of,
    judge,
    stop_code,
)
from bitwitness.supervise.settings import Settings

SETTINGS = Settings(run_dir=Path("run"), script="train.py", nodes=3)


def hit(*named: tuple[int, Persistence], name: str = "i", per_node: int = 2) -> Hit:
    """An incident that names these ranks; nobody: unattributed."""
    if not named:
        return Hit(name, Verdict("unattributed", 4, kind="collective"), (), f"run/incidents/{name}")
    who = tuple(Named(rank, f"n{rank // per_node}", f"gpu{rank}", how) for rank, how in named)
    nodes = tuple(dict.fromkeys(one.node for one in who))
    verdict = Verdict(
        "attributed",
        4,
        ranks=tuple(one.rank for one in who),
        nodes=nodes,
        devices=tuple(one.device for one in who),
        kind="compute",
    )
    return Hit(name, verdict, who, f"run/incidents/{name}")


REAL = Failure(1, "n0", 7, "ValueError", "boom", order=1, time=5.0, log="log", tail=("boom",))
LOST = Failure(0, "n0", 1, "RuntimeError", "Connection closed by peer", order=0, time=1.0)
GUARD = Failure(2, "n1", 4, "RankLost", "rank 1 did not take part")
KILLED = Failure(3, "n1", -9)
VANISHED = Failure(3, "n1", 0)
GONE = Failure(0, "n0", None)

HITS: list[tuple[Hit, ...]] = [(), (hit((1, "persistent")),), (hit(),), (hit((1, "transient")), hit(name="j"))]
MARKS: list[dict[int, str]] = [
    {},
    dict.fromkeys(range(4), "finished"),
    dict.fromkeys(range(4), "stopped"),
    {0: "finished", 1: "stopped", 2: "finished", 3: "finished"},
    {0: "finished", 1: "finished"},
]
FAILURES: list[tuple[Failure, ...]] = [
    (),
    (REAL,),
    (LOST,),
    (LOST, REAL),
    (GUARD,),
    (KILLED, LOST),
    (VANISHED,),
    (GONE,),
]
HANG = Hang(99.0, ((3, "n1", 17, "forward", 98.0),), ((0, "n0", 17, "numerics", 97.0), (3, "n1", 17, "forward", 98.0)))


def everything() -> list[Evidence]:
    places = product(
        MARKS,
        HITS,
        FAILURES,
        [{}, {"n0": -9}, {"n1": 1}],
        [{}, {"n0": "silence"}],
        [None, HANG],
        ["", "SIGINT"],
        [False, True],
    )
    return [
        Evidence(4, marks, hits, failures, {"n0": 0, "n1": 1}, agents, lost, hang, stopping, taken)
        for marks, hits, failures, agents, lost, hang, stopping, taken in places
    ]


def expected(seen: Evidence) -> str:
    """The order of the rules, written down a second time."""
    marks = list(seen.marks.values())
    if marks.count("finished") == 4:
        return "finished"
    if seen.hits:
        return "corruption"
    if seen.stopping or len(marks) == 4:
        return "stopped"
    if seen.port_taken and not marks:
        return "port_taken"
    if seen.hang:
        return "hang"
    real = [one for one in seen.failures if not one.is_lost]
    if seen.lost and (not real or real[0].node in seen.lost):
        return "node_lost"
    if -9 in seen.agents.values() and (not real or real[0].exit_code is None):
        return "failed"
    if seen.failures == (GUARD,):
        return "guard_failure"
    if seen.failures and VANISHED not in seen.failures:
        return "failed"
    return "failed" if seen.agents else "unfinished"


def test_every_combination_has_its_outcome() -> None:
    kinds = set()
    for seen in everything():
        outcome = judge(seen)
        kinds.add(outcome.kind)
        # What only lost somebody while a node is lost is that node's; GUARD is such a one as well.
        assert outcome.kind == expected(seen) or (seen.failures == (GUARD,) and seen.lost), (seen, outcome)
        assert (outcome.exit_code == 0) == (outcome.kind == "finished")
        assert outcome.headline
        assert bool(outcome.hits) == (outcome.kind == "corruption")
        if outcome.kind != "corruption":
            assert "corruption" not in outcome.headline
            assert outcome.exit_code not in (160, 3)
    assert kinds == set(OUTCOMES)


def test_a_lost_node_is_why_a_guard_lost_ranks() -> None:
    seen = Evidence(4, failures=(GUARD,), arrival={"n1": 0}, lost={"n0": "silence"})
    assert judge(seen).kind == "node_lost"
    assert judge(replace(seen, lost={})).exit_code == 4


CODES: list[tuple[Evidence, int, str]] = [
    (Evidence(4, hits=(hit((1, "persistent")),)), 160, "rank 1"),
    (Evidence(4, hits=(hit(),)), 3, "unattributed"),
    (Evidence(4, hits=(hit((1, "persistent")), hit(name="j"))), 3, "unattributed"),
    (Evidence(4, stopping="SIGTERM"), 143, "ranks 0, 1, 2, 3"),
    (Evidence(4, stopping="SIGINT", marks=MARKS[2]), 130, "by itself"),
    (Evidence(4, marks=MARKS[2]), 143, "by itself"),
    (Evidence(4, hang=HANG), 124, "n1"),
    (Evidence(4, lost={"n1": "silence"}), 137, "n1 is lost: silence"),
    (Evidence(4, failures=(REAL,)), 7, "rank 1 on n0 ended with exit code 7: ValueError: boom"),
    (Evidence(4, failures=(KILLED,)), 137, "rank 3 on n1 was killed by SIGKILL"),
    (Evidence(4, agents={"n0": -11}), 139, "torchrun's agent on n0 was killed by SIGSEGV"),
    (Evidence(4, agents={"n0": 1}), 1, "before any worker had started"),
    (Evidence(4, failures=(VANISHED,)), 1, "rank 3 ended with exit code 0 without a mark"),
    (Evidence(4, marks={0: "finished"}), 1, "ranks 1, 2, 3 ended with exit code 0 without a mark"),
]


@pytest.mark.parametrize(("seen", "code", "said"), CODES, ids=range(len(CODES)))
def test_exit_codes_and_words(seen: Evidence, code: int, said: str) -> None:
    outcome = judge(seen)
    assert outcome.exit_code == code
    assert said in outcome.headline


RESERVED: list[tuple[Failure, bool, int]] = [
    *((replace(REAL, exit_code=code, type="SystemExit", text=""), True, 1) for code in (2, 3, 4, 124, 130, 143, 160)),
    (replace(REAL, exit_code=2, type="PolicyError"), False, 2),
    (replace(REAL, exit_code=2, type="CheckpointError"), True, 1),
    (replace(REAL, exit_code=2, type="SystemExit"), False, 1),
    (replace(REAL, exit_code=5, type="SystemExit"), True, 5),
    (replace(REAL, exit_code=-2), True, 130),
]


@pytest.mark.parametrize(("failure", "trained", "code"), RESERVED, ids=range(len(RESERVED)))
def test_a_script_cannot_end_with_a_code_that_means_something_else(failure: Failure, trained: bool, code: int) -> None:
    outcome = judge(Evidence(4, failures=(failure,), trained=trained))
    assert (outcome.kind, outcome.exit_code) == ("failed", code)
    told = any("has a meaning of its own" in line for line in outcome.details)
    assert told == (code == 1)


def test_who_left_early_is_told_before_who_lost_it() -> None:
    left = Evidence(4, marks={2: "finished"}, failures=(LOST,))
    assert judge(left).headline.startswith("rank 2 left the job early, with exit code 0; then rank 0 on n0")
    assert "left" not in judge(replace(left, failures=(REAL,))).headline


def test_a_hang_names_who_stands_apart_and_nobody_who_waits() -> None:
    everybody = HANG.all
    said = {
        "; the others wait for rank 3 on n1": HANG,
        "no progress for 99 s": Hang(99.0, (), everybody),
        "; nothing was heard yet of any rank on n2": Hang(99.0, (), everybody, ("n2",)),
    }
    for words, hang in said.items():
        outcome = judge(Evidence(4, hang=hang))
        assert outcome.headline.endswith(words)
        assert outcome.nodes == (("n1",) if hang.behind else hang.silent)
    assert "all ranks stand at the same place" in judge(Evidence(4, hang=Hang(9.0, (), everybody))).details[0]


def named(rank: int, device: str) -> Named:
    return Named(rank, f"node of {device}", device, "persistent")


@pytest.mark.parametrize(
    ("before", "doubted"),
    [
        ([], False),
        ([named(1, "gpu1")], False),  # the same device again: it was cleared, or nobody could act
        ([named(2, "gpu9")], False),
        ([named(1, "gpu9")], True),
        ([named(2, "gpu2"), named(1, "gpu9")], True),
    ],
)
def test_what_stays_with_the_rank_is_no_devices_fault(before: list[Named], doubted: bool) -> None:
    for found in (hit((1, "persistent")), hit((1, "transient"), name="third")):
        blamed = blame([found], {"gpu1": SETTINGS.strikes - 1}, SETTINGS, before)
        assert bool(blamed.doubt) == doubted
        assert bool(blamed.devices) != doubted
        outcome = judge(Evidence(4, hits=(found,)))
        action = decide(outcome, Past(), blamed, SETTINGS)
        assert (action.kind, action.exit_code) == (("stop", 3) if doubted else ("restart", 160))
        assert not doubted or ("gpu9" in action.reason and not action.exclude)


def test_the_cause_comes_first_and_has_lost_nobody() -> None:
    assert cause([], {}) is None
    assert cause([LOST, REAL], {"n0": 0}) == REAL
    early, late = replace(REAL, rank=5, node="n2", order=0), replace(REAL, order=0)
    assert cause([late, early], {"n2": 0, "n0": 1}) == early
    assert cause([replace(late, order=1), replace(late, rank=0, order=0)], {"n0": 0}) == replace(late, rank=0, order=0)
    assert cause([replace(late, time=2.0), replace(late, rank=9, time=1.0)], {}) == replace(late, rank=9, time=1.0)


def test_a_failure_survives_its_file() -> None:
    assert Failure.from_json({**REAL.to_json(), "from the future": 1}) == REAL


def test_ends_in_words_and_numbers() -> None:
    assert [ended(code) for code in (None, 3, -9, -99)] == [
        "disappeared",
        "ended with exit code 3",
        "was killed by SIGKILL",
        "was killed by signal 99",
    ]
    assert [exit_code_of(code) for code in (None, 0, 3, -9)] == [1, 1, 3, 137]
    assert [stop_code(name) for name in ("SIGTERM", "SIGINT", "SIGHUP")] == [143, 130, 129]


# What follows


def outcomes() -> list[Outcome]:
    found: dict[tuple[str, int], Outcome] = {}
    for seen in everything():
        outcome = judge(seen)
        found.setdefault((outcome.kind, outcome.exit_code), outcome)
    return list(found.values())


def follow(outcome: Outcome, past: Past, settings: Settings, stopping: str = "") -> Action:
    return decide(outcome, past, blame(outcome.hits, {}, settings), settings, stopping)


def test_nothing_restarts_for_ever() -> None:
    """From every outcome, repeated: the bounds hold, and with every mix of outcomes the sum of them does."""
    for restarts, recoveries in product((0, 2), (0, 1, 3)):
        settings = replace(SETTINGS, max_restarts=restarts, max_recoveries=recoveries)
        for outcome in outcomes():
            past, count = Past(), 0
            while (action := follow(outcome, past, settings)).kind == "restart":
                past, count = action.past, count + 1
            limit = {
                "finished": 0,
                "stopped": 0,
                "corruption": min(recoveries, 1) if outcome.exit_code == 3 else recoveries,
                "port_taken": PORT_RETRIES,
            }.get(outcome.kind, restarts)
            assert count == limit, outcome
            assert action.exit_code == outcome.exit_code


def test_a_restart_with_suspicion_follows_unattributed_corruption_alone() -> None:
    settings = replace(SETTINGS, max_restarts=1)
    for outcome, past in product(outcomes(), (Past(), Past(recoveries=1), Past(restarts=1), Past(unattributed=1))):
        action = follow(outcome, past, settings)
        assert action.suspicion == (
            action.kind == "restart" and outcome.kind == "corruption" and outcome.exit_code == 3
        )
        if action.kind == "restart":
            assert action.exit_code != 0


def test_who_was_asked_to_stop_starts_nothing() -> None:
    settings = replace(SETTINGS, max_restarts=9)
    for outcome in outcomes():
        action = follow(outcome, Past(), settings, "SIGTERM")
        assert action.kind == "stop"
        assert action.exit_code == (
            0 if outcome.kind == "finished" else 143 if outcome.kind != "stopped" else outcome.exit_code
        )
    again = follow(judge(Evidence(4, hits=(hit(),))), Past(unattributed=1), settings, "SIGTERM")
    assert again.exit_code == 3, "a person must look, whoever stopped it"


def test_a_port_that_was_taken_counts_only_in_a_row() -> None:
    taken, failed = judge(Evidence(4, port_taken=True)), judge(Evidence(4, failures=(REAL,)))
    settings = replace(SETTINGS, max_restarts=1)
    past = follow(taken, Past(), settings).past
    assert past == Past(ports=1)
    assert follow(failed, past, settings).past == Past(restarts=1)


# Blame

BLAMES: list[tuple[Sequence[Hit], dict[str, int], list[str], list[str], list[str]]] = [
    # hits, strikes before -> struck devices, denied devices, denied nodes
    ([], {}, [], [], []),
    ([hit()], {"gpu0": 2}, [], [], []),
    ([hit((1, "persistent"))], {}, [], ["gpu1"], []),
    ([hit((1, "transient"))], {}, ["gpu1"], [], []),
    ([hit((1, "unknown"))], {}, ["gpu1"], [], []),
    ([hit((1, "transient"))], {"gpu1": 1}, ["gpu1"], [], []),
    ([hit((1, "transient"))], {"gpu1": 2}, ["gpu1"], ["gpu1"], []),
    ([hit((1, "transient"))], {"gpu2": 2}, ["gpu1"], [], []),
    ([hit((0, "persistent"), (1, "persistent"))], {}, [], ["gpu0", "gpu1"], ["n0"]),
    ([hit((1, "persistent"), (2, "persistent"))], {}, [], ["gpu1", "gpu2"], []),
    ([hit((0, "persistent"), (1, "transient"))], {}, ["gpu1"], ["gpu0"], []),
    ([hit((0, "persistent"), (1, "transient"))], {"gpu1": 2}, ["gpu1"], ["gpu0", "gpu1"], ["n0"]),
    ([hit((0, "persistent")), hit((1, "persistent"), name="j")], {}, [], ["gpu0", "gpu1"], ["n0"]),
]


@pytest.mark.parametrize(("hits", "before", "struck", "devices", "nodes"), BLAMES, ids=range(len(BLAMES)))
def test_who_is_denied(
    hits: Sequence[Hit], before: dict[str, int], struck: list[str], devices: list[str], nodes: list[str]
) -> None:
    found = blame(hits, before, SETTINGS)
    assert [one.device for _, one in found.strikes] == struck
    assert sorted(found.devices) == devices
    assert sorted(found.nodes) == nodes
    assert set(found.exclude) == {one.node for _, one, _ in found.devices.values()}


def test_scattered_strikes_look_like_software() -> None:
    assert "software" in blame([hit((1, "transient"))], {"gpu2": 1, "gpu4": 1}, SETTINGS).remark
    for before in ({}, {"gpu2": 1}, {"gpu2": 1, "gpu1": 1}, {"gpu2": 2, "gpu4": 1}):
        assert blame([hit((1, "transient"))], before, SETTINGS).remark == ""
    assert blame([hit((1, "persistent"))], {"gpu2": 1, "gpu4": 1, "gpu5": 1}, SETTINGS).remark == ""


def test_who_is_denied_takes_no_part_and_others_do() -> None:
    for hits, before, *_ in BLAMES:
        if not hits:
            continue
        outcome = judge(Evidence(4, hits=tuple(hits)))
        blamed = blame(hits, before, SETTINGS)
        assert decide(outcome, Past(), blamed, SETTINGS).exclude == blamed.exclude
    assert decide(judge(Evidence(4, failures=(REAL,))), Past(), Blame(), SETTINGS).exclude == ()


# Who trains


def test_every_arrangement() -> None:
    states: tuple[Status, ...] = ("ready", "gone", "pending")
    for size, spares, hurry in product((1, 2, 3), ([], ["s0"], ["s0", "s1"]), (False, True)):
        for combination in product((*states, None), repeat=size):
            table: dict[str, Any] = {f"n{place}": state for place, state in enumerate(combination) if state is not None}
            wanted = [f"n{place}" if state is not None else None for place, state in enumerate(combination)]
            found = arrange(wanted, table.__getitem__, spares, hurry)
            pending = sum(state in ("pending", None) for state in combination)
            gone = combination.count("gone") + (pending if hurry else 0)
            assert found.short == max(0, gone - len(spares))
            assert bool(found.pending) == (pending > 0 and not hurry)
            assert bool(found.nodes) == (not found.short and not found.pending)
            if found.nodes:
                assert len(set(found.nodes)) == size
                stay = [node for node, state in zip(wanted, combination, strict=True) if state == "ready"]
                assert [node for node in found.nodes if node in wanted and node in stay] == stay
                for place, (node, state) in enumerate(zip(wanted, combination, strict=True)):
                    assert (found.nodes[place] == node) == (state == "ready")
                assert [node for node in found.nodes if node in spares] == spares[:gone]
