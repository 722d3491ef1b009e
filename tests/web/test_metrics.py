"""What the console tells Prometheus; and every expression of the dashboard and of the alerts, asked of a real Prometheus that scrapes it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bitwitness.fleet.exposition import Exposition
from bitwitness.store import tables
from bitwitness.store.database import Database
from bitwitness.web import metrics
from bitwitness.web.metrics import exposition
from tests.fleet.test_exposition import FULL
from tests.fleet.test_prometheus import DEPLOY, ask, program, prometheus, rules, wait_for
from tests.store.filling import Filling

DASHBOARD = json.loads((DEPLOY / "grafana" / "bitwitness.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
OLD = "2026-01-01T00:00:00.000Z"
POLICY = {"audit": "gradients", "audit_every": 10, "check_every": 10}


def stamp(ago: float = 0.0) -> str:
    """As our own clock writes it."""
    moment = datetime.now(UTC) - timedelta(seconds=ago)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def values(database: Database) -> dict[str, float]:
    """Every sample by its name and labels."""
    families = text_string_to_metric_families(exposition(database))
    return {f"{one.name}{dict(sorted(one.labels.items()))}": one.value for family in families for one in family.samples}


@pytest.fixture
def filling(tmp_path: Path) -> Iterator[Filling]:
    with Database(tmp_path / "console.sqlite") as database:
        yield Filling(database)


def troubled(filling: Filling) -> int:
    """A run that trains, costs much, has verified little, and has incidents of both kinds."""
    key = filling.run(
        "job", grew=stamp(), imported=OLD, pace=0.5, step=999, checkpoint=400, cost=0.2, policy=POLICY, seen=stamp(30)
    )
    covered = {"run_id": key, "passed": 900, "all": 4000}
    filling.add(tables.coverage, covered | {"check": "replay", "last": 499, "unverified": 7})
    row = {"run_id": key, "first": 990, "last": 999, "count": 10, "loss": 1.5, "norm": None, "seconds": 0.5}
    filling.add(tables.steps, row, row | {"first": 0, "last": 989, "loss": 9.0, "norm": 3.0})
    filling.add(tables.costs, {"run_id": key, "check": "replay", "seconds": 3.0, "steps": 10, "wall": 20.0})
    filling.incident(key, "named", named=[(1, "n1", "GPU-1")])
    filling.incident(key, "nobody", candidates=[(0, "n0", "GPU-0"), (1, "n1", "GPU-1")])
    filling.incident(key, "judged", candidates=[(0, "n0", "GPU-0")], judgement="false alarm")
    filling.add(tables.problems, {"place": "p", "path": "/runs/x", "text": "no JSON", "time": OLD, "run_id": key})
    return key


# What is told ---------------------------------------------------------------------------------------------------------


def test_every_number_of_a_run_is_told(filling: Filling) -> None:
    troubled(filling)
    found = values(filling.database)
    label = "'key': '1', 'run': 'job'"
    told = {
        f"bitwitness_run_state{{{label}, 'state': 'training'}}": 1,
        f"bitwitness_run_state{{{label}, 'state': 'silent'}}": 0,
        f"bitwitness_run_step{{{label}}}": 999,
        f"bitwitness_run_checkpoint_step{{{label}}}": 400,
        f"bitwitness_run_loss{{{label}}}": 1.5,
        f"bitwitness_run_step_seconds{{{label}}}": 0.5,
        f"bitwitness_run_checks_time_ratio{{{label}}}": 0.2,
        f"bitwitness_run_check_time_ratio{{'check': 'replay', {label}}}": 0.15,
        f"bitwitness_run_verified_step{{'check': 'replay', {label}}}": 499,
        f"bitwitness_run_check_interval_steps{{'check': 'numerics', {label}}}": 1,
        f"bitwitness_run_check_interval_steps{{'check': 'replay', {label}}}": 10,
        "bitwitness_run_rank_steps{'check': 'replay', 'key': '1', 'outcome': 'unverified', 'run': 'job'}": 7,
        f"bitwitness_run_rank_steps_made{{'check': 'replay', {label}}}": 4000,
        f"bitwitness_run_open_incidents{{{label}, 'status': 'attributed'}}": 1,
        f"bitwitness_run_open_incidents{{{label}, 'status': 'unattributed'}}": 1,
        "bitwitness_console_open_incidents{'status': 'unattributed'}": 1,
        "bitwitness_console_problems{}": 1,
        "bitwitness_console_runs{'state': 'training'}": 1,
        "bitwitness_console_runs{'state': 'finished'}": 0,
    }
    assert {name: found.get(name) for name in told} == told


def test_what_is_not_known_is_absent_and_never_0(filling: Filling) -> None:
    troubled(filling)
    filling.run("bare", grew=stamp(), imported=OLD, step=-1)
    found = values(filling.database)
    bare = {name.partition("{")[0] for name in found if "bare" in name}
    assert bare == {"bitwitness_run_" + one for one in ("state", "ranks", "problems", "open_incidents", "incidents")}
    assert not [name for name in found if name.startswith("bitwitness_run_gradient_norm")], "it was not finite"
    verified = [name for name in found if name.startswith("bitwitness_run_verified_step")]
    assert len(verified) == 1, "numerics has never passed on every rank"


def test_runs_that_have_ended_are_only_counted_and_the_others_are_bounded(filling: Filling) -> None:
    filling.run("ended", finished=True)
    filling.run("ended", outcome="failed")
    for number in range(metrics.MOST + 3):
        filling.run(f"job-{number}", grew=stamp(), imported=OLD)
    wanting = filling.run("wanting", grew=OLD, imported=OLD, started=OLD, open=1)
    found = values(filling.database)
    shown = [name for name in found if name.startswith("bitwitness_run_ranks")]
    assert len(shown) == metrics.MOST
    assert any(f"'key': '{wanting}'" in name for name in shown), "who needs a person is never left out for others"
    assert found["bitwitness_console_runs_left_out{}"] == 4
    assert not [name for name in found if "'ended'" in name]
    assert found["bitwitness_console_runs{'state': 'failed'}"] == 1


def test_runs_of_one_name_are_two_series_and_hostile_names_stay_labels(filling: Filling) -> None:
    hostile = 'job"} 7\nup{x="\\'
    for name in ("twin", "twin", hostile):
        filling.run(name, grew=stamp(), imported=OLD)
    labels = Counter(
        (one.name, json.dumps(one.labels, sort_keys=True))
        for family in text_string_to_metric_families(exposition(filling.database))
        for one in family.samples
    )
    assert set(labels.values()) == {1}, "Prometheus refuses all of it where two samples are one series"
    assert {json.loads(told)["run"] for name, told in labels if name == "bitwitness_run_step"} == {"twin", hostile}
    assert "up" not in {name for name, _ in labels}


# The dashboard --------------------------------------------------------------------------------------------------------


def test_panels_say_what_they_show() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids) >= 20
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["targets"]
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert "http" not in json.dumps(DASHBOARD), "it knows no address"


def test_unattributed_is_drawn_apart() -> None:
    """Never summed with what names a node, nor in its colour."""
    expressions = [target["expr"] for panel in PANELS for target in panel["targets"]]
    open_ones = [one for one in expressions if "open_incidents" in one]
    assert open_ones
    assert all(re.search(r'status="(un)?attributed"', one) for one in open_ones)
    colours = {
        panel["title"]: panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]["color"]
        for panel in PANELS
        if "ttributed" in panel["title"] and panel["type"] == "stat"
    }
    assert len(set(colours.values())) == len(colours) == 2


def test_alerts_on_runs_speak_of_metrics_that_there_are(filling: Filling) -> None:
    troubled(filling)
    shown = set(re.findall(r"^(bitwitness_\w+)", exposition(filling.database), re.MULTILINE))
    for rule in rules("bitwitness-console"):
        assert set(re.findall(r"bitwitness_\w+", rule["expr"])) <= shown, rule["alert"]


@contextmanager
def served(text: Callable[[], bytes]) -> Iterator[str]:
    """A page of metrics on loopback; its host and port."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = text()
            self.send_response(200)
            self.send_header("Content-Type", metrics.CONTENT_TYPE)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: Any) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def everything_wrong() -> Exposition:
    """A controller in every kind of trouble, whose inbox refuses once more at each scrape."""
    long_ago = time.time() - 5_000
    figures = replace(
        FULL,
        proposals={("drain", status): 1 for status in ("failed", "expired", "unclear", "held")},
        held=dict.fromkeys(("cluster", "not-ours", "nodes-per-hour"), 1),
        last_round=long_ago,
        started=long_ago,
        oldest_message=long_ago,
    )
    shown = Exposition(lambda: figures)
    counted = shown.text

    def text() -> bytes:
        shown.count_answer(429)
        return counted()

    shown.text = text  # type: ignore[method-assign]
    return shown


