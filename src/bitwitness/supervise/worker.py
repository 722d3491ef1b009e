"""What runs in every worker before the user's script: `python -m bitwitness.supervise.worker [-m] SCRIPT ARGS`.

First the kernel is asked to end this process with its agent, before anything heavy is imported. Then the script runs as it
would have by itself. When it is done, that is said durably in the files of the run, and the process leaves by `os._exit`:
a worker that dies at interpreter exit, as those of gloo can, has finished all the same.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from bitwitness import preemption
from bitwitness.errors import BitwitnessError, CorruptionDetected
from bitwitness.runfiles.supervision import Mark, SupervisionFiles
from bitwitness.supervise.processes import die_with_parent, started

RUN_DIR = "BITWITNESS_RUN_DIR"
SUPERVISION = "BITWITNESS_SUPERVISION"
GENERATION = "BITWITNESS_GENERATION"
NOTES = "BITWITNESS_NOTES"
"""Names the node-local folder in which each worker leaves its process number and, should it fail, its error."""

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

FAULT, _INJECTOR = "BITWITNESS_FAULT", "bitwitness.faults.script"
"""Where faults on purpose are asked for, and who strikes. Named and not imported: it stands above, and a job without them must
not pay for it."""

_STACKS = signal.SIGUSR2
"""On this signal a worker prints the stacks of its threads: asked for before a hang is ended."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Run a script, or with `-m` a module, as `__main__`; say how it ended; leave."""
    die_with_parent()
    preemption.install()
    _introduce()
    # What a test or a notebook has put in the place of stderr has no file descriptor; the flags of -X may say the same.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        faulthandler.enable()
        faulthandler.register(_STACKS, all_threads=True)
    try:
        faults = importlib.import_module(_INJECTOR).install() if os.environ.get(FAULT) else None
        try:
            _run(arguments)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        if faults is not None:
            faults.finish()
    except SystemExit as error:
        _leave_failed(error, _code_of(error))
    except BaseException as error:  # noqa: BLE001  (whatever it is, it is this worker's end)
        error.__traceback__ = _of_the_script(error.__traceback__)
        with contextlib.suppress(OSError, ValueError):  # a full disk must not hide what it was
            if isinstance(error, CorruptionDetected):
                # No mistake of the script, and every rank raises it: a traceback each would bury what it says.
                sys.stderr.write(f"{type(error).__name__}: {error}\n")
            else:
                sys.excepthook(type(error), error, error.__traceback__)
        _leave_failed(error, error.exit_code if isinstance(error, BitwitnessError) else 1)
    _leave_done()


def _introduce() -> None:
    """Leave the number of this process where its wrapper looks, which can then signal it and see it die."""
    folder, slot = os.environ.get(NOTES), os.environ.get("LOCAL_RANK", "0")
    if folder:
        note = {"pid": os.getpid(), "started": started(os.getpid())}
        _put(Path(folder) / f"worker-{slot}", json.dumps(note))


def _run(arguments: Sequence[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = [arguments[1], *arguments[2:]]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = arguments[0]
    sys.argv = list(arguments)
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).absolute().parent)
    runpy.run_path(script, run_name="__main__")


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames in which the script was started."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>", runpy.__file__):
        first = first.tb_next
    return trace if first is None else first


def _code_of(error: SystemExit) -> int:
    if isinstance(error.code, int):
        return error.code & 0xFF or 1
    sys.stderr.write(f"{error.code}\n")
    return 1


def _leave_done() -> NoReturn:
    """The mark first: what dies after it has finished. Then what the interpreter does at exit, as far as it is harmless."""
    run_dir, session = os.environ.get(RUN_DIR), os.environ.get(SUPERVISION)
    if run_dir and session:
        mark: Mark = "stopped" if preemption.requested() else "finished"
        generation, rank = int(os.environ.get(GENERATION, "1")), int(os.environ.get("RANK", "0"))
        try:
            SupervisionFiles(run_dir).write_mark(session, generation, rank, mark)
        except BitwitnessError as error:
            traceback.print_exception(error)
            _leave_failed(error, error.exit_code)
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons, as at any exit
        atexit._run_exitfuncs()
    _leave(0)


def _leave_failed(error: BaseException, code: int) -> NoReturn:
    text, slot = json.dumps(describe(error, code)), os.environ.get("LOCAL_RANK", "0")
    for folder, path in ((os.environ.get(NOTES), f"error-{slot}.json"), ("", os.environ.get(ERROR_FILE))):
        if folder is not None and path:
            with contextlib.suppress(OSError):  # the first is on a disk of this node, and may be writable all the same
                _put(Path(folder, path), text)
    _leave(code)


def _put(path: Path, text: str) -> None:
    """Write a small file, whole or not at all: torchrun trips over half of one."""
    staged = path.with_name(f".{path.name}")
    try:
        staged.write_text(text, encoding="utf-8")
        staged.replace(path)
    finally:
        with contextlib.suppress(OSError):
            staged.unlink()


def describe(error: BaseException, code: int) -> dict[str, Any]:
    """An error in the shape of torchrun's error file, with what the supervisor wants to know beside it."""
    stack = "".join(traceback.format_exception(error))
    text = f"exit code {code}" if isinstance(error, SystemExit) else str(error)
    more: dict[str, Any] = {"type": type(error).__name__, "text": text, "exit_code": code, "time": time.time()}
    if isinstance(error, CorruptionDetected):
        more["incident"] = str(error.incident_path) if error.incident_path is not None else ""
        more["verdict"] = error.verdict.to_json()
    extra = {"py_callstack": stack, "timestamp": str(int(more["time"]))}
    return {"message": {"message": f"{more['type']}: {text}", "extraInfo": extra}, "bitwitness": more}


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
