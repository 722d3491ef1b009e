"""A comparison as it runs: all participants through all modes, one step after the other.

The order of a step and nothing of how a tensor is compared: the leader records, the tape is shared, all others follow. In one process
all seats are here; under torchrun each process has one, and sharing is a collective at a fixed place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from bitwitness.compare.exchange import Alone, Exchange
from bitwitness.compare.participant import Fault, Runner, Seat
from bitwitness.compare.records import CompareFiles, Mode, begins_anew
from bitwitness.compare.settings import Settings
from bitwitness.compare.tape import Tape
from bitwitness.guard.rewind import deterministic, random_state_kept
from bitwitness.scan.work import CUBLAS

__all__ = ["Fault", "Lineup", "Progress", "Runner", "Seat", "one_thread", "settled"]

Progress = Callable[[Mode, int], None]
"""Is told after each step: the mode, and how many steps of it are done."""


class Lineup:
    """All participants of a comparison that this process runs.

    Args:
        seats: of this process; in all processes together there are one leader, at least one more reference and a suspect.
        settings: of the comparison.
        files: where journals go; its folders are there.
        exchange: how a tape comes from the leader; in one process it is at hand.
    """

    def __init__(
        self, seats: Sequence[Seat], settings: Settings, files: CompareFiles, exchange: Exchange | None = None
    ) -> None:
        self.seats, self.settings, self.files = tuple(seats), settings, files
        self.exchange: Exchange = Alone() if exchange is None else exchange

    def run(self, progress: Progress | None = None) -> None:
        """Run all modes. What is interrupted leaves the journals of all steps that were done.

        Raises:
            BitwitnessError: the workload cannot be made, another participant does not answer, or a journal cannot be written.
        """
        with settled(self.seats):
            for mode in self.settings.modes:
                self._run(mode, progress)

    def _run(self, mode: Mode, progress: Progress | None) -> None:
        seats = [seat for seat in self.seats if mode == "free" or seat.participant.role != "control"]
        runners: list[Runner] = []
        why = "interrupted"
        try:
            for seat in seats:
                journal = self.files.journal(seat.participant, mode)
                runners.append(Runner(seat, mode, self.settings, journal))
            leader = next((one for one in runners if one.seat.participant.role == "leader"), None)
            for step in range(self.settings.steps):
                if begins_anew(mode, step, self.settings.steps):
                    for runner in runners:
                        runner.begin_anew(step)
                tape = self.exchange.share(None if leader is None else leader.record(step))
                self._follow(runners, step, tape)
                if progress is not None:
                    progress(mode, step + 1)
                if tape.lost:
                    break
            why = "done"
        finally:
            with ExitStack() as stack:  # all of them, whatever one ends in
                for runner in reversed(runners):
                    stack.callback(runner.end, why)

    def _follow(self, runners: Sequence[Runner], step: int, tape: Tape) -> None:
        """In another order at each step: what a process does differently the third time it is asked is nobody's fault."""
        others = [runner for runner in runners if runner.seat.participant.role != "leader"]
        first = step % len(others) if others else 0
        for runner in (*others[first:], *others[:first]):
            runner.follow(step, tape)


def settled(seats: Sequence[Seat]) -> ExitStack:
    """Surroundings in which equal devices give equal bits: deterministic algorithms; all generators are as before afterwards."""
    stack = ExitStack()
    devices = {seat.device for seat in seats}
    if any(device.type == "cuda" for device in devices):
        os.environ.setdefault(*CUBLAS)
    stack.enter_context(deterministic(True))
    for device in devices or {torch.device("cpu")}:
        stack.enter_context(random_state_kept(device, ()))
    return stack


@contextmanager
def one_thread() -> Iterator[None]:
    """How many threads there are decides how sums are divided, and so their bits; participants of one machine share its cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
