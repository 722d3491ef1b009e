"""Files of the package that browsers fetch: styles, scripts, marks. They are read once, and nothing but they can be asked for.

There is no path to leave: what is asked for must be in a table that is made at the start.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
    "txt": "text/plain; charset=utf-8",
    "md": "text/plain; charset=utf-8",
}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True, slots=True)
class File:
    """A file: what is in it, of which type, and a digest of it."""

    content: bytes
    kind: str
    digest: str


@cache
def files() -> dict[str, File]:
    """All files, by their path below `static`."""
    folder = resources.files("bitwitness.web").joinpath("static")
    return dict(_below(folder, "")) if folder.is_dir() else {}


def _below(folder: Traversable, prefix: str) -> list[tuple[str, File]]:
    found: list[tuple[str, File]] = []
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            found += _below(entry, f"{name}/")
        elif kind := _TYPES.get(name.rpartition(".")[2], "" if "." in entry.name else _TYPES["txt"]):
            content = entry.read_bytes()
            found.append((name, File(content, kind, hashlib.sha256(content).hexdigest()[:16])))
    return found


@router.get("/static/{name:path}")
async def static(request: Request, name: str, v: str = "") -> Response:
    """A file; a browser may keep it where its address names what is in it."""
    file = files().get(name)
    if file is None:
        raise HTTPException(404, "there is no such file")
    tag = f'"{file.digest}"'
    keep = "max-age=31536000, immutable" if v == file.digest else "no-cache"
    headers = {"ETag": tag, "Cache-Control": keep}
    if tag in [one.strip() for one in request.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, media_type=file.kind, headers=headers)
