"""A device that is played: what its faults reach, that they are the same each time, and that nobody else is touched."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from bitwitness import ConfigurationError
from bitwitness.compare.simulated import Simulated, untouched
from bitwitness.examples.gpt import GPT, GPTConfig

torch.set_num_threads(1)


@dataclass
class Small:
    model: nn.Module
    optimizers: torch.optim.Optimizer


def small() -> Small:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    return Small(model, torch.optim.SGD(model.parameters(), lr=0.1))


def step_of(workload: Small, step: int) -> list[Tensor]:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    workload.optimizers.zero_grad()
    output = workload.model(batch)
    output.square().mean().backward()
    found = [
        output.detach().clone(),
        *(one.grad.clone() for one in workload.model.parameters() if one.grad is not None),
    ]
    workload.optimizers.step()
    return found


def wrong_of(right: Tensor, wrong: Tensor) -> int:
    return int((right.view(torch.int32) != wrong.view(torch.int32)).sum())


def played(text: str, steps: int = 4, seed: int = 1) -> tuple[list[list[Tensor]], Simulated]:
    workload, fault = small(), Simulated(text, seed)
    fault.attach(workload)
    found = []
    for step in range(steps):
        with fault.during(step):
            found.append(step_of(workload, step))
    fault.detach()
    return found, fault


def healthy(steps: int = 4) -> list[list[Tensor]]:
    workload = small()
    return [step_of(workload, step) for step in range(steps)]


def test_a_fault_of_an_operation_strikes_what_it_gives_out_and_the_same_in_each_run() -> None:
    text = "op:addmm @ every=1 : index=5 -> bit=20 ; permanent"
    one, fault = played(text)
    other, _ = played(text)
    assert all(
        torch.equal(a, b) for left, right in zip(one, other, strict=True) for a, b in zip(left, right, strict=True)
    )
    assert fault.landed == 8  # two linear layers, four steps
    assert wrong_of(healthy()[0][0], one[0][0]) >= 1


def test_a_fault_of_an_operation_strikes_in_the_backward_as_well() -> None:
    _, fault = played("op:mm @ every=1 : n=1 -> bit=30 ; permanent")
    assert fault.landed == 4 * 3  # of two layers two gradients each, but none of the batch


def test_a_fault_of_a_module_leaves_no_operation_behind_and_needs_no_mode() -> None:
    found, fault = played("fwd_out:2 @ every=1 : index=3 -> bit=22 ; permanent")
    assert wrong_of(healthy()[0][0], found[0][0]) == 1
    assert fault.landed == 4


def test_several_devices_are_played_in_one_process_and_none_touches_another() -> None:
    first, second, third = small(), small(), small()
    one = Simulated("fwd_out:0 @ every=1 : n=1 -> bit=22 ; permanent", 1)
    other = Simulated(
        "fwd_out:2 @ every=1 : n=1 -> bit=22 ; permanent & op:gelu @ every=1 : n=1 -> zero ; permanent", 1
    )
    one.attach(first)
    other.attach(second)
    with one.during(0):
        step_of(first, 0)
    assert (one.landed, other.landed) == (1, 0)
    with other.during(0):
        step_of(second, 0)
    assert (one.landed, other.landed) == (1, 2)
    assert torch.equal(step_of(third, 0)[0], healthy(1)[0][0])
    one.detach()
    other.detach()
    assert all(not part._forward_hooks for part in first.model.modules())


def test_one_in_five_calls_and_only_some_magnitudes() -> None:
    _, fault = played("op:addmm @ every=1 : index=0 -> bit=3 ; intermittent=0.2", steps=100)
    assert 20 <= fault.landed <= 62  # of 200: five standard deviations
    nothing, fault = played("op:addmm @ every=1 : all -> bit=20 ; permanent if=1e6..1e9")
    assert fault.landed == 0
    assert "no element" in fault.why_not
    assert all(torch.equal(a, b) for x, y in zip(nothing, healthy(), strict=True) for a, b in zip(x, y, strict=True))


def test_another_attach_is_the_same_device_from_the_beginning() -> None:
    fault = Simulated("op:addmm @ step=1 : n=1 -> bit=20", 3)
    counts = []
    for _ in range(2):
        workload = small()
        fault.attach(workload)
        for step in range(3):
            with fault.during(step):
                step_of(workload, step)
        counts.append(fault.landed)
    assert counts == [1, 1]


def test_what_is_watched_is_not_struck() -> None:
    fault = Simulated("op:* @ every=1 : all -> zero ; permanent", 1)
    with fault.during(0):
        assert not (torch.ones(3) + 1).any()
        with untouched():
            assert (torch.ones(3) + 1).all()


def test_a_view_is_no_output_of_its_own() -> None:
    base = torch.ones(4, 4)
    with Simulated("op:*view* @ every=1 : all -> zero ; permanent", 1).during(0):
        torch.ops.aten._unsafe_view(base, [16])
        base.view(2, 8)
    assert base.all()


def test_a_mode_alone_changes_no_bit_of_a_language_model() -> None:
    def run(fault: Simulated) -> list[Tensor]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(blocks=1, heads=2, width=32, context=16))
        tokens = torch.randint(0, 256, (2, 17))
        with fault.during(0):
            torch.manual_seed(1)
            nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        return [one.grad for one in model.parameters() if one.grad is not None]

    idle = run(Simulated("op:no_such @ every=1 : n=1 -> zero ; permanent", 0))
    plain = run(Simulated("fwd_out @ step=99 : n=1 -> zero", 0))
    assert len(idle) == len(plain) > 0
    assert all(torch.equal(a, b) for a, b in zip(idle, plain, strict=True))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("op:addmm @ every=1 : nonsense -> zero", "nonsense"),
        ("rank=1 op:addmm @ every=1 : n=1 -> zero", "no rank"),
        ("loss @ every=1 : n=1 -> zero ; permanent", "beyond one device"),
        ("comm.pre @ every=1 : n=1 -> zero ; permanent", "beyond one device"),
        ("", "no fault"),
    ],
    ids=["no selection", "rank", "loss", "communication", "empty"],
)
def test_what_cannot_be_played_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Simulated(text, 0)


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("op:addmm @ every=1 : nonsense -> zero", "nonsense"),
        ("op:addmm @ often : n=1 -> zero", "often"),
        ("op:addmm @ every=1 : n=1 -> zero ; sometimes", "sometimes"),
        ("  op:addmm during=never @ every=1 : n=1 -> zero", "never"),
        ("nowhere op:addmm @ every=1 : n=1 -> zero", "nowhere"),
        ("op:addmm", ""),
        ("fwd_out:0 @ every=1 : n=1 -> zero & op:mm @ every=1 : nonsense -> zero", "nonsense"),
    ],
)
def test_an_objection_shows_the_line_as_it_was_written(text: str, at: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Simulated(text, 0)
    said, line, caret = str(refused.value).split("\n")
    assert line.strip() in text
    assert "fwd_out" not in said + line.replace("fwd_out:0", "")
    assert line[caret.index("^") :].startswith(at), refused.value
    assert said.startswith(f"column {caret.index('^') - 1}: ")


def test_a_module_that_is_not_there_is_refused_when_attached() -> None:
    fault = Simulated("fwd_out:nowhere @ every=1 : n=1 -> zero ; permanent", 0)
    with pytest.raises(ConfigurationError, match="nowhere"):
        fault.attach(small())
