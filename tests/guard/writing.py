"""Saving under difficulties: disks that refuse, storage that lies, memory that changes, objects that have no state to give."""

from __future__ import annotations

import errno
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from bitwitness import Guard, preemption
from bitwitness.guard import snapshot
from bitwitness.guard.checkpoints import Keeper
from bitwitness.runfiles import RunFiles, read_label
from tests.guard.faults import Fault
from tests.guard.harness import Rank, Seen
from tests.guard.saving import Kind, Small, barrier, caught, expected, flip_bit, listing, seen_log, visible


@dataclass(frozen=True)
class Trouble:
    """What goes wrong on one rank while all save, and words that the error must have on all of them."""

    rank: int
    inside: Callable[[Small], Any]
    words: tuple[str, ...]


@contextmanager
def _limited(job: Small, size: int) -> Iterator[None]:
    """No file of this process may grow beyond this: the system itself refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fsync_fails(name: str) -> Any:
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if name in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    return patch.object(os, "fsync", refuse)


def _path_fails(method: str, number: int) -> Any:
    original = getattr(Path, method)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name.startswith(".staging-step"):
            raise OSError(number, os.strerror(number))
        return original(path, *args, **kwargs)

    return patch.object(Path, method, refuse)


def _lying_storage(name: str) -> Any:
    """What was written is not what the reader finds."""
    forget = snapshot.forget_cached

    def lie(path: Path) -> None:
        if path.name == name:
            flip_bit(path)
        forget(path)

    return patch.object(snapshot, "forget_cached", lie)


def _memory_changes(tensor: Callable[[Small], Tensor]) -> Callable[[Small], Any]:
    """A bit flips after the replicas were compared; afterwards it is as it was."""

    def while_saving(job: Small) -> Any:
        write = Keeper._write

        def with_other_bits(keeper: Keeper, staging: Path, step: int) -> Any:
            flat = tensor(job).detach().view(-1).view(torch.int32)
            flat[3] ^= 1
            try:
                return write(keeper, staging, step)
            finally:
                flat[3] ^= 1

        return patch.object(Keeper, "_write", with_other_bits)

    return while_saving


def _state_is(value: Callable[[], Any]) -> Callable[[Small], Any]:
    return lambda job: patch.object(job.counter, "state_dict", value)


def _no_state() -> Any:
    raise ArithmeticError("no state today")


class Stubborn:
    """Cannot be pickled."""

    def __reduce__(self) -> str:
        raise ValueError("not this one")


TROUBLES = {
    "no room for a rank's file": Trouble(
        1, lambda job: _limited(job, 9_000), ("rank-00001.pt", "File too large", "n1")
    ),
    "no room for the weights": Trouble(0, lambda job: _limited(job, 26_000), ("shared.pt", "File too large")),
    "no room at the fsync": Trouble(2, lambda job: _fsync_fails("rank-00002.pt"), ("rank-00002.pt", "No space left")),
    "no room for the label": Trouble(0, lambda job: _fsync_fails("label.json"), ("label.json", "No space left")),
    "read-only": Trouble(0, lambda job: _path_fails("mkdir", errno.EROFS), ("Read-only file system", "step-")),
    "no renaming": Trouble(0, lambda job: _path_fails("rename", errno.EIO), ("published", "Input/output error")),
    "the weights read differently": Trouble(
        1, lambda job: _lying_storage("shared.pt"), ("shared.pt", "written by rank 0 (node n0)", "rank 1 (node n1)")
    ),
    "a rank's file reads differently": Trouble(
        0, lambda job: _lying_storage("rank-00002.pt"), ("rank-00002.pt", "written by rank 2 (node n2)", "rank 0")
    ),
    "a weight changes in memory": Trouble(
        0,
        _memory_changes(lambda job: job.module.site.weight),
        ("model/site.weight", "memory of rank 0 (node n0)"),
    ),
    "a moment changes in memory": Trouble(
        0,
        _memory_changes(lambda job: job.optimizers[0].state[job.module.site.weight]["exp_avg"]),
        ("exp_avg", "memory of rank 0"),
    ),
    "no state": Trouble(2, _state_is(_no_state), ("stateful['counter']", "no state today", "node n2")),
    "a lock in the state": Trouble(1, _state_is(threading.Lock), ("stateful['counter']", "pickle", "node n1")),
    "a stubborn state": Trouble(1, _state_is(Stubborn), ("stateful['counter']", "not this one", "node n1")),
}


def troubled(place: Rank, _: None) -> Seen:
    """A save that fails a step, of every kind, and in the end one that does not."""
    job, seen = Small(place), Seen()
    with job.guard() as guard:
        job.train(guard, 1)
        guard.save_checkpoint()
        barrier()
        files = listing(place.run_dir / "checkpoints")
        for name, trouble in TROUBLES.items():
            job.train(guard, job.step + 1)
            before = job.state()
            with trouble.inside(job) if place.rank == trouble.rank else nullcontext():
                error = caught(guard.save_checkpoint)
            barrier()
            seen[name] = {
                "error": error,
                "unchanged": job.state() == before,
                "files": listing(place.run_dir / "checkpoints") == files and visible(place.run_dir),
            }
            barrier()
        before = job.state()
        guard.save_checkpoint()
        barrier()
        files = listing(place.run_dir / "checkpoints")
        with _path_fails("rename", errno.EIO) if place.rank == 0 else nullcontext():
            error = caught(guard.save_checkpoint)  # the same step again
        barrier()
        seen["replacing"] = {"error": error, "files": listing(place.run_dir / "checkpoints") == files}
    last = job.step
    seen["steps"] = last
    seen["right"] = before == expected(place, last)
    seen["visible"] = visible(place.run_dir)
    again = Small(place)
    with again.guard() as guard:
        seen["from"] = again.resume(guard)
        again.train(guard, last + 1)
    seen["right afterwards"] = again.state() == expected(place, last + 1)
    return seen


# What must not be written ---------------------------------------------------------------------------------------------


@torch.no_grad()
def _part(job: Small) -> None:
    """The replica of rank 1 is another one from now on."""
    if job.place.rank == 1:
        job.module.head.bias[3] += 1


def parted(place: Rank, reaction: str) -> Seen:
    """The replicas have parted when they are saved; the one before is still there."""
    job, seen = Small(place), Seen()
    with job.guard(policy={"on_detection": reaction}) as guard:
        job.train(guard, 1)
        guard.save_checkpoint()
        job.train(guard, 2)
        _part(job)
        seen["error"] = caught(guard.save_checkpoint)
        foreign = place.folder / "foreign.pt"
        called: list[bool] = []

        def write() -> None:
            with guard.checkpoint(foreign):
                called.append(True)
                if place.rank == 0:
                    torch.save(job.module.state_dict(), foreign)

        seen["foreign"], seen["called"] = caught(write), bool(called)
    barrier()
    seen["visible"] = visible(place.run_dir)
    return seen | _resumed(place)


def in_shadow(place: Rank, _: None) -> Seen:
    """A replay differs, and the weights take what is wrong. A later save is no verified one."""
    job, seen = Small(place, Kind(faults=(Fault("matmul", 1, 1),))), Seen()
    with job.guard(policy={"on_detection": "record", "audit_every": 1}) as guard:
        job.train(guard, 1)
        guard.save_checkpoint()
        job.train(guard, 4)
        guard.save_checkpoint()
    barrier()
    seen["visible"] = visible(place.run_dir)
    again = Small(place)
    with again.guard(policy={"on_detection": "record"}) as guard:
        seen["from in shadow mode"] = again.resume(guard)
    return seen | _resumed(place)


def _resumed(place: Rank) -> Seen:
    labels = {path.name: dict(read_label(path).failed) for path in RunFiles(place.run_dir).checkpoints.list()}
    incidents = {path.name: read_label(path).incidents for path in RunFiles(place.run_dir).checkpoints.list()}
    again, seen = Small(place), Seen(failed=labels, incidents=incidents)
    with seen_log(seen), again.guard() as guard:
        seen["from"] = again.resume(guard)
        again.train(guard, 2)
    return seen | {"right": again.state() == expected(place, 2)}


# When it may be called ------------------------------------------------------------------------------------------------


def out_of_turn(place: Rank, _: None) -> Seen:
    """Saves and resumes where there is no step's end; then where there is."""
    job, seen = Small(place), Seen()
    with job.guard() as guard:
        seen["nothing there"] = guard.resume()
        seen["at the beginning"] = guard.save_checkpoint().name
        guard.forward_backward(job.batch(0))
        seen["after a micro-batch"] = caught(guard.save_checkpoint)
        seen["resume after a micro-batch"] = caught(guard.resume)
        guard.verify_gradients()
        nn.utils.clip_grad_norm_(job.module.parameters(), 1.0)
        for optimizer in job.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen["before verify_weights"] = caught(lambda: guard.stage_checkpoint(place.folder / "x"))
        guard.verify_weights()
        job.step, job.counter.count = 1, 1
        seen["resume after a step"] = caught(guard.resume)
        job.train(guard, 3)
        seen["gone"] = _while_gone(place, lambda: caught(guard.save_checkpoint))
    run = RunFiles(place.run_dir).read_run()
    if place.rank == 0:
        RunFiles(place.run_dir).write_run(run | {"run": "another"})
    barrier()
    seen["closed"] = caught(guard.save_checkpoint)
    seen["right"] = job.state() == expected(place, 3)
    again = Small(place)
    with seen_log(seen), again.guard() as guard:
        seen["from"] = again.resume(guard)
        again.train(guard, 3)
    seen["runs"] = [run["run"], RunFiles(place.run_dir).read_run()["run"]]
    seen["right again"] = again.state() == expected(place, 3)
    return seen


