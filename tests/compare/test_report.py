"""The report of a comparison: what it says, that it says no more, and that nothing in a run can break or bend it."""

from __future__ import annotations

import copy
import json
import math
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bitwitness.cli.compare_view import show
from bitwitness.compare import report, report_page, report_words
from bitwitness.compare.records import CompareFiles
from bitwitness.compare.results import ModeResult, Patterns, Point, Result, Row
from bitwitness.errors import RunFilesError
from bitwitness.faults.statistics import Share, wilson
from tests.compare.results_made import mode, participant, patterns, points, result, row

FAULT = "fwd_out:* @ every=1 -> rate=1e-4 -> bit=13 ; intermittent(0.2)"
NASTY = "\"><script>alert(1)</script><img src=x onerror=alert(2)> [bold]\x1b[31m{{ 7*1234567 }} ' \u202e"


def shown(record: dict[str, Any]) -> str:
    out = StringIO()
    show(record, Console(file=out, width=110, markup=False, emoji=False, highlight=False))
    return out.getvalue()


def page(made: Result, finished: bool = True) -> str:
    return report_page.render(report.record(made, finished))


class Elements(HTMLParser):
    """What a browser would make of a page: tags, their attributes, and the text in headings."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.text = ""
        self._in: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("h1", "h2", "h3", "h4", "style", "title"):
            self._in.append(tag)
            self.headings += [""] if tag in ("h2", "h4") else []

    def handle_endtag(self, tag: str) -> None:
        if self._in and self._in[-1] == tag:
            self._in.pop()

    def handle_data(self, data: str) -> None:
        if self._in and self._in[-1] in ("h2", "h4"):
            self.headings[-1] += data
        if "style" not in self._in:
            self.text += data


# What it says --------------------------------------------------------------------------------------------------------


def test_the_verdict_comes_first_then_what_to_do() -> None:
    text = Elements(page(result())).text
    places = [
        text.index(words)
        for words in (
            "DIFFERS",
            "suspect computes other bits",
            "What to do now",
            "What it does not show",
            "Module by phase",
        )
    ]
    assert places == sorted(places)
    assert shown(report.record(result())).startswith("DIFFERS: suspect computes other bits")


def test_a_difference_is_told_with_its_interval_and_what_follows() -> None:
    made = result()
    total = made.modes[0].total
    assert total is not None
    for text in (Elements(page(made)).text, shown(report.record(made))):
        assert f"{total.mismatches.count:,} of {total.mismatches.of:,}" in text
        assert report_words.rate(total.mismatches.low) in text
        assert report_words.rate(total.mismatches.high) in text
        assert "scontrol update NodeName=node-02" in text
        assert "--bundle FOLDER" in text
        assert "GPU-00000002-aaaa" in text
        assert "drill" not in text.lower()


def test_a_drill_is_called_one_wherever_it_is_spoken_of() -> None:
    made = result(simulated=FAULT)
    seen = Elements(page(made))
    told = [
        heading
        for heading in seen.headings
        if not heading.startswith(("What to do", "What it does not", "What was not", "Who"))
    ]
    assert len(told) > 15
    assert [heading for heading in told if "simulated fault, a drill" not in heading] == []
    figures = [attributes["aria-label"] for tag, attributes in seen.tags if tag == "svg" and "aria-label" in attributes]
    assert figures
    assert all("simulated fault, a drill" in str(label) for label in figures)
    assert seen.text.lstrip().startswith("DRILL: bitwitness compare")
    for text in (seen.text, shown(report.record(made))):
        assert "DIFFERS (simulated fault, a drill)" in text
        assert FAULT in text
        assert "Take no device out because of it" in text
        assert "scontrol" not in text
        assert "kubectl" not in text
    assert report.record(made)["drills"] == [{"name": "suspect", "role": "suspect", "fault": FAULT}]


def test_a_fault_that_is_played_on_a_reference_makes_a_drill_too() -> None:
    made = report.record(
        result(references=(participant("reference-0", "leader", 0), participant("reference-1", "reference", 1, FAULT)))
    )
    assert made["drill"] is True
    assert f"{FAULT} on reference-1 (reference)" in shown(made)
    assert "scontrol" not in shown(made)


def test_where_nothing_was_seen_stands_a_bound_and_no_all_clear() -> None:
    made = result("nothing seen")
    total = made.modes[0].total
    assert total is not None
    for text in (Elements(page(made)).text, shown(report.record(made))):
        assert report_words.rate(total.bound) in text
        assert report_words.rate(total.step_bound) in text
        assert "not seen is not healthy" in text
        assert "That the device is healthy: other operations" in text
        assert "scontrol" not in text
    assert "2,995" in Elements(page(made)).text  # steps that show a fault which strikes one in a thousand


def test_not_characterised_blames_nobody() -> None:
    for modes in ((), (mode(), mode("free", total=None, rows=(), groups=()))):
        made = result("not characterised", modes=modes)
        for text in (Elements(page(made)).text, shown(report.record(made))):
            assert "NOT CHARACTERISED" in text
            assert "blame nobody" in text
            assert "scontrol" not in text
        assert "neither that it is wrong nor that it is right" in page(made)


def test_an_unfinished_comparison_says_so() -> None:
    for made in (result(), result("nothing seen")):
        text = page(made, finished=False)
        assert "UNFINISHED" in text
        assert "not finished" in text
        assert "UNFINISHED" in shown(report.record(made, finished=False))
        assert "UNFINISHED" not in page(made)


def test_lock_step_that_saw_nothing_does_not_place_the_error() -> None:
    made = result(modes=(mode(clean=True), mode("free")))
    assert "Where it arises: lock-step saw nothing" in page(made)
    assert "Where it arises: lock-step saw nothing" in shown(report.record(made))


def test_only_lock_step_says_where_an_error_arose() -> None:
    assert "there the error arose" in page(result(modes=(mode("lock-step"),)))
    for name in ("parameters", "free"):
        assert "there the error arose" not in page(result(modes=(mode(name),)))


def test_what_a_mode_did_not_measure_is_not_told_as_0() -> None:
    bare = Row("m", "grad_w", "float32", "4", 9, 3, wilson(40, 90))
    cells = re.findall(
        r"<td[^>]*>([^<]*)</td>", page(result(modes=(mode("free", rows=(bare,), groups=(), series=()),)))
    )
    assert cells[cells.index("gradient of parameters") + 5 :][:5] == ["-"] * 5


def test_stand_ins_of_one_machine_are_not_drained() -> None:
    alike = [
        participant(name, role, rank, device=f"node/cpu-{rank}")
        for rank, (name, role) in enumerate([("r0", "leader"), ("r1", "reference"), ("s", "suspect")])
    ]
    same = [
        type(one)(one.name, one.role, type(one.device)(one.device.rank, "node", one.device.device, {})) for one in alike
    ]
    made = report.record(Result(same[2], tuple(same[:2]), None, "differs", "differs", (mode(),), {}))
    assert "this machine's processor or memory" in shown(made)
    assert "kubectl" not in shown(made)


@pytest.mark.parametrize(
    ("rate", "confidence", "needed"),
    [
        (0.5, 0.95, 5),
        (1e-2, 0.95, 299),
        (1e-3, 0.95, 2995),
        (1e-6, 0.95, 2_995_731),
        (1.0, 0.95, 1),
        (0.75, 0.9375, 2),
        (0.0, 0.95, None),
        (None, 0.95, None),
    ],
)
def test_trials_needed_are_the_fewest(rate: float | None, confidence: float, needed: int | None) -> None:
    assert report.trials_needed(rate, confidence) == needed
    if rate is not None and needed is not None and needed > 1:
        assert 1 - (1 - rate) ** needed >= confidence - 1e-9 > 1 - (1 - rate) ** (needed - 1) - 2e-9


def test_steps_needed_are_told_where_steps_are_alike_only() -> None:
    trials = {one["mode"]: one["trials"] for one in report.record(result())["modes"]}
    assert trials["free"] is None  # an error stays in the parameters
    assert trials["lock-step"]["needed"] == report.trials_needed(66 / 200, 0.95)
    assert trials["lock-step"]["at_least"] <= trials["lock-step"]["needed"] <= trials["lock-step"]["at_most"]


# What a run may contain ----------------------------------------------------------------------------------------------


def odd() -> Iterator[tuple[str, Result]]:
    """Results at the edges of what judging can make."""
    yield "no modes", result(modes=())
    yield "nothing compared", result(modes=(ModeResult("free", 0, 200, 0, None, (), (), None, ended=""),))
    yield "one step", result(modes=(mode(series=points(1), steps=1),))
    nothing = tuple(Point(step, 0, 0, 0) for step in range(20))
    yield "nothing known of any step", result(modes=(mode(series=nothing, control=nothing),))
    void = tuple(Point(step, 5, 10, 1, 1.0, 1.0, void=True) for step in range(20))
    yield "all void", result(modes=(mode(series=void, steps=20),))
    for number in (math.nan, math.inf, -math.inf, 1e308, 5e-324, -1.0):
        wild = tuple(
            Point(step, step, 100, 1, number, number, number, number, number, number, number, number)
            for step in range(9)
        )
        rows: tuple[Row, ...] = (row("m", "fwd_out", 3, 10),)
        rows += (
            Row(
                "n",
                "grad_in",
                "float32",
                "3",
                9,
                3,
                Share(3, 10, number, number),
                number,
                number,
                1,
                number,
                0,
                2**64,
                number,
                number,
                number,
            ),
        )
        yield (
            f"everything is {number}",
            result(
                modes=(
                    mode(
                        "lock-step",
                        rows=rows,
                        groups=rows,
                        total=rows[1],
                        noise=number,
                        series=wild,
                        control=wild,
                        results={"suspect": {"accuracy": number}},
                        correlation={"clock": number},
                    ),
                )
            ),
        )
    rows = (row("m", "fwd_out", 0, 0),)
    yield "no elements", result(modes=(mode(rows=rows, total=rows[0], groups=rows),))
    yield (
        "empty patterns",
        result(modes=(mode(patterns=(Patterns("int64", 0, truncated=False), Patterns("int64", 3, truncated=False))),)),
    )
    bits = Patterns(
        "int64",
        3,
        False,
        masks=((2**63, 3),),
        mask_kinds=1,
        bits=((1, 0),) * 64,
        classes={"strange": 3},
        ranges=((math.inf, 3, 3),),
    )
    yield "64 bits", result(modes=(mode(patterns=(bits,)),))
    yield "no references", result(references=(), control=None, asked={})


@pytest.mark.parametrize(("name", "made"), [pytest.param(name, made, id=name) for name, made in odd()])
def test_whatever_was_measured_can_be_shown(name: str, made: Result, tmp_path: Path) -> None:
    files = CompareFiles(tmp_path)
    written = report.write(files, made)
    json.dumps(written, allow_nan=False)
    back = report.read(tmp_path)
    assert back == report.read(tmp_path / "report.json")
    assert {**back, "modes": None} == {**json.loads(json.dumps(written)), "modes": None}
    assert report_page.render(back) == files.page.read_text(encoding="utf-8")
    assert shown(back) == shown(written)
    geometry = [
        value
        for tag, found in Elements(report_page.render(back)).tags
        for key, value in found.items()
        if key in ("x", "y", "cx", "cy", "x1", "y1", "points", "height", "width", "d")
    ]
    assert not [value for value in geometry if value and re.search("nan|inf", value)]
    sizes = [float(found["height"] or 0) for tag, found in Elements(report_page.render(back)).tags if tag == "rect"]
    assert all(size >= 0 for size in sizes)


def test_a_record_is_the_same_each_time_but_for_its_time() -> None:
    one, other = report.record(result()), report.record(result())
    assert json.dumps({**one, "made": ""}) == json.dumps({**other, "made": ""})
    assert one["schema"] == 1


def test_names_are_shown_as_they_are_and_obeyed_by_nobody() -> None:
    rows = (row(NASTY, "fwd_out", 3, 1000), row(NASTY + "x" * 5000, "grad_in", 4, 1000))
    made = result(
        simulated=NASTY,
        modes=(
            mode(
                rows=rows,
                groups=rows,
                total=rows[0],
                results={NASTY: {NASTY: 0.5}},
                patterns=(Patterns(NASTY, 3, False, findings=(NASTY,), classes={NASTY: 1}),),
                ended=NASTY,
            ),
        ),
        sentence=NASTY,
        notes=(NASTY,),
        asked={"id": NASTY, NASTY: NASTY, "options": {NASTY: NASTY}, "modes": [NASTY]},
        references=(participant(NASTY, "leader", 0, device=NASTY), participant("b", "reference", 1)),
    )
    seen = Elements(page(made))
    assert not {tag for tag, _ in seen.tags} & {"script", "img", "iframe", "link", "object"}
    assert not [key for _, attributes in seen.tags for key in attributes if key.startswith("on")]
    assert "8641969" not in seen.text
    assert NASTY in seen.text
    on_screen = shown(report.record(made))
    assert "\x1b" not in on_screen
    assert "[bold]\\x1b[31m" in on_screen


def test_commands_to_copy_are_quoted() -> None:
    made = report.record(result())
    made["suspect"]["device"]["node"] = "n; rm -rf /"
    made["asked"]["id"] = "$(reboot)"
    steps = "\n".join(report_words.next_steps(made))
    assert "NodeName='n; rm -rf /'" in steps
    assert "Reason='bitwitness compare $(reboot)'" in steps


def test_of_many_modules_and_steps_the_worst_are_shown_and_the_rest_is_counted() -> None:
    series = tuple(Point(step, 40 if step == 3333 else 0, 10**6, 1, 2.0, 2.0) for step in range(8_000))
    made = result(modes=(mode(modules=200, steps=8_000, series=series, patterns=(patterns(),)),))
    text = page(made)
    assert len(text) < 400_000
    worst = max(made.modes[0].rows, key=lambda one: one.mismatches.count)
    assert worst.group in Elements(text).text
    assert re.search(r"The worst 30 modules; \d+ more are in report\.json", text)
    assert "the most in step 3333: 4e-5" in text
    dots = [
        attributes
        for tag, attributes in Elements(text).tags
        if tag == "circle" and attributes["class"] == "point suspect"
    ]
    assert len(dots) == 1  # the spike is still there
    assert re.search(r"and \d+ more \(--json has all\)", shown(report.record(made)))
    assert len(report.record(made)["modes"][0]["rows"]) == 800


# Reading back --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"schema": 2}',
        '{"schema": 1}',
        '{"schema": 1, "what": "scan"}',
        '{"schema": 1, "what": "comparison"}',
        '{"schema": 1, "what": "comparison", "modes": 3}',
    ],
    ids=["empty", "torn", "list", "schema", "bare", "scan", "hollow", "number"],
)
def test_what_is_no_report_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text(content)
    with pytest.raises(RunFilesError, match=r"report\.json"):
        report.read(tmp_path)


def test_no_report_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(RunFilesError, match="does not exist"):
        report.read(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value[:3]) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


def test_a_damaged_report_is_refused_or_shown_and_never_a_crash(tmp_path: Path) -> None:
    seed = 20261130
    draw = random.Random(seed)
    small = (
        mode(
            modules=2,
            series=points(6),
            control=points(3),
            patterns=(patterns(),),
            results={"suspect": {"accuracy": 0.5}},
        ),
        mode("free", modules=1, clean=True),
    )
    whole = json.loads(json.dumps(report.record(result(modes=small))))
    where = [path for path in places(whole) if path and path not in {("schema",), ("what",)}]
    refused = 0
    for path in draw.sample(where, min(50, len(where))):
        damaged = copy.deepcopy(whole)
        target = damaged
        for key in path[:-1]:
            target = target[key]
        junk: Any = draw.choice([None, -1, 0, "x", "", [], {}, [[]], True, 1.5, 10**400, "DELETE"])
        if junk == "DELETE":
            del target[path[-1]]
        else:
            target[path[-1]] = junk
        (tmp_path / "report.json").write_text(json.dumps(damaged))
        try:
            back = report.read(tmp_path)
        except RunFilesError:
            refused += 1
            continue
        try:
            report_page.render(back)
            shown(back)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {path} = {junk!r:.40}: {error!r}") from error
    assert 10 < refused < 50, seed


def test_a_drill_stays_one_when_the_file_no_longer_says_so(tmp_path: Path) -> None:
    whole = json.loads(json.dumps(report.record(result(simulated=FAULT))))
    for name, value in (("drill", None), ("drill", False), ("drills", [])):
        (tmp_path / "report.json").write_text(json.dumps({**whole, name: value}))
        assert report.read(tmp_path)["drill"] is True


def test_numbers_beyond_a_double_are_unknown(tmp_path: Path) -> None:
    text = json.dumps(report.record(result()))
    (tmp_path / "report.json").write_text(re.sub(r'"severity": 0\.31', '"severity": 1e999', text))
    assert report.read(tmp_path)["modes"][0]["total"]["severity"] is None


def test_the_base_install_reads_and_shows_and_says_what_the_page_needs(tmp_path: Path) -> None:
    report.write(CompareFiles(tmp_path), result())
    (tmp_path / "report.html").unlink()
    program = """
import sys
for name in ("torch", "numpy", "jinja2"):
    sys.modules[name] = None
from pathlib import Path
from bitwitness.cli.compare_view import show
from bitwitness.cli.output import console
from bitwitness.compare import report
from bitwitness.compare.records import CompareFiles
from bitwitness.errors import MissingExtra
from tests.compare.results_made import result
where = Path(sys.argv[1])
show(report.read(where), console())
try:
    report.write(CompareFiles(where), result("nothing seen"))
except MissingExtra as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("DIFFERS: ")
    assert "its page needs jinja2: pip install 'bitwitness[train]'" in done.stdout
    assert report.read(tmp_path)["outcome"] == "nothing seen"
    assert not (tmp_path / "report.html").exists()
