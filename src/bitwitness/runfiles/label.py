"""The label of a checkpoint: what had been verified when it was saved, and the digest of every file.

A checkpoint outlives the job that knew whether to trust it. The label lies inside it (`label.json`), or beside it where it is
a single file of somebody else's (`<name>.label.json`), and says what had passed up to which step: never that it is clean. A
box without torch can tell from it whether the bytes are still those that were saved, and whether an incident found since
forbids it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from bitwitness.errors import CheckpointError, RunFilesError
from bitwitness.runfiles.files import SCHEMA, TEMPORARY, Reported, dump, exists, read_json, write_json

if TYPE_CHECKING:
    from bitwitness.runfiles.run import Incident

logger = logging.getLogger(__name__)

LABEL = "label.json"
_CHECKSUM = "checksum"
_BESIDE = f".{LABEL}"


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What a file held: its size in bytes and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Label:
    """What is known of a checkpoint.

    Attributes:
        step: updates made; training goes on with this step index.
        saved: when, UTC in ISO 8601.
        world_size: ranks of the job.
        placement: `Topology.to_json()`, where each rank was.
        passed: check -> last step at which it had passed.
        failed: check -> what it had found; only in shadow mode. Such a checkpoint is not a verified one.
        incidents: ids of the incidents that were known and dealt with when it was saved.
        seed: of the tensors' fingerprints.
        tensors: name -> dtype, shape and fingerprint as text.
        files: path relative to the checkpoint, with forward slashes -> size and digest.
        software: bitwitness, torch and what else matters, by version.
        read_back: by whom the files were read back before they were published, or why they were not.
        supervision: id of the supervised run, or empty.
        compared: checks that had compared ranks with one another before.
        extra: anything else.
    """

    step: int
    saved: str
    world_size: int
    placement: Sequence[Mapping[str, Any]]
    passed: Mapping[str, int]
    failed: Mapping[str, str]
    incidents: tuple[str, ...]
    seed: int
    tensors: Mapping[str, str]
    files: Mapping[str, FileDigest]
    software: Mapping[str, str]
    read_back: str
    supervision: str = ""
    compared: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A dictionary of JSON values, every field present."""
        files = {name: {"bytes": one.bytes, "sha256": one.sha256} for name, one in self.files.items()}
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"files": files}

    @classmethod
    def from_json(cls, record: Mapping[str, Any], where: str | os.PathLike[str] = "the label") -> Label:
        """The inverse of `to_json`; unknown keys are ignored, so that older readers accept newer labels.

        Raises:
            CheckpointError: a field is missing, or is not of its type; names `where` and the field.
        """
        known = {}
        for name, convert in _FIELDS.items():
            if name not in record:
                raise CheckpointError(
                    f"{os.fspath(where)} is no label of a checkpoint, or is damaged: no {name!r} in it"
                )
            try:
                known[name] = convert(record[name])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(f"{os.fspath(where)} is damaged: {name!r} is {error}") from error
        return cls(**known)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"no count: {value!r:.80}")
    return value


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"no integer: {value!r:.80}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"no text: {value!r:.80}")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"no object: {value!r:.80}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"no list: {value!r:.80}")
    return tuple(_text(one) for one in value)


def _named_texts(value: Any) -> dict[str, str]:
    return {name: _text(one) for name, one in _mapping(value).items()}


def _steps(value: Any) -> dict[str, int]:
    return {name: _integer(one) for name, one in _mapping(value).items()}


def _places(value: Any) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"no list: {value!r:.80}")
    return tuple(_mapping(one) for one in value)


def _digests(value: Any) -> dict[str, FileDigest]:
    found = {}
    for name, digest in _mapping(value).items():
        parts = PurePosixPath(name).parts
        if not parts or parts[0] == "/" or ".." in parts or "\0" in name:
            raise ValueError(f"no list of files of this checkpoint: {name!r:.80}")
        one = _mapping(digest)
        if "bytes" not in one or "sha256" not in one:
            raise ValueError(f"without size or digest for {name!r:.80}")
        found[name] = FileDigest(_count(one["bytes"]), _text(one["sha256"]))
    return found


