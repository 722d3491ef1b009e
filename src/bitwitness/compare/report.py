"""The report of a comparison: JSON for programs and for years to come, and a page for whoever decides, and for the vendor.

Both are made of one record, which the command line shows as well: what is sent, what is printed and what is read back say the same.
Read without jinja2, which only the page needs: a box that shows what others have measured has the base install.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from bitwitness._version import __version__
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.results import Result, Row
from bitwitness.errors import MissingExtra, RunFilesError
from bitwitness.faults.statistics import Share, wilson
from bitwitness.runfiles import utc_now
from bitwitness.runfiles.files import read_json, write_bytes, write_json

REPORT = "report.json"

RATES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Shares of steps for which the report says how many steps it takes to see one."""

_MOST_TRIALS = 10**15
_LARGEST = 10**300
"""Beyond what a double holds: no participant has counted so far."""


def write(files: CompareFiles, result: Result, finished: bool = True) -> dict[str, Any]:
    """Write `report.json` and, if it can be made here, `report.html`; the record that both are made of.

    Args:
        files: of the comparison.
        result: what was concluded.
        finished: false where the comparison was cut short, which both then say.

    Raises:
        RunFilesError: one cannot be written.
        MissingExtra: the page needs jinja2. The record is written by then.
    """
    made = record(result, finished)
    write_json(files.report, made)
    try:
        from bitwitness.compare import report_page  # noqa: PLC0415  (the base install has no jinja2)
    except ModuleNotFoundError as missing:
        raise MissingExtra(
            f"{files.report} is written; its page needs {missing.name}: pip install 'bitwitness[train]'"
        ) from missing
    write_bytes(files.page, report_page.render(made).encode())
    return made


def record(result: Result, finished: bool = True, *, may_run: bool = False) -> dict[str, Any]:
    """A result as JSON values: floats are finite or None, the order is always the same.

    Where nothing was seen in less than what was asked for, the outcome is *not characterised*.

    Args:
        result: what was concluded.
        finished: false where the comparison was cut short.
        may_run: it may be that it still runs.

    Besides the fields of `Result` it has `schema`, `what`, `version`, `made`, `finished`, `may_run`; `drill` and `drills`, the faults that are
    played, by whom; `reach`, how many steps it takes to see a fault that strikes a share of them; and in each mode `trials`, the
    same for the share that was measured.
    """
    plain: dict[str, Any] = _plain(result)
    who = [result.suspect, *result.references, *([result.control] if result.control else ())]
    drills = [{"name": one.name, "role": one.role, "fault": one.simulated} for one in who if one.simulated]
    for mode, of in zip(plain["modes"], result.modes, strict=True):
        # Where errors stay in the parameters, a step that is hit says nothing about the next.
        mode["trials"] = _trials(of.total, result.confidence) if of.mode != "free" else None
    return {
        "schema": 1,
        "what": "comparison",
        "version": __version__,
        "made": utc_now(),
        "finished": finished,
        "may_run": may_run,
        "drill": bool(drills),
        "drills": drills,
        **plain,
        **_in_part(result, finished),
        "reach": [{"rate": rate, "steps": trials_needed(rate, result.confidence)} for rate in RATES],
    }


def _in_part(result: Result, finished: bool) -> dict[str, str]:
    """What less than all says: nothing seen in it is no answer to what was asked."""
    if finished or result.outcome != "nothing seen":
        return {}
    return {
        "outcome": "not characterised",
        "sentence": f"it was not brought to its end, and nothing was seen so far: {result.sentence}",
    }


