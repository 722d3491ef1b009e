"""The tables of the console's database, and nothing else: the only place that knows them, for SQLite and PostgreSQL alike.

They are made for reading: whatever a page shows at a glance (coverage, costs, counts of incidents) is kept beside what it was
counted from, so that no page ever looks at ten million observations. Files are the truth: all of this can be made again from
the run directories and the states of the fleet, except of what was pruned, and of files that are gone.

A change of any table is a migration (`store/migrations`); a test compares the two. Times are text, UTC in ISO 8601, as the
writers of the files had them, except where a comment says *our clock*: that is the importer's.

An *unattributed* incident has candidates and no named rank, whatever its file claims: `incident_ranks.role` says which.
"""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, ForeignKey, Index, MetaData, Table, UniqueConstraint

_NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}

metadata = MetaData(naming_convention=_NAMES)

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""64 bits in both; SQLite counts up by itself only in a column that is called INTEGER."""
REAL: sa.Double[float] = sa.Double()
TEXT = sa.Text()


class Json(sa.types.TypeDecorator[Any]):
    """JSON as text, read as Python: neither database's own type takes all that a file may hold, and no query looks inside."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str | None:
        """Python to text. What is no JSON value was refused before (`importing_values`)."""
        return None if value is None else json.dumps(value, separators=(",", ":"))

    def process_result_value(self, value: Any, dialect: sa.Dialect) -> Any:
        """Text to Python."""
        return None if value is None else json.loads(value)


def _text(name: str, **more: Any) -> Column[Any]:
    return Column(name, TEXT, nullable=False, server_default="", **more)


def _count(name: str, default: int = 0) -> Column[Any]:
    return Column(name, BIG, nullable=False, server_default=str(default))


def _flag(name: str) -> Column[Any]:
    return Column(name, sa.Boolean, nullable=False, server_default=sa.false())


def _key() -> Column[Any]:
    return Column("id", BIG, primary_key=True)


def _of(table: str, *, primary: bool = False, nullable: bool = False) -> Column[Any]:
    return Column(
        f"{table.removesuffix('s')}_id",
        BIG,
        ForeignKey(f"{table}.id", ondelete="CASCADE"),
        primary_key=primary,
        nullable=nullable,
        autoincrement=False if primary else "auto",
    )


meta = Table(
    "meta",
    metadata,
    Column("name", TEXT, primary_key=True),
    _count("number"),
    _text("text"),
)
"""What is known of the database itself. `change`: its number goes up with every import that changed something."""

# Runs -----------------------------------------------------------------------------------------------------------------

runs = Table(
    "runs",
    metadata,
    _key(),
    _text("place"),  # digest of `path`: a path may be longer than an index of PostgreSQL takes
    _text("path"),
    _text("name"),  # of the directory
    _text("run"),  # id of run.json, "" where it has none
    _flag("current"),  # whether this run is the one that lies at `path` now; false: replaced by another
    _flag("missing"),  # whether the directory was gone when it was looked for last
    _text("job"),  # of the scheduler
    _text("started"),
    _text("seen"),  # newest time in any of its files, by its writers' clocks
    _text("grew"),  # when the importer last saw a file of it grow: our clock. What `silent` is judged by
    _text("imported"),  # when it was first imported: our clock
    _count("world_size"),
    _count("nodes"),
    _count("step", -1),  # the last on record
    _count("checkpoint", -1),  # newest that is verified, present, and without doubt
    Column("pace", REAL),  # seconds a step takes, as the newest records say; None where unknown
    Column("cost", REAL),  # share of wall time that all checks took; None where unknown
    _count("attributed"),  # incidents, drills and false alarms left out; likewise the next
    _count("unattributed"),
    _count("drills"),
    _count("false_alarms"),
    _count("open"),  # nobody has judged them, and no person has acted
    _count("problems"),
    _count("observations"),  # how many were imported, pruned ones included
    _text("supervision"),  # newest session of `bitwitness run`, or ""
    _count("generation"),
    _text("outcome"),  # of that session's stop.json, "" while it goes on
    Column("exit_code", BIG),
    _text("reason"),
    _text("ended"),  # when it ended, as far as known; "" while it goes on
    _flag("finished"),  # the end is durably marked as that of training
    Column("policy", Json),
    Column("limits", Json),
    _text("versions"),  # of bitwitness and torch, for people
    _text("pruned"),  # when retention removed its observations and ledger: our clock; "" never
    _text("over"),  # with an outcome: growth after this is not of the session that ended: our clock
    Column("copy_of", BIG),  # the run with the same id that is counted instead of this one (see `importing_copies`)
    _flag("starting"),  # what was seen growing last is the beat of a session that has no guard yet
    _flag("apart"),  # a copy that went its own way: it is a run of its own, and what it has besides is counted
    UniqueConstraint("place", "run"),
    Index("ix_runs_run", "run"),
)

