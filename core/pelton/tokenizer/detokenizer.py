"""Text of tokens that arrive a few at a time, without ever showing half a character.

A byte-level tokenizer (GPT-2's kind: SmolLM2, Llama 3, Qwen) is exact and needs no context: each token is a run of bytes,
and an incremental UTF-8 decoder holds back what is incomplete. For the others a window of the last tokens is decoded with
and without the new ones, and the difference is the text.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pelton.tokenizer.interface import REPLACEMENT, Tokenizer

PROMPT_TAIL = 6
"""Prompt tokens read for context: a character has at most four bytes, hence four tokens."""
MAX_HELD_TOKENS = 8
"""A window that still ends in U+FFFD after so many tokens holds no character that is about to be completed."""

_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one sequence. Feed new ids to `step`; call `finish` once at its end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        tail = prompt_token_ids[-PROMPT_TAIL:]
        self._parts: list[str] = []
        self._decoder: _Decoder
        if tokenizer.is_byte_level:
            self._decoder = _ByteLevelDecoder(tokenizer, tail, skip_special_tokens)
        else:
            self._decoder = _WindowDecoder(tokenizer, tail, skip_special_tokens, spaces_between_special_tokens)

    def step(self, new_token_ids: Sequence[int]) -> str:
        """The text that `new_token_ids` complete; what may still become another character is held back."""
        return self._keep(self._decoder.feed(new_token_ids))

    def finish(self) -> str:
        """Return what was held back, U+FFFD for bytes that became no character."""
        return self._keep(self._decoder.flush())

    def _keep(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    @property
    def text(self) -> str:
        """All text so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""


class _Decoder(ABC):
    @abstractmethod
    def feed(self, token_ids: Sequence[int]) -> str: ...

    @abstractmethod
    def flush(self) -> str: ...


class _ByteLevelDecoder(_Decoder):
    def __init__(self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool) -> None:
        self._skipped = tokenizer.skipped_token_ids if skip_special_tokens else frozenset()
        self._bytes_of = tokenizer.token_bytes
        self._decode = _utf8_decoder(errors="replace").decode
        # A prompt may end within a character; a tail that starts within one only yields text that is thrown away.
        self.feed(tail)

    def feed(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:  # the usual case: a decode step
            token_id = token_ids[0]
            return "" if token_id in self._skipped else self._decode(self._bytes_of(token_id))
        skipped, bytes_of = self._skipped, self._bytes_of
        return self._decode(b"".join([bytes_of(token_id) for token_id in token_ids if token_id not in skipped]))

    def flush(self) -> str:
        return self._decode(b"", final=True)


class _WindowDecoder(_Decoder):
    """`_window[: _num_read]` is context whose text is out; the rest is held back."""

    def __init__(
        self, tokenizer: Tokenizer, tail: Sequence[int], skip_special_tokens: bool, spaces_between: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._skipped = tokenizer.skipped_token_ids if skip_special_tokens else frozenset()
        self._glued = frozenset() if spaces_between or skip_special_tokens else tokenizer.added_token_ids
        self._window = [token_id for token_id in tail if token_id not in self._skipped]
        self._num_read = len(self._window)
        self._read_text = self._text(self._window)

    def feed(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            if token_id in self._skipped:
                continue
            self._window.append(token_id)
            text = self._text(self._window)
            held = len(self._window) - self._num_read
            if not text.endswith(REPLACEMENT) or held >= MAX_HELD_TOKENS:
                parts.append(self._take(text, held))
        return "".join(parts)

    def flush(self) -> str:
        held = len(self._window) - self._num_read
        return self._take(self._text(self._window), held) if held else ""

    def _take(self, text: str, held: int) -> str:
        """The new part of the window's text; the tokens it came from become the context of the next."""
        new = text[len(self._read_text) :]
        if self._glued and held == 1 and self._num_read and set(self._window[-2:]) <= self._glued:
            new = new.removeprefix(" ")
        self._window = self._window[self._num_read :] if self._text(self._window[self._num_read :]) else self._window
        self._num_read = len(self._window)
        self._read_text = self._text(self._window)
        return new

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
