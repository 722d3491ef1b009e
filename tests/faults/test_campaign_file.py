"""A campaign file stands for the same runs always, and what is wrong in it is said with its line before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bitwitness.errors import ConfigurationError
from bitwitness.faults import grammar, yamlfile
from bitwitness.faults.campaign import Campaign, from_item, load, shipped
from bitwitness.faults.cells import CellSpec
from bitwitness.faults.job import search_path, source_digest

GOOD = """\
campaign: coverage
description: Everything at once.
jobs:
  tiny: {factory: mlp, ranks: 4, steps: 12, lr: 1e-3, checkpoint_every: 4}
  other:
    factory: tests.faults.campaigns:campaign
    ranks: 3
    steps: 20
policy: {audit_every: 1, check_every: 1}
seeds: [0, 1]
controls: 2
references: 3
deadline: 60
classify: {final: accuracy, tolerance: 0.02}
faults:
  - "rank=2 fwd_out:*mlp* @ step=6 : n=1 -> bit=20"
  - {faults: ["rank=0 param @ step=3 : n=1 -> sign", "rank=1 loss @ step=3 : all -> scale=2"], name: pair, jobs: tiny}
  - {preset: he2023.rbflip, count: 5, steps: 5..9, jobs: [other], policy: null, seeds: 7}
