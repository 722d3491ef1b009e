"""A small job that saves and resumes, and what can happen to its checkpoints while nobody looks.

Every rank runs these; each returns what it saw. What a run is compared by is `Small.state`: every bit that is trained, every
buffer, and what each source of randomness would draw next, written down here and not by the code under test.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness import BitwitnessError, Guard, Policy
from bitwitness.evidence import Verdict
from bitwitness.guard.rewind import UserGenerator, random_state_kept
from bitwitness.runfiles import RunFiles, new_incident_id, read_label, write_label
from tests.guard import models
from tests.guard.faults import Fault, Injector
from tests.guard.harness import Rank, Seen
from tests.guard.training import adamw, described, logged, plain_update

RARELY: dict[str, Any] = {"audit": "gradients", "audit_every": 1000, "check_every": 1000, "timeout": 60.0}
"""The first step, and the first after a resume, are audited all the same."""

OWN: list[UserGenerator] = [models.OWN_TORCH, models.OWN_NUMPY, models.OWN_PYTHON]
Optimizers = Callable[[nn.Module], list[torch.optim.Optimizer]]


class Counter:
    """Something of the user's own that has a state."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = state["count"]


@dataclass(frozen=True, eq=False)
class Kind:
    """What the job is made of."""

    model: Callable[[], nn.Module] = models.BatchNorm
    optimizers: Optimizers = adamw
    ddp: Mapping[str, Any] = field(default_factory=lambda: {"broadcast_buffers": False})
    scaler: bool = False
    accumulate: int = 1
    faults: tuple[Fault, ...] = ()


PLAIN = Kind()


class Small:
    """The objects of one start of the job. Guarded or not, it has the same loop."""

    def __init__(self, place: Rank, kind: Kind | None = None) -> None:
        self.place, self.kind = place, kind or PLAIN
        torch.manual_seed(2)
        self.module: Any = self.kind.model()
        self.model: nn.Module = self.module
        if dist.is_initialized():
            self.model = DistributedDataParallel(self.module, **self.kind.ddp)
        self.optimizers = self.kind.optimizers(self.module)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if self.kind.scaler else None
        self.counter = Counter()
        self.step = 0
        self.injector = Injector(self.kind.faults, place.rank)
        self.injector.attach(self.module, self.optimizers)
        torch.manual_seed(100 + place.rank)
        random.seed(300 + place.rank)
        np.random.seed(400 + place.rank)  # noqa: NPY002  (one of the sources)
        models.seed_own(200 + place.rank)

    def guard(self, run_dir: Path | None = None, **changes: Any) -> Guard:
        policy = RARELY | changes.pop("policy", {})
        arguments: dict[str, Any] = {
            "loss_fn": models.random_loss,
            "run_dir": run_dir or self.place.run_dir,
            "policy": Policy(**policy),
            "scaler": self.scaler,
            "generators": OWN,
            "stateful": {"counter": self.counter},
        }
        return Guard(self.model, self.optimizers, **(arguments | changes))

    def train(self, guard: Guard, until: int) -> None:
        """Guarded, to before step `until`."""
        while self.step < until:
            self.injector.begin_step(self.step)
            for micro in range(self.kind.accumulate):
                guard.forward_backward(self.batch(micro), last=micro == self.kind.accumulate - 1)
            guard.step(max_grad_norm=1.0)
            self.counter.count += 1
            self.step += 1

    def train_plain(self, until: int) -> None:
        """The same without us."""
        while self.step < until:
            for micro in range(self.kind.accumulate):
                if isinstance(self.model, DistributedDataParallel):
                    self.model.require_backward_grad_sync = micro == self.kind.accumulate - 1
                loss = models.random_loss(self.model, self.batch(micro))
                (self.scaler.scale(loss) if self.scaler is not None else loss).backward()
            plain_update(list(self.module.parameters()), self.optimizers, self.scaler, 1.0)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            self.counter.count += 1
            self.step += 1

    def resume(self, guard: Guard) -> int:
        self.step = guard.resume()
        return self.step

    def batch(self, micro: int) -> Any:
        return models.tokens(self.step, self.place.rank, micro)

    def state(self) -> str:
        return bits(
            self.module.state_dict(),
            dict(self.module.named_buffers()),
            [one.state_dict() for one in self.optimizers],
            self.scaler.state_dict() if self.scaler is not None else None,
            self.counter.count,
            sources(),
        )


