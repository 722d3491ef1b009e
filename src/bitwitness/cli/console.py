"""`bitwitness console`: who may sign in to the web console."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bitwitness.cli.output import console as screen
from bitwitness.cli.output import print_json, print_list, styled
from bitwitness.cli.runs import GIVEN_PATH
from bitwitness.errors import ConfigurationError

ROLES = ("viewer", "operator")


@click.group()
def console() -> None:
    """Look after the users of the web console (`bitwitness serve`)."""


@console.group()
def user() -> None:
    """Add, list and remove users in a users file.

    A running console reads the file again when it changes: whoever is removed is signed out within seconds.
    """


@user.command()
@click.argument("file", type=GIVEN_PATH)
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="viewer", show_default=True, help="An operator may act.")
@click.option("--password-stdin", is_flag=True, help="Read a password from standard input, instead of making a token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def add(file: Path, name: str, role: str, password_stdin: bool, as_json: bool) -> None:
    """Add user NAME to FILE, or give NAME a new secret and role.

    Makes a token and prints it, once: only its hash is kept. A token signs in, and serves programs as
    `Authorization: Bearer TOKEN`; a password only signs in. FILE is made if it is not there, readable by its owner alone.
    """
    from bitwitness.web import users

    password = _password() if password_stdin else ""
    token = users.add(file, name, users.ROLES[ROLES.index(role)], password)
    if as_json:
        print_json({"name": name, "role": role, **({"token": token} if token else {})})
    elif token:
        click.echo(token)
        screen(stderr=True).print(styled(f"the token of {name} ({role}), shown this once: keep it like a password"))
    else:
        screen(stderr=True).print(styled(f"{name} ({role}) signs in with this password from now on"))


@user.command("list")
@click.argument("file", type=GIVEN_PATH)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def list_users(file: Path, as_json: bool) -> None:
    """List the users in FILE, and no secret."""
    from rich.table import Table

    from bitwitness.web import users

    found = users.read(file)
    if as_json:
        rows = [
            {"name": one.name, "role": one.role, "secret": _kind(one.token), "created": one.created} for one in found
        ]
        print_json({"users": rows})
        return
    table = Table("name", "role", "secret", "created", box=None, pad_edge=False)
    for one in found:
        table.add_row(*(styled(text) for text in (one.name, one.role, _kind(one.token), one.created)))
    print_list(table, screen())


@user.command()
@click.argument("file", type=GIVEN_PATH)
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def remove(file: Path, name: str, as_json: bool) -> None:
    """Remove user NAME from FILE; a running console ends their sessions."""
    from bitwitness.web import users

    users.remove(file, name)
    if as_json:
        print_json({"removed": name})
    else:
        screen(stderr=True).print(styled(f"{name} is removed"))


def _kind(token: str) -> str:
    return "token" if token else "password"


def _password() -> str:
    """A password from standard input; from a terminal it is asked for twice and not shown."""
    from bitwitness.web.hashing import LONGEST, SHORTEST, id_of

    if sys.stdin.isatty():
        password = str(click.prompt("Password", hide_input=True, confirmation_prompt=True, err=True))
    else:
        password = sys.stdin.readline(LONGEST + 2).rstrip("\r\n")
    if password != password.strip():
        raise ConfigurationError("the password begins or ends with a blank, which is taken off where one signs in")
    if not SHORTEST <= len(password) <= LONGEST:
        raise ConfigurationError(f"the password needs {SHORTEST} to {LONGEST} characters")
    if id_of(password):
        raise ConfigurationError("that is the form of a token; leave --password-stdin away to have one made")
    return password
