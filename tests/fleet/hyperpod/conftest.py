"""One server and one client for all tests here, since a client takes 0.1 s; each test has machines of its own.

Nothing may leave this machine: every connection that Python makes is seen, and one that is not to loopback fails the test.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_fake_world import World
from tests.fleet.hyperpod.pod import Pod
from tests.fleet.incidents import NOW

pytest.register_assert_rewrite("tests.fleet.clusters.contract", "tests.fleet.clusters.kills")

_OUTSIDE: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(args[1], tuple) and str(args[1][0]) not in ("127.0.0.1", "::1"):
        _OUTSIDE.append(str(args[1]))


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def nothing_leaves() -> Iterator[None]:
    _OUTSIDE.clear()
    yield
    assert _OUTSIDE == []


@pytest.fixture(scope="session")
def fake() -> Iterator[FakeSageMaker]:
    with FakeSageMaker(World({"gpu": 4}, lambda: NOW)) as made:
        yield made


@pytest.fixture(scope="session")
def shared(fake: FakeSageMaker) -> Iterator[SageMakerApi]:
    before = dict(os.environ)
    for name in [one for one in before if one.startswith("AWS_") or one.lower().endswith("_proxy")]:
        del os.environ[name]
    os.environ.update(fake.environment())
    yield SageMakerApi("pod", timeout=5)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def api(shared: SageMakerApi) -> SageMakerApi:
    return shared


@pytest.fixture
def eks(tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi) -> Iterator[Pod]:
    made = Pod(tmp_path, api, "eks")
    fake.world = made.world
    yield made
    made.end()


@pytest.fixture
def slurm(tmp_path: Path, fake: FakeSageMaker, api: SageMakerApi) -> Iterator[Pod]:
    made = Pod(tmp_path, api, "slurm")
    fake.world = made.world
    yield made
    made.end()
