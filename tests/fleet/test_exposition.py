"""What Prometheus and a health check are told, for figures of every kind."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bitwitness.fleet.exposition import CONTENT_TYPE, Exposition, Figures, Health, health

NOW = datetime(2026, 11, 29, 12, tzinfo=UTC)
STAMP = NOW.timestamp()
FULL = Figures(
    mode="act",
    cluster="slurm",
    incidents={"attributed": 5, "unattributed": 2},
    proposals={("drain", "held"): 2, ("reboot", "unclear"): 1},
    acts={("drain", "done"): 3, ("reboot", "unclear"): 1},
    held={"nodes-per-hour": 2},
    troubles={"damaged": 2},
    unsettled=1,
    budget_used=2,
    budget_limit=2,
    last_round=STAMP - 3,
    started=STAMP - 100,
    round_seconds=0.25,
    condemned=4,
    returned=1,
    messages_pending=3,
    messages_failed=2,
    oldest_message=STAMP - 60,
)


def values(figures: Figures) -> dict[str, float]:
    """Every sample by its name and labels."""
    text = Exposition(lambda: figures).text().decode()
    return {
        f"{one.name}{dict(sorted(one.labels.items()))}": one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_every_figure_is_told() -> None:
    found = values(FULL)
    told = {
        "bitwitness_fleet_incidents_total{'status': 'unattributed'}": 2,
        "bitwitness_fleet_proposals{'action': 'drain', 'status': 'held'}": 2,
        "bitwitness_fleet_acts_total{'act': 'drain', 'outcome': 'done'}": 3,
        "bitwitness_fleet_acts_total{'act': 'drain', 'outcome': 'failed'}": 0,
        "bitwitness_fleet_acts_total{'act': 'reboot', 'outcome': 'unclear'}": 1,
        "bitwitness_fleet_held{'why': 'nodes-per-hour'}": 2,
        "bitwitness_fleet_held{'why': 'cluster-share'}": 0,
        "bitwitness_fleet_troubles{'kind': 'damaged'}": 2,
        "bitwitness_fleet_troubles{'kind': 'gone'}": 0,
        "bitwitness_fleet_unsettled{}": 1,
        "bitwitness_fleet_budget_used{}": 2,
        "bitwitness_fleet_budget_limit{}": 2,
        "bitwitness_fleet_last_round_timestamp_seconds{}": STAMP - 3,
        "bitwitness_fleet_start_timestamp_seconds{}": STAMP - 100,
        "bitwitness_fleet_round_seconds{}": 0.25,
        "bitwitness_fleet_condemned_devices{}": 4,
        "bitwitness_fleet_returned_devices{}": 1,
        "bitwitness_fleet_messages_pending{}": 3,
        "bitwitness_fleet_messages_failed{}": 2,
        "bitwitness_fleet_oldest_message_timestamp_seconds{}": STAMP - 60,
    }
    assert {name: found.get(name) for name in told} == told
    info = next(name for name in found if name.startswith("bitwitness_fleet_info"))
    assert "'cluster': 'slurm'" in info
    assert "'mode': 'act'" in info


def test_what_has_not_happened_is_absent_and_what_is_none_is_0() -> None:
    found = values(Figures())
    assert not [name for name in found if "timestamp" in name or "round_seconds" in name]
    assert found["bitwitness_fleet_incidents_total{'status': 'unattributed'}"] == 0
    assert found["bitwitness_fleet_inbox_answers_total{'code': '401'}"] == 0


def test_names_follow_the_rules_and_no_label_is_without_number() -> None:
    found = values(FULL)
    assert all(name.startswith("bitwitness_fleet_") for name in found)
    labels = {label for name in found for label in re.findall(r"'(\w+)':", name)}
    assert labels == {"version", "mode", "cluster", "status", "action", "act", "outcome", "why", "code", "kind"}
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_answers_are_counted_and_figures_are_read_at_each_scrape() -> None:
    figures = [Figures(unsettled=1), Figures(unsettled=2)]
    shown = Exposition(lambda: figures.pop(0))
    assert len(figures) == 2, "making it reads nothing"
    shown.count_answer(201)
    shown.count_answer(418)
    assert b"bitwitness_fleet_unsettled 1.0" in shown.text()
    last = shown.text()
    assert b"bitwitness_fleet_unsettled 2.0" in last
    assert b'inbox_answers_total{code="201"} 1.0' in last
    assert b'inbox_answers_total{code="418"} 1.0' in last


def test_two_apps_in_one_process_do_not_meet() -> None:
    assert Exposition(Figures).text() == Exposition(Figures).text()


def test_labels_are_escaped() -> None:
    text = Exposition(lambda: Figures(cluster='a"b\\c\nd')).text().decode()
    assert r'cluster="a\"b\\c\nd"' in text


@pytest.mark.parametrize(
    ("figures", "status", "age"),
    [
        (Figures(), "silent", None),
        (Figures(started=STAMP - 10), "starting", 10),
        (Figures(started=STAMP - 121), "silent", 121),
        (Figures(started=STAMP - 1000, last_round=STAMP - 3), "ok", 3),
        (Figures(started=STAMP - 1000, last_round=STAMP - 121), "silent", 121),
        (Figures(last_round=STAMP - 3), "ok", 3),
        (Figures(started=STAMP - 10, last_round=STAMP - 5000), "starting", 10),  # the round is another process's
        (Figures(started=STAMP - 500, last_round=STAMP - 600), "silent", 500),
        (Figures(started=STAMP - 10, last_round=STAMP + 60), "ok", 0),  # a clock was set back
    ],
)
def test_health(figures: Figures, status: str, age: float | None) -> None:
    found = health(figures, NOW, timedelta(minutes=2))
    assert (found.status, found.age_seconds, found.ok) == (status, age, status != "silent")
    assert found.to_json()["status"] == status
    assert isinstance(found, Health)
    assert found.text
