"""What is refused before a comparison begins, and that each refusal says what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitwitness.compare.checking import check_participants, check_seat, check_work, repeats
from bitwitness.compare.exchange import Alone
from bitwitness.compare.lineup import Seat
from bitwitness.compare.participant import Fault
from bitwitness.compare.records import Participant, Role
from bitwitness.compare.settings import Settings
from bitwitness.compare.workload import Make, Workload
from bitwitness.errors import ConfigurationError
from bitwitness.runfiles.answers import Device
from tests.compare.lineups import make_with, rows, squared

CPU = torch.device("cpu")
SETTINGS = Settings("test", "tiny", steps=4)

Loss = Callable[[nn.Module, Any], Tensor]


def device(number: int, **kind: str) -> Device:
    return Device(number, f"node-{number}", f"GPU-{number}", {"device": "H200", "torch": "2.13"} | kind)


def participants(*roles: Role) -> list[Participant]:
    return [Participant(f"{role}-{number}", role, device(number)) for number, role in enumerate(roles)]


def numbers(seed: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


def making(
    loss: Loss = squares,
    *,
    build: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)),
    batch: Callable[[int, int], Any] = lambda seed, step: numbers(100 * seed + step),
    weights: Callable[[int], int] = lambda seed: 1,
    evaluate: Callable[[nn.Module], dict[str, Any]] | None = None,
) -> Make:
    """A maker; each argument is what one test makes otherwise."""

    def make(device: torch.device, seed: int) -> Workload:
        torch.manual_seed(weights(seed))
        model = build().to(device)
        trained = list(model.parameters()) or [nn.Parameter(torch.ones(1))]
        return Workload(model, torch.optim.SGD(trained, lr=0.1), loss, lambda step: batch(seed, step), evaluate)

    return make


def seats(make: Make, fault: Fault | None = None, control: bool = False) -> list[Seat]:
    roles: list[Role] = ["suspect", "leader", "reference", "reference"]
    roles += ["control"] if control else []
    made = [Seat(one, CPU, make) for one in participants(*roles)]
    made[2] = replace(made[2], fault=fault)
    return made


def refused(make: Make, settings: Settings = SETTINGS, **given: Any) -> str:
    with pytest.raises(ConfigurationError, match="nothing can be compared") as raised:
        check_work(seats(make, **given), settings, Alone())
    return str(raised.value)


# Who --------------------------------------------------------------------------------------------------------------


def test_two_references_of_one_kind_are_enough() -> None:
    check_participants(participants("suspect", "leader", "reference"))
    check_participants(participants("suspect", "suspect", "leader", "reference", "reference", "control"))


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (("suspect", "leader"), "at least two healthy references of its kind, and there are 1"),
        (("suspect", "leader", "control"), "at least two healthy references of its kind, and there are 1"),
        (("suspect",), "and there are 0"),
        (("leader", "reference", "reference"), "there is no suspect: say with --suspect"),
    ],
)
def test_too_few(roles: tuple[Role, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_participants(participants(*roles))


def test_one_device_by_two_names_is_no_reference() -> None:
    found = participants("suspect", "leader", "reference")
    found[2] = replace(found[2], device=replace(found[2].device, device="GPU-0", node="another-name"))
    with pytest.raises(ConfigurationError, match="suspect-0 and reference-2 are the same device, GPU-0"):
        check_participants(found)


def test_a_control_shares_a_device() -> None:
    found = participants("suspect", "leader", "reference", "control")
    found[3] = replace(found[3], device=replace(found[2].device, rank=3))
    check_participants(found)


def test_devices_of_two_kinds_name_what_differs() -> None:
    found = participants("suspect", "leader", "reference")
    found[1] = replace(found[1], device=device(1, torch="2.12", driver="570.86"))
    with pytest.raises(ConfigurationError, match=r"driver: - and 570.86; torch: 2.13 and 2.12") as raised:
        check_participants(found)
    assert "device: " not in str(raised.value)


# What -------------------------------------------------------------------------------------------------------------


def test_work_that_repeats_is_taken() -> None:
    assert check_work(seats(making(), control=True), SETTINGS, Alone()) == []
    assert repeats(seats(making())[1], SETTINGS) == ""


def test_nothing_is_left_changed() -> None:
    before = torch.get_rng_state()
    deterministic = torch.are_deterministic_algorithms_enabled()
    check_work(seats(making()), SETTINGS, Alone())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.are_deterministic_algorithms_enabled() == deterministic


def drawn_elsewhere(model: nn.Module, batch: Tensor) -> Tensor:
    first, *rest = model.children()
    out: Tensor = first(batch) * (1 + int.from_bytes(os.urandom(4), "little") / 2**33)
    for layer in rest:
        out = layer(out)
    return out.square().mean()


def test_work_that_does_not_repeat_names_the_first_place() -> None:
    said = refused(making(drawn_elsewhere))
    assert "on leader-1: step 0: 1 fwd_in came out otherwise when the same was computed a second time" in said
    assert "kernels of your own" in said
    assert "fwd_in came out otherwise" in repeats(seats(making(drawn_elsewhere))[1], SETTINGS)


def test_a_batch_that_is_drawn_anew() -> None:
    said = refused(making(batch=lambda seed, step: numbers(int.from_bytes(os.urandom(4), "little"))))
    assert "batch(0) gives other data when it is asked a second time" in said
    assert "Make batch(step) a function of the step alone" in said


def test_a_batch_that_goes_on_where_it_was() -> None:
    generators = torch.Generator()

    def build() -> nn.Module:
        generators.manual_seed(5)
        return nn.Sequential(nn.Linear(4, 2))

    said = refused(making(build=build, batch=lambda seed, step: torch.randn(3, 4, generator=generators)))
    assert "batch(0) gives other data when it is asked a second time" in said


def test_weights_that_are_drawn_anew() -> None:
    said = refused(making(weights=lambda seed: int.from_bytes(os.urandom(4), "little")))
    assert "initial weights: 0.weight came out otherwise" in said
    assert "Set a fixed seed in the function that makes the workload" in said


def test_only_one_device_does_not_repeat() -> None:
    class Fickle:
        """Multiplies by something else each time it is attached."""

        count = 0

        def attach(self, workload: Workload, *, fresh: bool = True) -> None:
            self.count += 1
            with torch.no_grad():
                list(workload.model.parameters())[-1].mul_(0).add_(self.count)

        @contextmanager
        def during(self, step: int) -> Iterator[None]:
            yield

        def detach(self) -> None:
            pass

    said = refused(making(), fault=Fickle())
    assert "on reference-2: " in said
    assert "It does repeat on leader-1, reference-3: then reference-2 itself is under suspicion" in said


def raising(model: nn.Module, batch: Tensor) -> Tensor:
    raise KeyError("pixels")


def infinite(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch) * float("inf")


def leaving(model: nn.Module, batch: Tensor) -> Tensor:
    sys.exit(7)


def detached(model: nn.Module, batch: Tensor) -> Tensor:
    return squares(model, batch).detach()


def several(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch)
    return out


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (making(several), "loss_fn returned [3, 2]: return a tensor with one element"),
        (making(infinite), "the loss is inf in step 0"),
        (making(raising), "on leader-1: KeyError: 'pixels' ("),
        (making(build=lambda: nn.Sequential(nn.ReLU(), nn.ReLU())), "the model has no parameters that are trained"),
        (making(build=lambda: nn.Linear(4, 2)), "the model has no submodules"),
        (making(leaving), "on leader-1: it raised SystemExit(7), which ends a process"),
        (making(detached), "loss_fn returned a tensor without a gradient"),
        (making(evaluate=lambda model: [1]), "evaluate gives a list: give a dictionary"),  # type: ignore[arg-type,return-value]
        (making(evaluate=lambda model: sys.exit(0)), "it raised SystemExit(0)"),
        (making(batch=lambda seed, step: sys.exit(0)), "it raised SystemExit(0)"),
        (making(evaluate=lambda model: {"accuracy": "good"}), "evaluate gives 'accuracy' as str"),
        (making(evaluate=lambda model: {"answers": [0.5]}), "evaluate gives 'answers' as list"),
    ],
    ids=[
        "vector",
        "infinite",
        "raises",
        "nothing trained",
        "no submodules",
        "exits",
        "detached",
        "list",
        "exits at evaluate",
        "exits at batch",
        "text",
        "fractions",
    ],
)
def test_work_that_cannot_be_compared(make: Make, message: str) -> None:
    assert message in refused(make)


def test_the_place_in_the_users_code_is_named() -> None:
    assert f"({__file__}:" in refused(making(raising))


def test_a_glob_without_a_match_names_close_ones() -> None:
    assert "--module 'blox*' matches no submodule" in refused(making(), replace(SETTINGS, globs=("blox*",)))


def test_a_control_has_the_same_weights() -> None:
    said = refused(making(weights=lambda seed: seed), control=True)
    assert "with another seed the workload has other initial weights (0.weight)" in said
    assert "--no-control" in said


def test_a_control_with_the_same_data_is_told() -> None:
    (said,) = check_work(seats(making(batch=lambda seed, step: numbers(step)), control=True), SETTINGS, Alone())
    assert "with another seed the first batch is the same" in said


def test_references_that_differ_from_the_start_are_told() -> None:
    class Other:
        """A device that repeats, and is wrong."""

        def attach(self, workload: Workload, *, fresh: bool = True) -> None:
            with torch.no_grad():
                list(workload.model.parameters())[-1].add_(1)

        @contextmanager
        def during(self, step: int) -> Iterator[None]:
            yield

        def detach(self) -> None:
            pass

    (said,) = check_work(seats(making(), fault=Other()), SETTINGS, Alone())
    assert "reference-2 and leader-1 differ in initial weights: 2.bias" in said


class Unlike(nn.Module):
    """Asks whether somebody has hooks on it, and computes otherwise then, as fast paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y * 1.5 if self.inner._forward_hooks else y


def test_work_that_is_trained_otherwise_when_it_is_watched_is_refused() -> None:
    found = check_seat(seats(make_with(Unlike, rows, squared))[1], SETTINGS)
    assert "trained otherwise when its modules have hooks: inner.weight" in found.problem
