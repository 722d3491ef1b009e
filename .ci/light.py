"""What a platform team installs: the wheel alone, with no torch and no extra. Every command of the fleet works, or says which extra.

Run by `.ci/run` with the Python of an environment that holds nothing else, from a folder that is no checkout:

    python light.py CHECKOUT
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import bitwitness
from bitwitness.runfiles import RunFiles

sys.path.append(sys.argv[1])  # the checkout, which has no bitwitness in it: that is in src/
from tests.fleet.incidents import topology, write

PROGRAM = Path(sys.executable).parent / "bitwitness"
BARE = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
XID = "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping\n"


def call(*words: object, code: int = 0, says: str = "", stdin: str = "") -> str:
    """What a command prints on stdout; it must end with this code, and say this."""
    line = [str(PROGRAM), *map(str, words)]
    done = subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=120, check=False, env=BARE)
    said = done.stdout + done.stderr
    if done.returncode != code or says not in said or "Traceback" in said:
        sys.exit(f"{' '.join(line)}\nended with {done.returncode} instead of {code}, and was to say {says!r}:\n{said}")
    return done.stdout


def imports() -> None:
    """The torch-free half imports from the wheel, and the rest says what it needs."""
    for name in (
        "torch",
        "numpy",
        "httpx",
        "prometheus_client",
        "starlette",
        "jinja2",
        "pynvml",
        "kubernetes",
        "boto3",
        "grpc",
        "fastapi",
        "sqlalchemy",
        "cryptography",
    ):
        assert importlib.util.find_spec(name) is None, f"the base install must not bring {name}"
    assert "site-packages" in (bitwitness.__file__ or ""), bitwitness.__file__
    for name in ("errors", "evidence", "fleet", "policy", "runfiles", "topology", "verdict"):
        importlib.import_module(f"bitwitness.{name}")
    said = ""
    try:
        getattr(bitwitness, "Guard")  # noqa: B009 - asking for it is what fails
    except bitwitness.MissingExtra as error:
        said = str(error)
    if "bitwitness[train]" not in said:
        sys.exit(f"Guard without torch must say what to install: {said!r}")


def incident(run_dir: Path) -> str:
    """An incident that names n1, in a run that knows its nodes, and its id; written as our tests do."""
    found = write(run_dir, at=datetime.now(UTC))
    RunFiles(run_dir).write_run({"started": datetime.now(UTC).isoformat(), "placement": topology().to_json()})
    return found.name


def fleet(folder: Path) -> None:
    """One incident, from the log to the undo."""
    run_dir, state = folder / "run", folder / "state"
    name = incident(run_dir)
    assert '"xid:63"' in call("fleet", "signals", "--from", "-", "--json", stdin=XID)
    call("fleet", "status", "--state", state, code=2, says="no state of a controller")
    call("fleet", "watch", run_dir, "--state", state, "--dry-run", says="would call")
    call("fleet", "watch", run_dir, "--state", state, "--once", "--act", "--publish", folder)
    assert json.loads(call("fleet", "status", "--state", state, "--json"))["proposals"][0]["status"] == "done"
    call("fleet", "status", "--state", state, says="n1")
    call("fleet", "history", "--state", state, says=name)
    condemned = ("fleet", "admit", "--condemned", folder / "condemned.json", "--node", "n1")
    call(*condemned, says="cannot be told")
    call(*condemned, "--device", "GPU-n1-0", code=1, says="refused")
    call("fleet", "clear", "n1", "--why", "repaired", "--state", state, says="is in service again")
    policy = folder / "rehearsed.toml"
    policy.write_text('[cluster]\nkind = "local"\n')
    call("fleet", "rehearse", "--policy", policy, "--run", run_dir, "--state", state, says="0 would fail")
    call("fleet", "agent", "--signals", folder, "--node", "n1", "--once")
    call(*condemned, "--device", "GPU-n1-0", says="admitted")


def scan(folder: Path) -> None:
    """A set of nodes is searched without torch; what computes says what it needs."""
    test = folder / "test.sh"
    test.write_text('case ",$1," in *,n3,*) exit 1 ;; esac\n')
    search = ("find-bad", "--nodes", "n[1-4]", "--test", f"sh {test} {{nodes}}", "--state", folder / "search.jsonl")
    assert json.loads(call(*search, "--json"))["bad"] == ["n3"]
    call("scan", "--devices", 3, code=2, says="pip install 'bitwitness[scan]'")
    call("scan", "key", folder / "key", code=2, says="pip install 'bitwitness[scan]'")
    call("scan", "show", folder, code=2)


def extras(folder: Path) -> None:
    """What needs an extra says which."""
    run_dir, state, token = folder / "run", folder / "state", folder / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef0123456789abcdef\n")
    needs = "pip install 'bitwitness[fleet]'"
    policy = folder / "fleet.toml"
    policy.write_text('[[notify]]\nkind = "webhook"\nurl = "http://127.0.0.1:9/"\n')
    call("fleet", "watch", run_dir, "--state", state, "--once", "--policy", policy, code=2, says=needs)
    policy.write_text('[cluster]\nkind = "slurm"\nrest = "http://127.0.0.1:9"\nuser = "x"\n')
    call("fleet", "watch", run_dir, "--state", state, "--once", "--policy", policy, code=2, says=needs)
    for kind, extra in (("kubernetes", "kubernetes"), ("nvsentinel", "kubernetes"), ("hyperpod", "aws")):
        policy.write_text(f'[cluster]\nkind = "{kind}"\n')
        watch = ("fleet", "watch", run_dir, "--state", state, "--once", "--policy", policy)
        call(*watch, code=2, says=f"pip install 'bitwitness[{extra}]'")
    listen = ("--listen", "127.0.0.1:0", "--token-file", token)
    call("fleet", "watch", run_dir, "--state", state, *listen, code=2, says=needs)
    for console in (("serve", run_dir), ("report", run_dir), ("store", "status", "--db", folder / "console.db")):
        call(*console, code=2, says="pip install 'bitwitness[web]'")
    call("console", "user", "add", folder / "users.json", "alice")
    call("fleet", "send", run_dir, "--to", "http://127.0.0.1:9", "--token-file", token, code=2, says=needs)


def main() -> None:
    """All of it."""
    imports()
    call("--version")
    call("--help")
    for name in ("admit", "agent", "clear", "history", "rehearse", "send", "signals", "status", "watch"):
        call("fleet", name, "--help", says="Usage")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        fleet(Path(folder))
        scan(Path(folder))
        extras(Path(folder))


main()
