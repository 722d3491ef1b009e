"""The fields of NVIDIA's DCGM by their ids, with what each says beside an incident.

DCGM 4.6 renamed many fields, and dashboards renamed others before it; the ids never changed. So a metric is known by its
id here, under every name that it has had. Names and ids are those of `dcgm_fields.h` of DCGM 3.3, 4.5 and 4.6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bitwitness.fleet.signals.record import SignalClass, Weight

Reading = Literal["count", "flag", "xid", "sxid", "bits", "celsius", "action", "mode", "raw"]
"""How a value is read. `raw` is known and says nothing: it is only not unknown."""

XID, CLOCKS, RECOVERY, ECC_MODE = 230, 112, 1523, 300


@dataclass(frozen=True, slots=True)
class Field:
    """One field of DCGM.

    Attributes:
        id: its number, which no version changed.
        reading: what kind of value it has.
        kind: what a value other than 0 speaks for.
        weight: how much it weighs.
        why: the sentence that explains the weight.
        names: of its metrics, without `DCGM_FI_DEV_`, the oldest first.
        fresh: the weight if the count was seen to rise within the time that was asked for; None: the same.
    """

    id: int
    reading: Reading
    kind: SignalClass
    weight: Weight
    why: str
    names: tuple[str, ...]
    fresh: Weight | None = None


_CORRECTED = "errors that ECC corrected did no harm; many of them announce worse"
_LINK = "the link detects and repeats this; it supports a communication cause, and blames neither end alone"
_THROTTLE = "clocks held down by power or heat cost speed, not correctness"
_PCIE = "PCIe detects a damaged packet and sends it again"

_TABLE = (
    Field(CLOCKS, "bits", "loud", "none", _THROTTLE, ("CLOCK_THROTTLE_REASONS", "CLOCKS_EVENT_REASONS")),
    Field(140, "celsius", "noise", "none", "heat makes weak silicon err more often, but is no error", ("MEMORY_TEMP", "MEMORY_TEMP_CELSIUS")),
    Field(150, "celsius", "noise", "none", "heat makes weak silicon err more often, but is no error", ("GPU_TEMP", "GPU_TEMP_CELSIUS")),
    Field(155, "raw", "noise", "none", "a power draw says nothing of errors", ("POWER_USAGE", "BOARD_POWER_WATTS")),
    Field(202, "count", "link", "none", _PCIE, ("PCIE_REPLAY_COUNTER", "PCIE_REPLAY_TOTAL"), "weak"),
    Field(XID, "xid", "noise", "none", "", ("XID_ERRORS", "XID_ERROR")),
    Field(240, "count", "noise", "none", _THROTTLE, ("POWER_VIOLATION",)),
    Field(241, "count", "noise", "none", _THROTTLE, ("THERMAL_VIOLATION",)),
    Field(245, "count", "noise", "none", _THROTTLE, ("RELIABILITY_VIOLATION",)),
    Field(ECC_MODE, "mode", "no-evidence", "none", "ECC is off, so memory errors leave no trace anywhere", ("ECC_CURRENT", "ECC_MODE")),
    Field(310, "count", "memory", "weak", _CORRECTED, ("ECC_SBE_VOL_TOTAL",)),
    Field(311, "count", "memory", "strong", "memory errors that ECC could not correct, since the driver was loaded", ("ECC_DBE_VOL_TOTAL",)),
    Field(312, "count", "memory", "none", "corrected errors of the whole life of the device: old history", ("ECC_SBE_AGG_TOTAL",), "weak"),
    Field(313, "count", "memory", "weak", "uncorrected errors of the whole life of the device: they may be years old", ("ECC_DBE_AGG_TOTAL",), "strong"),
    Field(346, "flag", "memory", "strong", "the device has had more uncorrected SRAM errors than NVIDIA tolerates", ("THRESHOLD_SRM", "SRAM_EXCEEDED")),
    Field(385, "raw", "memory", "none", "banks with all spare rows left", ("BANKS_REMAP_ROWS_AVAIL_MAX", "BANK_REMAP_AVAIL_MAX")),
    Field(386, "raw", "memory", "none", "banks with most spare rows left", ("BANKS_REMAP_ROWS_AVAIL_HIGH", "BANK_REMAP_AVAIL_HIGH")),
    Field(387, "raw", "memory", "none", "banks with some spare rows left", ("BANKS_REMAP_ROWS_AVAIL_PARTIAL", "BANK_REMAP_AVAIL_PARTIAL")),
    Field(388, "count", "memory", "weak", "banks with few spare rows left: many rows have failed there", ("BANKS_REMAP_ROWS_AVAIL_LOW", "BANK_REMAP_AVAIL_LOW")),
    Field(389, "count", "memory", "medium", "banks without spare rows: the next row that fails there cannot be replaced", ("BANKS_REMAP_ROWS_AVAIL_NONE", "BANK_REMAP_AVAIL_NONE")),
    Field(390, "count", "memory", "none", "pages retired after corrected errors, of the whole life of the device", ("RETIRED_SBE", "PAGE_RETIRED_SBE_TOTAL"), "weak"),
    Field(391, "count", "memory", "weak", "pages retired after uncorrected errors, of the whole life of the device", ("RETIRED_DBE", "PAGE_RETIRED_DBE_TOTAL"), "strong"),
    Field(392, "count", "memory", "weak", "pages wait for a reset to be retired, and are in use until then", ("RETIRED_PENDING", "PAGE_RETIRED_PENDING")),
    Field(393, "count", "memory", "weak", "rows replaced after uncorrected errors, of the whole life of the device; supports a memory cause", ("UNCORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_UNCORRECTABLE_TOTAL"), "medium"),
    Field(394, "count", "memory", "none", "rows replaced after corrected errors, which did no harm", ("CORRECTABLE_REMAPPED_ROWS", "ROW_REMAP_CORRECTABLE_TOTAL"), "weak"),
    Field(395, "flag", "memory", "strong", "a memory row failed and could not be replaced; NVIDIA takes such a device back", ("ROW_REMAP_FAILURE", "ROW_REMAP_FAILED")),
    Field(396, "flag", "memory", "weak", "a failed memory row waits for a reset to be replaced; supports a memory cause", ("ROW_REMAP_PENDING",)),
    Field(409, "count", "link", "weak", _LINK, ("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "NVLINK_CRC_FLIT_ERROR_TOTAL")),
    Field(419, "count", "link", "weak", _LINK, ("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "NVLINK_CRC_DATA_ERROR_TOTAL")),
    Field(429, "count", "link", "weak", _LINK, ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "NVLINK_REPLAY_ERROR_TOTAL")),
    Field(439, "count", "link", "weak", _LINK, ("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "NVLINK_RECOVERY_ERROR_TOTAL")),
    Field(497, "count", "link", "weak", _LINK, ("NVLINK_ERROR_DL_CRC", "NVLINK_CRC_ERROR_TOTAL")),
    Field(498, "count", "link", "weak", _LINK, ("NVLINK_ERROR_DL_RECOVERY", "NVLINK_RECOVERY_TOTAL")),
    Field(499, "count", "link", "weak", _LINK, ("NVLINK_ERROR_DL_REPLAY", "NVLINK_REPLAY_TOTAL")),
    Field(782, "count", "link", "weak", "fatal errors of a link of an NVSwitch, which all its devices feel", ("NVSWITCH_LINK_FATAL_ERRORS",)),
    Field(783, "count", "link", "weak", "errors of a link of an NVSwitch, which all its devices feel", ("NVSWITCH_LINK_NON_FATAL_ERRORS",)),
    Field(856, "sxid", "link", "weak", "", ("NVSWITCH_FATAL_ERRORS", "SXID_FATAL_ERROR")),
    Field(857, "sxid", "link", "weak", "", ("NVSWITCH_NON_FATAL_ERRORS", "SXID_NON_FATAL_ERROR")),
    Field(1214, "count", "link", "none", "symbol errors occur on healthy links, and are corrected or repeated", ("NVLINK_COUNT_RX_SYMBOL_ERRORS", "NVLINK_RX_SYMBOL_ERROR_TOTAL")),
    Field(1217, "raw", "link", "none", "a bit error rate in a code of its own", ("NVLINK_COUNT_EFFECTIVE_BER", "NVLINK_EFFECTIVE_BER_RAW")),
    Field(1219, "count", "link", "weak", "errors that the link's own correction let through; supports a communication cause", ("NVLINK_COUNT_EFFECTIVE_ERRORS", "NVLINK_EFFECTIVE_ERROR_TOTAL")),
    Field(1507, "flag", "memory", "strong", "the device says that its memory cannot be repaired", ("MEMORY_UNREPAIRABLE_FLAG", "MEMORY_UNREPAIRABLE")),
    Field(RECOVERY, "action", "loud", "weak", "", ("GET_GPU_RECOVERY_ACTION", "GPU_RECOVERY_ACTION")),
)  # fmt: skip

FIELDS: Mapping[int, Field] = {field.id: field for field in _TABLE}
NAMES: Mapping[str, Field] = {f"DCGM_FI_DEV_{name}": field for field in _TABLE for name in field.names}

EXPECTED: Mapping[str, frozenset[int]] = {
    "Xids": frozenset({XID}),
    "corrected ECC errors": frozenset({310}),
    "uncorrected ECC errors": frozenset({311}),
    "failed row remapping": frozenset({395}),
    "pending row remapping": frozenset({396}),
    "NVLink errors": frozenset({409, 419, 429, 439, 497, 498, 499, 1219}),
    "reasons for lower clocks": frozenset({CLOCKS}),
}
"""What a scrape should have, one of the ids for each. An exporter collects few of them unless it is told to."""

CLOCK_BITS: Mapping[int, tuple[str, bool]] = {
    0x4: ("software power cap", False),
    0x8: ("hardware slowdown", True),
    0x20: ("software thermal slowdown", False),
    0x40: ("hardware thermal slowdown", True),
    0x80: ("power brake", True),
}
"""Of the clocks event reasons: what a bit says, and whether it is a fault of cooling or power and no everyday limit."""

ACTIONS: Mapping[int, tuple[str, SignalClass, Weight]] = {
    1: ("reset the device", "loud", "weak"),
    2: ("reboot the node", "loud", "weak"),
    3: ("drain the device's peer-to-peer traffic", "link", "weak"),
    4: ("drain and reset the device", "loud", "weak"),
    5: ("recover the IMEX domain", "link", "none"),
    6: ("reset the bus", "loud", "none"),
    7: ("reboot the system", "loud", "weak"),
}
"""What the driver asks for (field 1523 of DCGM, field 230 of NVML), beside 0 for nothing."""


def action_reason(action: int) -> str:
    """Why the driver's wish weighs what it does."""
    asked = ACTIONS[action][0] if action in ACTIONS else f"do what it calls action {action}"
    return (
        f"the driver asks to {asked}: something has happened to this device, a contained or uncontained memory error or"
        " a loud fault; which of them, the kernel log says"
    )


def throttled(bits: int) -> tuple[list[str], list[str]]:
    """The names of the clocks event reasons: those that are faults of cooling or power, and everyday limits."""
    faults = [name for bit, (name, fault) in CLOCK_BITS.items() if bits & bit and fault]
    return faults, [name for bit, (name, fault) in CLOCK_BITS.items() if bits & bit and not fault]
