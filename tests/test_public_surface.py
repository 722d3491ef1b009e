"""What `import bitwitness` offers, and what it must not need."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import bitwitness

TORCH_FREE = ("errors", "evidence", "topology", "verdict", "policy", "runfiles")

WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""


def python(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def type_checking_imports() -> dict[str, str]:
    """Each name that type checkers see, and the module that it comes from."""
    assert bitwitness.__file__ is not None
    tree = ast.parse(Path(bitwitness.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    found: dict[str, str] = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "re-exported names say so: `import X as X`"
            found[alias.name] = str(node.module)
    return found


def test_type_checkers_see_what_is_exported() -> None:
    seen = type_checking_imports()
    assert sorted(["__version__", *seen]) == sorted(bitwitness.__all__)
    assert len(set(bitwitness.__all__)) == len(bitwitness.__all__)
    for name, home in seen.items():
        assert getattr(bitwitness, name) is getattr(importlib.import_module(home), name)


def test_nothing_public_is_left_out() -> None:
    public = {
        name
        for name, value in vars(bitwitness).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - set(bitwitness.__all__) <= {"annotations", "TYPE_CHECKING", "Any", "import_module"}
    assert dir(bitwitness) == sorted(bitwitness.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(bitwitness, "Gaurd")
    with pytest.raises(AttributeError, match="module 'bitwitness' has no attribute 'Gaurd'"):
        getattr(bitwitness, "Gaurd")  # noqa: B009


def test_a_name_is_looked_up_once() -> None:
    assert python("import bitwitness; bitwitness.Policy; print('Policy' in vars(bitwitness))") == "True"


@pytest.mark.parametrize("module", ["bitwitness", *(f"bitwitness.{name}" for name in TORCH_FREE)])
def test_light_modules_load_neither_torch_nor_numpy(module: str) -> None:
    loaded = python(f"import sys, {module}; print([name for name in ('torch', 'numpy') if name in sys.modules])")
    assert loaded == "[]"


def test_the_light_names_work_without_torch() -> None:
    light = [name for name, home in type_checking_imports().items() if home.split(".")[1] in TORCH_FREE]
    assert "Policy" in light
    program = WITHOUT_TORCH.format(blocked="torch") + "import bitwitness\n"
    assert python(program + "".join(f"bitwitness.{name}\n" for name in light) + "print('fine')") == "fine"


@pytest.mark.parametrize("blocked", ["torch", "numpy"])
@pytest.mark.parametrize("name", ["Guard", "fingerprint_tensors"])
def test_what_needs_the_extra_names_it(name: str, blocked: str) -> None:
    program = WITHOUT_TORCH.format(blocked=blocked) + (
        "import bitwitness\n"
        "try:\n"
        f"    bitwitness.{name}\n"
        "except bitwitness.MissingExtra as error:\n"
        "    print(error)\n"
        "else:\n"
        "    print('loaded')\n"
    )
    said = python(program)
    if blocked == "numpy" and said == "loaded":
        return  # torch works without numpy, and so may we
    assert said == f"bitwitness.{name} needs {blocked}: pip install 'bitwitness[train]'"
