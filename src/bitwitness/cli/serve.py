"""`bitwitness serve`: the web console, as a process that is started and stopped."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from bitwitness.cli.logs import log_to_stderr
from bitwitness.cli.options import seconds_up_to
from bitwitness.cli.output import console, styled
from bitwitness.cli.runs import GIVEN_PATH, is_run
from bitwitness.durations import seconds_of
from bitwitness.errors import ConfigurationError, MissingExtra

if TYPE_CHECKING:
    from bitwitness.store.database import Database
    from bitwitness.web.background import Background
    from bitwitness.web.settings import Settings
    from bitwitness.web.status import Status
    from bitwitness.web.users import OneToken

PORT = 8642
_LONGEST_KEEP = timedelta(days=36_500)


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks for."""

    runs: tuple[Path, ...]
    parents: tuple[Path, ...]
    fleets: tuple[Path, ...]
    database: str
    host: str
    port: int
    users: Path | None
    allow_actions: bool
    public: tuple[str, ...]
    keep: timedelta | None
    every: float
    as_json: bool

    @property
    def imports(self) -> bool:
        """Whether there is anything to import."""
        return bool(self.runs or self.parents or self.fleets)


def _keep(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    if value is None:
        return None
    try:
        kept = timedelta(seconds=seconds_of(value))
    except (ValueError, OverflowError) as error:
        raise click.BadParameter(str(error), ctx, param) from error
    if not timedelta(hours=1) <= kept <= _LONGEST_KEEP:
        raise click.BadParameter("must be at least 1h", ctx, param)
    return kept


@click.command()
@click.argument("runs", type=GIVEN_PATH, metavar="[RUN_DIR]...", nargs=-1)
@click.option(
    "--parent", "parents", type=GIVEN_PATH, multiple=True, metavar="DIR", help="Every run directly below; new ones too."
)
@click.option(
    "--fleet",
    "fleets",
    type=GIVEN_PATH,
    multiple=True,
    metavar="STATE",
    help="State folder of a `bitwitness fleet watch`: its proposals, and who did what.",
)
@click.option(
    "--db",
    "database",
    metavar="URL",
    default="",
    envvar="BITWITNESS_DB",
    help="A path, or postgresql://... Kept over restarts. Default: BITWITNESS_DB, else a file in the folder for temporary files.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65_535), default=PORT, show_default=True, help="0: one that is free.")
@click.option("--users", type=GIVEN_PATH, metavar="FILE", help="Who may sign in (`bitwitness console user add`).")
@click.option("--allow-actions", is_flag=True, help="Let operators act from here. Default: it only shows.")
@click.option(
    "--public", multiple=True, metavar="URL", help="By which address people reach it, e.g. through a proxy with TLS."
)
@click.option(
    "--keep", callback=_keep, metavar="TIME", help="Drop raw records of runs that ended longer ago, e.g. 90d."
)
@click.option(
    "--every",
    callback=seconds_up_to(3600, "an hour"),
    default="2s",
    show_default=True,
    help="Between two looks at the runs.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with the address, once it listens.")
def serve(
    runs: tuple[Path, ...],
    parents: tuple[Path, ...],
    fleets: tuple[Path, ...],
    database: str,
    host: str,
    port: int,
    users: Path | None,
    allow_actions: bool,
    public: tuple[str, ...],
    keep: timedelta | None,
    every: float,
    as_json: bool,
) -> None:
    """Show runs, incidents and the fleet in a browser: what was checked, what was found, who did what.

    RUN_DIR is the directory of a run, or a folder of runs. With --db alone it shows what others import into that database.

    It listens on 127.0.0.1 only, and only shows. On another --host everybody must sign in: by --users, or by a token that is
    printed at the start. It speaks plain HTTP: put a proxy with TLS before it, and name its address by --public. Acting needs
    --allow-actions and an operator who is signed in. No file of a run is written while it only shows.

    Ctrl-C and SIGTERM end it with 0.
    """
    own, also = _sorted(runs, parents, fleets, database)
    asked = Asked(own, also, fleets, database, host, port, users, allow_actions, public, keep, every, as_json)
    log_to_stderr()
    try:
        import bitwitness.web.app  # noqa: F401 - whether all of it is installed
    except ImportError as missing:
        if isinstance(missing, ModuleNotFoundError) and not str(missing.name).startswith("bitwitness"):
            raise MissingExtra(f"the console needs {missing.name}: pip install 'bitwitness[web]'") from missing
        raise
    _serve(asked)


def _sorted(
    runs: Sequence[Path], parents: Sequence[Path], fleets: Sequence[Path], database: str
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Runs, and folders of runs, of what was given; everything that is not there is an error."""
    if not (runs or parents or fleets or database):
        raise click.UsageError("name a RUN_DIR, or --parent DIR, or a database by --db")
    for option, paths in (("--parent ", parents), ("--fleet ", fleets), ("", runs)):
        for path in paths:
            if not path.is_dir():
                what = "is not a directory" if path.exists() else "does not exist"
                raise ConfigurationError(f"{option}{path} {what}")
    own, also = [], [path.absolute() for path in parents]
    for path in runs:
        if is_run(path):
            own.append(path.absolute())
        elif any(is_run(below) for below in path.iterdir() if below.is_dir()):
            also.append(path.absolute())
        else:
            raise ConfigurationError(
                f"{path} is no directory of a run, and has none in it. For runs that come later: --parent {path}"
            )
    return tuple(dict.fromkeys(own)), tuple(dict.fromkeys(also))


def _serve(asked: Asked) -> None:
    from bitwitness.fleet.serving import HEADER_SECONDS, Server
    from bitwitness.web.app import create
    from bitwitness.web.manners import MANNERS
    from bitwitness.web.status import Status
    from bitwitness.web.users import UsersFile

    settings, token = _settings(asked)
    with ExitStack() as stack:
        if isinstance(settings.users, UsersFile):
            stack.enter_context(settings.users)
        stop = stack.enter_context(_stopped_by_signals())
        status = Status()
        database = stack.enter_context(_database(asked))
        app = create(database, settings, status)
        server = Server(
            app,
            asked.host,
            asked.port,
            body_seconds=HEADER_SECONDS,  # a form comes with its headers
            downloads="/export/",
            headers=MANNERS,
            option="--port",
        )
        stack.callback(server.stop)
        if asked.imports or asked.keep is not None:
            stack.callback(_background(asked, database, status).start().stop)
        stack.callback(app.state.changes.stop)
        _tell(asked, address_of(server.host, server.port, asked.public), server.port, token, settings)
        while not stop.wait(1.0):
            if not server.alive:
                raise ConfigurationError("the web server has ended: the log says why")


def _settings(asked: Asked) -> tuple[Settings, OneToken | None]:
    """How the console is to be, and the token that was made for it, if any."""
    from bitwitness.web.settings import Settings, hosts_of, is_loopback, origin_of
    from bitwitness.web.users import OneToken, UsersFile

    loopback = is_loopback(asked.host)
    needed = asked.users is None and (asked.allow_actions or not loopback)
    token = OneToken() if needed else None
    settings = Settings(
        allow_actions=asked.allow_actions,
        fleets=tuple(path.absolute() for path in asked.fleets),
        users=UsersFile(asked.users) if asked.users is not None else token,
        open=loopback and asked.users is None,
        hosts=hosts_of(asked.host, asked.public, () if loopback else (socket.gethostname(), socket.getfqdn())),
        origins=frozenset(origin_of(one) for one in asked.public),
        runs=asked.runs,
        parents=asked.parents,
    )
    return settings, token


@contextmanager
def _database(asked: Asked) -> Iterator[Database]:
    """What was asked for, or one that is gone when this ends."""
    from bitwitness.store.database import Database

    with ExitStack() as stack:
        address: str | Path = asked.database
        if not address:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bitwitness-console-"))
            address = Path(folder) / "console.db"
        yield stack.enter_context(Database(address, create=asked.imports))


def _background(asked: Asked, database: Database, status: Status) -> Background:
    from bitwitness.store.importing import Importer
    from bitwitness.web.background import Background

    def importer() -> Any:
        return Importer(database, asked.runs, parents=asked.parents, fleets=asked.fleets)

    return Background(importer, status, every=asked.every, prune=_removing(database, asked.keep))


def _removing(database: Database, keep: timedelta | None) -> Callable[[], object] | None:
    if keep is None:
        return None
    from bitwitness.store.retention import prune

    return lambda: prune(database, keep=keep)


@contextmanager
def _stopped_by_signals() -> Iterator[threading.Event]:
    """The first signal ends it in order, a second one at once."""
    stop = threading.Event()

    def asked(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def address_of(host: str, port: int, public: Sequence[str]) -> str:
    """An address that can be opened: the one that people are told, else of where it listens; all addresses are none, so of this machine."""
    from bitwitness.web.settings import EVERYWHERE, origin_of

    if public:
        return origin_of(public[0])
    name = socket.gethostname() if host in EVERYWHERE else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"


def _tell(asked: Asked, address: str, port: int, token: OneToken | None, settings: Settings) -> None:
    """The address, on stdout; what a person should know besides, on stderr."""
    import json

    if asked.as_json:
        record: dict[str, Any] = {"address": address, "host": asked.host, "port": port, "pid": os.getpid()}
        record |= {"public": sorted(settings.origins), "actions": asked.allow_actions}
        click.echo(json.dumps(record | ({"token": token.token} if token is not None else {})))
    else:
        click.echo(f"{address}/")
        screen = console(stderr=True)
        if token is not None:
            what = "to act, sign in with" if settings.open else "sign in with"
            screen.print(
                styled(f"{what} this token, which is lost when the console ends: {token.token}"), soft_wrap=True
            )
        if not settings.open and not any(one.startswith("https:") for one in settings.origins) and not _local(asked):
            screen.print(
                styled(
                    "what is shown, and what signs in, goes over the network unencrypted: put a proxy with TLS before it and "
                    "name its address by --public https://...",
                    "yellow",
                ),
                soft_wrap=True,
            )


def _local(asked: Asked) -> bool:
    from bitwitness.web.settings import is_loopback

    return is_loopback(asked.host)
