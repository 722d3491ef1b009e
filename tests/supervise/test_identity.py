from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bitwitness import preemption
from bitwitness.errors import ConfigurationError
from bitwitness.supervise import identity
from bitwitness.supervise.identity import INDICES, devices_of, free_port, gpu_uuids, identify, index_of
from bitwitness.supervise.processes import holding, started, sweep

GPUS = ("GPU-aa11", "GPU-bb22", "GPU-cc33")


def test_each_launcher_says_the_place_of_a_process() -> None:
    assert index_of(None, {}) is None
    assert index_of(4, {"SLURM_NODEID": "1"}) == 4
    for name in INDICES:
        assert index_of(None, {name: "3"}) == 3
        assert index_of(None, {name: " "}) is None
        with pytest.raises(ConfigurationError, match=name):
            index_of(None, {name: "first"})


def test_devices_are_given_or_asked_for_or_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "gpu_uuids", lambda: GPUS)
    assert devices_of("n", 2, {"BITWITNESS_DEVICES": "a, b,c"}) == ("a", "b")
    with pytest.raises(ConfigurationError, match="names 1 devices for 2"):
        devices_of("n", 2, {"BITWITNESS_DEVICES": "a"})
    assert devices_of("n", 2, {}) == GPUS[:2]
    assert devices_of("n", 2, {"CUDA_VISIBLE_DEVICES": "2,0"}) == ("GPU-cc33", "GPU-aa11")
    assert devices_of("n", 2, {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-cc33"}) == ("GPU-bb22", "GPU-cc33")
    assert devices_of("n", 2, {"CUDA_VISIBLE_DEVICES": ""}) == ("n/cpu-0", "n/cpu-1")
    assert devices_of("n", 4, {}) == tuple(f"n/cpu-{slot}" for slot in range(4))


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("echo GPU-1; echo GPU-2", ("GPU-1", "GPU-2")),
        ("echo 'No devices were found'", ()),
        ("echo GPU-1; exit 9", ()),
    ],
)
def test_the_driver_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: tuple[str, ...]
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_uuids() == found


def test_who_am_i() -> None:
    found = identify(2, 1, {"BITWITNESS_NODE": "n", "POD_IP": "10.0.0.7"})
    assert (found.node, found.index, found.address, found.devices) == ("n", 2, "10.0.0.7", ("n/cpu-0",))
    assert identify(2, 1, {"BITWITNESS_NODE": "n"}, "host.example").address == "host.example"
    assert identity.own_address()


def test_ports_stay_clear_of_those_for_connections_going_out() -> None:
    port = free_port()
    assert 20_000 <= port < 32_768
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_processes_are_found_by_their_mark() -> None:
    mark = f"m{os.getpid()}"
    environment = os.environ | {"BITWITNESS_SUPERVISED": f"{mark}:1:n"}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment) as child:
        try:
            assert list(holding(f"{mark}:1:n")) == list(holding(mark)) == [child.pid]
            assert not list(holding(mark[:-1]))
            assert sweep(mark, keep=[child.pid]) == 0
            assert started(child.pid) is not None
            assert sweep(mark) == 1
            assert child.wait(60) == -signal.SIGKILL
        finally:
            child.kill()
    assert started(child.pid) is None


def test_a_signal_only_sets_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "_asked", threading.Event())
    before = {number: signal.getsignal(number) for number in preemption.SIGNALS}
    try:
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(preemption.install()))
        thread.start()
        thread.join()
        assert elsewhere == [False]
        assert {number: signal.getsignal(number) for number in preemption.SIGNALS} == before
        assert preemption.install()
        assert not preemption.requested()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preemption.requested()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
