"""torchrun's agent, tied to the life of its wrapper: `python -m bitwitness.supervise.agent TORCHRUN-ARGS`.

torchrun ends with 1 whatever its workers ended with. The exit codes are in the exception that leaves it, and are left in a
file from here.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from bitwitness.supervise.processes import PARENT, die_with_parent

REPORT = "BITWITNESS_AGENT_REPORT"
"""Names the file in which an agent leaves how its workers ended."""


def main() -> None:
    """Run torchrun in this process."""
    die_with_parent()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # meant for the workers, where a scheduler sends it to everybody
    os.environ[PARENT] = str(os.getpid())  # the workers', from here on
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except json.JSONDecodeError as error:
        # torch has read the error file that a worker could not write to its end.
        sys.stderr.write(f"the error file of a worker is damaged, as it is where the disk was full: {error}\n")
        sys.exit(1)
    except Exception as error:
        failures = getattr(error, "failures", None)
        if not isinstance(failures, dict):
            raise
        # torch's ChildFailedError: the workers have said what was wrong, and the wrapper will say it again.
        leave_report([_plain(failure) for failure in failures.values()])
        sys.exit(1)


def _plain(failure: Any) -> dict[str, Any]:
    return {"local_rank": failure.local_rank, "exit_code": failure.exitcode, "error_file": str(failure.error_file)}


def leave_report(failures: list[dict[str, Any]]) -> None:
    """Leave how the workers that failed have ended: `local_rank`, `exit_code` (-n: signal n) and `error_file` of each."""
    path = os.environ.get(REPORT)
    if path:
        staged = Path(path).with_name(".report")
        with suppress(OSError):
            staged.write_text(json.dumps(failures), encoding="utf-8")
            staged.replace(path)


if __name__ == "__main__":
    main()
