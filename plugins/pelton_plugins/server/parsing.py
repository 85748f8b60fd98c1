"""Parsers of one server, and the reading of one answer: reasoning first, then the calls in what is left."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton.errors import ConfigError, EngineError, PeltonError
from pelton.logging import get_logger
from pelton.parsing.interface import (
    Arguments,
    Content,
    Event,
    OutputParser,
    ParserContext,
    ToolCall,
)
from pelton.plugins import calling
from pelton_plugins.server.config import ServerConfig

if TYPE_CHECKING:
    from pelton.entries import Entry
    from pelton.plugins import Plugins
    from pelton_plugins.server.http_metrics import HttpMetrics

logger = get_logger(__name__)

CHECKPOINTS_OWN = "response_template"
"""Name of the parser that reads what the checkpoint says of its answers."""
FORCED = "json_calls"
"""Name of the parser of the calls that `tool_choice` "required" forces."""

ParserClass = type[OutputParser]


class Parsers:
    """Made with the application; `of_model` adds what the checkpoint says, once it is there."""

    def __init__(self, config: ServerConfig, plugins: Plugins, metrics: HttpMetrics | None = None) -> None:
        self._plugins = plugins
        self._metrics = metrics
        self._tool_name = config.tool_call_parser or CHECKPOINTS_OWN
        self.tool: ParserClass | None = None
        self.reasoning: ParserClass | None = None
        if (name := config.tool_call_parser) is not None:
            self.tool = checked(plugins.find("pelton_tool_parsers", name, setting="tool_call_parser"))
        if (name := config.reasoning_parser) is not None:
            self.reasoning = checked(plugins.find("pelton_reasoning_parsers", name, setting="reasoning_parser"))
        self._allows_auto = config.enable_auto_tool_choice is not False
        if config.enable_auto_tool_choice and config.tool_call_parser is None:
            self._needs_template = True
        else:
            self._needs_template = False
        self._template: Mapping[str, Any] | None = None
        self._is_ready = False
        self._special: dict[frozenset[str] | None, re.Pattern[str] | None] = {}

    def _tool(self, name: str) -> ParserClass:
        found: ParserClass = self._plugins.find("pelton_tool_parsers", name, setting="tool_call_parser").resolve()
        return found

    def of_model(self, llm: Any) -> Parsers:
        """These, once the model's folder has been looked into. Raises `ConfigError` for a template that is not sound."""
        if self._is_ready:
            return self
        self._template = read_template(getattr(llm.model, "tokenizer_path", None))
        if self._template is not None:
            own = self._tool(CHECKPOINTS_OWN)
            own(ParserContext(response_template=self._template))
            self.tool, self.reasoning = self.tool or own, self.reasoning or own
        elif self._needs_template:
            raise ConfigError(
                "enable_auto_tool_choice needs tool_call_parser: the checkpoint has no response_template. "
                f"Name one of {', '.join(entry.name for entry in self._plugins.entries('pelton_tool_parsers'))}."
            )
        self._is_ready = True
        return self

    @property
    def reads_calls(self) -> bool:
        """A model may decide by itself to call a tool."""
        return self.tool is not None and self._allows_auto

    def plan(self, context: ParserContext, *, tools: str) -> AnswerPlan | None:
        """How the answers to one prompt are read; None: they are content alone. tools: "none", "auto", "required" or "named"."""
        context = ParserContext(prompt=context.prompt, tools=context.tools, response_template=self._template)
        chain = [self.reasoning] if self.reasoning is not None else []
        if tools == "auto" and self.tool is not None:
            chain = [self.tool] if self.tool.reads_reasoning else [*chain, self.tool]
        if tools == "required":
            chain = [*chain, self._tool(FORCED)]
        if not chain:
            return None
        reads_calls = tools == "required" or (tools == "auto" and self.tool is not None)
        name = FORCED if tools == "required" else self._tool_name
        count = partial(self._metrics.count_tool_answer, name) if reads_calls and self._metrics is not None else None
        return AnswerPlan(chain, context, count)

    def hidden(self, plan: AnswerPlan, tokenizer: Any) -> re.Pattern[str] | None:
        """The special tokens that the plan's parsers do not read, where they need to see others; None: they need none."""
        wanted = plan.markers
        if wanted in self._special:
            return self._special[wanted]
        ids: frozenset[int] = getattr(tokenizer, "skipped_token_ids", frozenset())
        texts = {tokenizer.token_text(token_id) for token_id in ids}
        shown = texts if wanted is None else texts & wanted
        pattern = None
        if shown:
            others = sorted(texts - shown, key=len, reverse=True)
            pattern = re.compile("|".join(map(re.escape, others)) or r"(?!)")
        self._special[wanted] = pattern
        return pattern


