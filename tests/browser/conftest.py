"""A real browser: Debian's Chromium, driven by Playwright, one for all tests; and what a page did that it must not is an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Dialog,
    Page,
    Request,
    ViewportSize,
    sync_playwright,
)

from tests.browser.site import Site, made

ROOT = Path(__file__).resolve().parents[2]
SCREENSHOTS = ROOT / "build" / "screenshots"
WIDE, PHONE = ViewportSize(width=1280, height=900), ViewportSize(width=360, height=740)
FLAGS = (
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-quic",
    "--disable-sync",
    "--disable-component-update",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium; absent, the test is skipped, unless real components were asked for.

    It ends with its file: as long as Playwright runs, no other test of the worker could run anything asynchronous.
    """
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get("BITWITNESS_REAL"):
            pytest.fail("chromium is not installed")
        pytest.skip("chromium is not installed")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=list(FLAGS))
        yield started
        started.close()


@pytest.fixture(scope="module")
def site(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A console over runs of every kind. It comes after the browser: without one it is not needed."""
    with ExitStack() as stack:
        yield made(tmp_path_factory.mktemp("site"), stack)


@dataclass
class Visitor:
    """Somebody who looks, in windows of his own; `wrong` is what pages did that they must not."""

    browser: Browser
    site: Site
    wrong: list[str] = field(default_factory=list)
    _contexts: list[BrowserContext] = field(default_factory=list)

    def window(self, **how: Any) -> Page:
        """A window. Playwright's settings of a context: `viewport`, `color_scheme`, `java_script_enabled`."""
        given = {"viewport": WIDE, "base_url": self.site.address, "reduced_motion": "reduce", **how}
        context = self.browser.new_context(**given)
        context.set_default_timeout(20_000)
        self._contexts.append(context)
        page = context.new_page()
        page.on("console", self._said)
        page.on("pageerror", lambda error: self.wrong.append(f"error in a script: {error}"))
        page.on("dialog", self._asked_back)
        page.on("request", self._asked)
        return page

    def close(self) -> None:
        for context in self._contexts:
            context.close()

    def _said(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(f"{message.type} at {message.location.get('url')}: {message.text}")

    def _asked_back(self, dialog: Dialog) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()  # else the page waits for ever

    def _asked(self, request: Request) -> None:
        if not request.url.startswith((f"{self.site.address}/", "data:")):
            self.wrong.append(f"asked elsewhere: {request.url}")


@pytest.fixture
def visitor(browser: Browser, site: Site) -> Iterator[Visitor]:
    """A visitor; whatever a page did that it must not fails the test: errors, refused by the policy, dialogs, foreign requests."""
    made = Visitor(browser, site)
    yield made
    made.close()
    assert not made.wrong
