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

from bitwitness.compare.users_code import no_exit, said
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
        has = hasattr(module, attribute)
        what = (
            f"{attribute!r} in {where} is {_a(function)} and no function"
            if has
            else f"{where} has no function {attribute!r}"
        )
        raise ConfigurationError(
            f"the workload {name!r:.80} cannot be made: {what}. Name one that is called with (device, seed) and returns a Workload"
        )
    _check_options(name, function, given)

    def make(device: torch.device, seed: int) -> Workload:
        with no_exit():
            made = function(device, seed, **given)
        if not isinstance(made, Workload):
            raise ConfigurationError(
                f"the workload {name!r:.80} returned {_a(made)}: return a bitwitness.compare.workload.Workload"
            )
        check_parts(made, name)
        return made

    return make


def check_parts(made: Workload, name: str = "") -> None:
    """Refuse a workload one of whose parts is something else than it must be.

    Raises:
        ConfigurationError: names the part, what it is, and what to give.
    """
    wrong = ""
    if not isinstance(made.model, nn.Module):
        wrong = f"its model is {_a(made.model)}: give a torch.nn.Module, on the device"
    elif problem := _optimizers(made.optimizers):
        wrong = f"{problem}: give a torch.optim.Optimizer over the model's parameters, or a list of some"
    for part, takes in (("loss_fn", "(model, batch)"), ("batch", "(step)"), ("evaluate", "(model)")):
        value = getattr(made, part)
        if not wrong and not callable(value) and not (part == "evaluate" and value is None):
            wrong = f"its {part} is {_a(value)}: give a function {part}{takes}"
            wrong += ", or None" if part == "evaluate" else ""
    if wrong:
        raise ConfigurationError(f"the workload {name!r:.80} cannot be trained: {wrong}")


def _optimizers(given: object) -> str:
    """What is wrong with them; "" for nothing."""
    if isinstance(given, type | str) or not isinstance(given, torch.optim.Optimizer | Sequence):
        return f"its optimizers are {_a(given)}"
    several = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    if not several:
        return "it has no optimizers"
    for one in several:
        # One that wraps another need not be one; what is used of it are these two.
        used = callable(getattr(one, "step", None)) and hasattr(one, "state")
        if isinstance(one, type) or not (isinstance(one, torch.optim.Optimizer) or used):
            return f"among its optimizers is {_a(one)}"
        if isinstance(one, torch.optim.LBFGS):
            return "LBFGS computes the loss several times a step, and a step is computed once here"
    return ""


def _a(value: object) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


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
        with no_exit():
            return importlib.import_module(where)
    except BitwitnessError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the module {where!r} cannot be imported: {said(error)}") from error


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
        with no_exit():
            spec.loader.exec_module(module)
    except BitwitnessError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{file} cannot be run: {said(error)}") from error
    return module
