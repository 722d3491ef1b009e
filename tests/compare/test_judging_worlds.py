"""In any number of made-up worlds nobody healthy is called wrong: whoever is bad, the leader too, two at once, and whatever is lost.

A world computes with words that stand for tensors. A fault makes a word of its own; what is computed from a wrong word is a wrong one,
and now and then all of them end alike (`nan`) or right again (masked), so that two broken devices may agree where a healthy one does
not. Modules keep something of the forward for the backward that nobody compares, as real ones do.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.compare import judging
from bitwitness.compare.judging import judged
from bitwitness.compare.records import MODES, Account, Difference, Mode, Participant, Role, Site, Step
from bitwitness.compare.results import Outcome
from bitwitness.runfiles.answers import Device

MODULES, STEPS = ("embed", "attn", "ffn"), 8
RIGHT = 0
NAN = -1


def site(module: str, phase: str) -> Site:
    return Site(module, phase, "0", 0, "float32", (8,))  # type: ignore[arg-type]


SITES = (
    *(site(module, phase) for module in MODULES for phase in ("fwd_in", "fwd_out")),
    site("", "loss"),
    *(site(module, phase) for module in reversed(MODULES) for phase in ("grad_out", "grad_in", "grad_w")),
    site("", "update"),
)


@dataclass
class Machine:
    """What one computes: words by site, after what it was made equal to."""

    name: str
    faults: Mapping[int, set[int]]
    random: random.Random
    weights: int = RIGHT
    kept: dict[str, int] = field(default_factory=dict)

    def mixed(self, *words: int) -> int:
        """Of wrong words a wrong one, the same for all who mix the same; some end alike, some right."""
        wrong = sorted({word for word in words if word != RIGHT})
        if not wrong:
            return RIGHT
        if NAN in wrong:
            return NAN
        fate = hash(tuple(wrong)) % 8
        return NAN if fate < 2 else RIGHT if fate == 2 else hash(tuple(wrong)) | 1

    def step(self, step: int, tape: Mapping[Site, int] | None, mode: Mode) -> dict[Site, int]:
        """The words that it computed, each before it is made equal to the tape's where the mode does that."""
        self.kept.clear()
        seen: dict[Site, int] = {}
        flow = RIGHT
        for number, where in enumerate(SITES):
            inside = self.kept.get(where.module, RIGHT)
            match where.phase:
                case "fwd_out":
                    self.kept[where.module] = word = self.mixed(flow, self.weights)
                case "grad_in" | "grad_w":
                    word = self.mixed(flow, inside)
                case "update":
                    word = self.mixed(
                        self.weights,
                        *(
                            seen[one] if mode != "lock-step" or tape is None else tape[one]
                            for one in seen
                            if one.phase == "grad_w"
                        ),
                    )
                case _:
                    word = flow
            if number in self.faults.get(step, set()):
                word = self.random.getrandbits(60) << 1 | 1
                self.kept[where.module] = self.mixed(self.kept.get(where.module, RIGHT), word)
            seen[where] = word
            if where.phase != "grad_w":
                flow = tape[where] if tape is not None and mode == "lock-step" else word
        self.weights = seen[SITES[-1]] if mode == "free" or tape is None else tape[SITES[-1]]
        return seen


def participants(references: int, suspects: int) -> list[Participant]:
    names: list[tuple[str, Role]] = [("leader", "leader")]
    names += [(f"reference-{number}", "reference") for number in range(1, references)]
    names += [(f"suspect-{number}", "suspect") for number in range(suspects)]
    return [Participant(name, role, Device(rank, "node", f"GPU-{rank}", {})) for rank, (name, role) in enumerate(names)]


def written(
    who: Participant, mode: Mode, words: Sequence[dict[Site, int]], tapes: Sequence[dict[Site, int]]
) -> Account:
    account = Account(who, mode, list(SITES), [tuple(range(len(SITES)))], ended="done")
    for step, (mine, tape) in enumerate(zip(words, tapes, strict=True)):
        found = tuple(
            Difference(number, 1, answer=str(mine[where]))
            for number, where in enumerate(SITES)
            if mine[where] != tape[where]
        )
        account.steps.append(Step(step, 0, differences=found))
    return account


