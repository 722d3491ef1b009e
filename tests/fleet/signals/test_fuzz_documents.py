"""Damage of every kind: no reader crashes of it, and none of it reads as health."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bitwitness.fleet.signals import Signal, amd, ascend, diagnostic, edac, metrics, rasdaemon
from bitwitness.fleet.signals.reading import whole

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
LABELS = 'gpu="0",UUID="GPU-1111",Hostname="n1",pci_bus_id="00000000:9B:00.0"'
EXPECTED = (
    "XID_ERRORS",
    "ECC_SBE_VOL_TOTAL",
    "ROW_REMAP_FAILURE",
    "ROW_REMAP_PENDING",
    "NVLINK_REPLAY_TOTAL",
    "CLOCKS_EVENT_REASONS",
)
SCRAPE = "".join(f"DCGM_FI_DEV_{name}{{{LABELS}}} {int(name == 'ROW_REMAP_FAILURE')}\n" for name in EXPECTED) + (
    f"DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{{LABELS}}} 3\n"
)
QUERY = json.dumps(
    {
        "status": "success",
        "data": {
            "resultType": "matrix",
            "result": [
                {
                    "metric": {"__name__": f"DCGM_FI_DEV_{name}", "UUID": "GPU-1", "Hostname": "n1"},
                    "values": [[1e9, "0"], [1e9 + 30, "3"]],
                }
                for name in ("ECC_DBE_VOL_TOTAL", "XID_ERRORS")
            ],
        },
    }
)
WARNING = {"warning": "bad", "error_id": 52, "error_category": 10, "error_severity": 2}
DIAGNOSTIC = json.dumps(
    {
        "DCGM Diagnostic": {
            "test_categories": [
                {
                    "tests": [
                        {
                            "name": "memory",
                            "results": [
                                {"entity_group": "GPU", "entity_id": 3, "status": "Fail", "warnings": [WARNING]}
                            ],
                        }
                    ]
                }
            ]
        }
    }
)
AMD = json.dumps({"gpu_data": [{"gpu": 0, "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": 3}}]})
ASCEND = json.dumps({"stressTest": [{"item": "aicore", "status": "FAIL"}, {"item": "hbm", "status": "PASS"}]})
COUNTS = "Label\tCE\tUE\nDIMM_A1\t0\t3\n"

Reader = Callable[..., Iterator[Signal]]
DOCUMENTS: tuple[tuple[Reader, str], ...] = (
    (metrics.read, SCRAPE), (metrics.read, QUERY), (diagnostic.read, DIAGNOSTIC), (amd.read, AMD), (ascend.read, ASCEND),
    (rasdaemon.read, COUNTS),
)  # fmt: skip
READERS = tuple(dict.fromkeys(reader for reader, _ in DOCUMENTS))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["Fail", "PASS", "N/A", "3", "1e999"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["DCGM Diagnostic", "test_categories", "tests", "results", "warnings", "status", "error_id", "name", "gpu", "ecc", "gpu_data",
             "total_uncorrectable_count", "data", "result", "metric", "values", "__name__", "hbm", "item", "entity_id", "gpu_ids"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip
EXAMPLES = settings(max_examples=60)


def read(reader: Reader, source: str | bytes | Path) -> list[Signal]:
    """What a reader says, each record of it well formed."""
    found = list(reader(source, origin="x", now=NOW))
    for one in found:
        assert Signal.from_json(json.loads(json.dumps(one.to_json(details=True)))) == one
        assert one.reason
        assert "\n" not in one.reason + one.evidence + one.device + one.host
        assert one.kind != "no-evidence" or one.weight == "none"
        assert one.time is None or one.time.endswith("Z")
        assert len(one.evidence) <= 2_000
        assert len(one.reason) <= 2_000
    return found


def is_told(found: list[Signal]) -> bool:
    """That something is wrong: with the device, or with what was read."""
    return any(one.kind != "noise" and not one.code.endswith(":pass") for one in found)


@pytest.mark.parametrize(("reader", "text"), DOCUMENTS)
def test_the_documents_themselves_tell_of_a_fault(reader: Reader, text: str) -> None:
    assert any(one.weight in {"strong", "medium"} for one in read(reader, text))


@pytest.mark.parametrize(("reader", "text"), DOCUMENTS)
def test_a_document_that_is_cut_anywhere_still_tells_of_something(reader: Reader, text: str) -> None:
    for end in range(len(text)):
        assert is_told(read(reader, text[:end])), text[:end]


@pytest.mark.parametrize(("reader", "text"), DOCUMENTS)
@EXAMPLES
@given(data=st.data())
def test_a_document_that_is_damaged_still_tells_of_something(reader: Reader, text: str, data: st.DataObject) -> None:
    """Anything but digits is put over a part of it, or the part is lost: a digit for a digit nobody could notice."""
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start, min(len(text), start + 6)))
    put = data.draw(st.text(alphabet=st.characters(exclude_categories=("Nd", "Cs")), max_size=4))
    assert is_told(read(reader, text[:start] + put + text[end:]))


@pytest.mark.parametrize("reader", READERS)
@EXAMPLES
@given(content=st.binary(max_size=200) | st.text(max_size=200))
@example(content=b"\xff\xfe\x00")
@example(content="\ud800")
@example(content="[" * 5_000)
@example(content="{" * 5_000)
@example(content='{"a":' * 2_000)
@example(content="9" * 5_000)
@example(content="[" + "9" * 5_000 + "]")
def test_anything_at_all_is_no_evidence(reader: Reader, content: bytes | str) -> None:
    found = read(reader, content)
    assert {one.kind for one in found} == {"no-evidence"}


@pytest.mark.parametrize("reader", READERS)
@EXAMPLES
@given(value=ANY_JSON)
def test_json_of_other_shapes_does_not_crash(reader: Reader, value: object) -> None:
    read(reader, json.dumps(value))


@EXAMPLES
@given(data=st.data(), value=ANY_JSON)
def test_a_diagnostic_with_another_value_anywhere_is_never_silent(data: st.DataObject, value: object) -> None:
    document = json.loads(DIAGNOSTIC)
    at: Any = document
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key] or data.draw(st.booleans()):
            at[key] = value
            break
        at = at[key]
    assert read(diagnostic.read, json.dumps(document))


@EXAMPLES
@given(value=ANY_JSON)
def test_an_amd_count_is_a_number_or_no_evidence(value: object) -> None:
    found = read(
        amd.read, json.dumps([{"gpu": 0, "ecc": {"total_correctable_count": 0, "total_uncorrectable_count": value}}])
    )
    count = whole(value.get("value") if isinstance(value, dict) else value)
    expected = [] if count == 0 else ["no-evidence"] if count is None else ["memory"]
    assert [one.kind for one in found] == expected


@EXAMPLES
@given(value=st.text(max_size=12), labels=st.text(max_size=30))
def test_a_metric_of_any_labels_and_value(value: str, labels: str) -> None:
    found = read(metrics.read, f'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{{UUID="GPU-1",x="{labels}"}} {value}\n')
    assert any(one.kind == "no-evidence" for one in found)


@EXAMPLES
@given(content=st.binary(max_size=40))
def test_an_edac_counter_is_a_number_or_no_evidence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.mktemp("edac")
    (root / "mc0").mkdir()
    (root / "mc0" / "ce_count").write_text("0")
    (root / "mc0" / "ue_count").write_bytes(content)
    found = list(edac.read_sysfs(root))
    text = content.decode("utf-8", "replace").strip()
    if text.isascii() and text.isdigit():
        assert [one.kind for one in found] == ["memory"] * (int(text) > 0)
    else:
        assert [one.kind for one in found] == ["no-evidence"]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("ras") / "ras.db"
    with closing(sqlite3.connect(path)) as opened:
        opened.execute(
            "CREATE TABLE mc_event (id INTEGER PRIMARY KEY, timestamp TEXT, err_count INTEGER, err_type TEXT, label TEXT)"
        )
        rows = [("2026-11-29 03:00:00 +0000", 1, "Uncorrected", f"DIMM_{number}" * 9) for number in range(60)]
        opened.executemany("INSERT INTO mc_event (timestamp, err_count, err_type, label) VALUES (?, ?, ?, ?)", rows)
        opened.commit()
    return path.read_bytes()


@settings(max_examples=200)
@given(data=st.data())
def test_a_database_with_bytes_overwritten_still_tells_of_something(database: bytes, data: st.DataObject) -> None:
    damaged = bytearray(database)
    for _ in range(data.draw(st.integers(1, 4))):
        # The first hundred bytes and the heads of pages are where damage does most.
        at = data.draw(
            st.integers(0, 120) | st.integers(0, len(database) - 1) | st.sampled_from(range(4096, len(database), 4096))
        )
        put = data.draw(st.binary(min_size=1, max_size=8))
        damaged[at : at + len(put)] = put
    assert is_told(read(rasdaemon.read, bytes(damaged)))