"""


def read(text: str) -> Campaign:
    return from_item(yamlfile.parse(text, "try.yaml"))


def changed(old: str, new: str) -> str:
    assert old in GOOD
    return GOOD.replace(old, new, 1)


def by_role(cells: list[CellSpec], role: str) -> list[CellSpec]:
    return [cell for cell in cells if cell.role == role]


def test_a_file_stands_for_its_runs() -> None:
    campaign = read(GOOD)
    cells = campaign.cells()
    assert {(cell.job, cell.seed) for cell in by_role(cells, "clean")} == {
        ("tiny", 0),
        ("tiny", 1),
        ("other", 0),
        ("other", 1),
        ("other", 7),
    }
    assert len(by_role(cells, "reference")) == 3 * 2
    assert not {cell.seed for cell in by_role(cells, "reference")} & {0, 1, 7}
    controls = by_role(cells, "control")
    assert len(controls) == 2 * 2 * 2, "of each job, seed and policy; none where nothing is guarded"
    assert all(cell.policy == {"audit_every": 1, "check_every": 1} for cell in controls)
    faults = by_role(cells, "fault")
    assert len(faults) == 2 * 2 + 2 + 5
    assert all(cell.policy is None and cell.seed == 7 for cell in faults if cell.label == "he2023.rbflip")
    pair = next(cell for cell in faults if cell.label == "pair")
    assert len(pair.faults) == 2
    assert campaign.jobs["tiny"].options["lr"] == 1e-3, "YAML 1.1 would read this as text"
    order = [cell.role for cell in cells]
    assert order == sorted(order, key=["clean", "reference", "control", "fault"].index)


def test_keys_name_runs() -> None:
    once, again = read(GOOD).cells(), read(GOOD).cells()
    assert once == again
    assert len({cell.key for cell in once}) == len(once)
    relabelled = read(changed("name: pair", "name: couple")).cells()
    assert {cell.key for cell in relabelled} == {cell.key for cell in once}, "a label decides nothing"
    longer = read(changed("steps: 12", "steps: 13")).cells()
    assert not {cell.key for cell in longer if cell.job == "tiny"} & {cell.key for cell in once}


def test_lines_are_canonical() -> None:
    for cell in read(GOOD).cells():
        assert all(str(grammar.parse(line)) == line for line in cell.faults)
    spaced = read(
        changed(
            "rank=2 fwd_out:*mlp* @ step=6 : n=1 -> bit=20", "rank=2  fwd_out:*mlp*  @  step=6 : n=1  -> bit=20 ; once"
        )
    )
    assert {cell.key for cell in spaced.cells()} == {cell.key for cell in read(GOOD).cells()}


def test_cells_survive_json() -> None:
    for cell in read(GOOD).cells():
        assert CellSpec.from_json(cell.to_json()) == cell


def test_draws_of_a_preset_differ_in_what_they_draw_by() -> None:
    text = changed("steps: 5..9, jobs", "steps: [5], jobs")
    drawn = [cell for cell in read(text).cells() if cell.label == "he2023.rbflip"]
    assert len(drawn) == 5
    assert len({(cell.seed, cell.repeat) for cell in drawn}) == 5


def test_blanks_are_filled_with_every_combination() -> None:
    item = '{fault: "rank={rank} fwd_out @ step={step} : n=1 -> bit={bit}", vary: {bit: 3..4, rank: [0, 2]}, steps: 2..8, count: 3, name: "bit {bit}"}'
    campaign = read(GOOD[: GOOD.index("faults:")] + f"faults:\n  - {item}\n")
    faults = by_role(campaign.cells(), "fault")
    assert len(faults) == 2 * 2 * 3 * 2 * 2
    assert {cell.label for cell in faults} == {"bit 3", "bit 4"}
    steps = {grammar.parse(cell.faults[0]).when.first for cell in faults}
    assert steps <= set(range(2, 9))


def test_rates_of_a_preset() -> None:
    rates = "{preset: prism.tensor_core, count: 2, steps: [3], rate: [0.01, 0.5], name: prism}"
    campaign = read(GOOD[: GOOD.index("faults:")] + f"faults:\n  - {rates}\n")
    assert {cell.label for cell in by_role(campaign.cells(), "fault")} == {"prism rate=0.01", "prism rate=0.5"}


def test_a_campaign_without_faults_is_one_of_controls() -> None:
    cells = read(GOOD[: GOOD.index("faults:")]).cells()
    assert {cell.role for cell in cells} == {"clean", "reference", "control"}


@pytest.mark.parametrize(
    ("policy", "settings"), [("every_step", {"audit_every": 1, "check_every": 1}), ("default", {}), ("null", None)]
)
def test_policies_by_name(policy: str, settings: object) -> None:
    assert read(changed("{audit_every: 1, check_every: 1}", policy)).policy == settings


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("controls: 2", "contorls: 2", 11, "no key 'contorls', did you mean 'controls'"),
        ("count: 5", "cuont: 5", 18, "no key 'cuont', did you mean 'count'"),
        ("final: accuracy", "finale: accuracy", 14, "no key 'finale', did you mean 'final'"),
        ("final: accuracy", "final: bleu", 14, "final must be one of"),
        ("audit_every: 1", "audit_evry: 1", 9, "no key 'audit_evry', did you mean 'audit_every'"),
        ("audit_every: 1", "audit_every: 0", 9, "audit_every=0"),
        ("policy: {audit_every: 1, check_every: 1}", "policy: everystep", 9, "must be every_step, default, null"),
        ("factory: mlp", "factory: mpl", 4, "no job 'mpl', did you mean 'mlp'"),
        ("factory: mlp, ", "", 4, "needs `factory`"),
        ("ranks: 4", "ranks: four", 4, "must be a whole number of at least 1, not 'four'"),
        ("checkpoint_every: 4", "checkpoint_every: -1", 4, "checkpoint_every"),
        ("seeds: [0, 1]", "seeds: [0, 1.5]", 10, "must be a whole number"),
        ("steps: 5..9", "steps: 9..5", 18, "a range such as 5..20"),
        ("steps: 5..9", "steps: 5..20", 18, "20 never happens, job other has steps 0..19"),
        ("preset: he2023.rbflip", "preset: he2023.rbflap", 18, "did you mean 'he2023.rbflip'"),
        ("jobs: [other]", "jobs: [others]", 18, "no job 'others', did you mean 'other'"),
        ("jobs: [other]", "jobs: [other], vary: {a: [1]}", 18, "'vary' has no meaning beside 'preset'"),
        ("rank=2 fwd_out", "rank=3 fwd_out", 16, "rank 3 does not exist, job other has ranks 0..2"),
        ("step=6", "step=12", 16, "never happens, job tiny has steps 0..11"),
        ("bit=20", "bit={bit}", 16, "bit"),
        ("fwd_out:", "forward:", 16, "^"),
        ("name: pair", "name: pair, vary: {bit: [1]}", 17, "no line has the blank {bit}"),
        ("deadline: 60", "deadline: soon", 13, "must be a number"),
        ("campaign: coverage", "campaign: ../x", 1, "is no name"),
        ("campaign: coverage", "campaigns: coverage", 1, "did you mean 'campaign'"),
        ("factory: tests.faults.campaigns:campaign", "factory: my_jobs:make", 6, "the module my_jobs of the job"),
        (
            "factory: tests.faults.campaigns:campaign",
            "factory: tests.none.jobs:make",
            6,
            "is not found: it must lie beside",
        ),
        ("factory: tests.faults.campaigns:campaign", "factory: sys:exit", 6, "has no file"),
        ("lr: 1e-3", "lr: .inf", 4, "lr of job tiny must be a finite number, not inf"),
        ("lr: 1e-3", "widths: [1, {deep: .nan}]", 4, "widths of job tiny must be a finite number, not nan"),
        ("seeds: [0, 1]", "seeds: [0, 9223372036854775808]", 10, "seeds must be at most 4294967295"),
        ("seeds: [0, 1]", "seeds: -1", 10, "seeds must be a whole number of at least 0"),
        ("seeds: 7", "seeds: 4294967296", 18, "seeds must be at most 4294967295"),
        ("deadline: 60", "deadline: 1e-9", 13, "deadline must be at least 1 second"),
        ("deadline: 60", "deadline: .inf", 13, "deadline must be a number"),
        ("rank=2 fwd_out", "node=node-3 fwd_out", 16, "node node-3 does not exist, job other has node-0..node-2"),
        ("rank=2 fwd_out", "node=b fwd_out", 16, "node b does not exist, job tiny has node-0..node-3"),
        ("rank=2 fwd_out", "rank=1 node=node-2 fwd_out", 16, "rank 1 of job tiny is on node-1, not on node-2"),
        (
            "fwd_out:*mlp* @ step=6 : n=1 -> bit=20",
            "ckpt @ step=6 : n=1 -> bit=2",
            16,
            "job other saves no checkpoint: give it checkpoint_every",
        ),
        ("rank=2 fwd_out:*mlp*", "during=save param", 16, "job other saves no checkpoint"),
        ("name: pair", "name: 'pair {bit}'", 17, "nothing fills {bit}"),
        ("references: 3", "seeds: [3]", 12, "stands here twice, first in line 10"),
        ("references: 3", "references: [", 14, "not YAML"),
        ("references: 3", "references: 2024-01-01", 12, "quote it"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(old: str, new: str, line: int, words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(changed(old, new))
    assert str(caught.value).startswith(f"try.yaml, line {line}"), caught.value
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "fault",
    [
        "digest",
        "ckpt",
        *(f"during={work} loss" for work in ("replay", "arbiter", "rerun")),
        "during=fingerprint param",
        "during=save param",
    ],
)
@pytest.mark.parametrize("own", [True, False])
def test_a_guards_own_work_needs_a_guard(fault: str, own: bool) -> None:
    head = GOOD[: GOOD.index("faults:")]
    head = head if own else head.replace("policy: {audit_every: 1, check_every: 1}", "policy: null")
    line = f'"rank=1 {fault} @ step=5 : all -> random"'
    item = f"{{fault: {line}, jobs: tiny{', policy: null' if own else ''}}}"
    with pytest.raises(ConfigurationError, match=r"try\.yaml, line 16: .* and policy is null"):
        read(f"{head}faults:\n  - {item}\n")


LINE = "rank=1 fwd_out @ step={d1} : n=1 -> bit={Bit_2}"


def test_blanks_have_digits_and_capitals() -> None:
    item = f'{{fault: "{LINE}", vary: {{d1: [3, 4], Bit_2: 5..6}}, name: "bit {{Bit_2}}", jobs: tiny}}'
    faults = by_role(read(GOOD[: GOOD.index("faults:")] + f"faults:\n  - {item}\n").cells(), "fault")
    assert {grammar.parse(cell.faults[0]).when.first for cell in faults} == {3, 4}
    assert {cell.label for cell in faults} == {"bit 5", "bit 6"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ('"loss @ step=3 : all -> sign"', '{fault: "loss @ step=3  : all -> sign ; once", name: twice}'),
        ('"loss @ step=3 : all -> sign"', '{fault: "loss @ step=3 : all -> sign", seeds: 1, jobs: tiny}'),
        (
            '{fault: "loss @ step=3 : all -> sign", policy: {}}',
            '{fault: "loss @ step=3 : all -> sign", policy: default}',
        ),
    ],
)
def test_the_same_run_twice_is_refused(first: str, second: str) -> None:
    text = GOOD[: GOOD.index("faults:")] + f"faults:\n  - {first}\n  - {second}\n"
    with pytest.raises(ConfigurationError, match=r"try\.yaml, line 17: .* is the same run as .* in line 16"):
        read(text)
    read(text.replace("sign", "zero", 1))


def test_the_same_value_twice_is_refused() -> None:
    item = '{fault: "loss @ step={step} : all -> sign", vary: {step: [3, 3]}}'
    with pytest.raises(ConfigurationError, match=r"line 16: .* is the same run as .* in line 16"):
        read(GOOD[: GOOD.index("faults:")] + f"faults:\n  - {item}\n")


def test_runs_and_jobs_have_places() -> None:
    campaign = read(GOOD)
    places = campaign.places()
    faults = by_role(campaign.cells(), "fault")
    assert list(places) == [cell.key for cell in faults]
    assert {cell.label: places[cell.key] for cell in faults}["pair"] == "try.yaml, line 17"
    assert campaign.place_of("other", "the job x has no option stepz, steps") == "try.yaml, line 8"
    assert campaign.place_of("other", "it cannot be imported") == "try.yaml, line 6"


# Jobs of users -------------------------------------------------------------------------------------------------------


def test_an_edited_job_makes_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "file").mkdir()
    module, file = tmp_path / "file" / "job_of_mine.py", tmp_path / "file" / "mine.yaml"
    module.write_text("raise SystemExit('it must not be imported')\n")
    file.write_text(GOOD.replace("tests.faults.campaigns:campaign", "job_of_mine:make"))
    before = load(file).cells()
    assert load(file).cells() == before
    module.write_text("raise SystemExit('it was edited')\n")
    after = load(file).cells()
    common = {cell.key for cell in before} & {cell.key for cell in after}
    assert common == {cell.key for cell in before if cell.job == "tiny"}
    module.rename(tmp_path / "here" / "job_of_mine.py")
    assert load(file).cells() == after, "the current folder serves as well"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"mine\.yaml, line 6: the module job_of_mine .* is not found"):
        load(file)


@pytest.mark.parametrize("packages", [True, False])
def test_a_module_in_folders_is_found_and_not_imported(tmp_path: Path, packages: bool) -> None:
    deep = tmp_path / "outer_of_mine" / "inner"
    deep.mkdir(parents=True)
    (deep / "jobs.py").write_text("raise SystemExit")
    for folder in (deep, deep.parent) if packages else ():
        (folder / "__init__.py").write_text("raise SystemExit('it must not be imported')")
    assert source_digest("outer_of_mine.inner.jobs:make", search_path(tmp_path))
    with pytest.raises(ConfigurationError, match="not found"):
        source_digest("outer_of_mine.inner.none:make", search_path(tmp_path))
    with pytest.raises(ConfigurationError, match="not found"):
        source_digest("outer_of_mine.inner.jobs:make", [])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "just words",
        "[1, 2]",
        "campaign: &a [*a]",
        "campaign: x",
        "campaign: x\njobs: {}",
        "? [1]\n: 2",
        "a: !!python/none x",
    ],
)
def test_what_is_no_campaign_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"try\.yaml"):
        read(text)


def test_a_file_is_read_or_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    assert load(path) == load(str(path)) == read(GOOD)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="UTF-8"):
        load(path)
    with pytest.raises(ConfigurationError, match=re.escape(f"{tmp_path}/none.yaml: no such file")):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load(tmp_path)


def test_what_ships_is_right() -> None:
    for name, path in shipped().items():
        campaign = load(name)
        assert campaign.name == name
        assert campaign.description, f"{path}: say what it is"
        assert campaign.cells()
