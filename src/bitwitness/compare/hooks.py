"""How a step is watched: hooks that show each tensor at the border of the chosen submodules, and write back what is given for it.

Around a chosen module four borders are watched, so that every wrong number is somebody's: what arrives at it was made by the code
between the chosen modules, what leaves it by the module; likewise on the way back. What is put in for an output or an input goes
into its memory, because its readers, and what autograd has saved, read it there.

Watching must not change what is trained, so nothing is inserted. On the way back gradients are seen, and replaced, at nodes of
autograd's graph: where one that was made inside the module hands a gradient on, it is the module's work; where one arrives from
outside, it is that of others. A hook on the tensor would also see what other readers send back. A module that hands a tensor out in
another way than by returning it, or by changing its input, is not seen there.

The gradient of a parameter is the work of all that read it, and goes by name to the innermost chosen module that has it and was
called in this step: one that was never called computed nothing, and others read its weights. A weight that other code reads as well
as its owner, for instance a term of the loss that keeps weights small, is still its owner's by name.

Faults that are played on purpose must look like the module's own: hooks of an injector that were placed before lie nearer to it.
"""

from __future__ import annotations

import dataclasses
import difflib
import fnmatch
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitwitness.compare.differing import distance
from bitwitness.compare.records import Phase, Site
from bitwitness.compare.simulated import untouched
from bitwitness.compare.tape import can_be_compared, host, like, overwrite, site_of
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
        show: is shown each tensor. No site comes twice.
        borders: False shows the gradients of parameters only.
    """
    if _nobody_watches.get():
        yield
        return
    watch = _Watch(show)
    with ExitStack() as stack:
        stack.callback(watch.close)
        for name, module in modules.items():
            if not borders:  # who was called must be known here, too: a gradient has one name in all steps
                stack.callback(module.register_forward_pre_hook(functools.partial(watch.enter, name)).remove)
                continue
            border = _Border(name, watch)
            stack.callback(border.close)
            # First of all, so that what an injector does to the input is part of the module; and last of all on the output.
            before = module.register_forward_pre_hook(border.enter, with_kwargs=True, prepend=True)
            # Always, because a checkpoint leaves a forward that it computes again in the middle, by an exception.
            after = module.register_forward_hook(border.leave, with_kwargs=True, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
        for name, parameter in parameters_of(model).items():
            if parameter.requires_grad:
                stack.callback(parameter.register_hook(functools.partial(watch.of_parameter, name)).remove)
        yield


_nobody_watches: ContextVar[bool] = ContextVar("nobody_watches", default=False)


@contextmanager
def unwatched() -> Iterator[None]:
    """Inside, `watching` places no hooks: the step is computed as its author computes it."""
    token = _nobody_watches.set(True)
    try:
        yield
    finally:
        _nobody_watches.reset(token)


def check_unchanged(watched: Mapping[str, Tensor], plain: Mapping[str, Tensor]) -> None:
    """Refuse work that is trained otherwise when it is watched.

    Args:
        watched: by name, the parameters after some steps that were watched.
        plain: after the same steps inside of `unwatched`.

    Raises:
        ConfigurationError: one has other bits; names it.
    """
    for name, tensor in plain.items():
        if distance(host(watched[name]), host(tensor)) != 0.0:
            raise ConfigurationError(
                f"the work is trained otherwise when its modules have hooks: {name} has other bits after the same steps. A module of it asks "
                "for its hooks and then computes in another way: leave that one out by --module, or switch its fast path off"
            )


def put(show: Show, site: Site, tensor: Tensor) -> None:
    """Show a tensor, and write into its memory what is given for it."""
    with untouched():  # none of this is the work of the device that is watched
        right = show(site, tensor)
        if right is not None:
            overwrite(tensor, right)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in what a module is given or returns, in order, each object once: in containers, dataclasses and what pytree knows."""
    found: dict[int, Tensor] = {}
    known: dict[int, Any] = {}  # held, because what a container makes anew could get the number of one that is gone
    # No function that calls itself: it would be held by its own cell, and every tensor and its graph by it, until the next collection.
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Tensor):
            found.setdefault(id(one), one)
        elif not isinstance(one, str | bytes | int | float | nn.Module | None) and id(one) not in known:
            known[id(one)] = one
            left += reversed(_parts(one))
    return list(found.values())


def _parts(one: Any) -> list[Any]:
    if isinstance(one, Mapping):
        return list(one.values())
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        return [getattr(one, part.name, None) for part in dataclasses.fields(one)]
    if isinstance(one, list | tuple):
        return list(one)
    return [leaf for leaf in tree_leaves(one) if leaf is not one]


