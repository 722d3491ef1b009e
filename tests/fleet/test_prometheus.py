"""The shipped alert rules, under Debian's promtool; and a real Prometheus that scrapes a real controller's pages."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bitwitness.fleet.exposition import Exposition
from tests.fleet.test_exposition import FULL
from tests.fleet.web import ID, TOKEN, body, headers, incident

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "bitwitness.rules.yml"


def program(name: str) -> str:
    """A program of Debian's; absent, the test is skipped, unless real components were asked for."""
    found = shutil.which(name)
    if found is None:
        if os.environ.get("BITWITNESS_REAL"):
            pytest.fail(f"{name} is not installed")
        pytest.skip(f"{name} is not installed")
    return found


def rules(*names: str) -> list[dict[str, Any]]:
    """Of these groups, or of all."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups if not names or group["name"] in names for rule in group["rules"]]


def test_promtool_passes_the_rules_and_the_example() -> None:
    tool, folder = program("promtool"), DEPLOY / "prometheus"
    for words in (["test", "rules", "bitwitness.rules.test.yml"], ["check", "config", "prometheus.yml"]):
        done = subprocess.run([tool, *words], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_says_what_and_what_to_do_and_is_tested() -> None:
    tested = (DEPLOY / "prometheus" / "bitwitness.rules.test.yml").read_text()
    assert len(rules()) >= 6
    for rule in rules():
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        assert rule["labels"]["severity"] in {"warning", "critical"}
        page, _, part = rule["annotations"]["runbook"].partition("#")
        assert part == "metrics-and-alerts"
        assert "\n## Metrics and alerts\n" in (ROOT / page).read_text()
        assert f"`{rule['alert']}`" in (ROOT / page).read_text()
        assert rule["alert"] in tested


def test_alerts_speak_of_metrics_that_there_are() -> None:
    """A metric that was renamed would leave an alert that never fires. Those of the console: tests/web/test_metrics.py."""
    shown = set(re.findall(r"^(bitwitness_\w+)", Exposition(lambda: FULL).text().decode(), re.MULTILINE))
    for rule in rules("bitwitness-fleet"):
        assert set(re.findall(r"bitwitness_\w+", rule["expr"])) <= shown, rule["alert"]


@contextmanager
def prometheus(folder: Path, controller: str, *consoles: str) -> Iterator[httpx.Client]:
    """A Prometheus with our rules that scrapes a controller and consoles each second.

    An answer that takes as long is none, and where the machine is busy one takes more than a tenth of that.
    """
    every = "1s"
    with closing(socket.socket()) as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = chosen.getsockname()[1]
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": every, "scrape_timeout": every, "evaluation_interval": every}
    for number, targets in enumerate(([controller], [*consoles])):
        config["scrape_configs"][number]["static_configs"] = [{"targets": targets}]
    config["rule_files"] = [str(RULES)]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
    ]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    log = folder / "log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as running:
        try:
            transport = httpx.HTTPTransport(retries=100)
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=20) as client:
                yield client
        except BaseException as error:
            error.add_note(log.read_text())
            raise
        finally:
            running.kill()  # what it has stored is of no interest


def ask(client: httpx.Client, expression: str) -> dict[str, float]:
    """The value of an expression now, by labels."""
    answer = client.get("/api/v1/query", params={"query": expression})
    if answer.status_code == 503:  # it reads its own log of before
        return {}
    answer.raise_for_status()
    result = answer.json()["data"]["result"]
    return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in result}


def wait_for(client: httpx.Client, expression: str) -> dict[str, float]:
    """The value of an expression, once there is one."""
    for _ in range(300):
        if found := ask(client, expression):
            return found
        select.select([], [], [], 0.1)  # scrapes come by the clock: there is nothing to wait for
    raise AssertionError(f"{expression} has no value after 30 s")


@contextmanager
def watching(folder: Path) -> Iterator[httpx.Client]:
    """A real controller with an inbox, as it is started by a service."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    command = [sys.executable, "-m", "bitwitness", "fleet", "watch", "--state", str(folder / "state"), "--every", "0.1"]
    command += ["--listen", "127.0.0.1:0", "--token-file", str(token)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        try:
            assert select.select([running.stderr], [], [], 60)[0], "the controller did not start"
            said = running.stderr.readline()
            assert said.startswith("listening on 127.0.0.1:"), said + running.stderr.read()
            address = f"http://{said.split()[-1]}"
            with httpx.Client(base_url=address, trust_env=False, timeout=20) as client:
                yield client
            running.send_signal(signal.SIGTERM)
            out, err = running.communicate(timeout=30)
            assert (running.returncode, TOKEN in out + err) == (0, False), err
        finally:
            running.kill()


def test_a_real_prometheus_scrapes_a_real_controller_and_alerts(tmp_path: Path) -> None:
    program("prometheus")
    record = incident(status="unattributed", ranks=[], nodes=[], devices=[], persistences=[], persistence="unknown")
    unattributed = 'bitwitness_fleet_incidents_total{status="unattributed"}'
    with watching(tmp_path) as controller, prometheus(tmp_path, str(controller.base_url.netloc, "ascii")) as client:
        assert list(wait_for(client, unattributed).values()) == [0]
        assert list(ask(client, 'up{job="bitwitness-fleet"}').values()) == [1]
        assert ask(client, 'ALERTS{alertname="BitwitnessIncidentUnattributed"}') == {}
        assert controller.post("/incidents", content=body(record), headers=headers()).status_code == 201
        assert list(wait_for(client, f"{unattributed} > 0").values()) == [1]
        wait_for(client, 'ALERTS{alertname="BitwitnessIncidentUnattributed", alertstate="firing"}')
        assert ask(client, 'ALERTS{alertname="BitwitnessFleetSilent"}') == {}
        assert controller.get("/healthz").json()["status"] == "ok"
        page = controller.get("/").text
        assert ID in page
        assert "nobody is named" in page


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    tool = program("systemd-analyze")
    unit = (DEPLOY / "systemd" / "bitwitness-fleet.service").read_text()
    for setting in (
        "Restart=on-failure",
        "ProtectSystem=strict",
        "NoNewPrivileges=yes",
        "StateDirectory=bitwitness/fleet",
    ):
        assert setting in unit.splitlines()
    assert "token-file %d/inbox-token" in unit, "the token comes as a credential and not as an argument"
    copy = tmp_path / "bitwitness-fleet.service"
    copy.write_text(unit.replace("/opt/bitwitness/bin/bitwitness", sys.executable))
    done = subprocess.run([tool, "verify", str(copy)], capture_output=True, text=True, check=False)
    said = [line for line in (done.stdout + done.stderr).splitlines() if copy.name in line]
    assert (done.returncode, said) == (0, [])
