"""Golden answers decide who is blamed: what nobody signed, or anybody changed, judges nobody."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed448
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.errors import BitwitnessError, ConfigurationError, MissingExtra, RunFilesError
from bitwitness.runfiles.answers import Device, Sheet
from bitwitness.scan import golden, signing
from bitwitness.scan.judging import judge
from bitwitness.scan.results import Judgement, LinkResult, Voice

KIND = {"device": "cpu", "torch": "2.13", "threads": "1"}
ITEMS = tuple(f"ops/matmul/float32/{size}x{size}x{size}" for size in (16, 32, 48, 64))
RIGHT = {item: f"{number:032x}" for number, item in enumerate(ITEMS, start=1)}


def sheet(rank: int, *, node: str = "", kind: Mapping[str, str] = KIND, calls: int = 20, **other: str) -> Sheet:
    device = Device(rank, node or f"n{rank}", f"cpu-{rank}", kind)
    return Sheet(device, {item: {other.get("answer", digest): calls} for item, digest in RIGHT.items()}, "done")


def healthy(count: int = 4, **how: Any) -> list[Sheet]:
    return [sheet(rank, **how) for rank in range(count)]


class Place:
    """A folder with a key and a golden file."""

    def __init__(self, folder: Path) -> None:
        self.key, self.file = folder / "key", folder / "golden.json"
        self.public = golden.make_key(self.key)

    def learn(self, sheets: list[Sheet]) -> golden.GoldenFile:
        return golden.write(self.file, golden.learn(sheets, judge(sheets), "scan-1"), self.key)

    def load(self) -> golden.GoldenFile:
        return golden.load(self.file, self.public)

    def forge(self, change: Callable[[dict[str, Any]], object], *, sign: bool) -> None:
        """Write the file anew with a change, as the owner of the key could, or as somebody else could."""
        record = json.loads(self.file.read_bytes())
        change(record)
        if sign:
            body = {name: value for name, value in record.items() if name not in ("key", "signature")}
            record = signing.sign(body, signing.private_key(self.key))
        self.file.write_bytes(signing.canonical(record))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path)
    made.learn(healthy())
    return made


def test_what_was_learned_judges_a_device_that_is_alone(place: Place) -> None:
    known = place.load()
    (name,) = known
    assert known.kinds[name] == KIND
    assert (known.scan, len(known[name])) == ("scan-1", 4)
    assert all((one.devices, one.calls) == (4, 80) for one in known[name].values())
    right, wrong = sheet(0), sheet(0)
    wrong.answers[ITEMS[0]] = {RIGHT[ITEMS[0]]: 5, "f" * 32: 15}
    assert judge([right], known).standing == "pass"
    (failed,) = judge([wrong], known).devices
    assert (failed.standing, failed.wrong, failed.findings[0].golden) == ("fail", 15, True)


# Keys ---------------------------------------------------------------------------------------------------------------------


def test_a_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    key = tmp_path / "key"
    public = golden.make_key(key)
    assert public == tmp_path / "key.pub"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes(), public.read_bytes()
    with pytest.raises(ConfigurationError, match="never overwritten"):
        golden.make_key(key)
    assert (key.read_bytes(), public.read_bytes()) == before
    (tmp_path / "other.pub").write_text("mine")
    with pytest.raises(ConfigurationError, match="never overwritten"):
        golden.make_key(tmp_path / "other")
    assert not (tmp_path / "other").exists()
    with pytest.raises(RunFilesError, match="could not be written"):
        golden.make_key(tmp_path / "nowhere" / "key")


def test_keys_that_are_none(place: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not believed without a key"):
        golden.load(place.file, None)
    with pytest.raises(ConfigurationError, match=r"private key.*\.pub"):
        golden.load(place.file, place.key)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "huge").write_bytes(b"-" * 100_000)
    other = ed448.Ed448PrivateKey.generate().public_key()
    (tmp_path / "ed448").write_bytes(
        other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    for name, why in (("text", "no public key"), ("huge", "larger than any key"), ("ed448", "no Ed25519 key")):
        with pytest.raises(ConfigurationError, match=why):
            golden.load(place.file, tmp_path / name)
    with pytest.raises(RunFilesError, match="cannot be read"):
        golden.load(place.file, tmp_path / "absent")
    learned = golden.learn(healthy(), judge(healthy()))
    with pytest.raises(ConfigurationError, match="no private key"):
        golden.write(tmp_path / "new.json", learned, place.public)
    place.key.chmod(0o644)
    with pytest.raises(ConfigurationError, match="everybody"):
        golden.write(tmp_path / "new.json", learned, place.key)
    assert not (tmp_path / "new.json").exists()


def test_the_key_of_somebody_else(place: Place, tmp_path: Path) -> None:
    other = golden.make_key(tmp_path / "other")
    with pytest.raises(RunFilesError, match=r"names the key .* give the key of whoever learned it"):
        golden.load(place.file, other)
    learned = golden.learn(healthy(), judge(healthy()))
    with pytest.raises(RunFilesError, match="not signed by"):
        golden.write(place.file, learned, tmp_path / "other")


def test_without_cryptography(place: Place) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None; sys.modules['torch'] = None; sys.modules['numpy'] = None\n"
        "from pathlib import Path; from bitwitness.errors import MissingExtra; from bitwitness.scan import golden\n"
        f"for act in (lambda: golden.load(Path({str(place.file)!r}), Path({str(place.public)!r})), lambda: golden.make_key(Path('x'))):\n"
        "    try: act()\n"
        "    except MissingExtra as error: assert \"pip install 'bitwitness[scan]'\" in str(error)\n"
        "    else: raise SystemExit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert issubclass(MissingExtra, BitwitnessError)


# Files that must not be believed ------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bit_that_is_another_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole, public, folder = _signed(tmp_path_factory)
    spoilt = bytearray(whole)
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    spoilt[bit // 8] ^= 1 << bit % 8
    file = folder / "spoilt.json"
    file.write_bytes(spoilt)
    with pytest.raises((RunFilesError, ConfigurationError)):
        golden.load(file, public)


def test_a_signature_is_written_in_one_way_only(place: Place) -> None:
    text = json.loads(place.file.read_bytes())["signature"]
    for other in (text.upper(), f" {text}", f"{text[:2]} {text[2:]}", text[:-2], "", None, 3):
        place.forge(lambda record, other=other: record.update(signature=other), sign=False)  # type: ignore[misc]
        with pytest.raises(RunFilesError, match="not as it was signed"):
            place.load()


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_what_is_cut_or_added_is_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole, public, folder = _signed(tmp_path_factory)
    at = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(at, len(whole)))
    put = data.draw(st.binary(max_size=5))
    spoilt = whole[:at] + put + whole[end:]
    if spoilt == whole:
        return
    file = folder / "spoilt.json"
    file.write_bytes(spoilt)
    with pytest.raises((RunFilesError, ConfigurationError)):
        golden.load(file, public)


_MADE: dict[str, tuple[bytes, Path, Path]] = {}


def _signed(factory: pytest.TempPathFactory) -> tuple[bytes, Path, Path]:
    """A signed file of several kinds; made once."""
    if not _MADE:
        place = Place(factory.mktemp("golden"))
        place.learn([*healthy(), *(sheet(rank, kind=KIND | {"torch": "2.14"}, answer="ab" * 16) for rank in (4, 5, 6))])
        _MADE["it"] = (place.file.read_bytes(), place.public, place.file.parent)
    return _MADE["it"]


def _swap(record: dict[str, Any]) -> None:
    first, second = record["kinds"]
    first["items"], second["items"] = second["items"], first["items"]


def test_answers_of_two_kinds_cannot_be_swapped(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.learn([*healthy(), *(sheet(rank, kind=KIND | {"torch": "2.14"}, answer="ab" * 16) for rank in (4, 5, 6))])
    place.forge(_swap, sign=False)
    with pytest.raises(RunFilesError, match="not as it was signed"):
        place.load()


def test_a_signature_of_another_file_is_none(place: Place, tmp_path: Path) -> None:
    """Neither an older signature of the same key on newer content, nor one that the key made of something else."""
    old = json.loads(place.file.read_bytes())
    place.learn([sheet(rank, kind=KIND | {"torch": "2.14"}) for rank in range(3)])
    place.forge(lambda record: record.update(signature=old["signature"]), sign=False)
    with pytest.raises(RunFilesError, match="not as it was signed"):
        place.load()
    body = {name: value for name, value in old.items() if name != "signature"}
    plain = signing.private_key(place.key).sign(signing.canonical(body)).hex()
    place.file.write_bytes(signing.canonical(body | {"signature": plain}))
    with pytest.raises(RunFilesError, match="not as it was signed"):
        place.load()


def test_an_older_file_of_the_same_key_knows_less_and_nothing_else(place: Place) -> None:
    """It cannot be told from a newer one; what it knows was never contradicted, or the newer one could not have been made."""
    old = place.file.read_bytes()
    place.learn([sheet(rank, kind=KIND | {"torch": "2.14"}) for rank in range(3)])
    newer = place.load()
    place.file.write_bytes(old)
    older = place.load()
    assert set(older) < set(newer)
    assert all(newer[name][item].digest == known.digest for name in older for item, known in older[name].items())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda record: record.update(suite_version=2), "version 2 of the items.*learn it anew"),
        (lambda record: record.update(suite_version=0), "version 0 of the items"),
        (lambda record: record.update(suite_version=True), "version True"),
        (lambda record: record.update(schema=2), "schema 2"),
        (lambda record: record.update(schema=True), "schema True"),
        (lambda record: record.update(type="something"), "no golden file"),
        (lambda record: record.update(more=1), "not written as golden files are"),
        (lambda record: record.update(kinds={}), "values that cannot be"),
        (lambda record: record.update(made=3), "values that cannot be"),
        (lambda record: record["kinds"].append(record["kinds"][0]), "twice the kind"),
        (lambda record: record["kinds"][0].update(kind={}), "no kind"),
        (lambda record: record["kinds"][0].update(kind={"torch": 2.13}), "no kind"),
        (lambda record: record["kinds"][0].update(kind={"torch": "x\n" * 3}), "no kind"),
        (lambda record: record["kinds"][0]["items"].update({"rm -rf": record["kinds"][0]["items"][ITEMS[0]]}), "no item"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(digest="x" * 32), "no answer"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(digest=""), "no answer"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(devices=2), "not enough"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(calls=5), "not enough"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(calls=1e300), "no count"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(calls=10**30), "no count"),
        (lambda record: record["kinds"][0]["items"][ITEMS[0]].update(calls=-1), "not enough"),
    ],
    ids=lambda value: None if callable(value) else value[:24],
)  # fmt: skip
def test_absurd_values_are_refused_even_when_signed(
    place: Place, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    place.forge(change, sign=True)
    with pytest.raises((RunFilesError, ConfigurationError), match=why):
        place.load()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        (b"[]", "no golden file"),
        (b'{"schema": 1}', "no golden file"),
        (b'{"type": "bitwitness golden answers", "schema": 1, "kinds": []}', "not signed"),
        (b'{"type": "bitwitness golden answers", "schema": 1, "key": 1, "signature": NaN}', "not written as"),
    ],
    ids=["empty", "cut", "binary", "deep", "number", "list", "other", "unsigned", "nan"],
)
def test_files_that_are_none(place: Place, content: bytes, why: str) -> None:
    place.file.write_bytes(content)
    with pytest.raises(RunFilesError, match=why):
        place.load()
    if content != b"":
        with pytest.raises(RunFilesError):
            place.learn(healthy())
        assert place.file.read_bytes() == content


def test_files_that_cannot_be_read(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in (tmp_path / "absent", tmp_path):
        with pytest.raises(RunFilesError, match="cannot be read"):
            golden.load(file, place.public)
    monkeypatch.setattr(golden, "_LARGEST", 100)
    with pytest.raises(RunFilesError, match="larger than"):
        place.load()


# Another kind -------------------------------------------------------------------------------------------------------------


def test_devices_of_another_kind_are_not_judged_by_it(place: Place) -> None:
    known = place.load()
    (result,) = judge([sheet(0, kind=KIND | {"torch": "2.12"}, answer="e" * 32)], known).devices
    assert result.standing == "not judged"
    assert "torch 2.12 instead of 2.13" in golden.explain(known, KIND | {"torch": "2.12"})
    assert golden.explain(known, KIND) == ""
    assert "no threads instead of threads 1" in golden.explain(known, {"device": "cpu", "torch": "2.13"})
    assert "cuda 13 instead of none" in golden.explain(known, KIND | {"cuda": "13"})


def test_the_nearest_kind_is_named(place: Place) -> None:
    place.learn([sheet(rank, kind={"device": "H200", "torch": "2.13", "threads": "8"}) for rank in range(3)])
    why = golden.explain(place.load(), {"device": "H200", "torch": "2.12", "threads": "8"})
    assert "torch 2.12 instead of 2.13" in why
    assert "H200" not in why


# Learning -----------------------------------------------------------------------------------------------------------------


def test_fewer_than_three_devices_teach_nothing() -> None:
    mixed = [sheet(0), sheet(1), sheet(2, kind=KIND | {"torch": "2.12"}), sheet(3, kind=KIND | {"torch": "2.12"})]
    for sheets in ([], healthy(1), healthy(2), mixed):
        with pytest.raises(ConfigurationError, match="at least 3 devices of one kind"):
            golden.learn(sheets, judge(sheets))


def test_a_scan_with_a_failure_teaches_nothing() -> None:
    sheets = healthy(8)
    sheets[3].answers[ITEMS[0]] = {RIGHT[ITEMS[0]]: 10, "e" * 32: 10}
    with pytest.raises(ConfigurationError, match="n3 failed"):
        golden.learn(sheets, judge(sheets))
    good = judge(healthy())
    link = LinkResult((0, 1), ("n0", "n1"), ("a", "b"), "fail", "wrong")
    for bad in (
        Judgement(good.devices, (link,)),
        Judgement(good.devices, voices=(Voice("dcgm-diag", "n0", "gpu:1", "fail", "memory", "strong"),)),
    ):
        with pytest.raises(ConfigurationError, match="nothing is learned"):
            golden.learn(healthy(), bad)


def _learned(sheets: list[Sheet]) -> tuple[set[str], dict[str, str]]:
    found = golden.learn(sheets, judge(sheets))
    kinds = found["kinds"]
    return {item for one in kinds for item in one["items"]}, {one["item"]: one["why"] for one in found["skipped"]}


def test_items_that_are_not_learned_are_named_with_the_reason() -> None:
    sheets = healthy(4)
    sheets[0].answers[ITEMS[0]] = {"e" * 32: 1}
    for one in sheets[:2]:
        one.answers[ITEMS[1]] = {RIGHT[ITEMS[1]]: 1}
    del sheets[0].answers[ITEMS[2]]
    sheets[1].answers["comm/all_reduce/float32/16"] = {"c" * 32: 5}
    items, why = _learned(sheets)
    assert items == {ITEMS[2], ITEMS[3]}
    assert "2 different answers" in why[ITEMS[0]]
    assert "2 device(s) passed and computed it twice" in why[ITEMS[1]]
    assert "who takes part" in why["comm/all_reduce/float32/16"]


def test_one_node_of_several_is_not_enough() -> None:
    sheets = [sheet(0, node="a"), sheet(1, node="a"), sheet(2, node="a"), sheet(3, node="b")]
    del sheets[3].answers[ITEMS[0]]
    items, why = _learned(sheets)
    assert items == set(ITEMS[1:])
    assert "one node only" in why[ITEMS[0]]
    assert _learned([sheet(rank, node="a") for rank in range(3)])[0] == set(ITEMS), "there is only one node"


def test_devices_that_were_not_judged_do_not_count(place: Place) -> None:
    sheets = healthy(3)
    passed = judge(sheets).devices[:2]
    with pytest.raises(ConfigurationError, match="nothing could be learned"):
        golden.learn(sheets, Judgement(passed))


# Learning into a file that is there ---------------------------------------------------------------------------------------


def test_learning_adds_kinds_and_items(place: Place) -> None:
    place.learn([sheet(rank, kind=KIND | {"torch": "2.14"}, answer="d" * 32) for rank in range(3)])
    known = place.load()
    assert len(known) == 2
    place.learn(healthy(6))
    again = place.load()
    assert {(one.devices, one.calls) for one in again["device cpu; threads 1; torch 2.13"].values()} == {(6, 200)}
    assert again["device cpu; threads 1; torch 2.14"] == known["device cpu; threads 1; torch 2.14"]


def test_a_contradiction_is_refused_and_named(place: Place) -> None:
    before = place.file.read_bytes()
    with pytest.raises(ConfigurationError, match=rf"{ITEMS[0]}.*Nothing was written"):
        place.learn(healthy(3, answer="e" * 32))
    assert place.file.read_bytes() == before


def test_kinds_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.learn(healthy(3, kind={"a": "1; b 2"}))
    with pytest.raises(ConfigurationError, match="the same name"):
        place.learn(healthy(3, kind={"a": "1", "b": "2"}))
    with pytest.raises(ConfigurationError, match="not learned from a scan"):
        golden.write(place.file, {"kinds": [{"kind": {"a": "x\ny"}, "items": {}}]}, place.key)
    with pytest.raises(ConfigurationError, match="not learned from a scan"):
        golden.write(place.file, {}, place.key)
