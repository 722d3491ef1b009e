"""The three modes on small models: what is compared, what is made equal again, and who is lost when."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwitness.compare import hooks
from bitwitness.compare.judging import judge
from bitwitness.compare.lineup import Lineup
from bitwitness.compare.participant import Runner
from bitwitness.compare.settings import Settings
from bitwitness.compare.simulated import Simulated
from bitwitness.compare.workload import Workload
from bitwitness.errors import ConfigurationError
from bitwitness.guard.rewind import RandomState
from tests.compare.lineups import (
    CPU,
    ONE_STEP,
    Broken,
    Tiny,
    account,
    compared,
    make_with,
    rows,
    seats,
    squared,
    tiny,
    wrong,
)


def test_equal_devices_are_equal_in_all_modes(tmp_path: Path) -> None:
    files = compared(tmp_path, control=True)
    for name in ("reference-1", "suspect"):
        for mode in ("lock-step", "parameters", "free"):
            assert wrong(files, name, mode) == []
            assert account(files, name, mode).ended == "done"
            assert [step.drift for step in account(files, name, mode).steps] == [0.0] * 4
    reseeded = account(files, "control", "free")
    assert all(step.drift and step.drift > 0 for step in reseeded.steps)
    assert not any(step.differences for step in reseeded.steps)


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        ("fwd_out:first.up @ step=1 : n=2 -> bit=-2", "first.up fwd_out"),
        ("fwd_in:first.up @ step=1 : n=2 -> set=9.0", "first.up fwd_out"),
        ("fwd_w:second.down @ step=1 : n=2 -> set=9.0", "second.down fwd_out"),
        ("grad_in:second.down @ step=1 : n=2 -> bit=-2", "second.down grad_in"),
        ("grad_out:second.up @ step=1 : n=2 -> set=9.0", "second.up grad_in"),
        ("grad_w:second.down.weight @ step=1 : n=2 -> bit=-2", "second.down grad_w[weight]"),
        ("fwd_out:first.act @ step=1 : n=2 -> set=9.0", "first.act fwd_out"),
        ("fwd_out:first @ step=1 : n=2 -> bit=-2", "second.norm fwd_in"),
        ("param:head.weight @ step=1 : n=2 -> bit=3", "head update[weight]"),
        ("exp_avg:head.weight @ step=1 : n=2 -> bit=3", "head state[weight.exp_avg]"),
    ],
)
def test_in_lock_step_an_error_is_where_it_was_made_and_nowhere_else(tmp_path: Path, fault: str, site: str) -> None:
    files = compared(tmp_path, fault, modes=["lock-step"])
    assert {(step, where) for step, where, _ in wrong(files)} >= {(1, site)}
    others = {where for _, where, _ in wrong(files)} - {site}
    assert others <= _same_operation(site), others
    assert all(step == 1 for step, _, _ in wrong(files))
    assert account(files, "suspect").steps[-1].drift == 0.0


def _same_operation(site: str) -> set[str]:
    """What one wrong operand also spoils within the same module: results that are computed from it, too."""
    module, _, _ = site.partition(" ")
    return {f"{module} {phase}" for phase in ("grad_in", "grad_w[weight]", "grad_w[bias]")}


def test_errors_spread_in_the_free_run_and_do_not_in_lock_step(tmp_path: Path) -> None:
    files = compared(tmp_path, ONE_STEP, steps=6)
    assert wrong(files, mode="lock-step") == [(1, "first.up fwd_out", 2)]
    free = wrong(files, mode="free")
    assert {step for step, _, _ in free} == {1, 2, 3, 4, 5}, "once parted, a free run stays parted"
    assert len({where for _, where, _ in free}) > 20
    drift = [step.drift or 0.0 for step in account(files, "suspect", "free").steps]
    assert drift[0] == 0.0
    assert all(one > 0 for one in drift[1:])


def test_parameters_are_made_equal_after_each_step(tmp_path: Path) -> None:
    files = compared(tmp_path, ONE_STEP, modes=["parameters"], steps=5)
    found = account(files, "suspect", "parameters")
    assert {step for step, _, _ in wrong(files, mode="parameters")} == {1}
    noise = [step.gradient_noise for step in found.steps]
    assert noise[0] == noise[2] == noise[4] == 0.0
    assert (noise[1] or 0) > 0
    assert (found.steps[1].drift or 0) > 0, "before they were made equal again"
    assert [step.drift for step in found.steps[2:]] == [0.0, 0.0, 0.0]


def test_what_is_watched_is_trained_bit_for_bit_as_if_it_were_not() -> None:
    settings = Settings("x", "tiny", modes=("lock-step",), steps=5, seed=5)
    runner = Runner(seats({})[0], "lock-step", settings, None)
    plain = Runner(seats({})[0], "lock-step", settings, None)
    for step in range(5):
        runner.record(step)
        plain._seed_all(step)
        plain.workload.model.zero_grad()
        plain.workload.loss_fn(plain.workload.model, plain.workload.batch(step)).backward()
        plain.workload.all_optimizers[0].step()
    for one, other in zip(runner.workload.model.parameters(), plain.workload.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_generators_are_as_before(tmp_path: Path) -> None:
    before = RandomState.capture(CPU, ())
    compared(tmp_path, modes=["free"], steps=2)
    after = RandomState.capture(CPU, ())
    assert torch.equal(before.torch_cpu, after.torch_cpu)
    assert before.python == after.python
    assert np.array_equal(before.numpy[1], after.numpy[1])
    assert not torch.are_deterministic_algorithms_enabled()


class Odd(nn.Module):
    """What real models do: a module called twice, keyword arguments, several outputs, an expanded output, tied weights, checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(12, 12)
        self.pair = Pair()
        self.spread = Spread()
        self.block = Tiny().first
        self.head = nn.Linear(12, 12)
        self.head.weight = self.twice.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        left, right = self.pair(right=x)["both"]
        x = left + right + self.spread(x)
        x = checkpoint(self.block, x, use_reentrant=False)
        y: Tensor = self.head(x)
        return y