def _while_gone(place: Rank, act: Callable[[], Seen | None]) -> list[Any]:
    """While the storage is not mounted: what was said, and whether something stands there instead."""
    barrier()
    if place.rank == 0:
        place.run_dir.rename(place.folder / "away")
    barrier()
    said = act()
    barrier()
    seen = [said, place.run_dir.exists()]
    barrier()
    if place.rank == 0:
        (place.folder / "away").rename(place.run_dir)
    barrier()
    return seen


def caught_by_the_loop(place: Rank, _: None) -> Seen:
    """A micro-batch raises on every rank, the loop leaves it out and goes on; a save afterwards is like any other."""
    job, seen = Small(place), Seen()
    with job.guard() as guard:
        job.train(guard, 1)
        try:
            guard.forward_backward({"nothing": 0})
        except KeyError as error:
            seen["raised"] = str(error)
        barrier()
        job.train(guard, 2)
        seen["saved"] = guard.save_checkpoint().name
    return seen


def retained(place: Rank, _: None) -> Seen:
    """Twelve saves, two of which are to be kept."""
    job, seen = Small(place), Seen()
    with job.guard(policy={"keep_checkpoints": 2}) as guard:
        for until in range(1, 13):
            job.train(guard, until)
            guard.save_checkpoint()
    barrier()
    return seen | {"visible": visible(place.run_dir)}


