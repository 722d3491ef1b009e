"""What the guard keeps of a module's buffers: each as the forward found it, copied again only if it has changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitwitness import Policy
from bitwitness.guard.rewind import BufferRecorder
from bitwitness.guard.start import allowed, is_compiled, limits
from bitwitness.topology import Placement, Topology


class Counting(nn.Module):
    """Counts its forwards in a buffer that it makes anew each time, beside one that stays."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(3))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x


def recorded(recorder: BufferRecorder, module: nn.Module) -> dict[str, Tensor]:
    recorder.arm()
    module(torch.randn(5, 4))
    return recorder.take()


def now(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_buffers_are_those_that_the_forward_found() -> None:
    """Batch normalisation does not tell the version counter of its running statistics."""
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Counting())
    recorder = BufferRecorder(module)
    for _ in range(4):
        before = now(module)
        assert same(recorded(recorder, module), before)
    changed = {
        f"{part}.{name}" for part in ("0", "1.1") for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert recorder.changing == changed | {"2.count"}


def test_statistics_that_are_frozen_later_are_the_last_ones() -> None:
    module = nn.Sequential(nn.BatchNorm1d(4))
    recorder = BufferRecorder(module)
    for _ in range(3):
        recorded(recorder, module)
    module.eval()
    assert same(recorded(recorder, module), now(module))
    assert same(recorded(recorder, module), now(module))


def test_what_does_not_change_is_copied_once() -> None:
    module = Counting()
    recorder = BufferRecorder(module)
    first, second = recorded(recorder, module), recorded(recorder, module)
    assert first["mask"] is second["mask"]
    assert first["count"] is not second["count"]
    assert recorder.changing == {"count"}


def test_a_shared_buffer_comes_once_under_its_first_name() -> None:
    module = nn.Sequential(Counting(), Counting())
    module[1].mask = module[0].mask
    recorder = BufferRecorder(module)
    assert (
        list(recorded(recorder, module))
        == [name for name, _ in module.named_buffers()]
        == ["0.count", "0.mask", "1.count"]
    )


def test_a_module_that_is_compiled_has_no_hook_inside() -> None:
    """The compiler would build other code around it, which rounds otherwise (inductor, torch 2.13)."""
    plain = nn.Sequential(nn.Linear(4, 4))
    recorder = BufferRecorder(plain)
    assert recorded(recorder, plain) == {}
    assert not plain._forward_pre_hooks, "nothing to record"
    module = nn.Sequential(nn.BatchNorm1d(4), Counting())
    recorder = BufferRecorder(module, compiled=True)
    for _ in range(3):
        before = now(module)
        assert same(recorded(recorder, module), before)
    assert not module._forward_pre_hooks
    assert "0.running_mean" in recorder.changing


def test_whether_a_compiler_looks_into_the_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    assert not is_compiled(module, module, module, noop)
    assert is_compiled(nn.Sequential(module), module, module, noop), "what torch.compile returns is another module"
    inner = nn.Module()
    inner._orig_mod = module  # what torch.compile returns holds the module so; to call it would load the compiler
    assert is_compiled(inner, inner, nn.Sequential(inner), noop)
    module[0]._compiled_call_impl = noop  # and this is what module.compile() leaves
    assert is_compiled(module, module, module, noop)
    assert nn.Module._compiled_call_impl is None
    assert is_compiled(plain := nn.Linear(2, 2), plain, plain, compiled_noop)


def noop() -> None:
    """Stands for a loss function."""


def compiled_noop() -> None:
    """Stands for one that torch.compile has returned."""


compiled_noop._torchdynamo_orig_callable = noop  # type: ignore[attr-defined]


def test_a_compiled_model_is_not_replayed_unless_asked_for() -> None:
    topology = Topology(tuple(Placement(rank, f"n{rank}", f"d{rank}", 0, "chip", "torch") for rank in range(3)))
    assert allowed(Policy(), topology, compiled=False).audit == "auto"
    assert allowed(Policy(), topology, compiled=True).audit == "off"
    assert allowed(Policy(audit="loss"), topology, compiled=True).audit == "loss"
    told = [" ".join(limits(topology, Policy(audit=audit), True, True)) for audit in ("auto", "loss", "off")]
    assert ["compiled" in words for words in told] == [True, True, False]
    assert ["replays are off" in words for words in told] == [True, False, True]
