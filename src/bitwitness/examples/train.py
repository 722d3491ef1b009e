"""One rank of the demo: the same training with and without fault and guard.

Starting an interpreter with torch costs more than all the training that follows, so the clean run and the one with the
fault and no guard follow each other in one launch. The third has both, and is a job under `bitwitness run`: this module is
then the script that it starts, which resumes, saves and is started again as any job would be. Each starts from the same seed
and takes the same batches. What happens is written as events, one JSON object a line, to a file of this rank's own; the
parent process reads them and draws all conclusions.
"""

from __future__ import annotations

import sys

from bitwitness.supervise.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent()  # before torch, whose import takes seconds

import hashlib
import json
import logging
import os
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import CorruptionDetected
from bitwitness.examples.faults import WIDTH
from bitwitness.examples.gpt import GPT, GPTConfig, compute_loss
from bitwitness.examples.plan import TRAININGS, Settings, Training, events_file
from bitwitness.examples.ranks import LISTENER
from bitwitness.examples.text import Corpus
from bitwitness.faults import choose, grammar
from bitwitness.faults.injector import Injector
from bitwitness.guard.guard import Guard
from bitwitness.policy import Policy

BATCH, LENGTH = 4, 64
LEARNING_RATE, MAX_GRAD_NORM = 3e-3, 1.0
TIMEOUT = 120.0
CHECKPOINTS_KEPT = 20
"""All that a demo saves: the report shows their labels."""


class Events:
    """The events of one rank, each with a kind, and with the number of the job's start."""

    def __init__(self, path: Path, generation: int) -> None:
        self.path, self._generation = path, generation
        self._file = path.open("a", encoding="utf-8")

    def add(self, kind: str, **fields: Any) -> None:
        """Write one; it is in the file when this returns."""
        common = {"event": kind, "time": time.time(), "generation": self._generation}
        self._file.write(json.dumps({**common, **fields}) + "\n")
        self._file.flush()

    def has(self, kind: str, training: str) -> bool:
        """Whether such an event was written, by this process or by one before it."""
        records = map(json.loads, self.path.read_text(encoding="utf-8").splitlines())
        return any(one["event"] == kind and one["training"] == training for one in records)


