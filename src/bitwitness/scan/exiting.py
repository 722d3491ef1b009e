"""How a scan ends for the program that started it: an exit code and a first line, in each of the styles that such programs know.

One module, because the one rule is the same for all: only a failure may look like one. *Not judged* is a code of its own in every
style, and so is a drill, in which faults are made on purpose: no machine acts upon it. A Python that cannot start ends with 1, and a
command line with a mistake in it with 2, whatever the style; so a script must see the first line as well, which begins with the
words that belong to its code, before it takes a node out (deploy/).

| style | pass | fail | not judged | who reads it |
|---|---|---|---|---|
| plain | 0 | 1 | 3 | people, scripts; 2 is bad usage, of every command of ours |
| slurm | 0 | 1 | 3 | a prolog, by 0 or not; HealthCheckProgram, whose code Slurm only logs, so that the script drains the node |
| kubernetes | 0 | 160 | 3 | an init container: 0 alone lets the pod start; from 128 on a job may be tried again elsewhere |
| nagios | 0 | 2 | 3 | OK, CRITICAL, UNKNOWN, with performance data (Monitoring Plugins development guidelines) |
| npd | 0 | 1 | 2 | node-problem-detector's custom plugins: OK, problem, unknown; the first 80 bytes are shown |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, get_args

from bitwitness.errors import ConfigurationError
from bitwitness.scan.results import DeviceResult, Judgement, LinkResult, Standing, Voice

Style = Literal["plain", "nagios", "npd", "kubernetes", "slurm"]
STYLES: tuple[Style, ...] = get_args(Style)

Drill = Literal["found", "missed"]
"""Of a drill: whether exactly what was made faulty was found."""

_CODES: Mapping[str, Mapping[Standing, int]] = {
    "plain": {"pass": 0, "fail": 1, "not judged": 3},
    "slurm": {"pass": 0, "fail": 1, "not judged": 3},
    "kubernetes": {"pass": 0, "fail": 160, "not judged": 3},
    "nagios": {"pass": 0, "fail": 2, "not judged": 3},
    "npd": {"pass": 0, "fail": 1, "not judged": 2},
}
_NAGIOS: Mapping[Standing, str] = {"pass": "OK", "fail": "CRITICAL", "not judged": "UNKNOWN"}
_NPD_BYTES, _LINE_BYTES = 80, 400
_UNSAFE = re.compile(r"[^\x20-\x7e]+")


def code(judgement: Judgement, style: str, *, drill: Drill | None = None) -> int:
    """The exit code. A drill that was found ends as a pass does, one that was missed as *not judged*: none of them as a failure.

    Raises:
        ConfigurationError: there is no such style.
    """
    return _codes(style)[_standing(judgement, drill)]


def unusable(style: str) -> int:
    """The exit code where nothing was scanned because something was wrong with what was asked for: that of *not judged*, where 2
    would mean something else (CRITICAL to Nagios), else 2.

    Raises:
        ConfigurationError: there is no such style.
    """
    codes = _codes(style)
    return codes["not judged"] if style in ("nagios", "npd") else 2


def unusable_line(style: str, why: str) -> str:
    """The first line of output then.

    Raises:
        ConfigurationError: there is no such style.
    """
    _codes(style)
    if style == "nagios":
        return _cut(f"BITWITNESS UNKNOWN - {why.replace('|', '/')}", _LINE_BYTES)
    words = f"not judged: {why}" if style in ("npd", "plain") else f"bitwitness scan not judged: {why}"
    return _cut(words, _NPD_BYTES if style == "npd" else _LINE_BYTES)


def line(judgement: Judgement, style: str, *, drill: Drill | None = None) -> str:
    """The first line of output: ASCII, without what steers a terminal; of npd at most 80 bytes, of nagios with performance data.

    Raises:
        ConfigurationError: there is no such style.
    """
    _codes(style)
    standing = _standing(judgement, drill)
    said = _said(judgement) if drill is None else f"drill {drill}: {_said(judgement)}"
    if style == "nagios":
        words = _cut(f"BITWITNESS {_NAGIOS[standing]} - {said.replace('|', '/')}", _LINE_BYTES)
        return f"{words} | {_performance(judgement, drill)}"
    if style == "npd":
        return _cut(f"{standing}: {said}", _NPD_BYTES)
    if style == "plain":
        return _cut(f"{standing}: {said}", _LINE_BYTES)
    return _cut(f"bitwitness scan {standing}: {said}", _LINE_BYTES)


def drilled(judgement: Judgement, *, ranks: tuple[int, ...] = (), link: tuple[int, int] | None = None) -> Drill:
    """Whether a drill was found: that all of what was made faulty failed, and nothing else."""
    devices = {one.rank for one in judgement.devices if one.standing == "fail"}
    links = {frozenset(one.ranks) for one in judgement.links if one.standing == "fail"}
    expected = set() if link is None else {frozenset(link)}
    return "found" if devices == set(ranks) and links == expected else "missed"


def _codes(style: str) -> Mapping[Standing, int]:
    try:
        return _CODES[style]
    except KeyError:
        raise ConfigurationError(f"{style!r} is no style of exit codes: choose {', '.join(STYLES)}") from None


def _standing(judgement: Judgement, drill: Drill | None) -> Standing:
    if drill is None:
        return judgement.standing
    return "pass" if drill == "found" else "not judged"


def _said(judgement: Judgement) -> str:
    """Who failed first and why, else what was seen, in few words: only the first 80 bytes of it may be shown."""
    devices = judgement.devices
    failed = [one for one in devices if one.standing == "fail"]
    if failed:
        return f"{len(failed)} of {len(devices)} devices failed: {_who(failed[0])}: {failed[0].reason}"
    links = [one for one in judgement.links if one.standing == "fail"]
    if links:
        first = links[0]
        return f"{len(links)} links failed: {_end(first, 0)} to {_end(first, 1)}: {first.reason}"
    voices = [one for one in judgement.voices if one.standing == "fail"]
    if voices:
        return f"{voices[0].source} failed {_who(voices[0])}: {voices[0].reason}"
    unjudged = [one for one in devices if one.standing == "not judged"]
    if unjudged:
        return f"{len(unjudged)} of {len(devices)} devices not judged: {_who(unjudged[0])}: {unjudged[0].reason}"
    if not devices:
        return "no device was scanned"
    other = [one for one in judgement.links if one.standing == "not judged"]
    if other:
        return f"{len(other)} links not judged: {_end(other[0], 0)} to {_end(other[0], 1)}: {other[0].reason}"
    bounds = [one.bound for one in devices if one.bound is not None]
    worst = f", error rate of each below {max(bounds):.2g} per call ({judgement.confidence:.0%})" if bounds else ""
    mute = list(dict.fromkeys(one.source for one in judgement.voices if one.standing == "not judged"))
    told = f", {' and '.join(mute)} did not judge" if mute else ""
    return f"{len(devices)} devices, {sum(one.calls for one in devices)} answers right{told}{worst}"


def _who(one: DeviceResult | Voice) -> str:
    return " ".join(part for part in (one.node, one.device) if part)


def _end(link: LinkResult, end: int) -> str:
    return f"{link.nodes[end]} {link.devices[end]}"


def _performance(judgement: Judgement, drill: Drill | None) -> str:
    """Performance data: 'label'=value[unit];[warn];[crit];[min];[max]. Of a drill none of the limits, which would alarm."""
    devices = judgement.devices
    count = {name: sum(one.standing == name for one in devices) for name in ("pass", "fail", "not judged")}
    limits = ("0", "0") if drill is None else ("", "")
    bounds = [one.bound for one in devices if one.bound is not None]
    parts = [
        f"devices={len(devices)};;;0",
        f"passed={count['pass']};;;0;{len(devices)}",
        f"failed={count['fail']};;{limits[1]};0;{len(devices)}",
        f"not_judged={count['not judged']};{limits[0]};;0;{len(devices)}",
        f"calls={sum(one.calls for one in devices)};;;0",
        f"wrong={sum(one.wrong for one in devices)};;;0",
    ]
    if bounds:
        parts.append(f"bound={max(bounds):.12f};;;0;1")
    return " ".join(parts)


def _cut(text: str, limit: int) -> str:
    """On one line, in ASCII, so that bytes are characters."""
    plain = " ".join(_UNSAFE.sub(" ", text).split())
    return plain if len(plain) <= limit else plain[: limit - 3] + "..."
