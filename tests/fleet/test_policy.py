"""The policy file, quiet hours, and the limits on how much is done at a time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.fleet.budget import Left, hold, left
from bitwitness.fleet.clusters.base import Census
from bitwitness.fleet.decision import Proposal
from bitwitness.fleet.policy import FleetPolicy, QuietHours
from tests.fleet.incidents import NOW

FULL = """
act = true
owner = "gpu-operations"
may = ["drain", "replace"]
strikes = 2
strike_window = "3d"
shadow = "act"
drills = "act"
nodes_per_hour = 4
cluster_share = 0.1
act_within = "6h"
protect = ["login*"]
time_zone = "Europe/Berlin"
quiet_hours = ["Fri 18:00-08:00", "Sat,Sun 00:00-24:00"]
requeue = false

[signals]
before = "12h"
after = "5m"
logs = ["/var/log/cluster/{node}/messages*"]
metrics = "http://prometheus:9090"

[cluster]
kind = "slurm"
hyperpod = true

[[notify]]
kind = "webhook"
url = "https://example.com/hook"
"""


def load(tmp_path: Path, text: str) -> FleetPolicy:
    file = tmp_path / "fleet.toml"
    file.write_text(text, encoding="utf-8")
    return FleetPolicy.load(file)


def test_every_setting_of_a_file(tmp_path: Path) -> None:
    policy = load(tmp_path, FULL)
    assert policy.act
    assert policy.may == {"drain", "replace"}
    assert (policy.strikes, policy.strike_window, policy.act_within) == (2, timedelta(days=3), timedelta(hours=6))
    assert (policy.signals_before, policy.signals_after) == (timedelta(hours=12), timedelta(minutes=5))
    assert policy.cluster["hyperpod"] is True
    assert policy.notify[0]["kind"] == "webhook"
    assert len(policy.quiet_hours) == 2
    assert policy.logs == ("/var/log/cluster/{node}/messages*",)


def test_the_defaults_touch_nothing(tmp_path: Path) -> None:
    assert load(tmp_path, "") == FleetPolicy()
    assert not FleetPolicy().act


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("acts = true", "no such setting: acts"),
        ("act = 1", "act = 1: must be true or false"),
        ("strikes = 0", "strikes = 0"),
        ("strikes = true", "strikes = True"),
        ("nodes_per_hour = 1.5", "nodes_per_hour"),
        ("cluster_share = 2", "cluster_share = 2"),
        ("cluster_share = 0", "cluster_share = 0"),
        ('may = ["reboot"]', '"drain"'),
        ('may = ["drain", "explode"]', "explode"),
        ('strike_window = "soon"', "strike_window: 'soon' is no time"),
        ('act_within = "0s"', "act_within"),
        ('shadow = "maybe"', "shadow"),
        ('drills = "maybe"', "drills"),
        ('quiet_hours = ["at night"]', "quiet_hours: 'at night'"),
        ('quiet_hours = ["Noday 10:00-12:00"]', "names no days"),
        ('quiet_hours = ["25:00-26:00"]', "quiet_hours"),
        ('quiet_hours = ["00:00-00:00"]', "quiet_hours: '00:00-00:00' begins and ends at the same time"),
        ('quiet_hours = ["Mon-Fri 08:00-08:00"]', "a whole day is '00:00-24:00'"),
        ('protect = ["["]', "protect: '[' has a bracket"),
        ('protect = ["login]"]', "protect"),
        ('protect = ["login[1-3"]', "protect"),
        ('protect = ["login[1-20]"]', "list as Slurm writes it"),
        ('protect = ["login[1,2]"]', "list as Slurm writes it"),
        ('[signals]\nlogs = ["/var/log/{node}/{name}"]', "signals.logs"),
        ('[signals]\nlogs = ["/var/log/{node}/}"]', "signals.logs"),
        ('[signals]\nlogs = ["/var/log/{node}/[a"]', "signals.logs"),
        ('[signals]\nmetrics = "prometheus:9090"', "signals.metrics"),
        ('[signals]\nmetrics = "ftp://prometheus"', "signals.metrics"),
        ('[signals]\nmetrics = "http://"', "signals.metrics"),
        ('[signals]\nmetrics = "http://prometheus:port"', "signals.metrics"),
        ('time_zone = "Mars/Olympus"', "Mars/Olympus"),
        ("signals = 3", "[signals]"),
        ("[signals]\nlog = []", "signals.log"),
        ("[cluster]\nname = 'x'", "[cluster]"),
        ("[[notify]]\nurl = 'x'", "[[notify]]"),
        ("protect = 'login'", "protect"),
        ("not toml", "is not TOML"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(tmp_path, text)
    assert said in str(caught.value)
    assert "fleet.toml" in str(caught.value)


@pytest.mark.parametrize("address", ["http://u:hunter2@prom:9090", "u:hunter2@prom", "http://u:hunter/2@prom"])
def test_an_address_with_a_password_is_refused_and_not_shown(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigurationError, match="password") as caught:
        load(tmp_path, f'[signals]\nmetrics = "{address}"')
    assert "signals.metrics" in str(caught.value)
    assert "hunter" not in str(caught.value)


def test_patterns_that_are_in_order(tmp_path: Path) -> None:
    policy = load(
        tmp_path, 'protect = ["login*", "n[0-9][!5]", "x[]a]"]\n[signals]\nlogs = ["/l/{node}/m[0-9]*", "/{node}"]'
    )
    assert policy.protect == ("login*", "n[0-9][!5]", "x[]a]")
    assert len(policy.logs) == 2
    assert load(tmp_path, '[signals]\nmetrics = ""').metrics == ""


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        FleetPolicy.load(tmp_path / "absent.toml")


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("text", "now", "until"),
    [
        ("22:00-06:00", "2026-11-29T21:59+00:00", None),
        ("22:00-06:00", "2026-11-29T22:00+00:00", "2026-11-30T06:00+00:00"),
        ("22:00-06:00", "2026-11-30T05:59+00:00", "2026-11-30T06:00+00:00"),
        ("22:00-06:00", "2026-11-30T06:00+00:00", None),
        ("Sun 00:00-24:00", "2026-11-29T12:00+00:00", "2026-11-30T00:00+00:00"),
        ("Sun 00:00-24:00", "2026-11-30T00:00+00:00", None),
        ("Fri-Mon 18:00-08:00", "2026-11-30T20:00+00:00", "2026-12-01T08:00+00:00"),
        ("Tue-Thu 18:00-08:00", "2026-11-30T20:00+00:00", None),
        ("Sat 22:00-06:00", "2026-11-29T03:00+00:00", "2026-11-29T06:00+00:00"),
    ],
)
def test_quiet_hours(text: str, now: str, until: str | None) -> None:
    expected = None if until is None else datetime.fromisoformat(until)
    assert QuietHours.parse(text).until(datetime.fromisoformat(now)) == expected


def test_quiet_hours_are_in_the_zone_of_the_policy() -> None:
    hours = QuietHours.parse("08:00-09:00", BERLIN)
    assert hours.until(datetime(2026, 11, 29, 7, 30, tzinfo=UTC)) == datetime(2026, 11, 29, 8, 0, tzinfo=UTC)
    assert hours.until(datetime(2026, 7, 29, 7, 30, tzinfo=UTC)) is None  # summer time


DRAIN = Proposal("20261129T120000Z-000001", "n1", ("GPU-1",), "drain", "drain", "medium", "as a test says")
ACT = FleetPolicy(act=True)


def why(
    policy: FleetPolicy = ACT,
    acted: list[tuple[float, str]] | None = None,
    census: Census | None = Census(100, 0),  # noqa: B008  (frozen)
    waited: float = 0,
) -> str:
    done = [(NOW - timedelta(minutes=minutes), node) for minutes, node in acted or []]
    held = hold(DRAIN, made=NOW - timedelta(hours=waited), acted=done, census=census, now=NOW, policy=policy)
    return "" if held is None else held.why


def test_nothing_holds_an_act_within_all_limits() -> None:
    assert why() == ""


def test_observing_comes_first() -> None:
    assert why(FleetPolicy(protect=("n1",))) == "observe"


def test_protected_nodes() -> None:
    assert why(FleetPolicy(act=True, protect=("login*", "n?"))) == "protected"


def test_what_waited_too_long_is_left_to_a_person() -> None:
    assert why(waited=24) == ""
    assert why(waited=24.01) == "expired"


def test_nodes_per_hour_counts_nodes() -> None:
    assert why(acted=[(10, "a"), (20, "a")]) == ""
    assert why(acted=[(10, "a"), (20, "b")]) == "nodes-per-hour"
    assert why(acted=[(10, "a"), (60, "b")]) == ""
    assert why(acted=[(10, "a"), (-30, "b")]) == "nodes-per-hour"  # a clock that went back
    assert why(acted=[(10, "a"), (20, "n1")]) == ""  # the node itself has been counted


def test_when_the_budget_is_there_again() -> None:
    done = [(NOW - timedelta(minutes=minutes), f"x{minutes}") for minutes in (50, 40, 5)]
    held = hold(DRAIN, made=NOW, acted=done, census=Census(100, 0), now=NOW, policy=ACT)
    assert held is not None
    assert held.until == NOW + timedelta(minutes=20)  # when only one of the three is left, one more may be
    assert left(done, NOW, 2) == Left(3, 0, held.until)
    assert left(done, NOW + timedelta(minutes=20), 2) == Left(1, 1)
    assert left(done, NOW, 0) == Left(3, 0)


@pytest.mark.parametrize(
    ("census", "expected"),
    [
        (Census(100, 4), ""),
        (Census(100, 5), "cluster-share"),
        (Census(5, 0), ""),
        (Census(5, 1), "cluster-share"),
        (None, "cluster"),
    ],
)
def test_share_of_the_cluster(census: Census | None, expected: str) -> None:
    assert why(census=census) == expected
