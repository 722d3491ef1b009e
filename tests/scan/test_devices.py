from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bitwitness.runfiles.answers import Device
from bitwitness.scan import devices
from bitwitness.scan.items import SUITE_VERSION

CPU = torch.device("cpu")


def test_a_processor_rank_stands_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("BITWITNESS_DEVICES", raising=False)
    one = devices.this_device(5, CPU, "n3")
    assert (one.rank, one.node, one.device, one.pid) == (5, "n3", "n3/cpu-0", os.getpid())
    assert devices.this_device(5, CPU, "n3", slot=2).device == "n3/cpu-2"
    monkeypatch.setenv("LOCAL_RANK", "4")
    assert devices.this_device(5, CPU, "n3").device == "n3/cpu-4"
    assert Device.from_json(one.to_json()) == one


def test_the_kind_is_that_of_a_scan_whatever_the_process_has_set() -> None:
    before = devices.this_device(0, CPU, "n").kind
    assert before["suites"] == str(SUITE_VERSION)
    assert before["torch"] == torch.__version__
    assert "threads 1" in before["settings"]
    assert {"device", "git", "build", "processor"} <= set(before)
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(threads + 1)
    try:
        assert devices.this_device(1, CPU, "m").kind == before
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)


def test_variables_that_choose_kernels_are_of_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    before = devices.this_device(0, CPU, "n").kind
    monkeypatch.setenv("ONEDNN_VERBOSE", "0")
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    assert devices.this_device(0, CPU, "n").kind == before
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    assert "MKL_CBWR=COMPATIBLE" in devices.this_device(0, CPU, "n").kind["environment"]


def test_flushed_subnormal_numbers_are_of_the_kind() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush them")
    try:
        assert "flushed" in devices.this_device(0, CPU, "n").kind["settings"]
    finally:
        torch.set_flush_denormal(False)


def test_what_a_gpu_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    found = devices._gpu(torch.device("cuda"))
    assert found["multiprocessors"] == "132"
    assert found["capability"] == "9.0"
    assert set(found) >= {"cuda", "cudnn", "driver"}


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    file = tmp_path / "version"
    assert devices.driver_version(file) == "unknown"
    file.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12\n"
    )
    assert devices.driver_version(file) == "535.104.05"


def test_of_a_processor_what_chooses_kernels_counts(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert devices.processor_facts(file) == {}
    text = "processor\t: 0\nmodel\t\t: 17\ncpu MHz\t\t: 2596\nmicrocode\t: 0x1\nflags\t\t: fpu avx2 smep {}\n\nprocessor : 1\nmodel : 18\n"
    file.write_text(text.format("avx512f"))
    one = devices.processor_facts(file)
    assert one == {"model": "17", "flags": "avx2 avx512f"}
    file.write_text(text.format("mitigated_somehow"))
    assert devices.processor_facts(file)["flags"] == "avx2"


def test_temperature_is_none_where_nothing_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.temperature(CPU) is None
    monkeypatch.setattr(torch.cuda, "temperature", lambda device: 61)
    assert devices.temperature(torch.device("cuda", 0)) == 61.0

    def without(device: torch.device) -> int:
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch.cuda, "temperature", without)
    assert devices.temperature(torch.device("cuda", 0)) is None
