"""The injector on a job of one process: every target is hit, proved, recorded, and can be had again to the same bits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bitwitness import ConfigurationError, CorruptionDetected, Guard, Policy
from bitwitness.errors import CheckpointError
from bitwitness.faults import record
from bitwitness.faults.active import Surveyed
from bitwitness.faults.grammar import parse
from bitwitness.faults.injector import Injector
from bitwitness.mutate import FaultDidNotLand


class Net(nn.Module):
    """A bit of everything that can be hit."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.act = nn.Tanh()
        self.same = nn.Identity()
        self.head = nn.Linear(16, 4)
        self.recompute = recompute

    def body(self, x: Tensor) -> Tensor:
        made: Tensor = self.same(self.act(self.norm(self.up(x))))
        return made

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        logits: Tensor = self.head(nn.functional.dropout(hidden, 0.1, self.training))
        return logits


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"])


def bf16_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_fn(model, batch)


def batch(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(6, 8, generator=generator), "y": torch.randint(0, 4, (6,), generator=generator)}


class Outcome:
    """What a run left behind: its weights as bytes, what has landed, what was raised."""

    def __init__(self) -> None:
        self.injector: Injector
        self.weights = b""
        self.error: Exception | None = None

    @property
    def strikes(self) -> list[dict[str, Any]]:
        return [one.to_json() for one in self.injector.strikes]


def train(
    faults: Any,
    *,
    steps: int = 4,
    guarded: Path | None = None,
    loss: Callable[[Any, Any], Tensor] = loss_fn,
    make: Callable[[nn.Module], Any] = lambda module: module,
    recompute: bool = False,
    momentum: bool = False,
    out: Path | None = None,
    seed: int = 0,
) -> Outcome:
    torch.manual_seed(0)
    module = Net(recompute)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(module.parameters())
    if momentum:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    model = make(module)
    seen = Outcome()
    with Injector(faults, model, optimizer, seed=seed, record=out) as seen.injector:
        guard = None
        if guarded is not None:
            guard = Guard(model, optimizer, loss, run_dir=guarded, policy=Policy.every_step(audit="gradients"))
        try:
            for step in range(steps):
                if guard is not None:
                    guard.forward_backward(batch(step))
                    guard.step()
                    guard.save_checkpoint()
                else:
                    loss(model, seen.injector.batch(batch(step))).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        except (CorruptionDetected, CheckpointError) as error:
            seen.error = error
        finally:
            if guard is not None:
                guard.close()
    seen.weights = b"".join(one.detach().numpy().tobytes() for one in module.state_dict().values())
    return seen


ARITHMETIC = (
    "fwd_in:head @ step=2 : n=1 -> bit=24",
    "fwd_w:head @ step=2 : n=1 -> bit=24",
    "fwd_out:up @ step=2 : n=1 -> bit=24",
    "fwd_out:same @ step=2 : n=2 -> swap",
    "grad_out:head @ step=2 : n=1 -> scale=8.0",
    "grad_in:head @ step=2 : row -> scale=8.0",
    "grad_w:up.weight @ step=2 : tile=3x3 -> bit=24",
    "fwd_out:act @ steps=1..3 : run=3 -> zero ; permanent redraw",
    "each fwd_out:*[mt] @ every=1 from=1 : n=1 -> add=0.5 ; intermittent=0.5",
    "fwd_out:up @ step=2 : all -> copy=stale",
)
MEMORY = (
    "param:up.* @ step=2 : largest -> sign",
    "during=train param:head.weight @ step=2 : n=3 -> random",
    "during=update exp_avg_sq:head.weight @ step=2 : all -> scale=16.0",
    "buffer:norm.running_var @ step=1 : n=2 -> bits=2",
    "exp_avg:up.weight @ step=1 : all -> scale=16.0",
    "exp_avg_sq @ step=1 : n=3 -> set=1.0",
)
OTHER = ("loss @ step=2 : n=1 -> scale=2.0", "input:x @ step=2 : n=1 -> bit=22", "rng:torch @ step=2 : all -> random")


