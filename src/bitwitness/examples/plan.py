"""What the demo is asked for, and what should come of it.

Both are fixed before anything runs: the rank, the device and the step that are hit follow from the settings, and so does
what a guard and a supervisor are worth to somebody who meets such a fault. What really came of it is `report`'s business.
No torch: the command answers at once.
"""

from __future__ import annotations

import random
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.evidence import Persistence
from bitwitness.examples.faults import DAMAGE, FaultKind, line
from bitwitness.examples.ranks import node_name
from bitwitness.runfiles import read_json, write_json
from bitwitness.runfiles.demo import DEMO

FaultChoice = Literal[FaultKind, "none"]
FAULTS: tuple[FaultChoice, ...] = get_args(FaultChoice)
IN_MEMORY: tuple[FaultChoice, ...] = ("weight", "moment")
"""Faults that change a stored number once; the others are wrong arithmetic, which may repeat."""

MIN_STEPS = 6

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Training:
    """One of the three trainings of the demo. Its name is also that of its folder in the run directory."""

    name: Literal["clean", "unguarded", "guarded"]
    guarded: bool
    faulty: bool
    supervised: bool = False


TRAININGS = (
    Training("clean", guarded=True, faulty=False),
    Training("unguarded", guarded=False, faulty=True),
    Training("guarded", guarded=True, faulty=True, supervised=True),
)


_TITLES = {
    "clean": "nothing wrong, guarded",
    "unguarded": "the fault, not guarded",
    "guarded": "the fault, guarded and supervised",
}
_TITLES_WITHOUT_FAULT = {
    "clean": "nothing wrong, guarded",
    "unguarded": "nothing wrong, not guarded",
    "guarded": "nothing wrong, guarded and supervised",
}


@dataclass(frozen=True)
class Settings:
    """What is asked of the demo.

    Raises:
        ConfigurationError: settings that cannot be, or do not go together.
    """

    fault: FaultChoice = "matmul"
    transient: bool = False
    seed: int = 0
    steps: int = 24
    nodes: int = 4
    ranks_per_node: int = 2

    def __post_init__(self) -> None:
        if self.fault not in FAULTS:
            raise ConfigurationError(f"fault {self.fault!r}: must be one of {', '.join(FAULTS)}")
        if self.steps < MIN_STEPS:
            raise ConfigurationError(f"{self.steps} steps are too few to see anything: at least {MIN_STEPS}")
        if self.nodes < 2:
            raise ConfigurationError(
                "one node has nobody to witness it: use at least two, and three nodes to name anybody"
            )
        if self.transient and (self.fault == "none" or self.fault in IN_MEMORY):
            raise ConfigurationError(
                f"a transient fault is one of arithmetic: matmul, gradient or nan, not {self.fault}"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def rank(self) -> int:
        """The rank that is hit: drawn by the seed."""
        return random.Random(f"rank {self.seed}").randrange(self.world_size)  # noqa: S311  (no secret)

    @property
    def step(self) -> int:
        """The step from which it is hit: drawn by the seed from the middle third."""
        return random.Random(f"step {self.seed}").randrange(self.steps // 3, 2 * self.steps // 3)  # noqa: S311

    @property
    def node(self) -> str:
        """The node of the rank that is hit."""
        return node_name(self.rank // self.ranks_per_node)

    @property
    def device(self) -> str:
        """The device to which the fault belongs: another one in its place is healthy."""
        return device_name(self.node, self.rank % self.ranks_per_node)

    @property
    def strikes_once(self) -> bool:
        """Whether the fault is gone after its first strike."""
        return self.transient or self.fault in IN_MEMORY

    @property
    def checkpoint_every(self) -> int:
        """Steps between the saves of the supervised training: the first is on the disk before the fault strikes."""
        return max(2, self.steps // 6)

    @property
    def titles(self) -> Mapping[str, str]:
        """What each training is called, by name."""
        return _TITLES_WITHOUT_FAULT if self.fault == "none" else _TITLES

    @property
    def command(self) -> str:
        """How to have the same again."""
        words = ["bitwitness", "demo", "--fault", self.fault, *(["--transient"] if self.transient else [])]
        for name in ("seed", "steps", "nodes", "ranks_per_node"):
            words += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return shlex.join(words)

    @property
    def fault_words(self) -> str:
        """What is wrong, for a person; empty if nothing is."""
        return "" if self.fault == "none" else DAMAGE[self.fault].words

    @property
    def fault_line(self) -> str:
        """The fault in the grammar; empty if there is none."""
        return "" if self.fault == "none" else line(self.fault, self.rank, self.node, self.step, self.strikes_once)

    def write(self, run_dir: Path) -> None:
        """Leave them for the ranks."""
        write_json(run_dir / DEMO, asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> Settings:
        """What `write` left."""
        record = read_json(run_dir / DEMO)
        return cls(**{name: record[name] for name in cls.__dataclass_fields__})


def device_name(node: str, slot: int) -> str:
    """The n-th processor slot of a node, as guard and supervisor call it."""
    return f"{node}/cpu-{slot}"


def events_file(run_dir: Path, rank: int) -> Path:
    """Where a rank writes its events."""
    return run_dir / "events" / f"rank-{rank:05d}.jsonl"


@dataclass(frozen=True)
class Expected:
    """What should come of the supervised training.

    Attributes:
        ranks: who is named.
        persistence: what the verdict says of it.
        before_update: whether it is caught before the wrong numbers are in the weights.
        generations: how often the job is started.
        resumed_from: the step at which it goes on, from the newest checkpoint before the fault.
        quarantined: the devices that are put into quarantine, so that the spare takes the place of their node.
        exit_code: of `bitwitness run`; 0: it finishes, with the weights of the run that was never hit.
    """

    ranks: tuple[int, ...] = ()
    persistence: Persistence = "unknown"
    before_update: bool = False
    generations: int = 1
    resumed_from: int | None = None
    quarantined: tuple[str, ...] = ()
    exit_code: int = 0


def expected(settings: Settings) -> Expected:
    """What should come of it.

    With three nodes the rank that is hit is named. A fault that is there again when the work is repeated is one of the
    device, which is then replaced; one that is not costs nothing but the way back to the checkpoint. With two nodes nobody
    can be named: one more try under suspicion, and if it happens again a person must look.
    """
    if settings.fault == "none":
        return Expected()
    named, lasting = settings.nodes >= 3, not settings.strikes_once
    persistence: Persistence = "unknown"
    if named and settings.fault not in IN_MEMORY:
        persistence = "persistent" if lasting else "transient"
    return Expected(
        ranks=(settings.rank,) if named else (),
        persistence=persistence,
        before_update=settings.fault not in IN_MEMORY,
        generations=2,
        resumed_from=settings.step // settings.checkpoint_every * settings.checkpoint_every,
        quarantined=(settings.device,) if named and lasting else (),
        exit_code=3 if lasting and not named else 0,
    )
