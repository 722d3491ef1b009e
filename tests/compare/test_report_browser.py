"""The page of a comparison in a real Chromium: it fits a phone, can be read in the dark, and asks for nothing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

from bitwitness.compare import report
from bitwitness.compare.records import CompareFiles
from tests.compare.results_made import mode, patterns, result, row


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("BITWITNESS_REAL"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a drill with names that are longer than any screen is wide."""
    files = CompareFiles(tmp_path_factory.mktemp("report"))
    rows = (row("a" * 300, "fwd_out", 12, 10_000), row("<b>layer</b>", "grad_w", 3, 10_000))
    modes = (mode(rows=rows, total=rows[0], patterns=(patterns(),)), mode("free"))
    report.write(files, result(modes=modes, simulated="fwd_out:" + "x" * 300, sentence="s" * 300))
    return files.page.as_uri()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_and_can_be_read(browser: Browser, address: str, width: int, scheme: str) -> None:
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if scheme == "dark" else "light"
    )
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url) if asked.url != address else None)
    page.goto(address)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, text = (
        page.evaluate(f"getComputedStyle(document.body).{name}.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0)")
        for name in ("backgroundColor", "color")
    )
    dark, bright = (ground, text) if scheme == "dark" else (text, ground)
    assert dark < 120
    assert bright > 600
    page.mouse.wheel(0, 3000)  # whoever is in the middle of the page still sees what it is about
    page.wait_for_function("scrollY > 1000")
    banner = page.locator("#drill").bounding_box()
    assert banner is not None
    assert banner["y"] == 0
    assert not page.locator("b").count()
    context.close()
    assert not wrong
