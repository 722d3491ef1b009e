"""Comparisons small enough for a test: models of a few hundred numbers, all participants in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitwitness.compare.lineup import Lineup, Seat
from bitwitness.compare.participant import Fault
from bitwitness.compare.records import MODES, Account, CompareFiles, Mode, Participant
from bitwitness.compare.settings import Settings
from bitwitness.compare.simulated import Simulated
from bitwitness.compare.workload import Make, Workload
from bitwitness.runfiles.answers import Device
from bitwitness.runfiles.files import write_json

ONE_STEP = "fwd_out:first.up @ step=1 : n=2 -> set=9.0"
"""A fault of one step that spreads."""
CPU = torch.device("cpu")


class Half(nn.Module):
    """A residual half: what stands between its parts is code of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.drop(self.act(self.up(self.norm(x)))))
        return y


class Tiny(nn.Module):
    """Two residual halves and a head, 12 numbers wide unless said otherwise."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = Half(width)
        self.second = Half(width)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.second(self.first(x)))
        return y


def make_with(
    build: Callable[[], nn.Module], inputs: Callable[[int], Any], loss: Callable[[nn.Module, Any], Tensor]
) -> Make:
    """A maker of a workload whose weights do not depend on the seed and whose batches do."""

    def make(device: torch.device, seed: int) -> Workload:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            model = build().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        return Workload(model, optimizer, loss, lambda step: inputs(1000 * seed + step))

    return make


def rows(number: int, count: int = 6, width: int = 12) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number))


def squared(model: nn.Module, batch: Any) -> Tensor:
    out: Tensor = model(batch)
    return out.square().mean()


tiny = make_with(Tiny, rows, squared)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@dataclass
class Broken:
    """Not wrong but broken: raises in a step."""

    step: int

    def attach(self, workload: Workload, *, fresh: bool = True) -> None:
        pass

    def detach(self) -> None:
        pass

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        if step == self.step:
            raise IndexError("index 7000 is out of bounds")
        yield


def device(number: int) -> Device:
    return Device(number, f"node-{number}", f"node-{number}/cpu-0", {"device": "cpu"})


def seats(faults: Mapping[str, Fault], make: Make = tiny, references: int = 2, control: bool = False) -> list[Seat]:
    """The leader is `reference-0`; faults by name."""
    names: list[tuple[str, Any]] = [(f"reference-{n}", "reference" if n else "leader") for n in range(references)]
    names += [("suspect", "suspect")] + ([("control", "control")] if control else [])
    made = []
    for number, (name, role) in enumerate(names):
        fault = faults.get(name)
        who = Participant(name, role, device(number), "drill" if fault is not None else "")
        made.append(Seat(who, CPU, make, fault))
    return made


def compared(
    path: Path,
    fault: str | Mapping[str, Fault] = "",
    *,
    make: Make = tiny,
    modes: Sequence[Mode] = MODES,
    steps: int = 4,
    globs: Sequence[str] = (),
    references: int = 2,
    control: bool = False,
    seed: int = 5,
    keep: int = 2048,
) -> CompareFiles:
    """Run a comparison; a fault as text is the suspect's."""
    faults = {"suspect": Simulated(fault, seed)} if isinstance(fault, str) and fault else fault or {}
    assert not isinstance(faults, str)
    files = CompareFiles(path)
    files.create()
    settings = Settings("test", "tiny", modes=tuple(modes), globs=tuple(globs), steps=steps, seed=seed, keep=keep)
    write_json(files.asked, settings.to_json())
    lineup = seats(faults, make, references, control)
    for seat in lineup:
        files.introduce(seat.participant)
    Lineup(lineup, settings, files).run()
    return files


def account(files: CompareFiles, name: str, mode: Mode = "lock-step") -> Account:
    who = next(one for one in files.introduced() if one.name == name)
    found = files.account(who, mode)
    assert found is not None
    return found


def wrong(files: CompareFiles, name: str = "suspect", mode: Mode = "lock-step") -> list[tuple[int, str, int]]:
    """(step, site, mismatches) of all differences."""
    found = account(files, name, mode)
    return [(step.step, str(found.sites[one.site]), one.mismatches) for step in found.steps for one in step.differences]