def sources() -> list[Any]:
    """The state of everything that can be drawn from."""
    own = [models.OWN_TORCH.get_state(), models.OWN_NUMPY.bit_generator.state, models.OWN_PYTHON.getstate()]
    return [torch.get_rng_state(), random.getstate(), repr(np.random.get_state()), *own]  # noqa: NPY002


def bits(*values: Any) -> str:
    """A digest of every bit of nested states."""
    digest = hashlib.sha256()
    _update(digest, values)
    return digest.hexdigest()[:16]


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            digest.update(str(key).encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            _update(digest, one)
    else:
        digest.update(repr(value).encode())


@functools.cache
def _expected(rank: int, world_size: int, steps: int, kind: Kind) -> str:
    with random_state_kept(torch.device("cpu"), OWN):
        job = Small(Rank(rank, world_size, Path()), kind)
        job.train_plain(steps)
        return job.state()


def expected(place: Rank, steps: int, kind: Kind | None = None) -> str:
    """What a run of so many steps that nobody guards and nothing befalls ends with. Collective, where it is not known yet."""
    return _expected(place.rank, place.world_size, steps, kind or PLAIN)


def caught(act: Callable[[], object]) -> Seen | None:
    """What bitwitness said to it."""
    try:
        act()
    except BitwitnessError as error:
        return described(error, -1)
    return None


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def listing(run_dir: Path) -> dict[str, str]:
    """Every file below a folder, by its content."""
    files = [file for file in sorted(run_dir.rglob("*")) if file.is_file()]
    return {str(file.relative_to(run_dir)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def visible(run_dir: Path) -> list[str]:
    """What is in the folder of checkpoints, hidden things included."""
    return sorted(path.name for path in (run_dir / "checkpoints").glob("*"))


@contextmanager
def seen_log(seen: Seen) -> Iterator[None]:
    seen["logged"] = []
    with logged(seen["logged"]):
        yield


# What happens to them while nobody looks ------------------------------------------------------------------------------


def flip_bit(file: Path) -> None:
    """One bit in the middle of the first half, where in our files there is data and no padding."""
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 4
    file.write_bytes(content)


def truncate(file: Path) -> None:
    """The last 100 bytes are gone."""
    file.write_bytes(file.read_bytes()[:-100])


def other_world(folder: Path) -> None:
    """As if four ranks had saved it."""
    write_label(folder, replace(read_label(folder), world_size=4))


def _empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit in shared.pt": lambda folder: flip_bit(folder / "shared.pt"),
    "a bit in a rank's file": lambda folder: flip_bit(folder / "rank-00001.pt"),
    "a bit in the label": lambda folder: flip_bit(folder / "label.json"),
    "a digit in the label": lambda folder: _change_step(folder / "label.json"),
    "shared.pt truncated": lambda folder: truncate(folder / "shared.pt"),
    "a rank's file truncated": lambda folder: truncate(folder / "rank-00002.pt"),
    "shared.pt empty": lambda folder: (folder / "shared.pt").write_bytes(b""),
    "a rank's file missing": lambda folder: (folder / "rank-00002.pt").unlink(),
    "shared.pt missing": lambda folder: (folder / "shared.pt").unlink(),
    "no label": lambda folder: (folder / "label.json").unlink(),
    "an empty folder": _empty,
    "files of another checkpoint": lambda folder: _copy_from(folder, folder.parent / "step-00000002"),
}
"""Done to the newest of two checkpoints, of step 4."""
OF_FILES_ALONE = (
    "a digit in the label",
    "a rank's file truncated",
    "shared.pt empty",
    "shared.pt missing",
    "an empty folder",
)
"""What tests/test_checkpoint_files.py does as well, without ranks: here with `BITWITNESS_EXHAUSTIVE=1`."""
if os.environ.get("BITWITNESS_EXHAUSTIVE") != "1":
    DAMAGE = {name: damage for name, damage in DAMAGE.items() if name not in OF_FILES_ALONE}

NAMES = {
    "a bit in shared.pt": ("shared.pt differs", "seen by rank 0 (node n0)"),
    "a bit in a rank's file": ("rank-00001.pt differs", "seen by rank 1 (node n1)"),
    "a bit in the label": ("label.json",),
    "a digit in the label": ("label.json", "checksum"),
    "shared.pt truncated": ("shared.pt is truncated",),
    "a rank's file truncated": ("rank-00002.pt is truncated", "rank 2"),
    "shared.pt empty": ("shared.pt is truncated: 0 of",),
    "a rank's file missing": ("rank-00002.pt is missing",),
    "shared.pt missing": ("shared.pt is missing",),
    "no label": ("no label",),
    "an empty folder": ("no label",),
    "files of another checkpoint": ("differs",),
}
"""Words that the refusal must have."""


def _change_step(label: Path) -> None:
    label.write_text(label.read_text().replace('"step": 4', '"step": 5'))


def _copy_from(folder: Path, other: Path) -> None:
    for file in other.glob("*.pt"):
        shutil.copy(file, folder / file.name)


def two_saves(place: Rank, _: None) -> Seen:
    """A run of six steps with checkpoints of steps 2 and 4, which the scenarios below take copies of."""
    job = Small(place)
    with job.guard() as guard:
        for until in (2, 4, 6):
            job.train(guard, until)
            if until < 6:
                guard.save_checkpoint()
    labels = [json.loads((path / "label.json").read_text()) for path in RunFiles(place.run_dir).checkpoints.list()]
    return {"final": job.state(), "expected": expected(place, 6), "visible": visible(place.run_dir), "labels": labels}


@dataclass(frozen=True)
class Copies:
    """What is done to a copy of that run. `source`: the name of the scenario that made it."""

    source: str
    what: Sequence[str] = ()


def copy_of(place: Rank, source: str, name: str, change: Callable[[Path], object] | None = None) -> Path:
    """A copy of a run directory, changed by the first rank, the same for all."""
    run_dir = place.folder / name.replace(" ", "_").replace("'", "")
    if place.rank == 0:
        shutil.copytree(place.folder.parent / source / "run", run_dir)
        if change is not None:
            change(run_dir)
    barrier()
    return run_dir


def damaged(place: Rank, given: Copies) -> Seen:
    """Resume from what is left, train to the end."""
    seen: Seen = {}
    for name in given.what:
        damage = DAMAGE[name]
        run_dir = copy_of(place, given.source, name, lambda run, do=damage: do(run / "checkpoints" / "step-00000004"))  # type: ignore[misc]
        one: Seen = {}
        job = Small(place)
        with seen_log(one), job.guard(run_dir) as guard:
            one["from"] = job.resume(guard)
            job.train(guard, 6)
        one["right"] = job.state() == expected(place, 6)
        one["journal"] = [record for record in RunFiles(run_dir).read_journal(place.rank) if record["kind"] == "resume"]
        seen[name] = one
    return seen


def none_left(place: Rank, source: str) -> Seen:
    """Both are damaged: nothing is started and nothing is touched."""

    def ruin(run_dir: Path) -> None:
        flip_bit(run_dir / "checkpoints" / "step-00000004" / "shared.pt")
        (run_dir / "checkpoints" / "step-00000002" / "label.json").unlink()

    run_dir = copy_of(place, source, "ruined", ruin)
    job = Small(place)
    before = job.state()
    with job.guard(run_dir) as guard:
        files = listing(run_dir / "checkpoints")
        barrier()
        seen: Seen = {"error": caught(guard.resume)}
        barrier()
        seen |= {"untouched": listing(run_dir / "checkpoints") == files, "unchanged": job.state() == before}
        job.train(guard, 1)  # whoever wants to begin anew after this may
    seen["trained"] = job.state() == expected(place, 1)
    return seen


def forbidden(place: Rank, source: str) -> Seen:
    """An incident was found after both were saved, whose window begins at step 1. The job recovers, and saves step 4 anew."""
    run_dir = copy_of(place, source, "forbidden", _an_incident)
    job = Small(place)
    seen: Seen = {}
    with seen_log(seen), job.guard(run_dir) as guard:
        seen["from"] = job.resume(guard)
        job.train(guard, 4)
        seen["saved"] = str(guard.save_checkpoint().name)
        seen["visible"] = visible(run_dir)
    again = Small(place)
    with again.guard(run_dir) as guard:
        seen["again"] = again.resume(guard)
        again.train(guard, 6)
    return seen | {"right": again.state() == expected(place, 6)}


def _an_incident(run_dir: Path) -> None:
    verdict = Verdict("attributed", step=3, kind="compute", check="replay", ranks=(1,), window=(1, 3), reason="a test")
    placement = RunFiles(run_dir).read_run()["placement"]
    record = {"verdict": verdict.to_json(), "observations": [], "placement": placement}
    RunFiles(run_dir).commit_incident(new_incident_id(), record)


# A job that is another one -------------------------------------------------------------------------------------------


class Wider(models.BatchNorm):
    """One layer of another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(models.WIDTH, models.VOCABULARY + 1)


class Longer(models.BatchNorm):
    """One layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.more.weight.sum()


def double() -> nn.Module:
    return models.BatchNorm().double()


def sgd(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(module.parameters(), lr=0.1)]


def twice(module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    return [torch.optim.AdamW(parameters[:3]), torch.optim.AdamW(parameters[3:])]


def groups(module: nn.Module) -> list[torch.optim.Optimizer]:
    parameters = list(module.parameters())
    return [torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:]}])]


