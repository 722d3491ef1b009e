"""How a fault reaches the numbers of a model: through the hooks of PyTorch, and where these see too much through autograd.

What a module computes is changed in the memory of its output, as a wrong store would. What its backward computes is seen by an
identity placed on its input or output: a hook on the tensor would also see what other readers of that tensor sent back. Hooks
sit only on modules that can be hit, and do nothing in a step in which nothing is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bitwitness.errors import ConfigurationError
from bitwitness.faults.spec import Fault

Change = Callable[[Tensor], bool]
"""Changes a tensor in place if something is due; whether it did."""

_COMPILED = "_orig_mod."
_WRAPPED = "module."


def inner(model: nn.Module) -> nn.Module:
    """The user's module, inside DDP and inside `torch.compile`."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif isinstance(model, torch._dynamo.OptimizedModule):
            model = model._orig_mod
        else:
            return model


def is_compiled(model: nn.Module) -> bool:
    """Whether the whole model is compiled, by `torch.compile(model)` or `model.compile()`."""
    while True:
        if isinstance(model, torch._dynamo.OptimizedModule) or model._compiled_call_impl is not None:
            return True
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return False
        model = model.module


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """Its modules by the names that the user gave them."""
    return {_plain(name): module for name, module in inner(model).named_modules()}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Its parameters, likewise."""
    return {_plain(name): parameter for name, parameter in inner(model).named_parameters()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Its buffers, likewise."""
    return {_plain(name): buffer for name, buffer in inner(model).named_buffers()}


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "").removeprefix(_WRAPPED)


def check_reachable(fault: Fault, model: nn.Module, names: Iterable[str]) -> None:
    """Compiled code runs no hooks of the modules in it.

    Raises:
        ConfigurationError: a module is inside of compiled code; names it, and what can be reached.
    """
    compiled = {
        _plain(name)
        for name, module in inner(model).named_modules()
        if isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None
    }
    for name in names:
        inside = is_compiled(model) or any(name == one or name.startswith(f"{one}.") or not one for one in compiled)
        if inside:
            raise ConfigurationError(
                f"{fault}: {name or 'the model'} is compiled, and compiled code runs no hooks: {fault.where.target} cannot be reached "
                "there. Run it eagerly, or choose grad_w, param, a moment, loss, input or comm"
            )


# What a module is given and returns ----------------------------------------------------------------------------------


def hook_module(target: str, module: nn.Module, is_due: Callable[[], bool], change: Change) -> list[Any]:
    """Put a fault on a module; the handles of its hooks. `is_due` is asked first, at every call."""
    match target:
        case "fwd_out":
            return [module.register_forward_hook(_on_output(is_due, change), with_kwargs=True)]
        case "fwd_in":
            return [module.register_forward_pre_hook(_on_input(is_due, change), with_kwargs=True)]
        case "grad_in":
            return [module.register_forward_pre_hook(_on_input_gradient(is_due, change), with_kwargs=True)]
        case "grad_out":
            return [module.register_forward_hook(_on_output_gradient(is_due, change), with_kwargs=True)]
        case _:
            assert target == "fwd_w", target
            operand = _Operand(is_due, change)
            return [
                module.register_forward_pre_hook(operand.spoil),
                module.register_forward_hook(operand.mend, always_call=True),
            ]


