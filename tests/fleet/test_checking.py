"""A health check that a person starts: once, and only of a node that bitwitness has taken out."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from click.testing import CliRunner

from bitwitness.cli.main import cli
from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.checking import PAUSE, preview_check, start_check
from bitwitness.fleet.clusters.base import Call, Checking
from bitwitness.fleet.clusters.local import LocalCluster
from tests.fleet.rehearsal import Rehearsal


@pytest.fixture
def out(play: Rehearsal) -> Rehearsal:
    """n1 was taken out."""
    play.incident()
    play.rounds(2)
    return play


def start(play: Rehearsal, who: str = "kim@head", **more: Any) -> Any:
    return start_check(play.state, play.cluster, "n1", "before it goes to the vendor", who, **more)


def test_it_is_asked_for_once(out: Rehearsal) -> None:
    first, second, third = start(out), start(out), start(out, "lee@head")
    assert (first.new, second.new, third.new) == (True, False, False)
    assert "by kim@head" in third.text
    assert out.cluster.calls("n1", "check") == [("check", "n1")]
    trail = [(one.what, one.who) for one in out.state.history(node="n1")][-2:]
    assert trail == [("health check", "kim@head"), ("health check asked for", "kim@head")]
    out.clock.move(PAUSE + timedelta(minutes=2))
    assert start(out).new


def test_a_kill_before_or_after_the_call_asks_no_second_time(out: Rehearsal, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def killed(call: Call) -> str:
        raise Killed

    monkeypatch.setattr(out.cluster, "carry_out", killed)
    with pytest.raises(Killed):
        start(out)
    monkeypatch.undo()
    again = start(out)
    assert (again.new, out.cluster.calls("n1", "check")) == (False, [])
    assert "whether it was started is not known" in again.text


@pytest.mark.parametrize(("refused", "again"), [(True, True), (False, False)])
def test_what_was_refused_for_certain_may_be_asked_again(
    out: Rehearsal, monkeypatch: pytest.MonkeyPatch, refused: bool, again: bool
) -> None:
    def failing(call: Call) -> str:
        raise ClusterError("throttled", refused=refused)

    monkeypatch.setattr(out.cluster, "carry_out", failing)
    with pytest.raises(ClusterError, match="throttled" if refused else "is not known: throttled"):
        start(out)
    monkeypatch.undo()
    assert start(out).new is again
    assert out.trail("health check failed")[0].startswith("refused" if refused else "unclear")


def test_only_a_node_that_we_have_taken_out_is_checked(play: Rehearsal) -> None:
    with pytest.raises(ConfigurationError, match="only a node that we have taken out"):
        start(play)
    play.cluster.take_out("n1", "fan")
    with pytest.raises(ConfigurationError, match="only a node that we have taken out"):
        start(play)
    assert play.state.history(what="health check") == []


def test_another_machine_of_the_same_name_may_be_checked(out: Rehearsal) -> None:
    assert start(out).new
    out.cluster.exchange("n1")
    out.cluster.take_out("n1", "bitwitness 1: again")
    assert start(out).new


def test_what_was_not_shown_is_not_done(out: Rehearsal) -> None:
    shown = preview_check(out.cluster, "n1").digest
    out.cluster.exchange("n1")
    out.cluster.take_out("n1", "bitwitness 1: again")
    with pytest.raises(ConfigurationError, match="not what was shown"):
        start(out, shown=shown)
    assert start(out, shown=preview_check(out.cluster, "n1").digest).new


def test_a_cluster_that_checks_nothing_says_so(out: Rehearsal) -> None:
    cluster = LocalCluster([out.run_dir])
    assert not isinstance(cluster, Checking)
    with pytest.raises(ConfigurationError, match="local has no health check"):
        preview_check(cluster, "n1")


def test_a_check_needs_a_reason(out: Rehearsal) -> None:
    with pytest.raises(ConfigurationError, match="needs a reason"):
        start_check(out.state, out.cluster, "n1", " ", "kim@head")


def test_the_command(out: Rehearsal) -> None:
    settings = {"cluster": {"kind": "fake", "file": str(out.folder / "cluster.json")}}
    with out.state.change():
        out.state.set_about(sources=json.dumps(settings))
    words = ["fleet", "check", "n1", "--why", "vendor", "--state", str(out.state.folder)]
    dry = CliRunner().invoke(cli, [*words, "--dry-run"])
    assert (dry.exit_code, "would call: fake check n1" in dry.output) == (0, True)
    assert out.cluster.calls("n1", "check") == []
    done = [CliRunner().invoke(cli, [*words, "--json"]) for _ in range(2)]
    assert [json.loads(one.output)["new"] for one in done] == [True, False]
    assert out.cluster.calls("n1", "check") == [("check", "n1")]
