"""DCGM's metrics: ids under all names, what was seen changing, what is not collected, and a Prometheus that is asked."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar
from urllib.parse import parse_qs

import pytest

from bitwitness.errors import MissingExtra
from bitwitness.fleet.signals import Signal, metrics, samples
from bitwitness.fleet.signals.dcgm_fields import FIELDS, NAMES
from bitwitness.fleet.signals.gather import gather

NOW = datetime(2026, 11, 29, 12, 0, tzinfo=UTC)
T0 = int(NOW.timestamp()) - 600
LABELS = 'gpu="0",UUID="GPU-1111",device="nvidia0"'
SCRAPE = f"""\
# HELP DCGM_FI_DEV_XID_ERRORS Value of the last XID error encountered.
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{{LABELS},Hostname="n1",err_code="63",err_msg="row \\"7\\" remapped",pci_bus_id="00000000:9B:00.0"}} 63
DCGM_FI_DEV_GPU_TEMP{{{LABELS},Hostname="n1"}} 41
DCGM_FI_DEV_POWER_USAGE{{{LABELS},Hostname="n1"}} 120.5
DCGM_FI_DEV_PCIE_REPLAY_COUNTER{{{LABELS},Hostname="n1"}} 0
DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{{{LABELS},Hostname="n1"}} 0
DCGM_FI_DEV_ROW_REMAP_FAILURE{{{LABELS},Hostname="n1"}} 0
"""


def read(text: str) -> list[Signal]:
    return list(metrics.read(text, origin="scrape.prom", now=NOW))


def evidence(signals: Sequence[Signal]) -> list[Signal]:
    return [one for one in signals if one.kind != "no-evidence" and one.code != "identity:pci"]


def line(name: str, value: object, labels: str = f'{LABELS},hostname="n1"') -> str:
    return f"DCGM_FI_DEV_{name}{{{labels}}} {value}\n"


def answer(*series: tuple[dict[str, str], list[tuple[int, str]]], status: str = "success", **more: Any) -> str:
    result = [{"metric": labels, "values": [[T0 + at, value] for at, value in points]} for labels, points in series]
    return json.dumps({"status": status, "data": {"resultType": "matrix", "result": result}, **more})


def of(name: str, **labels: str) -> dict[str, str]:
    return {"__name__": f"DCGM_FI_DEV_{name}", "UUID": "GPU-1111", "gpu": "0", "Hostname": "n1", **labels}


def test_a_scrape_of_the_default_exporter() -> None:
    found = read(SCRAPE)
    (xid,) = evidence(found)
    assert (xid.source, xid.code, xid.device, xid.host, xid.time) == ("dcgm", "xid:63", "GPU-1111", "n1", None)
    assert (xid.kind, xid.weight) == ("memory", "weak")
    assert "never reset, so this was some time before" in xid.reason
    assert 'row "7" remapped' in xid.evidence
    (identity,) = [one for one in found if one.code == "identity:pci"]
    assert (identity.device, identity.evidence, identity.kind) == ("GPU-1111", "pci=0000:9b:00 index=0", "noise")
    (silent,) = [one for one in found if one.kind == "no-evidence"]
    assert (silent.code, silent.device, silent.host) == ("dcgm:not-collected", "GPU-1111", "n1")
    assert "uncorrected ECC errors, pending row remapping, NVLink errors" in silent.reason
    assert "Xids" not in silent.reason


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_field_is_its_id_under_every_name(name: str) -> None:
    known = NAMES[name]
    value = {"celsius": 200, "bits": 0x40, "xid": 63, "sxid": 12022, "mode": 0}.get(known.reading, 1)
    found = [one for one in read(f'{name}{{{LABELS},Hostname="n1"}} {value}\n') if one.code != "dcgm:not-collected"]
    expected = {"raw": [], "xid": ["xid:63"], "sxid": ["sxid:12022"]}.get(known.reading, [f"dcgm:{known.id}"])
    assert [one.code for one in found] == expected
    assert all(one.reason and one.device == "GPU-1111" for one in found)


def test_every_weight_has_a_sentence() -> None:
    assert not [
        known.id for known in FIELDS.values() if not known.why and known.reading not in {"xid", "sxid", "action"}
    ]
    assert len(NAMES) == sum(len(known.names) for known in FIELDS.values()), "no name stands for two fields"


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("ECC_DBE_VOL_TOTAL", "strong"), ("ECC_DBE_AGG_TOTAL", "weak"), ("ECC_SBE_VOL_TOTAL", "weak"), ("ECC_SBE_AGG_TOTAL", "none"),
        ("ROW_REMAP_FAILURE", "strong"), ("ROW_REMAP_PENDING", "weak"), ("THRESHOLD_SRM", "strong"),
        ("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "weak"), ("BANKS_REMAP_ROWS_AVAIL_NONE", "medium"),
    ],
)  # fmt: skip
def test_what_a_count_weighs(name: str, weight: str) -> None:
    (one,) = evidence(read(line(name, 3)))
    assert (one.weight, one.time) == (weight, None)


@pytest.mark.parametrize(
    "blank", ["9223372036854775794", "9.223372036854775794e+18", "2147483634", "140737488355330", "NaN", "-1"]
)
def test_blanks_are_not_collected_and_not_zero(blank: str) -> None:
    found = read(line("ECC_DBE_VOL_TOTAL", blank))
    assert not evidence(found)
    assert "uncorrected ECC errors" in next(one for one in found if one.code == "dcgm:not-collected").reason


def test_only_what_was_not_collected_is_said() -> None:
    names = (
        "XID_ERRORS",
        "ECC_SBE_VOL_TOTAL",
        "ECC_DBE_VOL_TOTAL",
        "ROW_REMAP_FAILED",
        "ROW_REMAP_PENDING",
        "NVLINK_REPLAY_TOTAL",
    )
    assert read("".join(line(name, 0) for name in (*names, "CLOCKS_EVENT_REASONS"))) == []


@pytest.mark.parametrize("text", ["", "\n", "# HELP up is it\nup 1\n", 'node_load1{instance="n1:9100"} 0.5\n'])
def test_metrics_of_something_else_are_no_health(text: str) -> None:
    assert [(one.code, one.kind) for one in read(text)] == [("dcgm:not-collected", "no-evidence")]


@pytest.mark.parametrize(
    "damage",
    [
        'DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu="0",UUID="GPU-1', "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL{gpu=0} 1", "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",
        line("ECC_DBE_VOL_TOTAL", "1.5"), line("ECC_DBE_VOL_TOTAL", -4), "\x00\x01\x02", "a" * 100_000,
    ],
)  # fmt: skip
def test_damage_is_told_and_the_rest_is_read(damage: str) -> None:
    found = read(f"{damage}\n{SCRAPE}")
    assert [one.code for one in evidence(found)] == ["xid:63"]
    assert "dcgm:damaged" in [one.code for one in found]


def test_a_last_line_without_end_may_be_cut() -> None:
    found = read(line("ECC_DBE_VOL_TOTAL", 3) + line("ECC_SBE_VOL_TOTAL", 123).rstrip("\n"))
    assert [one.code for one in evidence(found)] == ["dcgm:310", "dcgm:311"]
    assert "has no end" in next(one for one in found if one.code == "dcgm:damaged").reason


def test_slices_count_for_their_device() -> None:
    labels = 'gpu="0",UUID="{uuid}",GPU_I_ID="{part}",Hostname="n1"'
    text = line("XID_ERRORS", 0) + "".join(
        line("ECC_DBE_VOL_TOTAL", count, labels.format(uuid=uuid, part=part))
        for uuid, part, count in (("GPU-1111", "1", 1), ("MIG-abc", "2", 2), ("MIG-GPU-1111/3/0", "3", 3))
    )
    found = read(text.replace("hostname", "Hostname"))
    assert [(one.device, one.code, one.count) for one in evidence(found)] == [("GPU-1111", "dcgm:311", 3)]


def test_slices_tell_the_count_of_their_device_and_are_not_added_up() -> None:
    labels = 'gpu="0",UUID="GPU-1111",GPU_I_ID="{part}",Hostname="n1",pci_bus_id="00000000:9B:00.0"'
    text = "".join(line("ECC_DBE_VOL_TOTAL", 2, labels.format(part=part)) for part in (1, 2)) + "".join(
        f'DCGM_EXP_XID_ERRORS_COUNT{{{labels.format(part=part)},xid="94"}} 2\n' for part in (1, 2)
    )
    assert [(one.code, one.count) for one in evidence(read(text))] == [("dcgm:311", 2), ("xid:94", 2)]
    rising = [(of("ECC_DBE_VOL_TOTAL", GPU_I_ID=part), [(0, "1"), (30, "2")]) for part in "12"]
    (one,) = evidence(read(answer(*rising, (of("ECC_DBE_VOL_TOTAL", GPU_I_ID="3"), [(0, "9")]))))
    assert (one.count, one.time) == (1, "2026-11-29T11:50:30.000Z")
    seen = [(of("XID_ERRORS", GPU_I_ID=part), [(0, "0"), (30, xid)]) for part, xid in (("1", "63"), ("2", "94"))]
    assert sorted(one.code for one in evidence(read(answer(*seen)))) == ["xid:63", "xid:94"]


def test_a_count_that_was_read_twice_is_one_count() -> None:
    first, later = (read(line("ECC_DBE_VOL_TOTAL", count)) for count in (2, 3))
    assert [one.count for one in gather([*later, *first]) if one.code == "dcgm:311"] == [3]


def test_the_name_of_a_pod_does_not_hide_the_node() -> None:
    labels = f'{LABELS},Hostname="dcgm-exporter-abc",instance="10.0.0.7:9400",node="n5"'
    assert {one.host for one in evidence(read(line("ROW_REMAP_FAILURE", 1, labels)))} == {"n5"}


def test_who_sits_where_is_told_with_the_time_since_when_it_was_seen() -> None:
    bus = {"pci_bus_id": "00000000:1A:00.0"}
    moved = ((of("XID_ERRORS", **bus), [(60, "0"), (30, "0")]), (of("XID_ERRORS", **bus, UUID="GPU-2222"), [(90, "0")]))
    found = [(one.device, one.time) for one in read(answer(*moved)) if one.code == "identity:pci"]
    assert found == [("GPU-1111", "2026-11-29T11:50:30.000Z"), ("GPU-2222", "2026-11-29T11:51:30.000Z")]
    (scraped,) = [one for one in read(SCRAPE) if one.code == "identity:pci"]
    assert scraped.time == "2026-11-29T12:00:00.000Z", "when it was written"


def test_which_slices_a_device_is_cut_into_is_told() -> None:
    bus = 'pci_bus_id="00000000:9B:00.0"'
    text = line("XID_ERRORS", 0, f'{LABELS},Hostname="n1",{bus}')
    text += line("XID_ERRORS", 0, f'gpu="0",UUID="MIG-abc",Hostname="n1",{bus}')
    (one,) = [one for one in read(text) if one.code == "identity:pci"]
    assert (one.device, one.evidence) == ("GPU-1111", "pci=0000:9b:00 index=0 mig=MIG-abc")


def test_a_slice_whose_device_is_not_told_keeps_its_name() -> None:
    (one,) = evidence(read(line("ECC_DBE_VOL_TOTAL", 1, 'gpu="0",UUID="MIG-abc",Hostname="n1"')))
    assert one.device == "MIG-abc"


def test_heat_power_and_the_wish_of_the_driver() -> None:
    found = {one.code: one for one in evidence(read(
        line("GPU_TEMP", 96) + line("MEMORY_TEMP", 80) + line("CLOCK_THROTTLE_REASONS", 0x44) + line("GPU_RECOVERY_ACTION", 4)
        + line("ECC_MODE", 0)
    ))}  # fmt: skip
    assert {code: (one.kind, one.weight) for code, one in found.items()} == {
        "dcgm:150": ("noise", "none"), "dcgm:112": ("loud", "none"), "dcgm:1523": ("loud", "weak")
    }  # fmt: skip
    assert "drain and reset the device" in found["dcgm:1523"].reason
    assert "hardware thermal slowdown, software power cap" in found["dcgm:112"].reason


def test_ecc_that_is_off_is_no_evidence() -> None:
    off = next(one for one in read(line("ECC_CURRENT", 0)) if one.code == "dcgm:300")
    assert (off.kind, off.device) == ("no-evidence", "GPU-1111")


def test_xids_counted_by_the_exporter() -> None:
    text = f'DCGM_EXP_XID_ERRORS_COUNT{{{LABELS},Hostname="n1",window_size_in_ms="300000",xid="94"}} 2\n'
    (one,) = evidence(read(text))
    assert (one.code, one.weight, one.count) == ("xid:94", "medium", 2)


def test_a_change_of_the_gauge_has_a_time_and_its_first_value_has_none() -> None:
    text = answer(
        (of("XID_ERRORS", err_code="45", pod="a"), [(0, "45"), (30, "45")]),
        (of("XID_ERRORS", err_code="63", pod="a"), [(60, "63"), (90, "63")]),
        (of("XID_ERROR", err_code="79", pod="b"), [(90, "79"), (120, "79")]),
    )
    found = [(one.code, one.time) for one in evidence(read(text))]
    assert found == [("xid:45", None), ("xid:63", "2026-11-29T11:51:00.000Z"), ("xid:79", "2026-11-29T11:51:30.000Z")]


def test_a_count_that_rises_has_the_time_of_its_last_rise() -> None:
    (one,) = evidence(read(answer((of("ECC_DBE_AGG_TOTAL"), [(0, "4"), (30, "4"), (60, "6"), (90, "6")]))))
    assert (one.code, one.weight, one.count, one.time) == ("dcgm:313", "strong", 2, "2026-11-29T11:51:00.000Z")
    (still,) = evidence(read(answer((of("ECC_DBE_AGG_TOTAL"), [(0, "4"), (90, "4")]))))
    assert (still.weight, still.count, still.time) == ("weak", 4, None)


def test_a_count_that_falls_was_reset() -> None:
    (one,) = evidence(read(answer((of("ECC_DBE_VOL_TOTAL"), [(0, "4"), (30, "0"), (60, "1")]))))
    assert (one.count, one.time) == (1, "2026-11-29T11:51:00.000Z")
    (gone,) = evidence(read(answer((of("ECC_DBE_VOL_TOTAL"), [(0, "4"), (30, "0")]))))
    assert (gone.weight, gone.count, gone.time) == ("strong", 4, None)


@pytest.mark.parametrize(
    "text",
    [
        '{"status":"error","errorType":"bad_data","error":"parse error"}', '{"status":"success"}', '{"status":"success","data":[]}',
        '{"a":1}', "[]", '{"status":"success","data":{"resultType":"matrix","result":[{"metric":{"__name__":"DCGM_FI_DEV_XID', "{" * 10_000,
    ],
)  # fmt: skip
def test_answers_that_are_none(text: str) -> None:
    assert [(one.code, one.kind) for one in read(text)] == [("dcgm:unreadable", "no-evidence")]


def test_damaged_series_and_warnings_are_told() -> None:
    good = json.loads(answer((of("ECC_DBE_VOL_TOTAL"), [(0, "1")]), warnings=["results may be incomplete"]))
    good["data"]["result"] += [{"metric": "x"}, 7, {"metric": of("XID_ERRORS"), "values": [[1], "x", [T0, "x"]]}]
    found = read(json.dumps(good))
    assert [one.code for one in evidence(found)] == ["dcgm:311"]
    told = {one.code: one.reason for one in found if one.kind == "no-evidence"}
    assert "5 lines or series are damaged" in told["dcgm:damaged"]
    assert "incomplete" in told["dcgm:warning"]


def test_more_samples_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MAX_SAMPLES", 5)
    assert "dcgm:more" in [one.code for one in read("".join(line("XID_ERRORS", 0) for _ in range(9)))]
    assert "dcgm:more" in [one.code for one in read(answer((of("XID_ERRORS"), [(at, "0") for at in range(9)])))]


@pytest.mark.parametrize(
    ("head", "name", "expected"),
    [
        (SCRAPE[:200].encode(), "x", True),
        (line("XID_ERRORS", 0).encode(), "x", True),
        (answer((of("XID_ERRORS"), [(0, "0")])).encode(), "x", True),
        (b'{"status":"error","errorType":"x"}', "x", True),
        (b"Nov 29 03:14:15 n1 kernel: NVRM: Xid (PCI:0000:9b:00): 63, pid=1", "syslog", False),
        (b"SQLite format 3\0", "x", False),
        (b'[{"source": "dcgm", "code": "dcgm:311", "weight": "strong", "evidence": "DCGM_FI"}]', "x", False),
        (b'{"DCGM Diagnostic": {}}', "x", False),
    ],
)
def test_what_looks_like_metrics(head: bytes, name: str, expected: bool) -> None:
    assert metrics.looks_like(head, name) is expected


class Prometheus(BaseHTTPRequestHandler):
    """Answers every query with what the test says, and keeps what was asked."""

    answers: ClassVar[list[tuple[int, bytes]]] = []
    asked: ClassVar[list[dict[str, list[str]]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append({"path": [self.path], **parse_qs(body.decode())})
        code, content = self.answers[-1]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of what is overridden
        """Tests are quiet."""


@pytest.fixture
def prometheus() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Prometheus)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    Prometheus.asked.clear()
    yield f"http://user:secret@127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def ask(url: str, host: str = "n1", timeout: float = 10) -> list[Signal]:
    window = timedelta(minutes=30)
    return list(metrics.query(url, host=host, at=NOW, before=window, after=timedelta(0), timeout=timeout))


def test_prometheus_is_asked_for_one_host_and_its_time(prometheus: str) -> None:
    Prometheus.answers[:] = [(200, answer((of("ECC_DBE_VOL_TOTAL"), [(0, "0"), (30, "1")])).encode())]
    found = ask(prometheus, 'n"1')
    assert [one.code for one in evidence(found)] == ["dcgm:311"]
    assert "secret" not in str(found)
    (asked,) = Prometheus.asked
    assert asked["path"] == ["/api/v1/query_range"]
    assert float(asked["end"][0]) - float(asked["start"][0]) == 1800
    (query,) = asked["query"]
    assert re.findall(r'Hostname="n\\"1"', query, re.IGNORECASE) == ['Hostname="n\\"1"', 'hostname="n\\"1"']
    assert "DCGM_FI_DEV_XID_ERROR|DCGM_FI_DEV_XID_ERRORS" in query
    assert ',node="n\\"1"' in query
    assert {one.host for one in found} == {'n"1'}, "of the host that was asked for, by whatever label"


@pytest.mark.parametrize(
    ("code", "content", "why"),
    [
        (503, b"no", "no answer"),
        (200, b"", "no answer"),
        (422, b'{"status":"error","error":"too many points"}', "too many points"),
    ],
)
def test_a_prometheus_that_fails(prometheus: str, code: int, content: bytes, why: str) -> None:
    Prometheus.answers[:] = [(code, content)]
    (one,) = ask(prometheus)
    assert (one.kind, one.host) == ("no-evidence", "n1")
    assert why in one.reason


@pytest.mark.parametrize("url", ["http://user:secret@127.0.0.1:1/", "http://user:secret@[::bad/", "nonsense"])
def test_a_prometheus_that_is_not_there(url: str) -> None:
    (one,) = ask(url)
    assert (one.code, one.kind) == ("dcgm:unreachable", "no-evidence")
    assert "secret" not in str(one)


def test_asking_needs_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(MissingExtra, match=r"bitwitness\[fleet\]"):
        ask("http://127.0.0.1:1")
