"""Interface of a tokenizer: ids, text, the bytes of a token, special tokens, the chat template.

A model format (`pelton.model.formats`) makes one from what lies beside the weights. It is used by several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pelton.errors import NotSupportedError

REPLACEMENT = "\ufffd"
"""What stands for bytes that are not a character on their own."""


@dataclass(frozen=True, slots=True)
class PairEncoding:
    """Two texts as one prompt."""

    token_ids: list[int]
    second_start: int | None
    """The first token of the second text, where the model tells the two apart by it."""


class Tokenizer(ABC):
    """The attributes are set when it is made, and do not change."""

    special_tokens: Mapping[str, str]
    """Name to text, such as {"eos_token": "</s>"}."""
    added_token_ids: frozenset[int]
    """Tokens beside the model's own vocabulary."""
    skipped_token_ids: frozenset[int]
    """What `skip_special_tokens` leaves out."""
    special_token_ids: frozenset[int]
    """`skipped_token_ids`, and the named ones."""
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    vocab_size: int
    """One more than the last id: there may be holes."""
    is_byte_level: bool
    """Each token is a run of bytes, whatever stands beside it."""

    @abstractmethod
    def token_id(self, text: str) -> int | None:
        """The id of the token spelt `text` in the vocabulary; None when there is none."""

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Raises `RequestError` for what is not valid Unicode. A long text must not hold the GIL."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Raises as `encode`."""

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> PairEncoding:
        """Two texts as one prompt, as cross-encoders read them. max_tokens: the longer text loses tokens at its end until they
        fit. Raises as `encode`, and `NotSupportedError` where the tokenizer cannot."""
        raise NotSupportedError("This model's tokenizer encodes no pairs of texts.", param="text_2")

    @abstractmethod
    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The whole text at once; for text that grows, see `IncrementalDetokenizer`. Unknown ids are left out; one that
        can be no id at all (negative) is a `RequestError`."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for; empty for an id that is in no vocabulary."""

    @property
    @abstractmethod
    def max_token_chars(self) -> int | None:
        """Most characters of a text that one token can stand for, but for control characters that have no token and
        whitespace that a special token swallows. None where a token can stand for any number, as for unknown words."""

    @abstractmethod
    def set_chat_template(self, given: str) -> None:
        """Replace the template, and all named ones, by a file or by the template itself. For the start only, before other
        threads use this. Raises `ConfigError`."""

    @abstractmethod
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """The prompt text of a conversation; `chat_template` came with the request. Raises `RequestError` for messages, or a
        template, that cannot be rendered."""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_token_ids

    def token_text(self, token_id: int) -> str:
        """One token as text, for logprobs: bytes that are not a character on their own become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")
