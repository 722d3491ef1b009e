"""Running the user's command for one group: what it printed is kept, and it never outlives us.

The command is split like a shell would and started without one, as the first of its own process group. A small process of
ours stands between (`keeper`): it ends the group when we die, however we die, and the group ends also if the keeper is killed.
"""

from __future__ import annotations

import os
import shlex
import signal
import string
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from bitwitness.errors import ConfigurationError
from bitwitness.scan.groups import keeper

Outcome = Literal["passed", "failed", "not judged"]

WORDS = ("nodes", "count", "nodefile", "first")


def check_template(template: str) -> list[str]:
    """The words of a command template.

    Raises:
        ConfigurationError: it cannot be split, names no nodes, or has other words in braces than ours.
    """
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigurationError(f"--test {template!r:.200} is no command: {error}") from None
    if not words:
        raise ConfigurationError("--test is empty: give a command such as 'srun -w {nodes} my-test'")
    used: set[str] = set()
    for word in words:
        try:
            parts = list(string.Formatter().parse(word))
        except ValueError:
            raise ConfigurationError(f"--test: braces in {word!r:.100}: write {{{{ and }}}} for your own") from None
        for _, name, form, conversion in parts:
            if name is None:
                continue
            if name not in WORDS or form or conversion:
                ours = ", ".join(f"{{{one}}}" for one in WORDS)
                raise ConfigurationError(
                    f"--test: {{{name}}} is none of {ours}: write {{{{ and }}}} for your own braces"
                )
            used.add(name)
    if not used & {"nodes", "nodefile"}:
        raise ConfigurationError("--test must say where the nodes of a group go: {nodes}, or {nodefile}")
    return words


def command(words: Sequence[str], nodes: Sequence[str], nodefile: Path) -> list[str]:
    """The command for these nodes."""
    values = {"nodes": ",".join(nodes), "count": str(len(nodes)), "nodefile": str(nodefile), "first": nodes[0]}
    return [word.format_map(values) for word in words]


class Running:
    """One test that runs."""

    def __init__(self, words: Sequence[str], nodes: Sequence[str], name: str, logs: Path) -> None:
        """Start it; what it prints goes to `<logs>/<name>.log`.

        Raises:
            OSError: the log cannot be written.
        """
        logs.mkdir(parents=True, exist_ok=True)
        nodefile = logs / f"{name}.nodes"
        nodefile.write_text("".join(f"{node}\n" for node in nodes))
        self.log = logs / f"{name}.log"
        # The pipe closes when we end, however that is, and the keeper then kills the command.
        read, self._pipe = os.pipe()
        os.set_inheritable(self._pipe, False)
        try:
            with self.log.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, *command(words, nodes, nodefile)],
                    stdin=read,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        finally:
            os.close(read)
        self._killed = False

    def outcome(self) -> tuple[Outcome, str] | None:
        """How it ended, and in words why it was not judged; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        self._close()
        if self._killed:
            return "not judged", "timed out"
        if code == 0:
            return "passed", ""
        if code == 1:
            return "failed", ""
        words = {
            keeper.SIGNALLED: "ended by a signal",
            keeper.ENDED: "not run or ended",
            keeper.NOT_STARTED: "could not be started",
        }
        return "not judged", words.get(code, f"exit status {code}" if code > 0 else "its keeper was killed")

    def kill(self) -> None:
        """End it and everything that it started."""
        self._killed = True
        self._close()  # the keeper sees to its command
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1
