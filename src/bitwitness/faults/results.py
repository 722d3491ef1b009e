"""One result from the accounts of all ranks of a cell, and from the files that the guard has left.

Which rank's word counts is decided here and nowhere else: when one ends, the others fail for want of it, so how a cell
ended is told by the first who had a cause of its own. No torch: the files speak for themselves.
"""

from __future__ import annotations

import hashlib
import json
import math
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from bitwitness.errors import RunFilesError
from bitwitness.faults.cells import CellResult, CellSpec, End
from bitwitness.faults.job import Shape
from bitwitness.runfiles import RunFiles
from bitwitness.runfiles.checkpoints import checkpoint_step
from bitwitness.runfiles.label import distrust, read_label, verify_files
from bitwitness.runfiles.run import read_incident

STRIKES_KEPT = 100
_BITS_KEPT = 4096
"""Characters of a strike's bits that a result holds; the record of a cell whose files are kept has all of them."""

_BITS = ("indices", "before", "after")

_OF_THE_GUARD = ("checkpoint_every", "rebuild", "ranks_per_node")
"""Options that change nothing in what is trained."""

_OWN_CAUSE = ("detected", "refused", "not_landed", "crash")

Record = dict[str, Any]


def weights_name(spec: CellSpec) -> str:
    """The file of the clean run's final parameters: the same for all cells of a job, its options and a seed."""
    options = {name: value for name, value in spec.options.items() if name not in _OF_THE_GUARD}
    decides = json.dumps([spec.factory, options, spec.seed], sort_keys=True)
    return f"clean-{hashlib.blake2b(decides.encode(), digest_size=10).hexdigest()}.pt"


def account_path(folder: Path, rank: int) -> Path:
    """The file of a rank's account."""
    return folder / f"rank-{rank:05d}.jsonl"


def strikes_path(folder: Path, rank: int) -> Path:
    """The file in which a rank's injector records what it has changed."""
    return folder / f"strikes-{rank:05d}.jsonl"


def gather(
    spec: CellSpec, shape: Shape, folder: Path, codes: Mapping[int, int], hung: bool, seconds: float
) -> CellResult:
    """The result of a cell whose ranks have all ended.

    Args:
        spec: what was asked for.
        shape: of its job.
        folder: the cell's own.
        codes: the ranks' exit codes.
        hung: whether it was killed at the deadline.
        seconds: it took.
    """
    accounts = [_read(account_path(folder, rank)) for rank in range(shape.ranks)]
    steps = [_of_kind(account, "step") for account in accounts]
    end, error = _end(folder, accounts, codes, hung)
    error = error.replace(f"{folder}/", "")  # it is gone when somebody reads this
    files = RunFiles(folder / "run")
    verdicts = _verdicts(files, accounts)
    checkpoints = _checkpoints(files, accounts)
    refused = next((one for one in checkpoints if one["problem"]), None)
    strikes = [strike for rank in range(shape.ranks) for strike in _read(strikes_path(folder, rank))]
    strikes.sort(key=lambda strike: int(strike["site"]["step"]))
    drift = next((one["drift"] for one in _of_kind(accounts[0], "drift")), None)
    return CellResult(
        key=spec.key,
        end=end,
        error=error,
        verdict=verdicts[0] if verdicts else None,
        caught_step=verdicts[0]["step"] if verdicts else refused["step"] - 1 if refused else None,
        caught_by=str(verdicts[0]["check"]) if verdicts else "checkpoint" if refused else "",
        verdicts=tuple(verdicts),
        strikes=tuple(_shortened(strike) for strike in strikes[:STRIKES_KEPT]),
        struck=len(strikes),
        struck_ranks=tuple(sorted({int(strike["site"]["rank"]) for strike in strikes})),
        first_step=int(strikes[0]["site"]["step"]) if strikes else None,
        losses=_means(steps, "loss"),
        norms=_means(steps, "norm"),
        digests=tuple(tuple(one["digest"] for one in of_rank if one["digest"]) for of_rank in steps),
        updates=sum(one["updated"] for one in steps[0]),
        checkpoints=tuple(checkpoints),
        evaluation=_evaluation(accounts),
        drift=drift,
        seconds=seconds,
    )


# How it ended --------------------------------------------------------------------------------------------------------