sources = Table(
    "sources",
    metadata,
    _key(),
    _of("runs"),
    _text("path"),  # relative to the run
    _text(
        "identity"
    ),  # digests of its first bytes and of those before the offset; "" of a file that is read as a whole
    _count("offset"),  # bytes that were imported, always up to the end of a line
    _count("size"),  # when it was looked at last
    _count("lines"),  # whole lines read
    _count("skipped"),  # of these, lines that could not be used
    _count("starts"),  # of a journal: how many guards had written to it
    _count("scanned"),  # how far a line that is too long was looked through for its end
    _text("stamp"),  # of a file that is read as a whole: what tells whether it is another one
    UniqueConstraint("run_id", "path"),
)
"""One row a file. Its offset moves in the transaction that writes what was read, so nothing is lost and nothing doubled."""

ranks = Table(
    "ranks",
    metadata,
    _of("runs", primary=True),
    Column("rank", BIG, primary_key=True, autoincrement=False),
    _count("first", -1),  # first and last step on record
    _count("last", -1),
    _text("seen"),
    _count("observations"),
    _text("start"),  # the newest start of the job in its journal, see `runfiles.drills.start_of`
    _count("floor", -1),  # see `importing_parsing.Batch.floor`
)

ledger = Table(
    "ledger",
    metadata,
    _of("runs", primary=True),
    Column("check", TEXT, primary_key=True),
    Column("rank", BIG, primary_key=True, autoincrement=False),
    Column("first", BIG, primary_key=True, autoincrement=False),
    _count("last"),
    _text("outcome"),
    _text("reason"),
    Column("detail", Json),
    _count("start"),  # which start of the guard wrote it, from 1
    sqlite_with_rowid=False,
)
"""Ranges of one check on one rank, which never overlap: neighbours that say the same are one row (see `importing_ledger`)."""

rank_coverage = Table(
    "rank_coverage",
    metadata,
    _of("runs", primary=True),
    Column("check", TEXT, primary_key=True),
    Column("rank", BIG, primary_key=True, autoincrement=False),
    _count("passed"),  # steps
    _count("unverified"),
    _count("failed"),
    _count("last", -1),  # last step that passed, as far as its work counts
    Column("pruned", Json),  # `importing_ledger.Sums`: what is known of steps whose ranges were removed, counted above
)

coverage = Table(
    "coverage",
    metadata,
    _of("runs", primary=True),
    Column("check", TEXT, primary_key=True),
    _count("passed"),  # rank-steps
    _count("unverified"),
    _count("failed"),
    _count("all"),  # rank-steps made, as far as known
    _count("last", -1),  # the last step that passed on every rank; -1 if none did
)
"""The sums of `rank_coverage`, one row a run and check."""

