from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bitwitness.cli.advice import next_steps
from bitwitness.cli.main import cli
from bitwitness.evidence import NONFINITE, History, Observation
from bitwitness.runfiles import RunFiles, read_incident
from bitwitness.topology import Topology
from tests.cli import samples
from tests.cli.samples import BAD, GOOD, STEP
from tests.store.making import append, strike


def bitwitness(*arguments: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "110", "TERM": "dumb"}).invoke(cli, [str(one) for one in arguments])


def shown(path: Path) -> str:
    done = bitwitness("incident", "show", path)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def advised(path: Path) -> str:
    return " ".join(step.text for step in next_steps(read_incident(path)))


def commands(path: Path) -> list[str]:
    return [command for step in next_steps(read_incident(path)) for command in step.commands]


# What it says, by verdict ---------------------------------------------------------------------------------------------


def test_a_persistent_rank(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, BAD), where, saved=[4])
    page = shown(path)
    assert "persistent compute corruption on rank 4 (node node-2)" in page
    assert "after step 9, when this check last passed, up to step 12" in page
    assert "result of micro-batch 0 of rank 4" in page
    assert "owner 4 node-2 bbbbbbbb 3 x the same differs" in page
    assert "first witness 0 node-0 aaaaaaaa 3 x the same" in page
    assert "second witness 2 node-1 aaaaaaaa 3 x the same" in page
    assert "differs in 2 gradients: head.weight, norm.bias" in page
    assert "On 5 further micro-batches all runs agreed bit for bit." in page
    assert "Take node node-2 out of service now" in page
    assert "newest checkpoint saved at the end of step 9 or earlier" in page
    assert "Use other nodes" in page
    assert commands(path)[:2] == [
        f"scontrol update nodename=node-2 state=drain reason='bitwitness {path.name}'",
        "kubectl cordon -- node-2",
    ]
    assert f'torch.load("{path}/micro-batches-rank-00004.pt", weights_only=False)' in commands(path)[-1]


def test_the_pod_of_a_suspect_is_shown(tmp_path: Path) -> None:
    plain = samples.topology()
    pods = tuple(replace(one, pod=f"lab/train-{one.rank // 2}-x7k") for one in plain.placements)
    path = samples.write(tmp_path / "a", samples.replays(plain, 4, BAD), Topology(pods))
    page = shown(path)
    assert "pod lab/train-2-x7k" in page
    assert "lab/train-0-x7k" not in page
    assert "kubectl cordon -- node-2" in commands(path)
    assert " pod " not in shown(samples.write(tmp_path / "b", samples.replays(plain, 4, BAD), plain))


def test_nobody_is_told_to_drain_a_pod(tmp_path: Path) -> None:
    where = samples.topology(names=["node-0", "node-1", "pod_train-2"])
    pods = tuple(replace(one, pod=f"lab/train-{one.rank // 2}-x7k") for one in where.placements)
    path = samples.write(tmp_path, samples.replays(where, 4, BAD), Topology(pods))
    assert not [line for line in commands(path) if "cordon" in line or "scontrol" in line]
    assert commands(path)[:2] == [
        "kubectl get pod --namespace=lab --output=wide -- train-2-x7k",
        "kubectl get events --namespace=lab --field-selector=reason=Scheduled,involvedObject.name=train-2-x7k",
    ]
    assert "Find out which node ran pod lab/train-2-x7k" in advised(path)
    assert "was not told the name of its node" in advised(path)


def test_a_gpu_is_diagnosed(tmp_path: Path) -> None:
    where = samples.topology(device="GPU-{rank}")
    persistent = samples.write(tmp_path / "a", samples.replays(where, 4, BAD), where)
    assert "dcgmi diag -r 4" in commands(persistent)
    assert any("bitwitness compare --suspect node-2 " in line for line in commands(persistent)), commands(persistent)
    unknown = samples.write(tmp_path / "b", samples.replicas(where, 4), where)
    assert any(line.startswith("nvidia-smi") for line in commands(unknown))


def test_a_transient_rank_is_left_in_service(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, GOOD), where)
    page = shown(path)
    assert "transient compute corruption on rank 4" in page
    assert "3 x aaaaaaaa differs" in page
    assert "Leave node node-2 in service" in page
    assert "strike" in page
    assert "The same nodes will do" in page
    assert not commands(path)


def test_a_replica_that_parted(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replicas(where, 4), where)
    page = shown(path)
    assert "parameters and optimizer state (replicas)" in page
    assert "4 node-2 bbbbbbbb differs in 1 tensor(s): blocks.0.weight" in page
    assert "Leave node node-2 in service for now, under suspicion" in page
    assert "Save nothing from this job" in page


def test_several_ranks_of_one_node(tmp_path: Path) -> None:
    where = samples.topology(4)
    path = samples.write(tmp_path, samples.replicas(where, 4, 5), where)
    assert "Several ranks of node node-2 are named" in advised(path)


