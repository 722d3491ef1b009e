"""Lines as drivers log them, and short ways to have them read."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from bitwitness.fleet.signals import Signal, detect, kernel
from bitwitness.fleet.signals.times import Clock

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
REMAP = "NVRM: Xid (PCI:0000:9b:00): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
SWITCH = "nvidia-nvswitch3: SXid (PCI:0000:05:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"


def syslog(message: str, second: int = 0, host: str = "n1", program: str = "kernel") -> str:
    """A line of /var/log/messages, some minutes before NOW."""
    return f"Nov 29 11:{second // 60:02d}:{second % 60:02d} {host} {program}: {message}"


def read_lines(*lines: str | bytes, clock: Clock | None = None) -> list[Signal]:
    """The signals of a log of these lines."""
    raw = (line if isinstance(line, bytes) else line.encode() for line in lines)
    return list(kernel.read(raw, clock or Clock(NOW), origin="log"))


def read_file(path: Path, content: bytes | str | Iterable[str]) -> list[Signal]:
    """The signals of a file with this content."""
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else "\n".join([*content, ""])).encode()
    path.write_bytes(content)
    return list(detect.read(path, now=NOW))


def codes(signals: Iterable[Signal]) -> list[str]:
    """Their codes, in order."""
    return [one.code for one in signals]