def backwards(module: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(list(module.parameters())[::-1])]


class Clock(Counter):
    """Another class."""


def _with_loader(job: Small) -> dict[str, Any]:
    return {"stateful": {"counter": job.counter, "loader": Counter()}}


OTHERS: dict[str, tuple[Kind, Callable[[Small], dict[str, Any]], tuple[str, ...]]] = {
    "wider": (Kind(model=Wider), lambda job: {}, ("another model", "head.weight", "[32, 16] there", "[33, 16] here")),
    "longer": (Kind(model=Longer), lambda job: {}, ("another model", "lacks more.bias, more.weight")),
    "double": (Kind(model=double), lambda job: {}, ("another model", "float32", "float64")),
    "sgd": (Kind(optimizers=sgd), lambda job: {}, ("AdamW", "SGD")),
    "two optimizers": (Kind(optimizers=twice), lambda job: {}, ("AdamW, AdamW",)),
    "groups": (Kind(optimizers=groups), lambda job: {}, ("optimizer 0", "groups")),
    "another order": (
        Kind(optimizers=backwards),
        lambda job: {},
        ("optimizer 0", "its parameter 0 is embedding.weight there, batch_norm.bias here"),
    ),
    "another class": (
        Kind(),
        lambda job: {"stateful": {"counter": Clock()}},
        ("state of a Counter as stateful['counter']", "given a Clock"),
    ),
    "scaler": (Kind(scaler=True), lambda job: {}, ("GradScaler",)),
    "fewer generators": (Kind(), lambda job: {"generators": [models.OWN_TORCH]}, ("3 generators", "given 1")),
    "other generators": (
        Kind(),
        lambda job: {"generators": [models.OWN_NUMPY, models.OWN_TORCH, models.OWN_PYTHON]},
        ("torch, numpy PCG64, random", "numpy PCG64, torch, random", "same order"),
    ),
    "no state for it": (Kind(), _with_loader, ("no state for loader",)),
    "state for nobody": (
        Kind(),
        lambda job: {"stateful": None},
        ("the checkpoint holds that of counter beside: give", "stateful="),
    ),
    "another name on rank 1": (
        Kind(),
        lambda job: {"stateful": {"counter" if job.place.rank != 1 else "clock": job.counter}},
        ("no state for clock", "that of counter", "ranks 1"),
    ),
}
"""A job that is another one than what was saved, and words that the refusal must have."""


def mismatched(place: Rank, source: str) -> Seen:
    """It is said before anything is changed on any rank."""
    seen: Seen = {}
    for name, (kind, changes, _) in OTHERS.items():
        run_dir = copy_of(place, source, name)
        job = Small(place, kind)
        before = job.state()
        with job.guard(run_dir, **changes(job)) as guard:
            seen[name] = {"error": caught(guard.resume), "unchanged": job.state() == before}
    run_dir = copy_of(place, source, "world", lambda run: other_world(run / "checkpoints" / "step-00000004"))
    job = Small(place)
    with job.guard(run_dir) as guard:
        seen["world"] = {"error": caught(guard.resume)}
    return seen