def test_a_result_of_the_all_reduce(tmp_path: Path) -> None:
    where = samples.topology()
    page = shown(samples.write(tmp_path, samples.reduced(where, 4, NONFINITE), where))
    assert "reduced gradient, after the all-reduce (numerics)" in page
    assert "4 node-2 non-finite" in page
    assert "look at the link into that device" in page


def test_nobody_where_the_reduction_parted(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.reduced(where, 4, BAD), where)
    page = shown(path)
    assert "Why nobody is named" in page
    assert "named nobody" in page
    assert "involved, no blame ranks 4" in page
    assert "Drain nothing: the evidence names nobody. Rank 4 took part, without blame." in page
    assert "Look at the network between these ranks" in page
    assert not commands(path)


def test_software(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.nonfinite_everywhere(where, 4), where, saved=[4])
    page = shown(path)
    assert "corruption (software), unattributed" in page
    assert (
        "local gradient, before the all-reduce (numerics) rank node value 4 node-2 non-finite largest local inf" in page
    )
    assert "Drain nothing" in page
    assert "Mend the cause first" in page
    assert "To run the failing micro-batch again" in page


def test_two_nodes(tmp_path: Path) -> None:
    where = samples.topology(2)
    path = samples.write(tmp_path, samples.replays(where, 2, BAD), where)
    assert "Run on at least three nodes to have somebody named: there were 2" in advised(path)


def test_inputs(tmp_path: Path) -> None:
    where = samples.topology()
    seen = [
        Observation(
            "input", STEP, rank, "original" if rank == 4 else "witness", BAD if rank == 4 else GOOD, (GOOD,) * 3, 4, 0
        )
        for rank in (4, 0, 2)
    ]
    page = shown(samples.write(tmp_path, seen, where))
    assert "input of micro-batch 0 of rank 4" in page
    assert "check the storage and the host memory of that node first" in page


def test_a_check_that_never_passed(tmp_path: Path) -> None:
    where = samples.topology()
    history = History({}, samples.KNOWN.compared_before)
    page = shown(samples.write(tmp_path, samples.replays(where, 4, BAD), where, history))
    assert "had not passed before" in page
    assert "from the beginning" in page


def test_shadow_mode_says_that_the_job_went_on(tmp_path: Path) -> None:
    where = samples.topology()
    policy = {"on_detection": "record"}
    assert "The job was not stopped" in advised(
        samples.write(tmp_path, samples.replays(where, 4, BAD), where, policy=policy)
    )


def test_notes_and_errors_are_shown(tmp_path: Path) -> None:
    where = samples.topology()
    seen = samples.replays(where, 4, BAD)
    seen.append(Observation("replay", STEP, 1, "witness", error="out of memory", owner=1, micro=0))
    page = shown(samples.write(tmp_path, seen, where, notes=["rank 4 could not save its micro-batches"]))
    assert "note rank 4 could not save its micro-batches" in page
    assert "out of memory" in page


def test_a_large_world_fits_on_a_page(tmp_path: Path) -> None:
    where = samples.topology(300)
    done = bitwitness("incident", "show", samples.write(tmp_path, samples.replicas(where, 17), where))
    assert done.exit_code == 0
    assert "and 596 more ranks with the value aaaaaaaa" in done.stdout
    assert len(done.stdout.splitlines()) < 60


# Where it is looked for ----------------------------------------------------------------------------------------------


def test_a_run_shows_its_newest(tmp_path: Path) -> None:
    where = samples.topology()
    paths = [samples.write(tmp_path, samples.replays(where, rank, BAD), where) for rank in (1, 2)]
    newest = max(paths)
    done = bitwitness("incident", "show", tmp_path)
    assert done.exit_code == 0
    assert all(path.name in done.stdout for path in paths)
    assert "The newest of these 2:" in done.stdout
    assert f"Incident {newest.name}" in done.stdout
    assert bitwitness("incident", "show", newest / "incident.json").exit_code == 0


def test_list(tmp_path: Path) -> None:
    where = samples.topology()
    good = samples.write(tmp_path, samples.replays(where, 1, BAD), where)
    damaged = tmp_path / "incidents" / "20000101T000000Z-000000"
    damaged.mkdir()
    (damaged / "incident.json").write_text("{")
    done = bitwitness("incident", "list", tmp_path)
    assert done.exit_code == 0
    assert "rank 1 (node node-0)" in done.stdout
    assert "damaged" in done.stdout
    record = json.loads(bitwitness("incident", "list", tmp_path, "--json").stdout)
    assert [one["id"] for one in record["incidents"]] == [good.name, damaged.name]
    assert record["incidents"][0]["ranks"] == [1]
    assert "is not JSON" in record["incidents"][1]["error"]


def test_a_drill_is_told_as_the_console_tells_it(tmp_path: Path) -> None:
    """A fault explains an incident of its own start, and of nobody else: what another session found is real."""
    where = samples.topology()
    real = samples.write(tmp_path, samples.replays(where, 1, BAD), where, supervision="b", generation=1)
    drill = samples.write(tmp_path, samples.replays(where, 1, BAD), where, supervision="a", generation=1)
    (tmp_path / "faults").mkdir()
    append(tmp_path / "faults/rank-00001.jsonl", strike(1, STEP, start="a/1", node=where.node_of(1)))
    listed = json.loads(bitwitness("incident", "list", tmp_path, "--json").stdout)["incidents"]
    assert {one["id"]: one["judgement"] for one in listed} == {real.name: "", drill.name: "drill"}
    assert json.loads(bitwitness("incident", "show", drill, "--json").stdout)["judgement"] == "drill"
    assert "It was a drill" in shown(drill)
    assert "It was a drill" not in shown(real)


