"""A job that trains nothing, and does in one step of one rank what its arguments say.

`job.py STEPS [DO@RANK:STEP:GENERATION ...]`, where RANK and GENERATION may be `*`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bitwitness import preemption
from bitwitness.errors import CorruptionDetected, RankLost
from bitwitness.runfiles import RunFiles, read_incident
from tests.cli import samples

RANK, GENERATION = int(os.environ["RANK"]), int(os.environ["BITWITNESS_GENERATION"])
SESSION, RUN_DIR = os.environ["BITWITNESS_SUPERVISION"], Path(os.environ["BITWITNESS_RUN_DIR"])
NODES = 3


def corrupt(what: str) -> None:
    """Find corruption of rank 2 of three on three nodes, one process each, as a guard would."""
    names = os.environ.get("NAMES", "node-0,node-1,node-3" if what == "moved" else "node-0,node-1,node-2").split(",")
    where = samples.topology(NODES, names=names)
    seen = {
        "moved": samples.replays(where, 4, samples.BAD),
        "persistent": samples.replays(where, 4, samples.BAD),
        "transient": samples.replays(where, 4, samples.GOOD),
        "unattributed": samples.reduced(where, 4, samples.BAD),
    }[what]
    files = RunFiles(RUN_DIR)

    def ours() -> list[Path]:
        found = [read_incident(path) for path in files.incidents()]
        return [
            one.path for one in found if (one.record["supervision"], one.record["generation"]) == (SESSION, GENERATION)
        ]

    if RANK == 0:
        samples.write(RUN_DIR, seen, where, supervision=SESSION, generation=GENERATION)
    while not ours():
        time.sleep(0.02)
    raise CorruptionDetected(read_incident(ours()[0]).verdict, ours()[0])


def go_on_after(reaction: str) -> None:
    """Find a transient fault of rank 2, and train on, as a guard does with that policy."""
    where = samples.topology(NODES, names=os.environ.get("NAMES", "node-0,node-1,node-2").split(","))
    if RANK == 0:
        seen = samples.replays(where, 4, samples.GOOD)
        policy = {"on_detection": reaction}
        samples.write(RUN_DIR, seen, where, supervision=SESSION, generation=GENERATION, policy=policy)


def spoil() -> None:
    """From now on neither the leader nor a wrapper can write its word, and both can read."""
    folder = RUN_DIR / "supervise"
    for path in (folder / "session.json", *(folder / SESSION / "members").glob("*.json")):
        staged = path.with_name(f".{path.name}.{json.loads(path.read_text())['pid']}")
        while not staged.is_dir():
            with suppress(FileExistsError):
                staged.mkdir()


def do(what: str) -> None:
    if what in ("retry", "record"):
        go_on_after(what)
    if what == "spoil":
        spoil()
    if what == "raise":
        raise ValueError("the data set is gone")
    if what == "lose":
        while "slowly" in " ".join(sys.argv) and not (RUN_DIR / "slow").exists():
            time.sleep(0.02)
        raise RankLost("rank 1 on node-1 did not take part")
    if what == "exit7":
        sys.exit(7)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "vanish":
        os._exit(0)
    if what == "hang":
        time.sleep(600)
    if what == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    if what == "slowly":
        (RUN_DIR / "slow").touch()
        time.sleep(0.4)
        raise RuntimeError("the real reason")
    if what == "deaf":
        for number in preemption.SIGNALS:
            signal.signal(number, signal.SIG_IGN)
    if what in ("persistent", "moved", "transient", "unattributed"):
        corrupt(what)


def main(steps: int, plan: list[str]) -> None:
    beats = Path(os.environ["BITWITNESS_BEATS"]) / f"rank-{RANK:05d}"
    sys.stdout.write(f"rank {RANK} of generation {GENERATION} starts\n")
    for step in range(steps):
        beats.write_text(json.dumps({"step": step, "phase": "forward", "time": time.time()}) + "\n")
        with (RUN_DIR / "steps").open("a") as file:
            file.write(f"{RANK} {GENERATION} {step} {os.environ.get('BITWITNESS_SUSPICION', '-')}\n")
        for one in plan:
            what, _, when = one.partition("@")
            rank, at, generation = when.split(":")
            if rank in ("*", str(RANK)) and at == str(step) and generation in ("*", str(GENERATION)):
                do(what)
        if preemption.requested():
            return
        time.sleep(0.05)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
