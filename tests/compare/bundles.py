"""What tests of bundles share: a small workload, seats of healthy and of played devices, and a comparison of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bitwitness.compare.bundling import Seen, seen_in
from bitwitness.compare.lineup import Lineup, Seat
from bitwitness.compare.records import CompareFiles, Participant, Role
from bitwitness.compare.settings import Settings
from bitwitness.compare.simulated import Simulated
from bitwitness.compare.workload import Workload
from bitwitness.runfiles.answers import Device

CPU = torch.device("cpu")
SETTINGS = Settings("bundles", "tests", modes=("lock-step",), steps=3)


def make(device: torch.device, seed: int) -> Workload:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 8)).to(device)

    def batch(step: int) -> torch.Tensor:
        return torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).to(device)

    return Workload(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(), batch)


def seat(number: int, name: str, role: Role, text: str = "") -> Seat:
    who = Participant(name, role, Device(number, "node", f"node/cpu-{number}", {"device": "cpu", "torch": "any"}), text)
    return Seat(who, CPU, make, Simulated(text, 5) if text else None)


def seats(suspect: str, reference: str = "") -> list[Seat]:
    """A leader, another reference and a suspect, of which the last two may be played."""
    return [
        seat(0, "leader", "leader"),
        seat(1, "reference-1", "reference", reference),
        seat(2, "suspect", "suspect", suspect),
    ]


@dataclass
class Compared:
    seats: list[Seat]
    seen: list[Seen]
    files: CompareFiles


def compared(folder: Path, suspect: str, reference: str = "", settings: Settings = SETTINGS) -> Compared:
    """Run the comparison in lock-step."""
    lineup = seats(suspect, reference)
    files = CompareFiles(folder)
    files.create()
    for one in lineup:
        files.introduce(one.participant)
    Lineup(lineup, settings, files).run()
    return Compared(lineup, seen_in(files, "suspect"), files)
