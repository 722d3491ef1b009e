"""What is proposed for which incident: a table, and what must hold whatever the signals say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.evidence import Kind, Persistence
from bitwitness.fleet.decision import Action, Naming, Proposal, namings_of, propose
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.signals import kernel
from bitwitness.fleet.signals.dcgm_fields import action_reason
from bitwitness.fleet.signals.record import Signal, SignalClass, Weight, no_evidence
from bitwitness.fleet.signals.times import Clock
from bitwitness.runfiles import Incident
from bitwitness.topology import Topology
from tests.fleet.incidents import NOW, days, incident, incident_id, topology, verdict

WHERE = topology()
DEVICE, NODE, RANK = "GPU-n1-0", "n1", 2
POLICY = FleetPolicy(may=frozenset({"drain", "reboot", "replace"}))


def signal(
    code: str = "xid:48",
    kind: SignalClass = "memory",
    weight: Weight = "strong",
    *,
    device: str = DEVICE,
    host: str = NODE,
    hours: float = 1,
    source: str = "kernel",
    reason: str = "as a test says",
) -> Signal:
    time = (NOW - timedelta(hours=hours)).isoformat()
    return Signal(source, code, device, time, kind, weight, reason, host=host)


def named_before(
    number: int, device: str = DEVICE, *, ago: float = 1, rank: int = RANK, run: str = "run", **more: Any
) -> Naming:
    at = NOW - days(ago)
    persistence: Persistence = more.pop("persistence", "transient")
    node = device.removeprefix("GPU-").rpartition("-")[0]
    return Naming(at.isoformat(), incident_id(number, at), run, rank, device, node, persistence, **more)


def one(
    found: Incident, signals: Sequence[Signal] = (), history: Sequence[Naming] = (), policy: FleetPolicy = POLICY
) -> Proposal:
    proposals = propose(found, "run", signals, history, policy)
    assert len(proposals) == 1
    return proposals[0]


def persistent(kind: Kind = "compute") -> Incident:
    return incident(found=verdict(WHERE, (RANK,), "persistent", kind))


def transient(persistence: Persistence = "transient", kind: Kind = "compute") -> Incident:
    return incident(found=verdict(WHERE, (RANK,), persistence, kind))


UNDATED = replace(signal(), time=None)
COUNTER = replace(signal("nvml:ecc-ue-volatile", source="nvml"), time=None)
REMAP = signal("xid:63", "memory", "weak")
LINK = signal("xid:74", "link", "weak")
OFF_THE_BUS = signal("xid:79", "loud", "none")


def of_line(text: str) -> Signal:
    """As the reader of kernel logs tells it."""
    line = f"2026-11-29T11:00:00Z {NODE} kernel: NVRM: Xid (PCI:0000:10:1c): 154, {text}"
    (found,) = kernel.read([line.encode()], Clock(NOW))
    return replace(found, device=DEVICE)


ASKED = of_line("GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)")
ASKS_NO_MORE = of_line("GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
ASKED_OF_DCGM = signal("dcgm:1523", "loud", "weak", reason=action_reason(1))

TABLE: dict[str, tuple[Incident, list[Signal], list[Naming], Action, str | None, str]] = {
    "persistent, nothing else": (persistent(), [], [], "drain", "drain", "medium"),
    "persistent, a source that could not be read": (persistent(), [no_evidence("nvml", "nvml:absent", "no driver", host=NODE)], [], "drain", "drain", "medium"),
    "persistent, uncorrectable memory error": (persistent(), [signal()], [], "replace", "replace", "high"),
    "persistent, memory error of another device of the node": (persistent(), [signal(device="GPU-n1-1")], [], "drain", "drain", "medium"),
    "persistent, memory error of another node": (persistent(), [signal(host="n2", device="0000:9b:00")], [], "drain", "drain", "medium"),
    "persistent, memory error at an address of the node": (persistent(), [signal(device="0000:9b:00")], [], "drain", "drain", "medium"),
    "persistent, a memory error long ago": (persistent(), [signal(hours=30)], [], "drain", "drain", "medium"),
    "persistent, a memory error of nobody knows when": (persistent(), [UNDATED], [], "drain", "drain", "medium"),
    "persistent, a counter since the driver was loaded": (persistent(), [COUNTER], [], "replace", "replace", "high"),
    "persistent, rows to be remapped": (persistent(), [REMAP], [], "reset", "drain", "medium"),
    "persistent, the driver asks for a reboot": (persistent(), [ASKED], [], "reboot", "reboot", "medium"),
    "persistent, the driver asks for nothing any more": (persistent(), [ASKS_NO_MORE], [], "drain", "drain", "medium"),
    "persistent, the driver asks for a reset": (persistent(), [ASKED_OF_DCGM], [], "reset", "drain", "medium"),
    "persistent, off the bus": (persistent(), [OFF_THE_BUS], [], "drain", "drain", "medium"),
    "persistent arithmetic beside a link error": (persistent(), [LINK], [], "drain", "drain", "medium"),
    "persistent weights beside a link error": (persistent("memory"), [LINK], [], "drain", "drain", "low"),
    "persistent input": (persistent("input"), [], [], "drain", "drain", "medium"),
    "host memory beside arithmetic": (persistent(), [signal("edac:ue", device="DIMM_B1", source="edac")], [], "drain", "drain", "medium"),
    "host memory beside input": (persistent("input"), [signal("edac:ue", device="DIMM_B1", source="edac")], [], "replace", "replace", "high"),
    "one transient": (transient(), [], [], "watch", None, "low"),
    "one unknown": (transient("unknown"), [], [], "watch", None, "low"),
    "one transient, memory error": (transient(), [signal()], [], "re-test", None, "medium"),
    "two strikes": (transient(), [], [named_before(9)], "watch", None, "low"),
    "three strikes": (transient(), [], [named_before(9), named_before(8)], "drain", "drain", "low"),
    "three strikes and a memory error": (transient(), [signal()], [named_before(9), named_before(8)], "replace", "replace", "medium"),
    "strikes too long ago": (transient(), [], [named_before(9, ago=8), named_before(8, ago=9)], "watch", None, "low"),
    "one strike told twice": (transient(), [], [named_before(9), named_before(9)], "watch", None, "low"),
    "strikes of a job in shadow mode": (transient(), [], [named_before(9, shadow=True), named_before(8, shadow=True)], "watch", None, "low"),
    "strikes all over the cluster": (transient(), [], [named_before(9, "GPU-n2-0"), named_before(8, "GPU-n3-1")], "contact", None, "low"),
    "the rank was named elsewhere": (persistent(), [], [named_before(9, "GPU-n3-0", persistence="persistent")], "contact", None, "low"),
    "the rank had an accident elsewhere": (persistent(), [], [named_before(9, "GPU-n3-0")], "drain", "drain", "medium"),
    "an accident of a rank that was named elsewhere": (transient(), [], [named_before(9, "GPU-n3-0", persistence="persistent")], "watch", None, "low"),
    "that rank of another run": (persistent(), [], [named_before(9, "GPU-n3-0", persistence="persistent", run="other")], "drain", "drain", "medium"),
    "another rank": (persistent(), [], [named_before(9, "GPU-n3-0", persistence="persistent", rank=6)], "drain", "drain", "medium"),
    "a link": (transient("unknown", "collective"), [], [], "re-test", None, "low"),
    "a link, said to last": (persistent("collective"), [LINK], [], "re-test", None, "low"),
    "shadow mode": (incident(policy={"on_detection": "record"}), [signal()], [], "contact", None, "low"),
    "unattributed": (incident(found=verdict(WHERE, (), kind="compute")), [signal()], [], "contact", None, "low"),
    "software": (incident(found=verdict(WHERE, (), kind="software")), [], [], "contact", None, "low"),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_table(case: str) -> None:
    found, signals, history, action, act, confidence = TABLE[case]
    proposal = one(found, signals, history)
    assert (proposal.action, proposal.act, proposal.confidence) == (action, act, confidence), proposal.reason
    assert proposal.reason
    if act:
        assert (proposal.node, proposal.devices) == (NODE, (DEVICE,))


def test_what_may_not_be_done_becomes_a_drain() -> None:
    proposal = one(persistent(), [signal()], policy=FleetPolicy())
    assert (proposal.action, proposal.act) == ("replace", "drain")


def test_shadow_mode_can_be_told_to_act() -> None:
    proposal = one(incident(policy={"on_detection": "record"}), policy=replace(POLICY, shadow="act"))
    assert proposal.act == "drain"


def test_each_named_node_has_a_proposal_of_its_own() -> None:
    found = incident(found=verdict(WHERE, (2, 3, 6), persistences=("transient", "persistent", "transient")))
    first, second = propose(found, "run", [], [], POLICY)
    assert (first.node, first.devices, first.act) == ("n1", ("GPU-n1-0", "GPU-n1-1"), "drain")
    assert "GPU-n1-1" in first.reason
    assert "GPU-n1-0" not in first.reason
    assert (second.node, second.devices, second.act) == ("n3", ("GPU-n3-0",), None)


@pytest.mark.parametrize(
    ("slice_", "told"), [("MIG-a", "pci=0000:9b:00 index=0 mig=MIG-b,MIG-a"), ("MIG-GPU-11ff/3/0", "")]
)
def test_a_slice_is_condemned_by_what_is_told_of_the_device_that_it_is_cut_from(slice_: str, told: str) -> None:
    where = Topology(tuple(replace(each, device=slice_) if each.rank == RANK else each for each in WHERE.placements))
    sits = replace(signal("identity:pci", "noise", "none", device="GPU-11ff", hours=-900), evidence=told)
    heard = [
        sits,
        signal(device="GPU-11ff"),
        signal("xid:64", device="GPU-22"),
        replace(sits, device="GPU-22", evidence=""),
    ]
    proposal = one(incident(found=verdict(where), where=where), heard)
    assert (proposal.action, proposal.devices) == ("replace", (slice_,))
    assert [(each.code, each.device) for each in proposal.signals] == [("xid:48", "GPU-11ff")]


def test_own_naming_in_the_history_is_no_further_strike() -> None:
    found = transient()
    assert one(found, history=[*namings_of(found, "run"), named_before(9)]).action == "watch"


def test_the_time_of_an_incident_that_does_not_say_is_in_its_name() -> None:
    found = incident()
    assert namings_of(replace(found, record={}), "run")[0].moment == NOW


def test_proposals_survive_json() -> None:
    proposal = one(persistent(), [signal(), REMAP])
    assert Proposal.from_json(proposal.to_json()) == proposal


signals_of_any_kind = st.lists(
    st.builds(
        signal,
        st.sampled_from(["xid:48", "xid:63", "xid:74", "xid:154", "edac:ue", "dcgm:396", "x"]),
        st.sampled_from(get_args(SignalClass)),
        st.sampled_from(get_args(Weight)),
        device=st.sampled_from([DEVICE, "GPU-n2-0", "0000:9b:00", ""]),
        host=st.sampled_from([NODE, "n2", "n1.cluster", ""]),
        reason=st.sampled_from(["", "the driver asks for: reboot;", action_reason(1)]),
    ),
    max_size=5,
)


@given(signals_of_any_kind, st.sampled_from(get_args(Kind)))
def test_no_signal_makes_anybody_named_who_is_not(signals: list[Signal], kind: Kind) -> None:
    nobody = incident(found=verdict(WHERE, (), kind=kind))
    assert [(each.node, each.act) for each in propose(nobody, "run", signals, [], POLICY)] == [("", None)]
    for persistence in get_args(Persistence):
        found = incident(found=verdict(WHERE, (RANK,), persistence, kind))
        for each in propose(found, "run", signals, [], POLICY):
            assert each.node == NODE
            assert each.act is None or persistence == "persistent"


@given(signals_of_any_kind)
def test_silence_and_what_cannot_be_read_change_nothing(signals: list[Signal]) -> None:
    mute = [no_evidence("nvml", "nvml:absent", "no driver", host=NODE)]
    with_it, without = one(persistent(), [*signals, *mute]), one(persistent(), signals)
    assert (with_it.action, with_it.act, with_it.confidence) == (without.action, without.act, without.confidence)