observations = Table(
    "observations",
    metadata,
    _of("runs", primary=True),
    Column("rank", BIG, primary_key=True, autoincrement=False),  # whose journal; each rank writes its own
    Column("at", BIG, primary_key=True, autoincrement=False),  # byte of the line in it
    _text("time"),
    _text("check"),
    _count("step"),
    _text("place"),
    _text("value"),
    Column("repeats", Json),
    Column("owner", BIG),
    Column("micro", BIG),
    _text("error"),
    Column("detail", Json),
    sqlite_with_rowid=False,
)
"""What checks saw, of the journals. An incident keeps its own in `evidence`; no page but an export reads these."""

steps = Table(
    "steps",
    metadata,
    _of("runs", primary=True),
    Column("first", BIG, primary_key=True, autoincrement=False),
    _count("last"),
    _count("count"),  # steps that the means are of; fewer than last - first + 1 where some are missing
    Column("loss", REAL),
    Column("loss_low", REAL),
    Column("loss_high", REAL),
    Column("norm", REAL),
    Column("norm_low", REAL),
    Column("norm_high", REAL),
    _count("nonfinite"),
    Column("seconds", REAL),  # of one step, mean
)
"""Loss and gradient norm of rank 0: at most some 4096 rows a run, which never overlap; ready to be drawn, in order of `first`."""

costs = Table(
    "costs",
    metadata,
    _of("runs", primary=True),
    Column("check", TEXT, primary_key=True),
    Column("seconds", REAL, nullable=False, server_default="0"),
    _count("steps"),
    Column("wall", REAL, nullable=False, server_default="0"),  # seconds that these steps took
    _text("clock"),  # `host` or `device`
)

marks = Table(
    "marks",
    metadata,
    _key(),
    _of("runs"),
    _text("origin"),  # with `run_id` what tells one from another: file and byte
    _count("step", -1),  # -1: not known (yet)
    _text("time"),
    _text("kind"),  # start, resume, checkpoint, guard_failure, restart, action, ended
    _text("text"),
    _text("start"),  # of a start: what names it and no other, see `runfiles.drills.start_of`
    _count("passed", -1),  # of a start: the last step at which any check passed on rank 0 in it
    UniqueConstraint("run_id", "origin"),
    Index("ix_marks_run_kind", "run_id", "kind", "step"),
)
"""What happened at a step, from the journals and the supervisor's log. Incidents are marks too, made from `incidents`."""

checkpoints = Table(
    "checkpoints",
    metadata,
    _of("runs", primary=True),
    Column("step", BIG, primary_key=True, autoincrement=False),
    _text("saved"),
    Column("passed", Json),
    Column("failed", Json),
    Column("incidents", Json),  # known when it was saved
    _text("doubt"),  # by its label and the incidents found since; "" if nothing speaks against it
    _flag("present"),
    _text("stamp"),
)

# Incidents ------------------------------------------------------------------------------------------------------------

incidents = Table(
    "incidents",
    metadata,
    _key(),
    _of("runs"),
    _text("name"),  # its id, as in its directory; unique within a run only
    _text("path"),
    _text("time"),
    _count("step"),
    _text("check"),
    _text("kind"),
    _text("status"),  # attributed or unattributed
    _text("persistence"),
    _text("headline"),
    _text("reason"),
    _count("window_first", -1),
    _count("window_last", -1),
    _count("world_size"),
    _count("nodes"),  # that they were on then
    Column("notes", Json),
    Column("files", Json),  # name -> bytes
    _text("on_detection"),  # of the policy then
    _text("start"),  # of the job, in which it was found, see `runfiles.drills.start_of`; "" unknown
    _text("judged"),  # by a person, the last word; "" if none
    _text("judged_by"),
    _text("judged_at"),
    _text("judged_why"),
    _flag("drill"),  # a fault was injected that explains it
    _text("judgement"),  # what follows of the two: a person's word, else `drill`, else ""
    _flag("acted"),  # a person has acted because of it
    _flag("copied"),  # the same is counted in another run, of which this one holds a copy; likewise of drills
    _flag("pruned"),
    _text("stamp"),
    UniqueConstraint("run_id", "name"),
    Index("ix_incidents_name", "name"),
    Index("ix_incidents_time", "time"),
    Index("ix_incidents_judgement", "judgement", "status", "time"),
)

