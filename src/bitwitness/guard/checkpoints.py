"""Checkpoints that can be trusted: vetoed, written whole, read back on another node, labelled with what had been checked.

The order is what makes a label mean something. The replicas are compared first, so nothing wrong is written; a file is read
back by a rank on another node, which compares it with its *own* weights, so nothing was damaged on the way; the label is
written last, under a name that appears only then. A checkpoint without a label is not one.

Whoever writes in a way of their own (sharded, asynchronously) takes the two ends of this apart: `stage` vetoes and remembers
the weights, `Staged.label` reads back what has become durable since and labels it with the step of the staging.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwitness._version import __version__
from bitwitness.errors import CheckpointError, ConfigurationError, RunFilesError
from bitwitness.guard import seams, snapshot
from bitwitness.guard.job import Job
from bitwitness.runfiles import RunFiles, utc_now
from bitwitness.runfiles.files import exists
from bitwitness.runfiles.label import (
    FileDigest,
    Label,
    digest_file,
    distrust,
    files_of,
    read_label,
    verify_files,
    write_label,
)
from bitwitness.runfiles.run import Incident, read_incident

logger = logging.getLogger("bitwitness")

ReadBack = Callable[[Path], Mapping[str, Tensor]]
"""Reads a foreign checkpoint: tensors by the names that the model's `state_dict()` gives them."""


@dataclass(frozen=True)
class Standing:
    """What is known of the weights at the moment of a save, the same on every rank.

    `step`: updates made. `passed`: by check, the last step at which it passed. `failed`: by check, why; only in shadow mode.
    `incidents`: those that were dealt with. `compared`: checks that have compared the ranks before. `supervision`: id of the
    supervised run.
    """

    step: int
    passed: Mapping[str, int]
    failed: Mapping[str, str]
    incidents: tuple[str, ...]
    compared: tuple[str, ...]
    supervision: str


@dataclass(frozen=True)
class Resumed:
    """Where to go on: the label of the checkpoint that was restored, and the newer ones that were refused, with the reason."""

    path: Path
    label: Label
    refused: tuple[tuple[str, str], ...]


