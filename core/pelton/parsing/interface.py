"""Interface of the parsers that take a model's text apart: reasoning, tool calls, and the rest, its content.

A parser is one incremental state machine for one answer: fed at once or token by token it gives the same events but for where
texts are cut. `pelton.testing.output_parser` tests that at every cut.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call begins; `Arguments` after it are its own. Those of a call without arguments are "{}"."""

    name: str
    call_id: str | None = None
    """As the model wrote it; None: the server makes one."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's arguments: together a JSON object, unless the model wrote something else."""

    text: str


Event = Content | Reasoning | ToolCall | Arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserContext:
    """Everything that a parser is made from. New fields have defaults."""

    prompt: str = ""
    """The rendered prompt: a chat template may have begun the answer, such as with an open `<think>`."""
    tools: Sequence[Mapping[str, Any]] = ()
    """The functions that the request offers: `name`, and perhaps `description` and `parameters` (a JSON schema)."""
    response_template: Mapping[str, Any] | None = None
    """How the checkpoint itself describes its answers, where it does."""


class OutputParser(ABC):
    """Made for one answer. A parser of calls may read reasoning too (`reads_reasoning`); else it is fed the content that the
    reasoning parser leaves. Called on the server's event loop: a call must not take long."""

    reads_reasoning: ClassVar[bool] = False
    ids_have_nine_characters: ClassVar[bool] = False
    """Ids that the server makes for calls are nine letters and digits."""
    reasoning_end: ClassVar[Sequence[str]] = ()
    """Texts after which the reasoning is over: a constraint on the answer's form holds from there on."""
    reasoning_begin: ClassVar[Sequence[str]] = ()
    """Texts that open the reasoning; none where the model thinks without one."""

    @abstractmethod
    def __init__(self, context: ParserContext) -> None: ...

    @classmethod
    @abstractmethod
    def markers(cls, context: ParserContext) -> Collection[str] | None:
        """The texts that the format is made of. Where one is a special token, those of them are shown to the parser; None: all."""

    @classmethod
    def call_format(cls, context: ParserContext, *, is_parallel: bool) -> Mapping[str, Any] | None:
        """A structural tag's `format` of answers whose calls keep to `context.tools`: arguments to their schema where `strict` is set."""
        return None  # the format does not say

    @abstractmethod
    def feed(self, text: str) -> Sequence[Event]:
        """Take in more of the answer; returns what is certain by now. Text that may yet turn out to be a marker is held back."""

    @abstractmethod
    def finish(self) -> Sequence[Event]:
        """End the answer, perhaps in the middle of a call, and return what was held back. Text that is not a call is content."""
