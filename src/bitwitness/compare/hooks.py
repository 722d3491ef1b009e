"""How a step is watched: hooks that show each tensor at the border of the chosen submodules, and write back what is given for it.

Around a chosen module four borders are watched, so that every wrong number is somebody's: what arrives at it was made by the code
between the chosen modules, what leaves it by the module; likewise on the way back. What is put in for an output or an input goes
into its memory, because its readers, and what autograd has saved, read it there. Gradients are seen by an identity on the way in and
out: a hook on the tensor would also see what other readers of that tensor send back.

Faults that are played on purpose must look like the module's own: hooks of an injector that were placed before lie nearer to it.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from bitwitness.compare.records import Phase, Site
from bitwitness.compare.simulated import untouched
from bitwitness.compare.tape import can_be_compared, like, overwrite, site_of
from bitwitness.errors import ConfigurationError
from bitwitness.faults.sites import is_compiled, modules_of, parameters_of

Show = Callable[[Site, Tensor], Tensor | None]
"""Is shown a tensor; gives what `tape.host` made of the right one where other bits are to be put in its place, else None."""


def chosen(model: nn.Module, globs: Sequence[str]) -> dict[str, nn.Module]:
    """The modules that are watched, by name.

    Args:
        model: whose.
        globs: of names, shell style, `*` matching dots as well; () chooses all that have no modules in them.

    Raises:
        ConfigurationError: a glob matches none, or one is compiled, so that it runs no hooks.
    """
    modules = {name: module for name, module in modules_of(model).items() if name}
    if not modules:
        raise ConfigurationError(
            "the model has no submodules, so there is nothing between which results could be compared: wrap it in another module"
        )
    if not globs:
        found = {name: module for name, module in modules.items() if not any(module.children())}
    else:
        found = {}
        for glob in globs:
            matching = {name: module for name, module in modules.items() if fnmatch.fnmatchcase(name, glob)}
            if not matching:
                raise ConfigurationError(_no_match(glob, modules))
            found |= matching
        found = {name: module for name, module in modules.items() if name in found}  # in the order of the model
    compiled = [name for name, module in modules_of(model).items() if _compiled(module)]
    if is_compiled(model) or compiled:
        raise ConfigurationError(
            f"{compiled[0] if compiled and compiled[0] else 'the model'} is compiled, and compiled code runs no hooks: give a "
            "workload that runs eagerly"
        )
    return found


def owner_of(name: str, modules: Iterable[str]) -> str:
    """The innermost of the chosen modules that a parameter or buffer belongs to; "" for none."""
    found = [module for module in modules if name.startswith(f"{module}.")]
    return max(found, key=len, default="")


@contextmanager
def watching(model: nn.Module, modules: Mapping[str, nn.Module], show: Show, *, borders: bool = True) -> Iterator[None]:
    """Inside, a step of the model shows what the chosen modules are given and return, forward and backward, and all gradients.

    Args:
        model: whose.
        modules: the chosen ones.
        show: is shown each tensor.
        borders: False shows the gradients of parameters only.
    """
    counts: Counter[tuple[str, str]] = Counter()
    with ExitStack() as stack:
        for name, module in modules.items() if borders else ():
            border = _Border(name, show, counts)
            # First of all, so that what an injector does to the input is part of the module; and last of all on the output.
            before = module.register_forward_pre_hook(border.enter, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(border.leave, with_kwargs=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        for name, parameter in parameters_of(model).items():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(_on_gradient(name, modules, show, counts)).remove)
        yield


def put(show: Show, site: Site, tensor: Tensor) -> None:
    """Show a tensor, and write into its memory what is given for it."""
    with untouched():  # none of this is the work of the device that is watched
        right = show(site, tensor)
        if right is not None:
            overwrite(tensor, right)


class _Border:
    """The borders of one chosen module."""

    def __init__(self, name: str, show: Show, counts: Counter[tuple[str, str]]) -> None:
        self._name, self._show, self._counts = name, show, counts

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self._counts[self._name, "fwd"]
        leaves, structure = tree_flatten((args, kwargs))
        changed = False
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and can_be_compared(leaf):
                self._put("fwd_in", str(position), call, leaf)
                if leaf.requires_grad and torch.is_grad_enabled():
                    changed |= self._tap(leaves, position, "grad_in", call, in_place=getattr(module, "inplace", False))
        return tree_unflatten(leaves, structure) if changed else None

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self._counts[self._name, "fwd"]
        self._counts[self._name, "fwd"] += 1
        leaves, structure = tree_flatten(output)
        changed = False
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and can_be_compared(leaf):
                self._put("fwd_out", str(position), call, leaf)
                if leaf.requires_grad and torch.is_grad_enabled() and not leaf.is_leaf:
                    changed |= self._tap(leaves, position, "grad_out", call, in_place=False)
        return tree_unflatten(leaves, structure) if changed else None

    def _put(self, phase: Phase, tensor: str, call: int, value: Tensor) -> None:
        put(self._show, site_of(self._name, phase, tensor, call, value), value)

    def _tap(self, leaves: list[Any], position: int, phase: Phase, call: int, *, in_place: bool) -> bool:
        """Watch the gradient of a tensor; whether another one stands in its place now."""

        def seen(gradient: Tensor) -> Tensor:
            if not can_be_compared(gradient):
                return gradient
            with untouched():
                right = self._show(site_of(self._name, phase, str(position), call, gradient), gradient)
                return gradient if right is None else like(gradient, right)

        leaf = leaves[position]
        if in_place:
            # A copy would leave the original as it was, which others may read.
            leaf.register_hook(seen)
            return False
        leaves[position] = _Tapped.apply(leaf, seen)  # type: ignore[no-untyped-call]
        return True


class _Tapped(torch.autograd.Function):
    """The same numbers; their gradient is shown on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, seen: Callable[[Tensor], Tensor]) -> Tensor:
        """A copy: of a view, what follows could change nothing in place."""
        ctx.seen = seen
        with untouched():
            return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As it came, or what was put in its place."""
        return ctx.seen(gradients[0]), None


def _on_gradient(
    name: str, modules: Mapping[str, nn.Module], show: Show, counts: Counter[tuple[str, str]]
) -> Callable[[Tensor], Tensor | None]:
    owner = owner_of(name, modules)
    tensor = name.removeprefix(f"{owner}.") if owner else name

    def hook(gradient: Tensor) -> Tensor | None:
        if not can_be_compared(gradient):
            return None
        call = counts[name, "grad"]
        counts[name, "grad"] += 1
        with untouched():
            right = show(site_of(owner, "grad_w", tensor, call, gradient), gradient)
            return None if right is None else like(gradient, right)

    return hook


def _compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _no_match(glob: str, modules: Iterable[str]) -> str:
    names = list(modules)

    close = difflib.get_close_matches(glob.replace("*", ""), names, n=3, cutoff=0.4)
    some = close or names[:5]
    return f"--module {glob!r:.80} matches no submodule of the model: it has {len(names)}, e.g. {', '.join(some)}"