def test_a_run_without_incidents(tmp_path: Path) -> None:
    RunFiles(tmp_path).create().write_run({})
    assert bitwitness("incident", "list", tmp_path).stdout.strip() == f"{tmp_path}: no incidents"
    assert json.loads(bitwitness("incident", "list", tmp_path, "--json").stdout)["incidents"] == []
    done = bitwitness("incident", "show", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "has no incidents" in done.stderr


@pytest.mark.parametrize("command", ["show", "list"])
def test_not_a_run(tmp_path: Path, command: str) -> None:
    def error(path: Path) -> str:
        done = bitwitness("incident", command, path)
        assert (done.exit_code, done.stdout) == (2, "")
        return done.stderr

    assert "does not exist" in error(tmp_path / "nowhere")
    assert "neither an incident (no incident.json) nor a run (no run.json)" in error(tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    assert "is not a directory" in error(file)
    RunFiles(tmp_path / "inside").create().write_run({})
    assert "runs in it: inside" in error(tmp_path)
    assert bitwitness("incident", command).exit_code == 2


DAMAGES: dict[str, Any] = {
    "torn": lambda record: json.dumps(record)[:-20],
    "no object": lambda record: "[]",
    "another schema": lambda record: json.dumps({**record, "schema": 99}),
    "no verdict": lambda record: json.dumps({key: value for key, value in record.items() if key != "verdict"}),
    "a verdict that contradicts itself": lambda record: json.dumps(
        {**record, "verdict": {"status": "attributed", "step": 1}}
    ),
    "a rank that is not in the world": lambda record: json.dumps(
        {**record, "verdict": {**record["verdict"], "ranks": [99]}}
    ),
    "a window of words": lambda record: json.dumps({**record, "verdict": {**record["verdict"], "window": ["a"]}}),
    "observations of numbers": lambda record: json.dumps({**record, "observations": [1]}),
    "a policy of words": lambda record: json.dumps({**record, "policy": "none"}),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["text", "json"])
def test_a_damaged_incident(tmp_path: Path, damage: str, flags: list[str]) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, BAD), where)
    file = path / "incident.json"
    file.write_text(DAMAGES[damage](json.loads(file.read_text())))
    done = bitwitness("incident", "show", path, *flags)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    assert str(file) in done.stderr
    assert "Traceback" not in done.stderr


def test_json_is_the_record_and_what_to_do(tmp_path: Path) -> None:
    where = samples.topology()
    path = samples.write(tmp_path, samples.replays(where, 4, BAD), where, saved=[4])
    record = json.loads(bitwitness("incident", "show", tmp_path, "--json").stdout)
    assert record["path"] == str(path)
    assert record["verdict"]["ranks"] == [4]
    assert len(record["observations"]) == 18
    assert record["files"] == [str(path / "micro-batches-rank-00004.pt")]
    assert record["next_steps"][0]["commands"][1] == "kubectl cordon -- node-2"


# Names that mean harm ------------------------------------------------------------------------------------------------

HOSTILE = "[bold red]n[/] :skull: \x1b[31m\x07\n\r'; rm -rf / #-"


def test_markup_and_control_characters_are_shown_as_they_are(tmp_path: Path) -> None:
    where = samples.topology(names=["node-0", "node-1", HOSTILE])
    seen = samples.replays(where, 4, BAD)
    seen = [
        Observation.from_json({**one.to_json(), "detail": {"differs": ["[link=http://x]w[/link]\x1b]0;t\x07"]}})
        for one in seen
    ]
    path = samples.write(tmp_path, seen, where, notes=["[/] \x1b[2J"])
    done = CliRunner(env={"COLUMNS": "400"}).invoke(cli, ["incident", "show", str(path)], color=True)
    assert done.exit_code == 0
    assert "[bold red]n[/] :skull: \\x1b[31m\\x07\\n\\r" in done.stdout
    assert "[link=http://x]w[/link]\\x1b]0;t\\x07" in done.stdout
    assert not {char for char in done.stdout if not char.isprintable()} - {"\n"}
    listed = bitwitness("incident", "list", tmp_path)
    assert "\x1b" not in listed.stdout


def test_a_command_line_takes_a_hostile_name_as_one_word(tmp_path: Path) -> None:
    where = samples.topology(names=["node-0", "node-1", HOSTILE])
    path = samples.write(tmp_path, samples.replays(where, 4, BAD), where)
    slurm, kubernetes = commands(path)[:2]
    assert shlex.split(slurm)[2] == f"nodename={HOSTILE}"
    assert shlex.split(kubernetes) == ["kubectl", "cordon", "--", HOSTILE]
