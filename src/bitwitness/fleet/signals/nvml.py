"""What NVIDIA's driver says of the devices of this machine, through NVML.

A sick device can make a call into the driver hang, or take the process down. So `read` asks in a process of its own and
waits only for a while: that the driver does not answer is a finding too, and a controller must outlive it.

Every question is asked for itself, because every driver and every product leaves some of them out; what is left out is
said in a no-evidence record. Counts have no time: the driver keeps none. Under MIG all is told of the device that the
slices are cut from, because blame covers all of them.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from typing import Any

from bitwitness.fleet.signals.catalogue import pci_address
from bitwitness.fleet.signals.dcgm_fields import ACTIONS, CLOCKS, FIELDS, action_reason, throttled
from bitwitness.fleet.signals.reading import bounded, words
from bitwitness.fleet.signals.record import Signal, no_evidence
from bitwitness.fleet.signals.times import iso

SOURCE = "nvml"
_MOST_DEVICES, _MOST_LINKS, _MOST_SLICES = 64, 36, 16
_BLANK = 1 << 62
_RECOVERY_ACTION, _RETIRED_DBE, _RETIRED_PENDING = 230, 30, 31
"""Fields of `nvmlDeviceGetFieldValues`, as they are numbered in nvidia-ml-py."""

_LOST, _RESET, _INFOROM = 15, 16, 14
_REFUSALS: Mapping[int, tuple[str, str]] = {
    3: ("not-supported", "not supported by this device or driver"),
    4: ("no-permission", "not permitted to this user"),
    13: ("function-not-found", "not known to this driver"),
    21: ("no-data", "not available at the moment"),
    22: ("not-supported", "not supported in a virtual machine"),
    26: ("function-not-found", "no longer answered by this driver"),
}
"""By NVML's return code: what is not told, and why. All other codes are failures."""

