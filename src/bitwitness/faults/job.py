"""The seam between campaigns and what they train: a job is made by a factory, and a cell drives it.

A campaign must not know its jobs, because a user brings others; and a job must not know the campaign, or it could behave
differently in front of an injector. So all that passes between them stands here, torch-free, since whoever plans cells
has to read their options without loading anything heavy.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, cast, runtime_checkable

from bitwitness.errors import ConfigurationError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler

KNOWN = {
    "language": "bitwitness.examples.jobs:language",
    "digits": "bitwitness.examples.jobs:digits",
    "mlp": "bitwitness.examples.jobs:mlp",
}
"""The jobs that ship, by the name that a campaign file calls them. Named, not imported: examples stand above this."""


DEFAULT_RANKS = 4


@runtime_checkable
class CampaignJob(Protocol):
    """What a rank trains.

    Attributes:
        model: not wrapped in anything; the cell wraps it where there is more than one rank.
        optimizers: at least one.
        scaler: a GradScaler, or None.
        micros: micro-batches in a step.
        max_grad_norm: the norm to clip to, or None.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    scaler: GradScaler | None
    micros: int
    max_grad_norm: float | None

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar loss of one micro-batch, autocast included; gradients of the micro-batches of a step are added up."""

    def batch(self, step: int, rank: int, micro: int) -> Any:
        """A micro-batch: a pure function of these and of what the job was made with."""

    def evaluate(self) -> Mapping[str, float]:
        """How good the model is now, e.g. `{"loss": 1.0, "accuracy": 0.9}`, on data that it is not trained on."""


Factory = Callable[[Mapping[str, Any], int, int, int], CampaignJob]
"""`factory(options, seed, rank, world_size) -> CampaignJob`. It may have an attribute `prepare`, a function without arguments
that loads what all ranks of all cells share, e.g. the data; it is called once, before the ranks are forked, and must start
no thread."""


def find_factory(name: str) -> Factory:
    """The factory of a job: a known name, or `module:function`.

    Raises:
        ConfigurationError: there is no such job; says why.
    """
    path = KNOWN.get(name, name)
    module_name, colon, attribute = path.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigurationError(f"no such job: {name!r}. Known are {', '.join(KNOWN)}; or give module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigurationError(f"the job {name!r} cannot be imported: {error}") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        raise ConfigurationError(f"the job {name!r} cannot be made: {module_name} has no function {attribute!r}")
    return cast("Factory", factory)


def search_path(folder: Path | None = None) -> list[str]:
    """Where the modules of jobs are looked for: where Python looks, beside the campaign file, in the current folder.

    In this order, so that nothing that lies about hides what is installed. All processes of a campaign use the same.

    Args:
        folder: of the campaign file; None: it has none.
    """
    beside = [] if folder is None else [str(folder.absolute())]
    return list(dict.fromkeys([*(place for place in sys.path if place), *beside, str(Path.cwd())]))


def source_digest(factory: str, path: Sequence[str]) -> str:
    """What the file of a job's module holds, as 24 hexadecimal digits: an edited job makes other runs. Empty for known jobs.

    The module is found, and not imported: it may load torch, or anything. What it imports is not looked at.

    Args:
        factory: of the job.
        path: where modules are looked for, see `search_path`.

    Raises:
        ConfigurationError: there is no such module, or no file of it.
    """
    if factory in KNOWN:
        return ""
    module = factory.partition(":")[0]
    found = _find_module(module, path)
    if found is None:
        raise ConfigurationError(
            f"the module {module} of the job {factory!r} is not found: it must lie beside the campaign file, in the current "
            "folder, or where Python finds it (PYTHONPATH, or installed)"
        )
    if found.origin is None or not found.has_location:
        raise ConfigurationError(
            f"the module {module} of the job {factory!r} has no file: name the module that defines it"
        )
    try:
        return hashlib.blake2b(Path(found.origin).read_bytes(), digest_size=12).hexdigest()
    except OSError as error:
        raise ConfigurationError(f"{found.origin} cannot be read: {error.strerror or error}") from error


def _find_module(module: str, path: Sequence[str]) -> ModuleSpec | None:
    """As `importlib.util.find_spec`, which would import the packages above it."""
    places, found = list(path), None
    for depth, part in enumerate(parts := module.split(".")):
        name = ".".join(parts[: depth + 1])
        try:
            found = PathFinder.find_spec(name, places)
            if found is None and not depth:
                found = importlib.util.find_spec(name)  # an editable install may have a finder of its own
        except (KeyError, ValueError):
            found = None  # a folder within a folder, neither of which is a package with a file
        if found is not None and found.origin is not None:
            places = list(found.submodule_search_locations or ())
        else:
            places = [str(inner) for place in places if (inner := Path(place) / part).is_dir()]
        if found is None and not places:
            return None
    return found


@dataclass(frozen=True, slots=True)
class Shape:
    """The options that a cell itself understands; all others are the factory's.

    Attributes:
        ranks: processes; ranks_per_node: how many of them share a node.
        steps: updates.
        checkpoint_every: steps between saves under a guard; 0: none.
        rebuild: whether the guard is given `rebuild_batch`, so that it finds corrupted inputs.

    Raises:
        ConfigurationError: one is impossible; names it.
    """

    ranks: int = DEFAULT_RANKS
    ranks_per_node: int = 1
    steps: int = 12
    checkpoint_every: int = 0
    rebuild: bool = False

    def __post_init__(self) -> None:
        for name, least in (("ranks", 1), ("ranks_per_node", 1), ("steps", 1), ("checkpoint_every", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigurationError(
                    f"the option {name} of a job is {value!r}: give a whole number from {least} on"
                )
        if not isinstance(self.rebuild, bool):
            raise ConfigurationError(f"the option rebuild of a job is {self.rebuild!r}: give true or false")

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """The shape that is in a job's options, and the options that are left for its factory."""
        names = {one.name for one in fields(cls)}
        rest = {name: value for name, value in options.items() if name not in names}
        return cls(**{name: value for name, value in options.items() if name in names}), rest


def node_of(shape: Shape, rank: int) -> str:
    """The node that a rank plays to be on."""
    return f"node-{rank // shape.ranks_per_node}"