class Run:
    """One of the trainings, on this rank.

    Args:
        settings: of the demo.
        training: which of the three.
        corpus: what to train on.
        run_dir: the guard's files, if there is a guard.
        events: where to write what happens.
    """

    def __init__(self, settings: Settings, training: Training, corpus: Corpus, run_dir: Path, events: Events) -> None:
        self.settings, self.training, self.corpus, self.events = settings, training, corpus, events
        self.rank = dist.get_rank()
        torch.manual_seed(settings.seed)
        self.module = GPT(GPTConfig(width=WIDTH, context=LENGTH))
        torch.manual_seed(settings.seed * 1_000_003 + self.rank + 1)  # dropout: different on each rank
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.updates = 0
        self.injector = self._injector()
        self.step = 0
        self._told = False
        self.policy = Policy.every_step(
            audit="gradients",
            timeout=TIMEOUT,
            checkpoint_every=settings.checkpoint_every if training.supervised else 0,
            keep_checkpoints=CHECKPOINTS_KEPT,
        )
        self.guard: Guard | None = None
        if training.guarded:
            self.guard = Guard(
                self.model,
                self.optimizer,
                compute_loss,
                run_dir=run_dir,
                policy=self.policy,
                rebuild_batch=self._batch,
            )

    def run(self) -> None:
        """All steps from the first, or from the newest checkpoint, or up to the one at which the guard stops.

        Raises:
            CorruptionDetected: in the supervised training, whose supervisor is to see it.
        """
        try:
            with self.injector:
                self.optimizer.register_step_post_hook(
                    self._updated
                )  # after the injector's own, so it has struck by then
                for step in range(self._resume(), self.settings.steps):
                    self.step = step
                    self._one_step(self._batch(step, self.rank, 0))
                    self._save_if_due(step)
        except CorruptionDetected as hit:
            self._add(
                "stopped", updates=self.updates, verdict=hit.verdict.to_json(), incident=str(hit.incident_path or "")
            )
            if self.training.supervised:
                raise
        finally:
            if self.guard is not None:
                self.guard.close()
        self._add("end", updates=self.updates, digest=digest_of(self.module), validation=self._validation_loss())

    def _resume(self) -> int:
        if self.guard is None or not self.training.supervised:
            return 0
        self.updates = self.guard.resume()
        if self.updates:
            self._add("resumed", step=self.updates)
        return self.updates

    def _save_if_due(self, step: int) -> None:
        if self.guard is not None and self.training.supervised and (step + 1) % self.settings.checkpoint_every == 0:
            self.guard.save_checkpoint()
            if self.rank == 0:
                self._add("saved", step=step + 1)

    def _one_step(self, batch: Tensor) -> None:
        if self.guard is not None:
            loss = self.guard.forward_backward(batch)
            self._tell_strike()
            self._report(loss)
            self.guard.step(max_grad_norm=MAX_GRAD_NORM)
            return
        loss = compute_loss(self.model, batch)
        loss.backward()
        self._tell_strike()
        self._report(loss.detach())
        nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _batch(self, step: int, rank: int, micro: int) -> Tensor:
        return self.corpus.batch(self.settings.seed, step, rank, micro, size=BATCH, length=LENGTH)

    def _report(self, loss: Tensor) -> None:
        """The mean of all ranks' losses, as any training log has it."""
        mean = _mean(loss)
        if self.rank == 0:
            due = 1 + self.policy.audit_due(self.step) + self.policy.replicas_due(self.step)
            checks = due * dist.get_world_size() if self.guard is not None else 0
            self._add("step", step=self.step, loss=mean, checks=checks)

    def _validation_loss(self) -> float:
        """Of these weights, on text that nobody trained on; the fault is gone, so it shows what it has left behind."""
        self.module.eval()
        with torch.no_grad():
            batch = self.corpus.validation_batch(self.rank, size=16, length=LENGTH)
            return _mean(compute_loss(self.module, batch))

    def _injector(self) -> Injector:
        """What goes wrong in this training. What strikes once has done so if an earlier start of the job says so."""
        line = self.settings.fault_line if self.training.faulty else ""
        return Injector(
            [line] if line else [],
            self.model,
            self.optimizer,
            seed=self.settings.seed,
            node=os.environ["BITWITNESS_NODE"],
            landed={0: ()} if self.events.has("landed", self.training.name) else None,
        )

    def _tell_strike(self) -> None:
        """How the fault has struck first, as soon as it has."""
        if self._told or not self.injector.strikes:
            return
        self._told = True
        strike = self.injector.strikes[0]
        select = grammar.parse(strike.spec).select  # all that the demo has select as many in any tensor of this shape
        selected = choose.indices(select, torch.zeros(strike.shape), random.Random(0), torch.Generator(), None)  # noqa: S311
        self._add(
            "landed",
            fault=strike.spec,
            rank=self.rank,
            step=strike.site.step,
            where=self.settings.fault_words,
            selected=len(selected),
            changed=strike.count,
            before=strike.example["before"],
            after=strike.example["after"],
        )

    def _updated(self, *_: Any) -> None:
        self.updates += 1
        self._tell_strike()

    def _add(self, kind: str, **fields: Any) -> None:
        self.events.add(kind, training=self.training.name, **fields)


def digest_of(module: nn.Module) -> str:
    """SHA-256 of all parameters and buffers, bit for bit."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _mean(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def join(supervised: bool) -> None:
    """Join the other ranks: as torchrun says, or on the port that the parent process holds open for rank 0."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener, timeout = os.environ.get(LISTENER), timedelta(seconds=TIMEOUT)
    if supervised:
        dist.init_process_group("gloo", timeout=timeout)
        return
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(listener) if listener is not None else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)


def main(run_dir: Path, names: Sequence[str]) -> None:
    """Run the trainings of these names, one after the other."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    settings = Settings.read(run_dir)
    trainings = [training for training in TRAININGS if training.name in names]
    supervised = any(training.supervised for training in trainings)
    join(supervised)
    generation = int(os.environ["BITWITNESS_GENERATION"]) if supervised else 1
    events = Events(events_file(run_dir, dist.get_rank()), generation)
    corpus = Corpus.standard_library()
    for training in trainings:
        events.add("start", training=training.name)
        Run(settings, training, corpus, run_dir / training.name, events).run()
    dist.barrier()
    if not supervised:  # under `bitwitness run` the worker ends itself likewise
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without the interpreter's own shutdown, in which a gloo worker may die


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
