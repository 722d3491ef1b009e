"""The only place that makes addresses of the console, because names in them are hostile: a node may be called `..` or `?x=1#`.

Everything that comes from data is percent-encoded as one segment. Browsers fold away the segments `.` and `..` even where they
are encoded, so a name that would be folded (or that begins with a slash) is written with a slash before it, which `name_of`
takes off again. Addresses are relative to the host: what a client says of its host is never repeated.

Templates get this module as `links`. The acts (`approve` and below) each have two sides: GET shows what would happen, POST does it.
"""

from __future__ import annotations

from urllib.parse import quote, urlencode

EXPORTS = ("runs", "incidents", "observations", "ledger", "checkpoints", "audit", "drills", "nodes")
"""What there is as CSV."""
_VERSIONS: dict[str, str] = {}
"""Of each file of `static`: what changes when it does, so that browsers may keep it."""


def runs(query: str = "", state: str = "", page: int = 1) -> str:
    """All runs."""
    return "/" + _query(query=query, state=state, page=page)


def run(key: int) -> str:
    """One run."""
    return f"/runs/{int(key)}"


def incident(run_key: int, incident_id: str) -> str:
    """One incident of a run."""
    return f"/runs/{int(run_key)}/incidents/{_segment(incident_id)}"


def find_incident(incident_id: str) -> str:
    """An incident whose run is not known; answers with where it is."""
    return f"/incidents/{_segment(incident_id)}"


def node(name: str) -> str:
    """A node through all runs."""
    return f"/nodes/{_name(name)}"


def device(name: str) -> str:
    """A device through all runs and nodes."""
    return f"/devices/{_name(name)}"


def fleet(query: str = "", state: str = "", page: int = 1) -> str:
    """All nodes."""
    return "/fleet" + _query(query=query, state=state, page=page)


def drills(page: int = 1) -> str:
    """Injected faults and false alarms."""
    return "/drills" + _query(page=page)


def history(page: int = 1) -> str:
    """Who did what, as JSON."""
    return "/api/history" + _query(page=page)


def login(after: str = "") -> str:
    """Where one signs in. `after`: our address to go on with."""
    return "/login" + _query(after=after)


def logout() -> str:
    """Where one signs out, by POST."""
    return "/logout"


def static(name: str) -> str:
    """A file of the package."""
    version = _VERSIONS.get(name, "")
    return f"/static/{quote(name)}" + _query(v=version)


def events(since: int) -> str:
    """The stream that says when something has changed since."""
    return f"/events?since={int(since)}"


def api() -> str:
    """The list of what programs can ask for."""
    return "/api"


def openapi() -> str:
    """The same for programs."""
    return "/api/openapi.json"


def twin(address: str) -> str:
    """The JSON of the same page. `address`: of the page, as made here."""
    path, mark, query = address.partition("?")
    return ("/api/runs" if path == "/" else f"/api{path}") + mark + query


def export(name: str, run_key: int | None = None) -> str:
    """A table as CSV, of one run or of all."""
    if name not in EXPORTS:
        raise ValueError(f"there is no table {name!r}; there are {', '.join(EXPORTS)}")
    return f"/export/{name}.csv" + ("" if run_key is None else f"?run={int(run_key)}")


def metrics() -> str:
    """Figures for Prometheus."""
    return "/metrics"


# Acts -----------------------------------------------------------------------------------------------------------------


def approve(controller: str, key: int) -> str:
    """Approve what the fleet proposes. `controller`: its key, as the database has it."""
    return f"/fleet/proposals/{_segment(controller)}/{int(key)}/approve"


def reject(controller: str, key: int) -> str:
    """Reject what the fleet proposes."""
    return f"/fleet/proposals/{_segment(controller)}/{int(key)}/reject"


def return_node(name: str) -> str:
    """Give a node back to its cluster. The verb stands before the name, which may have slashes."""
    return f"/act/return/{_name(name)}"


def health_check(name: str) -> str:
    """Start a health check of a node."""
    return f"/act/health-check/{_name(name)}"


def clear_quarantine(run_key: int) -> str:
    """Clear what a run's quarantine denies."""
    return f"/runs/{int(run_key)}/quarantine/clear"


def judge(run_key: int, incident_id: str) -> str:
    """Say of an incident what it was."""
    return f"/runs/{int(run_key)}/incidents/{_segment(incident_id)}/judge"


# Names in addresses ---------------------------------------------------------------------------------------------------


def name_of(given: str) -> str:
    """The name of a node or device, of what stands in an address for it, decoded."""
    return given.removeprefix("/")


def own(address: str) -> str:
    """The address if it is a path of ours, else that of all runs: nobody is sent elsewhere because a link said so.

    Browsers take a backslash for a slash, and drop tabs and line ends, before they look; so none of these may be in it.
    """
    plain = address.isascii() and address.isprintable() and "\\" not in address and " " not in address
    return (
        address if plain and address.startswith("/") and not address.startswith("//") and len(address) <= 2000 else "/"
    )


def set_versions(versions: dict[str, str]) -> None:
    """Tell what the files of `static` are now."""
    _VERSIONS.clear()
    _VERSIONS.update(versions)


def _name(name: str) -> str:
    return _segment(f"/{name}" if name in ("", ".", "..") or name.startswith("/") else name)


def _segment(text: str) -> str:
    return quote(text, safe="", errors="replace")


def _query(**given: str | int) -> str:
    """What differs from its default, in the order given."""
    kept = {name: value for name, value in given.items() if value not in ("", 1)}
    return f"?{urlencode(kept, errors='replace')}" if kept else ""
