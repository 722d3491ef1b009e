"""What is watched at the borders of modules: that it leaves training as it is, that every wrong number is its maker's, and no site twice."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwitness.compare import hooks
from bitwitness.compare.lineup import settled
from bitwitness.compare.participant import Runner
from bitwitness.compare.records import Site
from bitwitness.compare.settings import Settings
from bitwitness.compare.workload import Make
from bitwitness.errors import ConfigurationError
from bitwitness.faults.sites import parameters_of
from tests.compare.lineups import account, compared, make_with, rows, seats, squared, tiny, wrong


class InPlace(nn.Module):
    """Says nowhere that it writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(x, inplace=True)


class Chain(nn.Module):
    """`body` is chosen; its input is read outside as well."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.inp, self.body, self.out = nn.Linear(12, 12), body, nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        y: Tensor = self.out(self.body(h) + h.sin() + h * 0.3)
        return y


class Thrice(nn.Module):
    """Reads its input several times: a sum that must keep its order."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.q(x) @ self.k(x).T, -1) @ x


class Attention(nn.Module):
    """Asks whether query, key and value are one object."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = x[None]
        y: Tensor = self.heads(h, h, h)[0][0]
        return y


class Hidden(nn.Module):
    """Returns what it reads itself, in a dataclass, with nothing beside it."""

    @dataclasses.dataclass
    class Out:
        y: Tensor
        more: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 12), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Out:
        hidden = self.a(x).tanh()
        return self.Out(self.b(hidden), {"all": [hidden, None, torch.empty(0), torch.arange(3)]})


class Unpacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        out = self.hidden(x)
        y: Tensor = out.y + out.more["all"][0] * 2
        return y


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.2), nn.ReLU(inplace=True), nn.Linear(12, 12))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return y


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(12, 12)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        y = torch.tanh(self.l(x))
        return y if depth == 0 else y + 0.5 * self(x * 0.9, depth - 1)


def penalty(model: nn.Module, batch: Tensor) -> Tensor:
    x = batch.clone().requires_grad_(True)
    out = model(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss: Tensor = out.square().mean() + (gradient.norm(dim=1) - 1).square().mean()
    return loss


def twice(model: nn.Module, batch: Tensor) -> Tensor:
    out = model(batch)
    out.square().mean().backward(retain_graph=True)
    loss: Tensor = out.abs().mean()
    return loss


def chained(body: Any, loss: Any = squared) -> Make:
    return make_with(lambda: Chain(body()), rows, loss)


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 12), nn.Tanh())


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        y, (h, c) = self.cells(x[:, None])
        z: Tensor = y[:, 0] + h[0] + c[0]
        return z


WORK: dict[str, tuple[Make, tuple[str, ...]]] = {
    "in place": (chained(InPlace), ("body", "inp", "out")),
    "in place, then more": (
        chained(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(12, 12))),
        ("body", "inp", "out"),
    ),
    "read thrice": (chained(Thrice), ("body", "inp", "out")),
    "attention": (chained(Attention), ("body", "body.heads", "out")),
    "hidden": (chained(Unpacked), ("body.hidden", "inp", "out")),
    "checkpoint": (chained(lambda: Checkpointed(False)), ()),
    "reentrant checkpoint": (chained(lambda: Checkpointed(True)), ()),
    "nested": (chained(Tree), ("body", "body.l")),
    "gradient penalty": (chained(smooth, penalty), ()),
    "two backwards": (chained(smooth, twice), ()),
    "recurrent": (chained(Recurrent), ()),
}


def _trained(make: Make, globs: tuple[str, ...]) -> tuple[dict[str, Tensor], list[Site]]:
    seat = seats({}, make)[0]
    shown: list[Site] = []

    def show(site: Site, _: Tensor) -> None:
        shown.append(site)

    with settled([seat]):
        runner = Runner(seat, "lock-step", Settings("x", "x", globs=globs, steps=3, seed=5), None)
        for step in range(3):
            shown.clear()
            runner.compute(step, show)
    return parameters_of(runner.workload.model), shown


@pytest.mark.parametrize("name", WORK)
def test_watching_changes_no_bit_and_shows_no_site_twice(name: str) -> None:
    make, globs = WORK[name]
    watched, shown = _trained(make, globs)
    with hooks.unwatched():
        plain, fewer = _trained(make, globs)
    hooks.check_unchanged(watched, plain)
    assert len(set(shown)) == len(shown) > len(fewer)
    phases = {site.phase for site in shown}
    assert {"fwd_in", "fwd_out", "grad_in", "grad_out", "grad_w"} <= phases


@pytest.mark.parametrize("name", WORK)
def test_equal_devices_agree_and_errors_do_not_spread(tmp_path: Path, name: str) -> None:
    make, globs = WORK[name]
    files = compared(tmp_path, "op:mm @ step=1 : n=1 -> bit=20", make=make, modes=["lock-step"], steps=3, globs=globs)
    assert wrong(files, "reference-1") == []
    found = wrong(files)
    assert {step for step, _, _ in found} == {1}, "made equal again, whatever it was"
    assert account(files, "suspect").ended == "done"


def test_training_that_hooks_change_is_refused() -> None:
    one = {"a.weight": torch.ones(2)}
    hooks.check_unchanged(one, {"a.weight": torch.ones(2)})
    with pytest.raises(ConfigurationError, match=r"a\.weight has other bits"):
        hooks.check_unchanged(one, {"a.weight": torch.tensor([1.0, 2.0])})


def test_what_others_send_back_is_not_blamed_on_a_module_that_works_in_place(tmp_path: Path) -> None:
    make = chained(InPlace)
    for op, site in (("cos", "inp grad_out"), ("threshold_backward", "body grad_in")):
        files = compared(
            tmp_path / op,
            f"op:{op} @ step=1 : n=1 -> set=9.0",
            make=make,
            modes=["lock-step"],
            steps=3,
            globs=("inp", "body", "out"),
        )
        blamed = {where for _, where, _ in wrong(files)}
        assert blamed == ({site} if op != "cos" else {"body grad_out"}), op


@pytest.mark.parametrize("target", ["grad_in", "fwd_in", "fwd_out", "grad_out"])
def test_faults_that_are_played_on_a_module_that_reads_its_input_often(tmp_path: Path, target: str) -> None:
    fault = f"{target}:body @ step=1 : n=1 -> set=9.0"
    make = make_with(lambda: nn.Sequential(nn.Linear(12, 12), Thrice()), rows, squared)
    files = compared(tmp_path, fault.replace("body", "1"), make=make, modes=["lock-step"], steps=3, globs=("0", "1"))
    assert account(files, "suspect").ended == "done"
    assert {where.partition(" ")[0] for _, where, _ in wrong(files)} == {"1"}, wrong(files)


def test_hooks_are_gone_after_an_error_and_silent_in_graphs_that_outlive_the_step() -> None:
    model = Chain(smooth())
    shown: list[Site] = []
    losses: list[Tensor] = []

    def fail() -> None:
        with hooks.watching(model, hooks.chosen(model, ()), lambda site, _: shown.append(site)):
            losses.append(squared(model, rows(1)))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    before = len(shown)
    assert before
    losses[0].backward()
    squared(model, rows(1)).backward()
    assert len(shown) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_transformations_of_functions_are_refused() -> None:
    model = Chain(smooth())

    def loss(x: Tensor) -> Tensor:
        return squared(model, x)

    with (
        hooks.watching(model, hooks.chosen(model, ()), lambda site, tensor: None),
        pytest.raises(ConfigurationError, match=r"torch\.func"),
    ):
        torch.func.grad(loss)(rows(1))


def _tensors_held(runner: Runner, steps: range) -> int:
    for step in steps:
        runner.compute(step, lambda site, tensor: None)
    return sum(isinstance(one, Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("name", ["tiny", "hidden", "attention", "read thrice", "gradient penalty"])
def test_a_step_leaves_no_tensors_to_the_garbage_collector(name: str) -> None:
    make, globs = WORK.get(name, (tiny, ()))
    seat = seats({}, make)[0]
    with settled([seat]):
        runner = Runner(seat, "lock-step", Settings("x", "x", globs=globs, steps=6, seed=5), None)
        _tensors_held(runner, range(1))
        gc.collect()
        gc.disable()
        try:
            after_three = _tensors_held(runner, range(1, 3))
            after_six = _tensors_held(runner, range(3, 6))
        finally:
            gc.enable()
    assert after_six == after_three


def test_tensors_are_found_in_order_in_whatever_holds_them() -> None:
    a, b, c, d = (torch.zeros(1) for _ in range(4))
    holder: list[Any] = [{"x": (a, [b])}, None, Hidden.Out(c, {"again": a}), d, "text"]
    holder.append(holder)
    assert [id(one) for one in hooks.tensors_in(holder)] == [id(one) for one in (a, b, c, d)]


def _names_of_gradients(make: Make, globs: tuple[str, ...], borders: bool) -> set[tuple[str, str]]:
    workload = make(torch.device("cpu"), 1)
    shown: list[Site] = []
    chosen = hooks.chosen(workload.model, globs)
    with hooks.watching(workload.model, chosen, lambda site, _: shown.append(site), borders=borders):
        workload.loss_fn(workload.model, workload.batch(0)).backward()
    return {(site.module, site.tensor) for site in shown if site.phase == "grad_w"}


@pytest.mark.parametrize("borders", [True, False], ids=["borders", "parameters"])
def test_gradients_of_a_module_that_was_not_called_are_its_called_owners(borders: bool) -> None:
    inner = _names_of_gradients(chained(Attention), (), borders)
    assert ("", "body.heads.out_proj.weight") in inner
    assert ("inp", "weight") in inner
    assert "body.heads.out_proj" not in {module for module, _ in inner}
    outer = _names_of_gradients(chained(Attention), ("body.heads*", "body"), borders)
    assert ("body.heads", "out_proj.weight") in outer
    for reentrant in (False, True):
        again = _names_of_gradients(chained(lambda reentrant=reentrant: Checkpointed(reentrant)), (), borders)
        assert {("body.inner.0", "weight"), ("body.inner.3", "bias"), ("out", "weight")} <= again
        assert "" not in {module for module, _ in again}


def test_what_attention_computes_itself_is_not_blamed_on_the_projection_it_never_calls(tmp_path: Path) -> None:
    files = compared(
        tmp_path, "op:bmm @ step=1 : n=1 -> set=9.0", make=chained(Attention), modes=["lock-step"], steps=3
    )
    blamed = {where for _, where, _ in wrong(files)}
    assert blamed
    assert not any(where.startswith("body.heads.out_proj grad_w") for where in blamed), blamed
