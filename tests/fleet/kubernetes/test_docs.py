"""What docs/kubernetes.md says of settings, permissions and words is what the code has."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.clusters.kubernetes import from_settings
from bitwitness.fleet.clusters.kubernetes_jobs import KINDS
from bitwitness.fleet.clusters.kubernetes_words import CLEARED, CONDITION, INCIDENT, SUSPECT
from tests.fleet.kubernetes.test_permissions import shipped

TEXT = (Path(__file__).parents[3] / "docs" / "kubernetes.md").read_text(encoding="utf-8")


def rows(header: str) -> list[list[str]]:
    """The cells of the table with this header."""
    _, found, after = TEXT.partition(header)
    assert found, f"docs/kubernetes.md has no table {header!r}"
    lines = after.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def test_every_setting_is_there() -> None:
    told = {name.strip("`"): default for name, default, _ in rows("| setting of `[cluster]` | default | meaning |")}
    with pytest.raises(ConfigurationError) as caught:
        from_settings({"no such": 1})
    known = str(caught.value).partition("known: ")[2].split(", ")
    assert set(told) | {"kind"} == set(known)
    assert told["taint"] == f'`"{SUSPECT}"`'


def test_every_permission_is_there() -> None:
    told = {
        (resource, verb)
        for resources, verbs, _, _ in rows("| resource | verbs | where | for |")
        for resource in re.findall("`([a-z/]+)`", resources)
        for verb in verbs.split(", ")
    }
    assert told == {(resource, verb) for rule in shipped() for resource in rule.resources for verb in rule.verbs}


def test_every_word_is_there() -> None:
    told = {key.strip("`") for _, key, _ in rows("| what | key | value |")}
    assert told == {"spec.unschedulable", SUSPECT, CLEARED, INCIDENT, CONDITION}
    assert all(f"`{kind}`" in TEXT for kind in KINDS)


def test_the_example_is_one() -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    with pytest.raises(ConfigurationError, match="no configuration for Kubernetes"):
        from_settings({**tomllib.loads(example)["cluster"], "kubeconfig": "/no/such/file"})
