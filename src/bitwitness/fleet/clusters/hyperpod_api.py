"""SageMaker's API, through boto3: the one place that imports it, and that turns what it raises into errors of ours.

Requests that change something are sent once: botocore would repeat them after a time-out, and a second reboot would hit a node
that has just come back. Reads are tried twice. Every request has a time-out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bitwitness.errors import ClusterError, ConfigurationError, MissingExtra
from bitwitness.fleet.clusters import hyperpod_limits as limits
from bitwitness.fleet.clusters.base import Call, one_line
from bitwitness.fleet.clusters.hyperpod_names import Instance, instance_of
from bitwitness.fleet.clusters.hyperpod_words import ACT_ACTIONS, SIMULATE

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectTimeoutError,
        CredentialRetrievalError,
        EndpointConnectionError,
        NoCredentialsError,
        PartialCredentialsError,
        ProfileNotFound,
        ReadTimeoutError,
        SSOError,
        TokenRetrievalError,
    )
except ModuleNotFoundError as error:  # pragma: no cover - tested with the base install
    raise MissingExtra("SageMaker is asked through boto3: pip install 'bitwitness[aws]'") from error

_BOTO: Any = boto3
"""Its types name each of some four hundred services, and none of what these answer."""
_CONNECT = 10.0
_PAGES = 1000
"""Of 100 machines each, after which a list is taken for one without an end."""
_THROTTLED = frozenset(
    {"ThrottlingException", "Throttling", "TooManyRequestsException", "RequestLimitExceeded", "ThrottledException"}
)
_DENIED = frozenset({"AccessDeniedException", "AccessDenied", "UnauthorizedOperation"})
_NOT_FOUND = frozenset({"ResourceNotFound", "ResourceNotFoundException"})
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "UnrecognizedClientException", "InvalidClientTokenId"})
_WAIT = {
    "InvalidInstanceStatus": "its status does not allow it now; it is tried again",
    "InstanceIdInUse": "another operation has it now; it is tried again",
    "InternalServerError": "SageMaker failed; it is tried again",
    "InstanceIdNotFound": "the cluster has no instance of this id",
}
_SURE = frozenset(_WAIT) - {"InternalServerError"}
_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
)


@dataclass(frozen=True, slots=True)
class Group:
    """An instance group.

    Attributes:
        name: of it.
        target: how many machines it is to have.
        current: how many it has.
        role: on Slurm `Controller`, `Login` or `Compute`; "" where it is not told.
    """

    name: str
    target: int
    current: int
    role: str = ""


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """What DescribeCluster says of a cluster.

    Attributes:
        arn, name: of it.
        status: `InService`, `Updating`, ...
        orchestrator: `eks` or `slurm`.
        recovery: `Automatic` or `None`; "" where it is not told.
        provisioning: `Continuous`, or "".
        groups: its instance groups.
    """

    arn: str
    name: str
    status: str
    orchestrator: str
    recovery: str
    provisioning: str
    groups: tuple[Group, ...]


class SageMakerApi:
    """One HyperPod cluster, as SageMaker's API knows it.

    Args:
        name: of the cluster, or its ARN.
        region: of AWS; else that of the environment or the profile.
        profile: of the configuration files of AWS.
        endpoint_url: where the API is, for tests and VPC endpoints; the environment's AWS_ENDPOINT_URL_SAGEMAKER counts too.
        timeout: seconds for one request.
        arn: of the cluster, where it is known; only for what errors say.

    Raises:
        ConfigurationError: a name that cannot be, no region, or no such profile.
    """

    def __init__(
        self,
        name: str,
        *,
        region: str = "",
        profile: str = "",
        endpoint_url: str = "",
        timeout: float = 30.0,
        arn: str = "",
    ) -> None:
        self.name = limits.cluster_name(name)
        self._arn = arn or (name if name.startswith("arn:") else "")
        self._config: dict[str, Any] = {"connect_timeout": min(_CONNECT, timeout), "read_timeout": timeout}
        self._where = {"endpoint_url": limits.address(endpoint_url)} if endpoint_url else {}
        try:
            self._session = _BOTO.session.Session(region_name=region or None, profile_name=profile or None)
        except ProfileNotFound as error:
            raise ConfigurationError(f"cluster.profile: {error}") from error
        except (BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"AWS cannot be set up: {one_line(str(error), 300)}") from error
        self.region = str(self._session.region_name or "")
        if not self.region:
            raise ConfigurationError(
                "no region of AWS is known: set cluster.region, or AWS_REGION, or that of a profile"
            )

    @cached_property
    def _reads(self) -> Any:
        return self._client("sagemaker", 2, **self._where)

    @cached_property
    def _acts(self) -> Any:
        return self._client("sagemaker", 1, **self._where)

    def _client(self, service: str, attempts: int = 2, **where: str) -> Any:
        """A client of a service that sends a request so often at most."""
        config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, **self._config)
        try:
            return self._session.client(service, config=config, **where)
        except (BotoCoreError, ValueError) as error:
            raise ClusterError(f"{service} cannot be asked: {one_line(str(error), 300)}", refused=True) from error

    @property
    def arn(self) -> str:
        """Of the cluster, as exactly as it is known."""
        return self._arn or f"arn:aws:sagemaker:{self.region or '*'}:*:cluster/* (cluster {self.name})"

    # Reads ------------------------------------------------------------------------------------------------------------

    def instance(self, instance: str) -> Instance | None:
        """A machine now; None where the cluster does not have it.

        Raises:
            ClusterError: nobody can say now.
        """
        try:
            said = self._ask(self._reads, "DescribeClusterNode", NodeId=limits.instance_id(instance))
        except (_NotFound, _Invalid):
            # Whether the machine or the cluster is not there, only the list of machines tells for sure.
            return next((one for one in self.instances() if one.id == instance), None)
        with _understood(f"sagemaker DescribeClusterNode of {instance}"):
            found = instance_of(said["NodeDetails"])
        if not found.launched:  # which the list has to tell, and this need not
            launched = next((one.launched for one in self.instances() if one.id == found.id), "")
            found = replace(found, launched=launched)
        if found.id != instance:
            raise ClusterError(
                f"sagemaker DescribeClusterNode of {instance}: the answer is about {found.id or 'nothing'}"
            )
        return found

    def instances(self) -> list[Instance]:
        """All machines of the cluster.

        Raises:
            ClusterError: nobody can say now.
        """
        found: list[Instance] = []
        more: dict[str, Any] = {}
        tokens: set[str] = set()
        for _ in range(_PAGES):
            said = self._ask(self._reads, "ListClusterNodes", MaxResults=100, **more)
            with _understood("sagemaker ListClusterNodes"):
                found += [instance_of(one) for one in said["ClusterNodeSummaries"]]  # {} is no empty list
                token = str(said.get("NextToken") or "")
            if not token:
                return found
            if token in tokens:
                break
            tokens.add(token)
            more = {"NextToken": token}
        raise ClusterError(f"sagemaker ListClusterNodes: the list does not end, after {len(found)} machines")

    def cluster(self) -> ClusterInfo:
        """The cluster now.

        Raises:
            ClusterError: nobody can say now.
        """
        said = self._ask(self._reads, "DescribeCluster")
        with _understood("sagemaker DescribeCluster"):
            arn, orchestrator = str(said["ClusterArn"]), said.get("Orchestrator") or {}
            groups = tuple(
                Group(
                    str(one.get("InstanceGroupName") or ""),
                    int(one.get("TargetCount") or 0),
                    int(one.get("CurrentCount") or 0),
                    str((one.get("SlurmConfig") or {}).get("NodeType") or ""),
                )
                for one in said.get("InstanceGroups") or ()
            )
        self._arn = arn
        return ClusterInfo(
            self._arn,
            str(said.get("ClusterName") or ""),
            str(said.get("ClusterStatus") or ""),
            "eks" if "Eks" in orchestrator else "slurm",  # clusters from before there was a choice tell none
            str(said.get("NodeRecovery") or ""),
            str(said.get("NodeProvisioningMode") or ""),
            groups,
        )

    # Acts -------------------------------------------------------------------------------------------------------------

    def carry_out(self, call: Call) -> str:
        """Make one of our requests, once; what was answered.

        Raises:
            ClusterError: refused, also where the answer is a success and says that it did nothing.
            ConfigurationError: it is no request of ours.
        """
        operation, body = check_call(call, self.name)
        rest = {key: value for key, value in body.items() if key != "ClusterName"}
        if operation == "StartClusterHealthCheck":
            self._ask(self._acts, operation, **rest)
            return "deep health check asked for"
        nodes = rest["NodeIds"]
        with _understood(f"sagemaker {operation}"):
            answer = limits.batch(lambda some: self._ask(self._acts, operation, NodeIds=some), nodes)
        if answer.failed:
            raise NotDone(operation, answer)
        return f"{operation}: {', '.join(answer.successful)}"

    # What the one who asks may do -------------------------------------------------------------------------------------

    def caller(self) -> str:
        """The ARN of whoever asks.

        Raises:
            ClusterError: nobody can say now.
        """
        client = self._client("sts")
        return str(self._guarded("sts:GetCallerIdentity", client.get_caller_identity).get("Arn") or "")

    def simulate(self, principal: str, actions: Sequence[str], resource: str) -> dict[str, str]:
        """What the policies of a principal say to actions: `allowed`, `implicitDeny` or `explicitDeny`.

        Raises:
            ClusterError: nobody can say, which is usual: it needs a permission of its own.
        """
        client = self._client("iam")

        def ask() -> Mapping[str, Any]:
            said: Mapping[str, Any] = client.simulate_principal_policy(
                PolicySourceArn=principal, ActionNames=list(actions), ResourceArns=[resource]
            )
            return said

        results = self._guarded(SIMULATE, ask).get("EvaluationResults") or ()
        with _understood(SIMULATE):
            return {str(one.get("EvalActionName")): str(one.get("EvalDecision")) for one in results}

    # One request ------------------------------------------------------------------------------------------------------

    def _ask(self, client: Any, operation: str, **body: Any) -> Mapping[str, Any]:
        method = _method(client, operation)
        return self._guarded(f"sagemaker:{operation}", lambda: method(ClusterName=self.name, **body))

    def _guarded(self, action: str, ask: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Ask, and turn whatever botocore raises into an error that says what to do."""
        what = action.replace(":", " ", 1)
        try:
            said = ask()
        except ClientError as error:
            raise self._refusal(action, what, error) from error
        except _CREDENTIALS as error:
            raise ClusterError(
                f"{what}: there are no credentials of AWS that can be used ({one_line(str(error))}): give the controller a role "
                "(IRSA, Pod Identity, an instance profile), or AWS_PROFILE",
                refused=True,
            ) from error
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            seconds = self._config["read_timeout"]
            raise ClusterError(
                f"{what} was not answered within {seconds:g} s; whether it was done is seen by looking"
            ) from error
        except EndpointConnectionError as error:
            raise ClusterError(
                f"{what}: SageMaker cannot be reached: {one_line(str(error), 300)}", refused=True
            ) from error
        except (BotoCoreError, OSError, ValueError) as error:
            raise ClusterError(f"{what}: {one_line(str(error), 300) or type(error).__name__}") from error
        except Exception as error:  # botocore's parsers raise what they stumble over
            raise ClusterError(f"{what}: the answer is not understood: {one_line(repr(error), 300)}") from error
        if not isinstance(said, Mapping):
            raise ClusterError(f"{what}: the answer is not understood: {said!r:.100}")
        return said

    def _refusal(self, action: str, what: str, error: Any) -> ClusterError:
        about = error.response.get("Error") or {}
        code, message = str(about.get("Code") or ""), one_line(str(about.get("Message") or ""), 300)
        if code in _DENIED:
            return Denied(f"{what} is not allowed: the role needs {action} on {self.arn}. AWS says: {message}", action)
        if code in _THROTTLED:
            return ClusterError(f"{what} was throttled by AWS ({code}): it is asked again later", refused=True)
        if code in _NOT_FOUND:
            return _NotFound(
                f"{what}: {message or 'not found'} (cluster {self.name}, region {self.region})", refused=True
            )
        if code == "ValidationException":
            return _Invalid(f"{what} was refused: {code}: {message or 'no reason given'}", refused=True)
        if code in _EXPIRED:
            return ClusterError(
                f"{what}: the credentials of AWS are not valid or have expired ({code}): renew them", refused=True
            )
        status = int((error.response.get("ResponseMetadata") or {}).get("HTTPStatusCode") or 0)
        said = f"{what} was refused: {code or 'no code'}: {message or 'no reason given'}"
        return ClusterError(said, refused=400 <= status < 500)  # what failed on its side may have been done


