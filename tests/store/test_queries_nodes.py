"""Nodes, devices, the fleet and drills: who is said to be suspected, what counts, and what came of faults that were injected."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bitwitness.errors import NotFound
from bitwitness.store import queries, tables
from bitwitness.store.pages import NodeRow, StrikeRow
from tests.store.filling import TIME, Filling, names

NOW = datetime(2026, 11, 29, 13, tzinfo=UTC)
LATER = "2026-11-29T12:30:00.000Z"
WHO = (1, "node-a", "GPU-1")


def node(filling: Filling, name: str = "node-a") -> NodeRow:
    """A node as its page has it, which is as the list of all has it."""
    row = queries.node_page(filling.database, name, now=NOW).row
    assert row is not None
    assert [one for one in queries.fleet_page(filling.database, now=NOW).nodes if one.name == name] == [row]
    return row


def strike(filling: Filling, device: str = "GPU-1") -> StrikeRow:
    """The only one of a device, as its page and that of its node have it."""
    by_device = queries.device_page(filling.database, device, now=NOW).strikes
    assert len(by_device) == 1
    assert by_device == queries.node_page(filling.database, by_device[0].node, now=NOW).strikes
    return by_device[0]


# What counts ----------------------------------------------------------------------------------------------------------


def test_who_was_named_is_suspected_until_that_is_answered(filling: Filling) -> None:
    run = filling.run("job")
    filling.node("node-a")
    filling.incident(run, "i-1", named=[WHO], persistence="transient")
    assert (node(filling).state, node(filling).strikes, strike(filling).counts) == ("suspected", 1, True)
    assert strike(filling).persistence == "transient"
    filling.quarantine(run, 0, "clear", "node-a", time=LATER)
    assert strike(filling).counts, "clearing a node clears no device: it computes wrongly in any node"
    filling.quarantine(run, 1, "clear", "GPU-1", time="2026-11-29T11:00:00.000Z")
    assert strike(filling).counts, "that was before"
    filling.quarantine(filling.run("other"), 0, "clear", "GPU-1", time=LATER)
    assert strike(filling).counts, "that was in another run"
    filling.quarantine(run, 2, "clear", "GPU-1", time=LATER, who="ann@login", reason="exchanged")
    assert (strike(filling).counts, strike(filling).cleared) == (False, f"cleared by ann@login at {LATER}: exchanged")
    assert (node(filling).state, node(filling).strikes) == ("unknown", 0)


def test_what_was_cleared_is_told_by_the_order_of_the_log_whatever_the_clocks_say(filling: Filling) -> None:
    run = filling.run()
    filling.incident(run, "i-1", named=[WHO])
    filling.quarantine(run, 0, "clear", "GPU-1", time="2026-12-24T00:00:00.000Z")
    filling.quarantine(run, 1, "strike", "GPU-1", incident="i-1", time="2026-11-29T12:00:01.000Z")
    assert strike(filling).counts, "it was cleared before, by a clock that is ahead"
    filling.quarantine(run, 2, "clear", "GPU-1", time="2026-01-01T00:00:00.000Z")
    assert not strike(filling).counts, "it was cleared since, by a clock that is behind"


def test_where_the_fleet_has_an_account_its_clear_decides(filling: Filling) -> None:
    run, controller = filling.run(), filling.controller()
    filling.incident(run, "i-1", named=[WHO])
    filling.add(
        tables.namings,
        {"controller_id": controller, "number": 1, "incident": "i-1", "device": "GPU-1", "node": "node-a"},
    )
    filling.quarantine(run, 0, "clear", "GPU-1", time=LATER)
    assert strike(filling).counts
    with filling.database.write() as connection:
        connection.execute(tables.namings.update().values(cleared=LATER))
    assert (strike(filling).counts, strike(filling).cleared) == (False, f"cleared in the fleet at {LATER}")


@pytest.mark.parametrize(
    ("judgement", "more", "text"),
    [
        ("drill", {}, "a drill: the fault was injected on purpose"),
        ("false alarm", {"judged": "false alarm", "judged_by": "ann", "judged_at": LATER, "judged_why": "a bug"}, f"called a false alarm by ann at {LATER}: a bug"),
    ],
)  # fmt: skip
def test_drills_and_false_alarms_stay_visible_and_do_not_count(
    filling: Filling, judgement: str, more: dict[str, Any], text: str
) -> None:
    run = filling.run()
    filling.node("node-a")
    filling.incident(run, "i-1", named=[WHO], judgement=judgement, **more)
    found = strike(filling)
    assert (found.counts, found.cleared, found.judgement) == (False, text, judgement)
    assert (node(filling).state, node(filling).strikes) == ("unknown", 0)


def test_a_candidate_is_involved_and_never_suspected(filling: Filling) -> None:
    run = filling.run(imported="2026-11-29T11:00:00.000Z", grew="2026-11-29T12:59:59.000Z", pace=0.5)
    others = [(rank, f"node-{rank}", f"GPU-{rank}") for rank in range(2, 5)]
    filling.stays(run, WHO, *others)
    filling.node("node-a", *(name for _, name, _ in others))
    for place in range(3):
        filling.incident(run, f"i-{place}", candidates=[WHO, *others])
    filling.incident(run, "drill", candidates=[WHO], judgement="drill")
    found = node(filling)
    assert (found.state, found.strikes, found.involved) == ("in service", 0, 3)
    assert "which name nobody" in found.state_text
    page = queries.node_page(filling.database, "node-a", now=NOW)
    assert page.strikes == ()
    assert [one.id for one in page.involved] == ["drill", "i-2", "i-1", "i-0"]
    assert {one.status for one in page.involved} == {"unattributed"}
    states = queries.fleet_page(filling.database, now=NOW).states
    assert {state: many for state, many in states.items() if many} == {"in service": 4}


# Devices, whatever they are called ------------------------------------------------------------------------------------


def test_a_device_is_followed_through_renames_and_other_ranks(filling: Filling) -> None:
    first, second, third = (filling.run(name) for name in ("first", "second", "third"))
    filling.stays(first, (3, "node-a", "GPU-1"), last="2026-11-27T00:00:00.000Z")
    filling.stays(second, (5, "node-a-renamed", "GPU-1"), last="2026-11-28T00:00:00.000Z")
    filling.stays(third, (0, "node-z", "GPU-1"), last="2026-11-29T00:00:00.000Z")
    filling.stays(third, (0, "node-a", "GPU-2"))
    filling.node("node-a", "node-a-renamed", "node-z")
    filling.incident(first, "i-1", named=[(3, "node-a", "GPU-1")], time="2026-11-27T00:00:00.000Z")
    filling.incident(second, "i-2", named=[(5, "node-a-renamed", "GPU-1")], time="2026-11-28T00:00:00.000Z")
    page = queries.device_page(filling.database, "GPU-1", now=NOW)
    assert [(one.run_name, one.node, one.rank) for one in page.stays] == [
        ("third", "node-z", 0), ("second", "node-a-renamed", 5), ("first", "node-a", 3),
    ]  # fmt: skip
    assert [(one.incident, one.rank, one.node) for one in page.strikes] == [
        ("i-2", 5, "node-a-renamed"),
        ("i-1", 3, "node-a"),
    ]
    assert page.row is not None
    assert page.row.name == "node-z"
    assert [one.incident for one in queries.node_page(filling.database, "node-a", now=NOW).strikes] == ["i-1"]
    assert queries.device_page(filling.database, "GPU-2", now=NOW).strikes == ()


def test_a_node_answers_for_the_devices_that_are_in_it_now(filling: Filling) -> None:
    old, new = filling.run("old"), filling.run("new", imported=TIME, grew="2026-11-29T12:59:59.000Z", pace=0.5)
    filling.node("n1", "n2")
    filling.stays(old, (0, "n1", "GPU-n1-0"), (1, "n2", "GPU-n2-0"), last="2026-11-28T00:00:00.000Z")
    filling.incident(old, "i-1", named=[(0, "n1", "GPU-n1-0")], time="2026-11-28T00:00:00.000Z")
    assert (node(filling, "n1").state, node(filling, "n2").state) == ("suspected", "unknown")
    filling.stays(new, (0, "n1", "GPU-new"), (1, "n2", "GPU-n1-0"))
    assert node(filling, "n2").state_text == "Holds GPU-n1-0, named by 1 incident on n1: nothing is proposed."
    assert (node(filling, "n2").state, node(filling, "n2").strikes) == ("suspected", 1)
    left = "GPU-n1-0, which 1 incident named here, has left: it was last seen in n2."
    assert node(filling, "n1").state_text == f"1 run trains on it now. {left}"
    assert (node(filling, "n1").state, node(filling, "n1").strikes) == ("in service", 0)
    for name in ("n1", "n2"):
        (one,) = queries.node_page(filling.database, name, now=NOW).strikes
        assert (one.device, one.node, one.now, one.counts) == ("GPU-n1-0", "n1", "n2", True)
    device = queries.device_page(filling.database, "GPU-n1-0", now=NOW)
    assert device.row == node(filling, "n2")
    assert queries.device_page(filling.database, "GPU-new", now=NOW).row == node(filling, "n1")
    _, rows = queries.export(filling.database, "nodes")
    assert {row[0]: row[4] for row in rows} == {"n1": 0, "n2": 1}
    filling.quarantine(old, 0, "clear", "GPU-n1-0", time=LATER)
    assert {node(filling, name).state for name in ("n1", "n2")} == {"in service"}
    assert "has left" not in node(filling, "n1").state_text


def test_a_node_that_is_called_otherwise_keeps_what_its_devices_have(filling: Filling) -> None:
    run = filling.run()
    filling.node("n1", "n1-new")
    filling.incident(run, "i-1", named=[(0, "n1", "GPU-a"), (1, "n1", "GPU-b")])
    filling.incident(run, "i-2", named=[(0, "n1", "GPU-a")])
    filling.stays(run, (0, "n1-new", "GPU-a"), (1, "n1-new", "GPU-b"), last=LATER)
    found = node(filling, "n1-new")
    assert (found.state, found.strikes) == ("suspected", 2)
    assert found.state_text.startswith(
        "Holds GPU-a, named by 2 incidents on n1, and holds GPU-b, named by 1 incident on n1"
    )
    assert (node(filling, "n1").state, node(filling, "n1").strikes) == ("unknown", 0)


def test_a_device_without_an_identity_stays_with_the_name_of_its_node(filling: Filling) -> None:
    run = filling.run()
    filling.node("n1", "n2")
    for place, device in enumerate(("n1/cpu-0", "")):
        filling.stays(run, (place, "n1", device), last=TIME)
        filling.stays(run, (place, "n2", device), last=LATER)
        filling.incident(run, f"i-{place}", named=[(place, "n1", device)])
    assert (node(filling, "n1").strikes, node(filling, "n2").strikes) == (2, 0)
    assert node(filling, "n1").state_text == "Named by 2 incidents: nothing is proposed."


def test_a_device_that_has_left_its_job_and_was_seen_nowhere_else_is_still_in_its_node(filling: Filling) -> None:
    run = filling.run()
    filling.node("n1", "spare")
    filling.stays(run, (0, "n1", "GPU-1"), current=False)
    filling.stays(run, (0, "spare", "GPU-s"), last=LATER)
    filling.incident(run, "i-1", named=[(0, "n1", "GPU-1")])
    assert (node(filling, "n1").state, node(filling, "spare").state) == ("suspected", "unknown")


def test_quarantines_that_hold_for_a_node_are_those_of_its_devices_too(filling: Filling) -> None:
    run, other = filling.run("job"), filling.run("other")
    filling.stays(other, (0, "node-b", "GPU-1"))
    filling.add(
        tables.denied,
        {
            "run_id": run,
            "kind": "device",
            "name": "GPU-1",
            "since": TIME,
            "reason": "wrong",
            "incident": "i-1",
            "node": "node-a",
        },
    )
    filling.add(tables.denied, {"run_id": other, "kind": "node", "name": "node-a", "since": LATER, "reason": "by hand"})
    device = f"run job denies device GPU-1 (then on node-a) since {TIME}: wrong (incident i-1)"
    assert queries.device_page(filling.database, "GPU-1", now=NOW).denied == (device,)
    assert queries.node_page(filling.database, "node-b", now=NOW).denied == (device,)
    assert queries.node_page(filling.database, "node-a", now=NOW).denied == (
        f"run other denies node node-a since {LATER}: by hand",
    ), "the device has left"
    assert (node(filling).state, node(filling).quarantined) == ("held", 1)
    assert (node(filling, "node-b").state, node(filling, "node-b").quarantined) == ("held", 1)


# The fleet ------------------------------------------------------------------------------------------------------------


def test_the_fleet_has_what_waits_first_and_counts_all(filling: Filling) -> None:
    run, controller = (
        filling.run(),
        filling.controller(todo=["look at node-e", "look at node-e"], mode="act", cluster="slurm"),
    )
    statuses: list[tuple[str, dict[str, Any]]] = [
        ("node-a", {"status": "held", "hold": "approval", "waits": True}),
        ("node-b", {"status": "acting"}),
        ("node-c", {"status": "done", "final": True}),
        ("node-d", {"status": "held", "hold": "budget", "why": "two nodes an hour"}),
        ("node-e", {"status": "unclear"}),
        ("node-f", {"status": "done", "final": True}),
    ]
    for place, (name, columns) in enumerate(statuses, 1):
        filling.proposal(controller, place, name, **columns)
        filling.incident(run, f"i-{place}", named=[(place, name, f"GPU-{place}")])
    filling.audit(controller, 1, "cleared", node="node-f", time=LATER)
    filling.proposal(
        controller, 90, "node-c", status="held", waits=False, updated="2026-11-28T00:00:00.000Z", final=True
    )
    why = "node-h was taken out by dave: it is theirs"
    filling.proposal(controller, 91, "node-h", status="held", hold="not-ours", why=why, final=True)
    filling.proposal(controller, 92, "node-h", status="nothing", act="", action="watch", updated=LATER, final=True)
    filling.incident(run, "i-9", named=[(9, "node-s", "GPU-9")])
    filling.node("node-x", "node-s", *(name for name, _ in statuses))
    page = queries.fleet_page(filling.database, now=NOW)
    assert [(one.name, one.state) for one in page.nodes] == [
        ("node-a", "waits for approval"), ("node-e", "unclear"), ("node-d", "held"), ("node-h", "held"), ("node-b", "acting"),
        ("node-f", "suspected"), ("node-s", "suspected"), ("node-c", "out"), ("node-x", "unknown"),
    ]  # fmt: skip
    assert page.states["suspected"] == 2
    assert sum(page.states.values()) == page.total == 9
    assert [one.node for one in page.waiting] == ["node-a"]
    assert {one.node for one in page.acting} == {"node-b", "node-d", "node-e", "node-h"}
    assert [one.state_text for one in page.nodes if one.name == "node-h"] == [f"A drain is left to a person: {why}."]
    assert page.todo == ("look at node-e",)
    assert page.controllers[0]["life"] == "running"
    assert all(isinstance(value, str) for value in page.controllers[0].values())
    assert [one.what for one in page.history] == ["cleared"]
    only = queries.fleet_page(filling.database, query="E-B", state="acting", now=NOW)
    assert (names(only.nodes), only.states) == (["node-b"], page.states)
    second = queries.fleet_page(filling.database, page=77, size=3, now=NOW)
    assert (second.page, second.pages, names(second.nodes)) == (3, 3, ["node-s", "node-c", "node-x"])


def test_a_node_that_the_fleet_alone_knows_has_a_page(filling: Filling) -> None:
    filling.proposal(
        filling.controller(), 1, "node-q", status="done", final=True, reason="rank 3 alone differs", devices=["GPU-q"]
    )
    page = queries.node_page(filling.database, "node-q", now=NOW)
    assert page.row is not None
    assert (page.row.state, page.row.devices, page.row.seen) == ("out", 0, "")
    assert page.row.state_text == "Taken out of service (drain): rank 3 alone differs."
    assert len(page.proposals) == 1


def test_what_the_fleet_alone_knows_of_a_device_is_on_its_page(filling: Filling) -> None:
    controller = filling.controller()
    filling.proposal(controller, 1, "n1", incident="gone", devices=["GPU-n1-0"], status="nothing", act="")
    filling.proposal(controller, 2, "n9", incident="gone-too", devices=["GPU-\N{LATIN SMALL LETTER E WITH ACUTE}%"])
    filling.audit(controller, 1, "proposed", node="n1", incident="gone")
    naming = {"controller_id": controller, "number": 1, "incident": "gone", "device": "GPU-n1-0", "node": "n1"}
    filling.add(tables.namings, naming, naming | {"number": 2, "device": "GPU-cleared", "cleared": LATER, "node": "n3"})
    page = queries.device_page(filling.database, "GPU-n1-0", now=NOW)
    (one,) = page.strikes
    assert (one.incident, one.run, one.node, one.now, one.counts) == ("gone", 0, "n1", "n1", True)
    assert [(each.incident, each.imported) for each in page.proposals] == [("gone", False)]
    assert [each.what for each in page.history] == ["proposed"]
    assert page.row == node(filling, "n1")
    assert (page.row.state, page.row.strikes) == ("suspected", 1)
    only_proposed = queries.device_page(filling.database, "GPU-\N{LATIN SMALL LETTER E WITH ACUTE}%", now=NOW)
    assert [each.incident for each in only_proposed.proposals] == ["gone-too"]
    (cleared,) = queries.device_page(filling.database, "GPU-cleared", now=NOW).strikes
    assert (cleared.counts, cleared.cleared) == (False, f"cleared in the fleet at {LATER}")
    assert queries.node_page(filling.database, "n3", now=NOW).strikes == (cleared,)
    assert all(not each.imported for each in queries.fleet_page(filling.database, now=NOW).acting)
    with pytest.raises(NotFound, match="no run that was imported was on it"):
        queries.device_page(filling.database, "GPU-%", now=NOW)


# Drills ---------------------------------------------------------------------------------------------------------------


def test_drills_with_what_came_of_each(filling: Filling) -> None:
    run = filling.run("job")
    incident = filling.incident(run, "i-1", named=[(3, "node-b", "GPU-3")], check="replay", judgement="drill")
    for place, outcome in enumerate(("caught", "named wrongly", "missed", "caught, unattributed", "", "caught")):
        caught = {"incident_id": incident, "late": 2} if "c" in outcome[:1] else {}
        filling.add(
            tables.drills,
            {
                "run_id": run,
                "rank": place,
                "spec": f"fault {place}",
                "outcome": outcome,
                "time": f"2026-11-29T12:00:0{place}.000Z",
            }
            | caught,
        )
    page = queries.drills_page(filling.database, now=NOW)
    assert dict(page.outcomes) == {
        "caught": 2,
        "caught, unattributed": 1,
        "named wrongly": 1,
        "missed": 1,
        "unclear": 1,
    }
    assert [one.fault for one in page.drills] == [f"fault {place}" for place in (5, 4, 3, 2, 1, 0)]
    assert (page.drills[0].check, page.drills[0].incident, page.drills[0].late) == ("replay", "i-1", 2)
    assert (page.drills[3].outcome, page.drills[3].check, page.drills[3].incident, page.drills[3].late) == (
        "missed",
        "",
        "",
        None,
    )
    last = queries.drills_page(filling.database, page=9, size=4, now=NOW)
    assert (last.page, last.pages, len(last.drills)) == (2, 2, 2)


def test_a_fault_is_not_missed_while_the_run_trains(filling: Filling) -> None:
    trains = filling.run(imported="2026-11-29T11:00:00.000Z", grew="2026-11-29T12:59:59.000Z", pace=0.5)
    filling.add(
        tables.drills,
        {"run_id": trains, "outcome": "missed"},
        {"run_id": filling.run(outcome="finished"), "outcome": "missed"},
    )
    page = queries.drills_page(filling.database, now=NOW)
    assert (page.outcomes["missed"], page.outcomes["unclear"]) == (1, 1)
    assert {one.run: one.outcome for one in page.drills}[trains] == "unclear"


def test_a_table_of_drills_says_what_their_page_says(filling: Filling) -> None:
    now = datetime.now(UTC)
    before, just = (f"{now - timedelta(seconds=past):%Y-%m-%dT%H:%M:%S.000Z}" for past in (7200, 5))
    trains, ended = (
        filling.run("trains", imported=before, grew=just, pace=0.5),
        filling.run("ended", outcome="finished"),
    )
    for run in (trains, ended):
        for place, outcome in enumerate(("missed", "caught", "")):
            filling.add(tables.drills, {"run_id": run, "outcome": outcome, "step": place, "rank": place})
    columns, rows = queries.export(filling.database, "drills")
    by_table = {(row[0], row[columns.index("step")]): row[columns.index("outcome")] for row in rows}
    assert by_table == {(one.run_name, one.step): one.outcome for one in queries.drills_page(filling.database).drills}
    assert by_table["trains", 0] == "unclear"
    assert by_table["ended", 0] == "missed"


def test_tallies_bound_false_alarms_by_what_passed(filling: Filling) -> None:
    first, second = filling.run(), filling.run()
    for run, check, passed in ((first, "numerics", 1000), (second, "numerics", 500), (first, "replay", 99)):
        filling.add(tables.coverage, {"run_id": run, "check": check, "passed": passed})
    filling.incident(first, "i-1", named=[WHO], check="replay", judgement="false alarm")
    filling.incident(first, "i-2", named=[WHO], check="update", judgement="false alarm")
    filling.incident(first, "i-3", named=[WHO], check="replay")
    page = queries.drills_page(filling.database, now=NOW)
    found = {one.check: one for one in page.tallies}
    assert list(found) == ["numerics", "replay", "update"]
    assert (found["numerics"].passed, found["numerics"].false_alarms, found["numerics"].bound) == (1500, 0, 0.002)
    assert found["replay"].bound == pytest.approx(0.04656, rel=1e-3)  # Clopper and Pearson, 1 of 100
    assert found["update"].bound is None
    assert {one.id for one in page.false_alarms} == {"i-1", "i-2"}
    assert page.unjudged == 1
