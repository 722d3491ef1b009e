"""The API server of Kubernetes, through the official client: the only place that knows the client, its configuration and its errors.

The client loads the configuration and the credentials, and makes the connection. Its pool is asked directly, because only so
is every request bounded as a whole, never repeated, and the same with every version from 31 to 36: those differ in how a
patch names its type and in what they make of an error. What the server says is shown; what we sent to prove who we are is not.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from bitwitness.errors import ClusterError, ConfigurationError, MissingExtra
from bitwitness.fleet.clusters.base import one_line
from bitwitness.fleet.clusters.kubernetes_deadline import Deadline, bounded
from bitwitness.fleet.clusters.kubernetes_words import COMPONENT

try:
    import kubernetes.client
    import kubernetes.config
    import urllib3
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("Kubernetes is asked through its client: pip install 'bitwitness[kubernetes]'") from error

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds who it is."""
STRATEGIC = "application/strategic-merge-patch+json"
"""Merges a node's conditions by their type; its taints it replaces as a whole, as a plain merge patch does."""
_MOST = 256 * 2**20
_AUTHORIZATION = "authorization"
_USER = re.compile(r"//[^/]*@")
"""Name and password in an address."""
_HEADER = re.compile(r"[\x20-\x7e]{1,65536}")
_PAGE = 250
"""Objects asked for at once: a node has some 20 kB."""
_PAGES = 1000
ABSENT, CONFLICT, TOO_MANY = 404, 409, 429
_OK = range(200, 300)
_MAY_BE_DONE = 500
"""From which status on a server that says that it failed may have done what it was asked for."""
_PATH = re.compile(
    r"/(?:api/v1|apis/([a-z0-9.-]+)/v[0-9a-z]+)(?:/namespaces/([^/]+)(?=/))?/([a-z]+)(?:/([^/]+))?(?:/([a-z]+))?"
)
_VERBS = {"POST": "create", "PATCH": "patch", "PUT": "update", "DELETE": "delete"}


class Refused(ClusterError):
    """The API server answered with an error; `status` is its HTTP status and `reason` its word, e.g. `AlreadyExists`."""

    def __init__(self, text: str, status: int, reason: str = "") -> None:
        super().__init__(text, refused=status < _MAY_BE_DONE)
        self.status, self.reason = status, reason

    def __reduce__(self) -> tuple[type[Refused], tuple[str, int, str]]:
        """Exceptions are pickled by their message unless they say otherwise."""
        return type(self), (str(self), self.status, self.reason)


@dataclass(frozen=True, slots=True)
class Permission:
    """What somebody must be allowed to: one rule of RBAC.

    Attributes:
        verb: `get`, `list`, `create`, `patch`, `update`.
        resource: `nodes`, `nodes/status`.
        group: of the API; "" for the core.
        namespace: in which; "" for all, and for what is in none.
    """

    verb: str
    resource: str
    group: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        """As it stands in a Role or a ClusterRole."""
        where = f"Role in namespace {self.namespace}" if self.namespace else "ClusterRole"
        return f'{where}: apiGroups: ["{self.group}"], resources: [{self.resource}], verbs: [{self.verb}]'


def permission_for(method: str, path: str) -> Permission:
    """What a request needs."""
    found = _PATH.fullmatch(path.partition("?")[0])
    if found is None:
        return Permission(_VERBS.get(method, "get"), path)
    group, namespace, resource, name, sub = found.groups()
    verb = _VERBS.get(method) or ("get" if name else "list")
    where = "" if sub == "eviction" else namespace or ""  # pods of all namespaces are to go
    return Permission(verb, f"{resource}/{sub}" if sub else resource, group or "", where)


