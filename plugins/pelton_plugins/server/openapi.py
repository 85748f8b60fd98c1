"""The OpenAPI description, made from the routes and the structs that they decode and encode."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler

import pelton
from pelton_plugins.server.errors import ErrorResponse

_TYPED = re.compile(r"\{(\w+):\w+\}")
"""A variable of a path as the router writes it."""
REF = "#/components/schemas/{name}"


Body = type[msgspec.Struct] | Sequence[type[msgspec.Struct]] | None
"""One struct, or any of some."""


def api(
    request: Body,
    response: Body,
    error: type[msgspec.Struct] = ErrorResponse,
    *,
    answers_list: bool = False,
    streams: bool = True,
    text: str | None = None,
    query: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Make a route handler's description of itself, its `opt`.

    answers_list: of `response`s. streams: the answer is a stream where the request's `stream` asks for it. text: the media type of
    an answer that is not JSON. query: JSON schemas of the parameters behind the question mark, which may all be left out.
    """
    return {
        "pelton_request": request, "pelton_response": response, "pelton_error": error, "pelton_answers_list": answers_list,
        "pelton_streams": streams, "pelton_text": text, "pelton_query": query or {},
    }  # fmt: skip


def _structs(body: Body) -> list[type[msgspec.Struct]]:
    if body is None:
        return []
    return [body] if isinstance(body, type) else list(body)


def describe_api(handlers: Iterable[Any], *, title: str = "Pelton", with_key: bool = True) -> bytes:
    """OpenAPI 3.1 as JSON. Handlers without `api(...)` are listed without their bodies. with_key: routes need one."""
    routes = [
        handler
        for handler in handlers
        if isinstance(handler, HTTPRouteHandler) and handler.include_in_schema is not False
    ]
    structs: set[type[msgspec.Struct]] = {ErrorResponse}
    for handler in routes:
        for name in ("pelton_request", "pelton_response", "pelton_error"):
            structs |= set(_structs(handler.opt.get(name)))
    schema_of, components = _schemas(tuple(sorted(structs, key=lambda struct: struct.__name__)))
    paths: dict[str, dict[str, Any]] = {}
    for handler in routes:
        for path in sorted(handler.paths):
            operations = paths.setdefault(_TYPED.sub(r"{\1}", path), {})
            for method in sorted(handler.http_methods):
                operation = _operation(handler, schema_of)
                if not with_key:
                    del operation["security"]
                operations[method.lower()] = operation
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": title, "version": pelton.__version__},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
        }
    )


@functools.lru_cache(maxsize=8)
def _schemas(structs: tuple[type[msgspec.Struct], ...]) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """References to these structs, and the schemas of all that they hold, by name. Kept, for processes that make several applications:
    it takes longer than all else here."""
    schemas, components = msgspec.json.schema_components(structs, ref_template=REF)
    for struct in structs:
        _require(components[struct.__name__], getattr(struct, "DESCRIBED_AS_REQUIRED", ()))
    return dict(zip(structs, schemas, strict=True)), components


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Describe fields that may be left out of the struct as required, and not null."""
    for name in names:
        field = schema["properties"][name]
        field["anyOf"] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        field.pop("default", None)
        schema["required"] = [*schema["required"], name]


def _operation(handler: HTTPRouteHandler, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    def schema(structs: Sequence[Any]) -> dict[str, Any]:
        return schema_of[structs[0]] if len(structs) == 1 else {"anyOf": [schema_of[struct] for struct in structs]}

    requests, responses = (_structs(handler.opt.get(f"pelton_{name}")) for name in ("request", "response"))
    content: dict[str, dict[str, Any]] = {}
    if responses:
        answer = schema(responses)
        if handler.opt.get("pelton_answers_list"):
            answer = {"type": "array", "items": answer}
        content["application/json"] = {"schema": answer}
    if handler.opt.get("pelton_text"):
        kind = handler.opt["pelton_text"]
        content[kind] = {"schema": {"type": "object" if kind == "application/json" else "string"}}
    if handler.opt.get("pelton_streams") and any("stream" in request.__struct_fields__ for request in requests):
        content["text/event-stream"] = {}  # OpenAPI 3.1 has no word for events
    error = {"application/json": {"schema": schema_of[handler.opt.get("pelton_error", ErrorResponse)]}}
    found: dict[str, Any] = {
        "summary": (inspect.getdoc(handler.fn) or "").split("\n")[0],
        "security": [{"key": []}],
        "responses": {
            "200": {"description": "OK"} | ({"content": content} if content else {}),
            "default": {"description": "Error", "content": error},
        },
    }
    names = [name for path in handler.paths for name in _TYPED.findall(path)]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in dict.fromkeys(names)
    ]
    for name, kind in (handler.opt.get("pelton_query") or {}).items():
        parameters.append({"name": name, "in": "query", "required": False, "schema": kind})
    if parameters:
        found["parameters"] = parameters
    if requests:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema(requests)}}}
    return found
