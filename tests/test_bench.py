"""`bitwitness bench`: what it reports is complete and agrees with itself. Nothing here asks how long anything took."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from bitwitness.cli.main import cli
from bitwitness.examples.meters import Clock, Meter, Probe, Scale
from bitwitness.guard import gradients, rewind, workload
from bitwitness.guard.agreement import Channel
from bitwitness.policy import Policy

TINY = ["--tokens", "64", "--context", "32", "--width", "32", "--layers", "1", "--threads", "1", "--steps", "5"]
CHECKS = [
    "numerics",
    "replicas",
    "numerics + replicas",
    "captures for replays",
    "DDP hook",
    "order, journal",
    "all but replays",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments])


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    autocast = ["--autocast"] if request.param == "bf16" else []
    done = run(*TINY, *autocast, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_says_on_what_it_was_measured(report: dict[str, Any]) -> None:
    assert report["machine"]["threads"] == 1
    assert report["machine"]["torch"] == torch.__version__
    assert report["machine"]["processor"]
    assert report["model"]["tokens"] == 64
    assert report["model"]["parameters"] > 32 * 256
    assert report["equal_bits"] is True


def test_measures_at_least_the_steps_asked_for_each_beside_an_unguarded_one(report: dict[str, Any]) -> None:
    steps = report["steps"]
    assert steps["plain"] + steps["loss"] + steps["gradients"] == steps["unguarded"] == 8
    assert steps["loss"] == steps["gradients"] == steps["forward"] == steps["forward + backward"] == 2


def test_shares_follow_from_times(report: dict[str, Any]) -> None:
    step = report["step"]["median"]
    assert [cost["name"] for cost in report["checks"]] == CHECKS
    for cost in report["checks"] + report["replays"]:
        assert cost["milliseconds"] > 0
        assert cost["processor_share"] >= 0
        assert math.isclose(cost["share"], 100 * cost["milliseconds"] / cost["every"] / step)


def test_intervals_are_the_defaults(report: dict[str, Any]) -> None:
    every = {cost["name"]: cost["every"] for cost in report["checks"] + report["replays"]}
    assert every["numerics"] == 1
    assert every["replicas"] == Policy().check_every
    assert every["loss replay"] == every["gradient replay"] == Policy().audit_every


def test_sums_are_sums(report: dict[str, Any]) -> None:
    share = {cost["name"]: cost["share"] for cost in report["checks"]}
    assert math.isclose(share["numerics + replicas"], share["numerics"] + share["replicas"])
    rest = ("captures for replays", "DDP hook", "order, journal")
    assert math.isclose(share["all but replays"], share["numerics + replicas"] + sum(share[name] for name in rest))


def test_targets_are_those_promised_and_compared_as_such(report: dict[str, Any]) -> None:
    targets = {cost["name"]: cost["target"] for cost in report["checks"]}
    assert {name for name, target in targets.items() if target == 0.7} == {"numerics + replicas", "all but replays"}
    assert all(target in (None, 0.7) for target in targets.values())
    for cost in report["checks"]:
        assert cost["met"] == (None if cost["target"] is None else cost["share"] <= cost["target"])
    assert [cost["target"] for cost in report["replays"]] == [1.15, 1.10]
    for cost in report["replays"]:
        assert cost["met"] == (cost["ratio"] <= cost["target"])
        assert math.isclose(cost["ratio"], cost["milliseconds"] / cost["against_milliseconds"])


def test_a_replay_is_all_of_its_audit(report: dict[str, Any]) -> None:
    loss, whole = report["replays"]
    assert {"replay premises", "replay exchange 1", "replay"} <= set(loss["parts"])
    assert "replay digests" not in loss["parts"]
    assert set(whole["parts"]) == {*loss["parts"], "replay digests"}


def test_memory_is_measured_where_it_can_be(report: dict[str, Any]) -> None:
    peaks = [cost["peak"] for cost in report["checks"] + report["replays"]]
    assert all(peak >= 0 for peak in peaks) if Scale().works() else set(peaks) == {None}


def test_prints_every_check_with_its_target() -> None:
    done = run(*TINY)
    assert done.exit_code == 0, done.output
    for name in [*CHECKS, "loss replay", "gradient replay", "forward + backward", "equal bits", torch.__version__]:
        assert name in done.stdout


def test_leaves_nothing_behind() -> None:
    """Neither wrappers around the guard's methods, nor a process group, nor the number of threads."""
    watched: tuple[tuple[Any, str], ...] = (
        (Channel, "max"),
        (gradients, "_native_all_reduce"),
        (rewind.BufferRecorder, "_copy"),
        (workload.GradientTable, "add"),
        (torch.autograd, "backward"),
        (torch.nn.utils, "get_total_norm"),
    )
    before = [getattr(owner, name) for owner, name in watched]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)  # it is measured with one: two would mostly wait for one another, at full speed
    try:
        assert run(*TINY, "--steps", "1").exit_code == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert [getattr(owner, name) for owner, name in watched] == before
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tokens", "100", "--context", "64"],
        ["--width", "200", "--tokens", "64", "--context", "64"],
        ["--width", "0"],
        ["--layers", "0"],
        ["--steps", "0"],
        ["--threads", "-1"],
        ["--tokens", "many"],
        ["--nonsense"],
    ],
)
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.exit_code == 2
    assert "Error" in done.stderr


# The meters ---------------------------------------------------------------------------------------------------------


class Cuts(Meter):
    """Remembers what each cut was attributed to."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str | None] = []

    def _cut(self, label: str | None) -> None:
        self.seen.append(label)


def test_what_is_inside_counts_for_itself_but_a_replay_is_one() -> None:
    meter = Cuts()
    with meter.span("order"):
        with meter.span("numerics"):
            pass
        with meter.span("replay premises"), meter.span("training"):
            pass
    # Before numerics and between it and the replay it is the order's; inside the replay, the replay's.
    assert meter.seen == [
        *(None, "order", "numerics", "order"),
        *("replay premises", "replay premises", "replay premises"),
        "order",
    ]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that only moves when told, for both kinds of time."""
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr("bitwitness.examples.meters.time.perf_counter", lambda: now)
    monkeypatch.setattr("bitwitness.examples.meters.time.process_time", lambda: 2 * now)
    return wait


def test_times_add_up(clock: Callable[[float], None]) -> None:
    probe = Probe()
    inner = probe.wrap(lambda: clock(5.0), "numerics")

    def outer() -> None:
        clock(1.0)
        inner()
        clock(2.0)
        inner()

    probe.wrap(outer, "order")()
    assert isinstance(probe.meter, Clock)
    spent = probe.meter.take()
    assert {label: (one.wall, one.processor) for label, one in spent.items()} == {
        "order": (3.0, 6.0),
        "numerics": (10.0, 20.0),
    }
    assert not probe.meter.take()


def test_memory_is_the_most_at_once() -> None:
    scale = Scale()
    if not scale.works():
        pytest.skip("this system has no high-water mark that can be reset")
    elements_of_a_mebibyte = 1 << 18
    scale.begin()
    with scale.span("order"):
        for _ in range(3):
            with scale.span("numerics"):
                torch.ones(32 * elements_of_a_mebibyte).sum()
    peaks = scale.take()
    assert 31 < peaks["numerics"] < 60
    assert peaks["order"] < 20