def world(seed: int, bad: set[str], who: Sequence[Participant], often: float) -> dict[Mode, list[Account]]:
    dice = random.Random(seed)
    faults = {
        one.name: {
            step: {number for number in range(len(SITES)) if dice.random() < 0.15}
            for step in range(STEPS)
            if one.name in bad and dice.random() < often
        }
        for one in who
    }
    accounts: dict[Mode, list[Account]] = {}
    for mode in MODES:
        machines = [Machine(one.name, faults[one.name], random.Random(f"{seed} {one.name}")) for one in who]
        tapes = [machines[0].step(step, None, mode) for step in range(STEPS)]
        made = [[machine.step(step, tapes[step], mode) for step in range(STEPS)] for machine in machines[1:]]
        accounts[mode] = [written(one, mode, words, tapes) for one, words in zip(who, [tapes, *made], strict=True)]
    return accounts


def spoil(accounts: Mapping[Mode, list[Account]], seed: int) -> None:
    """Journals that are lost, that end early, and lines that are lost."""
    dice = random.Random(f"spoil {seed}")
    for some in accounts.values():
        for account in list(some):
            match dice.randrange(6):
                case 0:
                    some.remove(account)
                case 1:
                    del account.steps[dice.randrange(STEPS) :]
                    account.ended = dice.choice(["", "step 3: RuntimeError", "interrupted"])
                case 2:
                    del account.steps[dice.randrange(len(account.steps))]
                case _:
                    pass


def outcomes(accounts: Mapping[Mode, list[Account]], who: Sequence[Participant]) -> dict[str, Outcome]:
    return {one.name: judged(accounts, who, one.name, {"steps": STEPS}).outcome for one in who if one.role == "suspect"}


OFTEN = st.sampled_from([0.1, 0.4, 1.0])
WHOLE = settings(max_examples=120, deadline=None, derandomize=True)


@WHOLE
@given(
    seed=st.integers(0, 10**9),
    references=st.integers(2, 4),
    suspects=st.integers(1, 3),
    often=OFTEN,
    lost=st.booleans(),
    data=st.data(),
)
def test_no_healthy_suspect_is_called_wrong(
    seed: int, references: int, suspects: int, often: float, lost: bool, data: st.DataObject
) -> None:
    who = participants(references, suspects)
    bad = data.draw(st.sets(st.sampled_from([one.name for one in who]), max_size=2))
    accounts = world(seed, bad, who, often)
    if lost:
        spoil(accounts, seed)
    for name, outcome in outcomes(accounts, who).items():
        assert outcome != "differs" or name in bad, (name, bad)


@WHOLE
@given(seed=st.integers(0, 10**9), references=st.integers(2, 4), suspects=st.integers(1, 3), often=OFTEN)
def test_a_bad_suspect_among_healthy_references_is_found_and_no_other(
    seed: int, references: int, suspects: int, often: float
) -> None:
    who = participants(references, suspects)
    accounts = world(seed, {"suspect-0"}, who, often)
    struck = any(
        one.differences
        for one in next(one for one in accounts["lock-step"] if one.participant.name == "suspect-0").steps
    )
    expected: dict[str, Outcome] = {one.name: "nothing seen" for one in who if one.role == "suspect"}
    if struck:
        expected["suspect-0"] = "differs"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(judging, "CHANCE", 1.0)  # how often it must be is another question
        assert outcomes(accounts, who) == expected


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**9), references=st.integers(2, 4))
def test_a_leader_that_is_always_bad_leaves_nothing_to_say(seed: int, references: int) -> None:
    who = participants(references, 2)
    accounts = world(seed, {"leader"}, who, 1.0)
    found = outcomes(accounts, who)
    if any(one.differences for one in accounts["lock-step"][1].steps):
        assert set(found.values()) == {"not characterised"}


def test_the_worlds_are_as_nasty_as_they_are_said_to_be() -> None:
    """Two bad references do end alike where a healthy suspect does not: a rule that looked at single tensors would name it."""
    who, alike = participants(2, 1), 0
    for seed in range(200):
        for mode, (_, reference, suspect) in world(seed, {"leader", "reference-1"}, who, 0.5).items():
            for theirs, mine in zip(reference.steps, suspect.steps, strict=True):
                alike += (
                    bool({one.site for one in mine.differences} - {one.site for one in theirs.differences})
                    and mode != "free"
                )
    assert alike > 20
