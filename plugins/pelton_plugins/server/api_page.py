"""`/docs`: the description of the API as a page to read. It needs no script, and nothing from other hosts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

import msgspec

_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1c1c1c;background:#fff}"
    "summary{cursor:pointer;padding:.4rem 0}code{font-size:.95em}table{border-collapse:collapse;margin:.5rem 0 1rem}"
    "td,th{text-align:left;vertical-align:top;padding:.15rem .8rem .15rem 0;border-bottom:1px solid #ddd}"
    "@media(prefers-color-scheme:dark){body{color:#e8e8e8;background:#181818}td,th{border-color:#444}a{color:#9cf}}"
)
_STYLE_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def page(description: bytes) -> bytes:
    """description: OpenAPI as JSON."""
    api = msgspec.json.decode(description)
    schemas = api["components"]["schemas"]
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: API</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main>',
        f'<h1>{title}: API</h1><p>For programs: <a href="openapi.json">openapi.json</a>.</p>',
    ]
    for path, operations in sorted(api["paths"].items()):
        for method, operation in operations.items():
            parts.append(
                f"<details><summary><code>{escape(method.upper())} {escape(path)}</code> {escape(operation['summary'])}</summary>"
            )
            body = operation.get("requestBody")
            parts += _bodies("Request", body, schemas)
            parts += _bodies("Answer", operation["responses"]["200"], schemas)
            parts.append("</details>")
    return "".join([*parts, "</main></body></html>"]).encode()


def _bodies(what: str, holder: Mapping[str, Any] | None, schemas: Mapping[str, Any]) -> Iterator[str]:
    for kind, content in (holder or {}).get("content", {}).items():
        schema = content.get("schema", {"type": "events"})
        name = schema.get("$ref", "").rpartition("/")[2]
        yield f"<p>{what}: <code>{escape(kind)}</code> {escape(name or _type(schema))}</p>"
        found = schemas.get(name, schema)
        fields = found.get("properties", {})
        if fields:
            required = set(found.get("required", ()))
            yield '<table><tr><th scope="col">field</th><th scope="col">type</th></tr>'
            for field, its in fields.items():
                mark = " (required)" if field in required else ""
                yield f"<tr><td><code>{escape(field)}</code>{mark}</td><td>{escape(_type(its))}</td></tr>"
            yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"]))
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " or ".join(map(repr, schema["enum"]))
    kind = schema.get("type", "anything")
    return (
        f"list of {_type(schema['items'])}" if kind == "array" and isinstance(schema.get("items"), dict) else str(kind)
    )
