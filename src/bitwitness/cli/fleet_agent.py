"""`bitwitness fleet agent`: what runs on every node of a cluster of Kubernetes, and needs next to no rights there."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import click

from bitwitness.cli.entry import INTERRUPTED
from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, plain, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.base import valid_node
from bitwitness.fleet.clusters.nvsentinel_events import ACTIONS, Strategy, valid_strategy
from bitwitness.topology import node_name

if TYPE_CHECKING:
    from bitwitness.fleet.agent_memory import MemoryFile
    from bitwitness.fleet.agent_rounds import Reporter, Work

_SOURCE = type(GIVEN_PATH)(path_type=Path, readable=False)
_PATIENCE = 5.0
"""Seconds after which an agent that was told to end does so, whatever it waits for; a kill is as harmless."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the command line asks for."""

    node: str
    socket: str | None
    strategy: Strategy
    action: str
    kubeconfig: Path | None
    context: str
    look: float
    folder: Path | None
    sources: tuple[Path, ...]
    every: float
    state: Path | None


@click.command()
@click.option("--node", metavar="NAME", help="This node. Default: BITWITNESS_NODE, NODE_NAME, or as the cluster says.")
@click.option(
    "--nvsentinel",
    "socket",
    metavar="SOCKET",
    help="Tell NVSentinel of this node, e.g. /var/run/nvsentinel/nvsentinel.sock.",
)
@click.option(
    "--strategy", type=click.Choice(["STORE_ONLY", "EXECUTE_REMEDIATION"]), default="STORE_ONLY", show_default=True,
    help="The most that NVSentinel is asked for.",
)  # fmt: skip
@click.option(
    "--action", type=click.Choice(ACTIONS), default="CONTACT_SUPPORT", show_default=True,
    help="What is recommended to NVSentinel.",
)  # fmt: skip
@click.option("--kubeconfig", type=GIVEN_PATH, metavar="FILE", help="Default: of the pod, else as kubectl finds it.")
@click.option("--context", default="", metavar="NAME", help="Of the kubeconfig.")
@click.option(
    "--look",
    callback=seconds_up_to(86_400, "a day"),
    default="15s",
    show_default=True,
    metavar="TIME",
    help="Between two looks at the Node.",
)
@click.option(
    "--signals", "folder", type=GIVEN_PATH, metavar="DIR", help="Keep this node's hardware signals in DIR/NODE.json."
)
@click.option(
    "--from", "sources", type=_SOURCE, multiple=True, metavar="FILE", help="Read these. Default: this machine."
)
@click.option(
    "--every",
    callback=seconds_up_to(86_400, "a day"),
    default="5m",
    show_default=True,
    metavar="TIME",
    help="Between two readings of the signals.",
)
@click.option("--state", type=GIVEN_PATH, metavar="FILE", help="Remembers what NVSentinel was told, across restarts.")
@click.option("--once", is_flag=True, help="Do it once, and end with 1 where not all could be done.")
@click.option(
    "--check", is_flag=True, help="Only say whether an agent does its work here, for a probe: 0 it does, 1 not."
)
def agent(
    node: str | None,
    socket: str | None,
    strategy: str,
    action: str,
    kubeconfig: Path | None,
    context: str,
    look: float,
    folder: Path | None,
    sources: tuple[Path, ...],
    every: float,
    state: Path | None,
    once: bool,
    check: bool,
) -> None:
    """Report this node to NVSentinel, and keep its hardware signals where a controller reads them.

    With --nvsentinel it reads its own Node, which needs the right to get nodes and no other, and tells NVSentinel on this machine's
    socket when the controller has found the node suspect, and when a person has returned it. What cannot be done is said, and tried
    again; nothing ends it but SIGTERM (0), Ctrl-C (130), or a wrong command line (2).
    """
    _usage(socket, strategy, folder, sources, state, check)
    name = node if node is not None else node_name(os.environ)
    asked = _Asked(
        node=valid_node(name),
        socket=socket,
        strategy=valid_strategy(strategy, "--strategy"),
        action=action,
        kubeconfig=kubeconfig,
        context=context,
        look=look,
        folder=folder,
        sources=sources,
        every=every,
        state=state,
    )
    if check:
        _check(asked)
        return
    _log()
    works = _works(asked)
    if not once:
        _loop(works)
        return
    done = [work.once() for work in works]  # one that fails keeps no other from being done
    if not all(done):
        raise SystemExit(1)


