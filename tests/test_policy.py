"""Settings: what is refused and by what name, which source is the strongest, and when a check is due."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.errors import ConfigurationError, PolicyError
from bitwitness.policy import Policy

SETTINGS = [one.name for one in fields(Policy)]

BAD: list[tuple[str, Any]] = [
    ("audit", "gradient"),
    ("audit", ""),
    ("audit", None),
    ("audit", True),
    ("audit", ["off"]),
    ("on_detection", "ignore"),
    ("on_detection", None),
    ("on_detection", ["raise"]),
    *(
        (name, value)
        for name in ("audit_every", "check_every", "keep_checkpoints")
        for value in (0, -1, 1.0, "5", None, True, [1])
    ),
    *((name, value) for name in ("checkpoint_every", "max_skips") for value in (-1, 0.5, "0", None, False)),
    *((name, value) for name in ("deterministic_audits", "replica_buffers") for value in (0, 1, "true", None)),
    *(
        (name, value)
        for name in ("timeout", "checkpoint_timeout")
        for value in (0, 0.5, -1, 86_401, float("nan"), float("inf"), "300", None, True)
    ),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    for make in (Policy, Policy.every_step, Policy().replace, lambda **given: Policy.load(environment={}, **given)):
        with pytest.raises(PolicyError, match=rf"\b{name}=") as caught:
            make(**{name: value})
        assert repr(value) in str(caught.value)
        assert "must be" in str(caught.value)


def test_every_setting_has_bad_values_above() -> None:
    assert {name for name, _ in BAD} == set(SETTINGS)


def test_limits_are_allowed() -> None:
    assert Policy(audit_every=1, check_every=1, checkpoint_every=0, timeout=1).timeout == 1
    assert Policy(timeout=86_400.0, audit_every=10**9).audit_every == 10**9
    for audit in ("auto", "gradients", "loss", "off"):
        assert Policy.load(environment={}, audit=audit).audit == audit


def test_a_policy_is_a_frozen_record() -> None:
    policy = Policy(audit_every=7)
    with pytest.raises(FrozenInstanceError):
        policy.audit_every = 8  # type: ignore[misc]
    assert policy.replace(check_every=3) == Policy(audit_every=7, check_every=3)
    assert Policy(**json.loads(json.dumps(policy.to_json()))) == policy
    assert list(policy.to_json()) == SETTINGS
    assert pickle.loads(pickle.dumps(policy)) == policy
    with pytest.raises(TypeError):
        Policy(audit_evry=7)  # type: ignore[call-arg]


def test_every_step() -> None:
    assert Policy.every_step() == Policy(audit_every=1, check_every=1)
    assert Policy.every_step(audit="loss", check_every=5) == Policy(audit="loss", audit_every=1, check_every=5)


# Sources -------------------------------------------------------------------------------------------------------------


def toml(folder: Path, content: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(content)
    return file


def test_code_is_stronger_than_the_file_and_the_file_than_the_environment(tmp_path: Path) -> None:
    file = toml(tmp_path, "audit_every = 20\ncheck_every = 20\n")
    environment = {"BITWITNESS_AUDIT_EVERY": "30", "BITWITNESS_CHECK_EVERY": "30", "BITWITNESS_TIMEOUT": "30"}
    policy = Policy.load(file, environment, audit_every=10)
    assert (policy.audit_every, policy.check_every, policy.timeout) == (10, 20, 30.0)
    assert policy.checkpoint_every == Policy().checkpoint_every


def test_settings_may_stand_in_a_table_of_a_larger_file(tmp_path: Path) -> None:
    file = toml(tmp_path, '[other]\nx = 1\n[policy]\naudit = "loss"\ntimeout = 5\nreplica_buffers = true\n')
    assert Policy.load(str(file), {}) == Policy(audit="loss", timeout=5, replica_buffers=True)


def test_an_empty_file_and_environment_are_the_defaults(tmp_path: Path) -> None:
    assert Policy.load(toml(tmp_path, ""), {"PATH": "x", "BITWITNESS_NODE": "n"}) == Policy()


def test_the_process_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BITWITNESS_AUDIT_EVERY", "123")
    assert Policy.load().audit_every == 123
    assert Policy.load(environment={}).audit_every == 100
    assert Policy().audit_every == 100


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("audit", "off", "off"),
        ("audit_every", " 50 ", 50),
        ("timeout", "2.5", 2.5),
        ("deterministic_audits", "1", True),
        ("deterministic_audits", "Yes", True),
        ("replica_buffers", " TRUE", True),
        ("replica_buffers", "no", False),
        ("replica_buffers", "0", False),
        ("on_detection", "record", "record"),
        ("on_detection", "retry", "retry"),
        ("max_skips", "0", 0),
        ("keep_checkpoints", "7", 7),
        ("checkpoint_timeout", "60", 60.0),
    ],
)
def test_variables_are_named_after_the_settings(name: str, text: str, value: Any) -> None:
    assert Policy.load(environment={f"BITWITNESS_{name.upper()}": text}) == Policy(**{name: value})


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("audit_every", "often", "a whole number"),
        ("audit_every", "", "a whole number"),
        ("check_every", "1.5", "a whole number"),
        ("timeout", "soon", "a number"),
        ("replica_buffers", "maybe", "true or false"),
        ("deterministic_audits", "", "true or false"),
        ("audit", "none", "must be one of"),
        ("audit_every", "0", "at least 1"),
        ("timeout", "nan", "between 1 and 86400"),
    ],
)
def test_a_bad_variable_is_refused_by_its_own_name(name: str, text: str, what: str) -> None:
    with pytest.raises(PolicyError, match=what) as caught:
        Policy.load(environment={f"BITWITNESS_{name.upper()}": text})
    assert f"BITWITNESS_{name.upper()}={text!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("audit_every = \n", "is not TOML"),
        ("audit_every = 1\naudit_every = 2\n", "is not TOML"),
        ("audit_evry = 5\n", "no such setting: audit_evry; settings are audit, audit_every"),
        ("[policy]\nb = 1\na = 1\n", "no such setting: a, b"),
        ("policy = 5\n", r"\[policy\] must be a table"),
        ("[[policy]]\naudit_every = 5\n", r"\[policy\] must be a table"),
        ("check_every = 5\n[policy]\naudit_every = 5\n", r"move check_every into \[policy\]"),
        ('audit_every = "5"\n', "audit_every='5'"),
        ("audit_every = 5.0\n", "audit_every=5.0"),
        ("audit_every = true\n", "audit_every=True"),
        ("replica_buffers = 1\n", "replica_buffers=1"),
        ("timeout = nan\n", "timeout=nan"),
        ("timeout = 1979-05-27\n", "timeout=datetime"),
        ("audit = ['off']\n", r"audit=\['off'\]"),
    ],
)
def test_a_bad_file_is_refused_by_its_name(tmp_path: Path, content: str, what: str) -> None:
    file = toml(tmp_path, content)
    with pytest.raises(PolicyError, match=what) as caught:
        Policy.load(file, {})
    assert str(file) in str(caught.value)
    with pytest.raises(PolicyError):  # also where the code would override it: a file that is wrong is never ignored
        Policy.load(file, {}, audit_every=1, audit="off", timeout=1, replica_buffers=True)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for file, what in ((tmp_path / "absent.toml", "No such file"), (tmp_path, "Is a directory"), (binary, "not TOML")):
        with pytest.raises(PolicyError, match=what) as caught:
            Policy.load(file, {})
        assert str(file) in str(caught.value)


def test_an_unknown_setting_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"Policy.load\(\): no such setting: audit_evry"):
        Policy.load(environment={"BITWITNESS_AUDIT_EVERY": "x"}, audit_evry=5)
    assert issubclass(PolicyError, ConfigurationError)


# When is what due ----------------------------------------------------------------------------------------------------


def test_an_interval_is_due_at_its_last_step() -> None:
    policy = Policy(audit_every=4, check_every=3)
    assert [step for step in range(12) if policy.audit_due(step)] == [3, 7, 11]
    assert [step for step in range(12) if policy.replicas_due(step)] == [2, 5, 8, 11]


def test_the_step_before_a_save_is_always_checked() -> None:
    policy = Policy(audit_every=4, check_every=100, checkpoint_every=5)
    assert [step for step in range(12) if policy.audit_due(step)] == [3, 4, 7, 9, 11]
    assert [step for step in range(12) if policy.replicas_due(step)] == [4, 9]


def test_off_audits_nothing_and_still_compares_the_replicas() -> None:
    policy = Policy.every_step(audit="off", checkpoint_every=1)
    assert not any(policy.audit_due(step) for step in range(10))
    assert all(policy.replicas_due(step) for step in range(10))


@given(every=st.integers(1, 1000), step=st.integers(0, 10**9))
def test_due_is_once_in_every_interval(every: int, step: int) -> None:
    policy = Policy()
    assert sum(policy.due(every, later) for later in range(step, step + every)) == 1
    assert policy.due(every, step) == ((step + 1) % every == 0)
    assert all(Policy.every_step().audit_due(later) for later in range(step, step + 3))
