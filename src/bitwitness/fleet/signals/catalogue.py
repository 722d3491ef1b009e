"""What the numbers mean that drivers log, and how much each weighs beside an incident: one table, so that a reviewer can
argue with it line by line.

Meanings and NVIDIA's advice are those of its Xid catalogue (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html,
columns *Description*, *Immediate Action* and *Trigger Conditions*); switch errors those of its fabric manager guide
(docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide, appendix on SXid); that a run of 12022 and 12023 hints at silent
corruption is one operator's experience (support.crusoecloud.com/hc/en-us/articles/52229568610715). Host memory is told by
the kernel as in Documentation/admin-guide/RAS/main.rst. The weights are our own inference (reference/recovery.md §4.4 of the
project's notes): no vendor publishes what a log says about silent corruption, because what is silent is in no log.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bitwitness.fleet.signals.record import SignalClass, Weight


@dataclass(frozen=True, slots=True)
class Entry:
    """What one code speaks for.

    Attributes:
        kind: its class.
        weight: how much it weighs beside an incident that names the device.
        reason: what it means, and why it weighs that much, in a sentence or two.
    """

    kind: SignalClass
    weight: Weight
    reason: str


_LINK = "supports a communication cause, and both ends of a link log it, so it blames no device alone"
_LOUD = "a fault that does not go unnoticed: a broken device, but no explanation of silent corruption"
_APPLICATION = "what a program does wrong, on healthy devices too"

_XID: dict[int, Entry] = {
    13: Entry(
        "application", "none", f"an exception of the graphics engine, as a rule an access out of bounds: {_APPLICATION}"
    ),
    31: Entry("application", "none", f"a page fault of the device's memory management: {_APPLICATION}"),
    43: Entry(
        "application", "none", f"the device stopped work for a fault of the software and stays healthy: {_APPLICATION}"
    ),
    45: Entry("noise", "none", "a program was cleaned up (Ctrl-C, SIGKILL, another error): seen wherever jobs end"),
    46: Entry("loud", "none", f"the device stopped processing; NVIDIA: reset the GPU; {_LOUD}"),
    48: Entry(
        "memory",
        "strong",
        "an uncorrectable (double bit) ECC error: memory of this device held wrong bits. Replace it if it comes again",
    ),
    54: Entry("loud", "none", f"auxiliary power is not connected to the board; {_LOUD}"),
    62: Entry("loud", "none", f"the internal micro-controller (PMU) halted; NVIDIA: reset the GPU; {_LOUD}"),
    63: Entry(
        "memory",
        "weak",
        "a row of memory was marked for remapping after errors in it: supports a memory cause. It takes effect at the next reset",
    ),
    64: Entry(
        "memory",
        "strong",
        "a row of memory could not be remapped: bad memory stays in use. NVIDIA takes such devices back",
    ),
    74: Entry("link", "weak", f"an NVLink error; NVIDIA: it may be the device at the other end. It {_LINK}"),
    79: Entry("loud", "none", f"the device has fallen off the bus; NVIDIA: restart the machine; {_LOUD}"),
    92: Entry(
        "memory", "medium", "a high rate of corrected (single bit) ECC errors: memory or a path to it is getting worse"
    ),
    94: Entry(
        "memory",
        "medium",
        "an uncorrectable memory error that was contained to one program, which must restart; strong if it comes again",
    ),
    95: Entry(
        "memory",
        "strong",
        "an uncorrectable memory error that was not contained: distrust the step, and checkpoints made since. NVIDIA: reset the GPU",
    ),
    109: Entry("loud", "none", f"a context switch timed out; NVIDIA: reset the GPU; {_LOUD}"),
    110: Entry("loud", "none", f"a security fault, uncommon unless hardware failed; NVIDIA: cold reset; {_LOUD}"),
    119: Entry("loud", "none", f"the GPU's system processor (GSP) did not answer in time; {_LOUD}"),
    120: Entry("loud", "none", f"an error in the GPU's system processor (GSP); {_LOUD}"),
    121: Entry("loud", "none", "corrected errors of the link between GPU and CPU (C2C); NVIDIA: no operational impact"),
    136: Entry("loud", "none", f"the training of a link failed; NVIDIA: reset the GPU; {_LOUD}"),
    140: Entry(
        "memory",
        "strong",
        "an uncorrectable memory error that the driver could not recover from: no row was remapped. NVIDIA: reset the GPU",
    ),
    142: Entry("loud", "none", f"an error of the video encoder (NVENC3); NVIDIA: contact support; {_LOUD}"),
    143: Entry("loud", "none", f"the device failed to initialise; NVIDIA: reset the GPU; {_LOUD}"),
    **{
        number: Entry("link", "weak", f"an NVLink error ({part}): {_LINK}")
        for number, part in {
            144: "SAW",
            145: "RLW",
            146: "TLW",
            147: "TREX",
            148: "NVLPW_CTRL",
            149: "NETIR: link event",
            150: "MSE",
        }.items()
    },
    151: Entry("loud", "none", f"a rotation of keys failed; NVIDIA: restart the virtual machine; {_LOUD}"),
    154: Entry("loud", "none", "the driver changed what it asks for to recover this device; another Xid says why"),
    155: Entry("loud", "none", "a link went down, also logged when it did so on purpose; NVIDIA: reset the GPU"),
    156: Entry("loud", "none", f"a part of the device was retired; NVIDIA: reset the GPU; {_LOUD}"),
    157: Entry("loud", "none", f"a part of the device could not be retired for lack of spares; {_LOUD}"),
    158: Entry("loud", "none", f"a fatal time-out of the device; NVIDIA: reset the GPU; {_LOUD}"),
    167: Entry("loud", "none", f"a fatal time-out on PCI Express; {_LOUD}"),
    171: Entry(
        "memory",
        "strong",
        "an uncorrectable error in DRAM: logged beside Xid 48, memory of this device held wrong bits",
    ),
    172: Entry(
        "memory",
        "strong",
        "an uncorrectable error in SRAM: logged beside Xid 48, a cache or register file of this device held wrong bits",
    ),
}

_ECC_OF_SWITCH = (
    "errors in the memory of an NVSwitch passed a limit: supports a communication cause. One operator takes it as a hint of "
    "silent corruption on the way between devices"
)
_SXID: dict[int, Entry] = {
    12022: Entry("link", "medium", _ECC_OF_SWITCH),
    12023: Entry("link", "medium", _ECC_OF_SWITCH),
}

_HOST: dict[str, Entry] = {
    "edac:ue": Entry(
        "memory",
        "strong",
        "an uncorrected error in the host's memory: what passed through it may be wrong, on any device",
    ),
    "edac:ce": Entry(
        "memory",
        "weak",
        "a corrected error in the host's memory: no data was lost, but the module may be getting worse",
    ),
    "mce:uncorrected": Entry(
        "memory", "strong", "an uncorrected machine check: the processor or memory of the host reported wrong data"
    ),
    "mce:corrected": Entry(
        "memory", "weak", "a corrected machine check of the host: no data was lost, but a part may be getting worse"
    ),
    "mce:deferred": Entry(
        "memory",
        "medium",
        "an uncorrected error of the host that nothing has used so far: data is wrong, and is marked as such",
    ),
    "mce:pcie": Entry(
        "link",
        "weak",
        "an error of PCI Express that the firmware told of: it detects what it damages; supports a communication cause",
    ),
    "mce:logged": Entry(
        "memory",
        "weak",
        "the host logged a machine check; this line does not say of which kind (rasdaemon and mcelog do)",
    ),
}

_PCI = re.compile(
    r"(?<![0-9a-fA-F:])(?:(?P<domain>[0-9a-fA-F]{4,8}):)?(?P<bus>[0-9a-fA-F]{2}):(?P<device>[0-9a-fA-F]{2})"
    r"(?:\.[0-9a-fA-F])?(?![0-9a-fA-F:.])"
)


def xid(number: int) -> Entry:
    """What an Xid speaks for; one that is not in the table is a loud fault that weighs nothing."""
    found = _XID.get(number)
    return found or Entry("loud", "none", f"Xid {number}, of which no weight is known: see NVIDIA's Xid catalogue")


def sxid(number: int) -> Entry:
    """What an SXid, an error of an NVSwitch, speaks for."""
    return _SXID.get(number) or Entry("link", "weak", f"an error of an NVSwitch (SXid {number}): {_LINK}")


def entry(code: str) -> Entry:
    """What a code speaks for: `xid:63`, `sxid:12022`, `edac:ue`, `mce:corrected`.

    Raises:
        KeyError: this table has no such code.
    """
    kind, _, number = code.partition(":")
    if kind in ("xid", "sxid") and number.isascii() and number.isdigit():
        return (xid if kind == "xid" else sxid)(int(number))
    return _HOST[code]


def pci_address(text: str) -> str:
    """A PCI address as `0000:9b:00`: with the domain, without the function, in lower case; "" where there is none."""
    found = _PCI.search(text.removeprefix("PCI:"))
    if found is None:
        return ""
    domain = int(found["domain"] or "0", 16)
    return f"{domain:04x}:{found['bus'].lower()}:{found['device'].lower()}"
