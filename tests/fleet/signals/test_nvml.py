"""NVML, through a compiled library in the place of the driver's, loaded by nvidia-ml-py in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bitwitness.fleet.signals import Signal, nvml
from bitwitness.fleet.signals.gather import gather
from tests.fleet.signals.stub import HEALTHY, build, install

UUID = HEALTHY["uuid"]
Ask = Callable[..., list[Signal]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: Path) -> Ask:
    def asked(*devices: Mapping[str, str], place: Path = library, timeout: float = 20, **whole: str) -> list[Signal]:
        install(monkeypatch, place, tmp_path / "answers", *devices, **whole)
        return nvml.read(host="n1", timeout=timeout)

    return asked


def codes(signals: list[Signal], *, weight: str = "") -> dict[str, str]:
    return {one.code: one.weight for one in signals if not weight or one.weight == weight}


def test_a_device_without_errors_is_no_sign_of_health(ask: Ask) -> None:
    found = ask(HEALTHY)
    assert codes(found) == {"identity:pci": "none", "nvml:state": "none"}
    identity, state = found
    assert (identity.device, identity.host, identity.kind) == (UUID, "n1", "noise")
    assert identity.evidence == "pci=0000:9b:00 serial=1652922014438 index=0"
    assert identity.time == state.time
    assert (state.kind, state.evidence) == ("noise", "41 °C; 120.5 W; clocks not held down")
    assert "no sign of health" in state.reason
    assert state.moment is not None


def test_every_count_has_its_weight(ask: Ask) -> None:
    sick = {
        **HEALTHY, "ecc.0.0": "7", "ecc.1.0": "2", "ecc.0.1": "900", "ecc.1.1": "3", "rows": "4 1 1 1", "sram": "1",
        "link.0.0": "5", "link.1.0": "6", "link.1.1": "1", "link.0.2": "8", "link.1.3": "9", "field.230": "1",
        "field.30": "2", "field.31": "1", "clocks": "0xe9",
    }  # fmt: skip
    found = ask({**HEALTHY, "uuid": "GPU-0"}, sick)
    of_sick = [one for one in found if one.device == UUID]
    assert [one.code for one in found if one.device == "GPU-0"] == ["identity:pci", "nvml:state"]
    assert codes(of_sick) == {
        "identity:pci": "none", "nvml:state": "none",
        "nvml:ecc-ue-volatile": "strong", "nvml:ecc-ce-volatile": "weak",
        "nvml:ecc-ue-aggregate": "weak", "nvml:ecc-ce-aggregate": "none",
        "nvml:rows-remapped-ce": "none", "nvml:rows-remapped-ue": "weak",
        "nvml:row-remap-pending": "weak", "nvml:row-remap-failure": "strong", "nvml:sram-threshold": "strong",
        "nvml:nvlink-replay": "weak", "nvml:nvlink-recovery": "weak", "nvml:nvlink-crc-flit": "weak", "nvml:nvlink-crc-data": "weak",
        "nvml:recovery-action": "weak", "nvml:pages-retired": "weak", "nvml:pages-pending": "weak", "nvml:clocks": "none",
    }  # fmt: skip
    by_code = {one.code: one for one in of_sick}
    assert by_code["nvml:nvlink-replay"].count == 11
    assert by_code["nvml:nvlink-replay"].kind == "link"
    assert by_code["nvml:ecc-ue-volatile"].count == 2
    assert by_code["nvml:ecc-ue-volatile"].time is None
    assert "reset the device" in by_code["nvml:recovery-action"].reason
    assert by_code["nvml:clocks"].reason.startswith("hardware slowdown, hardware thermal slowdown, power brake:")
    assert all(len(one.reason.split()) > 3 for one in found)


def test_a_count_that_was_read_twice_is_one_count(ask: Ask) -> None:
    first, later = (ask({**HEALTHY, "ecc.1.0": count}) for count in ("2", "3"))
    assert [one.count for one in gather([*first, *later]) if one.code == "nvml:ecc-ue-volatile"] == [3]


def test_what_a_device_does_not_support_is_no_evidence(ask: Ask) -> None:
    found = ask({"uuid": UUID, "temperature": "41", "ecc.1.0": "!4", "rows": "!21"})
    silent = {one.code: one.reason for one in found if one.kind == "no-evidence"}
    assert set(silent) == {"nvml:not-supported", "nvml:no-permission", "nvml:no-data"}
    for what in (
        "corrected ECC errors, since",
        "SRAM",
        "NVLink errors",
        "recovery action",
        "serial",
        "power",
        "whether ECC",
    ):
        assert what in silent["nvml:not-supported"]
    assert "uncorrected ECC errors, since the driver was loaded" in silent["nvml:no-permission"]
    assert "remapped rows" in silent["nvml:no-data"]
    assert "MIG" not in " ".join(silent.values())


def test_an_older_driver_lacks_functions(ask: Ask, tmp_path: Path) -> None:
    older = build(tmp_path / "older", "ROWS", "SRAM", "EVENT_REASONS")
    found = ask({**HEALTHY, "clocks": "0x40"}, place=older)
    lacks = next(one for one in found if one.code == "nvml:function-not-found")
    assert lacks.kind == "no-evidence"
    assert "remapped rows, SRAM error threshold" in lacks.reason
    assert codes(found)["nvml:clocks"] == "none", "asked by its older name"


def test_ecc_that_is_off_counts_nothing(ask: Ask) -> None:
    found = ask({**HEALTHY, "eccmode": "0 1"})
    assert [one.kind for one in found if one.code == "nvml:ecc-off"] == ["no-evidence"]


def test_slices_are_told_of_the_device_that_they_are_cut_from(ask: Ask) -> None:
    found = ask({**HEALTHY, "mig": "1 1", "slices": "7", "ecc.1.0": "1"}, **{"999.uuid": "MIG-a", "1001.uuid": "MIG-c"})
    assert {one.device for one in found} == {UUID}
    identity = next(one for one in found if one.code == "identity:pci")
    assert identity.evidence.endswith("index=0 mig=MIG-a,MIG-c")
    assert codes(found, weight="strong") == {"nvml:ecc-ue-volatile": "strong"}


@pytest.mark.parametrize(
    ("key", "code"), [("handle", "nvml:gpu-lost"), ("uuid", "nvml:gpu-lost"), ("ecc.1.0", "nvml:gpu-lost")]
)
def test_a_device_that_is_lost(ask: Ask, key: str, code: str) -> None:
    found = ask({**HEALTHY, key: "!15"})
    lost = next(one for one in found if one.code == code)
    assert (lost.kind, lost.weight) == ("loud", "none")
    assert any(one.kind == "no-evidence" for one in found)


def test_a_device_that_wants_a_reset(ask: Ask) -> None:
    assert codes(ask({**HEALTHY, "rows": "!16"}))["nvml:reset-required"] == "weak"


def test_numbers_that_are_none_are_not_taken_for_zero(ask: Ask) -> None:
    found = ask({**HEALTHY, "ecc.1.0": "18446744073709551615", "rows": "1 x"})
    assert {one.kind for one in found} == {"noise", "no-evidence"}
    assert "which is no count: uncorrected ECC errors" in " ".join(one.reason for one in found)


@pytest.mark.parametrize(
    ("answers", "code", "why"),
    [
        ({"init": "!9"}, "nvml:unreachable", "Driver Not Loaded"),
        ({"count": "0"}, "nvml:no-devices", "no device"),
        ({"count": "!999"}, "nvml:unreachable", "does not count"),
        ({"init": "crash"}, "nvml:crashed", "signal 11"),
        ({"init": "hang"}, "nvml:hangs", "did not answer within"),
    ],
)
def test_a_driver_that_fails(ask: Ask, answers: dict[str, str], code: str, why: str) -> None:
    found = ask(timeout=1 if answers == {"init": "hang"} else 20, **answers)
    assert [(one.code, one.kind, one.host) for one in found] == [(code, "no-evidence", "n1")]
    assert why in found[0].reason


def test_a_machine_without_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert [one.code for one in nvml.read()] == ["nvml:absent"]


def test_what_lies_in_the_directory_is_not_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise SystemExit(77)\n")
    (tmp_path / "libnvidia-ml.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert [one.code for one in nvml.read()] == ["nvml:absent"]


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (found,) = nvml.read_here()
    assert (found.code, found.kind) == ("nvml:not-installed", "no-evidence")
    assert "bitwitness[gpu]" in found.reason


def test_the_numbers_are_those_of_nvidia_ml_py() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == nvml._RECOVERY_ACTION
    assert (pynvml.NVML_FI_DEV_RETIRED_DBE, pynvml.NVML_FI_DEV_RETIRED_PENDING) == (
        nvml._RETIRED_DBE,
        nvml._RETIRED_PENDING,
    )
    assert (
        pynvml.NVML_SINGLE_BIT_ECC,
        pynvml.NVML_DOUBLE_BIT_ECC,
        pynvml.NVML_VOLATILE_ECC,
        pynvml.NVML_AGGREGATE_ECC,
    ) == (0, 1, 0, 1)
    assert (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_CORRUPTED_INFOROM) == (
        15,
        16,
        14,
    )
    assert [pynvml.NVML_NVLINK_ERROR_DL_REPLAY, pynvml.NVML_NVLINK_ERROR_DL_RECOVERY] == [0, 1]
    assert [pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT, pynvml.NVML_NVLINK_ERROR_DL_CRC_DATA] == [2, 3]
    assert pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET == 4
    assert pynvml.NVML_NVLINK_MAX_LINKS <= nvml._MOST_LINKS
