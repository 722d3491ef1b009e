"""Running the user's command for one group: what it printed is kept, and it never outlives us.

The command is split like a shell would and started without one, as the first of its own process group. A small process of
ours stands between (`keeper`): it ends the group when we die, however we die, and the group ends also if the keeper is killed. It says
by a pipe how the command ended, as any exit status of its own could be one of the command's: without that word nothing is judged.
"""

from __future__ import annotations

import os
import shlex
import shutil
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


def check_program(words: Sequence[str]) -> None:
    """Whether there is a program of that name, before tests are started that all end without a judgement.

    Raises:
        ConfigurationError: there is none that can be run.
    """
    if "{" not in words[0] and shutil.which(words[0]) is None:
        raise ConfigurationError(f"--test: {words[0]!r:.200} could not be started: there is no such program here")


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
        # The first pipe closes when we end, however that is, and the keeper then kills the command.
        read, self._pipe = os.pipe()
        self._heard, tell = os.pipe()
        try:
            with self.log.open("wb") as output:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", keeper.__file__, str(tell), *command(words, nodes, nodefile)],
                    stdin=read,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(tell,),
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(read)
            os.close(tell)
        self._said: str | None = None
        self._killed = False

    def outcome(self) -> tuple[Outcome, str] | None:
        """How it ended, and in words why it was not judged; None while it runs."""
        if self.process.poll() is None:
            return None
        if self._killed:
            return "not judged", "timed out"
        if self._said is None:
            os.set_blocking(self._heard, False)
            try:
                self._said = os.read(self._heard, 4096).decode(errors="replace")
            except BlockingIOError:
                self._said = ""
            self._close()
        kind, _, what = self._said.partition(" ")
        if kind == keeper.EXITED and what in ("0", "1"):
            return ("passed" if what == "0" else "failed"), ""
        words = {
            keeper.EXITED: "exit status",
            keeper.SIGNALLED: "ended by",
            keeper.NOT_STARTED: "could not be started:",
        }
        return "not judged", f"{words[kind]} {what}" if kind in words else "its keeper was killed"

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
        for descriptor in (self._pipe, self._heard):
            if descriptor >= 0:
                os.close(descriptor)
        self._pipe = self._heard = -1
