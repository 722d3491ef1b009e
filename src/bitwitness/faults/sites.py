"""How a fault reaches the numbers of a model: through the hooks of PyTorch, and where these see too much through autograd.

What a module computes is changed in the memory of its output, as a wrong store would, unless others own that memory too. What
its backward computes is seen by an identity placed on its input or output: a hook on the tensor would also see what other
readers of that tensor sent back. Hooks sit only on modules that can be hit, and do nothing in a step in which nothing is due.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
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


def data_parallel(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """The model as DDP, also where that was compiled."""
    while isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    return model if isinstance(model, nn.parallel.DistributedDataParallel) else None


def parameters_in(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The parameters that optimizers update, by `id`."""
    return {id(one) for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]}


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


def watch_calls(model: nn.Module, before: Callable[..., None], after: Callable[[], None]) -> Callable[[], None]:
    """Be told before and after each call of a model, from outside of whatever is compiled; returns what ends that.

    A hook on a model that was compiled in place would become part of the compiled code, and change its numbers.
    """
    compiled = model._compiled_call_impl
    if compiled is None:
        stack = ExitStack()
        for handle in (
            model.register_forward_pre_hook(lambda _, args, kwargs: before(args, kwargs), with_kwargs=True),
            model.register_forward_hook(lambda *_: after(), always_call=True),
        ):
            stack.callback(handle.remove)
        return stack.close

    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            before(args, kwargs)
            return compiled(*args, **kwargs)
        finally:
            after()

    def end() -> None:
        model._compiled_call_impl = compiled

    model._compiled_call_impl = called
    return end


# What a module is given and returns ----------------------------------------------------------------------------------


def hook_module(
    target: str, module: nn.Module, is_due: Callable[[], bool], change: Change, operands: Operands
) -> list[Any]:
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
            operand = _Operand(is_due, change, operands)
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
        if _owns_its_memory(leaves[index], (args, kwargs), module):
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
        if getattr(module, "inplace", False):
            # A copy would leave the original as it was, which others may read: so all that flows back to it is seen.
            _with_first(args, kwargs, lambda tensor: _hook(tensor, change), floating=True, graded=True)
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


class Operands:
    """Weights that are read wrongly by a forward under way, and what they are to be again after it."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor, int]] = {}

    def hold(self, weight: Tensor) -> None:
        """Remember a weight, unless somebody is reading it wrongly already."""
        kept, copy, readers = self._kept.get(id(weight), (weight, None, 0))
        self._kept[id(weight)] = (kept, weight.detach().clone() if copy is None else copy, readers + 1)
        _forget_casts()

    def release(self, weight: Tensor) -> None:
        """Put it back when the last of its readers is done."""
        kept, copy, readers = self._kept.pop(id(weight), (weight, None, 0))
        if copy is None:
            return  # was put back by `restore`
        if readers > 1:
            self._kept[id(weight)] = (kept, copy, readers - 1)
            return
        kept.data.copy_(copy)
        _forget_casts()

    def restore(self) -> None:
        """Put everything back: a forward was left in a way that runs no hooks."""
        while self._kept:
            weight, copy, _ = self._kept.popitem()[1]
            weight.data.copy_(copy)
            _forget_casts()


def _forget_casts() -> None:
    """Autocast keeps low-precision copies of weights, which would hide a wrong operand, or outlive it."""
    if torch.is_autocast_cache_enabled():
        torch.clear_autocast_cache()


class _Operand:
    """The weight of a module, read wrongly by its forwards that are due. They may be nested, if it calls itself."""

    def __init__(self, is_due: Callable[[], bool], change: Change, operands: Operands) -> None:
        self._is_due, self._change, self._operands = is_due, change, operands
        self._held: list[Tensor | None] = []

    def spoil(self, module: nn.Module, args: Any) -> None:
        """Before the forward."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or not self._is_due():
            self._held.append(None)
            return
        self._operands.hold(weight)
        try:
            self._change(weight)
        except BaseException:
            self._operands.release(weight)
            raise
        self._held.append(weight)

    def mend(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it."""
        weight = self._held.pop() if self._held else None
        if weight is not None:
            self._operands.release(weight)


def check_operand(fault: Fault, name: str, module: nn.Module) -> Tensor:
    """The weight that a module reads in its forward.

    Raises:
        ConfigurationError: it has none, or one that is computed anew each time it is asked for.
    """
    weight = module._parameters.get("weight")
    if not isinstance(weight, Tensor):
        computed = isinstance(getattr(module, "weight", None), Tensor)
        why = (
            "is computed at each use (a parametrization), and no memory of its own is read"
            if computed
            else "does not exist"
        )
        raise ConfigurationError(f"{fault}: the weight of {name or 'the model'} {why}: choose fwd_out or param")
    return weight


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
    """The same numbers; their gradient is changed on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Change) -> Tensor:
        """A copy: of a view, what follows could change nothing in place."""
        ctx.change = change
        return tensor.clone()

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


def _owns_its_memory(output: Tensor, given: Any, module: nn.Module) -> bool:
    """Whether nobody but this output lies in its memory, as far as can be known.

    An identity returns what it was given; other modules return a weight, a part of one, or a table that they keep.
    """
    if output.grad_fn is None or torch._debug_has_internal_overlap(output) != 0:
        return False  # a leaf or a constant may be kept by anybody; of overlapping elements none can be hit alone
    if output._base is not None and output._base.grad_fn is None:
        return False
    others = [leaf for leaf in tree_flatten(given)[0] if isinstance(leaf, Tensor)]
    others += [*module.parameters(), *module.buffers()]
    own = output.untyped_storage().data_ptr()
    return all(other.untyped_storage().data_ptr() != own for other in others)


def _hook(tensor: Tensor, change: Change) -> Tensor:
    hook_gradient(tensor, lambda: True, change)
    return tensor


# Gradients of parameters ---------------------------------------------------------------------------------------------


def hook_gradient(tensor: Tensor, is_due: Callable[[], bool], change: Change) -> Any:
    """Put a fault on the gradient that a backward computes for a tensor; the handle of its hook."""

    def hook(gradient: Tensor) -> Tensor | None:
        if not is_due():
            return None
        copy = gradient.clone()
        return copy if change(copy) else None

    return tensor.register_hook(hook)


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


def given(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a model is called with, by position and by name, as a batch."""
    return {**{str(position): value for position, value in enumerate(args)}, **kwargs}


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
