"""Golden answers: what healthy devices of a kind answered, kept in a signed file, so that one device alone can be judged.

A golden file decides who is blamed, so it is refused for the least doubt: a file that nobody signed, or that is not to the last
bit what was signed, judges nobody. What it does not know it is silent about: devices of another kind, which other software makes
them, are judged as if there were no file.

    {"schema": 1, "type": "bitwitness golden answers", "suite_version": 1, "made": "...", "scan": "...",
     "kinds": [{"kind": {name: value}, "items": {item: {"digest": "...", "devices": 3, "calls": 60}}}],
     "key": SHA-256 of the public key, "signature": Ed25519 (RFC 8032) of all else}

A signature does not tell an older file from a newer one of the same key: whoever withdraws answers makes a new key.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from bitwitness.errors import ConfigurationError, RunFilesError
from bitwitness.runfiles.answers import Device, Sheet
from bitwitness.runfiles.files import exists, utc_now, write_bytes
from bitwitness.scan.items import SUITE_VERSION, Item
from bitwitness.scan.judging import Known
from bitwitness.scan.results import Judgement

__all__ = ["GoldenFile", "explain", "learn", "load", "make_key", "write"]

SCHEMA, TYPE = 1, "bitwitness golden answers"
LEAST_DEVICES, LEAST_CALLS, LEAST_NODES = 3, 2, 2
"""That must agree before an answer is learned: two of three would be a majority of devices, but no witness of it."""

_LARGEST = 64 << 20
_KINDS, _ITEMS, _PARTS, _WORDS = 1_000, 200_000, 100, 1_000
_MOST = 10**15
_KEYS = {"schema", "type", "suite_version", "made", "scan", "kinds", "key", "signature"}
_DIGEST = re.compile(r"[0-9a-f]{16,128}")
_PLAIN = re.compile(r"[^\x00-\x1f\x7f]*")


@dataclass(frozen=True)
class GoldenFile(Mapping[str, Mapping[str, Known]]):
    """The content of a golden file; as a mapping it is what the judge takes: by the name of a kind, by item.

    Attributes:
        path: where it lies.
        made, scan: when it was last learned into, and from which scan.
        key: the id of the key that signed it.
        kinds: the parts of each kind, by its name.
        answers: the known answers, by the same name.
    """

    path: Path
    made: str
    scan: str
    key: str
    kinds: Mapping[str, Mapping[str, str]]
    answers: Mapping[str, Mapping[str, Known]] = field(repr=False)

    def __getitem__(self, name: str) -> Mapping[str, Known]:
        return self.answers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)


def make_key(path: Path) -> Path:
    """Make a pair of keys: the private one in `path`, readable by its owner alone, the public one in `path`.pub, which is returned.

    Raises:
        ConfigurationError: one of the files is there already; a key is never overwritten.
        MissingExtra: `cryptography` is not installed.
        RunFilesError: they cannot be written.
    """
    made: Path = _signing().make_key(path)
    return made


def _signing() -> ModuleType:
    from bitwitness.scan import signing  # noqa: PLC0415 - needs an extra

    return signing


# Reading ------------------------------------------------------------------------------------------------------------------


def load(path: Path, verify_key: Path | None) -> GoldenFile:
    """Read a golden file that the owner of a key has signed.

    Raises:
        ConfigurationError: no key was given, it is none, or the file is of other items than this version computes.
        MissingExtra: `cryptography` is not installed.
        RunFilesError: the file cannot be read, is none, is damaged, or was not signed by this key as it stands.
    """
    if verify_key is None:
        raise ConfigurationError(
            f"{path} decides who is blamed, so it is not believed without a key: give --verify-key FILE.pub, the public key "
            "of whoever learned it"
        )
    signing = _signing()
    key = signing.public_key(verify_key)
    record = _record(path)
    if record["key"] != signing.key_id(key):
        raise RunFilesError(
            f"{path} names the key {str(record['key'])[:16]}, and {verify_key} is {signing.key_id(key)[:16]}: give the key of whoever "
            "learned it, or learn it anew"
        )
    if not signing.is_signed(record, key):
        raise RunFilesError(
            f"{path} is not as it was signed: somebody or something has changed it. Take it from where it came, or learn it anew"
        )
    return _golden(path, record)


def _record(path: Path) -> dict[str, Any]:
    """The JSON of a golden file whose bytes are those that we would write."""
    damaged = (
        "it was damaged, or was not written by `bitwitness scan --learn`. Take it from where it came, or learn it anew"
    )
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST + 1)
    except OSError as error:
        raise RunFilesError(f"the golden file {path} cannot be read: {error.strerror or error}") from error
    if len(content) > _LARGEST:
        raise RunFilesError(f"{path} is larger than {_LARGEST >> 20} MiB: it is no golden file")
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RunFilesError(f"{path} is not JSON ({' '.join(str(error).split())[:100]}): {damaged}") from error
    if not isinstance(record, dict) or record.get("type") != TYPE:
        raise RunFilesError(f"{path} is no golden file: {damaged}")
    if "signature" not in record or "key" not in record:
        raise RunFilesError(
            f"{path} is not signed, so nobody answers for it: learn it anew with --learn FILE --sign-key KEY"
        )
    if record.get("schema") != SCHEMA or isinstance(record["schema"], bool):
        raise RunFilesError(
            f"{path} has schema {record.get('schema')!r:.40}, this version reads {SCHEMA}: use the version that wrote it"
        )
    try:
        same = set(record) == _KEYS and _signing().canonical(record) == content
    except (ValueError, TypeError, RecursionError):
        same = False
    if not same:
        raise RunFilesError(f"{path} is not written as golden files are: {damaged}")
    return record


def _golden(path: Path, record: Mapping[str, Any]) -> GoldenFile:
    """What a record with a good signature says, which its owner may have written by hand all the same."""
    version = record["suite_version"]
    if version != SUITE_VERSION or isinstance(version, bool):
        raise ConfigurationError(
            f"{path} has answers to version {version!r:.20} of the items, and this program computes version {SUITE_VERSION}: "
            "learn it anew, into another file"
        )
    kinds, answers, items = dict[str, dict[str, str]](), dict[str, dict[str, Known]](), 0
    absurd = f"{path} is signed, and has values that cannot be"
    try:
        if not (isinstance(record["kinds"], list) and len(record["kinds"]) <= _KINDS):
            raise ValueError("its kinds")
        for one in record["kinds"]:
            kind, known = one["kind"], one["items"]
            name = _name(kind)
            items += len(known)
            if name in kinds or items > _ITEMS or set(one) != {"kind", "items"}:
                raise ValueError(f"twice the kind {name}, or too many items")
            kinds[name] = kind
            answers[name] = {item: _known(item, value) for item, value in known.items()}
        made, scan = record["made"], record["scan"]
        if not _is_text(made) or not _is_text(scan):
            raise ValueError("when or of what it was made")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunFilesError(f"{absurd} ({' '.join(str(error).split())[:200]}): learn it anew") from error
    return GoldenFile(path, made, scan, record["key"], kinds, answers)


def _name(kind: object) -> str:
    if not (isinstance(kind, dict) and 0 < len(kind) <= _PARTS and all(map(_is_text, (*kind, *kind.values())))):
        raise ValueError(f"no kind: {str(kind)[:100]}")
    return Device(0, "", "", kind).kind_name


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _WORDS and _PLAIN.fullmatch(value) is not None


def _known(item: str, value: Mapping[str, Any]) -> Known:
    if Item.parse(item).id != item:
        raise ValueError(f"no item: {item[:100]}")
    digest, devices, calls = value["digest"], value["devices"], value["calls"]
    if len(value) != 3 or not isinstance(digest, str) or _DIGEST.fullmatch(digest) is None:
        raise ValueError(f"no answer of {item}")
    for number in (devices, calls):
        if isinstance(number, bool) or not isinstance(number, int) or number > _MOST:
            raise ValueError(f"no count of {item}: {number!r:.40}")
    if devices < LEAST_DEVICES or calls < LEAST_CALLS * devices:
        raise ValueError(f"{item} was learned of {devices} devices and {calls} calls, which is not enough")
    return Known(digest, devices, calls)


def explain(golden: GoldenFile, kind: Mapping[str, str]) -> str:
    """Why a golden file does not judge devices of a kind, by the nearest that it knows; "" where it does."""
    if Device(0, "", "", kind).kind_name in golden:
        return ""
    if not golden.kinds:
        return f"{golden.path} knows no kind of devices"

    def apart(known: Mapping[str, str]) -> list[str]:
        return [name for name in sorted({*known, *kind}) if known.get(name) != kind.get(name)]

    nearest = min(golden.kinds.values(), key=lambda known: (len(apart(known)), sorted(known.items())))
    parts = [f"{_part(name, kind)} instead of {_part(name, nearest, short=name in kind)}" for name in apart(nearest)]
    return f"{golden.path} does not know this kind: {', '.join(parts)}. Learn it from a scan of three such devices"


def _part(name: str, kind: Mapping[str, str], *, short: bool = False) -> str:
    if name not in kind:
        return "none" if short else f"no {name}"
    return kind[name] if short else f"{name} {kind[name]}"


# Learning -----------------------------------------------------------------------------------------------------------------


def learn(sheets: Sequence[Sheet], judgement: Judgement, scan: str = "") -> dict[str, Any]:
    """What a scan in which nothing failed has shown to be right: what at least three devices answered, each time and twice or more,
    on two nodes where there are several, and nobody otherwise.

    Args:
        sheets: all answers of the scan.
        judgement: what was concluded from them.
        scan: the name of the scan, for whoever reads the file.

    Returns:
        `kinds` as in the file; `skipped`, a list of {"kind", "item", "why"} of what was not learned; `scan`.

    Raises:
        ConfigurationError: something failed, there are fewer than three devices of a kind, or nothing could be learned.
    """
    if judgement.standing == "fail":
        who = ", ".join(judgement.failed_nodes) or "a link, or a vendor's diagnostic,"
        raise ConfigurationError(
            f"nothing is learned from a scan with a failure: {who} failed. Repair it, and scan again"
        )
    passed = {one.rank for one in judgement.devices if one.standing == "pass"}
    groups: dict[str, list[Sheet]] = defaultdict(list)
    for sheet in sheets:
        groups[sheet.device.kind_name].append(sheet)
    most = max((len(group) for group in groups.values()), default=0)
    if most < LEAST_DEVICES:
        raise ConfigurationError(
            f"golden answers are learned from at least {LEAST_DEVICES} devices of one kind that agree; this scan had {most}"
        )
    kinds, skipped = [], []
    for name, group in sorted(groups.items()):
        items: dict[str, dict[str, Any]] = {}
        for item in sorted({item for sheet in group for item in sheet.answers}):
            found = _agreed(item, group, passed)
            if isinstance(found, str):
                skipped.append({"kind": name, "item": item, "why": found})
            else:
                items[item] = _entry(found)
        if items:
            kinds.append({"kind": dict(group[0].device.kind), "items": items})
    if not kinds:
        why = skipped[0]["why"] if skipped else "no device answered anything"
        raise ConfigurationError(f"nothing could be learned from this scan: {why}")
    return {"kinds": kinds, "skipped": skipped, "scan": scan}


def _agreed(item: str, group: Sequence[Sheet], passed: set[int]) -> Known | str:
    """The answer that may be learned, or why there is none."""
    if item.startswith("comm/"):
        return "what is communicated depends on who takes part"
    asked = [sheet for sheet in group if item in sheet.answers]
    digests = {digest for sheet in asked for digest in sheet.answers[item]}
    if len(digests) > 1:
        return f"{len(digests)} different answers to it"
    steady = [s for s in asked if sum(s.answers[item].values()) >= LEAST_CALLS and s.device.rank in passed]
    if len(steady) < LEAST_DEVICES:
        return f"{len(steady)} device(s) passed and computed it twice, {LEAST_DEVICES} must have"
    nodes = {sheet.device.node for sheet in steady}
    if len(nodes) < LEAST_NODES <= len({sheet.device.node for sheet in group}):
        return "they agree on one node only, and there are several: it may be how that node is configured"
    return Known(digests.pop(), len(steady), sum(sum(sheet.answers[item].values()) for sheet in steady))


def _entry(known: Known) -> dict[str, Any]:
    return {"digest": known.digest, "devices": known.devices, "calls": known.calls}


def write(path: Path, learned: Mapping[str, Any], sign_key: Path) -> GoldenFile:
    """Sign what was learned, and write it; where the file is there already, add to what it knows.

    Raises:
        ConfigurationError: it contradicts what the file knows, the file is of another version, or the key is none.
        MissingExtra: `cryptography` is not installed.
        RunFilesError: the file that is there was not signed by this key, or nothing can be written.
    """
    signing = _signing()
    key = signing.private_key(sign_key)
    kinds, answers = _known_before(path, key, sign_key)
    try:
        _add(path, learned, kinds, answers)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"this was not learned from a scan: {' '.join(str(error).split())[:200]}") from error
    body = {
        "schema": SCHEMA,
        "type": TYPE,
        "suite_version": SUITE_VERSION,
        "made": utc_now(),
        "scan": str(learned.get("scan", ""))[:_WORDS],
        "kinds": [
            {"kind": kinds[name], "items": {item: _entry(known) for item, known in sorted(answers[name].items())}}
            for name in sorted(kinds)
        ],
    }
    record = signing.sign(body, key)
    golden = _golden(path, record)
    write_bytes(path, signing.canonical(record))
    return golden


def _known_before(
    path: Path, key: Any, sign_key: Path
) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, Known]]]:
    """What the file knows to which something is to be added: nothing where there is none."""
    kinds: dict[str, dict[str, str]] = {}
    answers: dict[str, dict[str, Known]] = defaultdict(dict)
    if exists(path):
        before = _record(path)
        if not _signing().is_signed(before, key.public_key()):
            raise RunFilesError(
                f"{path} was not signed by {sign_key} as it stands: learn into another file, or with its key"
            )
        old = _golden(path, before)
        kinds = {name: dict(kind) for name, kind in old.kinds.items()}
        for name in old:
            answers[name] = dict(old[name])
    return kinds, answers


def check(path: Path, sign_key: Path, devices: int) -> None:
    """Refuse before a scan begins what `learn` and `write` would refuse after it, as far as that can be known.

    Raises:
        ConfigurationError: the key is none, the file is of another version, or there are too few devices.
        MissingExtra: `cryptography` is not installed.
        RunFilesError: the file that is there was not signed by this key, or nothing can be written there.
    """
    if devices < LEAST_DEVICES:
        raise ConfigurationError(
            f"golden answers are learned from at least {LEAST_DEVICES} devices of one kind that agree; this scan has {devices}"
        )
    _known_before(path, _signing().private_key(sign_key), sign_key)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return  # a file can be made there
    except OSError as error:
        raise RunFilesError(f"{path} cannot be written: {error.strerror or error}") from error


def _add(
    path: Path, learned: Mapping[str, Any], kinds: dict[str, dict[str, str]], answers: dict[str, dict[str, Known]]
) -> None:
    """Add what was learned to what is known."""
    for one in learned["kinds"]:
        name = _name(one["kind"])
        if kinds.setdefault(name, one["kind"]) != one["kind"]:
            raise ConfigurationError(f"two kinds of devices have the same name, {name}: they cannot be told apart")
        for item, value in one["items"].items():
            answers[name][item] = _joined(path, name, item, answers[name].get(item), _known(item, value))


def _joined(path: Path, kind: str, item: str, old: Known | None, new: Known) -> Known:
    if old is None:
        return new
    if old.digest != new.digest:
        raise ConfigurationError(
            f"{path} says {old.digest[:16]} to {item}, this scan {new.digest[:16]}, for {kind}. Nothing was written: one of "
            "them is wrong, or the kind does not name what differs; find out which before learning into another file"
        )
    return Known(old.digest, max(old.devices, new.devices), min(old.calls + new.calls, _MOST))