def test_every_expression_returns_data_from_a_real_prometheus(filling: Filling, tmp_path: Path) -> None:
    program("prometheus")
    troubled(filling)
    silent = filling.run("hangs", grew="2026-01-02T00:00:00.000Z", imported=OLD, step=5, policy=POLICY)
    filling.add(tables.steps, {"run_id": silent, "first": 0, "last": 5, "norm": 2.0})
    fleet = everything_wrong()
    (tmp_path / "prometheus").mkdir()
    gone = "127.0.0.1:1"
    with (
        served(lambda: exposition(filling.database).encode()) as console,
        served(fleet.text) as controller,
        prometheus(tmp_path / "prometheus", controller, console, gone) as client,
    ):
        wait_for(client, 'increase(bitwitness_fleet_inbox_answers_total{code="429"}[1m]) > 0')
        wait_for(client, 'up{job="bitwitness-console"} == 0')
        wait_for(client, "bitwitness_run_step")
        empty = []
        for panel in PANELS:
            for target in panel["targets"]:
                expression = target["expr"].replace("$key", ".*").replace("$run", ".*")
                assert "$" not in expression, "a variable that is not known here"
                empty += [] if ask(client, expression) else [(panel["title"], expression)]
        for rule in rules():
            expression = rule["expr"]
            if rule["alert"] == "BitwitnessFleetGone":  # there is one, so that another is asked for
                assert not ask(client, expression)
                expression = expression.replace("bitwitness-fleet", "nobody")
            empty += [] if ask(client, expression) else [(rule["alert"], expression)]
        assert not empty
        stalled = ask(client, next(one["expr"] for one in rules() if one["alert"] == "BitwitnessVerificationStalled"))
        assert {json.loads(labels)["check"]: steps for labels, steps in stalled.items()} == {
            "replay": 500,
            "numerics": 999,
            "replicas": 999,
        }


def test_the_page_names_every_metric(filling: Filling) -> None:
    """And no other: the second and third of a row stand without what they have in common."""
    troubled(filling)
    filling.add(tables.steps, {"run_id": 1, "first": 2_000, "last": 2_001, "loss": 1.0, "norm": 1.0, "seconds": 1.0})
    shown = {family.name for family in text_string_to_metric_families(exposition(filling.database))}
    page = (DEPLOY.parent / "docs" / "console.md").read_text().partition("## Metrics and alerts")[2]
    told = {f"bitwitness_{name}" for name in re.findall(r"`bitwitness_((?:run|console)_\w+)", page)}
    told |= {f"bitwitness_run_{name}" for name in re.findall(r"`\.\.\._(\w+)", page)}
    assert told | {"bitwitness_console_info"} == shown
