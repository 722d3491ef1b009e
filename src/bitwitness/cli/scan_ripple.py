"""`bitwitness scan --ripple RUN_DIR`: asks a running job for slices of known work, and shows what its ranks answer.

Apart from `scan`, which has ranks of its own: here nothing is started and nothing is waited for but files.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bitwitness.cli.output import console, plain, print_json, this_command
from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.ripple import Request, RippleFiles
from bitwitness.scan.asking import AHEAD, Following, ask, pace, patience_to_end, withdraw
from bitwitness.scan.drill import Drill
from bitwitness.scan.judging import Golden
from bitwitness.scan.results import Judgement

_POLL = 5.0
_SHOWN = 20
EXIT_CODES = {"pass": 0, "fail": 1, "not judged": 3}


def ripple(
    run_dir: Path,
    budget: float = 0.005,
    slice_ms: float = 3.0,
    minutes: float = 10.0,
    *,
    detach: bool = False,
    stop: bool = False,
    golden: Golden | None = None,
    confidence: float = 0.95,
    drills: Sequence[Drill] = (),
    seed: int | None = None,
    as_json: bool = False,
    code: Callable[[Judgement], int] = lambda judgement: EXIT_CODES[judgement.standing],
    ahead: float = AHEAD,
    poll: float = _POLL,
) -> int:
    """Ask, follow until it is over, judge; the exit code.

    Args:
        run_dir: of the job.
        budget: the share of its time that slices may take.
        slice_ms: of one slice.
        minutes: how long, from the first slice on.
        detach: ask and leave.
        stop: end the request in force instead.
        golden: answers that are known.
        confidence: of the bounds.
        drills: faults on purpose.
        seed: of the order of the work; drawn if not given.
        as_json: print the result as JSON.
        code: the exit code of a judgement.
        ahead: seconds from the request to the first slice.
        poll: seconds between two looks at the answers.

    Raises:
        ConfigurationError: what was asked for makes no sense, or no guarded job runs there.
        RunFilesError: files cannot be read or written.
    """
    if stop:
        return _stop(run_dir, detach, as_json, golden, confidence, code, poll)
    request = ask(run_dir, budget=budget, slice_ms=slice_ms, minutes=minutes, drills=drills, seed=seed, ahead=ahead)
    screen = console(stderr=True)
    screen.print(_asked(request, run_dir))
    if detach:
        if as_json:
            print_json({"request": request.to_json()})
        return 0
    following = Following(run_dir, request, golden, confidence)
    patience = pace(run_dir).patience
    why = ""
    try:
        while not why:
            time.sleep(poll)
            screen.print(_progress(following.look(), following, request))
            why = following.over(patience)
    except KeyboardInterrupt:
        withdraw(run_dir, request.id)
        why = "it was interrupted"
    _settle(following, run_dir, poll)
    judgement = following.conclude(why)
    _tell(following, judgement, why, as_json)
    return code(judgement)


def _settle(following: Following, run_dir: Path, poll: float) -> None:
    """Wait for ranks to write that they have ended: who does not is taken for silent. Who interrupts that does not want to wait."""
    try:
        following.settle(patience_to_end(run_dir), poll)
    except KeyboardInterrupt:
        return


def show_slices(run_dir: Path, as_json: bool) -> None:
    """Show what was answered so far to the newest request in a run directory.

    Raises:
        RunFilesError: there is none, or files cannot be read.
    """
    request = RippleFiles(run_dir).read()
    if request is None:
        raise RunFilesError(f"{run_dir}: no slices were asked for; ask with: {this_command()} scan --ripple {run_dir}")
    following = Following(run_dir, request)
    running = following.running
    judgement = following.look(repeat=False, running=running)
    why = "it has ended" if request.until <= time.time() else "nothing is heard of the job any more"
    _tell(following, judgement, "" if running else why, as_json)


def _stop(
    run_dir: Path,
    detach: bool,
    as_json: bool,
    golden: Golden | None,
    confidence: float,
    code: Callable[[Judgement], int],
    poll: float,
) -> int:
    if detach:
        raise ConfigurationError("--detach and --stop: give one of them")
    if not (run_dir / "run.json").is_file():
        raise ConfigurationError(f"{run_dir} is not the directory of a guarded job: there is no run.json")
    ended = withdraw(run_dir)
    if ended is None:
        console(stderr=True).print("No request is in force: nothing to stop.")
        return 0
    console(stderr=True).print(f"Request {ended.id} is withdrawn.")
    following = Following(run_dir, ended, golden, confidence)
    _settle(following, run_dir, poll)
    judgement = following.conclude("it was withdrawn")
    _tell(following, judgement, "it was withdrawn", as_json)
    return code(judgement)


def _tell(following: Following, judgement: Judgement, why: str, as_json: bool) -> None:
    if as_json:
        print_json(following.record(judgement, why))
    else:
        _show(judgement, following.request, why or "it goes on")


def _asked(request: Request, run_dir: Path) -> str:
    share = f"{request.budget:.2%}".replace(".00%", "%")
    return (
        f"Request {request.id}: slices of {request.slice_ms:g} ms after every {request.every:,} step(s) from step "
        f"{request.from_step:,} on, at most {share} of the job's time, seed {request.seed}. They end by themselves; earlier with: "
        f"{this_command()} scan --ripple {plain(run_dir)} --stop"
    )


def _progress(judgement: Judgement, following: Following, request: Request) -> str:
    calls = sum(sum(found.values()) for sheet in following.sheets for found in sheet.answers.values())
    answering = sum(bool(sheet.answers) for sheet in following.sheets)
    found = Counter(one.standing for one in judgement.devices)
    left = max(0.0, request.until - time.time())
    return (
        f"{answering} of {len(following.sheets)} devices answer, {calls:,} answers; {found['pass']} pass, {found['fail']} fail, "
        f"{found['not judged']} not judged; {left / 60:.0f} min to go"
    )


def _show(judgement: Judgement, request: Request, why: str) -> None:
    screen = console()
    if request.drills:
        screen.print(f"A drill: {plain('; '.join(request.drills))}. What fails because of it is not broken.")
    screen.print(
        f"{judgement.standing.upper()} after {sum(one.calls for one in judgement.devices):,} judged answers ({why})."
    )
    told = sorted(judgement.devices, key=lambda one: (one.standing == "pass", one.standing != "fail", one.rank))
    for one in told[:_SHOWN]:
        screen.print(
            f"  {one.standing:<10} rank {one.rank}, {plain(one.node)}, {plain(one.device)}: {plain(one.reason)}"
        )
    if len(told) > _SHOWN:
        screen.print(f"  and {len(told) - _SHOWN:,} more, in result.json")
