"""What guarding costs: the same training with and without a guard, step by step in turn, in one process.

One process, because what is asked is the time of the checks and not that of a scheduler that has to fit several ranks on
few cores; collectives are therefore none of it. DDP is real, with the guard in its communication hook, and a replay, which
in a job goes to a witness on another node, goes to oneself: the work is the same. Both trainings start alike, take the
same batches, and must end with equal bits.
"""

from __future__ import annotations

import copy
import logging
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import ConfigurationError
from bitwitness.examples.costs import Account, Report, Sample
from bitwitness.examples.gpt import GPT, GPTConfig, compute_loss
from bitwitness.examples.meters import ORDER, TRAINING, Clock, Probe, Scale, Seconds, watched
from bitwitness.examples.text import Corpus
from bitwitness.guard.checks.replay import Replay
from bitwitness.guard.guard import Guard
from bitwitness.guard.start import facts_of_rank
from bitwitness.policy import Policy

_TIME = 45.0
"""Seconds of measured steps, unless a number of steps is asked for."""
_FEWEST, _MOST = 2, 10
_ROUND = 4
"""Guarded steps in a round; half of them are audited."""


@dataclass(frozen=True)
class Size:
    """What is trained: a GPT in fp32, or under bf16 autocast, with dropout off, whose kernels are slow on a CPU."""

    tokens: int = 4096
    context: int = 256
    width: int = 256
    layers: int = 4
    threads: int = 2
    autocast: bool = False

    def __post_init__(self) -> None:
        if self.tokens % self.context:
            raise ConfigurationError(f"{self.tokens} tokens are no whole number of sequences of {self.context}")
        if self.width % self.heads:
            raise ConfigurationError(
                f"width {self.width} is not a multiple of {self.heads} heads: take a multiple of 64"
            )

    @property
    def heads(self) -> int:
        """Heads of 64, as GPUs are given."""
        return max(1, self.width // 64)


Samples = defaultdict[str, list[Sample]]


def measure(size: Size, steps: int | None, progress: Callable[[float], None]) -> Report:
    """Train, and say what the guard cost.

    Args:
        size: what is trained.
        steps: guarded steps, at least this many; without it as many as fit into a minute, but a few.
        progress: called with the fraction done.

    Raises:
        ConfigurationError: a process group exists already.
    """
    if dist.is_initialized():
        raise ConfigurationError("the measurement makes its own process group, and this process has one already")
    load, started = os.getloadavg()[0], time.perf_counter()
    rounds = _MOST if steps is None else -(-steps // _ROUND)
    with _prepared(size) as contest:
        begun = time.perf_counter()
        for done in range(rounds):
            taken = time.perf_counter() - begun
            if steps is None and done >= _FEWEST and taken * (1 + 1 / done) > _TIME:
                break
            progress(done / rounds if steps is not None or not done else max(done / rounds, taken / _TIME))
            contest.round()
        peaks = contest.weigh()
        progress(1.0)
        account = Account(contest.samples, peaks)
        return Report(
            machine={**_machine(size), "load": round(load, 2)},
            model=_model(size, contest.guarded.module),
            steps={name: len(found) for name, found in contest.samples.items()},
            seconds=round(time.perf_counter() - started, 1),
            step=account.step_milliseconds(),
            checks=account.checks(),
            replays=[
                account.replay("loss", "forward", 1.15),
                account.replay("gradients", "forward + backward", 1.10),
            ],
            whole_steps=account.whole_steps(),
            equal_bits=contest.equal_bits(),
        )


@contextmanager
def _prepared(size: Size) -> Iterator[_Contest]:
    threads, logger = torch.get_num_threads(), logging.getLogger("bitwitness")
    level = logger.level
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(size.threads)
        stack.callback(logger.setLevel, level)
        logger.setLevel(logging.ERROR)  # what a job of one process cannot do is known here
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bitwitness-bench-"))
        contest = _Contest(size, folder)
        stack.callback(contest.guard.close)
        stack.enter_context(watched(contest.guard, contest.guarded.optimizer, contest.probe))
        yield contest


class _Training:
    """A model under DDP with its optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ddp = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)


class _Contest:
    """The two trainings, and a third copy of the model that only runs forward and backward."""

    def __init__(self, size: Size, folder: str) -> None:
        self.size = size
        self.probe = Probe()
        self.samples: Samples = defaultdict(list)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            module = GPT(GPTConfig(size.layers, size.heads, size.width, size.context, dropout=0.0))
        self.plain, self.guarded, self.bare = _Training(copy.deepcopy(module)), _Training(module), copy.deepcopy(module)
        self._corpus = Corpus.standard_library()
        self._taken = 0
        # Audits at every other step, the loss and the gradients in turn, so that a short run has many of them.
        policy = Policy(audit="gradients", audit_every=2, check_every=2)
        self.guard = Guard(self.guarded.ddp, self.guarded.optimizer, self._loss, policy=policy, run_dir=folder)
        self._replay = next(check for check in self.guard.checks if isinstance(check, Replay))
        for level in ("loss", "gradients"):
            for _ in range(2):
                self._pair(level)
        self._run_bare(self._batch(0), backward=True)
        self.samples.clear()

    def round(self) -> None:
        """Both kinds of audits, with what they recompute beside them, and as many steps without."""
        self._pair("loss")
        self._pair("loss", "forward")
        self._pair("gradients")
        self._pair("gradients", "forward + backward")

    def weigh(self) -> dict[str, dict[str, float]] | None:
        """The peaks in MiB by label, for each kind of step; None where this system cannot tell."""
        scale = Scale()
        if not scale.works():
            return None
        clock, self.probe.meter = self.probe.meter, scale
        timed, self.samples = self.samples, defaultdict(list)
        peaks = {}
        for kind in ("plain", "loss", "plain", "gradients"):
            scale.begin()
            self._pair("loss" if kind == "plain" else kind)
            peaks[kind] = scale.take()
        for kind in ("forward", "forward + backward"):
            scale.begin()
            with scale.span(TRAINING):
                self._run_bare(self._batch(0), backward="backward" in kind)
            peaks[kind] = scale.take()
        self.probe.meter, self.samples = clock, timed
        return peaks

    def equal_bits(self) -> bool:
        """Whether both trainings hold the same bits."""
        pairs = zip(self.plain.module.parameters(), self.guarded.module.parameters(), strict=True)
        return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in pairs)

    def _pair(self, level: str, bare: str = "") -> None:
        """One step of each training, the order changing, on the same batch; and what an audit recomputes."""
        batch = self._batch(self._taken)
        audited = self.guard.policy.audit_due(self._taken)
        self._replay.level = "gradients" if level == "gradients" else "loss"
        runs = [
            ("unguarded", lambda: self._step(batch)),
            (level if audited else "plain", lambda: self._guarded_step(batch)),
        ]
        if bare:
            runs.append((bare, lambda: self._run_bare(batch, backward="backward" in bare)))
        for name, run in runs if (self._taken // 2 + self._taken // 4) % 2 else reversed(runs):
            self.samples[name].append(self._timed(run))
        self._taken += 1

    def _batch(self, index: int) -> Tensor:
        return self._corpus.batch(index, size=self.size.tokens // self.size.context, length=self.size.context)

    def _timed(self, run: Callable[[], None]) -> Sample:
        start = Seconds(time.perf_counter(), time.process_time())
        run()
        whole = Seconds(time.perf_counter() - start.wall, time.process_time() - start.processor)
        meter = self.probe.meter
        return Sample(whole, meter.take() if isinstance(meter, Clock) else {})

    def _loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        precision = torch.autocast("cpu", torch.bfloat16) if self.size.autocast else nullcontext()
        with self.probe.meter.span(TRAINING), precision:
            return compute_loss(model, batch)

    def _step(self, batch: Tensor) -> None:
        self._loss(self.plain.ddp, batch).backward()
        torch.nn.utils.clip_grad_norm_(self.plain.module.parameters(), 1.0)
        self.plain.optimizer.step()
        self.plain.optimizer.zero_grad()

    def _guarded_step(self, batch: Tensor) -> None:
        with self.probe.meter.span(TRAINING):  # to which freeing the graph belongs, at the end
            self.guard.forward_backward(batch)
        with self.probe.meter.span(ORDER):
            self.guard.step(max_grad_norm=1.0)

    def _run_bare(self, batch: Tensor, backward: bool) -> None:
        loss = self._loss(self.bare, batch)
        if backward:
            loss.backward()
        for parameter in self.bare.parameters():
            parameter.grad = None


def _machine(size: Size) -> dict[str, Any]:
    facts = facts_of_rank(0, torch.device("cpu"))
    return {
        "processor": facts["model"],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": size.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _model(size: Size, module: nn.Module) -> dict[str, Any]:
    parameters = list(module.parameters())
    return {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "tensors": len(parameters),
        **asdict(size),
    }
