"""The log of requests: what was asked for in numbers, and what was said only where the operator wants it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

logger = logging.getLogger("pelton.requests")

NAMES = frozenset(
    {
        "model", "request_id", "reasoning_effort", "effort", "tool_choice", "truncation_side", "truncation", "service_tier",
        "encoding_format", "task",
    }
)  # fmt: skip
"""Texts that are a name or a choice. All others, and lists, may hold what was said, and are left out."""
OPTIONS = frozenset({"stream_options", "sampling_params", "reasoning"})
"""Structs whose numbers and names are shown too."""
MAX_CHARS = 2000


def log_request(request_id: str, request: Any, *, with_prompts: bool) -> None:
    """Write one line; control characters are escaped."""
    fields = msgspec.to_builtins(request)
    shown = {name: value for name, value in fields.items() if value is not None} if with_prompts else _figures(fields)
    sizes = {
        f"num_{name}": len(fields[name])
        for name in ("prompt", "messages", "input", "token_ids")
        if _has_size(fields.get(name))
    }
    text = msgspec.json.encode({**shown, **sizes}).decode()
    if not text.isprintable():
        text = ascii(text)[1:-1]
    logger.info("%s %s", request_id, text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "...")


def _figures(fields: dict[str, Any]) -> dict[str, Any]:
    """Numbers, switches and names."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, (bool, int, float)) or (isinstance(value, str) and name in NAMES):
            found[name] = value
        elif isinstance(value, dict) and name in OPTIONS:
            found[name] = _figures(value)
    return found


def _has_size(value: Any) -> bool:
    return isinstance(value, (str, list))