class Pair(nn.Module):
    def forward(self, *, right: Tensor) -> dict[str, Any]:
        return {"both": (right * 2, torch.view_as_complex(right.reshape(-1, 6, 2)).conj().real.repeat(1, 2))}


class Spread(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1, keepdim=True).expand(-1, 12)


odd = make_with(Odd, rows, squared)


@pytest.mark.parametrize(
    ("fault", "site"),
    [
        ("fwd_out:twice @ step=1 : n=1 -> bit=30", "twice fwd_out"),
        ("fwd_out:pair @ step=1 : n=1 -> bit=30", "pair fwd_out"),
        ("grad_in:pair @ step=1 : n=1 -> bit=30", "pair grad_in[0 sum]"),
        ("fwd_out:block.up @ step=1 : n=1 -> bit=30", "block.up fwd_out"),
        ("", ""),
    ],
)
def test_models_that_do_odd_things(tmp_path: Path, fault: str, site: str) -> None:
    files = compared(tmp_path, fault, make=odd, modes=["lock-step"], steps=3)
    sites = {str(one) for one in account(files, "suspect").sites}
    assert {"twice fwd_out", "twice fwd_out call 1", "twice grad_in call 1", "spread fwd_out", "pair fwd_in"} <= sites
    found = wrong(files)
    assert bool(found) == bool(fault)
    assert {(step, where.partition(" call")[0]) for step, where, _ in found} <= {
        (1, site),
        (1, "twice grad_w[weight]"),
        # The pair reads its input twice, and a fault on the sum of these makes that sum first: others' parts are added in another order.
        *({(1, "twice grad_out")} if "sum" in site else ()),
    }
    assert account(files, "suspect").steps[-1].drift == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    make = make_with(lambda: Tiny().to(dtype), lambda number: rows(number).to(dtype), squared)
    files = compared(tmp_path, "fwd_out:first.up @ step=1 : n=2 -> bit=5", make=make, modes=["lock-step"], steps=3)
    assert wrong(files) == [(1, "first.up fwd_out", 2)]
    assert account(files, "suspect").sites[0].dtype == str(dtype).removeprefix("torch.")


