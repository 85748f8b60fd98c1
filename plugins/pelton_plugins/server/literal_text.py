"""Messages of users and tools are text: what is spelt like a special token in them does not become one.

A mark is put into each such spelling before the template is rendered, and the prompt is encoded in the pieces between the marks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from pelton.errors import RequestError

MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Code points that Unicode never makes characters of."""
ROLES = ("user", "tool", "function")


def mark(messages: Sequence[dict[str, Any]], tokenizer: Any) -> str | None:
    """Put a mark into each special token in messages of users and tools; returns the mark, None where nothing had one."""
    starts = _starts(tokenizer)
    if starts is None:
        return None
    found = [
        message
        for message in messages
        if message["role"] in ROLES and isinstance(message.get("content"), str) and starts.search(message["content"])
    ]
    if not found:
        return None
    said = "".join(str(message.get("content", "")) for message in messages)
    free = next((char for char in MARKS if char not in said), None)
    if free is None:
        raise RequestError(
            "messages hold all code points from U+FDD0 to U+FDEF, which are not characters; leave one of them out",
            param="messages",
        )
    for message in found:
        message["content"] = starts.sub(lambda match: match[0] + free, message["content"])
    return free


@lru_cache(maxsize=4)
def _starts(tokenizer: Any) -> re.Pattern[str] | None:
    """First characters of special tokens, also where two overlap. Those of one character cannot be taken apart."""
    ids: Iterable[int] = getattr(tokenizer, "special_token_ids", ())
    texts = {text for text in (tokenizer.token_text(token_id) for token_id in ids) if len(text) > 1}
    return re.compile("(?=" + "|".join(map(re.escape, sorted(texts))) + ").", re.S) if texts else None
