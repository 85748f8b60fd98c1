"""The log of requests: what was asked for in numbers, and what was said only where the operator wants it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

logger = logging.getLogger("pelton.requests")

SAID = frozenset(
    {
        "prompt", "messages", "input", "system", "suffix", "documents", "prompt_embeds", "tools", "functions", "stop", "bad_words",
        "chat_template", "chat_template_kwargs", "response_format", "structured_outputs", "instructions", "user", "metadata",
        "cache_salt", "vllm_xargs", "logit_bias", "kv_transfer_params",
        "stop_sequences", "text", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "prediction", "function_call",
        "conversation", "logits_processor_args",
    }
)  # fmt: skip
"""Fields that hold text of a client."""
MAX_CHARS = 2000


def log_request(request_id: str, request: Any, *, with_prompts: bool) -> None:
    """Write one line; control characters are escaped."""
    fields = msgspec.to_builtins(request)
    shown = {name: value for name, value in fields.items() if value is not None and (with_prompts or name not in SAID)}
    sizes = {
        f"num_{name}": len(fields[name]) for name in ("prompt", "messages", "input") if _has_size(fields.get(name))
    }
    text = msgspec.json.encode({**shown, **sizes}).decode()
    if not text.isprintable():
        text = ascii(text)[1:-1]
    logger.info("%s %s", request_id, text if len(text) <= MAX_CHARS else text[:MAX_CHARS] + "...")


def _has_size(value: Any) -> bool:
    return isinstance(value, (str, list))
