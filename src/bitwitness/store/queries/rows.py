"""The records that several pages share, made from rows: one place, so that the same thing is told alike everywhere.

Everything here takes many keys at once: a page asks the database as often for fifty runs as for one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from bitwitness.runfiles.judging import JUDGED
from bitwitness.store.pages import (
    AuditRow,
    Coverage,
    IncidentRow,
    Place,
    ProposalRow,
    RunRow,
)
from bitwitness.store.queries.meaning import Meant, meant
from bitwitness.store.queries.states import state_text
from bitwitness.store.tables import actions, controllers, coverage, incident_ranks, incidents, proposals, runs

_BY_CONSOLE = "(console)"
"""What the name of whoever acted from the console ends with."""
_OF_GUARD = ("retried", "skipped")
_OF_SUPERVISOR = ("strike", "quarantined")
_OF_FLEET = "fleet "
"""What `guard/guard.py`, `supervise/` and `fleet/telling.py` note beside an incident; what a supervisor has decided besides has the id of its session."""
_HEAVY = ("limits",)
RUN_COLUMNS = tuple(column for column in runs.c if column.name not in _HEAVY)
_CHECKS = ("numerics", "replay", "replicas")
"""Those that are due by the policy of every run, in the order in which they run."""


# Runs -----------------------------------------------------------------------------------------------------------------


def run_rows(connection: sa.Connection, found: Sequence[Any]) -> tuple[RunRow, ...]:
    """Rows of `RUN_COLUMNS` with their `state`, with the coverage of all of them."""
    covered = coverage_of(connection, found)
    return tuple(_run_row(row, covered[row.id]) for row in found)


def _run_row(row: Any, covered: tuple[Coverage, ...]) -> RunRow:
    return RunRow(
        key=row.id,
        name=row.name,
        path=row.path,
        run=row.run,
        job=row.job,
        state=row.state,
        state_text=state_text(row.state, row),
        started=row.started,
        seen=row.seen,
        world_size=row.world_size,
        nodes=row.nodes,
        step=row.step,
        checkpoint=row.checkpoint,
        coverage=covered,
        cost=row.cost,
        attributed=row.attributed,
        unattributed=row.unattributed,
        drills=row.drills,
        false_alarms=row.false_alarms,
        open=row.open,
        problems=row.problems,
    )


def coverage_of(connection: sa.Connection, found: Sequence[Any]) -> Mapping[int, tuple[Coverage, ...]]:
    """The coverage of these runs: of every check that is on record, and of those that the policy wants and nobody has done.

    Of `all` rank-steps are those of every rank from the first step on, also of ranks that have left no record at all.
    """
    query = sa.select(coverage).where(coverage.c.run_id.in_([row.id for row in found]))
    kept: dict[int, dict[str, Any]] = defaultdict(dict)
    for one in connection.execute(query):
        kept[one.run_id][one._mapping["check"]] = one
    return {row.id: tuple(in_order(_coverage(row, kept[row.id]))) for row in found}


def _coverage(row: Any, kept: Mapping[str, Any]) -> Mapping[str, Coverage]:
    made = max([one._mapping["all"] for one in kept.values()], default=0)
    made = max(made, row.world_size * (row.step + 1))
    covered = {check: Coverage(check, 0, 0, 0, made, -1) for check in checks_wanted(row.policy)}
    for check, one in kept.items():
        covered[check] = Coverage(check, one.passed, one.unverified, one.failed, made, one.last)
    return covered


def checks_wanted(policy: object) -> tuple[str, ...]:
    """The checks that are due by a policy, whatever is on record; none where nobody knows it."""
    if not isinstance(policy, Mapping) or not policy:
        return ()
    return tuple(check for check in _CHECKS if check != "replay" or policy.get("audit") != "off")


def in_order(by_check: Mapping[str, Any]) -> Iterable[Any]:
    """The values of a mapping by check, in the order in which checks run, unknown ones last."""
    places = {check: place for place, check in enumerate(_CHECKS)}
    return [by_check[check] for check in sorted(by_check, key=lambda one: (places.get(one, len(places)), one))]


# Incidents ------------------------------------------------------------------------------------------------------------

INCIDENTS = sa.select(incidents, runs.c.name.label("run_name"), runs.c.path.label("run_path")).join(
    runs, runs.c.id == incidents.c.run_id
)
"""What `incident_rows` takes; a page adds which, in which order, and how many."""


def is_open() -> sa.ColumnElement[bool]:
    """Whether an incident waits for a person: nobody has judged it, and no person has acted because of it. Counted, listed and told by
    this everywhere; of a single one `IncidentRow.open` says it.
    """
    return sa.and_(incidents.c.judgement == "", ~incidents.c.acted)


def incident_rows(connection: sa.Connection, found: Sequence[Any]) -> tuple[IncidentRow, ...]:
    """Rows of `INCIDENTS`, with who was named, who was involved, and what became of them."""
    keys = [row.id for row in found]
    query = (
        sa.select(incident_ranks)
        .where(incident_ranks.c.incident_id.in_(keys), incident_ranks.c.role.in_(("named", "candidate")))
        .order_by(incident_ranks.c.rank)
    )
    roles: dict[tuple[int, str], list[Any]] = defaultdict(list)
    for one in connection.execute(query):
        roles[one.incident_id, one.role].append(one)
    done = _done_about(connection, found)
    return tuple(
        _incident_row(row, roles[row.id, "named"], roles[row.id, "candidate"], done.get(row.id, "")) for row in found
    )


def _incident_row(row: Any, named: Sequence[Any], candidates: Sequence[Any], action: str) -> IncidentRow:
    # Whatever is on record besides, an unattributed incident names nobody.
    named = named if row.status == "attributed" else ()
    return IncidentRow(
        id=row._mapping["name"],
        run=row.run_id,
        run_name=row.run_name,
        run_path=row.run_path,
        time=row.time,
        step=row.step,
        check=row._mapping["check"],
        kind=row.kind,
        status="attributed" if row.status == "attributed" else "unattributed",
        persistence=row.persistence,
        headline=row.headline,
        reason=row.reason,
        ranks=tuple(one.rank for one in named),
        nodes=tuple(dict.fromkeys(one.node for one in named if one.node)),
        devices=tuple(dict.fromkeys(one.device for one in named if one.device)),
        candidates=tuple(one.rank for one in candidates),
        window=(row.window_first, row.window_last),
        judgement=row.judgement,
        action=action,
        open=row.judgement == "" and not row.acted,
    )


def _done_about(connection: sa.Connection, found: Sequence[Any]) -> dict[int, str]:
    """Of each incident the newest that the fleet proposes or has done; else what was done in the run itself."""
    names = {row._mapping["name"] for row in found}
    columns = (
        proposals.c.controller_id,
        proposals.c.incident,
        proposals.c.act,
        proposals.c.action,
        proposals.c.status,
        proposals.c.waits,
        proposals.c.updated,
    )
    query = sa.select(*columns).where(proposals.c.incident.in_(names)).order_by(proposals.c.updated, proposals.c.key)
    by_whom = meant(connection, names)
    said = {(one.controller_id, one.incident): one for one in connection.execute(query)}
    newest = (
        sa.select(actions.c.incident_id, sa.func.max(actions.c.at).label("at"))
        .where(actions.c.incident_id.in_([row.id for row in found]), actions.c.action != JUDGED)
        .group_by(actions.c.incident_id)
        .subquery()
    )
    joined = (actions.c.incident_id == newest.c.incident_id) & (actions.c.at == newest.c.at)
    acted = connection.execute(sa.select(actions.c.incident_id, actions.c.action).join(newest, joined))
    here = {one.incident_id: one.action for one in acted}
    return {row.id: _said(row, said, by_whom) or here.get(row.id, "") for row in found}


def _said(row: Any, said: Mapping[tuple[int, str], Any], by_whom: Meant) -> str:
    name = row._mapping["name"]
    of = [said[key, name] for key in by_whom.get((row.run_id, name), ()) if (key, name) in said]
    newest = max(of, key=lambda one: one.updated, default=None)
    return "" if newest is None else _in_words(newest)


def _in_words(one: Any) -> str:
    what = one.act or one.action
    return f"{what}: waits for approval" if one.waits else what if one.status == "nothing" else f"{what}: {one.status}"


# The fleet, and who did what ------------------------------------------------------------------------------------------


PROPOSALS = sa.select(
    proposals,
    controllers.c.path.label("state"),
    sa.exists().where(incidents.c.name == proposals.c.incident).correlate(proposals).label("imported"),
).join(controllers, controllers.c.id == proposals.c.controller_id)
"""What `proposal_row` takes; a page adds which, in which order, and how many."""


def proposal_row(row: Any) -> ProposalRow:
    """A row of `PROPOSALS`."""
    return ProposalRow(
        key=row.key,
        incident=row.incident,
        node=row.node,
        devices=tuple(row.devices or ()),
        action=row.action,
        confidence=row.confidence,
        reason=row.reason,
        act=row.act,
        status=row.status,
        hold=row.hold,
        why=row.why,
        updated=row.updated,
        signals=tuple(row.signals or ()),
        waits=row.waits,
        controller=row.controller_id,
        question=row.question,
        state=row.state,
        imported=bool(row.imported),
    )


def fleet_audit(row: Any) -> AuditRow:
    """A row of `audit`."""
    return AuditRow(row.time, row.who, row.what, row.incident, row.node, row.text, "fleet")


def quarantine_audit(row: Any) -> AuditRow:
    """A row of `quarantine`."""
    name = row._mapping["name"]
    node = row.node or (name if row.what == "deny node" else "")
    text = f"{name}: {row.reason}" if row.reason else name
    # No command gives a strike; of what else is written with the name of whoever started the job, the log does not tell who did it.
    text += " (by the supervisor)" if row.what == "strike" else ""
    return AuditRow(row.time, row.who, row.what, row.incident, node, text, "quarantine")


def action_audit(row: Any) -> AuditRow:
    """A row of `actions` with `incident`, the name of its incident."""
    record = row.record if isinstance(row.record, Mapping) else {}
    node, device, judgement = (_word(record, name) for name in ("node", "device", "judgement"))
    text = row.text or " on ".join(one for one in (device, node) if one)
    if row.action == JUDGED and judgement:
        text = f"{judgement}: {text}" if text else judgement
    source = "console" if row.who.endswith(_BY_CONSOLE) else "incident"
    return AuditRow(row.time, row.who or _writer(row.action, record), row.action, row.incident, node, text, source)


def _writer(action: str, record: Mapping[str, Any]) -> str:
    """Who notes an action without a name: programs; a person's name is always there. "" of an action that nobody knows."""
    if action.startswith(_OF_FLEET):
        return "controller"
    return (
        "guard" if action in _OF_GUARD else "supervisor" if action in _OF_SUPERVISOR or "supervision" in record else ""
    )


def _word(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def place(row: Any) -> Place:
    """Where a rank is, of a row of `stays`."""
    return Place(row.rank, row.node, row.device, row.slot, row.model, row.pod)


def newest_first(rows: Iterable[AuditRow], most: int) -> tuple[AuditRow, ...]:
    """The newest of these, of several sources."""
    return tuple(sorted(rows, key=lambda one: one.time, reverse=True)[:most])
