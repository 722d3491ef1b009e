"""What rasdaemon has recorded of memory errors and machine checks: its SQLite file, or the counts that `ras-mc-ctl` prints.

Which tables there are depends on how rasdaemon was built, so a missing table is normal. Nothing is written beside the file,
nothing that it says of itself (a view, a function) is trusted, and no query runs for long.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

from bitwitness.fleet.signals import catalogue
from bitwitness.fleet.signals.catalogue import Entry
from bitwitness.fleet.signals.reading import Unreadable, bounded, document, whole, words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "rasdaemon"
FILES = (Path("/var/lib/rasdaemon/ras-mc_event.db"), Path("/usr/local/var/lib/rasdaemon/ras-mc_event.db"))
"""Where rasdaemon keeps it, as a rule."""

_MAGIC = b"SQLite format 3\x00"
_WAL = b"\x02\x02"
"""In the head of a database that has a write-ahead log."""
_JOURNALS = ("-wal", "-journal")
_LARGEST, _TRIES = 512 << 20, 5
"""Of a database that is copied: bytes, and how often that is tried while somebody writes to it."""
_ROWS = 5_000
"""Of one table that are read, the newest: what is older is counted."""
_STEPS = 20_000_000
"""Of SQLite's machine that one query may take."""
_COUNTS = re.compile(rb"^Label[ \t]+CE[ \t]+UE[ \t]*\r?$", re.MULTILINE)
_TIME = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d(?:\.\d{1,6})?)(?:\s*([+-]\d\d):?(\d\d))?")
_UNCORRECTED = 1 << 61
"""In the status of a machine check."""
_MEMORY_TYPES = {"corrected": "edac:ce", "uncorrected": "edac:ue", "fatal": "edac:ue"}
_UNCLEAR = Entry("no-evidence", "none", "an event of which the record does not say in a known word how bad it was")
_POISONED = Entry("memory", "medium", "the kernel took a page of the host's memory out of use after an error in it")


def looks_like(head: bytes, name: str) -> bool:
    """Whether a file begins like a SQLite database, or like the table that `ras-mc-ctl --error-count` prints."""
    return head.startswith(_MAGIC) or _COUNTS.search(head) is not None


def read(source: str | bytes | Path, *, origin: str, now: datetime) -> Iterator[Signal]:
    """The recorded errors. Never raises on what it reads.

    Args:
        source: the database (its path, or its bytes), or the text that `ras-mc-ctl --error-count` printed.
        origin: the file, for the records.
        now: not needed here; every reader is told it.
    """
    yield from bounded(_read(source, origin), SOURCE, origin)


def _read(source: str | bytes | Path, origin: str) -> Iterator[Signal]:
    try:
        if isinstance(source, Path):
            with source.open("rb") as file:
                head = file.read(len(_MAGIC))
        else:
            head = (
                source[: len(_MAGIC)].encode("utf-8", "replace") if isinstance(source, str) else source[: len(_MAGIC)]
            )
        if head != _MAGIC:
            yield from _of_counts(document(source), origin)
            return
        with ExitStack() as held:
            copied = isinstance(source, Path) and _is_journalled(source)
            if isinstance(source, Path) and copied:
                source = _copy(source, Path(held.enter_context(TemporaryDirectory(prefix="bitwitness-"))))
            yield from _of_database(held.enter_context(closing(_open(source, copied=copied))), origin)
    except (sqlite3.Error, OSError, Unreadable, ValueError) as error:
        # What was read up to here has been told; that there was more is told too.
        why = f"the records of rasdaemon cannot be read to their end: {words(str(error), 160)}"
        yield no_evidence(SOURCE, "rasdaemon:unreadable", why, origin=origin)


def _is_journalled(path: Path) -> bool:
    """Whether SQLite would write beside the database even to read it: a write-ahead log, or a journal that was left."""
    with path.open("rb") as file:
        versions = file.read(20)[18:]
    return versions == _WAL or any(_beside(path, suffix).exists() for suffix in _JOURNALS)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}{suffix}")


