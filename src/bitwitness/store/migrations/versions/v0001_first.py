"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    """Make all tables."""
    independent = (_controllers, _meta, _nodes, _runs)
    of_runs = (_checkpoints, _costs, _coverage, _denied, _incidents, _ledger, _marks, _observations, _problems)
    also = (_quarantine, _rank_coverage, _ranks, _sources, _stays, _steps, _strikes)
    of_controllers = (_audit, _namings, _picked, _proposals)
    of_incidents = (_actions, _drills, _evidence, _incident_ranks)
    for make in (*independent, *of_runs, *also, *of_controllers, *of_incidents):
        make()


def _controllers() -> None:
    op.create_table(
        "controllers",
        sa.Column("id", BIG, nullable=False),
        sa.Column("place", sa.Text(), server_default="", nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("mode", sa.Text(), server_default="", nullable=False),
        sa.Column("cluster", sa.Text(), server_default="", nullable=False),
        sa.Column("life", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("last_round", sa.Text(), server_default="", nullable=False),
        sa.Column("about", sa.Text(), nullable=True),
        sa.Column("todo", sa.Text(), nullable=True),
        sa.Column("seen", sa.Text(), server_default="", nullable=False),
        sa.Column("audit", BIG, server_default="0", nullable=False),
        sa.Column("created", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_controllers")),
        sa.UniqueConstraint("place", name=op.f("uq_controllers_place")),
    )


def _meta() -> None:
    op.create_table(
        "meta",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("number", BIG, server_default="0", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_meta")),
    )


def _nodes() -> None:
    op.create_table(
        "nodes",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("devices", BIG, server_default="0", nullable=False),
        sa.Column("seen", sa.Text(), server_default="", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_nodes")),
    )


def _runs() -> None:
    op.create_table(
        "runs",
        sa.Column("id", BIG, nullable=False),
        sa.Column("place", sa.Text(), server_default="", nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("run", sa.Text(), server_default="", nullable=False),
        sa.Column("current", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("missing", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("job", sa.Text(), server_default="", nullable=False),
        sa.Column("started", sa.Text(), server_default="", nullable=False),
        sa.Column("seen", sa.Text(), server_default="", nullable=False),
        sa.Column("grew", sa.Text(), server_default="", nullable=False),
        sa.Column("imported", sa.Text(), server_default="", nullable=False),
        sa.Column("world_size", BIG, server_default="0", nullable=False),
        sa.Column("nodes", BIG, server_default="0", nullable=False),
        sa.Column("step", BIG, server_default="-1", nullable=False),
        sa.Column("checkpoint", BIG, server_default="-1", nullable=False),
        sa.Column("pace", sa.Double(), nullable=True),
        sa.Column("cost", sa.Double(), nullable=True),
        sa.Column("attributed", BIG, server_default="0", nullable=False),
        sa.Column("unattributed", BIG, server_default="0", nullable=False),
        sa.Column("drills", BIG, server_default="0", nullable=False),
        sa.Column("false_alarms", BIG, server_default="0", nullable=False),
        sa.Column("open", BIG, server_default="0", nullable=False),
        sa.Column("problems", BIG, server_default="0", nullable=False),
        sa.Column("observations", BIG, server_default="0", nullable=False),
        sa.Column("supervision", sa.Text(), server_default="", nullable=False),
        sa.Column("generation", BIG, server_default="0", nullable=False),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
        sa.Column("exit_code", BIG, nullable=True),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("ended", sa.Text(), server_default="", nullable=False),
        sa.Column("finished", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("policy", sa.Text(), nullable=True),
        sa.Column("limits", sa.Text(), nullable=True),
        sa.Column("versions", sa.Text(), server_default="", nullable=False),
        sa.Column("pruned", sa.Text(), server_default="", nullable=False),
        sa.Column("over", sa.Text(), server_default="", nullable=False),
        sa.Column("copy_of", BIG, nullable=True),
        sa.Column("starting", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("apart", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("place", "run", name=op.f("uq_runs_place_run")),
    )
    op.create_index("ix_runs_run", "runs", ["run"], unique=False)


def _audit() -> None:
    op.create_table(
        "audit",
        sa.Column("controller_id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("who", sa.Text(), server_default="", nullable=False),
        sa.Column("what", sa.Text(), server_default="", nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("record", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["controller_id"], ["controllers.id"], name=op.f("fk_audit_controller_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("controller_id", "number", name=op.f("pk_audit")),
    )
    op.create_index("ix_audit_incident", "audit", ["incident"], unique=False)
    op.create_index("ix_audit_node", "audit", ["node", "time"], unique=False)
    op.create_index("ix_audit_time", "audit", ["time"], unique=False)


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("step", BIG, autoincrement=False, nullable=False),
        sa.Column("saved", sa.Text(), server_default="", nullable=False),
        sa.Column("passed", sa.Text(), nullable=True),
        sa.Column("failed", sa.Text(), nullable=True),
        sa.Column("incidents", sa.Text(), nullable=True),
        sa.Column("doubt", sa.Text(), server_default="", nullable=False),
        sa.Column("present", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("stamp", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "step", name=op.f("pk_checkpoints")),
    )


def _costs() -> None:
    op.create_table(
        "costs",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("check", sa.Text(), nullable=False),
        sa.Column("seconds", sa.Double(), server_default="0", nullable=False),
        sa.Column("steps", BIG, server_default="0", nullable=False),
        sa.Column("wall", sa.Double(), server_default="0", nullable=False),
        sa.Column("clock", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_costs_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "check", name=op.f("pk_costs")),
    )


def _coverage() -> None:
    op.create_table(
        "coverage",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("check", sa.Text(), nullable=False),
        sa.Column("passed", BIG, server_default="0", nullable=False),
        sa.Column("unverified", BIG, server_default="0", nullable=False),
        sa.Column("failed", BIG, server_default="0", nullable=False),
        sa.Column("all", BIG, server_default="0", nullable=False),
        sa.Column("last", BIG, server_default="-1", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_coverage_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "check", name=op.f("pk_coverage")),
    )


def _denied() -> None:
    op.create_table(
        "denied",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("since", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_denied_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "kind", "name", name=op.f("pk_denied")),
    )
    op.create_index("ix_denied_name", "denied", ["name"], unique=False)
    op.create_index("ix_denied_node", "denied", ["node"], unique=False)


def _incidents() -> None:
    op.create_table(
        "incidents",
        sa.Column("id", BIG, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("step", BIG, server_default="0", nullable=False),
        sa.Column("check", sa.Text(), server_default="", nullable=False),
        sa.Column("kind", sa.Text(), server_default="", nullable=False),
        sa.Column("status", sa.Text(), server_default="", nullable=False),
        sa.Column("persistence", sa.Text(), server_default="", nullable=False),
        sa.Column("headline", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("window_first", BIG, server_default="-1", nullable=False),
        sa.Column("window_last", BIG, server_default="-1", nullable=False),
        sa.Column("world_size", BIG, server_default="0", nullable=False),
        sa.Column("nodes", BIG, server_default="0", nullable=False),
        sa.Column("notes", sa.Text(), nullable=True),
        sa.Column("files", sa.Text(), nullable=True),
        sa.Column("on_detection", sa.Text(), server_default="", nullable=False),
        sa.Column("start", sa.Text(), server_default="", nullable=False),
        sa.Column("judged", sa.Text(), server_default="", nullable=False),
        sa.Column("judged_by", sa.Text(), server_default="", nullable=False),
        sa.Column("judged_at", sa.Text(), server_default="", nullable=False),
        sa.Column("judged_why", sa.Text(), server_default="", nullable=False),
        sa.Column("drill", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("judgement", sa.Text(), server_default="", nullable=False),
        sa.Column("acted", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("copied", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("pruned", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("stamp", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_incidents_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_incidents")),
        sa.UniqueConstraint("run_id", "name", name=op.f("uq_incidents_run_id_name")),
    )
    op.create_index("ix_incidents_judgement", "incidents", ["judgement", "status", "time"], unique=False)
    op.create_index("ix_incidents_name", "incidents", ["name"], unique=False)
    op.create_index("ix_incidents_time", "incidents", ["time"], unique=False)


def _ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("check", sa.Text(), nullable=False),
        sa.Column("rank", BIG, autoincrement=False, nullable=False),
        sa.Column("first", BIG, autoincrement=False, nullable=False),
        sa.Column("last", BIG, server_default="0", nullable=False),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.Column("start", BIG, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ledger_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "check", "rank", "first", name=op.f("pk_ledger")),
        sqlite_with_rowid=False,
    )


def _marks() -> None:
    op.create_table(
        "marks",
        sa.Column("id", BIG, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("origin", sa.Text(), server_default="", nullable=False),
        sa.Column("step", BIG, server_default="-1", nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("kind", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("start", sa.Text(), server_default="", nullable=False),
        sa.Column("passed", BIG, server_default="-1", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_marks_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_marks")),
        sa.UniqueConstraint("run_id", "origin", name=op.f("uq_marks_run_id_origin")),
    )
    op.create_index("ix_marks_run_kind", "marks", ["run_id", "kind", "step"], unique=False)


def _namings() -> None:
    op.create_table(
        "namings",
        sa.Column("controller_id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("device", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("cleared", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["controller_id"], ["controllers.id"], name=op.f("fk_namings_controller_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("controller_id", "number", name=op.f("pk_namings")),
    )
    op.create_index("ix_namings_device", "namings", ["device"], unique=False)
    op.create_index("ix_namings_incident", "namings", ["incident"], unique=False)
    op.create_index("ix_namings_node", "namings", ["node"], unique=False)


def _picked() -> None:
    op.create_table(
        "picked",
        sa.Column("controller_id", BIG, autoincrement=False, nullable=False),
        sa.Column("incident", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["controller_id"], ["controllers.id"], name=op.f("fk_picked_controller_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("controller_id", "incident", name=op.f("pk_picked")),
    )
    op.create_index("ix_picked_incident", "picked", ["incident"], unique=False)


def _observations() -> None:
    op.create_table(
        "observations",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("rank", BIG, autoincrement=False, nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("check", sa.Text(), server_default="", nullable=False),
        sa.Column("step", BIG, server_default="0", nullable=False),
        sa.Column("place", sa.Text(), server_default="", nullable=False),
        sa.Column("value", sa.Text(), server_default="", nullable=False),
        sa.Column("repeats", sa.Text(), nullable=True),
        sa.Column("owner", BIG, nullable=True),
        sa.Column("micro", BIG, nullable=True),
        sa.Column("error", sa.Text(), server_default="", nullable=False),
        sa.Column("detail", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_observations_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "rank", "at", name=op.f("pk_observations")),
        sqlite_with_rowid=False,
    )


def _problems() -> None:
    op.create_table(
        "problems",
        sa.Column("id", BIG, nullable=False),
        sa.Column("place", sa.Text(), server_default="", nullable=False),
        sa.Column("run_id", BIG, nullable=True),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("lines", BIG, server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_problems_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_problems")),
        sa.UniqueConstraint("place", name=op.f("uq_problems_place")),
    )
    op.create_index("ix_problems_run", "problems", ["run_id"], unique=False)


def _proposals() -> None:
    op.create_table(
        "proposals",
        sa.Column("controller_id", BIG, autoincrement=False, nullable=False),
        sa.Column("key", BIG, autoincrement=False, nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("devices", sa.Text(), nullable=True),
        sa.Column("action", sa.Text(), server_default="", nullable=False),
        sa.Column("confidence", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("act", sa.Text(), server_default="", nullable=False),
        sa.Column("status", sa.Text(), server_default="", nullable=False),
        sa.Column("hold", sa.Text(), server_default="", nullable=False),
        sa.Column("why", sa.Text(), server_default="", nullable=False),
        sa.Column("made", sa.Text(), server_default="", nullable=False),
        sa.Column("updated", sa.Text(), server_default="", nullable=False),
        sa.Column("signals", sa.Text(), nullable=True),
        sa.Column("final", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("waits", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.Column("question", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["controller_id"], ["controllers.id"], name=op.f("fk_proposals_controller_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("controller_id", "key", name=op.f("pk_proposals")),
    )
    op.create_index("ix_proposals_incident", "proposals", ["incident"], unique=False)
    op.create_index("ix_proposals_node", "proposals", ["node", "updated"], unique=False)
    op.create_index("ix_proposals_waits", "proposals", ["waits", "status"], unique=False)


def _quarantine() -> None:
    op.create_table(
        "quarantine",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("what", sa.Text(), server_default="", nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("who", sa.Text(), server_default="", nullable=False),
        sa.Column("reason", sa.Text(), server_default="", nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_quarantine_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_quarantine")),
    )
    op.create_index("ix_quarantine_name", "quarantine", ["name"], unique=False)
    op.create_index("ix_quarantine_node", "quarantine", ["node"], unique=False)


def _rank_coverage() -> None:
    op.create_table(
        "rank_coverage",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("check", sa.Text(), nullable=False),
        sa.Column("rank", BIG, autoincrement=False, nullable=False),
        sa.Column("passed", BIG, server_default="0", nullable=False),
        sa.Column("unverified", BIG, server_default="0", nullable=False),
        sa.Column("failed", BIG, server_default="0", nullable=False),
        sa.Column("last", BIG, server_default="-1", nullable=False),
        sa.Column("pruned", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rank_coverage_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "check", "rank", name=op.f("pk_rank_coverage")),
    )


def _ranks() -> None:
    op.create_table(
        "ranks",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("rank", BIG, autoincrement=False, nullable=False),
        sa.Column("first", BIG, server_default="-1", nullable=False),
        sa.Column("last", BIG, server_default="-1", nullable=False),
        sa.Column("seen", sa.Text(), server_default="", nullable=False),
        sa.Column("observations", BIG, server_default="0", nullable=False),
        sa.Column("start", sa.Text(), server_default="", nullable=False),
        sa.Column("floor", BIG, server_default="-1", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_ranks_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "rank", name=op.f("pk_ranks")),
    )


def _sources() -> None:
    op.create_table(
        "sources",
        sa.Column("id", BIG, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("path", sa.Text(), server_default="", nullable=False),
        sa.Column("identity", sa.Text(), server_default="", nullable=False),
        sa.Column("offset", BIG, server_default="0", nullable=False),
        sa.Column("size", BIG, server_default="0", nullable=False),
        sa.Column("lines", BIG, server_default="0", nullable=False),
        sa.Column("skipped", BIG, server_default="0", nullable=False),
        sa.Column("starts", BIG, server_default="0", nullable=False),
        sa.Column("scanned", BIG, server_default="0", nullable=False),
        sa.Column("stamp", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_sources_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sources")),
        sa.UniqueConstraint("run_id", "path", name=op.f("uq_sources_run_id_path")),
    )


def _stays() -> None:
    op.create_table(
        "stays",
        sa.Column("id", BIG, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("rank", BIG, server_default="0", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("device", sa.Text(), server_default="", nullable=False),
        sa.Column("slot", BIG, server_default="0", nullable=False),
        sa.Column("model", sa.Text(), server_default="", nullable=False),
        sa.Column("pod", sa.Text(), server_default="", nullable=False),
        sa.Column("first", sa.Text(), server_default="", nullable=False),
        sa.Column("last", sa.Text(), server_default="", nullable=False),
        sa.Column("current", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_stays_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_stays")),
        sa.UniqueConstraint("run_id", "rank", "node", "device", name=op.f("uq_stays_run_id_rank_node_device")),
    )
    op.create_index("ix_stays_device", "stays", ["device", "last"], unique=False)
    op.create_index("ix_stays_node", "stays", ["node", "last"], unique=False)
    op.create_index("ix_stays_run", "stays", ["run_id", "current", "rank"], unique=False)


def _steps() -> None:
    op.create_table(
        "steps",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("first", BIG, autoincrement=False, nullable=False),
        sa.Column("last", BIG, server_default="0", nullable=False),
        sa.Column("count", BIG, server_default="0", nullable=False),
        sa.Column("loss", sa.Double(), nullable=True),
        sa.Column("loss_low", sa.Double(), nullable=True),
        sa.Column("loss_high", sa.Double(), nullable=True),
        sa.Column("norm", sa.Double(), nullable=True),
        sa.Column("norm_low", sa.Double(), nullable=True),
        sa.Column("norm_high", sa.Double(), nullable=True),
        sa.Column("nonfinite", BIG, server_default="0", nullable=False),
        sa.Column("seconds", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "first", name=op.f("pk_steps")),
    )


def _strikes() -> None:
    op.create_table(
        "strikes",
        sa.Column("run_id", BIG, autoincrement=False, nullable=False),
        sa.Column("device", sa.Text(), nullable=False),
        sa.Column("number", BIG, autoincrement=False, nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("incident", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("persistence", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_strikes_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "device", "number", name=op.f("pk_strikes")),
    )
    op.create_index("ix_strikes_device", "strikes", ["device"], unique=False)
    op.create_index("ix_strikes_node", "strikes", ["node"], unique=False)


def _actions() -> None:
    op.create_table(
        "actions",
        sa.Column("incident_id", BIG, autoincrement=False, nullable=False),
        sa.Column("at", BIG, autoincrement=False, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("action", sa.Text(), server_default="", nullable=False),
        sa.Column("who", sa.Text(), server_default="", nullable=False),
        sa.Column("text", sa.Text(), server_default="", nullable=False),
        sa.Column("record", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.id"], name=op.f("fk_actions_incident_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_actions_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("incident_id", "at", name=op.f("pk_actions")),
    )
    op.create_index("ix_actions_run", "actions", ["run_id", "time"], unique=False)


def _drills() -> None:
    op.create_table(
        "drills",
        sa.Column("id", BIG, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("rank", BIG, server_default="0", nullable=False),
        sa.Column("start", sa.Text(), server_default="", nullable=False),
        sa.Column("fault", BIG, server_default="0", nullable=False),
        sa.Column("spec", sa.Text(), server_default="", nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("work", sa.Text(), server_default="", nullable=False),
        sa.Column("target", sa.Text(), server_default="", nullable=False),
        sa.Column("name", sa.Text(), server_default="", nullable=False),
        sa.Column("step", BIG, server_default="0", nullable=False),
        sa.Column("last", BIG, server_default="0", nullable=False),
        sa.Column("landed", sa.Text(), nullable=True),
        sa.Column("hits", BIG, server_default="0", nullable=False),
        sa.Column("time", sa.Text(), server_default="", nullable=False),
        sa.Column("outcome", sa.Text(), server_default="", nullable=False),
        sa.Column("incident_id", BIG, nullable=True),
        sa.Column("late", BIG, nullable=True),
        sa.Column("copied", sa.Boolean(), server_default=sa.false(), nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.id"], name=op.f("fk_drills_incident_id"), ondelete="SET NULL"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_drills_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_drills")),
        sa.UniqueConstraint("run_id", "rank", "start", "fault", name=op.f("uq_drills_run_id_rank_start_fault")),
    )
    op.create_index("ix_drills_outcome", "drills", ["outcome"], unique=False)
    op.create_index("ix_drills_time", "drills", ["time"], unique=False)


def _evidence() -> None:
    op.create_table(
        "evidence",
        sa.Column("incident_id", BIG, autoincrement=False, nullable=False),
        sa.Column("observations", sa.Text(), nullable=True),
        sa.Column("placement", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.id"], name=op.f("fk_evidence_incident_id"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("incident_id", name=op.f("pk_evidence")),
    )


def _incident_ranks() -> None:
    op.create_table(
        "incident_ranks",
        sa.Column("incident_id", BIG, autoincrement=False, nullable=False),
        sa.Column("role", sa.Text(), nullable=False),
        sa.Column("rank", BIG, autoincrement=False, nullable=False),
        sa.Column("run_id", BIG, nullable=False),
        sa.Column("node", sa.Text(), server_default="", nullable=False),
        sa.Column("device", sa.Text(), server_default="", nullable=False),
        sa.Column("persistence", sa.Text(), server_default="", nullable=False),
        sa.ForeignKeyConstraint(
            ["incident_id"], ["incidents.id"], name=op.f("fk_incident_ranks_incident_id"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_incident_ranks_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("incident_id", "role", "rank", name=op.f("pk_incident_ranks")),
    )
    op.create_index("ix_incident_ranks_device", "incident_ranks", ["device", "role"], unique=False)
    op.create_index("ix_incident_ranks_node", "incident_ranks", ["node", "role"], unique=False)
    op.create_index("ix_incident_ranks_run", "incident_ranks", ["run_id"], unique=False)