def test_autocast_is_the_workloads_own_matter(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return squared(model, batch).float()

    files = compared(tmp_path, ONE_STEP, make=make_with(Tiny, rows, loss), modes=["lock-step"])
    assert wrong(files) == [(1, "first.up fwd_out", 2)]


def test_a_suspect_that_breaks_is_lost_and_nobody_else_is(tmp_path: Path) -> None:
    files = compared(tmp_path, {"suspect": Broken(2)}, modes=["lock-step"])
    lost = account(files, "suspect")
    assert [step.step for step in lost.steps] == [0, 1]
    assert lost.ended.startswith("step 2: IndexError: index 7000 is out of bounds")
    assert [step.step for step in account(files, "reference-1").steps] == [0, 1, 2, 3]
    assert account(files, "reference-1").ended == "done"


def test_a_leader_that_breaks_ends_the_mode_and_says_so(tmp_path: Path) -> None:
    files = compared(tmp_path, {"reference-0": Broken(2)}, modes=["lock-step", "free"])
    for name in ("reference-1", "suspect"):
        found = account(files, name)
        assert [step.step for step in found.steps] == [0, 1]
        assert "the leader takes no further part: step 2: IndexError" in found.ended


class Turns(nn.Module):
    """Reads a number from the device and goes one way or another."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(12, 12)
        self.odd = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.even(x) if self.asks(x) else self.odd(x)
        return y

    wrong = False

    def asks(self, x: Tensor) -> bool:
        return bool(x.sum() > 0) != self.wrong


class OtherWay:
    """In step 1 the branch is decided wrongly."""

    def attach(self, workload: Any, *, fresh: bool = True) -> None:
        self.model = workload.model

    def detach(self) -> None:
        pass

    def during(self, step: int) -> Any:
        self.model.wrong = step == 1
        return torch.enable_grad()


def test_who_goes_another_way_in_lock_step_is_lost(tmp_path: Path) -> None:
    make = make_with(Turns, rows, squared)
    files = compared(tmp_path, {"suspect": OtherWay()}, make=make, modes=["lock-step"])
    found = account(files, "suspect")
    assert [step.step for step in found.steps] == [0, 1], "what was wrong in the step in which it was lost is written"
    assert found.steps[1].differences
    assert "step 1: went another way than the leader" in found.ended


def test_a_bad_reference_is_written_down_like_anybody(tmp_path: Path) -> None:
    files = compared(tmp_path, {"reference-1": Simulated(ONE_STEP, 5)}, modes=["lock-step"])
    assert wrong(files, "reference-1") == [(1, "first.up fwd_out", 2)]
    assert wrong(files, "suspect") == []


def test_a_journal_is_bounded(tmp_path: Path) -> None:
    fault = "each fwd_out:first.* @ every=1 : all -> sign ; permanent"
    files = compared(tmp_path, fault, modes=["lock-step"], keep=3)
    kept = [len(one.elements) for step in account(files, "suspect").steps for one in step.differences]
    assert kept
    assert max(kept) == 3


@pytest.mark.parametrize(
    ("globs", "said"),
    [(["first.upp"], "matches no submodule of the model: it has 13, e.g. first.up"), (["nothing*here"], "it has 13")],
)
def test_a_glob_without_a_match_is_refused(tmp_path: Path, globs: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        compared(tmp_path, globs=globs)


def test_compiled_models_are_refused() -> None:
    model = Tiny()
    model.first.compile(backend="eager")
    with pytest.raises(ConfigurationError, match="first is compiled"):
        hooks.chosen(model, ())


def test_models_without_submodules_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="no submodules"):
        hooks.chosen(nn.Linear(2, 2), ())


def test_a_loss_that_is_no_scalar_is_refused(tmp_path: Path) -> None:
    make = make_with(Tiny, rows, lambda model, batch: model(batch))
    with pytest.raises(ConfigurationError, match=r"loss_fn returned \[6, 3\]"):
        compared(tmp_path, make=make)


def test_interrupted_journals_hold_all_steps_that_were_done(tmp_path: Path) -> None:
    from bitwitness.compare.records import CompareFiles

    files = CompareFiles(tmp_path)
    files.create()
    lineup = seats({})
    for seat in lineup:
        files.introduce(seat.participant)

    def stop(mode: str, done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Lineup(lineup, Settings("x", "tiny", steps=9), files).run(stop)
    for name in ("reference-0", "reference-1", "suspect"):
        assert [step.step for step in account(files, name).steps] == [0, 1]
        assert account(files, name).ended == "interrupted"
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_torn_or_damaged_line_costs_only_itself(tmp_path: Path) -> None:
    files = compared(tmp_path, ONE_STEP, modes=["lock-step"])
    file = tmp_path / "journal" / "suspect.lock-step.jsonl"
    whole = file.read_bytes().splitlines(keepends=True)
    rng = random.Random(11)
    for _ in range(60):
        lines = list(whole)
        place = rng.randrange(len(lines))
        lines[place] = lines[place][: rng.randrange(len(lines[place]))]
        file.write_bytes(b"".join(lines))
        steps = account(files, "suspect").steps
        assert {step.step for step in steps} <= {0, 1, 2, 3}
        for step, sites in account(files, "suspect").seen():
            assert all(one.site >= 0 for one in step.differences)
            assert sites


def test_the_tape_of_a_lost_leader_says_why() -> None:
    runner = Runner(seats({"reference-0": Broken(0)})[0], "free", Settings("x", "tiny"), None)
    tape = runner.record(0)
    assert tape.lost.startswith("step 0: IndexError: index 7000 is out of bounds")
    assert not tape.entries
    assert runner.record(1).lost


def test_makers_make_the_same_weights_for_every_seed() -> None:
    one, other = tiny(CPU, 1), tiny(CPU, 2)
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))
    assert not torch.equal(one.batch(0), other.batch(0))
    assert copy.deepcopy(one.batch(0)).shape == (6, 12)


class Frozen(nn.Module):
    """Most of it is not trained, and one buffer never changes: as in a fine-tuning of few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(12, 12)
        self.big.requires_grad_(requires_grad=False)
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("table", torch.ones(7))
        self.head = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.big(x)))
        return y


