"""YAML with the line of everything, so that an error in a campaign file says where.

PyYAML's plain loader forgets lines, lets the second of two equal keys win in silence, and reads `lr: 1e-3` as text. A
campaign that trains for an hour on the wrong one of two settings is worse than a refusal.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from bitwitness.errors import ConfigurationError, MissingExtra

try:
    import yaml
except ModuleNotFoundError as error:
    raise MissingExtra("campaign files need PyYAML: pip install 'bitwitness[campaign]'") from error

_LARGEST = 8 << 20
_DEEPEST = 40
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads `1e-3` as a number, as YAML 1.2 and every reader do."""


_Loader.yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


@dataclass(frozen=True, slots=True)
class Item:
    """A value of the file and where it stands.

    Attributes:
        value: a scalar, a list of items, or a dictionary of items by key.
        file: the name of the file; line: from 1.
        keys: lines of the keys, if a dictionary.
    """

    value: Any
    file: str
    line: int
    keys: dict[str, int]

    def plain(self) -> Any:
        """The value without places."""
        if isinstance(self.value, dict):
            return {key: item.plain() for key, item in self.value.items()}
        return [item.plain() for item in self.value] if isinstance(self.value, list) else self.value

    def fail(self, message: str) -> NoReturn:
        """Raise a ConfigurationError that begins with the place."""
        raise ConfigurationError(f"{self.file}, line {self.line}: {message}")

    def finite(self, what: str) -> None:
        """An error where there is a NaN or an infinity, however deep."""
        inner: Iterable[Item] = ()
        if isinstance(self.value, dict | list):
            inner = self.value.values() if isinstance(self.value, dict) else self.value
        elif isinstance(self.value, float) and not math.isfinite(self.value):
            self.fail(f"{what} must be a finite number, not {self.value}")
        for one in inner:
            one.finite(what)

    def mapping(self, what: str) -> dict[str, Item]:
        """The value as a dictionary, or an error."""
        if not isinstance(self.value, dict):
            self.fail(f"{what} must be a mapping (key: value), not {shown(self.value)}")
        return self.value

    def known(self, keys: Iterable[str], what: str) -> dict[str, Item]:
        """The value as a dictionary with no other keys than these; the error names the key and the likeliest meant."""
        known, found = list(keys), self.mapping(what)
        for key in found:
            if key not in known:
                raise ConfigurationError(
                    f"{self.file}, line {self.keys[key]}: {what} has no key {key!r}{suggestion(key, known)}; "
                    f"its keys are {', '.join(known)}"
                )
        return found

    def items(self, what: str) -> list[Item]:
        """The value as a list, or an error."""
        if not isinstance(self.value, list):
            self.fail(f"{what} must be a list, not {shown(self.value)}")
        return self.value

    def text(self, what: str) -> str:
        """The value as text that is not empty, or an error."""
        if not isinstance(self.value, str) or not self.value.strip():
            self.fail(f"{what} must be text, not {shown(self.value)}")
        return self.value.strip()

    def whole(self, what: str, least: int = 0, most: int | None = None) -> int:
        """The value as a whole number, or an error."""
        if isinstance(self.value, bool) or not isinstance(self.value, int) or self.value < least:
            self.fail(f"{what} must be a whole number of at least {least}, not {shown(self.value)}")
        if most is not None and self.value > most:
            self.fail(f"{what} must be at most {most}, not {self.value}")
        return self.value

    def number(self, what: str, above: float = 0.0) -> float:
        """The value as a finite number larger than `above`, or an error."""
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not math.isfinite(self.value):
            self.fail(f"{what} must be a number, not {shown(self.value)}")
        if self.value <= above:
            self.fail(f"{what} must be larger than {above:g}, not {self.value}")
        return float(self.value)

    def wholes(self, what: str, most: int | None = None) -> list[int]:
        """A whole number, a list of them, or a range such as `5..20` with both ends in it."""
        if isinstance(self.value, list):
            return [one.whole(what, 0, most) for one in self.value] or self.fail(f"{what} must not be empty")
        if isinstance(self.value, str):
            ends = re.fullmatch(r"\s*(\d{1,9})\s*\.\.\s*(\d{1,9})\s*", self.value)
            if ends is None or int(ends[1]) > int(ends[2]) or int(ends[2]) - int(ends[1]) > 100_000:
                self.fail(f"{what} must be a whole number, a list or a range such as 5..20, not {self.value!r}")
            return list(range(int(ends[1]), int(ends[2]) + 1))
        return [self.whole(what, 0, most)]


def suggestion(word: str, known: Iterable[str]) -> str:
    """`, did you mean ...?` where a known word is near, else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def shown(value: Any) -> str:
    """A value in an error message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return "nothing" if value is None else repr(value)


def read(path: Path) -> Item:
    """Read a YAML file.

    Raises:
        ConfigurationError: it cannot be read, is no YAML, or has the same key twice; with file and line.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigurationError(f"{path} is larger than {_LARGEST >> 20} MiB: no campaign is")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text in UTF-8") from error
    return parse(text, str(path))


def parse(text: str, file: str) -> Item:
    """The same of a text; `file` is what errors call it."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigurationError(f"{file} is empty")
        return _item(loader, node, file, 0)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"{file}, line {mark.line + 1}, column {mark.column + 1}" if mark is not None else file
        said = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(f"{where}: not YAML: {said}") from error
    except ValueError as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{file}: not YAML: {error}") from error
    finally:
        loader.dispose()


def _item(loader: _Loader, node: Any, file: str, depth: int) -> Item:
    line = node.start_mark.line + 1
    if depth > _DEEPEST:
        raise ConfigurationError(f"{file}, line {line}: nested too deep, or an alias that contains itself")
    if isinstance(node, yaml.SequenceNode):
        return Item([_item(loader, one, file, depth + 1) for one in node.value], file, line, {})
    if not isinstance(node, yaml.MappingNode):
        value = loader.construct_object(node)
        if value is not None and not isinstance(value, str | bool | int | float):
            raise ConfigurationError(f"{file}, line {line}: {node.value!r} reads as {type(value).__name__}: quote it")
        return Item(value, file, line, {})
    found: dict[str, Item] = {}
    lines: dict[str, int] = {}
    for key, inner in _pairs(node, file):
        name, where = key.value, key.start_mark.line + 1
        if name in found:
            raise ConfigurationError(f"{file}, line {where}: {name!r} stands here twice, first in line {lines[name]}")
        found[name], lines[name] = _item(loader, inner, file, depth + 1), where
    return Item(found, file, line, lines)


def _pairs(node: Any, file: str) -> Iterator[tuple[Any, Any]]:
    for key, inner in node.value:
        where = f"{file}, line {key.start_mark.line + 1}"
        if not isinstance(key, yaml.ScalarNode):
            raise ConfigurationError(f"{where}: a key must be a word")
        if key.tag == "tag:yaml.org,2002:merge":
            raise ConfigurationError(f"{where}: merge keys (<<) are not read: write the settings out")
        yield key, inner
