"""The list of devices that were taken out, where nodes can read it: beside the state, and in a folder on shared storage.

The state itself stays on a local disk and is nobody's to read: a database on NFS loses its locks, and a service keeps its
folder closed. So what every node must see before a job starts there is a file of its own, elsewhere and readable by all. One
that cannot be kept up to date is a trouble, because nodes would let a condemned device in.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Sequence
from pathlib import Path

from bitwitness.errors import RunFilesError
from bitwitness.fleet.identity import Condemned, write_condemned
from bitwitness.fleet.watching import Stamp, Trouble, stamp_of

logger = logging.getLogger(__name__)

CONDEMNED = "condemned.json"
"""What `bitwitness fleet admit` looks at on every node."""
READABLE = 0o644


def publish(folder: Path, condemned: Sequence[Condemned]) -> None:
    """Write the list into a shared folder, whole or not at all, readable by everybody whatever the umask.

    Raises:
        RunFilesError: it cannot be written there, or nodes could not read it.
    """
    try:
        mode = folder.stat().st_mode
    except OSError as error:  # not made here: below a mount that is absent it would be a folder of this machine
        raise RunFilesError(f"{folder} cannot be reached: {error.strerror or error}") from error
    write_condemned(folder / CONDEMNED, condemned, mode=READABLE)
    if not mode & stat.S_IXOTH:
        raise RunFilesError(f"{folder} is closed to others (mode {stat.S_IMODE(mode):04o}): chmod 755 {folder}")


class Publisher:
    """Keeps the list as the database has it.

    Args:
        own: folder of the state.
        shared: another one, on shared storage.
    """

    def __init__(self, own: Path, shared: Path | None) -> None:
        self._own, self._shared = own, shared
        self._written: dict[Path, tuple[list[Condemned], Stamp | None]] = {}

    def round(self, condemned: list[Condemned]) -> list[Trouble]:
        """Write what has changed, or was changed by others; what could not be written."""
        troubles = []
        for folder in (self._own, self._shared):
            if folder is None:
                continue
            path = folder / CONDEMNED
            try:
                if self._written.get(path) != (condemned, stamp_of(path)):
                    if folder == self._shared:
                        publish(folder, condemned)
                    else:
                        write_condemned(path, condemned)
                    self._written[path] = (condemned, stamp_of(path))
            except (RunFilesError, OSError) as error:
                text = f"nodes do not see which devices were taken out, and let them in: {error}"
                troubles.append(Trouble(f"condemned:{path}", text, "critical"))
        return troubles
