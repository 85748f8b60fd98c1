"""The ASGI application: built-in and plugins' routes on Litestar, behind the middleware."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from litestar import Litestar, Request, Response
from litestar.exceptions import ImproperlyConfiguredException, NotFoundException
from litestar.types import ASGIApp

from pelton.entries import Entry
from pelton.errors import PluginError
from pelton.plugins import Plugins, calling
from pelton_plugins.server.errors import describe
from pelton_plugins.server.known_routes import not_found, why_not
from pelton_plugins.server.middleware import Middleware
from pelton_plugins.server.openapi import describe_api
from pelton_plugins.server.parsing import Parsers
from pelton_plugins.server.state import ServerState


def build_app(state: ServerState, plugins: Plugins) -> ASGIApp:
    """Routes come from the `pelton_http_routes` hook, the built-in ones too."""
    state.parsers = Parsers(state.config, plugins, state.http_metrics)
    handlers: list[Any] = []
    owners: list[tuple[Any, Entry]] = []
    for entry in plugins.entries("pelton_http_routes"):
        with calling(entry):
            found = list(entry.resolve()(state))
        owners += [(handler, entry) for handler in found]
        handlers += found
    state.openapi = describe_api(handlers, with_key=bool(state.config.api_key))

    methods: dict[str, set[str]] = {}
    for handler in handlers:
        for path in getattr(handler, "paths", ()):
            methods.setdefault(path, set()).update(map(str, getattr(handler, "http_methods", ())))

    def on_error(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
        request_id = str(request.scope.get("pelton_request_id", ""))
        body = describe(error, request_id, in_detail=state.config.return_errors_in_detail)
        if isinstance(error, NotFoundException):
            body.error.message = why_not(request.url.path) or not_found(request.url.path, methods)
        headers = {"allow": ", ".join(_allowed(methods, request.url.path))} if body.error.code == 405 else {}
        return Response(
            msgspec.json.encode(body), status_code=body.error.code, media_type="application/json", headers=headers
        )

    try:
        router = Litestar(
            route_handlers=handlers,
            exception_handlers={Exception: on_error},
            openapi_config=None,
            logging_config=None,
            request_max_body_size=None,  # read and bounded by Exchange
            debug=False,
        )
    except ImproperlyConfiguredException as error:
        raise PluginError(f"The plugins' HTTP routes do not fit together: {error}.{_rivals(owners)}") from error
    public = {
        path for handler in handlers if getattr(handler, "opt", {}).get("pelton_public") for path in handler.paths
    }
    wraps = [_wrap(entry, state) for entry in plugins.entries("pelton_http_middleware")]
    state.writes_directly = not wraps  # theirs may change what is sent
    return Middleware(router, state, wraps, public=public)


_VARIABLE = re.compile(r"\\\{\w+:(\w+)\\\}")
"""A variable in the path of a route, escaped."""


def _matches(variable: re.Match[str]) -> str:
    return ".+" if variable[1] == "path" else "[^/]+"


def _allowed(methods: Mapping[str, Collection[str]], path: str) -> list[str]:
    """The methods of the route that a path belongs to. methods: by the paths of routes, as the router writes them."""
    for route, found in methods.items():
        if re.fullmatch(_VARIABLE.sub(_matches, re.escape(route)), path):
            return sorted(found)
    return []


def _rivals(owners: Sequence[tuple[Any, Entry]]) -> str:
    """Say whose routes have one path and method."""
    taken: dict[tuple[str, str], Entry] = {}
    for handler, entry in owners:
        for place in itertools.product(getattr(handler, "paths", ()), map(str, getattr(handler, "http_methods", ()))):
            other = taken.setdefault(place, entry)
            if other is not entry:
                return f" Both {other} and {entry} offer {place[1]} {place[0]}."
    return ""


def _wrap(entry: Entry, state: ServerState) -> Callable[[ASGIApp], ASGIApp]:
    """Return what puts a plugin's middleware around an application."""

    def wrap(app: ASGIApp) -> ASGIApp:
        with calling(entry):
            made: ASGIApp = entry.resolve()(app, state)
        if not callable(made):
            raise PluginError(f"{entry} gives {made!r}; it has to give an ASGI application.")
        return made

    return wrap
