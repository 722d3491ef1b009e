"""This node's hardware signals as one file that a controller elsewhere reads: whole or not at all.

What is in it is what `bitwitness fleet signals --node NODE --details --json` prints here. A file that cannot be renewed stays as it
was and grows old, and the agent says so: nobody takes silence for health.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC
from pathlib import Path

from bitwitness.fleet.signals import collect, detect
from bitwitness.fleet.signals.gather import gather, of_node
from bitwitness.runfiles.files import TEMPORARY, write_bytes


def signals_json(node: str, sources: Sequence[Path] = ()) -> str:
    """The signals of a node as a JSON list.

    Args:
        node: its name.
        sources: files to read; none: this machine.

    Raises:
        ConfigurationError: a file cannot be read.
    """
    found = detect.read_all(sources, zone=UTC, host=node) if sources else collect.read(host=node)
    listed = gather(of_node(found, node), identities=True)
    return json.dumps([one.to_json(details=True) for one in listed], indent=2, allow_nan=False) + "\n"


def signals_file(folder: Path, node: str) -> Path:
    """Where the signals of a node are: what `{node}` stands for in a policy."""
    return folder / f"{node}.json"


def write_signals(folder: Path, node: str, sources: Sequence[Path] = ()) -> Path:
    """Read the signals of this node, and keep them in a folder; the file.

    Raises:
        ConfigurationError: a source cannot be read.
        RunFilesError: the folder does not take it.
    """
    path = signals_file(folder, node)
    content = signals_json(node, sources).encode()
    write_bytes(path, content, mode=0o644)
    return path


def tidy(folder: Path, node: str) -> None:
    """Remove what killed agents of this node have left half-written."""
    for leftover in folder.glob(f".{node}.json.*{TEMPORARY}"):
        with suppress(OSError):
            leftover.unlink()
