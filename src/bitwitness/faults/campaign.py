"""Campaign files: which jobs are hit by which faults, and the runs that follow from it.

A campaign is data, so that it can be reviewed, repeated and resumed. Everything in it is checked, and every draw is made,
when the file is read: whatever can be refused is refused before an hour of training, and the same file always stands for
the same runs. No torch. docs/campaigns.md describes the format.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigurationError
from bitwitness.faults.cells import CellSpec, Role
from bitwitness.faults.entries import Entry, JobSpec, read_entries, read_policy, read_seeds
from bitwitness.faults.job import KNOWN, Shape, search_path, source_digest
from bitwitness.faults.outcomes import Settings
from bitwitness.faults.yamlfile import Item, read, suggestion

_KEYS = (
    "campaign",
    "description",
    "jobs",
    "policy",
    "seeds",
    "controls",
    "references",
    "deadline",
    "faults",
    "classify",
)
_FIRST_REFERENCE = 1000
_MOST_CELLS = 1_000_000


@dataclass(frozen=True, slots=True)
class Campaign:
    """A campaign that has been read and checked.

    Attributes:
        name, description: of the file.
        jobs: by name.
        entries: what strikes.
        seeds: of the jobs.
        policy: of the controls, and of the entries that name no other.
        controls: fault-free guarded runs for each job, seed and policy.
        references: fault-free unguarded runs of each job with other seeds.
        deadline: seconds after which a run is killed.
        classify: how outcomes are told apart.
        file: as errors call it; folder: where it lies, None for one that ships.
    """

    name: str
    description: str
    jobs: Mapping[str, JobSpec]
    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] = (0,)
    policy: Mapping[str, Any] | None = field(default_factory=dict)
    controls: int = 1
    references: int = 0
    deadline: float = 300.0
    classify: Settings = field(default_factory=Settings)
    file: str = field(default="", compare=False)
    folder: Path | None = field(default=None, compare=False)

    def cells(self) -> list[CellSpec]:
        """All runs, each once: fault-free ones first, because the others are compared with them."""
        found: dict[str, CellSpec] = {}
        for one in itertools.chain(self._fault_free(), self._hit()):
            found.setdefault(one.key, one)
        return list(found.values())

    def places(self) -> dict[str, str]:
        """File and line of each run with a fault, by key."""
        return {
            cell(self.jobs[job], entry.policy, entry.lines, seed, "fault", repeat=entry.repeat).key: self._line(
                entry.line
            )
            for entry in self.entries
            for job, seed in itertools.product(entry.jobs, entry.seeds if entry.lines else ())
        }

    def place_of(self, job: str, problem: str) -> str:
        """File and line of what is wrong with a job: of the option that the problem names, else of its factory."""
        lines = self.jobs[job].lines
        told = re.findall(r"option (\w+(?:, \w+)*)", problem)
        named = [word for words in told for word in words.split(", ") if word in lines]
        return self._line(lines.get(named[0] if named else "factory", 0))

    def _line(self, line: int) -> str:
        return f"{self.file}, line {line}"

    def _fault_free(self) -> Iterator[CellSpec]:
        runs = dict.fromkeys((job, seed) for entry in self.entries for job in entry.jobs for seed in entry.seeds)
        for job, seed in runs:
            yield cell(self.jobs[job], None, (), seed, "clean")
        others = list(range(_FIRST_REFERENCE, _FIRST_REFERENCE + self.references + len(runs)))
        for job in dict.fromkeys(job for job, _ in runs):
            for seed in [one for one in others if (job, one) not in runs][: self.references]:
                yield cell(self.jobs[job], None, (), seed, "reference")
        guarded = {
            (job, seed, _canonical(entry.policy)): entry.policy
            for entry in self.entries
            for job in entry.jobs
            for seed in entry.seeds
            if entry.policy is not None
        }
        for (job, seed, _), policy in guarded.items():
            for repeat in range(self.controls):
                yield cell(self.jobs[job], policy, (), seed, "control", repeat=repeat)

    def _hit(self) -> Iterator[CellSpec]:
        for entry in self.entries:
            for job, seed in itertools.product(entry.jobs, entry.seeds if entry.lines else ()):
                yield cell(self.jobs[job], entry.policy, entry.lines, seed, "fault", entry.label, entry.repeat)


def cell(
    job: JobSpec,
    policy: Mapping[str, Any] | None,
    faults: tuple[str, ...],
    seed: int,
    role: Role,
    label: str = "",
    repeat: int = 0,
) -> CellSpec:
    """A run, with the key that follows from everything that decides its result."""
    options = dict(job.options)
    decides = [job.name, job.factory, options, policy, faults, seed, role, repeat]
    decides += [job.source] if job.source else []
    key = hashlib.blake2b(_canonical(decides).encode(), digest_size=12).hexdigest()
    return CellSpec(key, job.name, job.factory, options, policy, faults, seed, role, label, repeat)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


# Finding and reading -------------------------------------------------------------------------------------------------


def shipped() -> dict[str, Path]:
    """The campaigns that come with bitwitness, by name."""
    folder = Path(str(resources.files("bitwitness.faults"))) / "campaigns"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))} if folder.is_dir() else {}


def load(path_or_name: str | Path) -> Campaign:
    """Read a campaign: a file, or the name of one that ships.

    Raises:
        ConfigurationError: there is none, or something in it is wrong; with file, line and what would be right.
    """
    path, known = Path(path_or_name), shipped()
    if str(path_or_name) in known:
        path = known[str(path_or_name)]
    elif not path.exists():
        names = ", ".join(known) or "none"
        raise ConfigurationError(
            f"{path_or_name}: no such file, and no campaign of this name ships{suggestion(str(path_or_name), known)}; "
            f"there are: {names}"
        )
    return from_item(read(path), None if path in known.values() else path.parent)


def from_item(top: Item, folder: Path | None = None) -> Campaign:
    """A campaign of a file that has been read, and which lies in a folder; see `load`."""
    given = top.known(_KEYS, "a campaign")
    for key in ("campaign", "jobs"):
        if key not in given:
            top.fail(f"a campaign needs the key {key!r}")
    jobs = _jobs(given["jobs"], search_path(folder))
    seeds = read_seeds(given["seeds"]) if "seeds" in given else (0,)
    policy = read_policy(given["policy"]) if "policy" in given else {"audit_every": 1, "check_every": 1}
    name = given["campaign"].text("campaign")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        given["campaign"].fail(f"campaign: {name!r} is no name; use letters, digits, dots, dashes and underscores")
    usual = Entry("", (), tuple(jobs), seeds, policy)
    entries: list[Entry] = []
    for number, item in enumerate(given["faults"].items("faults") if "faults" in given else []):
        entries += read_entries(item, f"{name}/{number}", jobs, usual)
    if not entries:
        entries = [usual]
    campaign = Campaign(
        name=name,
        description=given["description"].text("description") if "description" in given else "",
        jobs=jobs,
        entries=tuple(entries),
        seeds=seeds,
        policy=policy,
        controls=given["controls"].whole("controls", 0, 100_000) if "controls" in given else 1,
        references=given["references"].whole("references", 0, 1000) if "references" in given else 0,
        deadline=_deadline(given["deadline"]) if "deadline" in given else 300.0,
        classify=_classify(given["classify"]) if "classify" in given else Settings(),
        file=top.file,
        folder=folder,
    )
    runs = sum(len(entry.jobs) * len(entry.seeds) for entry in entries)
    if runs > _MOST_CELLS:
        top.fail(f"{runs} runs: the most is {_MOST_CELLS}")
    _each_once(entries, top.file)
    return campaign


def _each_once(entries: Iterable[Entry], file: str) -> None:
    """One of two equal runs would be made, and stand under the name of one of them."""
    first: dict[tuple[Any, ...], Entry] = {}
    for entry in entries:
        for job, seed in itertools.product(entry.jobs, entry.seeds if entry.lines else ()):
            other = first.setdefault((entry.lines, entry.repeat, _canonical(entry.policy), job, seed), entry)
            if other is not entry:
                raise ConfigurationError(
                    f"{file}, line {entry.line}: {entry.label!r} is the same run as {other.label!r} in line {other.line} "
                    f"({' & '.join(entry.lines)}; job {job}, seed {seed}): take one of them out, or make more draws with count"
                )


def _deadline(item: Item) -> float:
    seconds = item.number("deadline")
    return seconds if seconds >= 1 else item.fail(f"deadline must be at least 1 second, not {item.value}")


def _jobs(item: Item, path: Sequence[str]) -> dict[str, JobSpec]:
    found = {}
    for name, one in item.mapping("jobs").items():
        options = one.mapping(f"job {name}")
        if "factory" not in options:
            one.fail(f"job {name} needs `factory`: a known job such as language, digits or mlp, or module:function")
        factory = options["factory"].text("factory")
        for key in ("ranks", "steps"):
            if key not in options:
                one.fail(f"job {name} needs the key {key!r}")
            options[key].whole(f"{key} of job {name}", 1, 1024 if key == "ranks" else 10_000_000)
        if factory not in KNOWN and not re.fullmatch(r"[\w.]+:\w+", factory):
            options["factory"].fail(
                f"there is no job {factory!r}{suggestion(factory, KNOWN)}; known are {', '.join(KNOWN)}, or give module:function"
            )
        for key in options:
            options[key].finite(f"{key} of job {name}")
            try:
                Shape.split({key: options[key].plain()})
            except ConfigurationError as error:
                options[key].fail(f"job {name}: {error}")
        try:
            source = source_digest(factory, path)
        except ConfigurationError as error:
            options["factory"].fail(str(error))
        plain = {key: value.plain() for key, value in options.items() if key != "factory"}
        found[name] = JobSpec(name, factory, plain, source, {key: one.keys[key] for key in options})
    return found or item.fail("a campaign needs a job")


def _classify(item: Item) -> Settings:
    given = item.known([one.name for one in fields(Settings)], "classify")
    try:
        return Settings(**{key: value.plain() for key, value in given.items()})
    except (ConfigurationError, TypeError) as error:
        return item.fail(f"classify: {error}")
