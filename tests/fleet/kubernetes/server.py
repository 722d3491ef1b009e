"""An API server of Kubernetes for tests: kmock on real HTTP, with the rules of the real one that an adapter can break.

kmock gives the HTTP server, reads what a request means, and answers errors as Kubernetes does. On top of it stand objects that keep
to what acting relies on: a write with an old `resourceVersion` is a conflict (409), a strategic merge patch replaces the taints and
merges the conditions by type, names and labels have limits (422), a pod is evicted only as the one that is meant, and nobody may do
what is forbidden (403). A test can change objects as somebody else would, also between our reading and our writing.
"""

from __future__ import annotations

import asyncio
import copy
import json
import re
import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import kmock

TOKEN = "secret-token-of-the-tests"
Key = tuple[str, str, str]
Change = Callable[[dict[str, Any]], None]

_GROUPS = {
    "nodes": "/api/v1",
    "pods": "/api/v1",
    "events": "/api/v1",
    "leases": "/apis/coordination.k8s.io/v1",
    "jobs": "/apis/batch/v1",
    "jobsets": "/apis/jobset.x-k8s.io/v1alpha2",
    "pytorchjobs": "/apis/kubeflow.org/v1",
    "trainjobs": "/apis/trainer.kubeflow.org/v1alpha1",
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?")
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}
_CONFLICT = "Operation cannot be fulfilled: the object has been modified; please apply your changes to the latest version and try again"


@dataclass(frozen=True)
class Rule:
    """What a Role or a ClusterRole allows; `namespace` "" for all, `names` () for all objects."""

    namespace: str
    groups: tuple[str, ...]
    resources: tuple[str, ...]
    verbs: tuple[str, ...]
    names: tuple[str, ...] = ()


def rules_of(objects: Iterable[Mapping[str, Any]]) -> list[Rule]:
    """The rules of all roles among objects of a manifest."""
    return [
        Rule(
            one["metadata"].get("namespace", "") if one["kind"] == "Role" else "",
            tuple(rule["apiGroups"]),
            tuple(rule["resources"]),
            tuple(rule["verbs"]),
            tuple(rule.get("resourceNames", ())),
        )
        for one in objects
        if one["kind"] in ("Role", "ClusterRole")
        for rule in one["rules"]
    ]


