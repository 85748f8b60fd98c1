"""The tokenizer of Hugging Face folders and GGUF files: the Rust `tokenizers` package with the chat template.

Safe to use from several threads: the Rust part is not changed after it is made, and the memo below only grows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import tokenizers

from pelton.errors import ConfigError, RequestError
from pelton.tokenizer.interface import PairEncoding, Tokenizer
from pelton_plugins.loaders.text.chat_template import ChatTemplate, read_template

_LONG_TEXT_CHARS = 4096
"""From here on a text is encoded as a batch: `tokenizers` holds the GIL while it encodes one, not for a batch."""


class RustTokenizer(Tokenizer):
    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """special_tokens: name to text, such as {"eos_token": "</s>"}; templates may use the names.
        chat_templates: other templates by name; "tool_use" is taken for requests with tools."""
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        named = (self.token_id(text) for text in self.special_tokens.values())
        self.skipped_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_token_ids = self.skipped_token_ids | {token_id for token_id in named if token_id is not None}
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pad_token_id = self._named_id("pad_token")
        self.unk_token_id = self._named_id("unk_token")
        # One past the last id: ids of added tokens may lie beyond the model's own, and holes are possible.
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(self.added_token_ids, default=-1) + 1)
        self.is_byte_level = _decodes_bytes(backend)
        self._token_bytes: dict[int, bytes] = {}
        self.chat_template = None if chat_template is None else ChatTemplate(chat_template)
        self._named_templates = {name: ChatTemplate(text) for name, text in (chat_templates or {}).items()}

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, text: str) -> int | None:
        token_id: int | None = self.backend.token_to_id(text)
        return token_id

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) >= _LONG_TEXT_CHARS:
                return self.encode_batch([text], add_special_tokens)[0]
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise _no_text(text) from error
        return ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """On as many threads as there are cores. Raises as `encode`."""
        try:
            found = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise next(filter(None, map(_no_text_error, texts)), _no_text(texts)) from error
        return [encoding.ids for encoding in found]

    def encode_pair(self, first: str, second: str, max_tokens: int | None = None) -> PairEncoding:
        try:
            found = self.backend.encode(first, second)
        except TypeError as error:
            raise next(filter(None, map(_no_text_error, (first, second))), _no_text(second)) from error
        ids, types, owners = found.ids, found.type_ids, found.sequence_ids
        if max_tokens is not None and len(ids) > max_tokens:
            kept = _longest_first(owners, max_tokens)
            ids, types = [ids[place] for place in kept], [types[place] for place in kept]
        return PairEncoding(ids, types.index(1) if 1 in types else None)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"Invalid token id ({error}); ids must be 0 to {self.vocab_size - 1}.", param="tokens"
            ) from error
        return text

    def token_bytes(self, token_id: int) -> bytes:
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._bytes_of(token_id)
        return known

    def _bytes_of(self, token_id: int) -> bytes:
        spelling = self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if spelling is None:
            return b""
        if self.is_byte_level:
            # As the Rust decoder does it, added tokens included: raw text where a character stands for no byte.
            try:
                return bytes(map(BYTE_OF_CHARACTER.__getitem__, spelling))
            except KeyError:
                return str(spelling).encode()
        if token_id in self.added_token_ids:
            return str(spelling).encode()
        if len(spelling) == 6 and spelling.startswith("<0x") and spelling.endswith(">"):
            return bytes.fromhex(spelling[3:5])
        return str(spelling).replace("▁", " ").encode()

    @cached_property
    def max_token_chars(self) -> int | None:
        composes = _composes(self.backend)
        spellings = (
            [character for character, byte in BYTE_OF_CHARACTER.items() if byte in _TEXT_BYTES]
            if self.is_byte_level
            else [f"<0x{byte:02X}>" for byte in _TEXT_BYTES]
        )
        if composes is None or any(self.token_id(spelling) is None for spelling in spellings):
            return None
        longest = 1
        for token_id in self.backend.get_vocab(with_added_tokens=True).values():
            token = self._bytes_of(token_id)
            # At most four characters compose to one, and that has two bytes or more.
            odd = len(token) - len(token.translate(None, _HIGH_BYTES)) if composes else 0
            longest = max(longest, len(token) + odd)
        return longest

    def set_chat_template(self, given: str) -> None:
        self.chat_template = ChatTemplate(read_template(given))
        self._named_templates = {}

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
        if chat_template is not None:
            template: ChatTemplate | None = _from_request(chat_template)
        else:
            template = (self._named_templates.get("tool_use") if tools else None) or self.chat_template
        if template is None:
            raise RequestError(
                "This model has no chat template: use /v1/completions (LLM.generate), or start with --chat-template.",
                param="messages",
            )
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self.special_tokens,
            extra=chat_template_kwargs,
        )


def _longest_first(owners: Sequence[int | None], most: int) -> list[int]:
    """The places of a pair's tokens that stay: the longer text gives up its last ones. owners: 0, 1, or None of a special token."""
    counts = [sum(owner == text for owner in owners) for text in (0, 1)]
    for _ in range(min(len(owners) - most, sum(counts))):
        counts[0 if counts[0] > counts[1] else 1] -= 1
    seen, kept = [0, 0], []
    for place, owner in enumerate(owners):
        if owner is not None:
            seen[owner] += 1
        if owner is None or seen[owner] <= counts[owner]:
            kept.append(place)
    return kept


def _from_request(source: str) -> ChatTemplate:
    try:
        return ChatTemplate(source)
    except ConfigError as error:  # the caller's, since it came with the request
        raise RequestError(f"The chat template is broken: {error}", param="chat_template") from None


def _no_text_error(text: Any) -> RequestError | None:
    """Why `text` cannot be encoded; None when it can."""
    if not isinstance(text, str):
        return RequestError(f"The prompt is a {type(text).__name__}; expected text.", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return RequestError(
            f"The prompt is not valid Unicode: unpaired surrogate at character {error.start}.", param="prompt"
        )
    return None


def _no_text(text: Any) -> RequestError:
    return _no_text_error(text) or RequestError("The prompt cannot be tokenized.", param="prompt")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()


_HIGH_BYTES = bytes(range(128, 256))
_TEXT_BYTES = frozenset([*range(0x20, 0x7F), *range(0x80, 0xC0), *range(0xC2, 0xF1)])
"""Of which UTF-8 text consists, but for control characters and planes that are not assigned: SmolLM lacks some of those."""


def _composes(backend: tokenizers.Tokenizer) -> bool | None:
    """Return whether the normalizer makes one character of several; None where something drops parts of a text."""
    composes = False
    for part, inner in ((backend.normalizer, "normalizers"), (backend.pre_tokenizer, "pretokenizers")):
        state = {inner: []} if part is None else json.loads(part.__getstate__())
        for step in state.get(inner, [state]):
            kind, pattern = step["type"], step.get("pattern", {}).get("String")
            if kind in ("NFC", "NFKC"):
                composes = True
            elif kind == "Replace":
                if pattern is None or len(step["content"]) < len(pattern):
                    return None
            elif kind in ("Split", "Punctuation"):
                if step["behavior"] == "Removed":
                    return None
            elif kind not in ("Prepend", "ByteLevel", "Digits", "Metaspace"):
                return None
    return composes


def decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """The decoder's parts, as tokenizer.json describes them."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())  # JSON, in spite of the method's name
    return list(state["decoders"]) if state["type"] == "Sequence" else [state]


def _decodes_bytes(backend: tokenizers.Tokenizer) -> bool:
    return [step["type"] for step in decoder_steps(backend)] == ["ByteLevel"]
