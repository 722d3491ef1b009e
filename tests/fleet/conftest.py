"""What tests of the controller share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet.rehearsal import Rehearsal


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Rehearsal]:
    """A controller on a fake cluster, in a folder of its own."""
    made = Rehearsal(tmp_path)
    yield made
    made.end()
