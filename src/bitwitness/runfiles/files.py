"""Writing and reading one file so that a `kill -9` at any instant leaves it whole or absent.

Everything in a run directory that is not a journal is written by these few functions: under a temporary name beside its
final one, flushed to the disk, renamed. What they rely on is said in docs/files.md: a rename within a folder is atomic, and
`fsync` returns when the bytes are on the disk.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bitwitness.errors import RunFilesError

logger = logging.getLogger(__name__)

SCHEMA = 1
TEMPORARY = ".tmp"
_LARGEST = 256 << 20
"""Bytes of a JSON file that is read; an incident on 10,000 ranks is a few MiB."""

_DEEPEST = 50  # a record that contains itself ends here


def utc_now() -> str:
    """The time as ISO 8601 in UTC, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of our schema.

    Raises:
        RunFilesError: absent, damaged, or of another schema; the message says which and what to do.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise RunFilesError(f"{path} is not a regular file: it was not written by bitwitness")
        if path.exists() and path.stat().st_size > _LARGEST:
            raise RunFilesError(f"{path} is larger than {_LARGEST >> 20} MiB: it was not written by bitwitness")
        record = json.loads(_content(path), parse_constant=_no_such_number)
    except FileNotFoundError as error:
        raise RunFilesError(f"{path} does not exist: is {path.parent} the right directory?") from error
    except OSError as error:
        raise RunFilesError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        damaged = f"{path} is not JSON ({error}): it was not written by bitwitness, or was damaged"
        raise RunFilesError(damaged) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        found = record.get("schema") if isinstance(record, dict) else None
        raise RunFilesError(f"{path} has schema {found!r}, this version reads {SCHEMA}: use the version that wrote it")
    return record


def _content(path: Path) -> bytes:
    """All of a file that another node may be replacing: NFS then says of the one just opened that it is stale."""
    for _ in range(10):
        try:
            return path.read_bytes()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return path.read_bytes()


def _no_such_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def write_json(path: Path, record: Mapping[str, Any], *, mode: int | None = None) -> None:
    """Write a JSON object so that a kill at any instant leaves the old file or the new one, and flush it to the disk."""
    write_bytes(
        path, (dump({"schema": SCHEMA} | dict(record) | {"schema": SCHEMA}, indent=2) + "\n").encode(), mode=mode
    )


def dump(record: Mapping[str, Any], indent: int | None = None) -> str:
    """JSON of whatever is in a record: a guard that has found something must not fail at writing it down."""
    separators = (",", ":") if indent is None else None
    try:
        return json.dumps(record, allow_nan=False, indent=indent, separators=separators)
    except (TypeError, ValueError, RecursionError):
        return json.dumps(_plain(record), allow_nan=False, indent=indent, separators=separators)


def _plain(value: Any, depth: int = 0) -> Any:
    """The JSON value nearest to any value: non-finite numbers, which JSON lacks, become "nan", "inf" and "-inf"."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    return str(value)


def write_bytes(path: Path, content: bytes, *, mode: int | None = None) -> None:
    """Write a whole file under a temporary name beside it, flush it, and rename it into place; with a mode, whatever the umask."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    with Reported(path, "written"):
        try:
            with temporary.open("xb") as file:
                if mode is not None:
                    os.fchmod(file.fileno(), mode)
                else:
                    belong_to(file.fileno(), path.parent)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def open_plain(path: Path, *, append: bool = False) -> int:
    """Open a plain file for reading and writing, made where there is none; its descriptor.

    Never through a link: a run belongs to whoever trains, and a controller with more rights must not be led to other files by
    what lies there. A file that is new belongs to the owner of the folder.

    Raises:
        OSError: it cannot be opened, is a link, or is reached by another name as well.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_APPEND if append else 0)
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        descriptor = os.open(path, flags)
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode) or seen.st_nlink != 1:
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no plain file, or has a second name", str(path)) from None
        return descriptor
    belong_to(descriptor, path.parent)
    return descriptor


def belong_to(descriptor: int, folder: Path) -> None:
    """Give a file that this process has just made to whoever owns the folder: what a controller writes into somebody's run, the
    run must read and go on with. One's own files are as the umask makes them.
    """
    owner = folder.stat()
    if owner.st_uid != os.geteuid():
        os.fchmod(descriptor, owner.st_mode & 0o666)
        with suppress(PermissionError):  # only root gives files away
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


def sync_file(path: Path) -> None:
    """Return when what was written to a file, by whomever, is on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make a rename within a folder durable; some network file systems refuse, and then do it by themselves."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        logger.debug("%s: fsync of a folder refused: %s", folder, error)
    finally:
        os.close(descriptor)


def refresh_folder(folder: Path) -> None:
    """Have what other nodes have just created in a folder be seen.

    NFS remembers for up to a minute that a name was absent, and asks the server anew when the folder is opened.
    """
    try:
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        logger.debug("%s: %s", folder, error)


def exists(path: Path) -> bool:
    """Whether there is something of that name, a broken link included, whatever this node may remember."""
    if not os.path.lexists(path):
        refresh_folder(path.parent)
    return os.path.lexists(path)


class Reported:
    """Turn an OSError into one that names the file and what was being done."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise RunFilesError(f"{self._path} could not be {self._what}: {reason}") from error