def _copy(path: Path, folder: Path) -> Path:
    """A copy with its journals, which can be read without writing beside the original, or the right to.

    Raises:
        Unreadable: it is too large, or it changes all the time.
    """
    for _ in range(_TRIES):
        files = [path, *(one for suffix in _JOURNALS if (one := _beside(path, suffix)).is_file())]
        before = [_state(one) for one in files]
        if sum(size for size, _ in before) > _LARGEST:
            raise Unreadable(f"it has a journal, and is larger than {_LARGEST >> 20} MiB, too large to be copied")
        for one in files:
            shutil.copyfile(one, folder / one.name)
        if [_state(one) for one in files] == before:
            return folder / path.name
        for one in files:
            (folder / one.name).unlink()
    raise Unreadable("it was written to whenever it was read")


def _state(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns


def _open(source: str | bytes | Path, *, copied: bool) -> sqlite3.Connection:
    if isinstance(source, Path):
        # A copy of ours may be written to, to bring its journal to an end; nothing that was read can ask for that.
        mode = "rw" if copied else "ro"
        database = sqlite3.connect(f"file:{quote(str(source.absolute()))}?mode={mode}", uri=True, timeout=2)
    else:
        database = sqlite3.connect(":memory:")
        database.deserialize(source if isinstance(source, bytes) else source.encode("utf-8", "surrogateescape"))
    database.text_factory = lambda text: text.decode("utf-8", errors="replace")
    steps = 0

    def tick() -> int:
        nonlocal steps
        steps += 1
        return int(steps * 10_000 > _STEPS)

    database.set_progress_handler(tick, 10_000)
    for setting in ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON"):
        database.execute(f"PRAGMA {setting}")
    return database


Row = Mapping[str, Any]


def _of_database(database: sqlite3.Connection, origin: str) -> Iterator[Signal]:
    # Pages that were lost or overwritten can leave a table that reads well and has fewer rows than it had.
    problems = [row[0] for row in database.execute("PRAGMA quick_check(1)")]
    if problems != ["ok"]:
        why = f"the database is damaged, so it may have had more than is read here: {words(str(problems), 160)}"
        yield no_evidence(SOURCE, "rasdaemon:unreadable", why, origin=origin)
    tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table' LIMIT 1000")}
    known = [name for name in _TABLES if name in tables]
    if not known:
        why = (
            "the database has none of the tables of rasdaemon that are known, so it tells of no error and of no health"
        )
        yield no_evidence(SOURCE, "rasdaemon:not-collected", why, origin=origin)
    for name in known:
        try:
            yield from _of_table(database, name, origin)
        except sqlite3.Error as error:
            why = f"the table {name} cannot be read to its end: {words(str(error), 160)}"
            yield no_evidence(SOURCE, "rasdaemon:unreadable", why, origin=origin)


def _of_table(database: sqlite3.Connection, name: str, origin: str) -> Iterator[Signal]:
    # The name is one of ours, from _TABLES: nothing that was read gets into a query.
    cursor = database.execute(f"SELECT * FROM {name} ORDER BY rowid DESC LIMIT {_ROWS + 1}")  # noqa: S608
    columns = [column[0] for column in cursor.description]
    for count, values in enumerate(cursor):
        if count == _ROWS:
            why = f"the table {name} has more than {_ROWS} rows; only the newest were read"
            yield no_evidence(SOURCE, "rasdaemon:more", why, origin=origin)
            return
        row = dict(zip(columns, values, strict=True))
        code, entry, device, evidence = _TABLES[name](row)
        times = whole(row.get("err_count")) or 1
        time = _time(row.get("timestamp"))
        why = entry.reason + ("" if time else ". When, the record does not say")
        yield Signal(
            SOURCE, code, device, time, entry.kind, entry.weight, why, count=times, evidence=evidence, origin=origin
        )


def _memory(row: Row) -> tuple[str, Entry, str, str]:
    """An error that EDAC saw."""
    where = [
        f"{name}={row[name]}" for name in ("mc", "top_layer", "middle_layer", "lower_layer", "address") if name in row
    ]
    label = words(row.get("label") or "", 120)
    evidence = words(
        f"{row.get('err_count')} {row.get('err_type')}: {row.get('err_msg')} at {label} ({', '.join(where)})"
    )
    said = str(row.get("err_type", "")).strip().lower()
    if said == "deferred":
        return "edac:deferred", catalogue.entry("mce:deferred"), label, evidence
    code = _MEMORY_TYPES.get(said)
    if code is None:
        return "rasdaemon:unreadable", _UNCLEAR, label, evidence
    return code, catalogue.entry(code), label, evidence


def _machine_check(row: Row) -> tuple[str, Entry, str, str]:
    """The status is 64 bits that SQLite keeps as a signed number."""
    status = row.get("status")
    told = " ".join(
        str(row[name]) for name in ("bank_name", "error_msg", "mcistatus_msg", "mcastatus_msg") if row.get(name)
    )
    at = f"cpu {row.get('cpu')}, bank {row.get('bank')}"
    evidence = words(f"{at}: {told}" + (f", status {status & (1 << 64) - 1:#x}" if isinstance(status, int) else ""))
    if not isinstance(status, int):
        return "rasdaemon:unreadable", _UNCLEAR, "", evidence
    if not status & _UNCORRECTED and "deferred" in told.lower():
        return "mce:deferred", catalogue.entry("mce:deferred"), "", evidence
    code = "mce:uncorrected" if status & _UNCORRECTED else "mce:corrected"
    return code, catalogue.entry(code), "", evidence


def _poisoned(row: Row) -> tuple[str, Entry, str, str]:
    evidence = words(f"pfn {row.get('pfn')}, {row.get('page_type')}: {row.get('action_result')}")
    return "rasdaemon:memory-failure", _POISONED, "", evidence


def _bus(row: Row) -> tuple[str, Entry, str, str]:
    """PCI Express: what was corrected was sent again; what was not is loud."""
    told = str(row.get("err_type", ""))
    device = catalogue.pci_address(str(row.get("dev_name", "")))
    evidence = words(f"{told}: {row.get('err_msg')} at {row.get('dev_name')}")
    if told.strip().lower().startswith("corrected"):
        return (
            "aer:corrected",
            Entry("link", "none", "PCI Express found a damaged packet and sent it again"),
            device,
            evidence,
        )
    why = (
        "an error of PCI Express that was not corrected: a fault that does not go unnoticed, on the way to this device"
    )
    return "aer:uncorrected", Entry("loud", "none", why), device, evidence


_TABLES: Mapping[str, Callable[[Row], tuple[str, Entry, str, str]]] = {
    "mc_event": _memory,
    "mce_record": _machine_check,
    "memory_failure_event": _poisoned,
    "aer_event": _bus,
}


def _time(value: object) -> str | None:
    """rasdaemon writes local time with its offset; older ones, in a form that does not tell it, are taken for UTC."""
    found = _TIME.match(value) if isinstance(value, str) else None
    if found is None:
        return None
    zone = f"{found[3]}:{found[4]}" if found[3] else "+00:00"
    try:
        return iso(datetime.fromisoformat(f"{found[1]}T{found[2]}{zone}").astimezone(UTC))
    except (ValueError, OverflowError):
        return None


def _of_counts(text: str, origin: str) -> Iterator[Signal]:
    """`ras-mc-ctl --error-count`: one line a memory module, of errors since the counters were reset."""
    header, bad, read = False, 0, 0
    for line in text.splitlines():
        if _COUNTS.fullmatch(line[:100].encode("utf-8", "replace")):
            header = True
        elif header and line.strip():
            parts = line.rsplit(None, 2)
            counts = [whole(part) for part in parts[1:]]
            if len(counts) != 2 or None in counts:
                bad += 1
                continue
            read += 1
            for kind, count in zip(("ce", "ue"), counts, strict=True):
                if count:
                    entry = catalogue.entry(f"edac:{kind}")
                    why = f"{entry.reason}. Counted since the counters were reset, at times that they do not say"
                    label, told = words(parts[0], 120), words(line)
                    yield Signal(
                        SOURCE, f"edac:{kind}", label, None, entry.kind, entry.weight, why, "", count, told, origin
                    )
    if bad or not read:
        why = f"{bad} lines of the counts cannot be read" if bad else "there are no counts of memory modules in it"
        yield no_evidence(SOURCE, "rasdaemon:unreadable", why, origin=origin)
