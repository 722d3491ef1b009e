"""The list of runs, searches, the whole of a run and of an incident, exports: whatever is in the tables, and whatever is asked for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from bitwitness.errors import NotFound
from bitwitness.store import queries, tables
from bitwitness.store.database import upsert
from bitwitness.store.queries.running import running
from tests.store.filling import TIME, Filling, names

NOW = datetime(2026, 11, 29, 13, tzinfo=UTC)
HOSTILE = (
    "%", "_", "\\", "100%_\\", "'; DROP TABLE runs; --", '"', "<script>alert(1)</script>", "\0", "\ud800", "é" * 300,
    "\N{RIGHT-TO-LEFT OVERRIDE}x", "a\nb", "x" * 100_000, "/" * 50, "..", "?*[a]", ":name", "%(x)s", "{0}",
)  # fmt: skip


def ago(**past: float) -> str:
    return (NOW - timedelta(**past)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# Runs -----------------------------------------------------------------------------------------------------------------

STATES: list[tuple[str, dict[str, Any]]] = [
    ("training", {"imported": ago(hours=5), "grew": ago(seconds=30), "pace": 0.5}),
    ("training", {"imported": ago(hours=5), "grew": ago(minutes=15), "pace": 60.0}),
    ("training", {"imported": ago(hours=5), "grew": ago(minutes=10)}),
    ("training", {"imported": ago(hours=5), "grew": ago(hours=20), "pace": 5000.0} | {"imported": ago(hours=30)}),
    ("silent", {"imported": ago(hours=5), "grew": ago(minutes=3), "pace": 0.5}),
    ("silent", {"imported": ago(hours=5), "grew": ago(minutes=25), "pace": 60.0}),
    ("silent", {"imported": ago(hours=5), "grew": ago(minutes=20)}),
    ("silent", {"imported": ago(hours=5), "grew": ago(hours=5), "supervision": "session"}),
    ("unknown", {"imported": ago(seconds=5), "grew": ago(seconds=5), "supervision": "session"}),
    ("unknown", {"imported": ago(hours=5), "grew": ago(hours=5)}),
    ("unknown", {"imported": ago(hours=5)}),
    ("finished", {"outcome": "finished", "grew": ago(seconds=1)}),
    ("finished", {"finished": True, "grew": ago(seconds=1), "imported": ago(hours=1)}),
    ("stopped", {"outcome": "stopped"}),
    ("failed", {"outcome": "corruption", "exit_code": 3, "reason": "a person must look"}),
    ("failed", {"outcome": "hang", "grew": ago(seconds=1), "imported": ago(hours=1)}),
]


def test_state_of_a_run(filling: Filling) -> None:
    for place, (_, columns) in enumerate(STATES):
        filling.run(f"job-{place:02d}", **columns)
    page = queries.runs_page(filling.database, now=NOW)
    found = {row.name: row for row in page.runs}
    assert {place: found[f"job-{place:02d}"].state for place in range(len(STATES))} == {
        place: state for place, (state, _) in enumerate(STATES)
    }
    assert dict(page.states) == {name: sum(state == name for state, _ in STATES) for name in page.states}
    assert found["job-14"].state_text == "It has failed (exit code 3): a person must look."
    for state in page.states:
        only = queries.runs_page(filling.database, state=state, now=NOW)
        assert {row.state for row in only.runs} == {state}
        assert only.total == page.states[state]
        assert only.states == page.states, "whatever is selected"


def test_nobody_is_silent_when_nobody_looks(filling: Filling) -> None:
    grew = {"imported": ago(hours=5), "grew": ago(hours=1), "pace": 0.5}
    filling.run("went on", **grew)
    filling.run("ended", **grew, outcome="finished")
    for looked, state in ((ago(minutes=1), "silent"), (ago(minutes=10), "unknown")):
        with filling.database.write() as connection:
            upsert(connection, tables.meta, [{"name": "round", "text": looked}])
        page = queries.runs_page(filling.database, now=NOW)
        assert {row.name: row.state for row in page.runs} == {"went on": state, "ended": "finished"}


def test_those_that_need_a_person_come_first_then_those_that_train_then_the_newest(filling: Filling) -> None:
    filling.run("old", started=ago(days=9))
    filling.run("new", started=ago(days=1))
    filling.run("trains", started=ago(days=5), imported=ago(hours=5), grew=ago(seconds=1))
    filling.run("open", started=ago(days=8), open=1, outcome="finished")
    assert names(queries.runs_page(filling.database, now=NOW).runs) == ["open", "trains", "new", "old"]


def test_parts_of_the_list_have_every_run_once(filling: Filling) -> None:
    for place in range(23):
        filling.run(f"job-{place:02d}", started=TIME)
    pages = [queries.runs_page(filling.database, page=page, size=5, now=NOW) for page in range(1, 6)]
    assert [len(page.runs) for page in pages] == [5, 5, 5, 5, 3]
    assert len({row.key for page in pages for row in page.runs}) == 23
    assert queries.runs_page(filling.database, page=99, size=5, now=NOW) == pages[-1]
    assert queries.runs_page(filling.database, page=-1, size=5, now=NOW) == pages[0]


def test_what_is_searched_for_means_itself_and_nothing_else(filling: Filling) -> None:
    stored = [text.replace("\0", "?").encode("utf-8", "replace").decode()[:150] for text in HOSTILE]
    for place, text in enumerate(stored):
        filling.run(f"{place} {text} after", job=text, path="")
    for text in stored:
        found = queries.runs_page(filling.database, query=text, size=500, now=NOW)
        expected = {place + 1 for place, other in enumerate(stored) if text in f"{place} {other} after"}
        assert {row.key for row in found.runs} == expected, repr(text[:40])
        assert found.page == found.pages == 1


def test_nothing_that_is_asked_for_is_an_error_of_the_database(filling: Filling) -> None:
    run = filling.run()
    for text in HOSTILE:
        queries.runs_page(filling.database, query=text, now=NOW)
        assert queries.runs_page(filling.database, state=text, now=NOW).total == 0
        assert queries.fleet_page(filling.database, query=text, state=text, now=NOW).total == 0
        assert queries.history(filling.database, node=f"x{text}", incident=text, who=text) == ()
        asked: tuple[Callable[[], object], ...] = (
            partial(queries.node_page, filling.database, text),
            partial(queries.device_page, filling.database, text),
            partial(queries.find_incident, filling.database, text),
            partial(queries.incident_page, filling.database, run, text),
            partial(queries.export, filling.database, text),
        )
        for ask in asked:
            with pytest.raises(NotFound) as told:
                ask()
            assert 20 < len(str(told.value)) < 300
    for key in (10**30, -1, 2**63, 0):
        with pytest.raises(NotFound):
            queries.run_page(filling.database, key)


def test_a_search_is_of_name_path_id_and_job_in_any_case(filling: Filling) -> None:
    filling.run("Alpha", path="/data/one", run="ffee", job="slurm:77")
    filling.run("beta")
    for text in ("alph", "ALPHA", "data/ONE", "FFee", "SLURM:77"):
        assert names(queries.runs_page(filling.database, query=text, now=NOW).runs) == ["Alpha"]


def test_open_is_what_nobody_has_judged_and_no_person_has_acted_upon_wherever_it_is_told(filling: Filling) -> None:
    run, who = filling.run(open=2), [(1, "node-a", "GPU-1")]
    for place, judgement in enumerate(("", "confirmed", "false alarm", "drill")):
        filling.incident(run, f"named-{place}", named=who, judgement=judgement)
        filling.incident(run, f"nobody-{place}", candidates=who, judgement=judgement)
    for place in range(250):
        late = f"2026-11-29T12:{place // 60:02d}:{place % 60:02d}.500Z"
        filling.incident(run, f"acted-{place}", named=who, time=late, acted=True)
    page = queries.runs_page(filling.database, now=NOW)
    assert (page.attributed, page.unattributed) == (1, 1)
    assert sorted(one.id for one in page.incidents) == ["named-0", "nobody-0"], "whatever is newer hides none"
    of_run = queries.run_page(filling.database, run, now=NOW)
    assert sorted(one.id for one in of_run.incidents if one.open) == ["named-0", "nobody-0"]
    assert len(of_run.incidents) == 202
    measured = running(filling.database, now=NOW)
    assert measured.open == measured.runs[0].open == {"attributed": 1, "unattributed": 1}
    assert all(one.open for one in page.incidents)


def test_many_that_name_somebody_hide_none_that_name_nobody(filling: Filling) -> None:
    run = filling.run()
    filling.incident(run, "nobody", time="2026-01-01T00:00:00.000Z")
    for place in range(30):
        filling.incident(run, f"named-{place}", named=[(1, "node-a", "GPU-1")])
    page = queries.runs_page(filling.database, now=NOW)
    assert (page.attributed, page.unattributed, len(page.incidents)) == (30, 1, 21)
    assert page.incidents[-1].id == "nobody"


# Searching ------------------------------------------------------------------------------------------------------------


def test_a_search_finds_runs_by_what_was_in_them(filling: Filling) -> None:
    first, second, third = (filling.run(f"job-{name}", path=f"/{name}") for name in "xyz")
    filling.stays(first, (0, "rack1-node7", "GPU-aa_1"), (1, "rack1-node8", "GPU-bb"))
    filling.stays(second, (0, "rack2-node7", "GPU-aa%1"), current=False)
    filling.node("rack1-node7", "rack1-node8", "rack2-node7")
    filling.incident(third, "20261129T120000Z-abc", named=[(0, "gone-node", "GPU-gone")])
    wanted = {
        "node7": ({first, second}, [("node", "rack1-node7"), ("node", "rack2-node7")]),
        "RACK1-NODE8": ({first}, [("node", "rack1-node8")]),
        "GPU-aa": ({first, second}, [("device", "GPU-aa%1"), ("device", "GPU-aa_1")]),
        "aa_1": ({first}, [("device", "GPU-aa_1")]),
        "a%1": ({second}, [("device", "GPU-aa%1")]),
        "GPU-bb": ({first}, [("device", "GPU-bb")]),
        "T120000Z-ab": ({third}, [("incident", "20261129T120000Z-abc")]),
        "gone-node": ({third}, []),
        "GPU-gone": ({third}, []),
        "job-": ({first, second, third}, []),
        "node9": (set(), []),
    }
    for text, (runs, found) in wanted.items():
        page = queries.runs_page(filling.database, query=text, now=NOW)
        assert ({row.key for row in page.runs}, page.total) == (runs, len(runs)), text
        assert [(one.kind, one.name) for one in page.found] == found, text
    assert queries.runs_page(filling.database, now=NOW).found == ()
    (hit,) = queries.runs_page(filling.database, query="-abc", now=NOW).found
    assert hit.run == third


# One run --------------------------------------------------------------------------------------------------------------


def test_coverage_counts_ranks_of_which_nothing_is_on_record(filling: Filling) -> None:
    run = filling.run(world_size=8, step=9, policy={"audit": "gradients"})
    filling.add(tables.coverage, {"run_id": run, "check": "numerics", "passed": 40, "all": 40, "last": -1})
    covered = {one.check: one for one in queries.run_page(filling.database, run, now=NOW).run.coverage}
    assert list(covered) == ["numerics", "replay", "replicas"]
    assert (covered["numerics"].passed, covered["numerics"].all) == (40, 80)
    assert (covered["replay"].passed, covered["replay"].all, covered["replay"].last) == (0, 80, -1)


def test_the_page_of_a_run_has_everything_on_one_axis(filling: Filling) -> None:
    run = filling.run("job", policy={"audit": "off", "audit_every": 7}, limits=["two nodes"], checkpoint=4)
    filling.add(
        tables.steps, {"run_id": run, "first": 0, "last": 4, "count": 5, "loss": 2.0, "loss_low": 1.0, "loss_high": 3.0}
    )
    filling.add(tables.costs, {"run_id": run, "check": "numerics", "seconds": 1.0, "steps": 10, "wall": 100.0})
    filling.add(tables.costs, {"run_id": run, "check": "guard", "seconds": 1.0, "steps": 10, "wall": 0.0})
    filling.add(tables.checkpoints, {"run_id": run, "step": 4, "saved": TIME, "passed": {"replay": 3}, "present": True})
    filling.add(
        tables.checkpoints,
        {"run_id": run, "step": 8, "saved": TIME, "doubt": "incident x: after step 3", "present": True},
    )
    for place, kind in enumerate(("start", "supervision", "restart", "action")):
        filling.add(
            tables.marks, {"run_id": run, "origin": kind, "step": place, "kind": kind, "text": kind, "time": TIME}
        )
    filling.add(
        tables.marks, {"run_id": run, "origin": "where?", "kind": "start", "text": "nobody knows at which step"}
    )
    who = [(1, "node-a", "GPU-1")]
    filling.incident(run, "named", named=who, step=5)
    filling.incident(run, "nobody", candidates=who, step=6)
    filling.incident(run, "false", named=who, step=7, judgement="false alarm")
    filling.incident(run, "drill", named=who, step=8, judgement="drill")
    filling.stays(run, (0, "node-a", "GPU-0"), (1, "node-a", "GPU-1"))
    filling.add(
        tables.problems,
        {"place": "1", "run_id": run, "path": "journal/x", "text": "a torn line", "time": TIME, "lines": 1},
    )
    filling.quarantine(run, 0, "strike", "GPU-1", incident="named", node="node-a")
    page = queries.run_page(filling.database, run, now=NOW)
    assert [(one.step, one.kind) for one in page.marks] == [
        (0, "start"), (2, "restart"), (4, "checkpoint"), (5, "attributed"), (6, "unattributed"), (7, "false alarm"),
        (8, "checkpoint"), (8, "drill"),
    ]  # fmt: skip
    assert {one.link for one in page.marks if one.link} == {"named", "nobody", "false", "drill"}
    assert (page.series.first, page.series.loss) == ((0,), (2.0,))
    assert [(one.check, one.share) for one in page.costs] == [("numerics", 0.01), ("guard", None)]
    assert [(one.step, one.doubt != "") for one in page.checkpoints] == [(8, True), (4, False)]
    assert [(one.rank, one.device) for one in page.placement] == [(0, "GPU-0"), (1, "GPU-1")]
    assert page.policy["audit_every"] == 7
    assert (page.limits, page.problems[0].lines) == (("two nodes",), 1)
    assert [(one.source, one.what) for one in page.history] == [("quarantine", "strike")]
    assert len(page.incidents) == 4


def test_no_page_reads_observations_or_asks_more_often_where_there_is_more(filling: Filling) -> None:
    database, sent = filling.database, list[str]()

    def hear(connection: Any, cursor: Any, statement: str, *rest: Any) -> None:
        sent.append(statement)

    def pages() -> int:
        sent.clear()
        queries.runs_page(database)
        queries.run_page(database, 1)
        queries.incident_page(database, 1, "i-0")
        queries.node_page(database, "node-a")
        queries.device_page(database, "GPU-0")
        queries.fleet_page(database)
        queries.drills_page(database)
        queries.history(database)
        return len(sent)

    def more(many: int) -> None:
        for place in range(many):
            run = filling.run(policy={"audit": "gradients"})
            for number in range(place % 4 + 1):
                who = [(0, "node-a", "GPU-0")]
                filling.incident(
                    run, f"i-{number}", named=who if number % 2 == 0 else (), candidates=who if number % 2 else ()
                )
            filling.stays(run, (0, "node-a", "GPU-0"))
            filling.quarantine(run, 0, "clear", "GPU-0", time="2026-11-30T00:00:00.000Z")
            filling.ledger(run, "replay", 0, (0, 3, "passed"))
            filling.add(tables.drills, {"run_id": run, "outcome": "caught"})

    more(1)
    sa.event.listen(database.engine, "before_cursor_execute", hear)
    try:
        few = pages()
        more(20)
        assert pages() == few
        assert not [
            one for one in sent if "observations AS" in one or "FROM observations" in one or "JOIN observations" in one
        ]
        lists = [one for one in sent if one.lstrip().startswith("SELECT") and "LIMIT" not in one.upper()]
        bounded = ("IN (", "count(*)", "max(", "sum(", "GROUP BY", "run_id = ", "meta", ".id = ", "incident_id = ")
        assert not [one for one in lists if not any(mark in one for mark in bounded)]
    finally:
        sa.event.remove(database.engine, "before_cursor_execute", hear)


# One incident ---------------------------------------------------------------------------------------------------------


def test_an_unattributed_incident_names_nobody_whatever_is_on_record(filling: Filling) -> None:
    run = filling.run()
    who = [(1, "node-a", "GPU-1")]
    filling.incident(run, "lies", named=who, candidates=[(2, "node-b", "GPU-2")], status="unattributed")
    filling.stays(run, *who)
    page = queries.incident_page(filling.database, run, "lies", now=NOW)
    row = page.incident
    assert (row.status, row.ranks, row.nodes, row.devices) == ("unattributed", (), (), ())
    assert row.candidates == (2,)
    assert queries.node_page(filling.database, "node-a", now=NOW).strikes == ()
    assert all(one.state != "suspected" for one in queries.fleet_page(filling.database, now=NOW).nodes)


def test_an_incident_with_what_it_was_decided_from_and_what_was_done(filling: Filling) -> None:
    run = filling.run("job")
    key = filling.incident(
        run, "i-7", named=[(4, "node-c", "GPU-4")], step=11, window_first=10, window_last=11, world_size=8, nodes=3,
        notes=["evidence could not be saved"], files={"micro.pt": 12}, reason="rank 4 alone differs",
    )  # fmt: skip
    seen = {"check": "replay", "step": 11, "rank": 4, "place": "witness", "value": "ff", "repeats": ["ff", "fe"], "owner": 2, "micro": 0, "detail": {"differs": ["w"]}}  # fmt: skip
    place = {"rank": 4, "node": "node-c", "device": "GPU-4", "slot": 3, "model": "H200", "pod": "ns/pod"}
    broken = [7, {"rank": "x", "step": None}, None]
    filling.add(tables.evidence, {"incident_id": key, "observations": [seen, *broken], "placement": [place, *broken]})
    filling.add(tables.actions, {"incident_id": key, "run_id": run, "at": 0, "time": TIME, "action": "quarantined", "text": "GPU-4", "record": {"node": "node-c"}})  # fmt: skip
    filling.add(tables.actions, {"incident_id": key, "run_id": run, "at": 9, "time": "2026-11-30T00:00:00.000Z", "action": "judged", "who": "ann@x", "record": {"judgement": "confirmed"}})  # fmt: skip
    for step, more in ((4, {}), (8, {"doubt": "x"}), (10, {"present": False}), (11, {}), (12, {})):
        filling.add(tables.checkpoints, {"run_id": run, "step": step, "present": True} | more)
    controller = filling.controller()
    filling.proposal(
        controller, 7, "node-c", status="held", hold="approval", waits=True, signals=["Xid 48"], devices=["GPU-4"]
    )
    filling.audit(controller, 1, "proposed", incident="i-7", node="node-c", time="2026-11-29T12:00:01.000Z")
    page = queries.incident_page(filling.database, run, "i-7", now=NOW)
    first = page.observations[0]
    assert (first.owner, first.repeats, first.detail) == (2, ("ff", "fe"), {"differs": ["w"]})
    assert len(page.observations) == 2, "what is no observation is left out"
    assert [(one.rank, one.slot, one.model, one.pod) for one in page.placement] == [(4, 3, "H200", "ns/pod")]
    assert page.checkpoint == 11, "that of step 11 holds the updates up to step 10, at which the check had passed"
    assert (page.world_size, page.nodes) == (8, 3), "then, wherever its run is now"
    assert (page.world_size, page.notes, dict(page.files)) == (8, ("evidence could not be saved",), {"micro.pt": 12})
    assert [(one.source, one.what) for one in page.history] == [
        ("incident", "quarantined"),
        ("fleet", "proposed"),
        ("incident", "judged"),
    ]
    assert page.incident.action == "drain: waits for approval"
    assert (page.proposals[0].waits, page.proposals[0].controller, page.proposals[0].signals) == (
        True,
        controller,
        ("Xid 48",),
    )
    assert queries.find_incident(filling.database, "i-7") == [run]


def test_an_incident_of_which_only_the_rollup_is_left(filling: Filling) -> None:
    run = filling.run()
    filling.incident(run, "old", named=[(3, "node-b", "GPU-3")], pruned=True)
    page = queries.incident_page(filling.database, run, "old", now=NOW)
    assert (page.pruned, page.observations) == (True, ())
    assert [(one.rank, one.node, one.device) for one in page.placement] == [(3, "node-b", "GPU-3")]
    assert page.checkpoint == -1


def test_what_is_not_there_is_told_by_its_name(filling: Filling) -> None:
    run = filling.run("job")
    with pytest.raises(NotFound, match="there is no run 99 in this database"):
        queries.run_page(filling.database, 99)
    with pytest.raises(NotFound, match="run 'job' has no incident 'nope'"):
        queries.incident_page(filling.database, run, "nope")
    with pytest.raises(NotFound, match="there is no incident 'nope'"):
        queries.find_incident(filling.database, "nope")
    with pytest.raises(NotFound, match="there is nothing about a device 'GPU-x'"):
        queries.device_page(filling.database, "GPU-x")


# Exports, history, change ---------------------------------------------------------------------------------------------


def test_an_export_has_every_row_once_and_reads_them_in_parts(filling: Filling) -> None:
    first, second = filling.run("a"), filling.run("b")
    rows = [
        {"run_id": run, "rank": rank, "at": at, "check": "replay", "step": at, "repeats": ["x"], "owner": None}
        for run in (first, second) for rank in range(3) for at in range(900)
    ]  # fmt: skip
    with filling.database.write() as connection:
        connection.execute(sa.insert(tables.observations), rows)
    columns, found = queries.export(filling.database, "observations")
    one = next(found)
    assert dict(zip(columns, one, strict=True)) | {"repeats": '["x"]', "owner": None, "run": "a"} == dict(
        zip(columns, one, strict=True)
    )
    place = {name: columns.index(name) for name in ("run", "rank", "step")}
    got = [tuple(row[place[name]] for name in ("run", "rank", "step")) for row in (one, *found)]
    assert got == [(run, rank, at) for run in "ab" for rank in range(3) for at in range(900)]
    assert len(list(queries.export(filling.database, "observations", run=second)[1])) == 2700
    with pytest.raises(NotFound, match="there is no run 99"):
        queries.export(filling.database, "observations", run=99)
    with pytest.raises(NotFound, match="audit is not of one run"):
        queries.export(filling.database, "audit", run=first)


def test_every_table_can_be_had(filling: Filling) -> None:
    run = filling.run("job", cost=0.5)
    filling.incident(run, "i-1", named=[(10, "node-b", "GPU-3"), (9, "node-b", "GPU-2")], candidates=[(1, "n", "d")])
    filling.incident(
        run, "i-2", candidates=[(2, "n", "d"), (11, "n", "d")], named=[(5, "n", "d")], status="unattributed"
    )
    filling.ledger(run, "replay", 0, (0, 3, "passed"), (4, 4, "failed"))
    filling.add(tables.checkpoints, {"run_id": run, "step": 4, "passed": {"replay": 3}})
    filling.add(tables.drills, {"run_id": run, "spec": "a fault", "outcome": "missed"})
    filling.add(tables.observations, {"run_id": run, "rank": 0, "at": 0})
    filling.audit(filling.controller(), 1, "held")
    filling.node("node-b")
    for name in queries.EXPORTS:
        columns, rows = queries.export(filling.database, name)
        found = [dict(zip(columns, row, strict=True)) for row in rows]
        assert found, name
        assert all(isinstance(value, str | int | float | None) for row in found for value in row.values())
        if name == "incidents":
            assert [row["named_ranks"] for row in found] == ["9; 10", ""]
            assert [row["candidate_ranks"] for row in found] == ["1", "2; 11"]
            assert found[0]["named_nodes"] == "node-b"
        if name == "runs":
            assert (found[0]["state"], found[0]["cost"]) == ("unknown", 0.5)


def test_history_is_of_all_sources_newest_first(filling: Filling) -> None:
    run, controller = filling.run(), filling.controller()
    key = filling.incident(run, "i-1", named=[(1, "node-a", "GPU-1")])
    filling.audit(controller, 1, "held", node="node-a", incident="i-1", time="2026-11-29T12:00:03.000Z")
    filling.quarantine(run, 0, "deny node", "node-a", incident="i-1", time="2026-11-29T12:00:02.000Z")
    filling.add(
        tables.actions,
        {
            "incident_id": key,
            "run_id": run,
            "at": 0,
            "time": "2026-11-29T12:00:04.000Z",
            "action": "judged",
            "who": "ann@x",
        },
    )
    every = queries.history(filling.database)
    assert [one.what for one in every] == ["judged", "held", "deny node"]
    assert [one.what for one in queries.history(filling.database, node="node-a")] == ["held", "deny node"]
    assert [one.what for one in queries.history(filling.database, who="ann@x")] == ["judged"]
    assert queries.history(filling.database, incident="i-1") == every
    assert [queries.history(filling.database, page=page, size=1) for page in (1, 2, 3, 4)] == [
        every[:1],
        every[1:2],
        every[2:],
        (),
    ]


def test_change_is_the_counter_of_the_database(filling: Filling) -> None:
    before = queries.change(filling.database)
    with filling.database.write() as connection:
        connection.execute(sa.update(tables.meta).where(tables.meta.c.name == "change").values(number=before + 5))
    assert queries.change(filling.database) == before + 5
