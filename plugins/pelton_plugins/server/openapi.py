"""The OpenAPI description, made from the routes and the structs that they decode and encode."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import msgspec
from litestar.handlers import HTTPRouteHandler

import pelton
from pelton_plugins.server.errors import ErrorResponse

_TYPED = re.compile(r"\{(\w+):\w+\}")
"""A variable of a path as the router writes it."""
REF = "#/components/schemas/{name}"


def api(
    request: type[msgspec.Struct] | None,
    response: type[msgspec.Struct] | None,
    error: type[msgspec.Struct] = ErrorResponse,
    *,
    answers_list: bool = False,
) -> dict[str, Any]:
    """Make a route handler's description of itself, its `opt`. answers_list: of `response`s."""
    return {
        "pelton_request": request, "pelton_response": response, "pelton_error": error, "pelton_answers_list": answers_list,
    }  # fmt: skip


def describe_api(handlers: Iterable[Any], *, title: str = "Pelton", with_key: bool = True) -> bytes:
    """OpenAPI 3.1 as JSON. Handlers without `api(...)` are listed without their bodies. with_key: routes need one."""
    routes = [
        handler
        for handler in handlers
        if isinstance(handler, HTTPRouteHandler) and handler.include_in_schema is not False
    ]
    structs: set[type[msgspec.Struct]] = {ErrorResponse}
    for handler in routes:
        structs |= {
            value for value in handler.opt.values() if inspect.isclass(value) and issubclass(value, msgspec.Struct)
        }
    ordered = sorted(structs, key=lambda struct: struct.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=REF)
    schema_of = dict(zip(ordered, schemas, strict=True))
    for struct in ordered:
        _require(components[struct.__name__], getattr(struct, "DESCRIBED_AS_REQUIRED", ()))
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


def _require(schema: dict[str, Any], names: Iterable[str]) -> None:
    """Describe fields that may be left out of the struct as required, and not null."""
    for name in names:
        field = schema["properties"][name]
        field["anyOf"] = [kind for kind in field["anyOf"] if kind != {"type": "null"}]
        field.pop("default", None)
        schema["required"] = [*schema["required"], name]


def _operation(handler: HTTPRouteHandler, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    request, response = handler.opt.get("pelton_request"), handler.opt.get("pelton_response")
    answer = schema_of[response] if response else {}
    if handler.opt.get("pelton_answers_list"):
        answer = {"type": "array", "items": answer}
    found: dict[str, Any] = {
        "summary": (inspect.getdoc(handler.fn) or "").split("\n")[0],
        "security": [{"key": []}],
        "responses": {
            "200": {"description": "OK"} | (_content(answer) if answer else {}),
            "default": {"description": "Error"} | _content(schema_of[handler.opt.get("pelton_error", ErrorResponse)]),
        },
    }
    names = [name for path in handler.paths for name in _TYPED.findall(path)]
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in dict.fromkeys(names)
        ]
    if request is not None:
        found["requestBody"] = {"required": True} | _content(schema_of[request])
        if "stream" in request.__struct_fields__:
            found["responses"]["200"].setdefault("content", {})["text/event-stream"] = {"schema": {"type": "string"}}
    return found


def _content(schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {"application/json": {"schema": schema}}}