@pytest.mark.parametrize("line", [*ARITHMETIC, *MEMORY, *OTHER])
def test_a_fault_lands_and_its_record_does_the_same_again(line: str, tmp_path: Path) -> None:
    clean, hit = train(()), train(line, out=tmp_path / "record.jsonl")
    assert hit.strikes
    assert (hit.weights == clean.weights) == line.startswith("loss")  # which backward does not read
    again = train(record.read(tmp_path / "record.jsonl"))
    assert again.weights == hit.weights
    assert again.strikes == hit.strikes
    assert train(f"@{tmp_path / 'record.jsonl'}").strikes == hit.strikes


@pytest.mark.parametrize("line", [*ARITHMETIC[:8], OTHER[0]])
def test_a_guarded_job_is_hit_at_the_same_bits(line: str, tmp_path: Path) -> None:
    """The first strike is the same with and without a guard; and with it, repeats of the same work notice."""
    plain, guarded = train(line), train(line, guarded=tmp_path)
    first, same = plain.strikes[0], guarded.strikes[0]
    assert first == same
    caught = isinstance(guarded.error, CorruptionDetected)
    assert caught == ("permanent" not in line)  # in one process a fault that always comes is its own witness


@pytest.mark.parametrize("line", [*ARITHMETIC, *MEMORY, *OTHER[:2]])
def test_random_states_are_left_alone(line: str) -> None:
    """As many numbers were drawn as without a fault."""
    left = []
    for faults in ((), line):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002  (the one that users draw from)
        train(faults)
        left.append((float(torch.rand(())), random.random(), float(np.random.random())))  # noqa: NPY002
    assert left[0] == left[1]


def test_an_idle_injector_changes_no_bit() -> None:
    assert train("rank=0 fwd_out:up @ p=1e-12 : n=1 -> bit=3").weights == train(()).weights


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({"loss": bf16_loss}, "torch.bfloat16"), ({"recompute": True}, "torch.float32"), ({}, "torch.float32")],
)
@pytest.mark.parametrize("target", ["fwd_out:up", "grad_in:head", "fwd_w:head"])
def test_autocast_and_recomputation(options: dict[str, Any], dtype: str, target: str) -> None:
    seen = train(f"{target} @ step=1 : n=1 -> bit=-3", **options)
    assert len(seen.strikes) == 1  # though a recomputed forward comes twice
    expected = dtype if target == "fwd_out:up" else seen.strikes[0]["dtype"]
    assert seen.strikes[0]["dtype"] == expected
    assert seen.weights != train((), **options).weights


def test_what_a_fault_belongs_to(tmp_path: Path) -> None:
    module = Net()
    optimizer = torch.optim.AdamW(module.parameters())
    for faults, here in (
        ("rank=1 loss @ step=0 : n=1 -> zero", False),
        ("node=b loss @ step=0 : n=1 -> zero", False),
        ("node=a loss @ step=0 : n=1 -> zero", True),
        ("rank=* loss @ step=0 : n=1 -> zero", True),
    ):
        with Injector(faults, module, optimizer, rank=0, world_size=3, node="a") as injector:
            loss_fn(module, batch(0)).backward()
        assert bool(injector.struck) == here, faults


def test_a_drawn_rank_is_the_same_everywhere() -> None:
    module = Net()
    for seed in range(5):
        hit = 0
        for rank in range(4):
            with Injector("loss @ step=0 : n=1 -> zero", module, rank=rank, world_size=4, seed=seed) as injector:
                loss_fn(module, batch(0)).backward()
            hit += injector.struck
        assert hit == 1