def read(path: Path) -> dict[str, Any]:
    """The record of a report, from its file or from the directory of its comparison. What it lacks and may lack is None or empty.

    Raises:
        RunFilesError: absent, damaged, or no report of a comparison.
    """
    file = path / REPORT if path.is_dir() else path
    found = read_json(file)
    if found.get("what") != "comparison":
        raise RunFilesError(f"{file} is no report of a comparison")
    try:
        whole: dict[str, Any] = found | _checked(Result, found, "report")
        for mode in whole["modes"]:
            mode["trials"] = _checked_trials(mode.get("trials"))
        whole["finished"] = _checked(bool, found.get("finished", False), "finished")
        whole["may_run"] = _checked(bool, found.get("may_run", False), "may_run")
        whole["drills"] = [{name: str(one[name]) for name in ("name", "role", "fault")} for one in found["drills"]]
        whole["drill"] = found.get("drill") is not False or bool(
            whole["drills"]
        )  # in doubt it is none that anybody acts on
        whole["reach"] = [
            {"rate": float(one["rate"]), "steps": _checked(int | None, one["steps"], "reach")}
            for one in found.get("reach", ())
        ]
        for name in ("version", "made"):
            whole[name] = _checked(str, found.get(name, ""), name)
        if whole["confidence"] is None or not 0 < whole["confidence"] < 1:
            raise ValueError(f"confidence is {whole['confidence']!r:.60}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFilesError(f"{file} is damaged, or was not written by bitwitness: {error}") from error
    return whole


def trials_needed(rate: float | None, confidence: float) -> int | None:
    """How many trials show at least one of what comes with this rate, with this confidence: ln(1-c)/ln(1-q), rounded up.

    None where the rate is 0 or unknown: no number is enough.
    """
    if rate is None or not rate > 0:
        return None
    if rate >= 1:
        return 1
    # A trial less where the quotient is an integer but for rounding.
    needed = math.log1p(-confidence) / math.log1p(-rate)
    return max(1, math.ceil(needed - 1e-9 * needed)) if needed < _MOST_TRIALS else None


def _trials(total: Row | None, confidence: float) -> dict[str, Any] | None:
    """How many steps show the fault again, at the measured share of steps and at both ends of its interval."""
    if total is None or not total.steps_hit or total.steps_hit > total.steps:
        return None
    share = wilson(total.steps_hit, total.steps, confidence)
    return {
        "steps": _plain(share),
        "needed": trials_needed(share.share, confidence),
        "at_least": trials_needed(share.high, confidence),
        "at_most": trials_needed(share.low, confidence),
    }


def _checked_trials(found: Any) -> dict[str, Any] | None:
    if found is None:
        return None
    counts = {name: _checked(int | None, found.get(name), name) for name in ("needed", "at_least", "at_most")}
    return {"steps": _checked(Share, found["steps"], "trials"), **counts}


def _plain(value: Any) -> Any:
    """Data classes as dictionaries, tuples as lists; a number that is none is None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        made = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return made | {"share": _plain(value.share)} if isinstance(value, Share) else made
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


# Reading back --------------------------------------------------------------------------------------------------------


def _checked(kind: Any, value: Any, where: str) -> Any:
    """A JSON value that has the shape of an annotation; what is shown later need not ask again. Any float may be None.

    Raises:
        TypeError: it has another shape; names where.
    """
    if kind is Any:
        return value
    if is_dataclass(kind) and isinstance(kind, type):
        return _checked_class(kind, value, where)
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        kinds = [one for one in inner if one is not NoneType]
        allowed = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
        return value if value in allowed else _checked(kinds[0], value, where)
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        return list(_checked_items(inner, value, where))
    if origin is Mapping and isinstance(value, dict):
        return {key: _checked(inner[1], one, f"{where}.{key}") for key, one in value.items()}
    if kind is float and (value is None or (isinstance(value, int | float) and not isinstance(value, bool))):
        return None if value is None or abs(value) > sys.float_info.max else float(value)
    fits = isinstance(kind, type) and isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if fits and kind is not float and (kind is not int or abs(value) < _LARGEST):
        return value
    raise TypeError(f"{where} is {str(value)[:60]!r}")


def _checked_class(kind: type, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{where} is {str(value)[:60]!r}")
    kinds = get_type_hints(kind)
    needed = {field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING}
    made = dict(value)
    for name, one in kinds.items():
        if name in value or name in needed:
            made[name] = _checked(one, value.get(name), f"{where}.{name}")
        else:
            made[name] = _checked(one, _plain(_default(kind, name)), f"{where}.{name}")
    if kind is Share:
        made["share"] = made["count"] / made["of"] if made["of"] > 0 else None
    return made


def _checked_items(inner: tuple[Any, ...], value: list[Any], where: str) -> Iterator[Any]:
    kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    if len(kinds) != len(value):
        raise TypeError(f"{where} has {len(value)} parts")
    for number, (kind, one) in enumerate(zip(kinds, value, strict=True)):
        yield _checked(kind, one, f"{where}[{number}]")


def _default(kind: type, name: str) -> Any:
    field = next(one for one in fields(kind) if one.name == name)
    return field.default_factory() if callable(field.default_factory) else field.default
