"""The lease by which one of several controllers leads: coordination.k8s.io/v1, as the parts of Kubernetes themselves do it.

Every change carries the `resourceVersion` that was read, so two that want the lease at once cannot both get it. Clocks of two machines
need not agree: the lease of another one is over when it was seen unchanged for its whole duration, by our own clock that nobody
sets; the time that stands in it is for people.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError
from bitwitness.fleet.clock import Clock
from bitwitness.fleet.clusters.kubernetes_api import CONFLICT, KubernetesApi, Refused
from bitwitness.fleet.clusters.kubernetes_reading import part, text

logger = logging.getLogger(__name__)

DURATION = 30
"""Seconds after which a lease that nobody renews is over; it is renewed after a third of them."""
TICKS: Callable[[], float] = Clock().ticks
"""Seconds that pass, also while the machine sleeps."""
_GROUP = "coordination.k8s.io/v1"
_NAME = re.compile(r"([a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)/([a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?)")


@dataclass(frozen=True, slots=True)
class _Seen:
    """A lease of another one, and when it had been seen to be what it is, by our clock; it may be newer than the question."""

    version: str
    since: float


class Lease:
    """One lease.

    Args:
        api: the API server that keeps it.
        name: `namespace/name`.
        identity: of this process, which no other one has; made up where it is empty.
        ticks: seconds that pass, whatever happens to the time of day, and also while the machine sleeps.

    Raises:
        ConfigurationError: the name is none.
    """

    def __init__(self, api: KubernetesApi, name: str, identity: str = "", ticks: Callable[[], float] = TICKS) -> None:
        found = _NAME.fullmatch(name)
        if found is None:
            raise ConfigurationError(f"cluster.lease reads NAMESPACE/NAME, not {name!r:.120}")
        self.name = name
        self._namespace, self._name = found.groups()
        self._api, self._ticks = api, ticks
        self.identity = identity or own_identity()
        self.asked = False
        self._renewed: float | None = None
        self._seen: _Seen | None = None
        self._error = ""

    @property
    def path(self) -> str:
        """Where it is."""
        return f"{self.collection}/{self._name}"

    @property
    def collection(self) -> str:
        """Where it is created."""
        return f"/apis/{_GROUP}/namespaces/{self._namespace}/leases"

    def leader(self) -> str:
        """Take the lease or keep it; "" where this process has it, else who has it.

        Raises:
            ClusterError: the API server cannot say now.
        """
        self.asked = True
        if self._age() < DURATION / 3:
            return ""
        try:
            holder = self._take()
        except ClusterError as error:
            self._error = str(error)
            raise
        self._error = ""
        return holder

    def _take(self) -> str:
        for _ in range(3):
            began = self._ticks()  # others count from when they have seen it, which is later
            found = self._api.find(self.path)
            holder = self._other(found, self._ticks())
            if holder:
                self._renewed = None
                return holder
            try:
                self._write(found)
            except Refused as error:
                if error.status != CONFLICT:
                    raise
                continue  # somebody was faster: who?
            self._renewed, self._seen = began, None
            return ""
        raise ClusterError(f"the lease {self.name} changes faster than it can be read")

    def check(self) -> None:
        """Whether this process may act; a lease that grows old is renewed first.

        Raises:
            ClusterError: another one leads, or nobody can say.
        """
        if not self.asked:
            return  # a person's command, which does not lead
        if self._age() >= DURATION:
            why = f" ({self._error})" if self._error else ""
            raise ClusterError(
                f"the lease {self.name} was not renewed for {DURATION} s{why}: nothing is done without it"
            )
        holder = self.leader()
        if holder or self._age() >= DURATION:  # the renewal itself may have taken long
            raise ClusterError(f"{holder or 'nobody'} leads on this cluster ({self.name}): nothing is done here")

    def resign(self) -> None:
        """Give it up, if this process has it, so that another one need not wait; never raises."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            found = self._api.find(self.path)
            if found is not None and text(found, "spec", "holderIdentity") == self.identity:
                self._api.ask("PUT", self.path, self._lease(found, holder="", duration=1))
        except ClusterError as error:
            logger.info("the lease is left to run out: %s", error)

    def _age(self) -> float:
        """Seconds since this process last renewed it."""
        return float("inf") if self._renewed is None else self._ticks() - self._renewed

    def _other(self, found: Mapping[str, Any] | None, now: float) -> str:
        """Who else has it; "" where it is ours, nobody's, or over."""
        holder = text(found, "spec", "holderIdentity")
        if found is None or holder in ("", self.identity):
            return ""
        version = text(found, "metadata", "resourceVersion")
        if self._seen is None or self._seen.version != version:
            self._seen = _Seen(version, now)
        length = part(found, "spec").get("leaseDurationSeconds")
        lasts = float(length) if isinstance(length, int | float) and 0 < length <= 3600 else float(DURATION)
        return holder if now - self._seen.since < lasts else ""

    def _write(self, found: Mapping[str, Any] | None) -> None:
        if found is None:
            self._api.ask("POST", self.collection, self._lease({}, holder=self.identity, duration=DURATION))
        else:
            self._api.ask("PUT", self.path, self._lease(found, holder=self.identity, duration=DURATION))

    def _lease(self, found: Mapping[str, Any], *, holder: str, duration: int) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        old, same = part(found, "spec"), text(found, "spec", "holderIdentity") == holder
        turns = old.get("leaseTransitions")
        return {
            "apiVersion": _GROUP,
            "kind": "Lease",
            "metadata": {**part(found, "metadata"), "name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": holder,
                "leaseDurationSeconds": duration,
                "acquireTime": text(found, "spec", "acquireTime") if same else now,
                "renewTime": now,
                "leaseTransitions": (turns if isinstance(turns, int) else 0)
                + (1 if found and holder and not same else 0),
            },
        }


def own_identity() -> str:
    """A name of this process that no other one has: of its pod, or its host, with what is made up for it."""
    where = os.environ.get("POD_NAME") or socket.gethostname()
    return f"{where}:{os.getpid()}:{secrets.token_hex(4)}"