class _Watch:
    """Who is shown the tensors of one step, and how often each has come."""

    def __init__(self, show: Show) -> None:
        self._show: Show | None = show
        self._times: Counter[tuple[str, str, str, int]] = Counter()
        self._called: set[str] = set()

    def enter(self, module: str, *_: Any) -> None:
        """A chosen module is called."""
        self._called.add(module)

    def close(self) -> None:
        """Hooks in graphs that outlive the step are silent from now on."""
        self._show = None

    def tensor(self, module: str, phase: Phase, name: str, call: int, tensor: Tensor) -> None:
        """Show what lies in memory, and write there what is given for it."""
        if self._show is not None and can_be_compared(tensor):
            put(self._show, self._site(module, phase, name, call, tensor), tensor)

    def of_parameter(self, name: str, gradient: Tensor) -> Tensor | None:
        """Show a parameter's gradient as that of its innermost owner that was called so far; as `gradient`."""
        owner = owner_of(name, self._called)
        return self.gradient(owner, "grad_w", name.removeprefix(f"{owner}.") if owner else name, 0, gradient)

    def gradient(self, module: str, phase: Phase, name: str, call: int, gradient: Tensor | None) -> Tensor | None:
        """Show a gradient on its way; what is to go on in its place, None for itself."""
        if self._show is None or gradient is None or not can_be_compared(gradient):
            return None
        with untouched():
            right = self._show(self._site(module, phase, name, call, gradient), gradient)
            graph = gradient.requires_grad and torch.is_grad_enabled()
            if right is None:
                chosen = gradient
            elif graph:
                chosen = _Instead.apply(gradient, like(gradient, right))  # type: ignore[no-untyped-call]
            else:
                chosen = like(gradient, right)
        if graph and chosen.grad_fn is not None:
            # The gradient is itself differentiated. What comes back here was made by all that read it, so by no module alone.
            chosen.register_hook(lambda second: self.gradient(module, "grad_out", f"{name} of {phase}", call, second))
        return None if chosen is gradient else chosen

    def _site(self, module: str, phase: Phase, name: str, call: int, tensor: Tensor) -> Site:
        key = (module, phase, name, call)
        before = self._times[key]
        self._times[key] += 1
        if before:  # a graph may be gone through more than once
            name = f"{name} again {before}" if before > 1 else f"{name} again"
        return site_of(module, phase, name, call, tensor)


_Edge = tuple[Any, int]
"""Where a gradient arrives: a node of the graph, and which of its outputs in the forward."""


@dataclasses.dataclass(slots=True)
class _Call:
    """A forward under way.

    Attributes:
        number: of calls of this module before it in this step.
        given: the tensors it was given.
        edges: where their gradients go, with their positions. The nodes must be held: Python makes their objects anew otherwise.
        since: number of the first node that may be its own.
    """

    number: int
    given: list[Tensor]
    edges: dict[_Edge, int]
    since: int