def checked(entry: Entry) -> ParserClass:
    """Return what a parser's entry loads. Raises `PluginError` for a class that could read no answer."""
    with calling(entry):
        found: ParserClass = entry.resolve()
        if not (isinstance(found, type) and issubclass(found, OutputParser)):
            raise TypeError(f"it is {found!r}, not a class made from pelton.parsing.interface.OutputParser")
        if found.__abstractmethods__:
            raise TypeError(f"it lacks {', '.join(sorted(found.__abstractmethods__))}")
        if entry.name != CHECKPOINTS_OWN:  # which is made for a checkpoint
            markers = found.markers(ParserContext())
            if isinstance(markers, str) or not all(isinstance(marker, str) for marker in markers or ()):
                raise TypeError(f"its markers are {markers!r}, not a list of texts")
    return found


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Parsers of an answer, in their order."""

    chain: list[ParserClass]
    context: ParserContext
    count: Callable[[int], None] | None = None
    """Takes how many calls an answer had, where a tool parser reads it."""

    @property
    def markers(self) -> frozenset[str] | None:
        found: set[str] = set()
        for parser in self.chain:
            markers: Collection[str] | None = parser.markers(self.context)
            if markers is None:
                return None
            found |= set(markers)
        return frozenset(found)

    @property
    def ids_have_nine_characters(self) -> bool:
        return any(parser.ids_have_nine_characters for parser in self.chain)


@contextmanager
def _named(*parsers: type[Any]) -> Iterator[None]:
    """Around a call of parsers: what one raises is logged in full, and told as its mistake."""
    try:
        yield
    except PeltonError:
        raise
    except Exception as error:
        names = ", ".join(f"{parser.__module__}:{parser.__qualname__}" for parser in parsers)
        logger.exception("A parser of the answer failed: %s.", names)
        raise EngineError(f"A parser of the answer failed ({names}). The server's log tells more.") from error


class AnswerReader:
    """One answer: each parser is fed the content that the one before it leaves."""

    def __init__(self, plan: AnswerPlan, hidden: re.Pattern[str] | None = None) -> None:
        """hidden: texts of special tokens, which are dropped; each comes in one piece."""
        with _named(*plan.chain):
            self._parsers = [parser(plan.context) for parser in plan.chain]
        self._hidden = hidden

    def feed(self, text: str) -> list[Event]:
        if self._hidden is not None and text:
            text = self._hidden.sub("", text)
        return self._through([Content(text)], 0) if text else []

    def finish(self) -> list[Event]:
        found: list[Event] = []
        for index, parser in enumerate(self._parsers):
            with _named(type(parser)):
                events = list(parser.finish())
            found += self._through(events, index + 1)
        return found

    def _through(self, events: Iterable[Event], index: int) -> list[Event]:
        for parser in self._parsers[index:]:
            left: list[Event] = []
            with _named(type(parser)):
                for event in events:
                    left += parser.feed(event.text) if isinstance(event, Content) else [event]
            events = left
        return list(events)


class NamedReader:
    """An answer whose content is the arguments of one call, as `tool_choice` forces it. reads_input: of a tool that takes a text."""

    def __init__(self, name: str, inner: AnswerReader | None, *, reads_input: bool = False) -> None:
        self._name = name
        self._inner = inner
        self._reads_input = reads_input
        self._has_begun = False

    def feed(self, text: str) -> list[Event]:
        return self._as_arguments([Content(text)] if self._inner is None else self._inner.feed(text))

    def finish(self) -> list[Event]:
        found = self._as_arguments([] if self._inner is None else self._inner.finish())
        if not self._has_begun:
            found += [ToolCall(self._name), *([] if self._reads_input else [Arguments("{}")])]
        return found

    def _as_arguments(self, events: Iterable[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            if not isinstance(event, Content):
                found.append(event)
            elif event.text:
                if not self._has_begun:
                    found.append(ToolCall(self._name))
                    self._has_begun = True
                found.append(Arguments(event.text))
        return found


def read_template(folder: str | None) -> Mapping[str, Any] | None:
    """Return the `response_template` that lies beside a tokenizer."""
    if folder is None:
        return None
    path = Path(folder)
    path = (path if path.is_dir() else path.parent) / "tokenizer_config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(CHECKPOINTS_OWN)
    except (OSError, ValueError, AttributeError):
        return None  # the tokenizer says what is wrong with it
    return found if isinstance(found, dict) else None