class Keeper:
    """Saves and restores the checkpoints of a run, on all ranks together."""

    def __init__(self, job: Job, files: RunFiles, stateful: Mapping[str, Any]) -> None:
        self.job, self.files, self.stateful = job, files, dict(stateful)
        self._channel = job.channel
        self._store = files.checkpoints
        self.run = ""  # the id of the run, as run.json has it

    # Saving ----------------------------------------------------------------------------------------------------------

    def save(self, standing: Standing) -> Path:
        """Write, read back, publish, and remove what retention does not keep.

        Raises:
            CheckpointError: on every rank; nothing new is visible, what was there still is.
        """
        asked = self._patiently("checkpoint: begin", lambda: self._ask(standing.step))
        self._require_one("save", [what for _, what in asked])
        try:
            return self._save(standing, asked[0][0])
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Earlier checkpoints are as they were, and training can go on") from error

    def _save(self, standing: Standing, token: str) -> Path:
        staging = Path(self._patiently("checkpoint: stage", lambda: self._begin(standing.step, token))[0])
        try:
            written = self._patiently("checkpoint: write", lambda: self._write(staging, standing.step))
            files = {name: digest for digests, _ in written for name, digest in digests.items()}
            alike = self._alike(standing)
            self._patiently("checkpoint: read back", lambda: self._read_back(staging, files, written[0][1], alike))
            label = self._label(standing, written[0][1], files, self._readers())
            published = self._patiently("checkpoint: publish", lambda: self._publish(staging, label))
            if seams.probe is not None:
                seams.probe.published(Path(published[0]))
        except BaseException:
            if self.job.rank == 0:
                self._store.discard(staging)
            raise
        return Path(published[0])

    def _patiently(self, phase: str, compute: Callable[[], Any]) -> list[Any]:
        def reported() -> Any:
            try:
                return compute()
            except CheckpointError:
                raise
            except (RunFilesError, OSError) as error:
                raise CheckpointError(str(error)) from error

        return self._channel.patiently(phase, self.job.policy.checkpoint_timeout, reported)

    def _require_one(self, what: str, asked: Sequence[str]) -> None:
        """Raise ConfigurationError, on every rank, unless all are about to do the same."""
        for rank, one in enumerate(asked):
            if one != asked[0]:
                raise ConfigurationError(
                    f"the ranks do not {what} the same: {self._place(0)} {asked[0]}, {self._place(rank)} {one}. Give every rank the same "
                    "path, and make the calls in the same order"
                )

    def _ask(self, step: int) -> tuple[str, str]:
        """A token for this save, and what this rank is about to do."""
        if self.job.rank == 0 and not exists(self.files.path / "run.json"):
            raise CheckpointError(
                f"{self.files.path / 'run.json'} is gone: was the storage unmounted, or the directory removed? Nothing was written; training can go on"
            )
        return secrets.token_hex(4), f"step {step}"

    def _begin(self, step: int, token: str) -> str:
        if self.job.rank != 0:
            return ""
        self._store.discard_leftovers()
        return str(self._store.stage(step, token))

    def _write(self, staging: Path, step: int) -> tuple[dict[str, FileDigest], dict[str, str]]:
        """This rank's files, and on the first rank the fingerprints of what it wrote for all."""
        with seams.doing("save", step):
            written = self._write_files(staging)
        if seams.probe is not None:
            seams.probe.written(staging)
        return written

    def _write_files(self, staging: Path) -> tuple[dict[str, FileDigest], dict[str, str]]:
        rank = self.job.rank
        own = snapshot.rank_file(rank)
        digests = {own: snapshot.write(staging / own, snapshot.rank_state(self.job, self.stateful))}
        table: dict[str, str] = {}
        if rank == 0:
            shared = snapshot.shared_state(self.job)
            table = snapshot.fingerprints(shared, self.job.seed)
            digests[snapshot.SHARED] = snapshot.write(staging / snapshot.SHARED, shared)
        return digests, table

    def _read_back(self, folder: Path, files: Mapping[str, FileDigest], table: Mapping[str, str], alike: bool) -> None:
        """Read what others wrote, here; the weights are compared with those that this rank trains itself."""
        for writer in self._read_by(self.job.rank):
            name = snapshot.rank_file(writer)
            self._same_file(folder / name, files[name], writer)
        if self.job.rank == self._reader_of(0):
            self._same_file(folder / snapshot.SHARED, files[snapshot.SHARED], 0)
            self._same_tensors(
                folder / snapshot.SHARED, snapshot.read(folder / snapshot.SHARED, mapped=True), table, alike
            )

    def _same_file(self, path: Path, expected: FileDigest, writer: int) -> None:
        snapshot.forget_cached(path)
        found = digest_file(path)
        if found != expected:
            raise CheckpointError(
                f"{path} was written by {self._place(writer)} and reads differently on {self._place(self.job.rank)} "
                f"({found.bytes} of {expected.bytes} bytes, SHA-256 {found.sha256[:12]} instead of {expected.sha256[:12]}): the "
                "storage or the way to it damages data. The checkpoint was not published"
            )

    def _same_tensors(self, path: Path, content: Mapping[str, Any], table: Mapping[str, str], alike: bool) -> None:
        stored = snapshot.fingerprints(content, self.job.seed)
        own = snapshot.fingerprints(snapshot.shared_state(self.job), self.job.seed)
        for name in sorted({*table, *stored}):
            shared = alike and name not in self._buffers()
            if stored.get(name) != table.get(name) or (shared and own.get(name) != stored.get(name)):
                raise CheckpointError(
                    f"{name} in {path} is not what {self._place(self.job.rank)} trains, although the replicas had just agreed: it "
                    f"was changed in the memory of {self._place(0)} or on the way to the disk. The checkpoint was not published; "
                    "save again, and check the weights of that rank if it happens again"
                )

    def _publish(self, staging: Path, label: Label) -> str:
        if self.job.rank != 0:
            return ""
        path = self._store.publish(staging, label)
        try:
            incidents = [read_incident(one) for one in self.files.incidents()]
            self._store.prune(self.job.policy.keep_checkpoints, incidents)
        except (RunFilesError, OSError) as error:
            logger.warning("an old checkpoint could not be removed: %s", error)
        return str(path)

    # Around somebody else's writer -----------------------------------------------------------------------------------

    def stage(self, path: Path, standing: Standing, read_back: ReadBack | None) -> Staged:
        """Remember what is about to be written elsewhere, and of what may differ from rank to rank everybody's."""
        model = {"model": self.job.module.state_dict()}
        own = snapshot.fingerprints(model, self.job.seed)
        names = self._buffers() & own.keys() if self._alike(standing) else own.keys()

        def offer() -> tuple[str, dict[str, str]]:
            if self._store.path.resolve() in path.resolve().parents:
                raise ConfigurationError(
                    f"{path} is inside {self._store.path}, which holds the checkpoints of save_checkpoint() alone: choose another place"
                )
            return f"{path} at step {standing.step}", {name: own[name] for name in names}

        offered = self._channel.gather("checkpoint: stage", offer)
        self._require_one("stage", [what for what, _ in offered])
        held = [of_rank for _, of_rank in offered]
        right = {name: {of_rank.get(name) for of_rank in held} for name in names}
        return Staged(self, path, standing, own, right, read_back)

    def label_foreign(self, staged: Staged) -> Path:
        """Read back what has become durable, on two nodes, and label it."""
        what = f"{staged.path} of step {staged.standing.step}"
        # The writers of all ranks are done when the ranks have met, and not before: then the files can be listed.
        self._require_one("label", self._patiently("checkpoint: written", lambda: what))
        names = sorted(self._patiently("checkpoint: list", lambda: self._written_names(staged.path))[0])
        if not names:
            raise CheckpointError(f"{staged.path} holds no file: was it written, on storage that every node sees?")
        mine = names[self.job.rank :: self.job.topology.world_size]
        written = self._patiently("checkpoint: digest", lambda: _digests(staged.path, mine))
        files = {name: digest for digests in written for name, digest in digests.items()}
        self._patiently("checkpoint: read back", lambda: self._read_foreign(staged, names, files))
        label = self._label(staged.standing, staged.tensors, files, self._readers())
        done = self._patiently("checkpoint: label", lambda: self._write_label(staged.path, label))
        if seams.probe is not None:
            seams.probe.published(staged.path)
        return Path(done[0])

    def _written_names(self, path: Path) -> list[str]:
        if seams.probe is not None and path.exists():
            seams.probe.written(path)
        return self._foreign_names(path)

    def _foreign_names(self, path: Path) -> list[str]:
        return files_of(path) if self.job.rank == 0 and path.exists() else []

    def abandon(self, staged: Staged, error: Exception) -> None:
        """Tell the others, who are about to label it, that the writer failed here."""

        def fail() -> None:
            raise CheckpointError(
                f"{staged.path}: the writer raised {type(error).__name__}: {error}. It was not labelled"
            )

        with suppress(CheckpointError):
            self._patiently("checkpoint: written", fail)

    def _read_foreign(self, staged: Staged, names: Sequence[str], files: Mapping[str, FileDigest]) -> None:
        for writer in self._read_by(self.job.rank):
            for name in names[writer :: self.job.topology.world_size]:
                self._same_file(_member(staged.path, name), files[name], writer)
        if staged.read_back is not None and self.job.rank == self._reader_of(0):
            found = self._stored(staged.path, staged.read_back, staged.tensors)
            wrong = sorted(name for name in found if found[name] not in staged.accepted(name))
            if wrong or not found:
                raise CheckpointError(
                    f"{staged.path}, read back on {self._place(self.job.rank)}, does not hold the weights that were staged at step "
                    f"{staged.standing.step}: {', '.join(wrong[:3]) or 'it holds no tensors'}. It was not labelled"
                )

    def _stored(self, path: Path, read_back: ReadBack, known: Collection[str]) -> dict[str, str]:
        try:
            found = read_back(path)
            if not isinstance(found, Mapping):
                raise TypeError(f"it returned a {type(found).__name__} and not tensors by name")
            tensors = snapshot.fingerprints({"model": dict(found)}, self.job.seed)
        except Exception as error:
            raise CheckpointError(
                f"{path} could not be read back by read_back=: {type(error).__name__}: {error}. It was not labelled"
            ) from error
        unknown = sorted(name.removeprefix("model/") for name in tensors if name not in known)
        if unknown:
            hint = " (with a prefix of DDP's?)" if unknown[0].startswith("module.") else ""
            raise CheckpointError(
                f"{path}: read_back= returned {', '.join(unknown[:3])}{hint}, and the model has nothing of that name: name tensors as "
                "the module inside DDP does. It was not labelled"
            )
        return tensors

    def _write_label(self, path: Path, label: Label) -> str:
        return str(write_label(path, label)) if self.job.rank == 0 else ""

    # Resuming --------------------------------------------------------------------------------------------------------

    def resume(self) -> Resumed | None:
        """Restore the newest checkpoint that can be trusted; None where there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and none of them can be used; names each with the reason.
            ConfigurationError: the checkpoint is of another job: another number of ranks, another model.
        """
        plan = self._patiently("resume: list", self._plan)[0]
        refused: list[tuple[str, str]] = []
        for path, reason in plan:
            problem = reason or self._try(Path(path))
            if isinstance(problem, Label):
                self._warn_of_another_run(path, problem)
                return Resumed(Path(path), problem, tuple(refused))
            refused.append((Path(path).name, problem))
            if self.job.rank == 0:
                logger.warning("checkpoint %s is refused: %s", path, problem)
        if refused:
            listed = "; ".join(f"{name}: {problem}" for name, problem in refused[:8])
            raise CheckpointError(
                f"none of the {len(refused)} checkpoints in {self.files.path / 'checkpoints'} can be used ({listed}). Nothing was started. "
                f"Look at them with `bitwitness checkpoint verify {self.files.path}`; to start from the beginning on purpose, "
                "move that folder away"
            )
        return None

    def _warn_of_another_run(self, path: str, label: Label) -> None:
        saved = label.extra.get("run", "")
        if self.job.rank == 0 and saved and saved != self.run:
            logger.warning(
                "%s was saved by another run (%s) than the one in this directory (%s): incidents of that one are not known here",
                path,
                saved,
                self.run,
            )

    def _plan(self) -> list[tuple[str, str]]:
        """All checkpoints, newest first, with what forbids them before they are even read; as the first rank sees it."""
        if self.job.rank != 0:
            return []
        self._store.discard_leftovers()
        paths = self._store.list()
        incidents = [read_incident(one) for one in self.files.incidents()] if paths else []
        plan = []
        for path in paths:
            try:
                label = read_label(path)
                reason = "" if label.step == _step_of(path) else f"its label is that of step {label.step}"
                reason = reason or self._distrust(path, label, incidents)
            except RunFilesError as error:
                reason = str(error)
            plan.append((str(path), reason))
        return plan

    def _distrust(self, path: Path, label: Label, incidents: Sequence[Incident]) -> str:
        """Why an incident or its own label forbids a checkpoint. Nothing does in shadow mode: it observes, and changes nothing."""
        reason = distrust(label, incidents)
        if reason and self.job.policy.on_detection == "record":
            logger.warning("%s: %s. Not refused, because the policy is only to record", path, reason)
            return ""
        return reason

    def _try(self, path: Path) -> Label | str:
        """Verify this checkpoint on every rank and, if all find it whole, restore it: its label; else why not."""
        found: list[tuple[dict[str, Any], dict[str, Any], Label]] = []

        def verify() -> str:
            try:
                label = read_label(path)
                if label.world_size != self.job.topology.world_size:
                    raise ConfigurationError(
                        f"{path} was saved by {label.world_size} ranks, this job has {self.job.topology.world_size}: start it with "
                        "as many, because random states and data positions belong to ranks"
                    )
                names = [snapshot.rank_file(self.job.rank), *([snapshot.SHARED] if self._first_of_node() else [])]
                problems = verify_files(path, label, names)
                if problems:
                    return "; ".join(problems)
                shared, own = self._load(path, label)
                snapshot.check_fits(self.job, self.stateful, shared, own)
                found.append((shared, own, label))
            except RunFilesError as error:
                return str(error)
            return ""

        problems = self._patiently(f"resume: verify {path.name}", verify)
        for rank, problem in enumerate(problems):
            if problem:
                return f"{problem} [seen by {self._place(rank)}]"
        self._patiently("resume: restore", lambda: self._restore(path, *found[0]))
        return found[0][2]

    def _load(self, path: Path, label: Label) -> tuple[dict[str, Any], dict[str, Any]]:
        shared = snapshot.read(path / snapshot.SHARED, mapped=True)
        own = snapshot.read(path / snapshot.rank_file(self.job.rank))
        stored = snapshot.fingerprints(shared, label.seed)
        wrong = sorted(name for name in {*stored, *label.tensors} if stored.get(name) != label.tensors.get(name))
        if wrong:
            raise CheckpointError(f"{path / snapshot.SHARED}: {', '.join(wrong[:3])} is not what the label says")
        return shared, own

    def _restore(self, path: Path, shared: Mapping[str, Any], own: Mapping[str, Any], label: Label) -> None:
        snapshot.restore(self.job, self.stateful, shared, own)
        live = snapshot.fingerprints(snapshot.shared_state(self.job), label.seed)
        wrong = sorted(
            name
            for name in label.tensors
            if live.get(name) != label.tensors[name] and (self.job.rank == 0 or name not in self._buffers())
        )
        if wrong:
            raise CheckpointError(
                f"{path} was read whole, but {', '.join(wrong[:3])} did not arrive as saved: loading it changes it (another dtype?), "
                "or the memory of this device does"
            )

    # Who reads what --------------------------------------------------------------------------------------------------

    def _reader_of(self, writer: int) -> int:
        """The rank that reads back what a rank wrote: on another node where there is one."""
        reader = self.job.topology.witness_of(writer)
        return writer if reader is None else reader

    def _read_by(self, reader: int) -> list[int]:
        return [writer for writer in range(self.job.topology.world_size) if self._reader_of(writer) == reader]

    def _readers(self) -> str:
        topology, reader = self.job.topology, self._reader_of(0)
        if topology.node_of(reader) != topology.node_of(0):
            return f"each file by a rank on another node; the weights by rank {reader} on {topology.node_of(reader)}"
        return f"on the same node ({topology.node_of(0)}): there is no other"

    def _first_of_node(self) -> bool:
        topology, rank = self.job.topology, self.job.rank
        return all(topology.node_of(other) != topology.node_of(rank) for other in range(rank))

    def _alike(self, standing: Standing) -> bool:
        """Whether the replicas were compared, and agreed."""
        return self.job.topology.is_uniform and "replicas" not in standing.failed

    def _buffers(self) -> set[str]:
        """Names of the tensors that may differ from rank to rank."""
        return {f"model/{name}" for name, _ in self.job.module.named_buffers()}

    def _place(self, rank: int) -> str:
        return f"rank {rank} (node {self.job.topology.node_of(rank)})"

    def _label(
        self, standing: Standing, tensors: Mapping[str, str], files: Mapping[str, FileDigest], read_back: str
    ) -> Label:
        return Label(
            step=standing.step,
            saved=utc_now(),
            world_size=self.job.topology.world_size,
            placement=tuple(self.job.topology.to_json()),
            passed=dict(standing.passed),
            failed=dict(standing.failed),
            incidents=standing.incidents,
            seed=self.job.seed,
            tensors=dict(tensors),
            files=dict(files),
            software={"bitwitness": __version__, "torch": torch.__version__},
            read_back=read_back,
            supervision=standing.supervision,
            compared=standing.compared,
            extra={"run": self.run},
        )


@dataclass(frozen=True)
class Staged:
    """A checkpoint that somebody else writes: vetoed, and the weights remembered by their fingerprints."""

    _keeper: Keeper
    path: Path
    standing: Standing
    tensors: Mapping[str, str]
    of_ranks: Mapping[str, Collection[str]]
    read_back: ReadBack | None

    def accepted(self, name: str) -> Collection[str]:
        """The fingerprints that a tensor may have: this rank's own, and of a buffer anybody's."""
        return self.of_ranks.get(name, {self.tensors.get(name, "")})

    def label(self) -> Path:
        """Read the files back on another node and write their label; call it on every rank when they are durable.

        Returns the path of the label.

        Raises:
            CheckpointError: on every rank; a file reads differently on another node, or holds other weights. No label.
        """
        return self._keeper.label_foreign(self)

    def abandon(self, error: Exception) -> None:
        """Say on this rank, in place of `label`, that the writer failed; the others raise CheckpointError."""
        self._keeper.abandon(self, error)


def _member(path: Path, name: str) -> Path:
    return path / name if path.is_dir() else path


def _digests(path: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    return {name: digest_file(_member(path, name)) for name in names}


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
