"""Which acts wait for a person, and whether the person has said yes to exactly this one.

An approval is of what was shown: the act, the node, its machine then, the incident, and the proposal as it was worded. It opens no
other door: budgets, quiet hours, protection and every look at the node count after it as before.
"""

from __future__ import annotations

from bitwitness.fleet.budget import Hold
from bitwitness.fleet.clusters.base import Act, ActKind
from bitwitness.fleet.kept import RETURNED, Book, Kept
from bitwitness.fleet.kept_answers import Question, Questions, digest_of
from bitwitness.fleet.notify import answer_commands
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.state import State


class Approver:
    """Knows what was asked and answered.

    Args:
        book: what is kept.
        policy: which acts wait.
        real: whether a person can answer; nobody can in a rehearsal, whose state is a copy.
    """

    def __init__(self, book: Book, policy: FleetPolicy, *, real: bool = True) -> None:
        self._policy, self._state, self._real = policy, book.state, real
        self.questions = Questions(book.state)

    def needs(self, kind: ActKind) -> bool:
        """Whether an act of this kind waits for a person."""
        return kind in self._policy.approve

    def concerns(self, kept: Kept) -> bool:
        """Whether a proposal may have to wait: by what is proposed, or by the drain that it may become."""
        return bool({kept.proposal.act, "drain"} & self._policy.approve)

    def standing(self, kept: Kept) -> Question | None:
        """The question about a proposal, if that is still what was shown."""
        question = self.questions.of(kept.key)
        if question is None or question.digest != digest_of(kept, question.act, question.machine):
            return None
        return question

    def hold(self, kept: Kept) -> Hold | None:
        """That a proposal waits for an answer; None where none is wanted, there is one, or it has to be asked for first."""
        if not self.concerns(kept):
            return None
        question = self.standing(kept)
        if question is None or question.said or not self.needs(question.act):
            return None
        return Hold("approval", self.text(question))

    def text(self, question: Question) -> str:
        """That an answer is wanted, in a sentence."""
        if not self._real:
            return f"the {question.act} of {question.node} would wait for a person's answer (approve)"
        return asking(question, str(self._state.folder))

    def held(self, kept: Kept, text: str) -> str:
        """What holds a proposal, after who has approved it, if somebody has: that it is held does not mean that it is not approved."""
        question = self.standing(kept)
        if question is None or question.said != "approved" or not self.needs(question.act):
            return text
        return f"approved by {question.who} at {question.answered}; held: {text}"

    def allows(self, kept: Kept, kind: ActKind, machine: str) -> bool:
        """Whether an act may be begun as far as people are concerned."""
        if not self.needs(kind):
            return True
        question = self.standing(kept)
        return (
            question is not None and question.said == "approved" and (question.act, question.machine) == (kind, machine)
        )

    def changed(self, kept: Kept, kind: ActKind, machine: str) -> str:
        """Why what was asked before counts no more; "" where nothing was."""
        question = self.questions.of(kept.key)
        if question is None:
            return ""
        if question.act != kind:
            return f"it is a {kind} now, and no {question.act}"
        if question.machine != machine:
            return f"{question.node} is another machine now: {machine or 'an unknown one'}, not {question.machine or 'the unknown one'}"
        return "what is proposed was worded anew"


def asking(question: Question, state: str) -> str:
    """That an answer is wanted, in a sentence, with the commands. Pure."""
    yes, no = answer_commands(question.name, state)
    return f"the {question.act} of {question.node} waits for a person's answer: {yes} - or: {no}"


def act_of(state: State, question: Question) -> Act:
    """The act that is asked about, as the controller would ask for it."""
    kept = Book(state).proposals(key=question.proposal)[0]
    about = kept.proposal
    return Act(question.act, about.node, about.incident, about.reason, about.devices, kept.number >= RETURNED)
