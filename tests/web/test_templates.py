"""Every page, drawn from realistic records, from hostile ones, from empty ones and from far too large ones."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bitwitness.store import pages
from bitwitness.web import links, templating
from tests.web import records
from tests.web.html import Page

STATIC = Path(templating.__file__).parent / "static"
OPERATOR = SimpleNamespace(name=records.HOSTILE, role="operator", csrf="token")

PAGES: dict[str, tuple[str, type, Any]] = {
    "runs": ("runs", pages.RunsPage, records.runs_page),
    "run": ("run", pages.RunPage, records.run_page),
    "incident": ("incident", pages.IncidentPage, records.incident_page),
    "unattributed": ("incident", pages.IncidentPage, records.unattributed_page),
    "node": ("node", pages.NodePage, records.node_page),
    "fleet": ("fleet", pages.FleetPage, records.fleet_page),
    "drills": ("drills", pages.DrillsPage, records.drills_page),
}


def drawn(name: str, page: Any, acting: bool = False) -> str:
    context = {
        "page": page,
        "session": OPERATOR if acting else None,
        "allow_actions": acting,
        "csrf": "token" if acting else "",
        "can_sign_in": acting,
        "links": links,
        "now": records.NOW,
        "here": name,
        "twin": f"/api/{name}",
        "change": 7,
        "notices": (SimpleNamespace(kind="error", text=records.HOSTILE),) if acting else (),
    }
    return templating.environment().get_template(f"{name}.html.jinja").render(**context)


def main_of(text: str) -> str:
    return text[text.index('<div id="live"') : text.index("</main>")]


# A page is whole ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acting", [False, True], ids=["looking", "acting"])
@pytest.mark.parametrize("name", PAGES)
def test_a_realistic_page_has_no_fault(name: str, acting: bool) -> None:
    template, _, make = PAGES[name]
    assert Page(drawn(template, make(), acting)).faults == []


@pytest.mark.parametrize("choice", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", PAGES)
def test_what_somebody_wrote_into_a_run_stays_text(name: str, choice: int) -> None:
    template, kind, _ = PAGES[name]
    text = drawn(template, records.filled(kind, choice=choice), acting=True)
    page = Page(text)
    assert page.faults == []
    assert not page.every("img")
    assert all(one.attributes.get("src", "").startswith("/static/") for one in page.every("script"))
    assert "<script>alert(1)</script>" in "".join(one.text for one in page.every("main"))
    assert not [char for char in text if char != "\n" and not char.isprintable() and char != "\u202f"]
    text.encode()


@pytest.mark.parametrize("name", PAGES)
def test_a_page_of_nothing_says_so(name: str) -> None:
    template, kind, _ = PAGES[name]
    text = drawn(template, records.filled(kind, text="", many=0, number=0))
    assert Page(text).faults == []
    assert 'class="empty"' in text
    assert "None" not in re.sub(r"<[^>]*>", " ", text)


@pytest.mark.parametrize("name", PAGES)
def test_numbers_out_of_all_bounds_break_nothing(name: str) -> None:
    template, kind, _ = PAGES[name]
    for number in (-1, 2**62):
        assert Page(drawn(template, records.filled(kind, number=number, many=2))).faults == []


@pytest.mark.parametrize("low", [-1e308, 5e-324, 1e308])
def test_a_page_of_extreme_losses_is_drawn(low: float, caplog: pytest.LogCaptureFixture) -> None:
    series = pages.Series((0,), (9,), (1e308,), (low,), (1e308,), (5e-324,), (5e-324,), (1e-323,), (0,), (1e308,))
    text = drawn("run", records.run_page(series=series))
    assert Page(text).faults == []
    assert not re.search(r'="[^"]*\b(nan|inf)\b', text)
    assert caplog.records == []


def test_a_figure_that_cannot_be_drawn_leaves_the_page_standing_and_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong: Any = ("no number\n",) * 400
    text = drawn("run", records.run_page(series=dataclasses.replace(records.series(), loss=wrong)))
    page = Page(text)
    assert page.faults == []
    assert "The chart of the run could not be drawn" in "".join(one.text for one in page.every("main"))
    assert "What the checks cost" in text
    assert text.count("Point at the map") == 3
    (line,) = [one.getMessage() for one in caplog.records]
    assert "TypeError" in line
    assert "\n" not in line
    assert caplog.records[0].exc_info is None


def test_what_counts_against_a_device_is_said_where_it_is_and_not_where_it_was() -> None:
    strike = dataclasses.replace(records.node_page().strikes[0], now="node-7")
    text = drawn("node", records.node_page(strikes=(strike,), proposals=(), denied=()))
    assert "No strike counts against a device that is in it now" in text
    assert "1 strike of devices that were in it counts where these are now" in " ".join(
        Page(text).every("main")[0].text.split()
    )
    row = dataclasses.replace(records.fleet_page().nodes[0], name="node-7", state_text="Nothing is held against it.")
    text = drawn(
        "node",
        records.node_page(kind="device", name="GPU-8f2e6a31", row=row, strikes=(strike,), proposals=(), denied=()),
    )
    assert "1 strike</b> that counts" in text
    assert "Nothing is held against it" not in text
    assert "Last seen in" in text


def test_an_incident_that_was_not_imported_is_named_and_not_linked() -> None:
    strike = pages.StrikeRow("", "gone-1", 0, "", -1, "GPU-1", "node-2", "unknown", True, "", "", now="node-2")
    gone = records.proposal(incident="gone-1", imported=False)
    for text in (
        drawn("node", records.node_page(strikes=(strike,), proposals=(gone,))),
        drawn("fleet", records.fleet_page(waiting=(gone,), acting=())),
    ):
        assert "not imported here" in text
        assert "gone-1" in text
        assert not [one for one in Page(text).every("a") if "gone-1" in one.attributes.get("href", "")]


def test_what_is_said_of_a_controller_has_names_that_people_read() -> None:
    text = main_of(drawn("fleet", records.fleet_page()))
    assert {"How it is", "Last round", "Folder of its state"} <= set(re.findall(r"<dt>([^<]*)</dt>", text))
    assert "last_round" not in text
    assert "<dt>life" not in text


def test_a_page_of_far_too_much_stays_small() -> None:
    long = dataclasses.replace(
        records.incident(), reason="x" * 10**6, headline="y" * 10**6, candidates=tuple(range(10_000))
    )
    observations = tuple(records.seen(rank, rank % 500, f"{rank:024x}") for rank in range(2_000))
    page = records.incident_page(
        incident=long, observations=observations, placement=records.places(4_000), world_size=4_000
    )
    text = drawn("incident", page)
    assert Page(text).faults == []
    assert len(text) < 400_000
    run = records.run_page(
        placement=records.places(512), incidents=(records.incident(),) * 2_000,
        maps=tuple(records.ledger_map(check, 64, 100, 40) for check in records.CHECKS[2:3]),
        marks=tuple(pages.Mark(step, records.at(step), "checkpoint", "a checkpoint") for step in range(4_000)),
    )  # fmt: skip
    text = drawn("run", run)
    assert Page(text).faults == []
    assert len(text) < 2_000_000


# Unattributed is a state of its own ------------------------------------------------------------------------------------


def test_an_unattributed_incident_names_nobody_and_looks_like_no_bad_node() -> None:
    text = main_of(drawn("incident", records.unattributed_page()))
    assert "Nobody is named." in text
    assert "Drain nothing" in text
    assert "no blame" in text
    for sign in (
        "mark-attributed",
        "tag-attributed",
        "rank-named",
        "node-arc-named",
        "is-named",
        'class="bad',
        "cordon",
        "scontrol",
        'class="differs',
        "differs</b>",
        "the reference",
        "usual",
    ):
        assert sign not in text, sign
    assert "verdict-unattributed" in text
    assert 'href="#mark-unattributed"' in text


def test_incidents_of_both_kinds_stand_apart_on_the_page_of_runs() -> None:
    page = Page(drawn("runs", records.runs_page()))
    (named,) = [one for one in page.every("section") if one.attributes.get("aria-labelledby") == "top-attributed"]
    (nobody,) = [one for one in page.every("section") if one.attributes.get("aria-labelledby") == "top-unattributed"]
    assert "rank 4" in named.text
    assert "nobody is named" not in named.text
    assert nobody.text.count("nobody is named") == 2
    assert "node-2" not in nobody.text


def test_a_run_shows_its_whole_path_where_it_is_pointed_at() -> None:
    run = records.run(name="b/guarded", path="/shared/runs/b/guarded")
    assert '<bdi title="/shared/runs/b/guarded">b/guarded</bdi>' in drawn("runs", records.runs_page(runs=(run,)))
    assert '<bdi title="/shared/runs/b/guarded">b/guarded</bdi>' in drawn("run", records.run_page(run=run))
    found = records.incident(run_name="b/guarded", run_path="/shared/runs/b/guarded")
    assert '<bdi title="/shared/runs/b/guarded">b/guarded</bdi>' in drawn("runs", records.runs_page(incidents=(found,)))


def test_short_names_of_nodes_are_not_broken() -> None:
    page = records.fleet_page()
    text = drawn("fleet", page)
    assert re.search(r'class="name short" href="/nodes/node-2"', text)
    long = dataclasses.replace(page.nodes[0], name="node-" + "x" * 40)
    assert 'class="name" href="/nodes/node-xxx' in drawn("fleet", dataclasses.replace(page, nodes=(long,)))
    css = (STATIC / "console.css").read_text(encoding="utf-8")
    assert re.search(r"\.name\.short \{[^}]*white-space: nowrap", css)


def test_a_node_that_was_only_involved_is_not_accused() -> None:
    clean = records.node_page(strikes=(), proposals=(), denied=(), history=())
    text = main_of(drawn("node", dataclasses.replace(clean, row=None)))
    assert "without blame" in text
    assert "No strike counts against it" in text
    assert 'class="attention calm"' in text
    assert "flag-attributed" not in text


def test_a_drill_that_named_wrongly_glares() -> None:
    text = drawn("drills", records.drills_page())
    assert "This must never happen" in text
    assert 'class="attention glaring"' in text
    good = records.drills_page(drills=(), outcomes={"caught": 3}, total=3)
    assert "glaring" not in main_of(drawn("drills", good))
    none = records.drills_page(drills=(), outcomes={"caught": 0, "named wrongly": 0, "missed": 0}, total=0)
    text = main_of(drawn("drills", none))
    assert "outcome-named-wrongly" not in text
    assert "outcome-missed" not in text
    assert "BITWITNESS_FAULT=" in text
    assert "bitwitness demo" not in text


# What is said --------------------------------------------------------------------------------------------------------


def test_a_gap_is_drawn_as_a_gap() -> None:
    lone = pages.LedgerMap("replay", ((0, 0),), ((0, 9), (10, 19)), (("passed", "gap"),))
    text = main_of(drawn("run", records.run_page(maps=(lone,))))
    cells = text[text.index('class="cells"') : text.index("</svg>", text.index('class="cells"'))]
    assert '<rect width="100%" height="100%" fill="url(#fill-gap)"/>' in cells
    assert re.findall(r"cell-(\w+)", cells) == ["passed"]


def test_who_may_act_gets_the_ways_to_and_others_the_commands() -> None:
    acting, looking = (drawn("fleet", records.fleet_page(), acting) for acting in (True, False))
    assert links.approve("1", 17) in acting
    assert links.approve("1", 17) not in looking
    assert (
        "bitwitness fleet approve 17-3fa9c1d2 --why &#39;WHAT WAS LOOKED AT&#39; --state &#39;/var/lib/bit witness&#39;"
        in looking
    )
    unasked = dataclasses.replace(records.proposal(), question="")
    assert "fleet approve" not in drawn("fleet", records.fleet_page(waiting=(unasked,)))


def test_where_something_waits_it_comes_first() -> None:
    for name in ("runs", "incident", "fleet", "node"):
        template, _, make = PAGES[name]
        main = Page(drawn(template, make())).every(kind="attention")[0]
        assert main.parent is not None
        assert main.parent.children[0] is main
        beside = main.parent  # on wide screens something may stand beside it, never before it
        if "beside" in beside.attributes.get("class", ""):
            assert beside.parent is not None
            assert beside.parent.children[0] is beside
            beside = beside.parent
        assert beside.attributes["id"] == "live"


def test_shares_are_never_rounded_up_to_all_or_down_to_nothing() -> None:
    assert str(templating.share(0.99999)) == "99.9\u202f%"
    assert str(templating.share(1.0)) == "100\u202f%"
    assert str(templating.share(0.00001)) == "&lt;\u202f0.1\u202f%"
    assert str(templating.share(0.0)) == "0\u202f%"
    assert str(templating.share(None)) == str(templating.share(float("nan"))) == "–"


def test_times_that_are_none_stay_text() -> None:
    text = drawn("incident", records.incident_page(incident=records.incident(time="yesterday <b>")))
    assert "yesterday &lt;b&gt;" in text
    assert templating.moment("2026-11-30T06:00:00") == templating.moment("2026-11-30T06:00:00Z") != None  # noqa: E711
    assert [templating.moment(text) for text in ("", "x", "9999999")] == [None] * 3


def test_paths_hold_nothing_but_commands() -> None:
    assert templating.path("M0 1 L2.5 3e-05Z") == "M0 1 L2.5 3e-05Z"
    with pytest.raises(ValueError, match="no commands of a path"):
        templating.path('M0 0"/><script>')


# Files of the package ---------------------------------------------------------------------------------------------------

VENDORED = {
    "htmx.min.js": "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_libraries_of_others_are_as_they_were_published() -> None:
    vendor = STATIC / "vendor"
    assert {name: hashlib.sha256((vendor / name).read_bytes()).hexdigest() for name in VENDORED} == VENDORED
    known = {*VENDORED, "README.md", "htmx.LICENSE.txt", "uPlot.LICENSE.txt"}
    assert {file.name for file in vendor.iterdir()} == known


def test_our_scripts_make_no_markup_and_no_code() -> None:
    for file in STATIC.glob("*.js"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|https?://(?!www\.w3\.org)",
            text,
        ), file.name


def colours() -> dict[str, dict[str, str]]:
    text = (STATIC / "console.css").read_text(encoding="utf-8")
    found = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r"\{([^{}]*--ground:[^{}]*)\}", text)
    ]
    light, system, chosen = found
    assert system == chosen, "the dark colours stand twice, and must be the same"
    return {"light": light, "dark": {**light, **chosen}}


def luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


WORDS = [
    (word, ground)
    for word in ("text", "faint", "accent", "bad", "warn", "good", "nobody", "drill")
    for ground in ("ground", "raised")
]
WORDS += [
    ("text", "panel"),
    ("faint", "panel"),
    ("text", "bad-soft"),
    ("bad", "bad-soft"),
    ("text", "warn-soft"),
    ("ground", "accent"),
    ("ground", "bad"),
]
SHAPES = [
    ("passed", "ground"),
    ("passed", "gap-ground"),
    ("strong", "ground"),
    ("focus", "ground"),
    ("unverified", "unverified-ground"),
    ("failed-ground", "gap-ground"),
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrasts_are_those_of_wcag_aa(theme: str) -> None:
    known = colours()[theme]
    low = {
        pair: round(contrast(*(known[name] for name in pair)), 2)
        for pair in WORDS
        if contrast(*(known[name] for name in pair)) < 4.5
    }
    low |= {
        pair: round(contrast(*(known[name] for name in pair)), 2)
        for pair in SHAPES
        if contrast(*(known[name] for name in pair)) < 3
    }
    assert not low
