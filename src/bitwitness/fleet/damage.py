"""What code raises that has a mistake in it, or was given damaged data: one incident or one node must not stop all others."""

from __future__ import annotations

DAMAGE = (
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    AttributeError,
    MemoryError,
)
"""Of an adapter, of a record, or of ours."""
