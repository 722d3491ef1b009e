"""A page as a strict reader sees it: what browsers would silently mend, and what leaves somebody out, is a fault by name."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from itertools import pairwise

_VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
_NAMED = ("aria-labelledby", "aria-describedby", "for")
_BLOCKS = {"div", "p", "section", "ul", "ol", "table", "figure", "h1", "h2", "h3", "h4", "dl", "form", "details", "pre"}


@dataclass
class Element:
    """An element with all text in it."""

    tag: str
    attributes: dict[str, str]
    parent: Element | None
    text: str = ""
    children: list[Element] = field(default_factory=list)

    def up(self, tag: str = "", kind: str = "") -> Element | None:
        """The nearest element around it of a tag or class."""
        found = self.parent
        while found and ((tag and found.tag != tag) or (kind and kind not in found.classes)):
            found = found.parent
        return found

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()


class Page(HTMLParser):
    """A page and its faults."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.faults: list[str] = []
        self._open: list[Element] = []
        self.feed(text)
        self.close()
        self.faults += [f"<{one.tag}> is never closed" for one in self._open]
        self._look(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._start(tag, attrs)
        if tag not in _VOID:
            self._open.append(self.elements[-1])

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._start(tag, attrs)
        if self.elements[-1].tag not in _VOID and not self._inside("svg") and tag != "svg":
            self.faults.append(f"<{tag}/> closes nothing in HTML")

    def _start(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        twice = [name for name, count in Counter(name for name, _ in attrs).items() if count > 1]
        self.faults += [f"<{tag}> has {name} twice" for name in twice]
        if tag in _BLOCKS and any(one.tag in ("p", "h1", "h2", "h3", "h4") for one in self._open):
            self.faults.append(f"<{tag}> in a paragraph or heading: the browser would end that before it")
        if tag in ("a", "button") and any(one.tag in ("a", "button") for one in self._open):
            self.faults.append(f"<{tag}> in what can be pressed already")
        made = Element(tag, {name: value or "" for name, value in attrs}, self._open[-1] if self._open else None)
        if made.parent:
            made.parent.children.append(made)
        self.elements.append(made)

    def handle_endtag(self, tag: str) -> None:
        if self._open and self._open[-1].tag == tag:
            self._open.pop()
        else:
            self.faults.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")

    def handle_data(self, data: str) -> None:
        for one in self._open:
            one.text += data

    def _inside(self, tag: str) -> bool:
        return any(one.tag == tag for one in self._open)

    def every(self, *tags: str, kind: str = "") -> list[Element]:
        """All elements of these tags, or of a class."""
        return [one for one in self.elements if (not tags or one.tag in tags) and (not kind or kind in one.classes)]

    def _look(self, text: str) -> None:
        ids = Counter(one.attributes["id"] for one in self.elements if "id" in one.attributes)
        self.faults += [f"id {name!r} stands {count} times" for name, count in ids.items() if count > 1 or not name]
        for one in self.elements:
            self._look_at(one, set(ids))
        self.faults += [f"url(#{name}) leads nowhere" for name in set(re.findall(r"url\(#([^)]*)\)", text)) - set(ids)]
        levels = [int(one.tag[1]) for one in self.every("h1", "h2", "h3", "h4", "h5", "h6")]
        if levels.count(1) != 1 or levels[0] != 1:
            self.faults.append(f"headings begin with one h1, here they are {levels}")
        self.faults += [f"an h{after} follows an h{before}" for before, after in pairwise(levels) if after > before + 1]
        self.faults += [
            f"<{one.tag}> is empty" for one in self.every("h1", "h2", "h3", "title", "th") if not one.text.strip()
        ]

    def _look_at(self, one: Element, ids: set[str]) -> None:
        given = one.attributes
        self.faults += [f"<{one.tag}> has {name}" for name in given if name.startswith("on") or name == "style"]
        for name in _NAMED:
            self.faults += [f"{name} {word!r} is nowhere" for word in given.get(name, "").split() if word not in ids]
        if one.tag == "style" or (
            one.tag == "script" and (one.text.strip() or not given.get("src", "").startswith("/static/"))
        ):
            self.faults.append(f"a <{one.tag}> that lies in the page")
        if one.tag == "use" and given.get("href", "").removeprefix("#") not in ids:
            self.faults.append(f"<use> of {given.get('href')!r}, which is nowhere")
        if one.tag in ("input", "select", "textarea") and given.get("type") != "hidden":
            labels = [other for other in self.every("label") if other.attributes.get("for") == given.get("id")]
            if not labels and not given.get("aria-label"):
                self.faults.append(f"<{one.tag} name={given.get('name')}> has no label")
        if one.tag in ("a", "button") and not (one.text.strip() or given.get("aria-label")):
            self.faults.append(f"<{one.tag} href={given.get('href')}> has no name")
        if one.tag == "a" and not given.get("href", "").startswith(("/", "#")):
            self.faults.append(f"a link to {given.get('href')!r}")
        if one.tag == "img" or (
            one.tag == "svg"
            and given.get("role") == "img"
            and not (given.get("aria-label") or given.get("aria-labelledby"))
        ):
            self.faults.append(f"a <{one.tag}> without a name")
        if one.tag == "table":
            around = one.up(kind="scroll")
            if (
                around is None
                or around.attributes.get("tabindex") != "0"
                or not around.attributes.get("aria-labelledby")
            ):
                self.faults.append("a table that does not scroll in a region with a name")
        if given.get("tabindex", "0") not in ("0", "-1"):
            self.faults.append("a tabindex that changes the order")
