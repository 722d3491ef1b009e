"""The machines of a HyperPod cluster that is only in memory: how they are exchanged, and everything that may go wrong with it.

Its times are those of a clock that a test moves, so that a replacement of half an hour takes no time. Each request is validated as
SageMaker validates it (https://docs.aws.amazon.com/sagemaker/latest/APIReference/), which botocore does not.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from bitwitness.fleet.clusters.hyperpod_limits import CHECKS, MOST_NODES, is_instance_id
from bitwitness.fleet.clusters.hyperpod_words import CHECKING

When = Literal["before", "after"]

_ARN = "arn:aws:sagemaker:us-west-2:111122223333:cluster/abcdefghij12"
_CLUSTER = re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}")
NO_CAPACITY = "We currently do not have sufficient ml.p5.48xlarge capacity in the Availability Zone you requested"
"""What the status of a machine says that is not to be had."""


class Refusal(Exception):
    """A request is refused: `code` is what AWS calls it."""

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass
class Machine:
    """A machine of the fake.

    Attributes:
        id, group, status, message, address, launched: as SageMaker shows them.
        silicon: of which its devices are made; what comes back from repair unrepaired has the same.
        booted: how often it was booted.
        called: the address of which its name is, where that is another one; "" where it is not.
    """

    id: str
    group: str
    address: str
    launched: datetime
    silicon: str
    status: str = "Running"
    message: str = ""
    booted: int = 1
    called: str = ""

    @property
    def host(self) -> str:
        """Its private DNS name."""
        return f"ip-{(self.called or self.address).replace('.', '-')}.us-west-2.compute.internal"

    @property
    def slurm(self) -> str:
        """Its name as a node of Slurm."""
        return self.host.partition(".")[0]

    @property
    def eks(self) -> str:
        """Its name as a node of Kubernetes."""
        return f"hyperpod-{self.id}"


@dataclass
class _Faults:
    refusals: list[tuple[str, str, str]] = field(default_factory=list)
    nodes: dict[str, list[str]] = field(default_factory=dict)
    kill: tuple[When, int, int] | None = None
    capacity: str = ""
    fails_check: bool = False


class World:
    """The machines of a cluster.

    Args:
        groups: names of instance groups, and how many machines each has.
        clock: the time.
        orchestrator: `eks` or `slurm`.
        name: of the cluster.
        recovery: its NodeRecovery, `Automatic` or `None`.
        continuous: whether its provisioning mode is Continuous, which is what shows events.

    Attributes:
        machines: by id, those that there are now.
        done: `replace` or `reboot`, and to which machine, of everything that was done, in order.
        going, coming: how long a machine takes to go, and the next one to come after that.
        lag: how long a machine that is to go is shown as it was.
        check_takes: how long a deep health check takes.
        same_silicon: whether what takes a machine's place is made of the same silicon.
        denied: actions of IAM that are refused, e.g. `sagemaker:BatchReplaceClusterNodes`.
        is_away: whether nothing is answered.
        went, came, rebooted: called with a machine when it is gone, runs, or was booted anew: what a scheduler would notice.
        page: most machines of one answer to ListClusterNodes.
        say: what is answered to every request in place of an answer, as it is; "" for nothing.
    """

    def __init__(
        self,
        groups: Mapping[str, int],
        clock: Callable[[], datetime],
        *,
        orchestrator: Literal["eks", "slurm"] = "eks",
        name: str = "pod",
        recovery: str = "Automatic",
        continuous: bool = True,
    ) -> None:
        if not _CLUSTER.fullmatch(name):
            raise ValueError(f"no name of a cluster: {name!r}")
        self.name, self.arn, self.groups, self.orchestrator = name, _ARN, dict(groups), orchestrator
        self.recovery, self.continuous, self.status = recovery, continuous, "InService"
        self.going, self.coming, self.lag = timedelta(minutes=2), timedelta(minutes=25), timedelta(0)
        self.check_takes = timedelta(hours=1)
        self.say = ""
        self.same_silicon, self.is_away, self.page = False, False, MOST_NODES * 4
        self.denied: set[str] = set()
        self.machines: dict[str, Machine] = {}
        self.done: list[tuple[str, str]] = []
        self.went: Callable[[Machine], object] = _nothing
        self.came: Callable[[Machine], object] = _nothing
        self.rebooted: Callable[[Machine], object] = _nothing
        self._clock, self._lock, self._made = clock, threading.RLock(), 0
        self._faults, self._counts, self._bodies = _Faults(), Counter[str](), list[tuple[str, dict[str, Any]]]()
        self._due: list[tuple[datetime, int, Callable[[], None]]] = []
        self._events: list[dict[str, Any]] = []
        self._order = 0
        for group, count in groups.items():
            for _ in range(count):
                self._make(group, clock() - timedelta(days=30))

    # What a test tells and asks ----------------------------------------------------------------------------------------

    def refuse(self, code: str, times: int = 1, operation: str = "", message: str = "as the test says") -> None:
        """Refuse the next requests: `ThrottlingException`, `ResourceLimitExceeded`, `InternalFailure`, ..."""
        with self._lock:
            self._faults.refusals += [(code, operation, message)] * times

    def fail(self, machine: str, code: str, times: int = 1) -> None:
        """Do nothing to a machine in the next Batch calls, and say so within a success."""
        with self._lock:
            self._faults.nodes.setdefault(machine, []).extend([code] * times)

    def lack_capacity(self, message: str = NO_CAPACITY) -> None:
        """From now on no machine comes in the place of one that goes; "" for: machines come again."""
        with self._lock:
            self._faults.capacity = message

    def fail_checks(self) -> None:
        """From now on deep health checks fail, so that the machine is replaced."""
        with self._lock:
            self._faults.fails_check = True

    def kill_caller(self, when: When, process: int, call: int = 1) -> None:
        """End a process when the next but `call - 1` changing request comes: before it is done, or after."""
        with self._lock:
            self._faults.kill = (when, call, process)

    def count(self, operation: str) -> int:
        """How many requests there were of a kind, refused ones included."""
        with self._lock:
            return self._counts[operation]

    @property
    def requests(self) -> int:
        """How many requests there were in all."""
        with self._lock:
            return sum(self._counts.values())

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """The bodies of all requests of a kind, in order."""
        with self._lock:
            return [body for name, body in self._bodies if name == operation]

    def now(self) -> list[Machine]:
        """The machines now, in the order in which they were made."""
        with self._lock:
            self._advance()
            return list(self.machines.values())

    # What the server asks ----------------------------------------------------------------------------------------------

    def note(self, operation: str) -> bool:
        """Count a request."""
        with self._lock:
            self._counts[operation] += 1
        return True

    def killing(self, operation: str) -> tuple[When, int] | None:
        """Whether the one who asks is to be ended, when, and which process that is."""
        if not operation.startswith(("Batch", "Start")):
            return None
        with self._lock:
            if self._faults.kill is None:
                return None
            when, call, process = self._faults.kill
            self._faults.kill = (when, call - 1, process) if call > 1 else None
            return (when, process) if call <= 1 else None

    def answer(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            Refusal: refused.
        """
        with self._lock:
            self._advance()
            self.note(operation)
            self._bodies.append((operation, body))
            self._refuse(operation)
            if body.get("ClusterName") not in (self.name, self.arn):
                raise Refusal("ResourceNotFound", f"Cluster {body.get('ClusterName')} was not found")
            answers: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
                "DescribeCluster": self._describe,
                "DescribeClusterNode": self._node,
                "ListClusterNodes": self._list,
                "ListClusterEvents": self._list_events,
                "BatchReplaceClusterNodes": lambda body: self._batch(body, self._replace),
                "BatchRebootClusterNodes": lambda body: self._batch(body, self._reboot),
                "StartClusterHealthCheck": self._check,
            }
            if operation not in answers:
                raise Refusal("UnknownOperationException", f"{operation} is not faked")
            return answers[operation](body)

    def _refuse(self, operation: str) -> None:
        if f"sagemaker:{operation}" in self.denied:
            raise Refusal(
                "AccessDeniedException",
                f"User: fake is not authorized to perform: sagemaker:{operation} on resource: {_ARN}",
            )
        for place, (code, only, message) in enumerate(self._faults.refusals):
            if only in ("", operation):
                del self._faults.refusals[place]
                raise Refusal(code, message, 500 if code == "InternalFailure" else 400)

    # Time --------------------------------------------------------------------------------------------------------------

    def _at(self, when: datetime, do: Callable[[], None]) -> None:
        self._order += 1
        self._due.append((when, self._order, do))

    def _advance(self) -> None:
        """Everything that has happened until now, in order."""
        while due := sorted(one for one in self._due if one[0] <= self._clock()):
            self._due.remove(due[0])
            due[0][2]()

    def _make(self, group: str, launched: datetime, address: str = "", silicon: str = "") -> Machine:
        self._made += 1
        made = Machine(
            f"i-{self._made:017x}",
            group,
            address or f"10.0.{self._made // 250}.{self._made % 250 + 1}",
            launched,
            silicon or f"silicon-{self._made}",
        )
        self.machines[made.id] = made
        return made

    # Answers -----------------------------------------------------------------------------------------------------------

    def _describe(self, body: dict[str, Any]) -> dict[str, Any]:
        groups = []
        for name, target in self.groups.items():
            current = sum(one.group == name and one.status == "Running" for one in self.machines.values())
            kind = "Controller" if name.startswith("controller") else "Login" if name.startswith("login") else "Compute"
            slurm = {"SlurmConfig": {"NodeType": kind}} if self.orchestrator == "slurm" else {}
            groups.append({"InstanceGroupName": name, "TargetCount": target, "CurrentCount": current, **slurm})
        eks = {"Eks": {"ClusterArn": "arn:aws:eks:us-west-2:111122223333:cluster/k"}}
        return {
            "ClusterArn": _ARN,
            "ClusterName": self.name,
            "ClusterStatus": self.status,
            "InstanceGroups": groups,
            "NodeRecovery": self.recovery,
            **({"Orchestrator": eks} if self.orchestrator == "eks" else {}),
            **({"NodeProvisioningMode": "Continuous"} if self.continuous else {}),
        }

    def _summary(self, machine: Machine) -> dict[str, Any]:
        status = {"Status": machine.status, **({"Message": machine.message} if machine.message else {})}
        return {
            "InstanceGroupName": machine.group,
            "InstanceId": machine.id,
            "InstanceType": "ml.p5.48xlarge",
            "LaunchTime": machine.launched.astimezone(UTC).timestamp(),
            "InstanceStatus": status,
            "PrivateDnsHostname": machine.host,
        }

    def _node(self, body: dict[str, Any]) -> dict[str, Any]:
        wanted = str(body.get("NodeId", ""))
        if not is_instance_id(wanted):
            raise Refusal("ValidationException", f"Value {wanted!r} at 'nodeId' failed to satisfy constraint")
        machine = self.machines.get(wanted)
        if machine is None:
            raise Refusal("ResourceNotFound", f"Instance with id {wanted} was not found in the cluster")
        return {"NodeDetails": {**self._summary(machine), "PrivatePrimaryIp": machine.address}}

    def _list(self, body: dict[str, Any]) -> dict[str, Any]:
        most = body.get("MaxResults", 10)
        if not 1 <= most <= 100:
            raise Refusal("ValidationException", "Value at 'maxResults' failed to satisfy constraint")
        start, count = int(body.get("NextToken") or 0), min(most, self.page)
        listed = list(self.machines.values())
        more = {"NextToken": str(start + count)} if start + count < len(listed) else {}
        return {"ClusterNodeSummaries": [self._summary(one) for one in listed[start : start + count]], **more}

    def _list_events(self, body: dict[str, Any]) -> dict[str, Any]:
        if not self.continuous:
            raise Refusal("ValidationException", "ListClusterEvents needs NodeProvisioningMode Continuous")
        node = body.get("NodeId")
        return {"Events": [one for one in reversed(self._events) if node in (None, one.get("InstanceId"))][:100]}

    def _event(self, machine: Machine, text: str) -> None:
        number = len(self._events) + 1
        self._events.append(
            {
                "EventId": f"00000000-0000-4000-8000-{number:012x}",
                "ClusterArn": _ARN,
                "ClusterName": self.name,
                "InstanceGroupName": machine.group,
                "InstanceId": machine.id,
                "ResourceType": "Instance",
                "EventTime": self._clock().astimezone(UTC).timestamp(),
                "Description": text,
            }
        )

    # Acts --------------------------------------------------------------------------------------------------------------

    def _batch(self, body: dict[str, Any], act: Callable[[Machine], None]) -> dict[str, Any]:
        nodes: Sequence[str] = body.get("NodeIds") or ()
        if body.get("NodeLogicalIds") and not self.continuous:
            raise Refusal("ValidationException", "NodeLogicalIds need NodeProvisioningMode Continuous")
        if not 1 <= len(nodes) <= MOST_NODES:
            raise Refusal("ValidationException", f"Value at 'nodeIds' must have between 1 and {MOST_NODES} members")
        if wrong := [one for one in nodes if not is_instance_id(one)]:
            raise Refusal("ValidationException", f"Value {wrong[0]!r} at 'nodeIds' failed to satisfy constraint")
        successful, failed = [], []
        for node in nodes:
            code = self._code(node)
            if code:
                failed.append({"NodeId": node, "ErrorCode": code, "Message": f"{node}: {code}"})
            else:
                self.done.append((act.__name__.removeprefix("_"), node))
                act(self.machines[node])
                successful.append(node)
        return {"Successful": successful, "Failed": failed}

    def _code(self, node: str) -> str:
        """Why nothing is done to a machine; "" where something is."""
        if told := self._faults.nodes.get(node):
            return told.pop(0)
        machine = self.machines.get(node)
        if machine is None:
            return "InstanceIdNotFound"
        if self.orchestrator == "slurm" and machine.group.startswith("controller"):
            return "InvalidInstanceStatus"
        return "" if machine.status in ("Running", "Failure") else "InvalidInstanceStatus"

    def _replace(self, machine: Machine) -> None:
        now = self._clock()
        self._event(machine, "replacement was asked for")
        begins, gone = now + self.lag, now + self.lag + self.going

        def goes() -> None:
            machine.status = "ShuttingDown"

        def is_gone() -> None:
            self.machines.pop(machine.id, None)
            self._event(machine, "the machine is gone")
            self.went(machine)
            silicon = machine.silicon if self.same_silicon else ""
            new = self._make(machine.group, gone, machine.address, silicon)
            new.status = "Pending"
            self._at(gone + self.coming, lambda: self._comes(new))

        if self.lag:
            self._at(begins, goes)
        else:
            goes()
        self._at(gone, is_gone)

    def _comes(self, machine: Machine) -> None:
        if self._faults.capacity:
            machine.status, machine.message = "Failure", self._faults.capacity
            self._event(machine, self._faults.capacity)
            self._at(self._clock() + self.coming, lambda: self._comes(machine))
            return
        machine.status, machine.message = "Running", ""
        self._event(machine, "the machine runs")
        self.came(machine)

    def _reboot(self, machine: Machine) -> None:
        self._event(machine, "reboot was asked for")

        def booted() -> None:
            machine.booted += 1
            self.rebooted(machine)

        self._at(self._clock() + self.lag + timedelta(minutes=2), booted)

    def _check(self, body: dict[str, Any]) -> dict[str, Any]:
        configurations = body.get("DeepHealthCheckConfigurations") or ()
        for one in configurations:
            if one["InstanceGroupName"] not in self.groups:
                raise Refusal("ValidationException", f"there is no instance group {one['InstanceGroupName']}")
            if not set(one["DeepHealthChecks"]) <= set(CHECKS):
                raise Refusal("ValidationException", "Value at 'deepHealthChecks' failed to satisfy constraint")
            for node in one.get("InstanceIds") or ():
                machine = self.machines.get(node)
                if machine is None or machine.group != one["InstanceGroupName"] or machine.status != "Running":
                    raise Refusal("ValidationException", f"{node} is no running machine of {one['InstanceGroupName']}")
        for one in configurations:
            wanted = one.get("InstanceIds") or [
                m.id for m in self.machines.values() if m.group == one["InstanceGroupName"]
            ]
            for node in wanted:
                self._begin_check(self.machines[node])
        return {"ClusterArn": _ARN}

    def _begin_check(self, machine: Machine) -> None:
        machine.status = CHECKING

        def ends() -> None:
            machine.status = "Running"
            self._event(machine, f"deep health check {'failed' if self._faults.fails_check else 'passed'}")
            if self._faults.fails_check and self.recovery == "Automatic":
                self._replace(machine)

        self._at(self._clock() + self.check_takes, ends)


def _nothing(machine: Machine) -> None:
    """Nobody notices."""
