"""The words of SageMaker HyperPod that more than one module needs: actions of IAM, labels, and what its messages mean.

Labels: https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-hyperpod-eks-resiliency-node-labels.html
"""

from __future__ import annotations

from typing import Final

READ_ACTIONS: Final = ("sagemaker:DescribeCluster", "sagemaker:DescribeClusterNode", "sagemaker:ListClusterNodes")
"""What looking needs."""
ACT_ACTIONS: Final = {
    "BatchReplaceClusterNodes": "sagemaker:BatchReplaceClusterNodes",
    "BatchRebootClusterNodes": "sagemaker:BatchRebootClusterNodes",
    "StartClusterHealthCheck": "sagemaker:StartClusterHealthCheck",
}
"""What acting needs, by the name of the call."""
SIMULATE: Final = "iam:SimulatePrincipalPolicy"
"""What asking about one's own permissions needs, and nothing else does. Who one is (sts:GetCallerIdentity) everybody may ask."""

HEALTH_LABEL: Final = "sagemaker.amazonaws.com/node-health-status"
CHECK_LABEL: Final = "sagemaker.amazonaws.com/deep-health-check-status"
PENDING: Final = {"replace": "UnschedulablePendingReplacement", "reboot": "UnschedulablePendingReboot"}
"""Values of the health label that ask for something; setting them is a supported way of asking."""
MARK: Final = "bitwitness.dev/health-check"
"""Annotation of a Kubernetes node: because of which incident its deep health check was asked for."""
ASKED: Final = "bitwitness.dev/health-status"
"""Annotation of a Kubernetes node: what we have set the health label to, and what it was before."""
MARKED: Final = "[deep health check asked for]"
"""The same in the reason of a Slurm node, which has no annotations."""

CHECKING: Final = "DeepHealthCheckInProgress"
RESULTS: Final = ("Passed", "Failed")
"""Values of the label of a deep health check that has ended."""
LEAVING: Final = frozenset({"Pending", "ShuttingDown", "NotFound"})
"""Statuses of a machine that ran before: it is being rebooted or exchanged."""

_CAPACITY = ("capacity", "limit exceeded", "resourcelimit", "quota", "instance limit", "reached the limit")


def lacks_capacity(message: str) -> bool:
    """Whether a failure will not heal by trying again: there is no machine to be had, or no more are allowed."""
    plain = message.lower()
    return any(word in plain for word in _CAPACITY)