class KubernetesApi:
    """The API server that a configuration names.

    Args:
        client: `kubernetes.client.ApiClient`, with its configuration.
        timeout: seconds for one request, from the connection to the last byte.
    """

    def __init__(self, client: Any, timeout: float = 30.0) -> None:
        if not timeout > 0:
            raise ConfigurationError(f"a request needs more than {timeout:g} s")
        self._client, self._timeout = client, timeout
        self._base = str(client.configuration.host).rstrip("/")
        self.host = _USER.sub("//", self._base)
        bounded(client.rest_client.pool_manager)

    @classmethod
    def load(cls, kubeconfig: str = "", context: str = "", timeout: float = 30.0) -> KubernetesApi:
        """The one of this pod, or of a kubeconfig: as kubectl finds it where none is named.

        Raises:
            ConfigurationError: there is none, or it cannot be read.
        """
        configuration = kubernetes.client.Configuration()
        try:
            if not kubeconfig and not context and in_cluster():
                kubernetes.config.load_incluster_config(client_configuration=configuration)
            else:
                kubernetes.config.load_kube_config(
                    config_file=kubeconfig or None, context=context or None, client_configuration=configuration
                )
        except Exception as error:  # noqa: BLE001 - whatever the parsers of the client raise
            where = kubeconfig or "KUBECONFIG, ~/.kube/config or the service account of a pod"
            tells = isinstance(
                error, kubernetes.config.ConfigException | OSError
            )  # others may quote what is in the file
            why = one_line(_USER.sub("//", str(error))) if tells else type(error).__name__
            raise ConfigurationError(f"no configuration for Kubernetes ({where}): {why}") from None
        try:
            client = kubernetes.client.ApiClient(configuration)
        except Exception:  # noqa: BLE001 - addresses may hold a password, and errors quote them
            raise ConfigurationError(
                "the configuration for Kubernetes names a proxy or files that cannot be used"
            ) from None
        return cls(client, timeout)

    def find(self, path: str, query: Mapping[str, str] | None = None) -> dict[str, Any] | None:
        """An object; None where there is none of this name.

        Raises:
            ClusterError: refused, unreachable, or not understood.
        """
        try:
            return self.ask("GET", path, query=query)
        except Refused as error:
            if (error.status, error.reason) == (ABSENT, "NotFound"):
                return None
            raise  # also a 404 of something that is no API server, or does not know this kind of object

    def all(self, path: str, query: Mapping[str, str] | None = None) -> Iterator[dict[str, Any]]:
        """Every object of a collection, page by page.

        Raises:
            ClusterError: as for `find`; also where the collection changed so fast that a page was lost.
        """
        more: dict[str, str] = {}
        for _ in range(_PAGES):
            found = self.ask("GET", path, query={**(query or {}), "limit": str(_PAGE), **more})
            items = found.get("items")
            if not isinstance(items, list):
                raise ClusterError(f"GET {self.host}{path} answered no list")
            yield from (one for one in items if isinstance(one, dict))
            meta = found.get("metadata")
            token = meta.get("continue") if isinstance(meta, dict) else ""
            if not token:
                return
            more = {"continue": str(token)}
        raise ClusterError(f"GET {self.host}{path} answered more than {_PAGES} pages")

    def ask(
        self, method: str, path: str, body: Any = None, *, query: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """One request, made once; what was answered.

        Args:
            method: of HTTP; a PATCH is a strategic merge patch.
            path: from `/api` on.
            body: JSON values.
            query: parameters.

        Raises:
            ClusterError: refused (`Refused`), unreachable, not in time, or no JSON.
        """
        what = f"{method} {self.host}{path}"
        headers = self._headers(what)
        if body is not None:
            headers["Content-Type"] = STRATEGIC if method == "PATCH" else "application/json"
        url = self._base + path + (f"?{urlencode(query)}" if query else "")
        try:
            status, content = self._exchange(what, method, url, headers, None if body is None else json.dumps(body))
        except urllib3.exceptions.NewConnectionError as error:  # in some versions one of the time-outs
            raise ClusterError(f"{what}: the API server cannot be reached: {_why(error)}", refused=True) from None
        except urllib3.exceptions.LocationParseError:  # it quotes the address, of a proxy perhaps, with its password
            raise ClusterError(
                f"{what}: this is no address of a server, or that of its proxy is none", refused=True
            ) from None
        except urllib3.exceptions.TimeoutError:
            raise ClusterError(f"{what} was not answered within {self._timeout:g} s") from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise ClusterError(f"{what}: the API server cannot be reached: {_why(error)}") from None
        if token := headers.get(_AUTHORIZATION, "").rpartition(" ")[2]:  # an answer may repeat what it does not like
            content = content.replace(token.encode(), b"[token]")
        try:
            answer = json.loads(content)
        except (ValueError, RecursionError):
            answer = None
        if status in _OK and isinstance(answer, dict):
            return answer
        raise _refusal(what, permission_for(method, path), status, answer)

    def _headers(self, what: str) -> dict[str, str]:
        """Of a request, with who asks; the client renews what has run out.

        Raises:
            ClusterError: the credentials cannot be had, or cannot stand in a header; they are not shown.
        """
        headers = {"Accept": "application/json", "User-Agent": COMPONENT}
        try:
            self._client.update_params_for_auth(headers, [], ["BearerToken"])
        except Exception as error:  # noqa: BLE001 - files, and plug-ins of people
            tells = isinstance(error, kubernetes.config.ConfigException | OSError)
            why = one_line(str(error)) if tells else type(error).__name__
            raise ClusterError(f"{what}: the credentials cannot be renewed: {why}", refused=True) from None
        headers = {name: str(value).strip() for name, value in headers.items()}
        if not _HEADER.fullmatch(headers.get(_AUTHORIZATION, "none")):
            raise ClusterError(f"{what}: the token of the credentials is not one word of ASCII", refused=True)
        return headers

    def _exchange(
        self, what: str, method: str, url: str, headers: dict[str, str], body: str | None
    ) -> tuple[int, bytes]:
        with Deadline(self._timeout) as deadline:
            try:
                answer = self._client.rest_client.pool_manager.request(
                    method,
                    url,
                    body=body,
                    headers=headers,
                    timeout=urllib3.Timeout(connect=min(self._timeout, 10.0), read=self._timeout),
                    retries=False,  # an act must not be repeated by a library
                    redirect=False,
                    preload_content=False,
                )
                content = _content(answer, what)
            except (urllib3.exceptions.HTTPError, OSError, ValueError):
                if not deadline.over:
                    raise
            if deadline.over:  # its end cuts what was being read
                raise ClusterError(f"{what} was not answered within {self._timeout:g} s")
        return int(answer.status), content


def _content(answer: Any, what: str) -> bytes:
    """The body of an answer."""
    try:
        content = bytearray()
        for piece in answer.stream(2**16):
            content += piece
            if len(content) > _MOST:
                raise ClusterError(f"{what} answered more than {_MOST >> 20} MiB")
    except BaseException:
        answer.close()  # what is left of the answer must not be read as the next one
        raise
    answer.release_conn()
    return bytes(content)


def in_cluster() -> bool:
    """Whether this process runs in a pod with a service account."""
    return (SERVICE_ACCOUNT / "token").is_file()


def own_namespace() -> str:
    """The namespace of this pod, or "" outside of one."""
    if told := os.environ.get("POD_NAMESPACE", ""):
        return told
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _refusal(what: str, needs: Permission, status: int, answer: Any) -> ClusterError:
    said = one_line(str(answer.get("message") or ""), 400) if isinstance(answer, dict) else ""
    reason = str(answer.get("reason") or "") if isinstance(answer, dict) else ""
    if status in _OK:
        return ClusterError(f"{what} was answered with no JSON object")
    hint = {
        401: "; who asks is not known: are the credentials still valid?",
        403: f"; what is missing is a rule ({needs})",
    }.get(status, "")
    return Refused(f"{what} was answered {status} {said or reason or 'with no word'}{hint}", status, reason)


def _why(error: BaseException) -> str:
    inner = getattr(error, "reason", None)
    return one_line(_USER.sub("//", str(inner or error))) or type(error).__name__