def told_to_stop(place: Rank, _: None) -> Seen:
    """One rank is told to stop during step 1."""
    job, seen = Small(place), Seen(steps=[])
    try:
        with job.guard() as guard:
            for until in range(1, 4):
                if until == 2 and place.rank == 1:
                    preemption.request()
                job.train(guard, until)
                seen["steps"].append(guard.should_stop)
    finally:
        preemption._asked.clear()
    return seen


def under_suspicion(place: Rank, _: None) -> Seen:
    """Whatever the policy says, everything is checked at every step."""
    seen, job = Seen(), Small(place)
    with patch.dict(os.environ, {"BITWITNESS_SUSPICION": "1"}), seen_log(seen), job.guard() as guard:
        job.train(guard, 3)
        seen["passed"] = dict(guard._last_passed)
    return seen | {"right": job.state() == expected(place, 3)}


def in_quarantine(place: Rank, _: None) -> Seen:
    """A device was denied on node n1; a job in which it has another rank and its node another name."""
    seen = Seen()
    quarantine = RunFiles(place.run_dir).create().quarantine
    barrier()
    if place.rank == 0:
        quarantine.deny_devices(["chip-7"], node="n1", reason="a test")
    barrier()
    moved = {"BITWITNESS_NODE": "renamed" if place.rank == 2 else f"n{place.rank}", "LOCAL_RANK": "1"}
    devices = {"BITWITNESS_DEVICES": f"chip-{10 + place.rank}, chip-{7 if place.rank == 2 else 20 + place.rank}"}
    with patch.dict(os.environ, moved | devices):
        job = Small(place)
        seen["refused"] = caught(job.guard)
        barrier()
        if place.rank == 0:
            quarantine.clear(["chip-7"], reason="repaired")
            quarantine.deny_node("n0", reason="another test")
        barrier()
        seen["node"] = caught(job.guard)
        barrier()
        if place.rank == 0:
            quarantine.clear(None, reason="repaired")
        barrier()
        with job.guard() as guard:
            job.train(guard, 1)
    seen["placement"] = [one["device"] for one in RunFiles(place.run_dir).read_run()["placement"]]
    return seen | {"right": job.state() == expected(place, 1)}


# Somebody else's writer -----------------------------------------------------------------------------------------------


def _load(path: Path) -> Mapping[str, Tensor]:
    loaded: Mapping[str, Tensor] = torch.load(path, weights_only=True)
    return loaded


def _write_one(job: Small, path: Path) -> None:
    if job.place.rank == 0:
        torch.save(job.module.state_dict(), path)


def _write_folder(job: Small, path: Path) -> None:
    """As torch's distributed checkpoints: a part of each rank, and a hidden index."""
    if job.place.rank == 0:
        (path / "deep").mkdir(parents=True)
    barrier()
    names = sorted(job.module.state_dict())
    state = {name: job.module.state_dict()[name] for name in names[job.place.rank :: job.place.world_size]}
    time.sleep(0.1 * job.place.rank)  # who writes later than the first is waited for
    torch.save(state, path / "deep" / f"__{job.place.rank}_0.distcp")
    if job.place.rank == 0:
        (path / ".metadata").write_bytes(b"an index")


