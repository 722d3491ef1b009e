"""One file a cluster, behind one small interface: look at a node, say what would be done, do it, look again."""

from bitwitness.fleet.clusters.base import Act as Act
from bitwitness.fleet.clusters.base import Call as Call
from bitwitness.fleet.clusters.base import Census as Census
from bitwitness.fleet.clusters.base import Cluster as Cluster
from bitwitness.fleet.clusters.base import JobState as JobState
from bitwitness.fleet.clusters.base import NodeState as NodeState
from bitwitness.fleet.clusters.fake import FakeCluster as FakeCluster
