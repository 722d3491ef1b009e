"""The checkpoints of a run: each a folder that is whole, with its label, or cannot be seen.

A restart takes the newest folder it finds here, on another node, minutes after somebody's `kill -9`. So a checkpoint is
filled under a hidden name and renamed when it is on the disk; one that goes is renamed before its first file is removed.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import secrets
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from bitwitness.errors import CheckpointError, RunFilesError
from bitwitness.runfiles.files import TEMPORARY, Reported, exists, sync_file, sync_folder
from bitwitness.runfiles.label import Label, distrust, read_label, write_label

if TYPE_CHECKING:
    from bitwitness.runfiles.run import Incident

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-([0-9]{8,})")
_STAGING = ".staging-"
_REMOVED = ".removed-"
_REPLACED = ".replaced-"
_HIDDEN = re.compile(r"\.replaced-(.+)-[0-9a-f]{8}")
_TOKEN = re.compile(r"[0-9a-f]{8}")


def checkpoint_name(step: int) -> str:
    """`step-00000100`: the folder of the checkpoint from which training goes on with step 100."""
    if step < 0:
        raise ValueError(f"a checkpoint has a step from 0 on, got {step}")
    return f"step-{step:08d}"


def checkpoint_step(path: Path) -> int | None:
    """The step that the name of a folder stands for; None where it is no name of a checkpoint."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match and checkpoint_name(int(match[1])) == path.name else None


