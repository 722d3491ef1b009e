"""Watching a scan: says what to repeat, notices who is missing, and ends it; computes nothing and needs no torch.

Ranks are told one thing only, `focus.json`. All else flows one way, from their files to the judge, so that a rank that dies,
hangs or never comes delays nobody, and the result is the same from whatever is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles, Sheet
from bitwitness.runfiles.files import write_json
from bitwitness.scan.concluding import Conclusion, conclude
from bitwitness.scan.following import Follower
from bitwitness.scan.golden import GoldenFile
from bitwitness.scan.judging import judge
from bitwitness.scan.launching import Launched, item_of, reported_loss
from bitwitness.scan.results import Judgement
from bitwitness.scan.settings import Settings

_LOOK = 2.0
_SHARE = 0.1
"""Of the coordinator's time that may go into looking: more ranks are looked at less often."""
_TICK = 0.1


@dataclass(frozen=True, slots=True)
class Patience:
    """How long who is missing is waited for, in seconds.

    Attributes:
        appear: for a rank to say who it is.
        silence: without a record, after which it is said.
        grace: after its time, for a rank to come to its end: also for one whose peers do not come or do not answer.
        stop: for ranks that were asked to stop.
    """

    appear: float = 300.0
    silence: float = 60.0
    grace: float = 120.0
    stop: float = 10.0


@dataclass(frozen=True, slots=True)
class State:
    """How a scan stands, for whoever looks on.

    Attributes:
        elapsed: seconds since the first rank began, 0.0 where none has.
        seconds: that each rank works.
        world, alive, ended: how many ranks there are to be, are at work, and have come to their end.
        calls, rate: calls so far, and per second.
        items: different ones computed so far.
        wrong: answers that are wrong, as far as can be judged now.
        messages: what has happened since the last time.
    """

    elapsed: float
    seconds: float
    world: int
    alive: int = 0
    ended: int = 0
    calls: int = 0
    rate: float = 0.0
    items: int = 0
    wrong: int = 0
    messages: tuple[str, ...] = ()


@dataclass(slots=True)
class _Rank:
    """What is known of one rank, by the clock of this process."""

    appeared: float
    last: str = ""
    heard: float = 0.0
    begun: float | None = None
    silent: bool = False
    ended: bool = False


def _tell_nobody(state: State) -> None:
    """Nobody looks on."""


