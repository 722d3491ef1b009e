"""Manifests against published schemas: those of Kubernetes, and of the resources that Kubeflow and JobSet add.

The second ones are a list of fields (custom_resources.json), because the packages they were published in need versions of the
client that ours does not. Pod and Job templates inside them are held against the schemas of Kubernetes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate

OLDEST, NEWEST = "1.29", "1.37"
"""Up to 1.28 the published schema wants onPodConditions in every rule of a podFailurePolicy, which the API never did."""
_MODELS: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "custom_resources.json").read_text(encoding="utf-8")
)["models"]
_ROOTS = {
    ("kubeflow.org/v1", "PyTorchJob"): "KubeflowOrgV1PyTorchJob",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
}
_PLAIN: dict[str, type] = {"string": str, "integer": int, "boolean": bool}


def wrong(manifest: Mapping[str, Any], version: str) -> list[str]:
    """What a cluster of this version would refuse; empty where nothing."""
    root = _ROOTS.get((manifest["apiVersion"], manifest["kind"]))
    if root is not None:
        return list(_model(manifest, root, manifest["kind"], version))
    return _kubernetes(dict(manifest), version, str(manifest["kind"]))


def _kubernetes(manifest: dict[str, Any], version: str, where: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{where} ({version}): {error}"]
    return []


def _model(value: Any, model: str, where: str, version: str) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"{where}: no object"]
    fields = _MODELS[model]
    found = [f"{where}.{name}: there is no such field" for name in value if name not in fields]
    found += [
        f"{where}.{name}: is missing" for name, kind in fields.items() if kind.endswith("!") and name not in value
    ]
    for name, one in value.items():
        if name in fields:
            found += _typed(one, fields[name].rstrip("!"), f"{where}.{name}", version)
    return found


def _typed(value: Any, kind: str, where: str, version: str) -> list[str]:
    if match := re.fullmatch(r"(List|Dict)\[(?:str, )?(\w+)\]", kind):
        inner = value if match[1] == "List" else list(value.values())
        return [text for one in inner for text in _typed(one, match[2], where, version)]
    if kind in _PLAIN:
        right = type(value) is _PLAIN[kind]  # True is an int too
        return [] if right else [f"{where}: {value!r} is no {kind}"]
    if kind == "PodTemplateSpec":
        return _kubernetes({"apiVersion": "v1", "kind": "PodTemplate", "template": value}, version, where)
    if kind == "JobTemplateSpec":
        return _kubernetes({"apiVersion": "batch/v1", "kind": "Job", **value}, version, where)
    if kind == "ObjectMeta":
        return _kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": value}, version, where)
    assert kind in _MODELS, f"{where}: {kind} is not in custom_resources.json"
    return _model(value, kind, where, version)