class Checkpoints:
    """The folder that holds the checkpoints of a run. One process writes and removes; any number read."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder).absolute()

    def list(self) -> list[Path]:
        """The checkpoints, newest (highest step) first; told by their names alone, labels are not read."""
        with _named(self.path, "read"):
            entries = list(self.path.iterdir()) if exists(self.path) else []
            found = [(step, path) for path in entries if (step := checkpoint_step(path)) is not None and path.is_dir()]
        return [path for _, path in sorted(found, reverse=True)]

    def stage(self, step: int, token: str) -> Path:
        """Make the hidden folder that a checkpoint is written into; the same one for every rank with the same token."""
        if not _TOKEN.fullmatch(token):
            raise ValueError(f"a token is 8 hexadecimal digits, got {token!r}")
        staging = self.path / f"{_STAGING}{checkpoint_name(step)}-{token}"
        with _named(staging, "made"):
            staging.mkdir(parents=True, exist_ok=True)
        return staging

    def publish(self, staging: Path, label: Label) -> Path:
        """Write the label into a staged checkpoint and give it its final name, durably; its final path.

        Whatever has that name already, a damaged or a distrusted checkpoint, makes way and is removed.

        Raises:
            CheckpointError: a file that the label lists is not there in its full size, or the disk refuses. Nothing is published
                then, and what had the name before still has it.
        """
        final = self.path / checkpoint_name(label.step)
        if not staging.name.startswith(f"{_STAGING}{final.name}-"):
            raise CheckpointError(f"{staging} is not where a checkpoint of step {label.step} is staged")
        _require(staging, label)
        write_label(staging, label)
        with _named(final, "published"):
            _sync_tree(staging)
            old = self._put_aside(final, _REPLACED) if exists(final) else None
            try:
                staging.rename(final)
            except OSError:
                if old is not None:
                    old.rename(final)
                raise
            sync_folder(self.path)
        if old is not None:
            _erase(old)
        return final

    def discard(self, staging: Path) -> None:
        """Remove a staged checkpoint that will not be published. Never raises: there is a worse error on its way."""
        if staging.name.startswith(_STAGING):
            _erase(staging)

    def discard_leftovers(self) -> None:
        """Remove what writers that died have left half-done; call when nobody is writing.

        A checkpoint that had made way for another, which did not come, gets its name back.
        """
        for path in self.path.glob(f"{_REPLACED}*"):
            match = _HIDDEN.fullmatch(path.name)
            if match and not exists(self.path / match[1]):
                with _named(path, "given its name back"):
                    path.rename(self.path / match[1])
        for pattern in (f"{_STAGING}*", f"{_REMOVED}*", f"{_REPLACED}*", f".*{TEMPORARY}"):
            for path in self.path.glob(pattern):
                _erase(path)

    def remove(self, path: Path) -> None:
        """Remove a checkpoint: it is gone at once, and its files after that. Of a link, only the link.

        Raises:
            CheckpointError: it is not one of these, or the disk refuses; it is still whole then.
        """
        if path.parent.absolute() != self.path or checkpoint_step(path) is None:
            raise CheckpointError(f"{path} is no checkpoint in {self.path}: not removed")
        with _named(path, "removed"):
            aside = self._put_aside(path, _REMOVED)
            sync_folder(self.path)
        _erase(aside)

    def prune(self, newest: int, incidents: Sequence[Incident] = ()) -> builtins.list[Path]:
        """Remove what retention does not keep (see `retained`); what was removed.

        The newest checkpoint that was audited at its very last step stays. Those that `incidents` or their own labels forbid do
        not count among the newest: they are thinned out by themselves, and go once a trusted one is as far. What cannot be read
        is left alone: a person may want it. A removal that the disk refuses is a warning; the next call tries again.
        """
        trusted: dict[int, Path] = {}
        forbidden: dict[int, Path] = {}
        audited: set[int] = set()
        for path in self.list():
            try:
                label = read_label(path)
            except CheckpointError as error:
                logger.warning("%s; it is kept, and not counted", error)
                continue
            step = checkpoint_step(path)
            assert step is not None
            (forbidden if distrust(label, incidents) else trusted)[step] = path
            if step in trusted and label.passed.get("replay") == label.step - 1:
                audited.add(step)
        kept = retained(list(trusted), newest, {max(audited)} if audited else ())
        far = max(trusted, default=-1)
        kept |= {step for step in retained(list(forbidden), newest) if step > far}
        return [path for step, path in sorted((trusted | forbidden).items()) if step not in kept and self._try(path)]

    def _try(self, path: Path) -> bool:
        try:
            self.remove(path)
        except CheckpointError as error:
            logger.warning("%s", error)
            return False
        return True

    def _put_aside(self, path: Path, prefix: str) -> Path:
        return path.rename(self.path / f"{prefix}{path.name}-{secrets.token_hex(4)}")


def retained(steps: Sequence[int], newest: int, protected: Collection[int] = ()) -> set[int]:
    """Which checkpoints to keep: the newest few, of the older ones ever fewer, and the protected ones.

    Ages are counted from the newest, in units of the smallest gap between two. Of the ages from 2^i up to 2^(i+1) the oldest
    stays, so that it is there when it grows into the next range. As many stay as the logarithm of the oldest age, whatever
    the number of saves, and keeping once more what was kept removes nothing.
    """
    if newest < 1:
        raise ValueError(f"at least the newest checkpoint is kept, got newest={newest}")
    ordered = sorted(set(steps), reverse=True)
    kept = set(ordered[:newest]) | (set(protected) & set(ordered))
    if len(ordered) > 1:
        unit = min(later - earlier for later, earlier in pairwise(ordered))
        # Later ones of a range overwrite earlier ones: the oldest of each is left.
        kept |= set({((ordered[0] - step) // unit).bit_length(): step for step in ordered[1:]}.values())
    return kept


def _require(staging: Path, label: Label) -> None:
    """Every file that the label lists must lie there in its full size: what is published must not be half."""
    if not label.files:
        raise CheckpointError(f"{staging} cannot be published: its label lists no files")
    for name, digest in label.files.items():
        file = staging / name
        with _named(file, "read before publishing"), file.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size  # of an open file: on NFS, fresh
        if size != digest.bytes:
            raise CheckpointError(f"{file} has {size} bytes instead of {digest.bytes}: the checkpoint is not published")


def _sync_tree(folder: Path) -> None:
    for where, _, files in os.walk(folder, topdown=False):
        for name in files:
            if (Path(where) / name).is_file():
                sync_file(Path(where) / name)
        sync_folder(Path(where))


def _erase(path: Path) -> None:
    """Remove what no reader can see any more; what cannot be removed now stays for `discard_leftovers`."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


@contextmanager
def _named(path: Path, what: str) -> Iterator[None]:
    """Turn an OSError into a CheckpointError that names the path and what was being done."""
    try:
        with Reported(path, what):
            yield
    except CheckpointError:
        raise
    except RunFilesError as error:
        raise CheckpointError(str(error)) from error
