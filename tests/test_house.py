"""The shape of the code, as data: limits measured on the best code bases of the field, and manners that no linter checks.

Changing a number here is a decision to be argued for, not a way to pass.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import quantiles
from urllib.parse import urlsplit

from tests.slow import SLOW

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "bitwitness"

FILE_LINES_MAX, FILE_LINES_P90 = 600, 400
FUNCTION_LINES_MAX, FUNCTION_LINES_P90 = 100, 40
TEXT_SUFFIXES = {"", ".cfg", ".json", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
FOLDERS = ("src", "tests", "benchmarks", "docs", "deploy", ".ci")


@dataclass(frozen=True)
class Function:
    """A function or method of the package."""

    where: str
    lines: int
    node: ast.FunctionDef | ast.AsyncFunctionDef


@cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(SOURCE.rglob("*.py")))


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def functions() -> Iterator[Function]:
    for file in sources():
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield Function(f"{_short(file)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1, node)


def _short(file: Path) -> str:
    return str(file.relative_to(ROOT))


def _p90(values: list[int]) -> float:
    return quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else max(values, default=0)


def _lines(file: Path) -> int:
    return file.read_text(encoding="utf-8").count("\n")


def test_files_are_short() -> None:
    lines = {_short(file): _lines(file) for file in sources()}
    assert not {file: count for file, count in lines.items() if count > FILE_LINES_MAX}
    assert _p90(list(lines.values())) <= FILE_LINES_P90


def test_functions_are_short() -> None:
    found = list(functions())
    assert not {function.where: function.lines for function in found if function.lines > FUNCTION_LINES_MAX}
    assert _p90([function.lines for function in found]) <= FUNCTION_LINES_P90


def test_every_function_is_annotated() -> None:
    assert not [function.where for function in functions() if _unannotated(function.node)]


def _unannotated(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    starred = [argument for argument in (node.args.vararg, node.args.kwarg) if argument is not None]
    missing = [
        argument.arg
        for position, argument in enumerate([*named, *starred])
        if argument.annotation is None and not (position == 0 and argument.arg in ("self", "cls"))
    ]
    return missing + ([] if node.returns is not None else ["return"])


def test_every_module_says_why_it_exists() -> None:
    """Files that only mark a package may stay empty, and private ones of a line may speak for themselves."""
    public = [file for file in sources() if file.name == "__init__.py" or not file.name.startswith("_")]
    assert not [_short(file) for file in public if tree(file).body and not ast.get_docstring(tree(file))]


def test_public_names_have_docstrings() -> None:
    assert not list(_undocumented())


def _undocumented() -> Iterator[str]:
    for file in sources():
        for node in _public_definitions(tree(file)):
            if not ast.get_docstring(node):
                yield f"{_short(file)}:{node.lineno} {node.name}"


def _public_definitions(parent: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    for node in parent.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public_definitions(node)


def test_source_does_not_print() -> None:
    """Libraries log, commands echo through click and rich; print belongs to neither."""
    assert not [
        f"{_short(file)}:{node.lineno}"
        for file in sources()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def test_no_html_in_python() -> None:
    """Pages are templates; a tag in a Python string is the start of the other way."""
    tag = re.compile(
        r"</?(?:html|head|body|div|span|table|t[rdh]|p|a|ul|ol|li|h[1-6]|script|style|svg|br|img)\b[^<]*>",
        re.IGNORECASE,
    )
    assert not [
        f"{_short(file)}:{node.lineno}"
        for file in sources()
        for node in ast.walk(tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and tag.search(node.value)
    ]


def test_command_line_imports_without_torch() -> None:
    """A platform team installs it on machines without an accelerator, and `--help` must not wait for torch."""
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import bitwitness.cli.main"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Nothing committed may depend on where it was written ---------------------------------------------------------------


def texts() -> Iterator[Path]:
    """What is committed: the files of the known folders, and those at the top."""
    for file in [*ROOT.iterdir(), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*"))]:
        hidden_or_built = "__pycache__" in file.parts or (file.parent == ROOT and file.name.startswith(".coverage"))
        if file.is_file() and file.suffix in TEXT_SUFFIXES and not hidden_or_built:
            yield file


def test_no_package_index_is_named() -> None:
    """Where packages come from is the installer's business: a name in the tree would bind everybody to ours."""
    index = re.compile(r"https?://[^\s)>\"'`]*/(?:simple|whl|wheels)\b", re.IGNORECASE)
    names = {**_own_machine(), **{match: "an index" for file in texts() for match in index.findall(file.read_text())}}
    found = {f"{_short(file)}: {names[name]}" for file in texts() for name in names if name in file.read_text()}
    assert not found


def _own_machine() -> dict[str, str]:
    """Hosts and folders that belong to the machine this runs on, as pip and the file system know them."""
    lines = [f"{name}={value}" for name, value in os.environ.items() if name.startswith("PIP_")]
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    names = {str(ROOT): "the folder of this checkout"}
    for line in [*lines, *listed.stdout.splitlines()]:
        key, _, value = line.partition("=")
        if re.search(r"index|find.?links|trusted.?host", key, re.IGNORECASE):
            for word in value.strip("'\"").replace("\\n", " ").split():
                host = urlsplit(word).hostname
                names[host or word] = f"a value of pip's setting {key}"
    return names


def test_slow_files_are_there() -> None:
    assert [name for name in SLOW if not (ROOT / "tests" / name).is_file()] == []
