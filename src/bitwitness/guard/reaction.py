"""What is done about corruption: the policy's word, agreed upon by all ranks.

Apart from the guard because it is a decision and no part of the order of a step: what is possible depends only on where in a
step the corruption was seen, how often it was seen before, and what the policy says.
"""

from __future__ import annotations

from pathlib import Path

from bitwitness.errors import GuardFailure
from bitwitness.evidence import Verdict
from bitwitness.guard.job import Job, Step
from bitwitness.guard.rewind import random_state_kept
from bitwitness.policy import REACTIONS, Reaction


def choose(
    job: Job, step: Step, verdict: Verdict, incident: Path | None, before_update: bool, skips: int
) -> tuple[Reaction, str]:
    """What to do, the same on every rank, and why it is not what the policy says, if it is not.

    Args:
        job: the guarded job.
        step: the step under way.
        verdict: not clean.
        incident: its directory, if it could be written.
        before_update: whether the weights are still what they were before this step.
        skips: how many updates in a row have been dropped so far.
    """
    wanted, note = _wanted(job, verdict, incident)
    if wanted == "retry":
        return _retry(job, step, verdict, before_update, note)
    if wanted == "skip" and not before_update:
        return "raise", "It was seen after the update, which therefore could not be skipped"
    if wanted == "skip" and skips >= job.policy.max_skips:
        return "raise", f"{skips} updates in a row had been skipped already (max_skips={job.policy.max_skips})"
    return wanted, note


def _retry(job: Job, step: Step, verdict: Verdict, before_update: bool, note: str) -> tuple[Reaction, str]:
    if not before_update:
        return "raise", "It was seen after the update, so the step could not be run again"
    if step.retried:
        return "raise", "The step was run again and was wrong again"
    if verdict.persistence == "persistent":
        return "raise", "The step was not run again, because the fault persists"
    if not job.can_rerun:
        return "raise", "The step could not be run again: that needs loss_fn="
    return "retry", note


def _wanted(job: Job, verdict: Verdict, incident: Path | None) -> tuple[Reaction, str]:
    """What the policy says. A function of the user's is asked on every rank; where it fails or they differ, raise."""
    said = job.policy.on_detection
    if not callable(said):
        return said, ""
    function = said

    def ask() -> str:
        try:
            with random_state_kept(job.device, job.workload.generators):
                answer: object = function(verdict, incident)
            return answer if isinstance(answer, str) and answer in REACTIONS else f"returned {answer!r:.200}"
        except Exception as error:  # noqa: BLE001  (corruption is known: no mistake of a callback may hide it)
            return f"raised {type(error).__name__}: {error}"

    try:
        answers = job.channel.gather("on_detection", ask)
    except GuardFailure as failure:  # nor may a rank that is lost meanwhile
        return "raise", f"on_detection could not be asked on every rank: {failure}"
    if len(set(answers)) > 1:
        return "raise", f"on_detection did not say the same on every rank ({', '.join(sorted(set(answers))[:3])})"
    chosen = next((known for known in REACTIONS if known == answers[0]), None)
    if chosen is None:
        return "raise", f"on_detection {answers[0]}: it must return one of {', '.join(REACTIONS)}"
    return chosen, ""