def _on_output(is_due: Callable[[], bool], change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not is_due():
            return None
        leaves, structure = tree_flatten(output)
        index = _first(leaves, floating=True)
        if index is None:
            return None
        if not _shares_memory(leaves[index], (args, kwargs), module):
            change(leaves[index])  # where the wrong number was stored, whoever reads it later, the backward included
            return None
        leaves[index] = _Replaced.apply(leaves[index], change)  # type: ignore[no-untyped-call]
        return tree_unflatten(leaves, structure)

    return hook


def _on_input(is_due: Callable[[], bool], change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_due():
            return None
        return _with_first(args, kwargs, lambda tensor: _Replaced.apply(tensor, change), floating=False)  # type: ignore[no-untyped-call]

    return hook


def _on_input_gradient(is_due: Callable[[], bool], change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not is_due() or not torch.is_grad_enabled():
            return None
        return _with_first(args, kwargs, lambda tensor: _Tapped.apply(tensor, change), floating=True, graded=True)  # type: ignore[no-untyped-call]

    return hook


def _on_output_gradient(is_due: Callable[[], bool], change: Change) -> Callable[..., Any]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not is_due() or not torch.is_grad_enabled():
            return None
        leaves, structure = tree_flatten(output)
        index = _first(leaves, floating=True, graded=True)
        if index is None:
            return None
        leaves[index] = _Tapped.apply(leaves[index], change)  # type: ignore[no-untyped-call]
        return tree_unflatten(leaves, structure)

    return hook


class _Operand:
    """A weight that is read wrongly by one forward: changed before it, put back after it, whatever happens in between."""

    def __init__(self, is_due: Callable[[], bool], change: Change) -> None:
        self._is_due, self._change = is_due, change
        self._kept: tuple[Tensor, Tensor] | None = None

    def spoil(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not self._is_due():
            return
        kept = weight.detach().clone()
        if self._change(weight):
            self._kept = (weight, kept)

    def mend(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it."""
        if self._kept is not None:
            weight, kept = self._kept
            weight.data.copy_(kept)
            self._kept = None


class _Replaced(torch.autograd.Function):
    """A copy with other bits; the gradient passes through."""

    @staticmethod
    def forward(_: Any, tensor: Tensor, change: Change) -> Tensor:
        """The copy."""
        copy = tensor.clone()
        change(copy)
        return copy

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As it came."""
        return gradients[0], None


class _Tapped(torch.autograd.Function):
    """The same tensor; its gradient is changed on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change) -> Tensor:
        """A view."""
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """A copy, because others may hold the same gradient."""
        copy = gradients[0].clone(memory_format=torch.contiguous_format)
        return (copy if ctx.change(copy) else gradients[0]), None


def _first(leaves: Iterable[Any], floating: bool, graded: bool = False) -> int | None:
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.numel():
            if floating and not (leaf.is_floating_point() or leaf.is_complex()):
                continue
            if not graded or leaf.requires_grad:
                return index
    return None


def _with_first(
    args: Any, kwargs: Any, make: Callable[[Tensor], Tensor], floating: bool, graded: bool = False
) -> tuple[Any, Any] | None:
    leaves, structure = tree_flatten((args, kwargs))
    index = _first(leaves, floating, graded)
    if index is None:
        return None
    leaves[index] = make(leaves[index])
    changed: tuple[Any, Any] = tree_unflatten(leaves, structure)
    return changed


def _shares_memory(output: Tensor, given: Any, module: nn.Module) -> bool:
    """Whether the output lies in memory that is not its own: an identity, a view of a weight."""
    others = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    others += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    own = output.untyped_storage().data_ptr()
    # An expanded output has several elements in one place, of which none can be hit alone.
    spread = any(stride == 0 and size > 1 for stride, size in zip(output.stride(), output.shape, strict=True))
    return spread or any(other.untyped_storage().data_ptr() == own for other in others)


# Gradients of parameters ---------------------------------------------------------------------------------------------


def hook_gradient(parameter: Tensor, is_due: Callable[[], bool], change: Change) -> Any:
    """Put a fault on the gradient that a backward computes for a parameter; the handle of its hook."""

    def hook(gradient: Tensor) -> Tensor | None:
        if not is_due():
            return None
        copy = gradient.clone()
        return copy if change(copy) else None

    return parameter.register_hook(hook)


# Batches and the state of optimizers ---------------------------------------------------------------------------------


def batch_tensors(batch: Any) -> dict[str, Tensor]:
    """The tensors of a batch by key, or by position where they have none."""
    if isinstance(batch, Tensor):
        return {"0": batch}
    found: dict[str, Tensor] = {}
    entries: Iterable[tuple[Any, Any]] = (
        batch.items() if isinstance(batch, Mapping) else enumerate(tree_flatten(batch)[0])
    )
    if hasattr(batch, "__dataclass_fields__"):
        entries = ((name, getattr(batch, name)) for name in batch.__dataclass_fields__)
    for key, value in entries:
        for name, tensor in batch_tensors(value).items() if isinstance(value, Tensor | Mapping | list | tuple) else ():
            found[str(key) if name == "0" else f"{key}.{name}"] = tensor
    return found


def state_tensor(optimizers: Iterable[torch.optim.Optimizer], parameter: Tensor, key: str) -> Tensor | None:
    """What the optimizer keeps of a parameter under this key, if it does."""
    for optimizer in optimizers:
        value = optimizer.state.get(parameter, {}).get(key)
        if isinstance(value, Tensor):
            return value
    return None


def check_keeps(fault: Fault, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Raises ConfigurationError where no optimizer of this kind keeps such a moment."""
    key = fault.where.target
    kinds = [type(optimizer).__name__ for optimizer in optimizers]
    keeps = False
    for optimizer in optimizers:
        stored = any(key in state for state in optimizer.state.values())
        if key == "momentum_buffer":
            keeps |= stored or any(group.get("momentum") for group in optimizer.param_groups)
        else:
            keeps |= stored or any("betas" in group for group in optimizer.param_groups)
    if not keeps:
        raise ConfigurationError(f"{fault}: {', '.join(kinds) or 'no optimizer'} keeps no {key}")
