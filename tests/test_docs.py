"""The documentation is executed: examples run, help texts are what the commands print, links lead somewhere.

A ```python block runs as it stands in an empty directory and prints the ```text that follows it; `python supervised` marks a
script for `bitwitness run`, `python no-run` a fragment. A ```console block with `$ bitwitness ... --help` must equal the command's output (`make docs-help`).
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.docs_help import ROOT, Block, blocks, documents, printed_help

BLOCKS = [block for file in documents() for block in blocks(file)]
HELPS = [block for block in BLOCKS if block.help_command is not None]
TEXTS = [*documents(), *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md"))]

KNOWN = {
    "python",
    "python no-run",
    "python supervised",
    "console",
    "bash",
    "toml",
    "json",
    "text",
    "yaml",
    "make",
    "mermaid",
}
_LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def _names(found: list[Block]) -> list[str]:
    return [block.where for block in found]


def test_every_example_shows_what_it_prints() -> None:
    """Then tests/cli/test_documentation.py runs it and compares."""
    followed = {one.where for one, after in pairwise(BLOCKS) if one.file == after.file and after.info == "text"}
    shown = {block.where for block in BLOCKS if block.info in ("python", "python supervised")}
    assert shown
    assert shown <= followed


@pytest.mark.parametrize("block", HELPS, ids=_names(HELPS))
def test_help_is_what_the_command_prints(block: Block) -> None:
    command = block.help_command
    assert command is not None
    assert block.body == printed_help(command), f"{block.where} is out of date: run make docs-help"


@pytest.mark.parametrize("block", BLOCKS, ids=_names(BLOCKS))
def test_block_says_what_it_is(block: Block) -> None:
    assert block.info in KNOWN, f"{block.where}: ```{block.info} is none of {sorted(KNOWN)}"


@pytest.mark.parametrize("file", TEXTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_resolve(file: Path) -> None:
    text = re.sub(r"^```.*?^```", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = [target for target in _LINK.findall(text) if not _resolves(file, target)]
    assert not broken, f"{file.relative_to(ROOT)}: links lead nowhere: {broken}"


def _resolves(file: Path, target: str) -> bool:
    if re.match(r"https?://|mailto:", target):
        return True  # what other sites do is not ours to test
    path, _, anchor = target.partition("#")
    goal = (file.parent / path).resolve() if path else file
    if not goal.exists():
        return False
    return not anchor or goal.suffix != ".md" or anchor in _anchors(goal.read_text(encoding="utf-8"))


def _anchors(text: str) -> set[str]:
    """Anchors that forges make of headings: lower case, punctuation dropped, spaces to hyphens."""
    headings = re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_link_checker_sees_a_broken_link() -> None:
    """The checker above must be able to fail."""
    file = ROOT / "CHANGELOG.md"
    assert _resolves(file, "LICENSE")
    assert not _resolves(file, "no-such-file.md")
    assert not _resolves(file, "CONTRIBUTING.md#no-such-heading")
