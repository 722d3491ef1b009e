"""What wrappers and leader write: whole or absent, read with forgiveness, named without tricks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bitwitness.errors import RunFilesError
from bitwitness.runfiles.supervision import Generation, Member, Session, Stop, SupervisionFiles

SESSION = Session("s", "host", 1, beat=3, job={"args": ["a"]}, preparing=1)
MEMBER = Member(
    "n/../1", "t", devices=("a", "b"), state="running", failures=({"rank": 1},), progress={"1": (2, "x", 0.5)}
)


@pytest.fixture
def files(tmp_path: Path) -> SupervisionFiles:
    made = SupervisionFiles(tmp_path)
    made.create("s")
    return made


def test_what_is_written_is_read(files: SupervisionFiles) -> None:
    files.write_session(SESSION)
    files.write_member("s", MEMBER)
    files.write_generation("s", Generation(1, ("a", "b"), "host", 2, True, "why"))
    files.write_stop("s", Stop(3, "corruption", "why", {"a": [1]}))
    assert files.read_session() == SESSION
    found = files.read_member("s", "n/../1")
    assert found is not None
    assert replace(found, progress=MEMBER.progress) == MEMBER
    assert list(found.progress["1"]) == [2, "x", 0.5]
    assert files.read_members("s") == [found]
    assert files.read_generation("s", 1) == Generation(1, ("a", "b"), "host", 2, True, "why")
    assert files.read_stop("s") == Stop(3, "corruption", "why", {"a": [1]})
    assert not list(files.folder.rglob(".*"))


def test_a_name_leads_nowhere_else(files: SupervisionFiles, tmp_path: Path) -> None:
    for name in ("../../../x", ".hidden", "a b", "ü", "/etc/x"):
        files.write_member("s", replace(MEMBER, node=name))
        assert files.read_member("s", name) is not None, name
    assert len(list((files.folder / "s" / "members").glob("*.json"))) == 5
    assert [path.name for path in tmp_path.iterdir()] == ["supervise"]
    assert len(files.read_members("s")) == 5


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"schema": 1}', b'{"schema": 2, "id": "s"}', b"[]", b'{"schema":1,"id":']
)
def test_what_is_torn_or_foreign_is_not_there_yet(files: SupervisionFiles, content: bytes) -> None:
    (files.folder / "session.json").write_bytes(content)
    (files.folder / "s" / "members" / "n.json").write_bytes(content)
    (files.folder / "s" / "generation-0001.json").write_bytes(content)
    assert files.read_session() is None
    assert files.read_members("s") == []
    assert files.read_generation("s", 1) is None
    assert files.read_stop("s") is None
    assert files.read_abort("s", 1) == {}


def test_a_state_that_nobody_knows_is_no_member(files: SupervisionFiles) -> None:
    files.write_member("s", MEMBER)
    path = next((files.folder / "s" / "members").iterdir())
    path.write_text(path.read_text().replace('"running"', '"sleeping"'))
    assert files.read_members("s") == []


def test_newer_writers_are_understood(files: SupervisionFiles) -> None:
    files.write_session(SESSION)
    path = files.folder / "session.json"
    path.write_text(path.read_text().replace('"host"', '"more": [1], "host"', 1))
    assert files.read_session() == SESSION


def test_the_first_reason_of_an_abort_stays(files: SupervisionFiles) -> None:
    files.write_abort("s", 1, "hang", "first")
    files.write_abort("s", 1, "failed", "second")
    assert (files.read_abort("s", 1)["kind"], files.read_abort("s", 1)["reason"]) == ("hang", "first")


def test_marks_say_what_they_say(files: SupervisionFiles) -> None:
    files.write_mark("s", 1, 3, "finished")
    files.write_mark("s", 1, 4, "stopped")
    files.write_mark("s", 2, 5, "finished")
    folder = files.folder / "s" / "marks" / "0001"
    (folder / "rank-00007.json").write_text("{")
    (folder / "rank-x.json").write_text('{"schema": 1, "mark": "finished"}')
    (folder / "rank-00008.json").write_text('{"schema": 1, "mark": "sure"}')
    assert files.read_marks("s", 1) == {3: "finished", 4: "stopped"}
    assert files.read_marks("s", 3) == {}
    (folder / "rank-00007.json").write_text('{"schema": 1, "mark": "finished"}')
    assert files.read_marks("s", 1, {3: "finished"}) == {3: "finished", 4: "stopped", 7: "finished"}


def test_sessions_of_long_ago_go(files: SupervisionFiles) -> None:
    for number in range(8):
        files.create(f"t{number}")
    assert sorted(path.name for path in files.folder.iterdir()) == ["t3", "t4", "t5", "t6", "t7"]


def test_storage_that_refuses_is_named(tmp_path: Path) -> None:
    (tmp_path / "supervise").write_text("a file")
    with pytest.raises(RunFilesError, match="supervise"):
        SupervisionFiles(tmp_path).create("s")
