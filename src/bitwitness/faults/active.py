"""A fault at work: when it is due, what it draws, and what it has done.

Apart from the hooks that reach into a job, because whether a fault strikes now is a question of (step, micro-batch, work) and
of numbers drawn from the seed alone: neither depends on how a site is reached, and a record answers it by itself.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness import mutate
from bitwitness.errors import ConfigurationError
from bitwitness.faults import choose, damage
from bitwitness.faults.damage import Change
from bitwitness.faults.record import Site, Strike, pack, unpack
from bitwitness.faults.spec import MEMORY_TARGETS, Fault, Target, Work

ATTEMPTS = 16
"""How often a fault that strikes once is drawn anew at one opportunity, because what it drew changed no bit."""

ARITHMETIC: tuple[Work, ...] = ("train", "replay", "arbiter", "rerun")
"""The work in which a fault strikes that does not say in which: all that a broken device computes."""


_HINTS = {
    "input": ": without a guard, give each batch to injector.batch() if the model is not called with its tensors",
    "ckpt": ": only what a guard saves is reached",
    "digest": ": only a guard computes fingerprints",
}


@dataclass(frozen=True, slots=True)
class Moment:
    """Where the job is: what is due follows from it."""

    step: int = -1
    micro: int = -1
    work: Work = "train"


class Active:
    """One fault of one job on one rank.

    Args:
        fault: what; `number`: its place among the job's faults.
        seed: all that is drawn follows from it, from the number, and for `redraw` from the step.
        rank, world_size, node: of this process; start: which start of the job it is.

    Attributes:
        landed: how often it has changed bits; why_not: if never, what is known of the reason.
        here: whether it is on this rank at all.
    """

    def __init__(
        self, fault: Fault, number: int, seed: int, rank: int, world_size: int, node: str = "", start: int = 1
    ) -> None:
        self.fault, self.number, self._seed = fault, number, seed
        self.rank, self._node, self._start = rank, node, start
        self.landed = 0
        self.why_not = f"its site was never reached{_HINTS.get(fault.where.target, '')}"
        self.here = self._is_here(world_size)
        self._done: set[str] = set()
        self._drawn = (-1, False)
        self._steps_due = self._opportunities = self._attempts = 0
        self._landed_in: tuple[int, Work] = (-1, "train")
        self._calls: dict[tuple[object, ...], int] = {}
        self._stale: dict[str, Tensor] = {}

    @property
    def target(self) -> Target:
        """What it hits."""
        return self.fault.where.target

    def _is_here(self, world_size: int) -> bool:
        where = self.fault.where
        if where.node:
            return where.node == self._node and where.rank in (None, "*", self.rank)
        if where.rank == "*" or where.target == "comm.reduce":
            return True
        if where.target == "ckpt" and where.rank is None:
            return self.rank == 0  # who writes what all ranks share
        if where.rank is None:
            return self._random("rank").randrange(world_size) == self.rank
        if where.rank >= world_size:
            raise ConfigurationError(f"{self.fault}: there is no rank {where.rank}, the job has {world_size}")
        return where.rank == self.rank

    # When ------------------------------------------------------------------------------------------------------------

    def may_be_due(self, step: int) -> bool:
        """Whether it can strike in this step: asked at every call of a hooked module, so it costs a few comparisons."""
        when, persist = self.fault.when, self.fault.persist
        if not self.here or step < when.first or (persist.kind == "once" and self.landed and not self.fault.where.each):
            return False
        # A lasting fault that began at a step goes on; a window ends.
        endless = when.last is None or (when.last == when.first and persist.kind != "once")
        if not endless and step > (when.last or 0):
            return False
        return (step - when.first) % when.every == 0 and (when.p >= 1.0 or self._is_drawn(step))

    def _is_drawn(self, step: int) -> bool:
        """Whether chance has chosen this step."""
        if self._drawn[0] != step:
            self._drawn = step, self._random(f"step {step}").random() < self.fault.when.p
        return self._drawn[1]

    def wants(self, step: int) -> bool:
        """Whether it must see its site in this step: to strike, or to know what will be stale the next time."""
        stale = self.fault.mutate.source == "stale" and self.here and not self.is_over(step)
        return stale or self.may_be_due(step)

    def is_over(self, step: int) -> bool:
        """Whether no opportunity can come in this step or later."""
        when, persist = self.fault.when, self.fault.persist
        endless = when.last is None or (when.last == when.first and persist.kind != "once")
        return not endless and step > (when.last or 0)

    def had_its_turn(self, names: Iterable[str]) -> None:
        """It has struck at these names in an earlier start of the job."""
        self.landed = 1
        self._done |= set(names)

    def begin(self, step: int) -> None:
        """A step begins, in which it is due or not."""
        self._steps_due += self.may_be_due(step)

    def missing(self, step: int, final: bool) -> str:
        """Why it counts as not landed when this step begins, or at the end before it; empty if it does not.

        What depends on chance may never strike; but if it was due and its site never came, or came and no bit ever changed,
        then it was not chance.
        """
        when = self.fault.when
        if self.landed:
            return ""
        if self.fault.persist.kind == "intermittent" or when.p < 1.0:
            never = self._steps_due > 0 and not self._opportunities
            return self.why_not if (final or self.is_over(step)) and (never or self._attempts) else ""
        if final and step <= when.first:
            return f"the job ended before step {when.first}"
        return self.why_not if final or self.is_over(step) else ""

    def is_due(self, moment: Moment) -> bool:
        """Whether it strikes now, if its site is reached."""
        where, when = self.fault.where, self.fault.when
        if not self.may_be_due(moment.step):
            return False
        if when.micro is not None and moment.work == "train" and moment.micro != when.micro:
            return False
        if where.during is None:
            return moment.work in ARITHMETIC or where.target in (*MEMORY_TARGETS, "digest", "ckpt")
        return where.during == moment.work or (where.target == "digest" and where.during == "fingerprint")

    def _chance(self, moment: Moment, call: int, name: str) -> bool:
        persist = self.fault.persist
        if persist.kind != "intermittent":
            return True
        return self._random(f"chance {moment} {call} {name}").random() < persist.p

    # Where -----------------------------------------------------------------------------------------------------------

    def names(self, among: Iterable[str], step: int | None = None) -> tuple[str, ...]:
        """Which of these are hit: one that matches, or each.

        Without a step, all that may ever be: where it is drawn anew each time, every name that matches.

        Raises:
            ConfigurationError: none matches.
        """
        where = self.fault.where
        found = matching(where.glob, among)
        if not found:
            raise ConfigurationError(no_match(self.fault, among))
        if where.each or (step is None and self.fault.persist.redraw):
            return found
        when = f"name {step}" if self.fault.persist.redraw else "name"
        return (self._random(when).choice(found),)

    # What ------------------------------------------------------------------------------------------------------------

    def strike(self, tensor: Tensor, name: str, moment: Moment) -> Strike | None:
        """Change the bits of a tensor in place if this is due and the chance is taken; what was done.

        Raises:
            ConfigurationError: selection or mutation is impossible in this tensor.
        """
        site = self._site(name, moment)
        previous = self._remember(name, tensor)
        if not self.is_due(moment) or (self.fault.persist.kind == "once" and name in self._done):
            return None
        self._opportunities += 1
        if not self._chance(moment, site.call, name if self.fault.where.each else ""):
            return None
        memory = self.target in MEMORY_TARGETS and self._landed_in == (moment.step, moment.work)
        if memory and not self.fault.where.each:
            return None
        self.check(tensor)
        self._attempts += 1
        change = self._change(tensor, name, moment.step, previous)
        if change is None:
            return None
        self.landed += 1
        self._done.add(name)
        self._landed_in = (moment.step, moment.work)
        return made(site, str(self.fault), self._node, tensor, change)

    def check(self, tensor: Tensor) -> None:
        """Raises ConfigurationError where selection or mutation is impossible in such a tensor."""
        try:
            choose.check(self.fault.select, tuple(tensor.shape))
            damage.check(self.fault.mutate, tensor.dtype)
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.fault}: {error}") from error

    def _change(self, tensor: Tensor, name: str, step: int, stale: Tensor | None) -> Change | None:
        persist = self.fault.persist
        for attempt in range(ATTEMPTS if persist.kind == "once" else 1):
            drawn = f"{name if self.fault.where.each else ''} {step if persist.redraw else ''} {attempt}"
            numbers, generator = self._random(drawn), torch.Generator().manual_seed(self._number(f"tensor {drawn}"))
            indices = choose.indices(self.fault.select, tensor, numbers, generator, persist.only_if)
            if not len(indices):
                self.why_not = "no element was selected"
                continue
            change = damage.apply_(tensor, self.fault.mutate, indices, numbers, generator, stale)
            if len(change):
                return change
            self.why_not = f"not one bit of the {len(indices)} selected elements has changed"
        return None

    def _site(self, name: str, moment: Moment) -> Site:
        key = (name, moment.step, moment.micro, moment.work)
        if not any(known[1] == moment.step for known in list(self._calls)[-1:]):
            self._calls.clear()  # of earlier steps
        call = self._calls[key] = self._calls.get(key, -1) + 1
        return Site(
            self.number, self.rank, moment.step, moment.micro, moment.work, self.target, name, call, self._start
        )

    def _remember(self, name: str, tensor: Tensor) -> Tensor | None:
        """What was at this site the time before; the copy is kept only for a fault that leaves stale data."""
        if self.fault.mutate.source != "stale":
            return None
        previous, self._stale[name] = self._stale.get(name), tensor.detach().clone()
        return previous

    def _number(self, purpose: str) -> int:
        digest = hashlib.blake2b(f"{self._seed}/{self.number}/{self.fault}/{purpose}".encode(), digest_size=7)
        return int.from_bytes(digest.digest(), "little")

    def _random(self, purpose: str) -> random.Random:
        return random.Random(self._number(purpose))  # noqa: S311  (repeatable, not secret)


class Recorded(Active):
    """What a record says, done again: the same bits at the same moments, and nothing else.

    Args:
        strikes: of one fault; those of other ranks are left out.
    """

    def __init__(
        self, fault: Fault, number: int, strikes: Sequence[Strike], rank: int, node: str = "", start: int = 1
    ) -> None:
        super().__init__(fault, number, 0, rank, 1 << 30, node, start)
        self._due = {one.site: one for one in strikes if (one.site.rank, one.site.start) == (rank, start)}
        self._steps = {site.step for site in self._due}
        self._met: set[Site] = set()
        self.here = bool(self._due)

    def may_be_due(self, step: int) -> bool:
        """Whether the record has something in this step."""
        return step in self._steps

    def is_over(self, step: int) -> bool:
        """Whether the record has nothing any more."""
        return step > max(self._steps, default=-1)

    def missing(self, step: int, final: bool) -> str:
        """Whether something in the record was not done though its step is over."""
        left = sorted(site.step for site in self._due if site not in self._met and site.step < step)
        return f"{len(left)} recorded strikes were not met, the first at step {left[0]}" if left else ""

    def names(self, among: Iterable[str], step: int | None = None) -> tuple[str, ...]:
        """The names in the record."""
        offered = set(among)
        found = sorted({site.name for site in self._due if step in (None, site.step)})
        missing = [name for name in found if name not in offered]
        if missing:
            raise ConfigurationError(f"the record has hit {missing[0]}, which this job has not: is it another model?")
        return tuple(found)

    def strike(self, tensor: Tensor, name: str, moment: Moment) -> Strike | None:
        """Write the recorded bits, if this is a recorded moment.

        Raises:
            ConfigurationError: the tensor is another, or holds other bits than it did: the runs had parted before.
        """
        site = self._site(name, moment)
        recorded = self._due.get(site)
        if recorded is None:
            return None
        if tuple(tensor.shape) != recorded.shape or str(tensor.dtype) != recorded.dtype:
            raise ConfigurationError(
                f"the record has {recorded.dtype} {list(recorded.shape)} at {name}, step {site.step}, and this job {tensor.dtype} "
                f"{list(tensor.shape)}: it is another job"
            )
        indices, before, after = (unpack(text) for text in (recorded.indices, recorded.before, recorded.after))
        shape = (len(indices), -1) if len(before) != len(indices) else (len(indices),)
        found = mutate.words_of(tensor, indices)
        if not torch.equal(found.cpu().to(torch.int64), before.reshape(shape)):
            raise ConfigurationError(
                f"the record cannot be replayed: {name} holds other bits at step {site.step} than when it was hit. Same seed, same "
                "data, same number of ranks?"
            )
        damage.restore_(tensor, indices, after.reshape(shape))
        self.landed += 1
        self._met.add(site)
        return recorded


class Surveyed(Active):
    """Strikes nothing: looks at whatever it could strike, and keeps what is impossible about it."""

    def __init__(self, fault: Fault, number: int, seed: int) -> None:
        super().__init__(fault, number, seed, 0, 1 << 30)
        self.here = True
        self.reached = False
        self.problem = ""

    def may_be_due(self, step: int) -> bool:
        """Always, to see everything."""
        return True

    def missing(self, step: int, final: bool) -> str:
        """Nothing is."""
        return ""

    def strike(self, tensor: Tensor, name: str, moment: Moment) -> Strike | None:
        """Look, and leave it as it is."""
        self.reached = True
        try:
            self.check(tensor)
        except ConfigurationError as error:
            self.problem = self.problem or f"{error} (it was to hit {name})"
        return None


def made(site: Site, spec: str, node: str, tensor: Tensor, change: Change) -> Strike:
    """The record of a change."""
    first = int(change.indices[0])
    return Strike(
        site=site,
        spec=spec,
        node=node,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype),
        count=len(change),
        example={
            "index": first,
            "before": mutate.shown(change.before[:1], tensor.dtype),
            "after": mutate.shown(change.after[:1], tensor.dtype),
        },
        indices=pack(change.indices),
        before=pack(change.before),
        after=pack(change.after),
    )


def matching(glob: str, among: Iterable[str]) -> tuple[str, ...]:
    """The names that a glob matches, sorted; an empty one matches all but the empty name, which is the whole model."""
    if not glob:
        return tuple(sorted(name for name in among if name))
    return tuple(sorted(name for name in among if fnmatch.fnmatchcase(name, glob)))


def no_match(fault: Fault, among: Iterable[str]) -> str:
    """What to say where a glob matches nothing."""
    names = sorted(name for name in among if name)
    near = difflib.get_close_matches(fault.where.glob, names, 3, 0.3) or names[:5]
    offer = f"; there is {', '.join(near)}" + (f" and {len(names) - len(near)} more" if len(names) > len(near) else "")
    glob = fault.where.glob or "*"
    return f"{fault}: no {fault.where.target} matches {glob!r}" + (offer if names else "; there is none here")