_COUNTS = (
    ("ecc-ue-volatile", 311, 1, 0),
    ("ecc-ce-volatile", 310, 0, 0),
    ("ecc-ue-aggregate", 313, 1, 1),
    ("ecc-ce-aggregate", 312, 0, 1),
)
"""Code, DCGM's field of the same meaning, and the two arguments of `nvmlDeviceGetTotalEccErrors`."""
_ROWS = (("rows-remapped-ce", 394), ("rows-remapped-ue", 393), ("row-remap-pending", 396), ("row-remap-failure", 395))
_LINK_COUNTS = (("nvlink-replay", 429), ("nvlink-recovery", 439), ("nvlink-crc-flit", 409), ("nvlink-crc-data", 419))
_VALUES = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def read(*, host: str = "", timeout: float = 20) -> list[Signal]:
    """Ask the driver of this machine, in a process of its own. Never raises for what the driver does.

    Args:
        host: the node, for the records.
        timeout: in seconds, after which the driver counts as hanging.
    """
    # -P: prologs run as root, in directories of users, and a `pynvml.py` there must not be what is imported.
    command = [sys.executable, "-P", "-m", "bitwitness.fleet.signals.nvml"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.communicate(timeout=1)
        except subprocess.TimeoutExpired:
            # It hangs inside the kernel, where no signal reaches it. Waiting for it would hang us too.
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        why = f"the driver did not answer within {timeout:g} s, as it does with a device that is lost or broken"
        return [no_evidence(SOURCE, "nvml:hangs", why, origin="NVML", host=host)]
    try:
        records = json.loads(out)
        return [replace(Signal.from_json(record), host=host) for record in records]
    except (ValueError, KeyError, TypeError, RecursionError):
        how = f"ended by signal {-process.returncode}" if process.returncode < 0 else f"ended with {process.returncode}"
        why = f"the process that asked the driver {how}: {words(err.decode('utf-8', 'replace')[-400:], 200)}"
        return [no_evidence(SOURCE, "nvml:crashed", why, origin="NVML", host=host)]


def read_here(*, host: str = "", now: datetime | None = None) -> Iterator[Signal]:
    """Ask the driver in this process, which may hang or die of it; see `read`."""
    found = _all(now or datetime.now(UTC))
    yield from (replace(one, host=host, origin="NVML") for one in bounded(found, SOURCE, "NVML"))


def _all(now: datetime) -> Iterator[Signal]:
    try:
        pynvml: Any = import_module("pynvml")  # an extra, and without annotations
    except ImportError:
        why = "nvidia-ml-py is not installed, so NVIDIA's driver was not asked: pip install 'bitwitness[gpu]'"
        yield no_evidence(SOURCE, "nvml:not-installed", why)
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = getattr(error, "value", 0) == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
        why = f"NVIDIA's driver was not asked: {words(str(error))}" + (
            ", as where there is no NVIDIA device" if absent else ""
        )
        yield no_evidence(SOURCE, "nvml:absent" if absent else "nvml:unreachable", why)
        return
    try:
        count = min(pynvml.nvmlDeviceGetCount(), _MOST_DEVICES)
        if count == 0:
            yield no_evidence(SOURCE, "nvml:no-devices", "NVIDIA's driver knows no device here")
        for index in range(count):
            yield from _Asked(pynvml, index, now).signals()
    except pynvml.NVMLError as error:
        yield no_evidence(
            SOURCE, "nvml:unreachable", f"NVIDIA's driver does not count its devices: {words(str(error))}"
        )
    finally:
        _quietly(pynvml.nvmlShutdown, pynvml.NVMLError)


def _quietly(call: Callable[[], object], error: type[Exception]) -> None:
    try:
        call()
    except error:
        return


@dataclass(slots=True)
class _Asked:
    """One device while it is asked; `refused` collects what it does not tell, by the code of the refusal."""

    nvml: Any
    index: int
    now: datetime
    device: str = ""
    handle: Any = None
    refused: dict[int, list[str]] = field(default_factory=dict)
    broken: dict[str, list[str]] = field(default_factory=dict)

    def signals(self) -> Iterator[Signal]:
        """All that the device says, and last what it does not say."""
        self.device = f"gpu:{self.index}"
        self.handle = self.ask("the device itself", "nvmlDeviceGetHandleByIndex", self.index, of_device=False)
        if self.handle is not None:
            yield from self._identity()
            yield from self._memory()
            yield from self._links()
            yield from self._fields()
            yield from self._state()
        yield from self._untold()

    def ask(self, what: str, name: str, *arguments: Any, of_device: bool = True) -> Any:
        """One answer, or None with the refusal noted under `what`."""
        function = getattr(self.nvml, name, None)
        if function is None:
            self.refused.setdefault(self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND, []).append(what)
            return None
        try:
            return function(*((self.handle,) if of_device else ()), *arguments)
        except self.nvml.NVMLError as error:
            self.refused.setdefault(getattr(error, "value", 999), []).append(what)
        except (ValueError, TypeError, OSError) as error:  # text that is none, of a driver that is broken
            self.broken.setdefault(words(str(error), 100), []).append(what)
        return None

    def say(self, code: str, known: int, count: int, what: str) -> Iterator[Signal]:
        """A count that is not 0, with the weight of the field of DCGM that has the same meaning."""
        if count >= _BLANK or count < 0:
            self.broken.setdefault(f"says {count}, which is no count", []).append(what)
        elif count:
            meaning = FIELDS[known]
            why = f"{what}, {count}: {meaning.why}"
            # Evidence without the number, so that a count that is read again later is the same count, and not added to it.
            yield self.signal(f"nvml:{code}", meaning.kind, meaning.weight, why, what, count)

    def signal(
        self, code: str, kind: Any, weight: Any, why: str, evidence: str, count: int = 1, time: str | None = None
    ) -> Signal:
        """A record of this device."""
        return Signal(SOURCE, code, self.device, time, kind, weight, why, count=count, evidence=words(evidence))

    def _identity(self) -> Iterator[Signal]:
        uuid = self.ask("UUID", "nvmlDeviceGetUUID")
        serial = self.ask("serial number", "nvmlDeviceGetSerial")
        info = self.ask("PCI address", "nvmlDeviceGetPciInfo")
        bus = getattr(info, "busId", b"")
        pci = pci_address(bus.decode("ascii", "replace") if isinstance(bus, bytes) else str(bus))
        self.device = words(uuid, 80) if uuid else pci or self.device
        slices = self._slices()
        told = (f"pci={pci}" if pci else "", f"serial={words(serial, 40)}" if serial else "", f"index={self.index}")
        evidence = " ".join((*filter(None, told), *([f"mig={','.join(slices)}"] if slices else [])))
        yield replace(
            self.signal("identity:pci", "noise", "none", "which device sits in which slot", "", time=iso(self.now)),
            evidence=evidence[:2000],
        )

    def _slices(self) -> list[str]:
        """The UUIDs of the slices that MIG has cut this device into."""
        # A device that cannot be cut answers that MIG is not supported, which leaves nothing untold.
        mode = self.ask("", "nvmlDeviceGetMigMode")
        if not mode or mode[0] != 1:
            return []
        names = []
        for number in range(min(self.ask("number of MIG slices", "nvmlDeviceGetMaxMigDeviceCount") or 0, _MOST_SLICES)):
            try:
                piece = self.nvml.nvmlDeviceGetMigDeviceHandleByIndex(self.handle, number)
                names.append(words(self.nvml.nvmlDeviceGetUUID(piece), 80))
            except (self.nvml.NVMLError, ValueError):  # places for slices are numbered whether there is one or not
                continue
        return names

    def _memory(self) -> Iterator[Signal]:
        mode = self.ask("whether ECC is on", "nvmlDeviceGetEccMode")
        if mode and mode[0] == 0:
            yield no_evidence(SOURCE, "nvml:ecc-off", FIELDS[300].why, device=self.device)
        for code, known, kind, counter in _COUNTS:
            what = f"{('corrected', 'uncorrected')[kind]} ECC errors, {('since the driver was loaded', 'of its whole life')[counter]}"
            count = self.ask(what, "nvmlDeviceGetTotalEccErrors", kind, counter)
            if count is not None:
                yield from self.say(code, known, count, what)
        rows = self.ask("remapped rows", "nvmlDeviceGetRemappedRows") or ()
        for (code, known), count in zip(_ROWS, rows, strict=False):
            yield from self.say(code, known, count, code.replace("-", " "))
        yield from self._sram()

    def _sram(self) -> Iterator[Signal]:
        what, kind = "SRAM error threshold", getattr(self.nvml, "c_nvmlEccSramErrorStatus_v1_t", None)
        if kind is None:
            self.refused.setdefault(self.nvml.NVML_ERROR_FUNCTION_NOT_FOUND, []).append(what)
            return
        # nvidia-ml-py hands on what it is given, and the driver wants an address: the structure itself would be a wild one.
        status = kind()
        if self.ask(what, "nvmlDeviceGetSramEccErrorStatus", ctypes.byref(status)) is not None:
            yield from self.say("sram-threshold", 346, int(bool(status.bThresholdExceeded)), what)

    def _links(self) -> Iterator[Signal]:
        links = [link for link in range(_MOST_LINKS) if self._active(link)]
        for counter, (code, known) in enumerate(_LINK_COUNTS):
            what, total = code.replace("-", " "), 0
            for link in links:
                count = self.ask(f"{what} of link {link}", "nvmlDeviceGetNvLinkErrorCounter", link, counter)
                total += count if count is not None and 0 <= count < _BLANK else 0
            yield from self.say(code, known, total, f"{what}, of {len(links)} links")

    def _active(self, link: int) -> bool:
        """A link that is not there answers like one that is not known: no refusal to tell of."""
        try:
            return bool(self.nvml.nvmlDeviceGetNvLinkState(self.handle, link))
        except self.nvml.NVMLError as error:
            if link == 0:
                self.refused.setdefault(getattr(error, "value", 999), []).append("NVLink errors")
            return False

    def _fields(self) -> Iterator[Signal]:
        action = self._field(_RECOVERY_ACTION, "recovery action")
        if action:
            _, kind, weight = ACTIONS.get(action, ("", "loud", "weak"))
            yield self.signal("nvml:recovery-action", kind, weight, action_reason(action), f"recovery action {action}")
        for identifier, code, known in ((_RETIRED_DBE, "pages-retired", 391), (_RETIRED_PENDING, "pages-pending", 392)):
            count = self._field(identifier, "")
            if count:
                yield from self.say(code, known, count, code.replace("-", " "))

    def _field(self, identifier: int, what: str) -> int | None:
        values = self.ask(what, "nvmlDeviceGetFieldValues", [identifier])
        if values is None:
            return None
        if values[0].nvmlReturn != 0:
            self.refused.setdefault(int(values[0].nvmlReturn), []).append(what)
            return None
        name = _VALUES.get(int(values[0].valueType))
        try:
            return int(getattr(values[0].value, name)) if name else None
        except (ValueError, OverflowError):
            self.broken.setdefault("says what is no number", []).append(what)
            return None

    def _state(self) -> Iterator[Signal]:
        """What it is like at this moment, which is no sign of health and may explain what is wrong."""
        heat = self.ask("temperature", "nvmlDeviceGetTemperature", 0)
        power = self.ask("power", "nvmlDeviceGetPowerUsage")
        bits = self.ask("reasons for lower clocks", "nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # What the same question was called before driver 535.
            bits = self.ask("", "nvmlDeviceGetCurrentClocksThrottleReasons")
        faults, limits = throttled(bits or 0)
        told = [f"{heat} °C"] if heat is not None else []
        told += [f"{power / 1000:g} W"] if power is not None else []
        if bits is not None:
            told += [
                f"clocks held down by {', '.join(faults + limits)}" if faults or limits else "clocks not held down"
            ]
        now = iso(self.now)
        if told:
            why = "its state at this moment: no error, and no sign of health"
            yield self.signal("nvml:state", "noise", "none", why, "; ".join(told), time=now)
        if faults:
            why = f"{', '.join(faults)}: {FIELDS[CLOCKS].why}"
            yield self.signal("nvml:clocks", "loud", "none", why, f"reasons {bits:#x}", time=now)

    def _untold(self) -> Iterator[Signal]:
        silent: dict[tuple[str, str], list[str]] = {}
        for value, asked in self.refused.items():
            names = [name for name in asked if name]
            text = words(str(self.nvml.NVMLError(value)), 80)
            if value in {_LOST, _RESET, _INFOROM}:
                yield self._alarm(value, text)
            code, why = _REFUSALS.get(value, ("failed", f"refused with {text!r}"))
            if names:
                silent.setdefault((code, why), []).extend(names)
        for why, asked in self.broken.items():
            silent.setdefault(("failed", why), []).extend(name for name in asked if name)
        for (code, why), names in silent.items():
            told = f"{why}: {', '.join(dict.fromkeys(names))}. What is not told is not 0"
            yield no_evidence(SOURCE, f"nvml:{code}", words(told, 600), device=self.device)

    def _alarm(self, value: int, text: str) -> Signal:
        if value == _LOST:
            why = "the driver has lost the device (Xid 79): a loud fault, not silent corruption"
            return self.signal("nvml:gpu-lost", "loud", "none", why, text, time=iso(self.now))
        if value == _RESET:
            why = "the driver wants the device to be reset, after a memory error or a loud fault; the kernel log says which"
            return self.signal("nvml:reset-required", "loud", "weak", why, text, time=iso(self.now))
        why = "the board's own memory of settings is damaged: a broken device, but not silent corruption"
        return self.signal("nvml:inforom", "loud", "none", why, text)


def main() -> None:
    """What the process of `read` does: ask, and say it as JSON on standard output."""
    json.dump([one.to_json(details=True) for one in read_here()], sys.stdout)


if __name__ == "__main__":
    main()
