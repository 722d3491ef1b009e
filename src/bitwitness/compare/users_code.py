"""Code of a user that runs inside ours: what it may raise, and how that is told.

A workload is somebody's script. It may leave the process (`sys.exit`), and a comparison must then end with its own exit code and not
with that one; and when it raises, whoever wrote it needs the line in it, and not a page of ours.
"""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

import bitwitness

_LONGEST = 400


class WorkExited(Exception):
    """The user's code asked for the end of the process. An error of the work like any other, and no end of ours."""


class Interrupted(BaseException):
    """Somebody has asked for the end; no error of anybody, and not to be caught with those."""


@contextmanager
def typed_apart() -> Iterator[None]:
    """While it lasts, a Ctrl-C is told apart from a `KeyboardInterrupt` that the user's code raises.

    Raises:
        KeyboardInterrupt: it was typed.
    """

    def heard(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGINT, heard)
    try:
        yield
    except Interrupted:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def no_exit() -> Iterator[None]:
    """Whatever the user's code inside raises is an error, also what would end a process.

    A `KeyboardInterrupt` may be one that was typed, as long as Python's own handler is there to raise it; else it is the code's.

    Raises:
        WorkExited: it asked for the end of the process.
    """
    try:
        yield
    except (Exception, Interrupted):
        raise
    except BaseException as error:
        typed = isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if typed:
            raise
        raise WorkExited(
            f"it raised {type(error).__name__}({_text(error)}), which ends a process: a workload returns or raises an error"
        ).with_traceback(error.__traceback__) from None


def said(error: BaseException) -> str:
    """An error of the user's code in one line: its type, what it says, and the place in that code."""
    kind = "" if isinstance(error, WorkExited) else f"{type(error).__name__}: "
    place = place_of(error)
    text = _text(error)
    more = ""
    if "deterministic" in text:
        more = ". Deterministic algorithms are switched on, because bits are compared: replace this operation, or run on the processor"
    elif isinstance(error, torch.OutOfMemoryError):
        more = ". Besides the model, a participant holds one tensor at a time; several of one device (a control) hold several models"
    return f"{kind}{text}{f' ({place})' if place else ''}{more}"


def place_of(error: BaseException) -> str:
    """The innermost line that is neither ours nor PyTorch's nor of Python itself, as FILE:LINE; "" where there is none."""
    own = (str(Path(torch.__file__).parent), str(Path(bitwitness.__file__).parent), "<frozen ")
    standard = sysconfig.get_path("stdlib")
    frames = [
        one
        for one in traceback.extract_tb(error.__traceback__)
        if not one.filename.startswith(own)
        and (not one.filename.startswith(standard) or "site-packages" in one.filename)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _text(error: BaseException) -> str:
    first = "what it says cannot be had"
    with suppress(Exception):  # whoever writes an error may make one there
        first = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
    return first if first.isprintable() else repr(first)