@contextmanager
def _understood(what: str) -> Iterator[None]:
    """An answer is read: one that is another one than AWS documents is an error of the cluster's."""
    try:
        yield
    except (AttributeError, TypeError, LookupError, ArithmeticError) as error:
        raise ClusterError(f"{what}: the answer is not understood: {one_line(repr(error), 300)}") from error


class Denied(ClusterError):
    """A permission is missing.

    Attributes:
        action: of IAM.
    """

    def __init__(self, message: str, action: str) -> None:
        super().__init__(message, refused=True)
        self.action = action


class NotDone(ClusterError):
    """A Batch call succeeded and did nothing to some nodes.

    Attributes:
        answer: what became of each.
    """

    def __init__(self, operation: str, answer: limits.Answer) -> None:
        self.answer = answer
        each = "; ".join(
            f"{one.node}: {one.code or 'no code'}: {one_line(one.message)} ({_WAIT.get(one.code, 'not done')})"
            for one in answer.failed
        )
        done = f"; done: {', '.join(answer.successful)}" if answer.successful else ""
        sure = not answer.successful and all(one.code in _SURE for one in answer.failed)
        super().__init__(f"sagemaker {operation} did nothing to {each}{done}", refused=sure)

    @property
    def gone(self) -> bool:
        """Whether all that failed is that the machines are not there."""
        return all(one.code == "InstanceIdNotFound" for one in self.answer.failed)