_FIELDS: dict[str, Callable[[Any], Any]] = {
    "step": _count,
    "saved": _text,
    "world_size": _count,
    "placement": _places,
    "passed": _steps,
    "failed": _named_texts,
    "incidents": _texts,
    "seed": _integer,
    "tensors": _named_texts,
    "files": _digests,
    "software": _named_texts,
    "read_back": _text,
    "supervision": _text,
    "compared": _texts,
    "extra": _mapping,
}


# Where it lies -------------------------------------------------------------------------------------------------------


def label_path(path: Path) -> Path:
    """Where the label of a checkpoint lies: inside a folder, beside a file; a label is its own."""
    if path.is_dir():
        return path / LABEL
    return path if _is_label(path) else path.with_name(path.name + _BESIDE)


def labelled(path: Path) -> Path:
    """The checkpoint that a label speaks of; any other path is a checkpoint itself."""
    if path.is_dir() or not _is_label(path):
        return path
    return path.parent if path.name == LABEL else path.with_name(path.name.removesuffix(_BESIDE))


def _is_label(path: Path) -> bool:
    return path.name == LABEL or path.name.endswith(_BESIDE)


def read_label(path: str | os.PathLike[str]) -> Label:
    """Read the label of a checkpoint: of a folder, of a file, or the label itself.

    Raises:
        CheckpointError: there is none, or it is damaged, foreign or of another schema; names it.
    """
    where = label_path(Path(path))
    if not exists(where):
        missing = labelled(Path(path))
        if not missing.exists():
            raise CheckpointError(f"{missing} does not exist")
        raise CheckpointError(
            f"{missing} has no label ({where.name}): it was not saved under a guard, or not to the end; do not resume from it"
        )
    try:
        record = read_json(where)
    except RunFilesError as error:
        raise CheckpointError(str(error)) from error
    return label_of(record, where)


def label_of(record: Mapping[str, Any], where: str | os.PathLike[str]) -> Label:
    """The label in the content of its file; `where` names that in errors.

    Raises:
        CheckpointError: it is damaged or foreign; names it.
    """
    label = Label.from_json(record, where)
    if record.get(_CHECKSUM, _checksum(record)) != _checksum(record):
        raise CheckpointError(f"{os.fspath(where)} is damaged: its content is not what its own checksum says")
    return label