def test_what_nobody_computed_is_compared_and_is_no_trial(tmp_path: Path) -> None:
    make = make_with(Frozen, rows, squared)
    files = compared(tmp_path, make=make, modes=["lock-step"])
    phases: dict[str, set[str]] = {}
    for one in account(files, "suspect").sites:
        phases.setdefault(one.phase, set()).add(f"{one.module}.{one.tensor}")
    assert phases["memory"] == {"big.weight", "big.bias", ".table"}
    assert phases["update"] == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert {"norm.running_mean", "norm.running_var"} <= phases["state"]
    (mode,) = judge(files, "suspect").modes
    assert mode.total is not None
    everything = sum(one.elements for one in account(files, "suspect").sites if one.phase not in ("batch", "memory"))
    assert mode.total.mismatches.of == 4 * everything
    struck = compared(tmp_path / "struck", "param:big.weight @ step=1 : n=1 -> bit=3", make=make, modes=["lock-step"])
    assert wrong(struck) == [(1, "big memory[weight]", 1)]
    assert account(struck, "suspect").steps[-1].differences == ()


def test_buffers_are_compared_in_the_free_run_too(tmp_path: Path) -> None:
    make = make_with(Frozen, rows, squared)
    files = compared(tmp_path, "buffer:norm.running_mean @ step=1 : n=1 -> set=9.0", make=make, modes=["free"])
    assert [where for step, where, _ in wrong(files, mode="free") if step == 1] == ["norm state[running_mean]"]


