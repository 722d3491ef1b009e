"""Reading a secret from a file, so that none is ever on a command line, in a policy file or in the environment.

A secret that others can read is none, and a controller that starts with one would look safe. So it refuses, and says what to
do. Nothing here puts what was read into an error or a log.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from bitwitness.errors import ConfigurationError

SHORTEST = 16
"""Characters of a token; `openssl rand -hex 32` gives 64."""
_LONGEST = 4096


def read_secret(path: Path, what: str, shortest: int = 1) -> str:
    """The one line in a file that only its owner can read. `what`: for the error, e.g. `the token of the inbox`.

    Systemd hands credentials over in a folder that only the service can enter; there, a group may have the right to read.

    Raises:
        ConfigurationError: absent, readable by others, empty, too short, or more than a line of plain characters.
    """
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigurationError(f"{path} ({what}) is not a regular file")
            others = stat.S_IRWXO if _is_credential(path) else stat.S_IRWXO | stat.S_IRWXG
            if state.st_mode & others:
                raise ConfigurationError(
                    f"{path} ({what}) can be used by others than its owner (mode {stat.S_IMODE(state.st_mode):04o}): "
                    f"chmod 600 {path}, and change the secret if somebody may have read it"
                )
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigurationError(f"{path} ({what}) cannot be read: {error.strerror or error}") from error
    secret = content.strip()
    if not secret:
        raise ConfigurationError(f"{path} ({what}) is empty: write a secret into it, e.g. by `openssl rand -hex 32`")
    if len(content) > _LONGEST or any(not 0x21 <= char <= 0x7E for char in secret):
        raise ConfigurationError(f"{path} ({what}) is not one line of plain characters without spaces")
    if len(secret) < shortest:
        raise ConfigurationError(
            f"{path} ({what}) has fewer than {shortest} characters, which can be guessed: `openssl rand -hex 32` makes one"
        )
    return secret.decode()


def _is_credential(path: Path) -> bool:
    folder = os.environ.get("CREDENTIALS_DIRECTORY", "")
    return bool(folder) and path.parent == Path(folder)