def _load_folder(path: Path) -> Mapping[str, Tensor]:
    parts = [_load(file) for file in sorted(path.rglob("*.distcp"))]
    return {name: tensor for part in parts for name, tensor in part.items()}


def _raise_on(rank: int | None) -> Callable[[Small, Path], None]:
    def write(job: Small, path: Path) -> None:
        _write_one(job, path)
        if rank in (None, job.place.rank):
            raise OSError("the writer has no room")

    return write


def _write_wrong(job: Small, path: Path) -> None:
    if job.place.rank == 0:
        state = {name: tensor.clone() for name, tensor in job.module.state_dict().items()}
        state["site.weight"].view(-1)[5] += 1
        torch.save(state, path)


def _unreadable(path: Path) -> Mapping[str, Tensor]:
    raise KeyError("no such layout")


WRITERS: dict[str, tuple[Callable[[Small, Path], None], Callable[[Path], Any] | None, tuple[str, ...]]] = {
    "a file": (_write_one, None, ()),
    "a file, read back": (_write_one, _load, ()),
    "a folder": (_write_folder, None, ()),
    "a folder, read back": (_write_folder, _load_folder, ()),
    "other weights, read back": (_write_wrong, _load, ("model/site.weight", "rank 1 (node n1)", "not labelled")),
    "raises on every rank": (_raise_on(None), None, ()),
    "raises on rank 2": (_raise_on(2), _load, ("OSError: the writer has no room", "not labelled")),
    "writes nothing": (lambda job, path: None, None, ("holds no file", "was it written")),
    "cannot be read": (_write_one, _unreadable, ("could not be read back", "no such layout", "node n1")),
    "reads as nothing": (_write_one, lambda path: {}, ("it holds no tensors",)),
    "reads as a list": (_write_one, lambda path: [1], ("could not be read back", "returned a list")),
    "reads as None": (_write_one, lambda path: None, ("could not be read back", "returned a NoneType")),
    "names of DDP's": (
        _write_one,
        lambda path: {f"module.{name}": one for name, one in _load(path).items()},
        ("returned module.", "prefix of DDP's", "nothing of that name", "not labelled"),
    ),
}
"""A writer, a reader, and words of the error; none where there is none, or where it is the writer's own."""


def foreign(place: Rank, _: None) -> Seen:
    """Every writer once, a step between two; then one that takes two steps."""
    job, seen = Small(place), Seen()
    with job.guard() as guard:
        for name, (write, read, _words) in WRITERS.items():
            job.train(guard, job.step + 1)
            path = place.folder / name.replace(" ", "-").replace(",", "")
            seen[name] = _one_writer(guard, job, path, write, read)
        with ExitStack() as stack:
            if place.rank == 1:
                stack.enter_context(_lying_storage("lied-to.pt"))
            path = place.folder / "lied-to.pt"
            seen["lied to"] = _one_writer(guard, job, path, _write_one, None)
        own = [job.place.folder / f"of-{job.place.rank}.pt", job.place.run_dir / "checkpoints" / "mine.pt"]
        seen["refused"] = [caught(lambda path=path: guard.stage_checkpoint(path)) for path in own]  # type: ignore[misc]
        seen["asynchronous"] = _slow_writer(guard, job)
    return seen | {"right": job.state() == expected(place, job.step)}


def _one_writer(
    guard: Guard, job: Small, path: Path, write: Callable[[Small, Path], None], read: Callable[[Path], Any] | None
) -> Seen:
    own: list[str] = []

    def run() -> None:
        try:
            with guard.checkpoint(path, read_back=read):
                write(job, path)
        except OSError as error:
            own.append(str(error))

    error = caught(run)
    barrier()
    label = path / "label.json" if path.is_dir() else path.with_name(f"{path.name}.label.json")
    found = read_label(path) if label.exists() else None
    return {
        "error": error,
        "own": own,
        "step": found.step if found else None,
        "at": job.step,
        "files": sorted(found.files) if found else [],
        "read_back": found.read_back if found else "",
    }


def _slow_writer(guard: Guard, job: Small) -> Seen:
    """Staged, then two steps, then written; once with the weights that were staged, once with those of then."""
    paths = [job.place.folder / "late.pt", job.place.folder / "too-late.pt"]
    staged = [guard.stage_checkpoint(path, _load) for path in paths]
    then = {name: tensor.clone() for name, tensor in job.module.state_dict().items()}
    step = job.step
    job.train(guard, job.step + 2)
    if job.place.rank == 0:
        torch.save(then, paths[0])
    _write_one(job, paths[1])
    mixed = caught(staged[job.place.rank == 1].label)
    label = staged[0].label()
    error = caught(staged[1].label)
    barrier()
    return {
        "step": step,
        "label": read_label(label).step,
        "error": error,
        "mixed": mixed,
        "labelled": paths[1].with_name("too-late.pt.label.json").exists(),
    }