class WrongThenBroken(Broken):
    """Wrong in its last step, in which it also breaks."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self._fault = Simulated("fwd_out:first.up @ every=1 : n=2 -> set=9.0 ; permanent", 5)

    def attach(self, workload: Any, *, fresh: bool = True) -> None:
        self._fault.attach(workload)
        optimizer = workload.all_optimizers[0]
        optimizer.register_step_pre_hook(lambda *_: self._break())

    def _break(self) -> None:
        if self.at == self.step:
            raise IndexError("index 7000 is out of bounds")

    def during(self, step: int) -> Any:
        self.at = step
        return self._fault.during(step)


def test_what_was_wrong_in_the_step_in_which_it_breaks_is_kept(tmp_path: Path) -> None:
    files = compared(tmp_path, {"suspect": WrongThenBroken(0)}, modes=["lock-step"])
    assert wrong(files) == [(0, "first.up fwd_out", 2)]
    assert account(files, "suspect").ended.startswith("step 0: IndexError")


def test_who_alone_is_led_to_work_that_cannot_be_is_lost_alone(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        out: Tensor = model(batch)
        return out.square().mean() if bool(out.isfinite().all()) else out

    fault = "fwd_out:first.up @ step=2 : n=1 -> nan"
    files = compared(tmp_path, fault, make=make_with(Tiny, rows, loss), globs=["head"])
    assert account(files, "suspect", "free").ended.startswith("step 2: ConfigurationError: loss_fn returned [6, 3]")
    assert account(files, "reference-1", "free").ended == "done"


class Remembers(nn.Module):
    """Keeps a mean where nobody looks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(12, 12)
        self.down = nn.Linear(12, 3)
        self.mean = torch.zeros(12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        self.mean = 0.5 * self.mean + 0.5 * h.detach().mean(dim=0)
        y: Tensor = self.down(h + self.mean)
        return y


class Spoils:
    """One event, in what is kept elsewhere."""

    def attach(self, workload: Any, *, fresh: bool = True) -> None:
        self.model = workload.model

    def detach(self) -> None:
        pass

    def during(self, step: int) -> Any:
        if step == 5:
            self.model.mean += 1.0
        return torch.enable_grad()


def test_what_a_workload_keeps_elsewhere_carries_one_event_to_no_verdict(tmp_path: Path) -> None:
    make = make_with(Remembers, rows, squared)
    files = compared(tmp_path, {"suspect": Spoils()}, make=make, modes=["lock-step", "parameters"], steps=32)
    assert {step for step, _, _ in wrong(files)} == {5, 6, 7}, "at step 8 the work is made anew"
    assert wrong(files, "reference-1") == []
    result = judge(files, "suspect")
    assert result.outcome == "not characterised"
    assert "seen 1 time," in result.sentence


@pytest.mark.parametrize("kind", ["adamw", "sgd", "bfloat16"])
def test_work_that_is_made_anew_goes_on_bit_for_bit(kind: str) -> None:
    def make(device: torch.device, seed: int) -> Workload:
        one = tiny(device, seed)
        if kind == "bfloat16":
            one.model.to(torch.bfloat16)
        optimizer: Any = torch.optim.SGD(one.model.parameters(), 0.1, momentum=0.9)
        if kind != "sgd":
            optimizer = torch.optim.AdamW(one.model.parameters(), 0.01, amsgrad=True)
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        return Workload(one.model, optimizer, squared, lambda step: rows(step).to(dtype))

    plain, anew = (Runner(seats({}, make)[0], "free", Settings("x", "tiny", steps=9), None) for _ in range(2))
    for step in range(6):
        for optimizer in (plain.workload.all_optimizers[0], anew.workload.all_optimizers[0]):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + step // 2)
        before = anew.workload.model
        anew.begin_anew(step)
        assert anew.workload.model is not before
        one, other = plain.record(step), anew.record(step)
        assert not one.lost
        for (site, tensor), (site_too, tensor_too) in zip(one.entries.items(), other.entries.items(), strict=True):
            assert (site.module, site.tensor) == (site_too.module, site_too.tensor)
            assert torch.equal(tensor, tensor_too), site


def test_work_that_is_made_otherwise_the_second_time_is_lost() -> None:
    made: list[int] = []

    def make(device: torch.device, seed: int) -> Workload:
        made.append(seed)
        return tiny(device, seed) if len(made) == 1 else odd(device, seed)

    runner = Runner(seats({}, make)[0], "lock-step", Settings("x", "tiny", steps=9), None)
    runner.begin_anew(1)
    assert "other parameters, buffers or optimizers when it is made a second time" in runner.lost
