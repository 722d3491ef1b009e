"""The level `restricted` of the Pod Security Standards, as a list of what a pod does beyond it.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ (controls of baseline and restricted).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
_SECCOMP = {"RuntimeDefault", "Localhost"}


def beyond_restricted(pod: Mapping[str, Any]) -> set[str]:
    """Each control that a pod breaks, in a few words."""
    return set(_of_pod(pod))


def _of_pod(pod: Mapping[str, Any]) -> Iterator[str]:
    whole = pod.get("securityContext", {})
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield name
    for volume in pod.get("volumes", ()):
        kinds = set(volume) - {"name"}
        assert len(kinds) == 1, volume
        yield from kinds - _VOLUMES
    for container in (*pod.get("initContainers", ()), *pod["containers"]):
        own = container.get("securityContext", {})
        if own.get("privileged"):
            yield "privileged"
        if own.get("allowPrivilegeEscalation") is not False:
            yield "may gain privileges"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
        if not own.get("runAsNonRoot", whole.get("runAsNonRoot")) or own.get("runAsUser", whole.get("runAsUser")) == 0:
            yield "may be root"
        if own.get("seccompProfile", whole.get("seccompProfile", {})).get("type") not in _SECCOMP:
            yield "seccomp"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield "hostPort"
