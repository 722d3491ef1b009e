"""Diagnostics of vendors as one more voice beside the answers: `dcgmi diag`, `ascend-dmi`, `rvs`.

They know of their hardware what nobody else does, so a failure of theirs counts. That they find nothing counts for little: devices
that corrupt silently pass every level of them (a clean `dcgmi diag -r 3` rules out nothing, support.crusoecloud.com article
52229568610715; its memory test can pass with an allocation error, NVIDIA/DCGM issue 284). And whatever keeps them from telling
anything, which is much, is *not judged*.

What their output means is known to `fleet.signals`, which weighs the same output where somebody else ran them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.signals import ascend, diagnostic, rvs
from bitwitness.fleet.signals.reading import words
from bitwitness.fleet.signals.record import WEIGHTS, Signal
from bitwitness.scan.results import Standing, Voice
from bitwitness.scan.running import Ran
from bitwitness.scan.running import run as run_program

LEVELS = (1, 2, 3, 4)
PASSED = "a pass does not rule out silent corruption"


@dataclass(frozen=True, slots=True)
class _Vendor:
    """One diagnostic.

    Attributes:
        source: as in signals.
        programs: where it may be; the first that is there is run.
        command: its arguments, by level.
        minutes: that a level may take by default, well beyond what was measured.
        read: the reader of its output.
        install: what to do where it is absent.
        codes: exit codes that it ends with when it has found something.
    """

    source: str
    programs: tuple[str, ...]
    command: Callable[[int], list[str]]
    minutes: Mapping[int, float]
    read: Callable[..., Iterator[Signal]]
    install: str
    codes: Mapping[int, str]


_SCENES = {1: "healthCheck", 2: "healthCheck", 3: "performanceCheck", 4: "stressTest"}
_FOUND = {226: "the diagnostic failed (-30)", 205: "a device is to be taken out of service (-51)"}
"""What the codes of `dcgmi diag` are, minus 256, in `dcgm_structs.h`; inferred for the shell, so they accuse nobody alone."""

_VENDORS: Mapping[str, _Vendor] = {
    "dcgm": _Vendor(
        diagnostic.SOURCE,
        ("dcgmi",),
        lambda level: ["diag", "-r", str(level), "-j"],
        {1: 5, 2: 20, 3: 60, 4: 180},
        diagnostic.read,
        "install DCGM (datacenter-gpu-manager) and start its host engine",
        _FOUND,
    ),
    "ascend": _Vendor(
        ascend.SOURCE,
        ("ascend-dmi",),
        lambda level: ["--dg", "--se", _SCENES[level], "-q", "--fmt", "json"],
        {1: 5, 2: 5, 3: 240, 4: 300},
        ascend.read,
        "install Ascend's toolbox, and source its set_env.sh",
        {},
    ),
    "rvs": _Vendor(
        rvs.SOURCE,
        ("rvs", "/opt/rocm/bin/rvs"),
        lambda level: ["-r", str(level)],
        {1: 5, 2: 10, 3: 60, 4: 180},
        rvs.read,
        "install rocm-validation-suite",
        {},
    ),
}
VENDORS = tuple(_VENDORS)

_ADVICE = (
    (("host engine", "hostengine"), "start DCGM's host engine: systemctl start nvidia-dcgm, or nv-hostengine"),
    (
        ("permission", "not permitted", "root", "privilege", "denied"),
        "run it as root, or as a user that may use the devices",
    ),
    (("in use", "busy", "other process"), "run it where nothing else uses the devices"),
    (
        ("no platform support", "no gpu", "no devices", "not detected"),
        "there may be no such device here, or no driver for it",
    ),
)


def longest(which: Sequence[str], level: int, timeout: float | None) -> float:
    """Seconds that these may take at most, with what it takes to end them."""
    names = VENDORS if "auto" in which else which
    return sum((timeout or 60 * _VENDORS[name].minutes[level]) + 30 for name in names)


def asked_for(which: Sequence[str], node: str) -> list[Voice]:
    """What is known of them before they have come to an end: nothing."""
    names = [_VENDORS[name].source if name in _VENDORS else "vendor" for name in dict.fromkeys(which)]
    why = "it was asked for, and had not come to its end when this was written"
    return [Voice(name, node, "", "not judged", why) for name in names]


def run(
    which: Sequence[str],
    level: int = 1,
    timeout: float | None = None,
    node: str = "",
    stop: Callable[[], bool] = lambda: False,
) -> list[Voice]:
    """Run diagnostics, one after the other, and say what they said of each device.

    Args:
        which: `dcgm`, `ascend`, `rvs`, or `auto` for those that are installed.
        level: 1 (seconds) to 4 (hours); what it means is the vendor's.
        timeout: seconds for each; None or 0: by level.
        node: the node that this is.
        stop: is asked whether to end them before their time.

    Returns:
        A voice for each device of which one spoke; one of *not judged* for each that told nothing, and where there is none at all.

    Raises:
        ConfigurationError: there is no such diagnostic or level, or the time-out is no time.
    """
    unknown = [name for name in which if name not in (*_VENDORS, "auto")]
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} is no diagnostic of a vendor: choose auto, {', '.join(_VENDORS)}")
    if level not in LEVELS:
        raise ConfigurationError(f"level {level} is none of a vendor's diagnostic: choose 1 to {LEVELS[-1]}")
    if timeout is not None and not 0 <= timeout < 1e7:
        raise ConfigurationError(f"a diagnostic cannot be given {timeout:g} seconds")
    names = list(dict.fromkeys(which))
    if "auto" in names:
        present = [name for name, vendor in _VENDORS.items() if _program(vendor) or name in names]
        names = [name for name in present if name != "auto"]
        if not names:
            programs = ", ".join(vendor.programs[0] for vendor in _VENDORS.values())
            return [Voice("vendor", node, "", "not judged", f"no diagnostic of a vendor is installed ({programs})")]
    return [voice for name in names for voice in _run(_VENDORS[name], level, timeout or None, node, stop)]


def _program(vendor: _Vendor) -> str | None:
    return next((found for name in vendor.programs if (found := shutil.which(name))), None)


def _run(vendor: _Vendor, level: int, timeout: float | None, node: str, stop: Callable[[], bool]) -> list[Voice]:
    program = _program(vendor)
    if program is None:
        why = f"{vendor.programs[0]} is not installed: {vendor.install}"
        return [Voice(vendor.source, node, "", "not judged", why)]
    if stop():
        return [Voice(vendor.source, node, "", "not judged", "it was not run, because the scan was interrupted")]
    ran = run_program([program, *vendor.command(level)], timeout or 60 * vendor.minutes[level], stop=stop)
    signals = list(vendor.read(ran.output, origin=program, now=datetime.now(UTC))) if ran.output else []
    voices = [_voice(vendor, node, device, found) for device, found in _by_device(signals).items()]
    if trouble := _trouble(vendor, ran, level, signals):
        # What it says to have found stands; that it found nothing on other devices does not.
        kept = [voice for voice in voices if voice.standing == "fail"]
        return [*kept, Voice(vendor.source, node, "", "not judged", trouble)]
    return voices


def _trouble(vendor: _Vendor, ran: Ran, level: int, signals: Sequence[Signal]) -> str:
    """Why its silence says nothing; "" where it came to its end and said something that can be read."""
    said = words((ran.errors or ran.output[-2000:]).decode("utf-8", "replace"), 200)
    command = " ".join([vendor.programs[0], *vendor.command(level)])
    if ran.why:
        more = (
            "give it more time (--vendor-timeout), or look at the device"
            if "did not end" in ran.why
            else f"run {command}"
        )
        return f"{ran.why}: {more}"
    if any(one.kind != "no-evidence" for one in signals):
        return ""
    if ran.code is not None and ran.code in vendor.codes:
        return f"it ended with {ran.code}, {vendor.codes[ran.code]}, and its output names no error that is known: run {command}"
    spoke = any(not one.code.endswith((":unreadable", ":error")) for one in signals)
    if ran.code or not spoke:
        how = f"was ended by signal {-ran.code}" if ran.code and ran.code < 0 else f"ended with {ran.code}"
        told = "told nothing of any device" if not spoke else "may not have told all"
        return f"it {how} and {told}{f': {said}' if said else ''}. {_advice(said, command)}"
    return ""


def _advice(said: str, command: str) -> str:
    small = said.lower()
    return next((advice for marks, advice in _ADVICE if any(mark in small for mark in marks)), f"Run {command}")


def _by_device(signals: Sequence[Signal]) -> dict[str, list[Signal]]:
    found: dict[str, list[Signal]] = {}
    for one in signals:
        found.setdefault(one.device, []).append(one)
    return found


def _voice(vendor: _Vendor, node: str, device: str, signals: Sequence[Signal]) -> Voice:
    """What all that was said of a device comes to. Only what weighs something is a failure: that a device is slow, hot, or wants
    a reset takes nobody out for corruption.
    """
    told = sorted((one for one in signals if one.kind != "no-evidence"), key=lambda one: WEIGHTS[one.weight])
    quiet = [one for one in signals if one.kind == "no-evidence"]
    if told and told[0].weight in ("strong", "medium"):
        return Voice(vendor.source, node, device, "fail", _reasons(told), told[0].weight)
    if told:
        why = f"it complains of what is weak evidence of corruption, or none: {_reasons(told)}"
        return Voice(vendor.source, node, device, "not judged", words(why, 600))
    unsure = [one for one in quiet if not one.code.endswith(":pass")]
    passed = any(one.code.endswith(":pass") for one in quiet)
    damaged = [one for one in unsure if not one.code.endswith((":skipped", ":not-run"))]
    standing: Standing = "pass" if passed and not damaged else "not judged"
    shown = damaged if passed and damaged else quiet
    return Voice(vendor.source, node, device, standing, words("; ".join(one.reason for one in shown), 600))


def _reasons(signals: Sequence[Signal]) -> str:
    reasons = list(dict.fromkeys(one.reason for one in signals))
    more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
    return words("; ".join(reasons[:3]), 600) + more