class KubernetesServer:
    """An API server on a free port of loopback, from `start()` to `stop()`; also a context manager."""

    def __init__(self) -> None:
        self.webhook = ""
        """Name of a webhook of admission that knows no dry run."""
        self.requests: list[tuple[str, str, Any]] = []
        """Method, path and body of every request, refused ones included, in order."""
        self.applied: list[tuple[str, str]] = []
        """What has changed something, the leases apart: e.g. `patch nodes/status`, and the name of the object."""
        self.url = ""
        self.token = TOKEN
        self.slow = 0.0
        """Seconds before an answer."""
        self._objects: dict[Key, dict[str, Any]] = {}
        self._forbidden: set[tuple[str, str]] = set()
        self._rules: list[Rule] | None = None
        self._protected: set[str] = set()
        self._unknown: set[str] = set()
        self._quarrels: set[str] = set()
        self._before: dict[str, list[Change]] = {"nodes": [], "leases": []}
        self._reading: dict[str, list[Callable[[], None]]] = {}
        self._watch: Callable[[int, str], None] = lambda number, when: None
        self._writes, self._version, self._port = 0, 100, 0
        self._lock = threading.RLock()
        self._api = kmock.KubernetesScaffold()
        self._api[re.compile(r"/.*")] << self._answer
        self._server: Any = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    # Being there ------------------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Listen."""
        self._thread.start()
        self._do(self._api.__aenter__())
        self.up()
        return self

    def stop(self) -> None:
        """End, for good."""
        self.down()
        self._do(self._api.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def up(self) -> None:
        """Be there again, at the same address."""
        self._server = kmock.Server(self._api, port=self._port or None)
        self._do(self._server.__aenter__())
        self._port = self._server.port
        self.url = f"http://127.0.0.1:{self._port}"

    def down(self) -> None:
        """Be away: connections are refused."""
        if self._server is not None:
            self._do(self._server.__aexit__(None, None, None))
            self._server = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def kubeconfig(self, path: Path, token_file: Path | None = None) -> Path:
        """Write a configuration for this server, as kubectl reads it."""
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "tests",
            "clusters": [{"name": "tests", "cluster": {"server": self.url}}],
            "users": [{"name": "tests", "user": {"tokenFile": str(token_file)} if token_file else {"token": TOKEN}}],
            "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        }
        path.write_text(json.dumps(config))  # JSON is YAML
        return path

    def _do(self, what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout=30)

    # What a test has there --------------------------------------------------------------------------------------------

    def add(self, plural: str, namespace: str, name: str, **parts: Any) -> None:
        """Have an object."""
        with self._lock:
            meta = {"name": name, **({"namespace": namespace} if namespace else {}), **parts.pop("metadata", {})}
            made = {"metadata": {"uid": f"uid-{name[:40]}-{self._version}", **meta}, **parts}
            self._objects[plural, namespace, name] = self._stamped(made)

    def add_node(
        self,
        name: str,
        *,
        taints: list[dict[str, str]] | None = None,
        labels: Mapping[str, str] | None = None,
        created: str = "2020-01-01T00:00:00Z",
        **spec: Any,
    ) -> None:
        """Have a node that is ready."""
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": "t"}
        spec.update({"taints": taints} if taints else {})
        status = {
            "conditions": [{"type": "MemoryPressure", "status": "False"}, ready],
            "nodeInfo": {"bootID": f"boot-of-{name[:40]}", "systemUUID": f"machine-of-{name[:40]}"},
        }
        meta = {"labels": dict(labels or {}), "annotations": {}, "creationTimestamp": created}
        self.add("nodes", "", name, spec=spec, status=status, metadata=meta)

    def add_pod(
        self,
        name: str,
        node: str,
        *,
        namespace: str = "ml",
        labels: Mapping[str, str] | None = None,
        phase: str = "Running",
        daemon: bool = False,
        **more: Any,
    ) -> None:
        """Have a pod on a node; `daemon`: of a DaemonSet; `exit_code` and `spec` in `more`."""
        owner = {"kind": "DaemonSet" if daemon else "Job", "name": "owner", "controller": True}
        code = more.pop("exit_code", None)
        status: dict[str, Any] = {"phase": phase}
        if code is not None:
            status["containerStatuses"] = [{"name": "main", "state": {"terminated": {"exitCode": code}}}]
        meta = {"labels": dict(labels or {}), "ownerReferences": [owner]}
        self.add("pods", namespace, name, metadata=meta, spec={"nodeName": node, **more.pop("spec", {})}, status=status)

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        """An object, as it is now."""
        with self._lock:
            return copy.deepcopy(self._objects[plural, namespace, name])

    def node(self, name: str) -> dict[str, Any]:
        """A node, as it is now."""
        return self.get("nodes", "", name)

    def clear(self) -> None:
        """Have nothing and forbid nothing, as at the beginning."""
        with self._lock:
            self._rules = None
            self._objects.clear()
            self.requests.clear()
            self.applied.clear()
            self._forbidden.clear()
            self._protected.clear()

    def clear_objects(self) -> None:
        """Have nothing, and forbid what is forbidden."""
        with self._lock:
            self._objects.clear()

    def names(self, plural: str) -> list[str]:
        """Of all objects of a kind."""
        with self._lock:
            return [key[2] for key in self._objects if key[0] == plural]

    def change(self, plural: str, namespace: str, name: str, change: Change) -> None:
        """Somebody else changes an object."""
        with self._lock:
            found = self._objects[plural, namespace, name]
            change(found)
            self._stamped(found)

    def change_node(self, name: str, change: Change) -> None:
        """Somebody else changes a node."""
        self.change("nodes", "", name, change)

    def remove(self, plural: str, namespace: str, name: str) -> None:
        """Somebody else removes an object."""
        with self._lock:
            del self._objects[plural, namespace, name]

    def uncordon(self, name: str) -> None:
        """`kubectl uncordon`: nothing else changes."""
        self.change_node(name, lambda node: node["spec"].pop("unschedulable", None))

    def forbid(self, verb: str, resource: str) -> None:
        """Allow it to nobody any more, e.g. `patch`, `nodes/status`."""
        self._forbidden.add((verb, resource))

    def only(self, rules: Iterable[Rule]) -> None:
        """Allow nothing but what these rules do."""
        self._rules = list(rules)

    def allow(self) -> None:
        """Allow everything again."""
        self._rules = None
        self._forbidden.clear()

    def protect(self, pod: str) -> None:
        """A budget for disruptions lets this pod not go."""
        self._protected.add(pod)

    def release(self, pod: str) -> None:
        """It may go."""
        self._protected.discard(pod)

    def quarrel(self, pod: str) -> None:
        """An eviction of this pod is a conflict about its budget."""
        self._quarrels.add(pod)

    def forget_kind(self, plural: str) -> None:
        """This cluster has no such kind of object."""
        self._unknown.add(plural)

    def conflict(self, times: int = 1, change: Change | None = None, *, plural: str = "nodes") -> None:
        """Before each of the next changes of a node (or of a lease) is applied, somebody else changes it."""
        self._before[plural] += [change or (lambda found: None)] * times

    def while_read(self, plural: str, happens: Callable[[], None]) -> None:
        """The next time that objects of this kind are read, this happens before the answer."""
        self._reading.setdefault(plural, []).append(happens)

    def watch_writes(self, watch: Callable[[int, str], None]) -> None:
        """Call `watch(number, "before" | "after")` around every write that is applied, the leases apart."""
        self._watch, self._writes = watch, 0

    def writes(self, part: str = "") -> list[tuple[str, str]]:
        """Method and path of every request that writes and is no question about permissions; of those whose path has `part`."""
        with self._lock:
            made = [
                (method, path) for method, path, _ in self.requests if method != "GET" and "accessreviews" not in path
            ]
        return [one for one in made if part in one[1]]

    # Answering --------------------------------------------------------------------------------------------------------

    async def _answer(self, request: Any) -> Any:
        method, path = str(request.method.value), request.url.path
        with self._lock:
            self.requests.append((method, path, request.data))
        if self.slow:
            await asyncio.sleep(self.slow)
        if request.headers.get("Authorization", "").removeprefix("bearer ").removeprefix("Bearer ") != self.token:
            raise kmock.KubernetesError(401, "Unauthorized", f"not known: {request.headers.get('Authorization')}")
        if path.endswith("/selfsubjectaccessreviews"):
            return self._review(request.data)
        plural = "" if request.resource is None else str(request.resource.plural)
        if plural not in _GROUPS or plural in self._unknown or not path.startswith(_GROUPS[plural]):
            raise kmock.KubernetesError(404, "PageNotFound", "the server could not find the requested resource")
        resource = f"{plural}/{request.subresource}" if request.subresource else plural
        verb = _VERBS.get(method) or ("get" if request.name else "list")
        if not self._may(verb, resource, str(request.resource.group), request.namespace or "", request.name or ""):
            text = f'{plural} is forbidden: User "system:serviceaccount:bitwitness:fleet" cannot {verb} resource "{resource}"'
            raise kmock.KubernetesError(403, "Forbidden", text)
        if method == "GET":
            return self._read(request, plural)
        dry = request.params.get("dryRun") == "All"
        if dry and self.webhook:
            text = f'admission webhook "{self.webhook}" does not support dry run'
            raise kmock.KubernetesError(400, "BadRequest", text)
        with self._lock:
            counted = plural != "leases" and not dry
            if counted:
                self._writes += 1
                self._watch(self._writes, "before")
            answer = self._write(request, plural, dry=dry)
            if counted:
                self.applied.append((f"{verb} {resource}", request.name or request.data["metadata"]["name"]))
                self._watch(self._writes, "after")
            return answer

    def _review(self, asked: Any) -> dict[str, Any]:
        what = asked["spec"]["resourceAttributes"]
        sub = what.get("subresource", "")
        resource = f"{what['resource']}/{sub}" if sub else what["resource"]
        where, name = what.get("namespace", ""), what.get("name", "")
        return {"status": {"allowed": self._may(what["verb"], resource, what.get("group", ""), where, name)}}

    def _may(self, verb: str, resource: str, group: str, namespace: str, name: str) -> bool:
        if (verb, resource) in self._forbidden:
            return False
        return self._rules is None or any(
            verb in rule.verbs
            and resource in rule.resources
            and group in rule.groups
            and rule.namespace in ("", namespace)
            and (not rule.names or name in rule.names)
            for rule in self._rules
        )

    def _read(self, request: Any, plural: str) -> dict[str, Any]:
        with self._lock:
            while self._reading.get(plural):
                self._reading[plural].pop(0)()
            if request.name:
                return copy.deepcopy(self._found(plural, request.namespace or "", request.name))
            found = [
                one
                for (kind, namespace, _), one in sorted(self._objects.items())
                if kind == plural
                and (not request.namespace or namespace == request.namespace)
                and _selected(one, request)
            ]
            first, limit = int(request.params.get("continue", "0")), int(request.params.get("limit", "500"))
            page, more = found[first : first + limit], len(found) > first + limit
            return {
                "metadata": {
                    "resourceVersion": str(self._version),
                    **({"continue": str(first + limit)} if more else {}),
                },
                "items": copy.deepcopy(page),
            }

    def _write(self, request: Any, plural: str, *, dry: bool) -> dict[str, Any]:
        method, namespace, body = request.method.value, request.namespace or "", request.data
        if method == "POST" and request.subresource == "eviction":
            return self._evict(namespace, request.name, body)
        if method == "POST":
            name = body["metadata"]["name"]
            _validate(plural, body)
            if (plural, namespace, name) in self._objects:
                raise kmock.KubernetesError(409, "AlreadyExists", f'{plural} "{name}" already exists')
            if not dry:
                self._objects[plural, namespace, name] = self._stamped(copy.deepcopy(body))
            return copy.deepcopy(body)
        if not request.subresource and not dry and self._before.get(plural):
            self.change(plural, namespace, request.name, self._before[plural].pop(0))
        old = self._found(plural, namespace, request.name)
        version = body.get("metadata", {}).get("resourceVersion")
        if version is not None and version != old["metadata"]["resourceVersion"]:
            raise kmock.KubernetesError(409, "Conflict", _CONFLICT)
        if body.get("metadata", {}).get("uid", old["metadata"]["uid"]) != old["metadata"]["uid"]:
            raise kmock.KubernetesError(422, "Invalid", "metadata.uid: field is immutable")
        new = copy.deepcopy(body) if method == "PUT" else _merged(old, body, request)
        new["metadata"].update(uid=old["metadata"]["uid"])
        for part in {"status"} if not request.subresource else {"spec"}:
            new.update({part: copy.deepcopy(old[part])} if part in old else {})
        _validate(plural, new)
        if not dry:
            self._objects[plural, namespace, request.name] = self._stamped(new)
        return copy.deepcopy(new)

    def _evict(self, namespace: str, name: str, body: Any) -> dict[str, Any]:
        pod = self._found("pods", namespace, name)
        uid = body.get("deleteOptions", {}).get("preconditions", {}).get("uid")
        if uid is not None and uid != pod["metadata"]["uid"]:
            raise kmock.KubernetesError(409, "Conflict", "Precondition failed: UID in precondition differs")
        if name in self._quarrels:
            raise kmock.KubernetesError(409, "Conflict", _CONFLICT)
        if name in self._protected:
            text = "Cannot evict pod as it would violate the pod's disruption budget."
            raise kmock.KubernetesError(429, "TooManyRequests", text)
        del self._objects["pods", namespace, name]
        return {"kind": "Status", "status": "Success"}

    def _found(self, plural: str, namespace: str, name: str) -> dict[str, Any]:
        if (plural, namespace, name) not in self._objects:
            raise kmock.KubernetesError(404, "NotFound", f'{plural} "{name}" not found')
        return self._objects[plural, namespace, name]

    def _stamped(self, made: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        made["metadata"].update(resourceVersion=str(self._version))
        made["metadata"].setdefault("uid", f"uid-{self._version}")
        return made


def _selected(one: Mapping[str, Any], request: Any) -> bool:
    """Whether an object is among those that are asked for, by equality of fields and labels."""
    for test in filter(None, request.params.get("fieldSelector", "").split(",")):
        path, _, value = test.partition("=")
        found: Any = one
        for key in path.split("."):
            found = found.get(key, "") if isinstance(found, Mapping) else ""
        if found != value:
            return False
    labels = one["metadata"].get("labels", {})
    tests = [test.partition("=") for test in filter(None, request.params.get("labelSelector", "").split(","))]
    return all(labels.get(key) == value for key, _, value in tests)


def _merged(old: Mapping[str, Any], patch: Mapping[str, Any], request: Any) -> dict[str, Any]:
    strategic = request.headers["Content-Type"] == "application/strategic-merge-patch+json"
    if not strategic and request.headers["Content-Type"] != "application/merge-patch+json":
        raise kmock.KubernetesError(415, "UnsupportedMediaType", request.headers["Content-Type"])
    found = _merge(old, patch, by_type=strategic)
    assert isinstance(found, dict)
    return found


def _merge(old: Any, patch: Any, *, by_type: bool, key: str = "") -> Any:
    """A JSON merge patch (RFC 7396); `by_type`: a strategic one, in which conditions are merged by their type."""
    if isinstance(patch, list) and by_type and key == "conditions":
        merged = {one["type"]: one for one in copy.deepcopy(old or [])}
        for one in patch:
            merged[one["type"]] = {**merged.get(one["type"], {}), **one}
        return list(merged.values())
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    made = dict(copy.deepcopy(old)) if isinstance(old, Mapping) else {}
    for name, value in patch.items():
        if value is None:
            made.pop(name, None)
        else:
            made[name] = _merge(made.get(name), value, by_type=by_type, key=name)
    return made


def _validate(plural: str, made: Mapping[str, Any]) -> None:
    """The limits that names, labels, taints and Events have."""
    meta = made["metadata"]
    bad: list[str] = []
    if len(meta["name"]) > 253 or not _NAME.fullmatch(meta["name"]):
        bad.append(f"metadata.name: {meta['name']!r}")
    values = [*meta.get("labels", {}).values()]
    with suppress(TypeError):
        values += [taint.get("value", "") for taint in made.get("spec", {}).get("taints") or []]
    bad += [f"value: {value!r}" for value in values if len(value) > 63 or not _LABEL.fullmatch(value)]
    if plural == "events" and len(made["message"]) > 1024:
        bad.append("message: too long")
    if bad:
        raise kmock.KubernetesError(422, "Invalid", f"{plural} {meta['name'][:60]!r} is invalid: {'; '.join(bad)}")
