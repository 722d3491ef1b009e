"""`bitwitness fleet watch`: the controller, as a process that is started, told to stop, and started again."""

from __future__ import annotations

import json
import shlex
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import click

from bitwitness.cli.entry import INTERRUPTED
from bitwitness.cli.logs import log_to_stderr
from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, styled
from bitwitness.cli.runs import GIVEN_PATH, is_run
from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.base import Cluster
from bitwitness.fleet.clusters.rehearsed import Rehearsed
from bitwitness.fleet.clusters.settings import cluster_of
from bitwitness.fleet.controller import Controller
from bitwitness.fleet.kept import Book
from bitwitness.fleet.notify import Notifier, notifiers
from bitwitness.fleet.outbox import Deliverer, deliver
from bitwitness.fleet.owning import STATE_LOCK, Lock
from bitwitness.fleet.policy import FleetPolicy
from bitwitness.fleet.rehearsing_incident import copy_state
from bitwitness.fleet.state import NAME, Entry, State
from bitwitness.fleet.view import shown
from bitwitness.fleet.watched import INBOX

_EVERY = 2.0
STATE = Path("/var/lib/bitwitness/fleet")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for."""

    runs: tuple[Path, ...]
    parents: tuple[Path, ...]
    state: Path
    policy: FleetPolicy
    policy_file: Path | None
    once: bool
    listen: tuple[str, int] | None
    token_file: Path | None
    every: float
    as_json: bool
    publish: Path | None
    act: bool

    def command(self) -> str:
        """The command line that starts the same controller from any folder; secrets are in files, and not in it."""
        words = ["bitwitness", "fleet", "watch", *(str(path.absolute()) for path in self.runs)]
        named = [("--runs", path) for path in self.parents] + [("--state", self.state), ("--policy", self.policy_file)]
        for option, path in (*named, ("--token-file", self.token_file), ("--publish", self.publish)):
            words += [option, str(path.absolute())] if path is not None else []
        if self.listen is not None:
            host, port = self.listen
            words += ["--listen", f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
        words += ["--every", f"{self.every:g}s"] if self.every != _EVERY else []
        return shlex.join([*words, "--act"] if self.act else words)


def _address(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, int] | None:
    if value is None:
        return None
    host, colon, port = value.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise click.BadParameter(f"{value!r} is not HOST:PORT, e.g. 127.0.0.1:9470 or [::1]:9470", ctx, param)
    return host.removeprefix("[").removesuffix("]"), int(port)


@click.command()
@click.argument("runs", type=GIVEN_PATH, metavar="[RUN_DIR]...", nargs=-1)
@click.option(
    "--runs", "parents", type=GIVEN_PATH, multiple=True, metavar="DIR", help="Every run directly below; new ones too."
)
@click.option("--state", type=GIVEN_PATH, default=STATE, show_default=True, help="Where everything is noted.")
@click.option("--policy", "policy_file", type=GIVEN_PATH, metavar="FILE", help="When and how much. Default: observe.")
@click.option("--act", is_flag=True, help="Act, whatever the policy says of it.")
@click.option("--dry-run", is_flag=True, help="Print the exact calls that acting would make, and touch nothing.")
@click.option("--once", is_flag=True, help="Do what is to be done now, and end.")
@click.option(
    "--listen", callback=_address, metavar="HOST:PORT", help="Serve /metrics, /healthz, a page and the inbox."
)
@click.option("--token-file", type=GIVEN_PATH, metavar="FILE", help="Of the inbox; without it no incident is taken.")
@click.option("--publish", type=GIVEN_PATH, metavar="DIR", help="Keep condemned.json there too, readable by all nodes.")
@click.option(
    "--every",
    callback=seconds_up_to(60, "a minute: incidents are to be seen soon"),
    default="2s",
    show_default=True,
    help="Between two looks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line for everything that happens.")
def watch(
    runs: tuple[Path, ...],
    parents: tuple[Path, ...],
    state: Path,
    policy_file: Path | None,
    act: bool,
    dry_run: bool,
    once: bool,
    listen: tuple[str, int] | None,
    token_file: Path | None,
    publish: Path | None,
    every: float,
    as_json: bool,
) -> None:
    """Watch the runs in RUN_DIR... and carry each incident through: decide, act within limits, look, tell people.

    It only observes until the policy says act = true or --act is given: proposals are noted and told, and no node is touched.
    It may be killed and started again at any time. SIGTERM ends it with 0, Ctrl-C with 130. With --once it ends with 1 where the
    cluster could not be asked, or an incident could not be read.
    """
    _check(runs, parents, listen, token_file)
    policy = FleetPolicy.load(policy_file) if policy_file is not None else FleetPolicy()
    policy = replace(policy, act=policy.act or act)
    # Absolute: it stands in messages, which are read elsewhere.
    state = state.absolute()
    asked = Asked(runs, parents, state, policy, policy_file, once, listen, token_file, every, as_json, publish, act)
    log_to_stderr()
    if dry_run:
        _rehearse(asked)
    else:
        _watch(asked)


def _check(runs: Sequence[Path], parents: Sequence[Path], listen: object, token_file: Path | None) -> None:
    if not runs and not parents and not (listen and token_file):
        raise click.UsageError("name a RUN_DIR, or --runs DIR, or an inbox with --listen and --token-file")
    if token_file is not None and listen is None:
        raise click.UsageError("--token-file is for the inbox: give --listen as well")
    for path in runs:
        if not path.is_dir():
            raise ConfigurationError(
                f"{path} is no directory of a run that exists. For runs that come later, give the folder above: --runs {path.parent}"
            )
        if not is_run(path) and any(is_run(below) for below in path.iterdir() if below.is_dir()):
            raise ConfigurationError(f"{path} is no run, but has runs in it: give --runs {path}")
    for path in parents:
        if not path.is_dir():
            raise ConfigurationError(f"--runs {path}: there is no such directory")


# For real -------------------------------------------------------------------------------------------------------------


def _watch(asked: Asked) -> None:
    told = notifiers(asked.policy.notify)
    with ExitStack() as stack:
        state = stack.enter_context(State(asked.state))
        stack.callback(Lock(asked.state / STATE_LOCK, f"state {asked.state}").release)
        inbox = asked.state / INBOX if asked.listen and asked.token_file else None
        cluster = cluster_of(asked.policy, asked.runs, (*asked.parents, *([inbox] if inbox else [])))
        last = _last(state)
        if inbox is not None:
            inbox.mkdir(exist_ok=True)
        controller = Controller(
            asked.runs,
            state,
            cluster,
            asked.policy,
            parents=asked.parents,
            inbox=inbox,
            notifiers=told,
            publish=asked.publish,
        )
        stack.callback(controller.close)
        _remember(state, asked, told)
        if asked.listen:
            stack.callback(_serve(asked, asked.listen, inbox, controller).stop)
        if asked.once:
            _once(controller, state, told)
            _print_news(state, last, asked.as_json)
            if wrong := _left_undone(state):
                console(stderr=True).print(styled(f"not all could be done: {wrong}", "red"), soft_wrap=True)
                raise SystemExit(1)
            return
        deliverer = Deliverer(asked.state, told, asked.every, state.clock)
        deliverer.start()
        stack.callback(deliverer.stop)
        _loop(controller, state, asked, last)


def _loop(controller: Controller, state: State, asked: Asked, last: int) -> None:
    """Round after round until a signal, and what happens printed as it does."""
    stop, seen = threading.Event(), [last]

    def after(_: Controller) -> None:
        seen[0] = _print_news(state, seen[0], asked.as_json)

    with _stopped_by_signals(stop) as by:
        controller.run(stop, asked.every, after)
        after(controller)
    if by == [signal.SIGINT]:
        raise SystemExit(INTERRUPTED)


@contextmanager
def _stopped_by_signals(stop: threading.Event) -> Iterator[list[int]]:
    """The first signal ends after this round, a second one at once, which is as harmless as a kill."""
    by: list[int] = []

    def asked(number: int, frame: FrameType | None) -> None:
        if by:
            raise KeyboardInterrupt
        by.append(number)
        stop.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield by
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _once(controller: Controller, state: State, told: Sequence[Notifier]) -> None:
    controller.round()
    while controller.backlog:
        controller.round()
    deliver(state, told)
    controller.stopped()


def _left_undone(state: State) -> str:
    """Why a pass has not done what it should: the cluster could not be asked, or an incident not read; "" where it has."""
    unread = [
        text for key, (text, _) in state.said().items() if key.startswith(("damaged:", "incidents:", "run:", "gone:"))
    ]
    waiting = Book(state).proposals(statuses=("held", "failed"), pending=True)
    unasked = [one.why for one in waiting if one.hold == "cluster" or one.status == "failed"]
    leader = state.about().get("leader", "")
    idle = [f"{leader} leads on this cluster, so nothing was done here"] if leader else []
    return "; ".join(shown(text) for text in (idle + unread + unasked)[:3])


def _remember(state: State, asked: Asked, told: Sequence[Notifier]) -> None:
    """What `fleet clear` needs to reach the same cluster and people; no setting of a policy is a secret, and no name is."""
    sources = {
        "runs": [str(path.absolute()) for path in asked.runs],
        "parents": [str(path.absolute()) for path in asked.parents],
        "cluster": dict(asked.policy.cluster),
        "notifiers": [one.name for one in told],
    }
    file = "" if asked.policy_file is None else str(asked.policy_file.absolute())
    before, shared = state.about().get("publish", ""), "" if asked.publish is None else str(asked.publish.absolute())
    with state.change():
        state.set_about(sources=json.dumps(sources, default=str), policy=file, publish=shared, command=asked.command())
    if before not in ("", shared):
        text = f"condemned.json in {before} is not kept up to date any more: point the nodes elsewhere, and remove it"
        console(stderr=True).print(styled(text, "yellow"), soft_wrap=True)


def _serve(asked: Asked, listen: tuple[str, int], inbox: Path | None, controller: Controller) -> Any:
    from bitwitness.fleet.exposition import health
    from bitwitness.fleet.figures import figures
    from bitwitness.fleet.inbox import app, read_token, serve

    token = read_token(asked.token_file) if asked.token_file is not None else ""
    state = asked.state
    made = app(
        inbox,
        token,
        metrics=lambda: figures(state),
        health=lambda: health(figures(state), datetime.now(UTC)),
        leader=lambda: controller.led_by,
    )
    server = serve(made, *listen)
    console(stderr=True).print(styled(f"listening on {server.host}:{server.port}"))
    return server


# Rehearsed ------------------------------------------------------------------------------------------------------------


def _rehearse(asked: Asked) -> None:
    """A round on a copy of the state and in front of the cluster, so that nothing is touched. What a start refuses is refused."""
    notifiers(asked.policy.notify)
    if asked.token_file is not None:
        from bitwitness.fleet.inbox import read_token

        read_token(asked.token_file)
    with tempfile.TemporaryDirectory(prefix="bitwitness-dry-run-") as name:
        folder = Path(name)
        if (asked.state / NAME).exists():
            copy_state(asked.state, folder)
        inbox = asked.state / INBOX
        parents = (*asked.parents, *([inbox] if inbox.is_dir() else []))
        cluster = Rehearsed(cluster_of(asked.policy, asked.runs, parents))
        with State(folder, clock=Clock()) as state:
            last = _last(state)
            policy = replace(asked.policy, act=True)
            controller = Controller(asked.runs, state, _as_cluster(cluster), policy, parents=parents, own=False)
            controller.round()
            while controller.backlog:
                controller.round()
            _tell(cluster, state, last, asked)


def _as_cluster(cluster: Rehearsed) -> Cluster:
    return cluster


def _tell(cluster: Rehearsed, state: State, last: int, asked: Asked) -> None:
    news = [one for one in state.history() if one.number > last]
    if asked.as_json:
        for one in news:
            click.echo(json.dumps({"dry_run": True, **one.to_json()}))
        return
    screen = console()
    for one in news:
        if one.what in ("proposed", "asked", "held", "expired", "already out", "trouble", "not requeued"):
            screen.print(styled(_line(one)), soft_wrap=True)
    for call in cluster.calls:
        screen.print(styled(f"would call: {call}"), soft_wrap=True)
    if not cluster.calls:
        screen.print(styled("nothing would be called"))
    if not asked.policy.act:
        screen.print(styled("and that only with act = true in the policy, or --act"))


# What is printed ------------------------------------------------------------------------------------------------------


def _last(state: State) -> int:
    rows = state.history(last=1)
    return rows[-1].number if rows else 0


def _print_news(state: State, last: int, as_json: bool) -> int:
    """What happened since; the number of the last of it."""
    for one in state.news(last):
        if as_json:
            click.echo(json.dumps(one.to_json()))
        else:
            console().print(styled(_line(one), _STYLES.get(one.what, "")), soft_wrap=True)
        last = one.number
    return last


_STYLES = {
    "done": "green",
    "failed": "red",
    "refused": "red",
    "unclear": "bold red",
    "returned": "bold red",
    "expired": "yellow",
    "asked": "yellow",
    "held": "yellow",
    "trouble": "yellow",
}


def _line(one: Entry) -> str:
    about = " ".join(part for part in (one.node, one.incident) if part)
    return f"{one.time}  {one.what:<12} {about}{': ' if about else ''}{one.text}"
