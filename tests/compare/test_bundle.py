"""Bundles: a fault that is played is traced to its operation, made small, measured, and shown by a program that stands alone."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bitwitness import ConfigurationError, RunFilesError
from bitwitness.compare import bundling, operations
from bitwitness.compare.bundling import Effort, bundle, seen_in
from bitwitness.compare.cases import Case, digest
from bitwitness.compare.lineup import Lineup
from bitwitness.compare.operations import Caught, Done, Recording
from bitwitness.compare.panel import Panel, agreed, makes_sense
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.simulated import Simulated
from tests.compare.bundles import SETTINGS, compared, make, seat, seats

torch.set_num_threads(1)

EFFORT = Effort(steps=3, times=100, questions=200, trials=40)
STUCK = "op:addmm @ every=1 : index=5 -> bit=20 ; permanent"


def made(tmp_path: Path, suspect: str, reference: str = "", effort: Effort = EFFORT) -> tuple[dict[str, Any], Path]:
    found = compared(tmp_path / "run", suspect, reference)
    folder = tmp_path / "bundle"
    return bundle(found.seats, SETTINGS, folder, "suspect", found.seen, effort=effort), folder


@pytest.fixture(scope="module")
def stuck(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """The bundle of a stuck multiplier: several tests look at it, and none changes it."""
    return made(tmp_path_factory.mktemp("stuck"), STUCK)


def loaded(folder: Path) -> ModuleType:
    """The bundle's own program."""
    spec = importlib.util.spec_from_file_location("reproduce_of_a_bundle", folder / "reproduce.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a vendor would, with nothing of this project within reach."""
    code = "import sys, runpy; sys.modules['bitwitness'] = None; sys.argv[0] = sys.argv[1]; del sys.argv[1]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(folder / "reproduce.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def played(folder: Path, text: str, *arguments: str) -> int:
    """On the device that is played."""
    with Simulated(text, 5).during(99):
        return int(loaded(folder).main(["--device", "cpu", *arguments]))


def test_a_stuck_multiplier_is_traced_made_small_and_shown_without_us(stuck: tuple[dict[str, Any], Path]) -> None:
    record, folder = stuck
    assert record["operation"] == "aten.addmm.default"
    assert record["elements"] <= 24
    assert record["original"]["elements"] == 16 + 8 * 12 + 12 * 16
    assert (record["repeat"]["count"], record["repeat"]["of"], record["repeat"]["answers"]) == (100, 100, 1)
    assert record["repeat"]["low"] > 0.95
    assert record["differing"] == 1
    assert [one["xor"] for one in record["masks"]] == ["00100000"]
    assert record["agreeing_references"] == 2
    assert json.loads((folder / "bundle.json").read_text())["operation"] == record["operation"]
    healthy = run_alone(folder, "--device", "cpu", "--times", "50")
    assert healthy.returncode == 0, healthy.stdout + healthy.stderr
    assert "not reproduced" in healthy.stdout
    assert "DRILL" in healthy.stdout.splitlines()[0]
    assert played(folder, STUCK) == 1
    assert played(folder, STUCK, "--operands", "original.pt") == 1
    assert (folder / "README.txt").read_text().startswith("DRILL")
    assert (folder / "reproduce.py").read_text().startswith("# DRILL")
    assert STUCK in record["drill"]
    assert sorted(one.name for one in folder.parent.iterdir()) == ["bundle", "run"]


def test_one_call_in_five_is_measured_with_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "op:addmm @ every=1 : index=0 -> bit=20 ; intermittent=0.2"
    record, folder = made(tmp_path, text, effort=Effort(steps=3, times=300, questions=60, trials=40))
    assert record["operation"] == "aten.addmm.default"
    assert record["repeat"]["low"] < 0.2 < record["repeat"]["high"]
    assert record["repeat"]["low"] > 0.1
    assert record["repeat"]["high"] < 0.35
    assert record["elements"] < 10
    assert played(folder, text, "--times", "100") == 1
    assert "reproduced" in capsys.readouterr().out


def test_a_fault_that_depends_on_magnitude_keeps_what_makes_it(tmp_path: Path) -> None:
    record, folder = made(
        tmp_path, "op:addmm @ every=1 : all -> bit=2 ; permanent if=0.5..0.6", effort=Effort(questions=400)
    )
    assert record["operation"] == "aten.addmm.default"
    assert record["nonzero"] >= 1
    kept = torch.load(folder / "operands.pt", weights_only=True)
    right = kept["expected"][0].flatten()
    where = right != kept["observed"][0].flatten()
    assert where.any()
    assert bool(((right[where].abs() >= 0.5) & (right[where].abs() <= 0.6)).all())
    assert record["elements"] <= 30


def test_a_periodic_fault_keeps_its_pattern_as_it_was_found(tmp_path: Path) -> None:
    record, _ = made(tmp_path, "op:gelu @ every=1 : grid=2,rows=4,columns=8 -> bit=9 ; permanent")
    assert record["operation"] == "aten.gelu.default"
    assert record["original"]["differing"] == 2 * 2 * 2
    columns = {one["index"][-1] % 8 for one in record["original"]["wrong"]}
    assert len(columns) == 2
    assert record["elements"] <= 4


def test_an_operation_of_the_update_is_found_with_what_it_wrote_over(tmp_path: Path) -> None:
    record, folder = made(tmp_path, "op:*add_* @ every=1 : index=3 -> bit=20 ; permanent")
    assert record["operation"] in ("aten.add_.Tensor", "aten._foreach_add_.List")
    assert played(folder, "op:*add_* @ every=1 : index=0 -> bit=20 ; permanent") == 1


def test_what_references_do_not_agree_upon_is_no_evidence(tmp_path: Path) -> None:
    # The other reference is wrong as well, where an output is 0: with as little as that nobody can be blamed.
    record, folder = made(tmp_path, STUCK, "op:addmm @ every=1 : all -> bit=3 ; permanent if=0..0")
    assert record["operation"] == "aten.addmm.default"
    assert record["disagreed"] > 0
    kept = torch.load(folder / "operands.pt", weights_only=True)
    assert bool((kept["expected"][0] != 0).all())


def test_a_reference_that_is_always_wrong_leaves_no_operation(tmp_path: Path) -> None:
    found = compared(tmp_path / "run", STUCK)
    lineup = seats(STUCK, "op:addmm @ every=1 : index=1 -> bit=3 ; permanent")
    record = bundle(lineup, SETTINGS, tmp_path / "bundle", "suspect", found.seen, effort=EFFORT)
    assert record["operation"] is None
    assert "references disagree" in record["found"]
    assert not (tmp_path / "bundle" / "operands.pt").exists()


def test_a_fault_of_no_operation_says_so(tmp_path: Path) -> None:
    record, folder = made(tmp_path, "fwd_out:0 @ every=1 : n=1 -> bit=20 ; permanent")
    assert record["operation"] is None
    assert "No single operation" in record["found"]
    assert "none of its operations did" in record["found"]
    assert sorted(one.name for one in folder.iterdir()) == ["README.txt", "bundle.json"]
    assert "There is no program in this bundle" in (folder / "README.txt").read_text()
    assert record["seen"][0]["site"] == "0 fwd_out"


def test_what_does_not_come_back_is_not_made_smaller(tmp_path: Path) -> None:
    record, folder = made(tmp_path, "op:gelu @ steps=1..1 : index=9 -> bit=20")
    assert record["operation"] == "aten.gelu.default"
    assert record["step"] == 1
    assert record["repeat"]["count"] == 0
    assert record["elements"] == record["original"]["elements"]
    assert record["differing"] == 1
    assert "Not again in 100 repeats" in (folder / "README.txt").read_text()
    assert played(folder, "op:gelu @ steps=1..1 : index=9 -> bit=20", "--times", "5") == 0


def test_a_bundle_of_a_real_device_says_nothing_of_drills(stuck: tuple[dict[str, Any], Path]) -> None:
    letter = bundling.letter({**stuck[0], "drill": ""})
    assert "DRILL" not in letter
    assert "aten.addmm.default" in letter
    assert "the same each time.\nWith the operands as training had them: in 100 of 100" in letter
    assert "reproduce.py --device cpu\n" in letter
    assert not bundling.program("").startswith("#")


@pytest.mark.parametrize(
    ("counts", "alike", "outcome"),
    [
        ({"right": 5, "recorded": 0, "other": 0}, True, "not reproduced"),
        ({"right": 4, "recorded": 1, "other": 0}, False, "reproduced"),
        ({"right": 4, "recorded": 0, "other": 1}, True, "reproduced"),
        ({"right": 0, "recorded": 0, "other": 5}, False, "nothing follows"),
        ({"right": 5, "recorded": 0, "other": 0}, False, "not reproduced"),
    ],
    ids=["right", "same wrong bits", "other wrong bits", "another kind", "another kind, right"],
)
def test_what_follows_from_a_run(counts: dict[str, int], alike: bool, outcome: str) -> None:
    from bitwitness.compare.reproduce import concluded

    assert concluded(counts, alike) == outcome


def test_what_cannot_be_run_says_so_and_is_no_verdict(
    stuck: tuple[dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = loaded(stuck[1])
    assert program.main(["--device", "cuda:99"]) == 2
    assert program.main(["--device", "nonsense"]) == 2
    assert program.main(["--device", "cpu", "--bundle", str(tmp_path)]) == 2
    damaged = tmp_path / "damaged"
    shutil.copytree(stuck[1], damaged)
    (damaged / "operands.pt").write_bytes(b"no operands")
    assert program.main(["--device", "cpu", "--bundle", str(damaged)]) == 2
    assert capsys.readouterr().out.count("could not be run") == 4


def test_whatever_keeps_the_program_from_running_is_no_verdict(
    stuck: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Python's own status for an error is 1, as is ours for a device that is wrong: each time on the device that is wrong."""
    program = loaded(stuck[1])
    record = json.loads((stuck[1] / "bundle.json").read_text())
    operands = torch.load(stuck[1] / "operands.pt", weights_only=True)
    whole = (stuck[1] / "operands.pt").read_bytes()
    damages: dict[str, tuple[str, bytes]] = {
        "no operands": ("operands.pt", b""),
        "half of them": ("operands.pt", whole[: len(whole) // 2]),
        "a list": ("bundle.json", b"[]"),
        "a number": ("bundle.json", b"7"),
        "not JSON": ("bundle.json", b"{"),
        "not text": ("bundle.json", b"\xff\xfe"),
        "of nothing": ("bundle.json", b"{}"),
        "deep": ("bundle.json", b"[" * 100_000),
        "times": ("bundle.json", json.dumps(record | {"reproduce": record["reproduce"] | {"times": None}}).encode()),
        "never": ("bundle.json", json.dumps(record | {"reproduce": record["reproduce"] | {"times": 0}}).encode()),
        "settings": ("bundle.json", json.dumps(record | {"reproduce": record["reproduce"] | {"settings": 3}}).encode()),
        "no drill": (
            "bundle.json",
            json.dumps({key: value for key, value in record.items() if key != "drill"}).encode(),
        ),
        "list of tensors": ("operands.pt", saved([1, 2])),
        "no outputs": ("operands.pt", saved(operands | {"expected": []})),
        "no numbers": ("operands.pt", saved(operands | {"observed": None})),
        "another operation": ("operands.pt", saved(operands | {"operation": "aten.no_such.default"})),
        "no operation": ("operands.pt", saved(operands | {"operation": ""})),
        "packet": ("operands.pt", saved(operands | {"operation": "__class__"})),
        "arguments": ("operands.pt", saved(operands | {"args": 5})),
    }
    for name, (file, content) in damages.items():
        damaged = tmp_path / name
        shutil.copytree(stuck[1], damaged)
        (damaged / file).write_bytes(content)
        with Simulated(STUCK, 5).during(99):
            assert program.main(["--device", "cpu", "--bundle", str(damaged)]) == 2, name


def saved(what: Any) -> bytes:
    content = io.BytesIO()
    torch.save(what, content)
    return content.getvalue()


def test_no_memory_is_no_verdict(stuck: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    program = loaded(stuck[1])

    def nothing_left(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(program, "tried", nothing_left)
    assert program.main(["--device", "cpu"]) == 2
    monkeypatch.setattr(program, "_say", nothing_left)
    monkeypatch.setattr(sys, "argv", ["reproduce.py", "--device", "cpu"])
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    assert program._ended() == 2, "nor if there is none for a sentence"
    sys.stdout.close()


@pytest.mark.parametrize(
    "instead",
    ["", "raise ImportError('no torch')", "raise OSError('libcudart.so.12: cannot open')", "raise SystemExit(1)"],
)
def test_without_torch_the_program_ends_with_2_and_a_sentence(
    stuck: tuple[dict[str, Any], Path], tmp_path: Path, instead: str
) -> None:
    folder = tmp_path / "bundle"
    shutil.copytree(stuck[1], folder)
    command = [sys.executable, "-I", "-S", str(folder / "reproduce.py")]  # without what is installed
    if instead:
        (folder / "torch.py").write_text(instead + "\n")
        command = [sys.executable, str(folder / "reproduce.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 2, ran.stderr
    assert "could not be run: torch cannot be imported" in ran.stdout


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from bitwitness.compare import bundling
from bitwitness.compare.bundling import Found
from bitwitness.compare.cases import Case
from bitwitness.faults.statistics import wilson

case = Case("aten.relu.default", (torch.ones(300),), {}, (torch.ones(300),), (torch.zeros(300),))
found = Found(case, case, wilson(1, 2), wilson(1, 2))
bundling.letter = lambda record: "a letter"
record = {"schema": 1, "drill": "", "original": {"file": "original.pt"}}
wanted = {"README.txt", "bundle.json", "operands.pt", "original.pt", "reproduce.py"}
events, whole, none = 0, 0, 0

def strike(event, _):
    global events
    if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree"):
        events += 1
        if events > number:
            os.kill(os.getpid(), signal.SIGKILL)

for number in range(200):
    folder = Path(sys.argv[1]) / f"run-{number}" / "bundle"
    child = os.fork()
    if not child:
        sys.addaudithook(strike)
        bundling._write(folder, record, found)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    if not folder.exists():
        none += 1
        assert killed
        continue
    whole += 1
    assert {one.name for one in folder.iterdir()} == wanted, list(folder.iterdir())
    assert all(torch.load(folder / one, weights_only=True) for one in ("operands.pt", "original.pt"))
    assert (folder / "reproduce.py").read_text() == bundling.program("")
    if not killed:
        break
print(none, whole)
"""


def test_a_bundle_is_whole_or_absent_at_whatever_instant_its_writer_is_killed(tmp_path: Path) -> None:
    """Killed before each of the calls that change a folder or open a file, one after another, until it gets through."""
    ran = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    none, whole = map(int, ran.stdout.split())
    assert none >= 10
    assert 1 < whole < 50


def test_a_folder_that_is_there_and_nothing_seen_are_refused(tmp_path: Path) -> None:
    lineup = seats(STUCK)
    with pytest.raises(ConfigurationError, match="nothing was seen"):
        bundle(lineup, SETTINGS, tmp_path / "bundle", "suspect", [])
    found = compared(tmp_path / "run", STUCK)
    with pytest.raises(ConfigurationError, match="something of this name"):
        bundle(lineup, SETTINGS, tmp_path / "run", "suspect", found.seen)
    with pytest.raises(ConfigurationError, match="no participant 'nobody'"):
        bundle(lineup, SETTINGS, tmp_path / "bundle", "nobody", found.seen)
    with pytest.raises(ConfigurationError, match="two references"):
        bundle([lineup[0], lineup[2]], SETTINGS, tmp_path / "bundle", "suspect", found.seen)
    with pytest.raises(RunFilesError, match="no journal of nobody"):
        seen_in(found.files, "nobody")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise RunFilesError(f"{path}: no space left")

    monkeypatch.setattr(bundling, "write_bytes", full)
    found = compared(tmp_path / "run", "fwd_out:0 @ every=1 : n=1 -> bit=20 ; permanent")
    with pytest.raises(RunFilesError, match="no space"):
        bundle(found.seats, SETTINGS, tmp_path / "bundle", "suspect", found.seen, effort=EFFORT)
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_where_a_reference_differs_too_nothing_counts_as_seen(tmp_path: Path) -> None:
    both = "fwd_out:0 @ every=1 : n=1 -> bit=20 ; permanent & fwd_out:2 @ every=1 : n=1 -> bit=20 ; permanent"
    found = compared(tmp_path / "run", both, "fwd_out:0 @ every=1 : n=1 -> bit=21 ; permanent")
    assert {str(one.site) for one in found.seen} == {"2 fwd_out"}


# Operations ----------------------------------------------------------------------------------------------------------


def test_what_an_operation_writes_over_is_kept_as_it_was_before() -> None:
    with Recording([]) as recording:
        torch.ones(3).mul_(2.0)
    assert recording.parted == 0  # the leader has done nothing
    with Recording(wanted=[1]) as recording:
        torch.ones(3).mul_(2.0)
    case = recording.caught[0].case
    assert case is not None
    assert case.args[0].tolist() == [1, 1, 1]
    assert case.observed[0].tolist() == [2, 2, 2]


def test_a_recording_sees_what_is_played_under_it() -> None:
    def work() -> None:
        torch.nn.functional.gelu(torch.arange(4.0) + 1.0)

    with Recording() as right:
        work()
    with Simulated("op:gelu @ every=1 : index=2 -> zero ; permanent", 0).during(0), Recording(right.done) as seen:
        work()
    assert [one.number for one in seen.caught] == [len(right.done) - 1]
    assert seen.caught[0].case is not None
    assert float(seen.caught[0].case.observed[0][2]) == 0.0


def test_an_operation_that_draws_cannot_be_repeated() -> None:
    with Recording(wanted=range(9)) as recording:
        torch.bernoulli(torch.ones(3))
    assert "draws random numbers" in recording.caught[-1].why


def test_attention_draws_only_with_dropout() -> None:
    given = [torch.ones(1, 1, 3, 8) for _ in range(3)]
    with Recording(wanted=range(9)) as recording:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given)
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, True)
    assert [one.why for one in recording.caught] == ["", ""]
    assert operations._draws(torch.ops.aten._scaled_dot_product_flash_attention.default, (*given, 0.1), {})


def test_an_operation_that_does_not_come_with_torch_is_not_handed_on() -> None:
    @torch.library.custom_op("bitwitness_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    with Recording(wanted=range(9)) as recording:
        twice(torch.ones(2))
    assert "no operation of torch itself" in " ".join(one.why for one in recording.caught)


def test_who_is_to_blame() -> None:
    right = [Done("one", "a"), Done("two", "b")]
    case = Case("aten.relu.default", (torch.ones(2),), {})
    caught = [Caught(1, "operands", "wrong", case)]
    judged = operations._judged
    culprit, _ = judged(3, right, caught, None, [{1: ("operands", "b")}, {1: ("operands", "b")}])
    assert culprit is not None
    assert (culprit.step, culprit.number, culprit.references, culprit.right) == (3, 1, 3, "b")
    assert judged(3, right, caught, None, [])[0] is None
    nobody, why = judged(3, right, caught, None, [{1: ("operands", "b")}, {1: ("operands", "c")}])
    assert nobody is None
    assert "disagree" in why
    nobody, why = judged(3, right, caught, None, [{1: ("other operands", "b")}])
    assert nobody is None
    assert "no operation had written" in why
    assert "other operations" in judged(3, right, [], 1, [{}])[1]


# The panel -----------------------------------------------------------------------------------------------------------


def test_all_references_must_agree_and_with_themselves() -> None:
    case = Case("aten.relu.default", (torch.arange(6.0) - 2.0,), {})
    assert agreed(Panel(seats(""), "suspect").references(case)) == digest([torch.relu(case.args[0])])
    assert agreed(Panel([seat(0, "leader", "leader")], "suspect").references(case)) is None
    flaky = seats("", "op:relu @ every=1 : index=5 -> bit=3 ; intermittent=0.5")
    assert agreed(Panel(flaky, "suspect").references(case, 30)) is None
    nonsense = Case("aten.relu.default", (torch.ones(2), 3), {})
    answers = Panel(seats(""), "suspect").references(nonsense)
    assert agreed(answers) is None
    assert answers["leader"].problem


def test_an_index_out_of_range_reaches_no_device() -> None:
    assert makes_sense(Case("aten.embedding.default", (torch.ones(5, 3), torch.tensor([4])), {}))
    assert not makes_sense(Case("aten.embedding.default", (torch.ones(4, 3), torch.tensor([4])), {}))


class Nodes:
    """Ranks as threads of which one runs at a time, until it waits for the others: what a rank decides alone must be the same."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.turn = threading.Lock()
        self.barrier = threading.Barrier(world, timeout=60)
        self.given: list[Any] = [None] * world

    def all(self, rank: int, obj: Any) -> list[Any]:
        self.given[rank] = obj
        self.turn.release()
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        self.turn.acquire()
        return found


class Rank:
    leader = 0

    def __init__(self, nodes: Nodes, rank: int) -> None:
        self.nodes, self.rank, self.world = nodes, rank, nodes.world
        self.count = 0

    def share(self, tape: Any) -> Any:
        return self.gather(tape)[self.leader]

    def gather(self, obj: Any) -> list[Any]:
        self.count += 1
        return self.nodes.all(self.rank, obj)

    def barrier(self) -> None:
        self.gather(None)


def test_across_nodes_each_rank_asks_the_same_and_the_leaders_writes(
    tmp_path: Path, stuck: tuple[dict[str, Any], Path]
) -> None:
    nodes, lineup, files = Nodes(3), seats(STUCK), CompareFiles(tmp_path / "run")
    files.create()
    for one in lineup:
        files.introduce(one.participant)
    ranks = [Rank(nodes, number) for number in range(3)]
    records: dict[int, dict[str, Any]] = {}
    was = torch.are_deterministic_algorithms_enabled()

    def run(number: int) -> None:
        with nodes.turn:
            mine = [lineup[number]]
            Lineup(mine, SETTINGS, files, ranks[number]).run()
            ranks[number].barrier()
            seen = seen_in(files, "suspect")
            records[number] = bundle(mine, SETTINGS, tmp_path / "bundle", "suspect", seen, ranks[number], EFFORT)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    torch.use_deterministic_algorithms(was)
    assert sorted(records) == [0, 1, 2]
    alone = stuck[0]
    for record in records.values():
        for name in ("operation", "elements", "nonzero", "questions", "repeat", "wrong"):
            assert record[name] == alone[name], name
    assert len({rank.count for rank in ranks}) == 1
    assert played(tmp_path / "bundle", STUCK) == 1


def test_the_workload_of_these_tests_repeats() -> None:
    one, other = make(torch.device("cpu"), 0), make(torch.device("cpu"), 1)
    assert torch.equal(one.model(one.batch(2)), other.model(other.batch(2)))
