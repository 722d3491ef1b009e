"""What programs can ask for, as a page: made from the same OpenAPI document that programs read, so that it cannot be behind.

The usual viewer of such documents is fetched from a server on the internet, which a console on a cluster does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from bitwitness.web.rendering import as_json, render

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A part of an address that changes: its name, where it stands, what it may be, and what it is for."""

    name: str
    where: str
    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that can be asked for."""

    method: str
    path: str
    summary: str
    text: str
    parameters: tuple[Parameter, ...]
    answer: str


@router.get("/api/openapi.json")
def openapi(request: Request) -> Response:
    """The document."""
    return as_json(request.app.openapi())


@router.get("/api")
def api(request: Request) -> Response:
    """The list."""
    return render(request, "api.html.jinja", operations=operations(request.app.openapi()), here="api")


def operations(document: Mapping[str, Any]) -> tuple[Operation, ...]:
    """All that is in an OpenAPI document, in its order."""
    return tuple(
        Operation(
            method.upper(),
            path,
            str(entry.get("summary", "")),
            str(entry.get("description", "")),
            tuple(_parameter(one) for one in entry.get("parameters", ())),
            _answer(entry),
        )
        for path, methods in document.get("paths", {}).items()
        for method, entry in methods.items()
    )


def _parameter(entry: Mapping[str, Any]) -> Parameter:
    return Parameter(
        str(entry["name"]), str(entry["in"]), _kind(entry.get("schema", {})), str(entry.get("description", ""))
    )


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(one) or '""' for one in schema["enum"])
    parts = schema.get("anyOf")
    return " | ".join(_kind(one) for one in parts) if parts else str(schema.get("type", "any"))


def _answer(entry: Mapping[str, Any]) -> str:
    content = entry.get("responses", {}).get("200", {}).get("content", {})
    for kind, about in content.items():
        name = str(about.get("schema", {}).get("$ref", "")).rpartition("/")[2]
        return f"{kind}: {name}" if name else str(kind)
    return ""