# Loud failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fwd_out:act @ step=1 : n=1 -> stuck0=1 ; once if=5.0..6.0", "no element"),
        ("param:norm.bias @ step=90 : n=1 -> nan", "ended before step 90"),
        ("param:norm.bias @ step=0 : all -> add=1e-12", "not one bit"),
        ("fwd_out:act @ step=1 micro=3 : n=1 -> nan", "never reached"),
    ],
)
def test_a_fault_that_changes_nothing_is_an_error(line: str, words: str) -> None:
    with pytest.raises(FaultDidNotLand, match=words):
        train(line)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fwd_out:nix @ step=1 : n=1 -> bit=1", "no fwd_out matches 'nix'; there is"),
        ("param:up.weight @ step=1 : index=999 -> bit=1", "index 999"),
        ("param:up.weight @ step=1 : n=1 -> bit=40", "bits 0 to 31"),
        ("fwd_out:up @ step=1 : n=1 -> bit=40", "bits 0 to 31"),
        ("fwd_out:up @ step=1 : n=1000 -> bit=4", "only 96 elements"),
        ("momentum_buffer @ step=1 : n=1 -> bit=1", "keeps no momentum_buffer"),
        ("comm.pre @ step=1 : n=1 -> bit=1", "it takes DDP"),
        ("rank=3 loss @ step=0 : n=1 -> zero", "there is no rank 3"),
        ("rng:cude @ step=0 : n=1 -> random", "random state is that of"),
    ],
)
def test_impossible_faults_are_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        train(line)


def test_compiled_code_is_named() -> None:
    with pytest.raises(ConfigurationError, match="up is compiled"):
        train("fwd_out:up @ step=1 : n=1 -> bit=1", make=lambda module: torch.compile(module, backend="eager"))
    seen = train(
        "grad_w:up.weight @ step=1 : n=1 -> bit=24", make=lambda module: torch.compile(module, backend="eager")
    )
    assert seen.strikes


def test_a_record_of_another_job_is_refused(tmp_path: Path) -> None:
    train("fwd_out:up @ step=2 : n=1 -> bit=24", out=tmp_path / "record.jsonl")
    with pytest.raises(ConfigurationError, match="other bits at step 2"):
        train(record.read(tmp_path / "record.jsonl"), momentum=True)


@pytest.mark.parametrize("text", ["", "nonsense\n", '{"schema": 1}\n', '["x"]\n', '{"site": {}}\n{"site'])
def test_a_damaged_record_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text(text)
    with pytest.raises(ConfigurationError, match=r"record"):
        record.read(tmp_path / "record.jsonl")


def test_two_injectors_at_once_are_refused() -> None:
    module = Net()
    with Injector((), module), pytest.raises(RuntimeError, match="already has a probe"), Injector((), module):
        pass


# The guard's own work ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "work"),
    [
        ("during=replay fwd_out:up @ step=2 : n=1 -> bit=24", "replay"),
        ("during=fingerprint param:up.weight @ step=2 : n=1 -> bit=24", "fingerprint"),
        ("digest @ step=2 : n=1 -> bit=3", "train"),
        ("during=save ckpt:shared.pt @ step=2 : n=1 -> bit=3", "save"),
        ("during=save param:up.weight @ step=2 : n=1 -> bit=24", "save"),
        ("ckpt:shared.pt @ step=2 : n=1 -> bit=3", "train"),
    ],
)
def test_the_guards_own_work_is_hit(line: str, work: str, tmp_path: Path) -> None:
    seen = train(line, guarded=tmp_path)
    assert [one["site"]["work"] for one in seen.strikes] == [work]
    if work == "save":
        assert isinstance(seen.error, CheckpointError)
    clean = train((), guarded=tmp_path / "clean")
    if seen.error is None:
        assert seen.weights == clean.weights  # nothing of training was touched


def test_a_survey_looks_and_leaves_everything_as_it_is() -> None:
    lines = ("fwd_out:up @ step=50 : n=1 -> bit=40", "exp_avg:up.bias @ step=50 : n=3 -> bit=4")
    surveyed = [Surveyed(parse(line), number, 0) for number, line in enumerate(lines)]
    seen = train(surveyed[:1])
    assert seen.weights == train(()).weights
    assert "bits 0 to 31" in surveyed[0].problem
    train(surveyed[1:])
    assert not surveyed[1].problem


def test_several_faults_in_one_run() -> None:
    seen = train("fwd_out:up @ step=1 : n=1 -> bit=24 & param:head.bias @ step=2 : n=1 -> bit=24")
    assert [one["site"]["fault"] for one in seen.strikes] == [0, 1]