def _usage(
    socket: str | None, strategy: str, folder: Path | None, sources: Sequence[Path], state: Path | None, check: bool
) -> None:
    if socket is None and folder is None:
        raise click.UsageError("say what is to be done: --nvsentinel SOCKET, --signals DIR, or both")
    if socket is None and strategy != "STORE_ONLY":
        raise click.UsageError("--strategy is for NVSentinel: give --nvsentinel as well")
    if sources and folder is None:
        raise click.UsageError("--from is for the signals: give --signals as well")
    if check and socket is not None and state is None:
        raise click.UsageError("--check needs --state FILE: what an agent keeps in memory only is seen by nobody else")


def _works(asked: _Asked) -> list[Work]:
    """What is to be done, as it was asked for; a part that is not asked for is not imported."""
    from bitwitness.fleet.agent_rounds import report_work, signals_work

    works = []
    if asked.socket is not None:
        works.append(report_work(_reporter(asked, asked.socket), asked.node, asked.look))
    if asked.folder is not None:
        from bitwitness.fleet.agent_signals import tidy

        tidy(asked.folder, asked.node)
        works.append(signals_work(asked.folder, asked.node, asked.sources, asked.every))
    return works


def _reporter(asked: _Asked, socket: str) -> Reporter:
    from bitwitness.fleet.agent_node import NodeReader
    from bitwitness.fleet.agent_rounds import Reporter
    from bitwitness.fleet.clusters.kubernetes_api import KubernetesApi
    from bitwitness.fleet.clusters.nvsentinel_socket import Connector

    kubeconfig = "" if asked.kubeconfig is None else str(asked.kubeconfig)
    reader = NodeReader(KubernetesApi.load(kubeconfig, asked.context), asked.node)
    memory = _memory(asked)
    memory.tidy()
    return Reporter(asked.node, reader, Connector(socket), memory, allowed=asked.strategy, action=asked.action)


def _memory(asked: _Asked) -> MemoryFile:
    from bitwitness.fleet.agent_memory import MemoryFile

    if asked.state is not None and asked.state.is_dir():
        raise ConfigurationError(f"--state {asked.state} is a directory: give a file in it")
    return MemoryFile(asked.state, asked.node)


def _loop(works: Sequence[Work]) -> None:
    from bitwitness.fleet.agent_rounds import run

    stop = threading.Event()
    by: list[int] = []

    def asked(number: int, frame: FrameType | None) -> None:
        if by:
            raise KeyboardInterrupt
        by.append(number)
        stop.set()
        end = threading.Timer(_PATIENCE, os._exit, (INTERRUPTED if number == signal.SIGINT else 0,))
        end.daemon = True
        end.start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, asked)
    run(works, stop)
    if by == [signal.SIGINT]:
        raise SystemExit(INTERRUPTED)


def _check(asked: _Asked) -> None:
    """What an agent has left behind here, and whether that is fresh."""
    from bitwitness.fleet.agent_check import wrong_with_reports, wrong_with_signals

    now, wrong, screen = datetime.now(UTC), [], console()
    if asked.socket is not None:
        noted = _memory(asked).load()
        wrong.append(wrong_with_reports(noted, asked.look, now))
        for trouble in noted.troubles:
            screen.print(styled(trouble, "yellow"), soft_wrap=True)
    if asked.folder is not None:
        wrong.append(wrong_with_signals(asked.folder, asked.node, asked.every, now))
    for text in filter(None, wrong):
        screen.print(styled(text, "red"), soft_wrap=True)
    if any(wrong):
        raise SystemExit(1)
    screen.print(styled("it does its work"))


class _Plain(logging.Formatter):
    """Lines that stay lines: what others have written must not forge any."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - its name
        """The line."""
        return plain(super().formatMessage(record))


def _log() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(_Plain("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("bitwitness.fleet.agent_rounds").setLevel(logging.INFO)