class _NotFound(ClusterError):
    """Something is not there; which, only the message says."""


class _Invalid(ClusterError):
    """The request is not one that can be answered, e.g. because nothing has this id."""


def check_call(call: Call, cluster: str) -> tuple[str, dict[str, Any]]:
    """The operation and the body of a request of ours.

    Raises:
        ConfigurationError: it is none, or it is about another cluster, or SageMaker would refuse it.
    """
    body = call.body
    if len(call.words) != 2 or call.words[0] != "sagemaker" or call.words[1] not in ACT_ACTIONS:
        raise ConfigurationError(f"not a request to SageMaker of ours: {call}")
    operation = call.words[1]
    wanted = {"DeepHealthCheckConfigurations"} if operation == "StartClusterHealthCheck" else {"NodeIds"}
    if not isinstance(body, Mapping) or set(body) != {"ClusterName", *wanted} or body["ClusterName"] != cluster:
        raise ConfigurationError(f"not a request to SageMaker about {cluster}: {call}")
    if operation == "StartClusterHealthCheck":
        for one in body["DeepHealthCheckConfigurations"]:
            limits.group_name(one["InstanceGroupName"])
            limits.checks(one["DeepHealthChecks"])
            if not one.get("InstanceIds"):  # absent means the whole group
                raise ConfigurationError(f"a deep health check without an instance is one of a whole group: {call}")
            for instance in one["InstanceIds"]:
                limits.instance_id(instance)
    else:
        for instance in body["NodeIds"]:
            limits.instance_id(instance)
        if not body["NodeIds"]:
            raise ConfigurationError(f"a request without any instance is refused by SageMaker: {call}")
    return operation, dict(body)


def _method(client: Any, operation: str) -> Callable[..., Mapping[str, Any]]:
    names: Mapping[str, str] = client.meta.method_to_api_mapping
    method = next(name for name, api in names.items() if api == operation)
    found: Callable[..., Mapping[str, Any]] = getattr(client, method)
    return found
