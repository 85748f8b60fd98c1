"""`/` and what it needs: files of this folder, as they are. The page asks the other routes, as any client does."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from litestar import Request, Response, get

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {
    ".html": "text/html",  # the router adds the charset
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    # Scripts and styles of this server alone, none of them inline, and no address but this server's.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-cache",
}


def routes(state: Any) -> list[Any]:
    """No routes where the server is told so (`--no-ui`)."""
    if not state.config.ui:
        return []
    files = {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}
    page = files.pop("index.html")
    tags = {name: f'"{hashlib.sha256(data).hexdigest()[:16]}"' for name, data in (*files.items(), ("index.html", page))}
    public = {"pelton_public": True}  # the browser asks for them before anybody can give a key

    def answer(request: Request[Any, Any, Any], name: str, data: bytes) -> Response[bytes]:
        headers = {**HEADERS, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(b"", status_code=304, headers=headers)
        return Response(data, media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)

    @get("/", opt=public, include_in_schema=False)
    async def index(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return the page."""
        return answer(request, "index.html", page)

    @get([f"/ui/{name}" for name in files], opt=public, include_in_schema=False)
    async def file(request: Request[Any, Any, Any]) -> Response[bytes]:
        """Return a style, script or picture of the page."""
        name = request.url.path.rpartition("/")[2]
        return answer(request, name, files[name])

    return [index, file]
