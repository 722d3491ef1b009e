"""What each page of the console says, as plain data: the contract between the database, the pages and their JSON twins.

They lie apart from both because three things must never differ: what a person reads, what a program reads, and what was
imported. A page is made by `store.queries`, drawn by `web`, and its JSON twin is the same record, field by field. An
*unattributed* incident has a status of its own in every one of them: it is counted apart, and names nobody.
"""

from bitwitness.store.pages.drills import CheckTally as CheckTally
from bitwitness.store.pages.drills import DrillRow as DrillRow
from bitwitness.store.pages.drills import DrillsPage as DrillsPage
from bitwitness.store.pages.fleet import FleetPage as FleetPage
from bitwitness.store.pages.fleet import NodePage as NodePage
from bitwitness.store.pages.fleet import NodeRow as NodeRow
from bitwitness.store.pages.fleet import NodeState as NodeState
from bitwitness.store.pages.fleet import Stay as Stay
from bitwitness.store.pages.fleet import StrikeRow as StrikeRow
from bitwitness.store.pages.incident import IncidentPage as IncidentPage
from bitwitness.store.pages.incident import Seen as Seen
from bitwitness.store.pages.rows import AuditRow as AuditRow
from bitwitness.store.pages.rows import Coverage as Coverage
from bitwitness.store.pages.rows import IncidentRow as IncidentRow
from bitwitness.store.pages.rows import IncidentStatus as IncidentStatus
from bitwitness.store.pages.rows import Judgement as Judgement
from bitwitness.store.pages.rows import Place as Place
from bitwitness.store.pages.rows import Problem as Problem
from bitwitness.store.pages.rows import ProposalRow as ProposalRow
from bitwitness.store.pages.rows import RunRow as RunRow
from bitwitness.store.pages.rows import RunState as RunState
from bitwitness.store.pages.runs import Cell as Cell
from bitwitness.store.pages.runs import CheckCost as CheckCost
from bitwitness.store.pages.runs import CheckpointRow as CheckpointRow
from bitwitness.store.pages.runs import Found as Found
from bitwitness.store.pages.runs import LedgerMap as LedgerMap
from bitwitness.store.pages.runs import Mark as Mark
from bitwitness.store.pages.runs import RunPage as RunPage
from bitwitness.store.pages.runs import RunsPage as RunsPage
from bitwitness.store.pages.runs import Series as Series
from bitwitness.store.pages.runs import Twin as Twin
