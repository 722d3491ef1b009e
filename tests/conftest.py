"""What every test stands on: one thread a process, a seed that is printed, and proof of what is being tested.

Nothing here imports torch: half of the package must work without it, and so must its tests.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.slow import SLOW

ROOT = Path(__file__).resolve().parent.parent

# Read by torch and its libraries when they are first imported, here and in every process that a test starts. Several
# ranks on two cores with a thread pool each would mostly wait for one another.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

# A shell that starts this in the background has it ignore Ctrl-C, and everything that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No test is timed: how fast an example runs says nothing on a shared machine.
settings.register_profile("bitwitness", deadline=None, print_blob=True)
settings.load_profile("bitwitness")

# Set for the workers that this process starts: all of a session have one seed.
SEED = int(os.environ.get("BITWITNESS_TEST_SEED") or secrets.randbelow(2**31))
os.environ["BITWITNESS_TEST_SEED"] = str(SEED)


def pytest_report_header() -> list[str]:
    """Say what is tested and how to repeat it."""
    return [f"bitwitness: {_origin()}", f"seed: {SEED} (BITWITNESS_TEST_SEED={SEED} repeats it)"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: looking for garbage in it, then and in every test, takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow files first; within a file, and of all others, the order stays."""
    order = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda one: order.get(one.path.relative_to(ROOT / "tests").as_posix(), len(SLOW)))


def pytest_sessionstart() -> None:
    """Refuse to test the checkout where the installed wheel is meant (.ci/run)."""
    if os.environ.get("BITWITNESS_TEST_INSTALLED") and ROOT / "src" in _origin().parents:
        pytest.exit(f"meant to test the installed package, but `import bitwitness` finds {_origin()}", returncode=4)


@pytest.fixture
def seed() -> int:
    """The seed of this session, for tests that draw at random: printed in the header, set by BITWITNESS_TEST_SEED."""
    return SEED


def _origin() -> Path:
    spec = find_spec("bitwitness")
    if spec is None or spec.origin is None:
        raise pytest.UsageError("bitwitness is not installed: run the tests by `make test`")
    return Path(spec.origin).resolve()
