"""Reading what a scan has left, without torch: its result, its state where it has none, and what a replay has shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from bitwitness.cli.output import styled
from bitwitness.cli.runs import not_one
from bitwitness.errors import RunFilesError
from bitwitness.runfiles.answers import AnswerFiles
from bitwitness.runfiles.files import read_json
from bitwitness.scan.concluding import conclude
from bitwitness.scan.evidence import Evidence
from bitwitness.scan.following import Follower
from bitwitness.scan.living import lives
from bitwitness.scan.results import DeviceResult
from bitwitness.scan.settings import Settings

if TYPE_CHECKING:
    from bitwitness.scan.replaying import Replay

_OUTCOMES = {"expected": "green", "same as the suspect": "bold red", "cannot conclude": "yellow"}


def record_of(directory: Path) -> dict[str, Any]:
    """The result in the directory of a scan, or what its files say so far.

    Raises:
        RunFilesError: it is no directory of a scan, or its files cannot be read.
    """
    # Without a result nothing is "pass", whatever the answers say: a scan that was killed, or had no room to write, would look well.
    files = AnswerFiles(directory)
    if files.result.is_file():
        record = read_json(files.result)
        if "devices" not in record or "coverage" not in record:
            raise RunFilesError(f"{files.result} is no result of a scan")
        return record
    if not files.scan.is_file():
        raise not_one(directory, "scan", "scan.json")
    asked = read_json(files.scan)
    settings = Settings.from_json(asked)
    running = lives(files, asked.get("coordinator"))
    if files.result.is_file():  # it has come to its end while we looked
        return record_of(directory)
    follower = Follower(files)
    follower.sheets()
    lost = {} if running else dict.fromkeys(set(range(settings.world)) - set(follower.damaged), _WITHOUT_RESULT)
    made = conclude(files, settings, follower, running=running, ended_as=lost)
    devices = tuple(_so_far(one) for one in made.judgement.devices) if running else made.judgement.devices
    record = replace(made, judgement=replace(made.judgement, devices=devices)).to_json(settings)
    standing = "fail" if record["standing"] == "fail" else "not judged"
    kept = {name: value for name, value in record.items() if name not in ("ended", "took_seconds", "drill_outcome")}
    return {**kept, "running": running, "standing": standing}


_WITHOUT_RESULT = "the scan has left no result, and nothing shows that it still runs"


def _so_far(result: DeviceResult) -> DeviceResult:
    """Of a scan that runs: who has not failed may yet."""
    if result.standing != "pass":
        return result
    return replace(result, standing="not judged", reason=f"the scan still runs; so far {result.reason}", bound=None)


def show_replay(evidence: Evidence, seen: Replay, screen: Console) -> None:
    """What a replay has shown, for people."""
    suspect = evidence.device
    screen.print(styled(f"{seen.outcome.upper()}: {seen.reason}", _OUTCOMES[seen.outcome]), soft_wrap=True)
    if evidence.drill:
        screen.print(styled("this evidence is of a drill: the fault was made on purpose", "yellow"))
    screen.print(
        styled(f"{evidence.item.id}, suspect {suspect.device} on {suspect.node} (rank {suspect.rank})"), soft_wrap=True
    )
    by = "other devices" if evidence.expected_by == "others" else "the suspect itself, at other times"
    screen.print(
        styled(f"expected {evidence.expected}, given by {by}; the suspect gave {evidence.wrong}"), soft_wrap=True
    )
    for digest, count in sorted(seen.answers.items(), key=lambda one: -one[1])[:8]:
        screen.print(styled(f"here {digest}: {count} times"), soft_wrap=True)
    if seen.differing is not None:
        screen.print(styled(f"{seen.differing} element(s) of the suspect's output differ from the expected one"))
        for one in seen.elements[:16]:
            place = ", ".join(map(str, one.index))
            bits = f"expected {one.expected}, observed {one.observed}, xor {one.xor}"
            screen.print(styled(f"  output {one.output} [{place}]: {bits}"), soft_wrap=True)
