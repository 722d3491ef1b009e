"""What is planned and told, from what is seen: pure, so every case is a line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import Call, NodeState
from bitwitness.fleet.clusters.fake import FakeCluster
from bitwitness.fleet.clusters.hyperpod_plan import Seen, Way, inner_of, is_patch, landed, plan, rest, together
from bitwitness.fleet.clusters.hyperpod_words import ASKED, HEALTH_LABEL, MARK, lacks_capacity
from tests.fleet.hyperpod.pod import ID, act

A, B = "i-0123456789abcdef0", "i-0fedcba9876543210"
API = Way("pod")
LONG_AGO, LATER = "2026-11-01T00:00:00+00:00", "2026-11-29T12:30:00+00:00"
SEEN = Seen(A, "gpu", "Running", launched=LONG_AGO, asked=True)
OURS = NodeState("n1", "out", "DRAINED", f"bitwitness {ID}: x", "bitwitness", "1", "1")
IN = NodeState("n1", "in", "IDLE", booted="1", instance="1")
INNER = FakeCluster(["n1"])
WANTED = "UnschedulablePendingReplacement"


def at(inner: NodeState, **seen: object) -> NodeState:
    return together(inner, replace(SEEN, **seen))  # type: ignore[arg-type]


def test_what_is_put_together_comes_apart_again() -> None:
    inner = replace(OURS, more={"marks": ["2"]}, awaits="x")
    assert inner_of(together(inner, SEEN)) == inner
    assert inner_of(together(inner, SEEN)).more == inner.more
    assert inner_of(IN) == IN


@pytest.mark.parametrize(
    ("seen", "kind", "says"),
    [
        ({}, "replace", "no"),
        ({"status": "ShuttingDown"}, "replace", "yes"),
        ({"status": "Pending"}, "replace", "no"),  # a reboot looks so, too
        ({"status": "NotFound"}, "replace", "yes"),
        ({"instance": B}, "replace", "yes"),
        ({"instance": "", "status": ""}, "replace", "yes"),
        ({"instance": "", "status": "", "asked": False}, "replace", "no"),
        ({"instance": "", "status": "", "why": "two have its name"}, "replace", "unknown"),
        ({"status": "Failure"}, "replace", "no"),
        ({"status": "DeepHealthCheckInProgress"}, "replace", "no"),
        ({"health": "UnschedulablePendingReplacement"}, "replace", "yes"),
        ({"health": "UnschedulablePendingReboot"}, "replace", "no"),
        ({"health": "UnschedulablePendingReboot"}, "reboot", "yes"),
        ({"status": "Pending"}, "reboot", "yes"),
        ({"instance": B, "status": "Pending"}, "reboot", "no"),
        ({}, "reboot", "no"),
    ],
)
def test_whether_it_has_happened(seen: dict[str, object], kind: str, says: str) -> None:
    assert landed(act(kind, "n1"), at(IN), at(OURS, **seen), INNER, API) == says


def test_a_node_that_takes_jobs_is_not_done_with() -> None:
    for kind in ("replace", "reboot"):
        assert landed(act(kind, "n1"), at(IN), at(IN, status="ShuttingDown"), INNER, API) == "no"
        assert landed(act(kind, "n1"), at(IN), at(replace(OURS, service="unknown")), INNER, API) == "unknown"
    assert landed(act("replace", "n1"), at(IN), at(IN, instance=B), INNER, API) == "yes"  # the bad one is gone


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [("1", "2", "yes"), ("1", "1", "no"), ("", "1", "unknown"), ("1", "", "unknown")]
    + [
        ("2026-11-29T09:00:00.000Z", f"2026-11-29T{when}.000Z", how)
        for when, how in (("09:00:30", "no"), ("12:03:00", "yes"))
    ],
)
def test_a_reboot_is_told_by_the_boot(before: str, now: str, says: str) -> None:
    was, seen = at(replace(IN, booted=before)), at(replace(OURS, booted=now))
    assert landed(act("reboot", "n1"), was, seen, INNER, API) == says


def test_one_that_was_not_seen_before_is_told_by_when_it_was_launched() -> None:
    unseen = at(IN, instance="", group="", status="", launched="", asked=False)
    replaced = act("replace", "n1")
    assert landed(replaced, unseen, at(OURS), INNER, API) == "no"
    assert landed(replaced, unseen, at(OURS, instance=B, launched=LATER), INNER, API) == "yes"
    with pytest.raises(ConfigurationError, match="not the machine that was blamed"):
        plan(replaced, at(OURS, instance=B, launched=LATER), INNER, API)


@pytest.mark.parametrize("kind", ["drain", "reboot", "replace"])
def test_nothing_is_done_to_a_machine_that_came_after_the_incident(kind: str) -> None:
    newer = at(IN, instance=B, launched=LATER)  # its name was that of the one that was blamed, and HyperPod was faster
    with pytest.raises(ConfigurationError, match=f"{B} now, which was launched .*, after the incident {ID}"):
        plan(act(kind, "n1"), newer, INNER, API)
    assert plan(
        replace(act(kind, "n1"), back=True), newer, INNER, API
    )  # the device was seen there, after it was launched
    assert plan(act(kind, "n1", ""), newer, INNER, API)  # a person has said so
    assert plan(act(kind, "n1"), at(IN), INNER, API)
    assert plan(act("drain", "n1"), at(IN, launched="", instance="", asked=False), INNER, API)  # nobody knows


def test_whose_machine_cannot_be_told_is_drained_and_no_more() -> None:
    unknown = at(IN, launched="")
    for kind in ("reboot", "replace"):
        with pytest.raises(ConfigurationError, match="does not say when that was launched"):
            plan(act(kind, "n1"), unknown, INNER, API)
        assert plan(act(kind, "n1", ""), unknown, INNER, API)
        named = replace(at(replace(IN, node=f"hyperpod-{A}"), launched=""))
        assert plan(act(kind, f"hyperpod-{A}"), named, INNER, API)  # its name says it
    assert plan(act("drain", "n1"), unknown, INNER, API)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (
            Call(("scontrol", "update", "node=n1", "State=DRAIN", "reason=x")),
            ("scontrol", "update", "node=n1", "reason=x"),
        ),
        (Call(("POST", "http://h/slurm/v0.0.40/node/n1"), {"state": ["DRAIN"], "reason": "x"}), {"reason": "x"}),
    ],
)
def test_a_note_on_a_slurm_node_leaves_its_state_as_it_is(made: Call, left: object) -> None:
    inner = FakeCluster(["n1"])
    setattr(inner, "plan", lambda act, state: (made,))  # noqa: B010
    note = rest(act("drain", "n1"), at(OURS), inner, Way("pod", checks=("InstanceStress",)))[-1]
    assert left in (note.words, note.body)


def test_what_it_waits_for() -> None:
    assert at(OURS).awaits == ""
    assert at(OURS, status="Pending").awaits == f"{A} is Pending"
    assert at(OURS, health="UnschedulablePendingReboot").awaits == "UnschedulablePendingReboot"
    assert at(OURS, instance="", status="").awaits == "a machine"
    assert at(OURS, asked=False).awaits == "an answer of SageMaker"  # nothing is over because nobody answers
    assert at(NodeState("n1", "absent"), asked=False).awaits == "an answer of SageMaker"
    assert at(IN, status="Pending").awaits == ""


def test_nothing_is_planned_for_what_is_not_ours_or_cannot_be_told() -> None:
    theirs = replace(OURS, reason="bad fan", reason_by="anna")
    for kind in ("replace", "reboot"):
        for state, says in (
            (at(theirs), "taken out by anna"),
            (at(OURS, instance="", status="", why="two have its name"), "two have its name"),
            (at(IN, instance="", status="", why="two have its name"), "two have its name"),
            (at(NodeState("n1", "absent")), "has no node"),
            (at(OURS, role="Login"), "Login group"),
        ):
            with pytest.raises(ConfigurationError, match=says):
                plan(act(kind, "n1"), state, INNER, API)


def test_what_is_left_is_left_only_of_what_is_ours() -> None:
    checks = Way("pod", checks=("InstanceStress",))
    drain = act("drain", "n1")
    assert [call.words[1] for call in rest(drain, at(OURS), INNER, checks)] == ["StartClusterHealthCheck", "drain"]
    for state in (
        at(IN),
        at(replace(OURS, reason="bad fan")),
        at(OURS, mark=ID),
        at(OURS, launched=LATER),
        at(OURS, status="ShuttingDown"),
        at(OURS, instance=""),
        at(OURS, health="UnschedulablePendingReplacement"),
    ):
        assert rest(drain, state, INNER, checks) == ()
    assert rest(replace(drain, back=True), at(OURS, launched=LATER), INNER, checks)
    assert rest(act("replace", "n1"), at(OURS), INNER, checks) == ()
    assert rest(drain, at(OURS, mark=f"{ID} after Passed"), INNER, checks) == ()
    assert len(rest(drain, at(OURS, mark="20260101T000000Z-000001"), INNER, checks)) == 2  # that was another incident


@pytest.mark.parametrize(
    ("body", "ours"),
    [
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: WANTED}, "annotations": {ASKED: "{}"}}}, True),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: "Schedulable"}, "annotations": {ASKED: None}}}, True),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: "Schedulable"}, "annotations": {ASKED: "{}"}}}, False),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: WANTED}, "annotations": {ASKED: None}}}, False),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: WANTED}}}, False),
        ({"metadata": {"uid": "u", "annotations": {MARK: "x"}}}, True),
        ({"metadata": {"uid": "", "labels": {HEALTH_LABEL: "UnschedulablePendingReplacement"}}}, False),
        ({"metadata": {"labels": {HEALTH_LABEL: "UnschedulablePendingReplacement"}}}, False),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: "Schedulable"}}}, False),
        ({"metadata": {"uid": "u", "labels": {HEALTH_LABEL: "UnschedulablePendingReboot", "x": "y"}}}, False),
        ({"metadata": {"uid": "u", "labels": {}}}, False),
        ({"metadata": {"uid": "u", "annotations": {MARK: "x"}}, "spec": {}}, False),
        (None, False),
    ],
)
def test_no_other_patch_of_a_node_is_ours(body: object, ours: bool) -> None:
    assert is_patch(Call(("PATCH", "/api/v1/nodes/n1"), body)) is ours


def test_words_for_a_want_of_capacity() -> None:
    assert lacks_capacity("We currently do not have sufficient ml.p5.48xlarge capacity")
    assert lacks_capacity("The account-level service limit is exceeded: quota")
    assert not lacks_capacity("The lifecycle script failed with exit code 1")
