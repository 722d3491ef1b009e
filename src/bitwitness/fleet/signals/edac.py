"""Errors of the host's memory, as the kernel's EDAC drivers count them under `/sys`.

The counters run since they were reset, as a rule since boot, and have no times of single errors: the kernel log and
rasdaemon have those. Where machine checks are handled elsewhere, EDAC never sees an uncorrected error: zeros are no health.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bitwitness.fleet.signals import catalogue
from bitwitness.fleet.signals.reading import bounded, words
from bitwitness.fleet.signals.record import Signal, no_evidence

SOURCE = "edac"
ROOT = Path("/sys/devices/system/edac/mc")
_CONTROLLERS = re.compile(r"mc\d+")
_MODULES = re.compile(r"(?:dimm|rank)\d+")
_ROWS = re.compile(r"csrow\d+")
_MOST = 4096
"""Entries of one folder that are looked at, and characters of one file: no real tree has more."""


def read_sysfs(root: Path = ROOT, *, host: str = "") -> Iterator[Signal]:
    """The counted errors of all memory controllers. Never raises on what it reads.

    Args:
        root: the folder with `mc0`, `mc1`, ….
        host: the node, for the records.
    """
    controllers = _entries(root, _CONTROLLERS)
    if not controllers:
        why = (
            "no memory controller is watched by EDAC here, so errors of the host's memory are not counted: no driver is"
            " loaded, or the machine checks are handled by the firmware"
        )
        yield no_evidence(SOURCE, "edac:absent", why, origin=str(root), host=host)
    for folder in controllers:
        yield from bounded((replace(one, host=host) for one in _of_controller(folder)), SOURCE, str(folder))


def looks_like_tree(path: Path) -> bool:
    """Whether a folder is one like `/sys/devices/system/edac/mc`, also a copy of another node's; never raises."""
    counters = ("ce_count", "ue_count", "ce_noinfo_count", "ue_noinfo_count")
    return any(_is_file(one / name) for one in _entries(path, _CONTROLLERS) for name in counters)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _entries(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """The folders of that kind of name; none where the folder is absent or cannot be read."""
    try:
        return sorted(one for one in islice(folder.iterdir(), _MOST) if pattern.fullmatch(one.name))
    except OSError:
        return []


@dataclass(slots=True)
class _Sum:
    """What was told module by module, to find what the controller counted beyond it."""

    ce: int = 0
    ue: int = 0


def _of_controller(folder: Path) -> Iterator[Signal]:
    span = _number(folder / "seconds_since_reset")
    since = _since(span) if isinstance(span, int) else "since they were last reset"
    told = _Sum()
    modules = _entries(folder, _MODULES)
    for module in modules:
        label = _label(module / "dimm_label") or f"{folder.name}/{module.name}"
        for kind, file in (("ce", "dimm_ce_count"), ("ue", "dimm_ue_count")):
            yield from _counted(module / file, kind, label, since, told)
    for row in _entries(folder, _ROWS) if not modules else []:
        label = _label(row / "ch0_dimm_label") or f"{folder.name}/{row.name}"
        for kind in ("ce", "ue"):
            yield from _counted(row / f"{kind}_count", kind, label, since, told)
    for kind, seen in (("ce", told.ce), ("ue", told.ue)):
        yield from _counted(folder / f"{kind}_count", kind, folder.name, since, None, without=seen)
        # The total has these too; where there is no total, they are all there is.
        if not (folder / f"{kind}_count").exists():
            yield from _counted(folder / f"{kind}_noinfo_count", kind, folder.name, since, None)


def _counted(file: Path, kind: str, label: str, since: str, told: _Sum | None, *, without: int = 0) -> Iterator[Signal]:
    count = _number(file)
    if isinstance(count, str):
        why = f"a counter of {label} cannot be read ({count}), so its errors are not known"
        yield no_evidence(SOURCE, "edac:unreadable", why, origin=str(file), device=label)
        return
    if told is not None:
        setattr(told, kind, getattr(told, kind) + count)
    if count > without:
        entry = catalogue.entry(f"edac:{kind}")
        more = f", without {without} that are told of its modules" if without else ""
        why = f"{entry.reason}. {count - without} counted {since}{more}, at times that it does not say"
        # Without the number, so that a count that is read again later is the same count, and not added to it.
        evidence = f"{file.parent.name}/{file.name}"
        yield Signal(
            SOURCE,
            f"edac:{kind}",
            label,
            None,
            entry.kind,
            entry.weight,
            why,
            count=count - without,
            evidence=evidence,
            origin=str(file),
        )


def _number(file: Path) -> int | str:
    """The count in a file; in words, why there is none."""
    text = _text(file)
    if text is None:
        return "it is absent or may not be read"
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else f"it says {words(text, 40)!r}"


def _text(file: Path) -> str | None:
    try:
        with file.open("rb") as opened:
            return opened.read(_MOST).decode("utf-8", errors="replace")
    except OSError:
        return None


def _label(file: Path) -> str:
    return words(_text(file) or "", 120)


def _since(seconds: int) -> str:
    hours = seconds / 3600
    return f"in the last {hours:.1f} hours" if hours < 48 else f"in the last {hours / 24:.0f} days"
