"""The exception tree: what its page says, what commands end with, what people read and what process pools pickle."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from bitwitness import errors
from bitwitness.errors import BitwitnessError, CorruptionDetected
from bitwitness.evidence import LedgerEntry, Observation, Verdict

NAMED = Verdict(
    "attributed",
    41,
    ranks=(3,),
    nodes=("node-c",),
    devices=("GPU-3",),
    kind="compute",
    persistence="persistent",
    persistences=("persistent",),
    reason="rank 3 on node node-c (device GPU-3) alone differs in the result of micro-batch 0 of rank 2",
    window=(31, 41),
    check="replay",
)
UNNAMED = Verdict("unattributed", 5, candidates=(0, 1), kind="collective", reason="nobody can tell.", check="numerics")

EXIT_CODES = {
    "BitwitnessError": 1,
    "ConfigurationError": 2,
    "PolicyError": 2,
    "WorkloadError": 2,
    "GuardFailure": 4,
    "CheckFailed": 4,
    "RankLost": 4,
    "RunFilesError": 2,
    "CheckpointError": 2,
    "StorageBusy": 1,
    "StoreError": 1,
    "NotFound": 2,
    "ClusterError": 1,
    "MissingExtra": 2,
}


def classes() -> dict[str, type[BaseException]]:
    found = vars(errors).values()
    return {one.__name__: one for one in found if isinstance(one, type) and issubclass(one, BaseException)}


def drawn_tree() -> dict[str, tuple[str, ...]]:
    """The bases of every class, as the docstring of the module draws them: by indentation, others in parentheses."""
    bases: dict[str, tuple[str, ...]] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.fullmatch(r"((?:  )*)([A-Z]\w+)(?: \((\w+)\))?(?:  +\S.*)?", line)
        if match and match[2] in classes():
            above = [*above[: len(match[1]) // 2], match[2]]
            bases[match[2]] = tuple(filter(None, [above[-2] if len(above) > 1 else "Exception", match[3]]))
    return bases


def test_the_page_draws_the_tree_as_it_is() -> None:
    assert drawn_tree() == {name: tuple(base.__name__ for base in one.__bases__) for name, one in classes().items()}


def test_every_exception_says_when_it_is_raised() -> None:
    assert all(one.__doc__ for one in classes().values())


def test_exit_codes() -> None:
    assert {name: one.exit_code for name, one in _plain()} == EXIT_CODES
    assert CorruptionDetected(NAMED, None).exit_code == 160
    assert CorruptionDetected(UNNAMED, None).exit_code == 3


def _plain() -> list[tuple[str, type[BitwitnessError]]]:
    found = classes().items()
    return [(name, one) for name, one in found if issubclass(one, BitwitnessError) and one is not CorruptionDetected]


def test_a_configuration_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="audit"):
        raise errors.PolicyError("audit")


def test_the_message_of_an_attributed_corruption() -> None:
    assert str(CorruptionDetected(NAMED, Path("/runs/a/incidents/x"))) == (
        "step 41: persistent compute corruption on rank 3 (node node-c). "
        "rank 3 on node node-c (device GPU-3) alone differs in the result of micro-batch 0 of rank 2. "
        "[incident: /runs/a/incidents/x]"
    )


def test_the_message_of_an_unattributed_corruption_and_of_a_disk_that_refused() -> None:
    assert str(CorruptionDetected(UNNAMED, None, "No space left on device")) == (
        "step 5: corruption (collective), unattributed. nobody can tell. No space left on device. "
        "[the incident could not be written]"
    )


def test_headlines() -> None:
    assert Verdict("clean", 2).headline() == "step 2: clean"
    two = Verdict("attributed", 2, (1, 5), ("a", "b"), kind="memory")
    assert two.headline() == "step 2: memory corruption on ranks 1, 5 (nodes a, b)"


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_records_and_exceptions_survive_pickling(protocol: int) -> None:
    seen = Observation("replay", 1, 2, "witness", "a", ("a", "b"), owner=1, micro=0, detail={"differs": ["w"]})
    for record in (NAMED, UNNAMED, seen, LedgerEntry("replay", 0, 9, "unverified", "no memory")):
        assert pickle.loads(pickle.dumps(record, protocol)) == record
    error = CorruptionDetected(NAMED, Path("x"), "note")
    error.add_note("rank 3 said so")
    for twin in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error)):
        assert type(twin) is CorruptionDetected
        assert (twin.verdict, twin.incident_path, twin.note, str(twin)) == (NAMED, Path("x"), "note", str(error))
        assert (twin.exit_code, twin.__notes__) == (160, ["rank 3 said so"])
    for name, kind in _plain():
        twin = pickle.loads(pickle.dumps(kind(name), protocol))
        assert (type(twin), str(twin)) == (kind, name)


def test_records_can_be_kept_in_sets() -> None:
    one = Observation("replay", 1, 2, "witness", detail={"differs": ["w"]})
    assert len({one, Observation("replay", 1, 2, "witness", detail={"differs": ["w"]}), NAMED, UNNAMED}) == 3
    assert len({LedgerEntry("replay", 0, 1, "passed", detail={"level": "loss"})}) == 1


@pytest.mark.parametrize(
    "fields",
    [
        {"status": "guilty", "kind": "compute"},
        {"status": "attributed", "kind": "compute"},
        {"status": "unattributed", "kind": "compute", "ranks": (1,)},
        {"status": "unattributed"},
        {"status": "clean", "kind": "compute"},
        {"status": "clean", "persistence": "forever"},
    ],
)
def test_a_verdict_does_not_contradict_itself(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"verdict|is none of"):
        Verdict.from_json({"step": 1, **fields})


def test_records_from_a_newer_version_can_be_read() -> None:
    assert Verdict.from_json({"status": "clean", "step": 3, "invented": 1}) == Verdict("clean", 3)
    seen = {"check": "replay", "step": 0, "rank": 0, "place": "original", "invented": 1}
    assert Observation.from_json(seen) == Observation("replay", 0, 0, "original")


def test_what_is_zero_is_not_left_out() -> None:
    seen = Observation("replay", 0, 0, "original", owner=0, micro=0)
    assert seen.to_json() == {"check": "replay", "step": 0, "rank": 0, "place": "original", "owner": 0, "micro": 0}
    assert LedgerEntry("replay", 0, 0, "passed").to_json() == {
        "check": "replay",
        "first": 0,
        "last": 0,
        "outcome": "passed",
    }
