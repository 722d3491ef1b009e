"""What the items of a scan are, in short: so that right answers cannot change under golden files that were learned before.

The answers themselves cannot be kept here, because they belong to one kind of device. Instead `frozen.json` holds, for a
`SUITE_VERSION`, a hash of the ids of all items for each type of device, and one of the code of each module that computes. Where one
differs, either the answers change, and `SUITE_VERSION` must be raised; or they do not, which is shown by computing both:

    python -m tests.scan.freeze                         after SUITE_VERSION was raised
    python -m tests.scan.freeze --same-as REVISION      after a change that changes no answer: all items are computed with the code
                                                        of that revision and with this one
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bitwitness.scan import items as words
from bitwitness.scan import suites

ROOT = Path(__file__).resolve().parent.parent.parent
FROZEN = Path(__file__).with_name("frozen.json")
COMPUTING = (
    "elementwise",
    "indexing",
    "layers",
    "memory_patterns",
    "mixing",
    "operands",
    "operations",
    "training",
    "work",
)

LAP = """
import json, sys, torch
from bitwitness.scan import suites, work
device, found = torch.device("cpu"), {}
with work.settled(device):
    compiler = "torch._inductor" in sys.modules
    for item in suites.items(("train", "ops", "mix")):
        if sys.argv[1:] and item.id not in sys.argv[1:]:
            continue
        try:
            found[item.id] = work.digest(work.prepare(item, device)())
        except work.Unsupported:
            found[item.id] = ""
gpu = [one.id for one in suites.items(("train", "ops", "mix"), "cuda")]
json.dump({"answers": found, "gpu": gpu, "compiler": compiler}, sys.stdout)
"""


def now() -> dict[str, Any]:
    """What `frozen.json` would hold now."""
    ids = {kind: "\n".join(one.id for one in suites.items(words.SUITES, kind)) for kind in ("cpu", "cuda")}
    folder = ROOT / "src" / "bitwitness" / "scan"
    return {
        "suite_version": words.SUITE_VERSION,
        "items": {kind: _hash(text) for kind, text in ids.items()},
        "code": {name: _hash(code_of((folder / f"{name}.py").read_text(encoding="utf-8"))) for name in COMPUTING},
    }


def code_of(source: str) -> str:
    """The lines of a module that are no docstring, no comment and not empty: what can change an answer, in any version of Python."""
    passed: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            passed |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = [line for number, line in enumerate(source.splitlines(), 1) if number not in passed]
    return "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))


def lap(source: Path, only: Sequence[str] = ()) -> dict[str, Any]:
    """The answers to all items for a CPU, or some of them, by the package in a folder."""
    environment = os.environ | {"PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-c", LAP, *only], env=environment, check=True, capture_output=True, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _differing(revision: str) -> list[str]:
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        before, after = lap(Path(folder) / "src"), lap(ROOT / "src")
    if before["gpu"] != after["gpu"]:
        return ["the items for GPUs"]
    names = list(dict.fromkeys([*before["answers"], *after["answers"]]))
    return [name for name in names if before["answers"].get(name) != after["answers"].get(name)]


@click.command(help=__doc__)
@click.option("--same-as", metavar="REVISION", help="The answers are those of this revision: compute and compare.")
def main(same_as: str | None) -> None:
    """Write `frozen.json`."""
    before = json.loads(FROZEN.read_text(encoding="utf-8")) if FROZEN.exists() else {}
    after = now()
    if before.get("suite_version") == after["suite_version"] and before != after:
        if same_as is None:
            raise click.ClickException("raise SUITE_VERSION, or show with --same-as that no answer has changed")
        if differing := _differing(same_as):
            raise click.ClickException(
                f"{len(differing)} answers differ, raise SUITE_VERSION: {', '.join(differing[:5])}"
            )
    FROZEN.write_text(json.dumps(after, indent=2) + "\n", encoding="utf-8")
    click.echo(f"{FROZEN.name}: SUITE_VERSION {after['suite_version']}")


if __name__ == "__main__":
    main()
