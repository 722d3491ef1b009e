"""What docs/hyperpod.md says of settings, permissions and labels is what the code has."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from bitwitness.fleet.clusters import hyperpod
from bitwitness.fleet.clusters.hyperpod_api import SageMakerApi
from bitwitness.fleet.clusters.hyperpod_fake import FakeSageMaker
from bitwitness.fleet.clusters.hyperpod_limits import CHECKS
from bitwitness.fleet.clusters.hyperpod_words import (
    ACT_ACTIONS,
    ASKED,
    CHECK_LABEL,
    HEALTH_LABEL,
    MARK,
    MARKED,
    PENDING,
    READ_ACTIONS,
    SIMULATE,
)
from bitwitness.fleet.policy import FleetPolicy

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "hyperpod.md").read_text(encoding="utf-8")
ACTIONS = {*READ_ACTIONS, *ACT_ACTIONS.values(), SIMULATE}


def test_the_iam_policy_has_every_action_and_no_other() -> None:
    shipped = ROOT / "deploy" / "kubernetes" / "overlays" / "hyperpod-eks" / "iam-policy.json"
    (told,) = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    for text in [told, *([shipped.read_text(encoding="utf-8")] if shipped.exists() else [])]:
        statements = json.loads(text)["Statement"]
        assert {action for one in statements for action in one["Action"]} == ACTIONS
        assert {one["Effect"] for one in statements} == {"Allow"}


def test_every_action_is_one_that_the_code_asks_for(fake: FakeSageMaker) -> None:
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("hyperpod*.py") if "fake" not in path.name
    )
    asked = set(re.findall(r'self\._(?:reads|acts), "([A-Za-z]+)"', source)) | set(ACT_ACTIONS)
    assert {f"sagemaker:{name}" for name in asked} == ACTIONS - {SIMULATE}


def test_every_setting_is_told() -> None:
    _, _, after = TEXT.partition("| setting | default | meaning |")
    rows = [line.split("|")[1] for line in after.split("\n\n", 1)[0].splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == hyperpod._SETTINGS - {"kind"}


def test_the_examples_are_policies(api: SageMakerApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    config = {"clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}], "contexts": [context]}
    kubeconfig.write_text(json.dumps({**config, "current-context": "x", "users": [{"name": "x", "user": {}}]}))
    examples = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        (tmp_path / "fleet.toml").write_text(example)
        policy = FleetPolicy.load(tmp_path / "fleet.toml")
        table = {"cluster_name": "pod", **policy.cluster}
        if "kubernetes" in table:
            table["kubernetes"] = {**table["kubernetes"], "kubeconfig": str(kubeconfig)}
        assert hyperpod.from_settings(table).name == "hyperpod"
        assert tomllib.loads(example)["may"] == ["drain", "reboot", "replace"]


def test_every_word_of_hyperpods_is_told() -> None:
    for word in (HEALTH_LABEL, CHECK_LABEL, MARK, MARKED, ASKED, *PENDING.values(), *CHECKS, *ACT_ACTIONS):
        assert word in TEXT
