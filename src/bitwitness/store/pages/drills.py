"""The page of drills and false alarms: whether the detectors fire, and whether they cry wolf."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bitwitness.store.pages.rows import IncidentRow


@dataclass(frozen=True, slots=True)
class DrillRow:
    """A fault that was injected on purpose, and what came of it.

    Attributes:
        time: when it struck.
        run, run_name, run_path: in which run.
        fault: in a line, as the grammar has it.
        rank, node, step: where it struck.
        outcome: `caught` (named right), `caught, unattributed`, `named wrongly`, `missed` or `unclear`.
        check: which one saw it, or "".
        incident: its id, or "".
        late: steps between strike and detection; None where it was not caught.
    """

    time: str
    run: int
    run_name: str
    fault: str
    rank: int
    node: str
    step: int
    outcome: str
    check: str
    incident: str
    late: int | None
    run_path: str = ""


@dataclass(frozen=True, slots=True)
class CheckTally:
    """How often a check passed where nothing was wrong.

    Attributes:
        check: the detector.
        passed: rank-steps that passed.
        false_alarms: incidents of it that a person called false.
        bound: upper bound (95 %) on false alarms per rank-step, 3/n where there was none; None where nothing passed.
    """

    check: str
    passed: int
    false_alarms: int
    bound: float | None


@dataclass(frozen=True, slots=True)
class DrillsPage:
    """Whether the detectors fire, and whether they cry wolf.

    Attributes:
        drills: newest first, of this page of the list.
        total, page, pages: of that list.
        outcomes: outcome -> how many.
        false_alarms: incidents that a person called false, newest first.
        unjudged: incidents of which nobody has said yet what they were, so that nobody knows; also such as a person has acted upon.
        tallies: by check.
    """

    drills: tuple[DrillRow, ...]
    total: int
    page: int
    pages: int
    outcomes: Mapping[str, int]
    false_alarms: tuple[IncidentRow, ...]
    unjudged: int
    tallies: tuple[CheckTally, ...]
