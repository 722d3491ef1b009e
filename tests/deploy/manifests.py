"""The manifests as a cluster would get them, read without a cluster: enough of kustomize for what deploy/kubernetes uses of it.

Where kubectl is installed a test compares the two, so that the tests do not depend on it and are not fooled by this either.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
EXAMPLES = FOLDER / "examples"
INSTALLS = ("base", "overlays/default", "overlays/hyperpod-eks", "overlays/nvsentinel")
"""What can be given to `kubectl apply -k`."""

Manifest = dict[str, Any]


def documents(file: Path) -> list[Manifest]:
    """All manifests of a file."""
    return [one for one in yaml.safe_load_all(file.read_text(encoding="utf-8")) if one]


def rendered(folder: str, *components: str) -> list[Manifest]:
    """What `kubectl kustomize` prints, but for the hash behind the names of ConfigMaps; `components`: besides."""
    found = copy.deepcopy(_rendered(folder))
    for component in components:
        _apply(FOLDER / "components" / component, found)
    return found


@cache
def _rendered(folder: str) -> list[Manifest]:
    found: list[Manifest] = []
    _apply(FOLDER / folder, found)
    return found


def _apply(folder: Path, found: list[Manifest]) -> None:
    file = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
    known = {"apiVersion", "kind", "resources", "components", "configMapGenerator", "patches"}
    assert set(file) <= known, f"{folder}: this reader does not know {set(file) - known}"
    for name in file.get("resources", ()):
        if (folder / name).is_dir():
            _apply(folder / name, found)
        else:
            found += documents(folder / name)
    for name in file.get("components", ()):
        _apply(folder / name, found)
    for one in file.get("configMapGenerator", ()):
        _generate(folder, one, found)
    for patch in file.get("patches", ()):
        target = patch["target"]
        goals = [one for one in found if one["kind"] == target["kind"] and one["metadata"]["name"] == target["name"]]
        assert goals, f"{folder}: a patch of {target} has no target"
        for goal in goals:
            for operation in yaml.safe_load(patch["patch"]):
                _change(goal, operation)


def _generate(folder: Path, one: Mapping[str, Any], found: list[Manifest]) -> None:
    data = {name: (folder / name).read_text(encoding="utf-8") for name in one["files"]}
    made = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": one["name"], "namespace": one["namespace"]},
        "data": data,
    }
    before = [old for old in found if (old["kind"], old["metadata"]["name"]) == ("ConfigMap", one["name"])]
    assert bool(before) == (one.get("behavior", "create") == "replace")
    for old in before:
        found.remove(old)
    found.append(made)


def _change(goal: Manifest, operation: Mapping[str, Any]) -> None:
    """One operation of a JSON patch (RFC 6902): add or replace."""
    *path, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].strip("/").split("/")]
    where: Any = goal
    for part in path:
        where = where[int(part)] if isinstance(where, list) else where[part]
    value = copy.deepcopy(operation["value"])
    if isinstance(where, list):
        assert operation["op"] == "add"
        assert last == "-"
        where.append(value)
    else:
        assert operation["op"] == "add" or last in where, operation
        where[last] = value


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Those of one kind."""
    return [one for one in manifests if one["kind"] == kind]


def the(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The one of this kind and name."""
    (found,) = [one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name]
    return found


def pods(manifest: Any) -> Iterator[dict[str, Any]]:
    """The specs of all pods that a manifest makes, however deep they stand."""
    if isinstance(manifest, Mapping):
        if "containers" in manifest:
            yield dict(manifest)
        for value in manifest.values():
            yield from pods(value)
    elif isinstance(manifest, list):
        for value in manifest:
            yield from pods(value)


def everything() -> list[tuple[str, Manifest]]:
    """All manifests that there are, each once, with where it comes from."""
    found = [(folder, one) for folder in INSTALLS for one in rendered(folder)]
    found += [("evict", one) for one in rendered("base", "evict")]
    found += [("shared-runs", one) for one in rendered("base", "shared-runs")]
    found += [(file.name, one) for file in sorted(EXAMPLES.glob("*.yaml")) for one in documents(file)]
    unlike = {json.dumps(one, sort_keys=True): (where, one) for where, one in reversed(found)}
    return list(reversed(unlike.values()))


def canonical(manifests: list[Manifest]) -> list[str]:
    """In an order and a form in which two lists can be compared."""
    return sorted(json.dumps(one, sort_keys=True) for one in manifests)