@dataclass(slots=True)
class Coordinator:
    """Watches one scan, from its start to its result.

    Attributes:
        files, settings: of the scan.
        launched: the ranks of this machine.
        golden: answers that are known.
        told: is told how the scan stands.
        patience: with who is missing.
        asked: number of the signal by which it was asked to stop, 0 where it was not; set by whoever handles signals.
    """

    files: AnswerFiles
    settings: Settings
    launched: Launched
    golden: GoldenFile | None = None
    told: Callable[[State], None] = _tell_nobody
    patience: Patience = field(default_factory=Patience)
    asked: int = 0
    _ranks: dict[int, _Rank] = field(default_factory=dict)
    _focus: dict[str, dict[str, str]] = field(default_factory=dict)
    _messages: list[str] = field(default_factory=list)
    _said: set[str] = field(default_factory=set)
    _begun: float = 0.0
    _follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self._follower = Follower(self.files)

    def watch(self) -> Conclusion:
        """Watch until all have ended or are given up, and conclude.

        Raises:
            RunFilesError: the files of the scan cannot be read or written.
        """
        self._begun = time.monotonic()
        took = 0.0
        while True:
            before = time.monotonic()
            over = self._look()
            took = time.monotonic() - before
            if over or self.asked:
                break
            self._wait(max(_LOOK, took / _SHARE))
        if self.asked:
            self._stop()
        ended_as = self._how_they_ended()
        self.launched.kill()
        seconds = time.monotonic() - self._begun
        return conclude(
            self.files,
            self.settings,
            self._follower,
            golden=self.golden,
            ended_as=ended_as,
            seconds=seconds,
            interrupted=bool(self.asked),
        )

    # Looking --------------------------------------------------------------------------------------------------------

    def _look(self) -> bool:
        """Look at everything once; whether it is over."""
        running = self.launched.look()
        sheets = self._follower.sheets()
        now = time.monotonic()
        for sheet in sheets:
            self._note(sheet, now)
        judged = judge(sheets, self.golden, running=True)
        self._set_focus(judged)
        self._say_who_fails(judged)
        self.told(self._state(sheets, judged, now))
        return self._over(now, running=running)

    def _note(self, sheet: Sheet, now: float) -> None:
        """Take note of what has come from a rank."""
        number = sheet.device.rank
        rank = self._ranks.setdefault(number, _Rank(now, heard=now))
        if sheet.last != rank.last:
            if rank.silent:
                self._messages.append(f"rank {number} answers again")
            rank.last, rank.heard, rank.silent = sheet.last, now, False
        if rank.begun is None and sheet.last:
            rank.begun = now
        rank.ended = bool(sheet.ended)
        if sheet.ended not in ("", "done"):
            self._once(f"rank {number} on {sheet.device.node} ended: {sheet.ended}")
        quiet = not rank.ended and self._is_lost(number) == "" and now - rank.heard > self.patience.silence
        if quiet and not rank.silent:
            rank.silent = True
            self._messages.append(
                f"rank {number} on {sheet.device.node} has said nothing for {now - rank.heard:.0f} s; it is at {item_of(self.files, number)}"
            )

    def _set_focus(self, judged: Judgement) -> None:
        """Have all repeat what somebody got wrong; once in focus an item stays, so that who is right shows as well."""
        found: dict[str, dict[str, str]] = {kind: dict(items) for kind, items in self._focus.items()}
        for one in judged.devices:
            for finding in one.findings:
                found.setdefault(one.kind, {})[finding.item] = finding.expected
        if found != self._focus:
            together = {item: digest for items in found.values() for item, digest in items.items()}
            try:
                write_json(self.files.focus, {"items": together, "kinds": found})
            except (
                RunFilesError
            ) as error:  # a full disk must not lose what is known; it is tried again at the next look
                self._once(f"nobody can be told what to repeat: {error}", key="focus")
            else:
                self._focus = found

    def _say_who_fails(self, judged: Judgement) -> None:
        for one in judged.devices:
            if one.wrong:
                first = one.findings[0].item
                self._once(
                    f"rank {one.rank} on {one.node} gives wrong answers, first seen in {first}", key=f"w{one.rank}"
                )

    def _state(self, sheets: list[Sheet], judged: Judgement, now: float) -> State:
        begun = [rank.begun for rank in self._ranks.values() if rank.begun is not None]
        elapsed = now - min(begun) if begun else 0.0
        calls = sum(count for sheet in sheets for found in sheet.answers.values() for count in found.values())
        for number in range(self.settings.world):
            if lost := self._is_lost(number):
                self._once(f"rank {number} is lost: {lost}", key=f"l{number}")
        messages, self._messages = tuple(self._messages), []
        alive = [
            number for number, rank in self._ranks.items() if not (rank.ended or rank.silent or self._is_lost(number))
        ]
        return State(
            elapsed=elapsed,
            seconds=self.settings.seconds,
            world=self.settings.world,
            alive=len(alive),
            ended=sum(rank.ended for rank in self._ranks.values()),
            calls=calls,
            rate=calls / elapsed if elapsed else 0.0,
            items=len({item for sheet in sheets for item in sheet.answers}),
            wrong=sum(one.wrong for one in judged.devices),
            messages=messages,
        )

    def _over(self, now: float, *, running: bool) -> bool:
        """Whether nobody is waited for any more."""
        for number in range(self.settings.world):
            rank = self._ranks.get(number)
            if self._is_lost(number) or (rank is not None and rank.ended):
                continue
            if self._is_ours(number) and not running:
                continue
            if rank is None:
                if now - self._begun < self.patience.appear:
                    return False
            elif now - (rank.begun or rank.appeared) < self.settings.seconds + self.patience.grace:
                return False
        return True

    # Who is missing -------------------------------------------------------------------------------------------------

    def _is_ours(self, number: int) -> bool:
        share = self.launched.share
        return share.first <= number < share.first + share.count

    def _is_lost(self, number: int) -> str:
        """Why a rank will say no more that has ended otherwise than it should, as far as who started it has said so; "" else."""
        if self._is_ours(number):
            why = self.launched.why(number)
        else:
            why = "" if number in self._ranks else reported_loss(self.files, number)
        return f"{why} (it was at {item_of(self.files, number)})" if why and number in self._ranks else why

    def _how_they_ended(self) -> dict[int, str]:
        """Of each rank that has not come to its end by itself: why not."""
        ways = {}
        for number in range(self.settings.world):
            rank = self._ranks.get(number)
            lost = self._is_lost(number)
            if lost:
                ways[number] = lost
            elif rank is None:
                ways[number] = (
                    "the scan was interrupted before"
                    if self.asked
                    else f"within {self.patience.appear:.0f} s nobody with this number said who it is"
                )
            elif not rank.ended:
                what = (
                    "it did not stop when it was asked to"
                    if self.asked
                    else f"it was not done {self.patience.grace:.0f} s after its time"
                )
                ways[number] = f"{what}; it was at {item_of(self.files, number)}: it hangs, or its node is gone"
        return ways

    # Ending ---------------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Ask all to stop, here by a signal and elsewhere by a file, and wait for them, but not for long."""
        with suppress(RunFilesError):
            write_json(self.files.path / "stop.json", {"signal": self.asked})
        self.launched.terminate()
        until = time.monotonic() + self.patience.stop
        while time.monotonic() < until:
            running = self.launched.look()
            here = all(self._is_ours(number) for number in range(self.settings.world))
            if self._look() or (here and not running):
                break
            time.sleep(_TICK)
        self._look()

    def _wait(self, seconds: float) -> None:
        """Sleep, unless asked to stop or a rank ends."""
        until = time.monotonic() + seconds
        known = len(self.launched.codes)
        while time.monotonic() < until and not self.asked:
            time.sleep(_TICK)
            if not self.launched.look() or len(self.launched.codes) != known:
                return

    def _once(self, message: str, key: str = "") -> None:
        if (key or message) not in self._said:
            self._said.add(key or message)
            self._messages.append(message)
