"""The contract is a module of tests that others inherit, so its asserts are to say what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.fleet.clusters.contract", "tests.fleet.clusters.kills")
