from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.faults import grammar, presets
from bitwitness.faults.impossible import objection
from bitwitness.faults.spec import MEMORY_TARGETS, TARGETS, WORKS, MutateKind, SelectKind, Target

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")

PUBLISHED = """
he2023.input he2023.wt he2023.rbflip he2023.rd he2023.zero he2023.rd_correct he2023.n16_rd he2023.n16_rd_correct
he2023.n64_input he2023.n64_wt he2023.n16_rd_glb he2023.n16_rd_correct_glb he2023.n64_input_glb he2023.n64_wt_glb
prism.tensor_core prism.fma prism.cache_line anatomy anatomy.stride2 anatomy.stride4 anatomy.stride8 anatomy.stride16
anatomy.control aegis-eu hbm-1bit aws.activation-10000
"""


def test_all_published_models_are_there() -> None:
    assert list(presets.NAMES) == PUBLISHED.split()


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_phase_of_every_preset_is_a_fault_that_can_be_written(name: str) -> None:
    preset = presets.get(name)
    hit: set[Target] = set()
    for seed in range(20):
        fault = presets.expand(name, rank=2, step=8, seed=seed, module="blocks.*")
        assert objection(fault) is None
        assert grammar.parse(str(fault)) == fault
        assert (fault.preset, fault.where.rank, fault.when.first, fault.where.glob) == (name, 2, 8, "blocks.*")
        assert fault == presets.expand(name, rank=2, step=8, seed=seed, module="blocks.*")
        hit.add(fault.where.target)
    assert hit == set(preset.targets)


@pytest.mark.parametrize("name", presets.NAMES)
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_phase_has_its_targets_or_says_that_it_has_none(name: str, phase: presets.Phase) -> None:
    expected = getattr(presets.get(name), phase)
    if not expected:
        with pytest.raises(ConfigurationError, match=f"preset {name} has nothing to hit in phase '{phase}'"):
            presets.expand(name, rank=0, step=1, seed=0, phase=phase)
        return
    found = {presets.expand(name, rank=0, step=1, seed=seed, phase=phase).where.target for seed in range(20)}
    assert found == set(expected)


@pytest.mark.parametrize("target", ["fwd_out", "grad_in", "grad_w"])
def test_a_phase_may_be_one_target(target: Target) -> None:
    fault = presets.expand("prism.fma", rank=None, step=5, seed=0, phase=target, rate=1.0)
    assert str(fault) == f"{target} @ every=1 from=5 : n=1 -> scale=65536.0 ; permanent redraw"


@pytest.mark.parametrize("target", MEMORY_TARGETS)
def test_memory_is_whatever_is_stored(target: Target) -> None:
    assert presets.expand("hbm-1bit", rank=0, step=1, seed=0, phase=target).where.target == target


def test_prism_strikes_in_a_share_of_the_steps() -> None:
    fault = presets.expand("prism.cache_line", rank=1, step=7, seed=0, phase="forward", rate=0.25)
    assert str(fault) == "rank=1 fwd_out @ p=0.25 from=7 : row -> bit=any ; permanent redraw"


def test_a_module_stands_for_its_parameters() -> None:
    globs = {
        module: presets.expand("anatomy", rank=0, step=1, seed=0, module=module, phase="grad_w").where.glob
        for module in ("*", "head", "blocks.*")
    }
    assert globs == {"*": "", "head": "head.*", "blocks.*": "blocks.*"}


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("he2023.rbflp", {}, "no preset 'he2023.rbflp': did you mean he2023.rbflip"),
        ("xyz", {}, "there are he2023.input, "),
        ("anatomy", {"rate": 0.5}, "has no rate"),
        ("prism.fma", {"rate": 0.0}, "no share of steps"),
        ("prism.fma", {"rate": math.nan}, "no share of steps"),
        ("prism.fma", {"rate": 1e-300}, "no share of steps"),
        ("anatomy", {"step": -1}, "step -1 is none"),
        ("anatomy", {"step": 10**400}, "is none; steps are"),
        ("anatomy", {"rank": -1}, "rank -1 is none"),
        ("anatomy", {"module": "a b"}, "no glob of modules"),
        ("anatomy", {"module": "a@b"}, "no glob of modules"),
        ("anatomy", {"phase": "param"}, "it hits fwd_out, grad_in, grad_w"),
    ],
)
def test_what_cannot_be(name: str, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        presets.expand(name, **{"rank": 0, "step": 1, "seed": 0, **settings})  # type: ignore[arg-type]


def test_the_documented_table_is_this_one() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]*) \| `([^|`]+ ; [^|`]+)` \| ([^|]+) \|$", DOCUMENT, flags=re.MULTILINE)
    table = [(name, line, source, tuple(re.findall(r"`([^`]+)`", hits))) for name, hits, line, source in rows]
    assert table == [tuple(row) for row in presets.describe()]


def test_every_word_of_the_grammar_is_documented() -> None:
    words = set(re.findall(r"`,?([a-z_.0-9]+)(?:=[^`]*)?`", DOCUMENT.split("## Presets")[0]))
    assert set(TARGETS) | set(WORKS) | set(get_args(SelectKind)) | set(get_args(MutateKind)) <= words