def _checksum(record: Mapping[str, Any]) -> str:
    """Of everything else in a label: a bit that flips in a number would leave a label that reads well."""
    rest = {name: value for name, value in record.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_label(path: str | os.PathLike[str], label: Label) -> Path:
    """Write the label of a checkpoint, durably: `label.json` in a folder, `<name>.label.json` beside a file; its path.

    Raises:
        CheckpointError: the checkpoint is not there, a file of that name that is no label of ours is in the way, or the disk
            refuses.
    """
    where = label_path(Path(path))
    if not labelled(Path(path)).exists():
        raise CheckpointError(f"{labelled(Path(path))} does not exist, so it gets no label: was it written elsewhere?")
    if exists(where):
        try:
            read_label(where)
        except CheckpointError as error:
            raise CheckpointError(
                f"{where} is in the way, and no label of ours ({error}): move it, or save elsewhere"
            ) from error
    try:
        record = json.loads(dump({"schema": SCHEMA, **label.to_json()}))
        write_json(where, record | {_CHECKSUM: _checksum(record)})
    except RunFilesError as error:
        raise CheckpointError(str(error)) from error
    return where


# What the files hold -------------------------------------------------------------------------------------------------


def digest_file(path: str | os.PathLike[str]) -> FileDigest:
    """Size and SHA-256 of a file, read in pieces.

    Raises:
        CheckpointError: it is not there, is no regular file, or cannot be read; names it.
    """
    path = Path(path)
    try:
        with Reported(path, "read"):
            if not stat.S_ISREG(path.stat().st_mode):
                raise CheckpointError(f"{path} is not a regular file: it cannot be part of a checkpoint")
            with path.open("rb", buffering=0) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                return FileDigest(file.tell(), digest)
    except CheckpointError:
        raise
    except RunFilesError as error:
        raise CheckpointError(str(error)) from error


def digest_files(path: str | os.PathLike[str]) -> dict[str, FileDigest]:
    """Digests of all files of a checkpoint, by path relative to it; of a file, of that one by its name.

    Links to files count by what they lead to; links to folders are not followed, and a warning says so. Labels, unfinished
    files of ours and what NFS keeps of open files (`.nfs...`) are no part of a checkpoint. Other hidden files are: torch's
    distributed checkpoints keep their index in `.metadata`.

    Raises:
        CheckpointError: one cannot be read, or leads nowhere; names it.
    """
    path = Path(path)
    return {name: digest_file(path / name if path.is_dir() else path) for name in files_of(path)}


def files_of(path: Path) -> list[str]:
    """The files that `digest_files` digests, by path relative to the checkpoint; of a file, its name.

    Raises:
        CheckpointError: a folder cannot be read; names it.
    """
    return [file.relative_to(path).as_posix() for file in _inside(path)] if path.is_dir() else [path.name]


def _inside(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror or error}") from error

    for where, folders, files in os.walk(folder, onerror=refuse):
        folders.sort()
        for name in [name for name in folders if (Path(where) / name).is_symlink()]:
            logger.warning("%s is a link to a folder: what is in it gets no digest", Path(where) / name)
        for name in sorted(files):
            file = Path(where) / name
            of_sibling = name.endswith(_BESIDE) and file.with_name(name.removesuffix(_BESIDE)).exists()
            unfinished = name.startswith(".") and (name.endswith(TEMPORARY) or name.startswith(".nfs"))
            special = file.exists() and not file.is_file()
            if not (file == folder / LABEL or of_sibling or unfinished or special):
                yield file


def verify_files(path: Path, label: Label, names: Collection[str] | None = None) -> list[str]:
    """What is wrong with the files of a checkpoint, in words; empty if each is what the label says.

    Files that the label does not mention are no problem. `names`: only these, as the label calls them.
    """
    if not label.files:
        return ["its label lists no files, so nothing can be verified"]
    if not path.is_dir():
        if len(label.files) > 1:
            return [f"its label lists {len(label.files)} files, and this is not a folder"]
        return _compare(path, path.name, next(iter(label.files.values())))
    problems = [f"{name} is not in its label" for name in sorted(set(names or ()) - label.files.keys())]
    for name, digest in sorted(label.files.items()):
        if names is None or name in names:
            problems += _compare(path / name, name, digest)
    return problems


def _compare(file: Path, name: str, expected: FileDigest) -> list[str]:
    try:
        if not exists(file):
            return [f"{name} is missing"]
        size = file.stat().st_size
        if not file.is_file():
            return [f"{name} is not a regular file"]
    except OSError as error:
        return [f"{name} cannot be read: {error.strerror or error}"]
    if size < expected.bytes:
        return [f"{name} is truncated: {size} of {expected.bytes} bytes"]
    if size > expected.bytes:
        return [f"{name} is too long: {size} bytes instead of {expected.bytes}"]
    try:
        found = digest_file(file)
    except CheckpointError as error:
        cause = error.__cause__.__cause__ if error.__cause__ is not None else None
        return [f"{name} cannot be read: {getattr(cause, 'strerror', None) or error}"]
    if found != expected:
        return [f"{name} differs: its SHA-256 is {found.sha256[:16]}..., its label says {expected.sha256[:16]}..."]
    return []


# Whether to trust it -------------------------------------------------------------------------------------------------


def distrust(label: Label, incidents: Sequence[Incident]) -> str:
    """Why a checkpoint must not be resumed from, in a sentence; empty if nothing speaks against it.

    A checkpoint of step S holds the updates 0..S-1. An incident that was not known when it was saved forbids it unless all of
    them lie at or before the first step of the suspect window, the last at which the check had passed.
    """
    if label.failed:
        check, reason = next(iter(label.failed.items()))
        return f"it is not a verified one: {check} had failed when it was saved ({reason})"
    for incident in incidents:
        last, step = incident.verdict.window
        if incident.path.name not in label.incidents and label.step > last + 1:
            since = f"after step {last}" if last >= 0 else "at some step from the first on"
            return (
                f"incident {incident.path.name} ({incident.verdict.check}): what went wrong did so {since} and up to step "
                f"{step}, and this checkpoint holds the updates up to step {label.step - 1}"
            )
    return ""