class _Border:
    """The borders of one chosen module.

    Nothing is put in the way of what passes there: a copy of an input would part a module that works in place from whoever reads it
    too, and change the order of sums.
    """

    def __init__(self, name: str, watch: _Watch) -> None:
        self._name, self._watch = name, watch
        self._calls = 0
        self._open: list[_Call] = []  # several, of a module that calls itself

    def close(self) -> None:
        """A call that was broken off before its end would hold its nodes, and these by their hooks its border."""
        self._open.clear()

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._watch.enter(self._name)
        given = tensors_in((args, kwargs))
        call = _Call(self._calls, given, {}, 0)
        self._calls += 1
        self._open.append(call)
        for position, tensor in enumerate(given):
            self._watch.tensor(self._name, "fwd_in", str(position), call.number, tensor)
        if torch.is_grad_enabled():
            for position, tensor in enumerate(given):
                if tensor.requires_grad:
                    call.edges.setdefault(_edge(tensor), position)
            call.since = torch._C._autograd._get_sequence_nr()

    def leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._open.pop()
        returned = tensors_in(output)
        for position, tensor in enumerate(returned):
            self._watch.tensor(self._name, "fwd_out", str(position), call.number, tensor)
        if torch.is_grad_enabled():
            self._backward(call, returned)

    def _backward(self, call: _Call, returned: Sequence[Tensor]) -> None:
        """Watch what arrives at the nodes of this call from outside, and what they hand on to there."""
        made: dict[_Edge, str] = {}
        # What was changed in place goes out, too.
        named = [(str(position), one) for position, one in enumerate(returned)]
        named += [(f"input {position}", one) for position, one in enumerate(call.given)]
        for name, tensor in named:
            if tensor.requires_grad and not tensor.is_leaf:
                edge = _edge(tensor)
                if edge not in call.edges and edge[0]._sequence_nr() >= call.since:
                    made.setdefault(edge, name)
        for node, _ in list(made):
            if _is_played(
                node
            ):  # on purpose, at the end of a module that works in place: what it was put on is inside then
                for edge in node.next_functions:
                    made.pop(edge, None)
        for edge, readers in _readers(made, call).items():
            # Of a gradient that others add to as well, this is the module's part; what is wrong in the sum then is not its own.
            name = str(call.edges[edge]) if edge in call.edges else f"output {made[edge]}"
            self._part(name, call.number, readers)
        for (node, place), name in made.items():
            node.register_prehook(self._arrives(name, call.number, place))

    def _part(self, name: str, call: int, readers: list[_Reader]) -> None:
        """Watch what the nodes of a call hand on to one place; where they are several, their sum as well: a fault is played on that."""
        apart = [one for one in readers if not one.played]
        played = [one for one in readers if one.played]
        if len(apart) == 1 and len(played) == 1:
            apart, played = played, []  # what it was put on is inside
        sums = _Sum(len(apart), lambda total: self._watch.gradient(self._name, "grad_in", f"{name} sum", call, total))
        for number, one in enumerate(apart):
            numbered = f"{name}.{number}" if number else name
            add = sums.add if len(apart) > 1 and not played else None
            one.node.register_hook(self._hands_on(numbered, call, one.place, add))
        if len(played) == 1 and played[0].covers == len(apart):
            played[0].node.register_hook(self._hands_on(f"{name} sum", call, played[0].place, None))

    def _hands_on(
        self, name: str, call: int, place: int, add: Callable[[Tensor | None], None] | None
    ) -> Callable[..., Any]:
        def hook(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
            right = self._watch.gradient(self._name, "grad_in", name, call, gradients[place])
            if add is not None:
                add(gradients[place] if right is None else right)
            return None if right is None else (*gradients[:place], right, *gradients[place + 1 :])

        return hook

    def _arrives(self, name: str, call: int, place: int) -> Callable[..., Any]:
        def hook(gradients: tuple[Tensor | None, ...]) -> Any:
            right = self._watch.gradient(self._name, "grad_out", name, call, gradients[place])
            return None if right is None else (*gradients[:place], right, *gradients[place + 1 :])

        return hook


def _edge(tensor: Tensor) -> _Edge:
    with untouched():  # of a leaf it is found by an operation
        edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _is_played(node: Any) -> bool:
    """Whether a node was made by a fault that is played."""
    return getattr(getattr(node, "_forward_cls", None), "__module__", "") == modules_of.__module__


@dataclasses.dataclass(frozen=True, slots=True)
class _Reader:
    """A node of a call that hands a gradient on.

    Attributes:
        node: which. place: which of its gradients.
        played: it was made by a fault that is played. covers: then, how many nodes hand theirs on to it.
    """

    node: Any
    place: int
    played: bool = False
    covers: int = 0


def _readers(made: Iterable[_Edge], call: _Call) -> dict[_Edge, list[_Reader]]:
    """The nodes of a call that hand a gradient on to its inputs, or to what it has made that others read too: in the forward's order."""
    inside: dict[_Edge, list[_Reader]] = {}
    known = set()
    left = [node for node, _ in made]
    while left:
        node = left.pop()
        if node in known:
            continue
        known.add(node)
        for place, edge in enumerate(node.next_functions):
            if edge[0] is None:
                continue
            inside.setdefault(edge, []).append(_Reader(node, place))
            if edge not in call.edges and edge[0]._sequence_nr() >= call.since:
                left.append(edge[0])
    found: dict[_Edge, list[_Reader]] = {}
    for edge in (*call.edges, *(one for one in made if one not in call.edges)):
        readers = []
        for one in inside.get(edge, []):
            before = inside.get((one.node, 0), []) if _is_played(one.node) else []
            readers += before
            readers.append(dataclasses.replace(one, played=bool(before), covers=len(before)))
        if readers:
            found[edge] = sorted(readers, key=lambda one: (one.node._sequence_nr(), one.place))
    return found


class _Sum:
    """The sum of what several nodes hand on to one place, in the order in which they do: on the host, as autograd would add them."""

    def __init__(self, parts: int, show: Callable[[Tensor], Any]) -> None:
        self._parts, self._show = parts, show
        self._seen = 0
        self._total: Tensor | None = None

    def add(self, part: Tensor | None) -> None:
        """One more; None is nothing."""
        self._seen += 1
        if part is not None and can_be_compared(part):
            with untouched(), torch.no_grad():
                here = part.detach().to("cpu")
                self._total = here.clone() if self._total is None else self._total + here
        if self._seen == self._parts:
            total, self._seen, self._total = self._total, 0, None
            if total is not None:
                self._show(total)


class _Instead(torch.autograd.Function):
    """Other numbers in place of a gradient that is differentiated in its turn."""

    @staticmethod
    def forward(_: Any, gradient: Tensor, right: Tensor) -> Tensor:
        """The right ones."""
        assert gradient.shape == right.shape
        return right

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """As it came."""
        return gradients[0], None


def _compiled(module: nn.Module) -> bool:
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def _no_match(glob: str, modules: Iterable[str]) -> str:
    names = list(modules)

    close = difflib.get_close_matches(glob.replace("*", ""), names, n=3, cutoff=0.4)
    some = close or names[:5]
    return f"--module {glob!r:.80} matches no submodule of the model: it has {len(names)}, e.g. {', '.join(some)}"
