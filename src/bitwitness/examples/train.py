"""One rank of the demo: the same training three times over, in one process.

Starting an interpreter with torch costs more than all the training that follows, so the clean run, the run with the fault
and no guard, and the run with both follow each other in one launch. Each starts from the same seed and takes the same
batches; what differs is the fault and the guard. What happens is written as events, one JSON object a line, to a file of
this rank's own; the parent process reads them and draws all conclusions.
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
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.errors import CorruptionDetected
from bitwitness.examples.demo import TRAININGS, Settings, Training, events_file
from bitwitness.examples.faults import Fault, Injection
from bitwitness.examples.gpt import GPT, GPTConfig, compute_loss
from bitwitness.examples.ranks import LISTENER
from bitwitness.examples.text import Corpus
from bitwitness.fingerprint import fingerprint_tensors
from bitwitness.guard.guard import Guard
from bitwitness.mutate import Landed
from bitwitness.policy import Policy

BATCH, LENGTH = 4, 64
LEARNING_RATE, MAX_GRAD_NORM = 3e-3, 1.0
TIMEOUT = 120.0


class Events:
    """The events of one rank, each with a kind."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def add(self, kind: str, **fields: Any) -> None:
        """Write one; it is in the file when this returns."""
        self._file.write(json.dumps({"event": kind, "time": time.time(), **fields}) + "\n")
        self._file.flush()


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
        self.module = GPT(GPTConfig(context=LENGTH))
        torch.manual_seed(settings.seed * 1_000_003 + self.rank + 1)  # dropout: different on each rank
        self.model = DistributedDataParallel(self.module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.updates = 0
        self.optimizer.register_step_post_hook(self._count_update)
        self.injection = Injection(
            Fault(**settings.fault_record()) if training.faulty and settings.fault != "none" else None,
            self.rank,
            self.module,
            self.optimizer,
            self._landed,
        )
        self.step = 0
        self._strikes = 0
        self.policy = Policy.every_step(audit="gradients", timeout=TIMEOUT)
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
        """All steps, or up to the step at which the guard stops."""
        outcome: dict[str, Any] = {"outcome": "finished"}
        try:
            for step in range(self.settings.steps):
                self.step = step
                self.injection.begin(step)
                self._one_step(self._batch(step, self.rank, 0))
        except CorruptionDetected as hit:
            outcome = {"outcome": "stopped", "verdict": hit.verdict.to_json(), "incident": str(hit.incident_path or "")}
        finally:
            self.injection.remove()
            if self.guard is not None:
                self.guard.close()
        weights = list(self.module.parameters())
        digest = hashlib.blake2b(fingerprint_tensors(weights).numpy().tobytes(), digest_size=12).hexdigest()
        validation = self._validation_loss()
        self.events.add(
            "end", training=self.training.name, updates=self.updates, digest=digest, validation=validation, **outcome
        )

    def _one_step(self, batch: Tensor) -> None:
        if self.guard is not None:
            loss = self.guard.forward_backward(batch)
            self._report(loss)
            self.guard.step(max_grad_norm=MAX_GRAD_NORM)
            return
        loss = compute_loss(self.model, batch)
        loss.backward()
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
            self.events.add("step", training=self.training.name, step=self.step, loss=mean, checks=checks)

    def _validation_loss(self) -> float:
        """Of these weights, on text that nobody trained on; the fault is gone, so it shows what it has left behind."""
        self.module.eval()
        with torch.no_grad():
            batch = self.corpus.validation_batch(self.rank, size=16, length=LENGTH)
            return _mean(compute_loss(self.module, batch))

    def _landed(self, where: str, landed: Landed) -> None:
        self._strikes += 1
        if self._strikes == 1:
            place = {"rank": self.rank, "step": self.step, "where": where, "selected": landed.selected}
            change = {"changed": landed.changed, "before": landed.before, "after": landed.after}
            self.events.add("landed", training=self.training.name, **place, **change)

    def _count_update(self, *_: Any) -> None:
        self.updates += 1


def _mean(value: Tensor) -> float:
    total = value.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def join() -> None:
    """Join the other ranks, on the port that the parent process holds open for rank 0."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listener = os.environ.get(LISTENER)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=TIMEOUT),
        master_listen_fd=int(listener) if listener is not None else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=TIMEOUT))


def main(run_dir: Path) -> None:
    """Run the trainings, then end without the interpreter's own shutdown, in which a gloo worker may die."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    settings = Settings.read(run_dir)
    join()
    events = Events(events_file(run_dir, dist.get_rank()))
    corpus = Corpus.standard_library()
    for training in TRAININGS:
        events.add("start", training=training.name)
        Run(settings, training, corpus, run_dir / training.name, events).run()
    dist.barrier()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