incident_ranks = Table(
    "incident_ranks",
    metadata,
    _of("incidents", primary=True),
    Column("role", TEXT, primary_key=True),  # named (attributed incidents only), candidate, involved
    Column("rank", BIG, primary_key=True, autoincrement=False),
    _of("runs"),
    _text("node"),
    _text("device"),
    _text("persistence"),  # of this rank, where it is named
    Index("ix_incident_ranks_node", "node", "role"),
    Index("ix_incident_ranks_device", "device", "role"),
    Index("ix_incident_ranks_run", "run_id"),
)
"""Who was named, and who was involved without blame: `candidate` by the verdict, `involved` by an observation only (the first
512). Devices and nodes are those of that time."""

evidence = Table(
    "evidence",
    metadata,
    _of("incidents", primary=True),
    Column("observations", Json),  # a list, as in incident.json
    Column("placement", Json),  # of the ranks in it, as in incident.json
)
"""What an incident was decided from, apart so that lists need not read it. Retention removes it, and sets `incidents.pruned`."""

actions = Table(
    "actions",
    metadata,
    _of("incidents", primary=True),
    Column("at", BIG, primary_key=True, autoincrement=False),  # byte of the line in actions.jsonl
    _of("runs"),
    _text("time"),
    _text("action"),  # `judged` is a person's word on the incident
    _text("who"),
    _text("text"),
    Column("record", Json),
    Index("ix_actions_run", "run_id", "time"),
)

# Places, quarantine, drills -------------------------------------------------------------------------------------------