def _end(folder: Path, accounts: Sequence[list[Record]], codes: Mapping[int, int], hung: bool) -> tuple[End, str]:
    """How a cell ended, and the message if it was an error.

    The first cause counts. Of a rank that was killed because others had failed nothing is known, and nothing is said.
    """
    ends = [
        {**one, "rank": rank}
        for rank, account in enumerate(accounts)
        for one in _of_kind(account, "end")
        if one["end"] != "finished"
    ]
    for candidates in (_OWN_CAUSE, ("guard_failure",)):
        found = [one for one in ends if one["end"] in candidates]
        if found:
            first = min(found, key=lambda one: float(one["time"]))
            return cast("End", first["end"]), f"rank {first['rank']}: {first['error']}"
    silent = [rank for rank, account in enumerate(accounts) if not _of_kind(account, "end")]
    by_itself = [rank for rank in silent if codes.get(rank) not in (None, -signal.SIGKILL)]
    if by_itself:
        rank = by_itself[0]
        return "crash", f"rank {rank} {_how(codes[rank])}\n{_tail(folder / f'rank-{rank:05d}.log')}"
    if hung:
        return "hang", f"killed at the deadline; ranks {', '.join(map(str, silent))} had not ended"
    if ends or silent:
        words = f"rank {ends[0]['rank']}: {ends[0]['error']}" if ends else f"ranks {silent} were killed"
        return "crash", words
    return "finished", ""


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _tail(log: Path, characters: int = 1000) -> str:
    try:
        return log.read_text(errors="replace")[-characters:]
    except OSError:
        return ""


# What the guard saw --------------------------------------------------------------------------------------------------


def _verdicts(files: RunFiles, accounts: Sequence[list[Record]]) -> list[Record]:
    """Every verdict in order: from the journal that holds the most of them, or what a rank was told."""
    found: list[Record] = []
    for rank in range(len(accounts)):
        records = [one["verdict"] for one in files.read_journal(rank) if one["kind"] == "verdict"]
        found = records if len(records) > len(found) else found
    return found or [one["verdict"] for account in accounts for one in _of_kind(account, "verdict")][:1]


def _checkpoints(files: RunFiles, accounts: Sequence[list[Record]]) -> list[Record]:
    """Each save, with what a resume would say of it now: its files may have been damaged since, or be `gone` by retention."""
    saves = {one["step"]: {name: one[name] for name in ("step", "published", "problem")} for one in _saves(accounts)}
    incidents = [read_incident(path) for path in files.incidents()]
    for one in saves.values():
        one["problem"] = one["problem"].replace(f"{files.path}/", "")
    for path in files.checkpoints.list():
        step = checkpoint_step(path)
        one = saves.setdefault(step, {"step": step, "published": True, "problem": ""})
        try:
            label = read_label(path)
            one["problem"] = one["problem"] or "; ".join(verify_files(path, label))
            one["distrusted"] = distrust(label, incidents)
        except RunFilesError as error:
            one["problem"] = one["problem"] or str(error).replace(f"{files.path}/", "")
    there = {checkpoint_step(path) for path in files.checkpoints.list()}
    for step, one in saves.items():
        if one["published"] and step not in there:
            one["gone"] = True
    return [saves[step] for step in sorted(saves)]


def _saves(accounts: Sequence[list[Record]]) -> list[Record]:
    """Those of the rank that saw most of them: any other may have been killed."""
    return max((_of_kind(account, "checkpoint") for account in accounts), key=len)


def _shortened(strike: Record) -> Record:
    """Without the bits where these are many: a database of thousands of cells would hold little else."""
    if all(len(strike[name]) <= _BITS_KEPT for name in _BITS):
        return strike
    return strike | dict.fromkeys(_BITS, "")


# Numbers -------------------------------------------------------------------------------------------------------------


def _read(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _of_kind(account: Sequence[Record], kind: str) -> list[Record]:
    return [one for one in account if one["kind"] == kind]


def _means(steps: Sequence[list[Record]], name: str) -> tuple[float | str, ...]:
    """Mean over the ranks, for the steps that all of them have told of; what was not computed is no number."""
    rows = zip(*([one[name] for one in of_rank] for of_rank in steps), strict=False)
    return tuple("nan" if None in row else _mean(row) for row in rows)


def _mean(values: Sequence[float | str]) -> float | str:
    mean = sum(map(float, values)) / len(values)
    return mean if math.isfinite(mean) else str(mean)


def _evaluation(accounts: Sequence[list[Record]]) -> dict[str, float | str]:
    found = [one["values"] for account in accounts for one in _of_kind(account, "evaluation")]
    return {name: _mean([values[name] for values in found]) for name in found[0]} if found else {}
