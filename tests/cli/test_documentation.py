"""What the documentation claims about output and settings is what there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import pytest

from bitwitness.errors import PolicyError
from bitwitness.policy import Policy
from tests.docs_help import ROOT, Block, blocks, documents


def _with_output(info: str) -> list[tuple[Block, Block]]:
    """Each example that is followed by a block of text, which is then what it prints."""
    pairs = []
    for file in documents():
        of_file = list(blocks(file))
        pairs += [(one, other) for one, other in pairwise(of_file) if (one.info, other.info) == (info, "text")]
    return pairs


PAIRS = _with_output("python")
SUPERVISED = _with_output("python supervised")
COMMAND = ("run", "--nodes", "3", "--spares", "1", "--run-dir", "run", "train.py")


@pytest.mark.parametrize(("example", "output"), PAIRS, ids=[example.where for example, _ in PAIRS])
def test_an_example_prints_what_stands_below_it(example: Block, output: Block, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example.body, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BITWITNESS_")}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    printed = done.stdout.replace(f"{tmp_path}/", "")
    assert _without_ids(printed) == _without_ids(output.body)


@pytest.mark.parametrize(("example", "output"), SUPERVISED, ids=[example.where for example, _ in SUPERVISED])
def test_a_supervised_example_prints_what_stands_below_it(example: Block, output: Block, tmp_path: Path) -> None:
    """Every line that is shown, in that order; between them there may be more, as the text says."""
    assert f"`bitwitness {' '.join(COMMAND)}`" in example.file.read_text(encoding="utf-8")
    (tmp_path / "train.py").write_text(example.body, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BITWITNESS_")}
    done = subprocess.run(
        [sys.executable, "-m", "bitwitness", *COMMAND],
        cwd=tmp_path,
        env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    printed = iter(_without_ids(done.stderr).splitlines())
    for line in _without_ids(output.body).splitlines():
        assert any(line == other for other in printed), f"not printed, or out of order: {line}\n{done.stderr}"


def _without_ids(text: str) -> str:
    return re.sub(r"\b\d\d:\d\d:\d\dZ", "TIME", re.sub(r"\d{8}T\d{6}Z-[0-9a-f]{6}", "INCIDENT", text))


def test_there_are_such_examples() -> None:
    assert {example.file.name for example, _ in SUPERVISED} >= {"README.md"}
    assert {example.file.name for example, _ in PAIRS} >= {"getting-started.md", "policy.md"}


def test_the_table_of_settings_is_the_policy() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \| `(\w+)` \| (.+) \|$", text, re.MULTILINE)
    assert [name for name, *_ in rows] == [one.name for one in fields(Policy)]
    for name, default, variable, _ in rows:
        assert default.replace('"', "'") == repr(getattr(Policy(), name)), name
        assert variable == f"BITWITNESS_{name.upper()}"
        with pytest.raises(PolicyError, match=variable):
            Policy.load(environment={variable: "no such value"})


def test_every_choice_is_described() -> None:
    text = (ROOT / "docs" / "policy.md").read_text(encoding="utf-8")
    for name in ("audit", "on_detection"):
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` "))
        with pytest.raises(PolicyError) as caught:
            Policy(**{name: "?"})  # type: ignore[arg-type]
        choices = re.findall(r'"(\w+)"', str(caught.value).partition("one of")[2])
        assert choices
        assert not [choice for choice in choices if f'`"{choice}"`' not in row]