stays = Table(
    "stays",
    metadata,
    _key(),
    _of("runs"),
    _count("rank"),
    _text("node"),
    _text("device"),
    _count("slot"),
    _text("model"),
    _text("pod"),
    _text("first"),
    _text("last"),
    _flag("current"),  # where the rank was last
    UniqueConstraint("run_id", "rank", "node", "device"),
    Index("ix_stays_node", "node", "last"),
    Index("ix_stays_device", "device", "last"),
    Index("ix_stays_run", "run_id", "current", "rank"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("name", TEXT, primary_key=True),
    _count("devices"),  # different ones that were seen there
    _text("seen"),
)
"""All nodes that a rank was ever on, counted from `stays`."""

quarantine = Table(
    "quarantine",
    metadata,
    _of("runs", primary=True),
    Column("number", BIG, primary_key=True, autoincrement=False),  # place in the log of quarantine.json
    _text("time"),
    _text("what"),  # strike, deny device, deny node, clear
    _text("name"),
    _text("who"),
    _text("reason"),
    _text("incident"),
    _text("node"),
    Index("ix_quarantine_name", "name"),
    Index("ix_quarantine_node", "node"),
)

denied = Table(
    "denied",
    metadata,
    _of("runs", primary=True),
    Column("kind", TEXT, primary_key=True),  # device or node
    Column("name", TEXT, primary_key=True),
    _text("since"),
    _text("reason"),
    _text("incident"),
    _text("node"),
    Index("ix_denied_name", "name"),
    Index("ix_denied_node", "node"),
)
"""What quarantine.json denies now."""

strikes = Table(
    "strikes",
    metadata,
    _of("runs", primary=True),
    Column("device", TEXT, primary_key=True),
    Column("number", BIG, primary_key=True, autoincrement=False),
    _text("time"),
    _text("incident"),
    _text("node"),
    _text("persistence"),
    Index("ix_strikes_device", "device"),
    Index("ix_strikes_node", "node"),
)
"""What quarantine.json counts now; a strike that was cleared is in `incident_ranks` (named) and no longer here."""

drills = Table(
    "drills",
    metadata,
    _key(),
    _of("runs"),
    _count("rank"),
    _text("start"),  # see `runfiles.drills.start_of`; "" unknown
    _count("fault"),
    _text("spec"),  # in the grammar
    _text("node"),
    _text("work"),
    _text("target"),
    _text("name"),
    _count("step"),  # first and last that it struck, and how often
    _count("last"),
    Column("landed", Json),  # [step, kinds of work] each, see `runfiles.drills.Struck`
    _count("hits"),
    _text("time"),
    _text("outcome"),  # caught; caught, unattributed; named wrongly; missed; unclear
    Column("incident_id", BIG, ForeignKey("incidents.id", ondelete="SET NULL")),
    Column("late", BIG),
    _flag("copied"),
    UniqueConstraint("run_id", "rank", "start", "fault"),
    Index("ix_drills_time", "time"),
    Index("ix_drills_outcome", "outcome"),
)
"""Faults that were injected and landed, one row a fault, rank and start."""

# The fleet ------------------------------------------------------------------------------------------------------------

controllers = Table(
    "controllers",
    metadata,
    _key(),
    _text("place"),
    _text("path"),  # of its state's folder
    _text("mode"),
    _text("cluster"),
    _text("life"),  # running, silent, stopped, never, or unreadable
    _text("text"),  # the same in a sentence
    _text("last_round"),
    Column("about", Json),
    Column("todo", Json),
    _text("seen"),  # our clock
    _count("audit"),  # last number that was imported
    _text("created"),  # of its database: another one is read from the beginning
    UniqueConstraint("place"),
)

audit = Table(
    "audit",
    metadata,
    _of("controllers", primary=True),
    Column("number", BIG, primary_key=True, autoincrement=False),
    _text("time"),
    _text("who"),
    _text("what"),
    _text("incident"),
    _text("node"),
    _text("text"),
    Column("record", Json),
    Index("ix_audit_node", "node", "time"),
    Index("ix_audit_incident", "incident"),
    Index("ix_audit_time", "time"),
)

proposals = Table(
    "proposals",
    metadata,
    _of("controllers", primary=True),
    Column("key", BIG, primary_key=True, autoincrement=False),
    _text("incident"),
    _text("node"),
    Column("devices", Json),
    _text("action"),
    _text("confidence"),
    _text("reason"),
    _text("act"),  # "" for nothing
    _text("status"),
    _text("hold"),
    _text("why"),
    _text("made"),
    _text("updated"),
    Column("signals", Json),  # a sentence each
    _flag("final"),
    _flag("waits"),  # for a person's approval, now
    _text("question"),  # by what it is answered on a command line, e.g. 12-3fa9c1d2; "" while nothing is asked
    Index("ix_proposals_node", "node", "updated"),
    Index("ix_proposals_incident", "incident"),
    Index("ix_proposals_waits", "waits", "status"),
)

picked = Table(
    "picked",
    metadata,
    _of("controllers", primary=True),
    Column("incident", TEXT, primary_key=True),  # its id
    _text("path"),  # of its directory, as the controller has it
    Index("ix_picked_incident", "incident"),
)
"""Which incident each controller means by an id: two runs may have incidents of one id, a controller has only one of them."""

namings = Table(
    "namings",
    metadata,
    _of("controllers", primary=True),
    Column("number", BIG, primary_key=True, autoincrement=False),
    _text("incident"),
    _text("device"),
    _text("node"),
    _text("cleared"),  # when a person cleared it by hand; "" it counts
    Index("ix_namings_device", "device"),
    Index("ix_namings_node", "node"),
    Index("ix_namings_incident", "incident"),
)
"""Who was named when, as the controllers count strikes."""

# What could not be read -----------------------------------------------------------------------------------------------

problems = Table(
    "problems",
    metadata,
    _key(),
    _text("place", unique=True),  # digest of `path`
    _of("runs", nullable=True),  # None: it belongs to no run, e.g. a state of the fleet, or a directory that is no run
    _text("path"),
    _text("text"),
    _text("time"),  # since when: our clock
    _count("lines"),  # skipped
    Index("ix_problems_run", "run_id"),
)
