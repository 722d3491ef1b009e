"""Faults on purpose: a grammar for them, an injector that proves that they landed, and campaigns that judge every check.

A detector that was never shown the shapes that real faults have is a hope. The published fault models are written here as
data, strike any PyTorch job through one injector, and a campaign counts what each check made of them. It stands above the
guard, which knows nothing of it: the guard offers seams (`guard.seams`), and whoever wants to do harm fills them in.

`Injector` is loaded when it is first used: the grammar and the campaign files are read on machines without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwitness.faults.grammar import parse as parse
    from bitwitness.faults.grammar import parse_all as parse_all
    from bitwitness.faults.injector import Injector as Injector
    from bitwitness.faults.spec import Fault as Fault
    from bitwitness.mutate import FaultDidNotLand as FaultDidNotLand

_HOMES = {
    "Fault": "bitwitness.faults.spec",
    "FaultDidNotLand": "bitwitness.mutate",
    "Injector": "bitwitness.faults.injector",
    "parse": "bitwitness.faults.grammar",
    "parse_all": "bitwitness.faults.grammar",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (the names are strings, kept in one place)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'bitwitness.faults' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
