"""What the participants of a comparison compute: a user's model, or one that ships.

The seam between a comparison and what it trains. A maker makes the same initial weights wherever and as often as it is called, and a
batch is a pure function of the step, because all participants and all modes must start from the same.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bitwitness.errors import BitwitnessError, ConfigurationError

KNOWN: Mapping[str, str] = {
    "gpt": "bitwitness.examples.comparing:gpt",
    "digits": "bitwitness.examples.comparing:digits",
}
"""The workloads that ship. Named, not imported: examples stand above this."""


@dataclass(frozen=True)
class Workload:
    """What one participant trains, on one device.

    Attributes:
        model: on the device, in the mode in which it is trained; not wrapped in anything.
        optimizers: one or several, over the model's parameters.
        loss_fn: `loss_fn(model, batch)` gives a scalar; autocast, if any, is its own matter.
        batch: `batch(step)` gives what a step is trained on, on the device; the same for the same step.
        evaluate: `evaluate(model)` gives task results: `{"NAME": answers, "NAME.right": right answers}`, one int a question and -1 for
            no answer (e.g. logits that are not finite), or `{"NAME": number}`.
    """

    model: nn.Module
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    evaluate: Callable[[nn.Module], Mapping[str, Any]] | None = None

    @property
    def all_optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All of them, as a tuple."""
        one = self.optimizers
        return (one,) if isinstance(one, torch.optim.Optimizer) else tuple(one)


Make = Callable[[torch.device, int], Workload]
"""`make(device, seed)`: the same initial weights whatever the seed, which is of the order of the data."""


def load(name: str, options: Mapping[str, str] | None = None) -> Make:
    """The maker of a workload.

    Args:
        name: a known one (`KNOWN`), `module:function` or `FILE.py:function`; the function is called as
            `function(device, seed, **options)` and returns a `Workload`.
        options: handed to the function as they are, as text.

    Raises:
        ConfigurationError: there is no such function, or it takes no such option. From the maker: it returns something else.
    """
    given = dict(options or {})
    where, colon, attribute = KNOWN.get(name, name).rpartition(":")
    if not colon or not where or not attribute:
        raise ConfigurationError(
            f"no such workload: {name!r:.80}. Known are {', '.join(KNOWN)}; or give module:function or FILE.py:function"
        )
    module = _from_file(Path(where)) if where.endswith(".py") else _imported(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigurationError(f"the workload {name!r:.80} cannot be made: {where} has no function {attribute!r}")
    _check_options(name, function, given)

    def make(device: torch.device, seed: int) -> Workload:
        made = function(device, seed, **given)
        if not isinstance(made, Workload):
            raise ConfigurationError(
                f"the workload {name!r:.80} returned a {type(made).__name__}: return a bitwitness.compare.workload.Workload"
            )
        return made

    return make


def _check_options(name: str, function: Callable[..., Any], given: Mapping[str, str]) -> None:
    try:
        signature = inspect.signature(function)
        signature.bind(None, 0, **given)
    except ValueError:
        return  # a function in C, which does not tell
    except TypeError as error:
        takes = list(signature.parameters)[2:]
        raise ConfigurationError(
            f"the workload {name!r:.80} cannot be called with (device, seed, {', '.join(given) or 'no options'}): {error}. Its "
            f"options are {', '.join(takes) or 'none'}"
        ) from error


def _imported(where: str) -> ModuleType:
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that nothing that lies about hides what is installed
    try:
        return importlib.import_module(where)
    except BitwitnessError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the module {where!r} cannot be imported: {type(error).__name__}: {error}") from error


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise ConfigurationError(f"{file}: there is no such file")
    name = f"bitwitness_workload_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    assert spec.loader is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.append(str(file.resolve().parent))  # for what stands beside it
    try:
        spec.loader.exec_module(module)
    except BitwitnessError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{file} cannot be run: {type(error).__name__}: {error}") from error
    return module
