"""The help texts in the documentation, which are output of the commands and not prose about them.

A ```console block that starts with `$ bitwitness ... --help` holds exactly what that command prints. `make docs-help`
(`python -m tests.docs_help --write`) writes it there; tests/test_docs.py fails where it differs.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<body>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of a Markdown file."""

    file: Path
    line: int
    info: str
    body: str

    @property
    def where(self) -> str:
        """`file:line`, for people and test names."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    @property
    def help_command(self) -> list[str] | None:
        """The arguments of the command whose help this block shows; None where it shows something else."""
        first = self.body.partition("\n")[0]
        words = shlex.split(first) if first.startswith("$ bitwitness") else []
        return words[2:] if self.info == "console" and words[-1:] == ["--help"] else None


def documents() -> list[Path]:
    """README.md and everything under docs/, in order."""
    return [*ROOT.glob("README.md"), *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(file: Path) -> Iterator[Block]:
    """The fenced blocks of a file, in order."""
    text = file.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        yield Block(file, text.count("\n", 0, match.start()) + 1, match["info"].strip(), match["body"])


def printed_help(arguments: list[str]) -> str:
    """What `$ bitwitness ...` prints at 80 columns, preceded by the command itself."""
    script = Path(sysconfig.get_path("scripts")) / "bitwitness"
    environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([script, *arguments], capture_output=True, text=True, env=environment, check=True)
    output = "\n".join(line.rstrip() for line in done.stdout.splitlines())
    return f"$ {shlex.join(['bitwitness', *arguments])}\n{output}\n"


def rewritten(file: Path) -> str:
    """The text of a file with every help block as the commands print it now."""

    def current(match: re.Match[str]) -> str:
        command = Block(file, 0, match["info"].strip(), match["body"]).help_command
        return match[0] if command is None else f"```{match['info']}\n{printed_help(command)}```"

    return _FENCE.sub(current, file.read_text(encoding="utf-8"))


def main() -> int:
    """Write, or say what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the current help into the files")
    write = parser.parse_args().write
    stale = {file: text for file in documents() if (text := rewritten(file)) != file.read_text(encoding="utf-8")}
    for file, text in stale.items():
        sys.stdout.write(f"{file.relative_to(ROOT)}: {'written' if write else 'out of date; run make docs-help'}\n")
        if write:
            file.write_text(text, encoding="utf-8")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
