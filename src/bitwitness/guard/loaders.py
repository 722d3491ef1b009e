"""Data loaders that draw when their iterator is made (torchdata's `StatefulDataLoader`): asked and put back without a trace.

Making an iterator draws a permutation and the seed of the workers. Asking such a loader for its state makes one if there is
none, earlier than the loop would have; a resumed loader makes one again in the midst of an epoch, where a run that was never
interrupted had drawn long before. Either way later draws would be other ones. What helps is private to torchdata, and stands
here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

Kept = Callable[[], AbstractContextManager[None]]
"""Makes a context in which the random state of the job is kept."""


def is_loader(one: Any) -> bool:
    """Whether this is such a loader."""
    return all(hasattr(one, name) for name in ("_get_iterator", "_iterator", "next_iter_state", "__dict__"))


def capture(loader: Any) -> dict[str, Any]:
    """Its state, whether its iterator has been drawn for, and its generators as they are. Nothing is drawn or started."""
    generators = [generator.get_state() for generator in _generators(loader)]
    if loader._iterator is not None:
        return {"state": loader.state_dict(), "begun": True, "generators": generators}
    begun = "_get_iterator" in loader.__dict__  # restored, and not gone on with yet
    return {"state": loader.next_iter_state or {}, "begun": begun, "generators": generators}


def restore(loader: Any, saved: Mapping[str, Any], kept: Kept) -> None:
    """Put that back. If its iterator had been drawn for, the next one that is made draws nothing."""
    loader.load_state_dict(saved["state"])
    _restore_generators(loader, saved)
    loader.__dict__.pop("_get_iterator", None)
    if not saved["begun"]:
        return
    make = loader._get_iterator

    def make_once() -> Any:
        loader.__dict__.pop("_get_iterator", None)
        with kept():
            iterator = make()
        _restore_generators(loader, saved)
        return iterator

    loader.__dict__["_get_iterator"] = make_once  # past the loader's own __setattr__


def _restore_generators(loader: Any, saved: Mapping[str, Any]) -> None:
    for generator, state in zip(_generators(loader), saved["generators"], strict=False):
        generator.set_state(state)


def _generators(loader: Any) -> list[torch.Generator]:
    """What the loader and its samplers draw from, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    holders = (loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None))
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(one): one for one in found if isinstance(one, torch.Generator)}.values())
