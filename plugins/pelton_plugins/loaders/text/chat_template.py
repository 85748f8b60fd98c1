"""Chat templates: from messages to the prompt text that a model was trained on.

The same names and filters as in transformers, so that a model's own template gives the same text. See `template_guard.py`
for what keeps a hostile one in bounds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from pelton.errors import ConfigError, NotSupportedError, PeltonError, RequestError
from pelton.limits import MAX_CHAT_TEMPLATE_CHARS, MAX_TEMPLATE_OUTPUT_CHARS
from pelton_plugins.loaders.text.template_guard import GuardedEnvironment, RaisedByTemplate, TemplateLimitError

CONTINUE_MARK = "PELTON_CONTINUES_HERE "
RESERVED = (
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "tokenize",
)


class ChatTemplate:
    """A compiled template. Raises `ConfigError` when it is too long or not Jinja."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_CHAT_TEMPLATE_CHARS:
            raise ConfigError(
                f"The chat template has {len(source)} characters; at most {MAX_CHAT_TEMPLATE_CHARS} are read."
            )
        self.source = source
        environment = _environment()
        try:
            self._takes_parts = _reads_content_parts(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"The chat template is not valid Jinja: {error.message} (line {error.lineno})."
            ) from error
        except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ConfigError(f"The chat template cannot be compiled: {type(error).__name__}: {error}.") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        special_tokens: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises `RequestError` naming the field that the template, or a bound, refuses."""
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other; set one of them to false.",
                param="continue_final_message",
            )
        chat = [self._prepare(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            _mark_end(chat)
        text = self._run(
            {
                **(special_tokens or {}),
                **_checked_extra(extra),
                "messages": chat,
                "tools": _plain(tools, "tools") if tools else None,
                "documents": _plain(documents, "documents") if documents else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at_mark(text) if continue_final_message else text

    def _run(self, variables: dict[str, Any]) -> str:
        parts, num_chars = [], 0
        try:
            with _environment().budget():
                for part in self._template.generate(variables):
                    num_chars += len(part)
                    if num_chars > MAX_TEMPLATE_OUTPUT_CHARS:
                        raise TemplateLimitError(f"it writes more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")
                    parts.append(part)
        except RaisedByTemplate as error:
            raise RequestError(f"The model's chat template refuses the messages: {error}", param="messages") from error
        except TemplateLimitError as error:
            raise RequestError(f"The chat template was stopped: {error}.", param="messages") from error
        except PeltonError:
            raise
        except Exception as error:  # whatever a template does with values of the wrong type
            raise RequestError(
                f"The chat template fails on these messages: {type(error).__name__}: {error}.", param="messages"
            ) from error
        return "".join(parts)

    def _prepare(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """A copy in the shape that templates read: text content as a string, arguments of tool calls as mappings."""
        if not isinstance(message, Mapping):
            raise RequestError(
                f"messages[{index}] is a {type(message).__name__}; expected an object.", param="messages"
            )
        prepared: dict[str, Any] = _plain(message, "messages")
        content = prepared.get("content")
        if isinstance(content, list) and not self._takes_parts:
            prepared["content"] = "\n".join(_part_text(part, index) for part in content)
        elif isinstance(content, list):
            prepared["content"] = [{"type": "text", "text": _part_text(part, index)} for part in content]
        if not prepared.get(
            "tool_calls"
        ):  # templates ask whether there are any; clients send an answer back with an empty list
            prepared.pop("tool_calls", None)
        for call in prepared.get("tool_calls", ()):
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function["arguments"] = _arguments(function["arguments"], index)
        return prepared


@lru_cache(maxsize=1)
def _environment() -> GuardedEnvironment:
    return GuardedEnvironment()


def read_template(given: str) -> str:
    """Return the template that --chat-template names: a file, or the template itself."""
    looks_inline = "{{" in given or "{%" in given or "\n" in given
    if looks_inline:
        return given
    if not os.path.isfile(given):
        raise ConfigError(
            f"chat_template is {given!r}: no such file, and no Jinja template (it has neither {{{{ nor {{%)."
        )
    return read_template_file(Path(given))


def read_template_file(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The chat template {file} cannot be read: {error}.") from error
    if len(text) > MAX_CHAT_TEMPLATE_CHARS:
        raise ConfigError(
            f"The chat template {file} has {len(text)} characters; at most {MAX_CHAT_TEMPLATE_CHARS} are read."
        )
    return text


def _plain(value: Any, field: str, depth: int = 0) -> Any:
    """A deep copy of JSON-like data: nothing else may reach a template. field: whose it is."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if depth > 64:
        raise RequestError(f"{field} are nested more than 64 levels deep.", param=field)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, field, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, field, depth + 1) for item in value]
    raise RequestError(f"{field} hold a {type(value).__name__}; expected plain JSON values.", param=field)


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal", None) and isinstance(text, str):
        return text
    raise NotSupportedError(
        f"messages[{index}] has a content part of type {kind!r}; this model takes text parts only.", param="messages"
    )


class CallArguments(dict[str, Any]):
    """Arguments of a call: a mapping, and the text that they came as where a template adds them to a text or writes them out."""

    def __init__(self, text: str, found: Mapping[str, Any]) -> None:
        super().__init__(found)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: Any) -> str:
        return self._text + str(other)

    def __radd__(self, other: Any) -> str:
        return str(other) + self._text


def _arguments(text: str, index: int) -> Any:
    if not text.strip():
        return CallArguments("{}", {})
    try:
        found = json.loads(text)
        return CallArguments(text, found) if isinstance(found, dict) else found
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"messages[{index}] has a tool call whose arguments are not valid JSON: {error}.", param="messages"
        ) from error


def _checked_extra(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    for name in extra or ():
        if name in RESERVED or not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
            raise RequestError(
                f"chat_template_kwargs has {name!r}, which is not a name that a template may be given this way.",
                param="chat_template_kwargs",
            )
    plain: dict[str, Any] = _plain(extra or {}, "chat_template_kwargs")
    return plain


def _mark_end(chat: list[dict[str, Any]]) -> None:
    """Put the mark behind the last message's text; the prompt is cut there afterwards."""
    content = chat[-1].get("content") if chat else None
    if isinstance(content, str):
        chat[-1]["content"] = content + CONTINUE_MARK
    elif isinstance(content, list) and content:
        content[-1]["text"] += CONTINUE_MARK
    else:
        raise RequestError(
            "continue_final_message is set, but the last message has no text to continue.",
            param="continue_final_message",
        )


def _cut_at_mark(text: str) -> str:
    where = text.rfind(CONTINUE_MARK.strip())
    if where < 0:
        raise RequestError(
            "continue_final_message is set, but the chat template leaves out the last message.",
            param="continue_final_message",
        )
    # A template that trims the text took the mark's own space away: then it would have trimmed before the mark too.
    return text[:where] if text.startswith(CONTINUE_MARK, where) else text[:where].rstrip()


def _reads_content_parts(template: nodes.Template) -> bool:
    """Return whether the template goes through a message's content part by part; else it takes it as a string."""
    return any(_is_content(loop.iter) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name == "content"
