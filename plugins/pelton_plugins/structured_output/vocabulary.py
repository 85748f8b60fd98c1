"""The model's vocabulary as the native libraries read it: the bytes of every token."""

from __future__ import annotations

from pathlib import Path

from pelton.errors import PeltonError
from pelton.structured.interface import StructuredOutputContext
from pelton.tokenizer import Tokenizer


class Vocabulary:
    """tokens: the bytes of each token id below `vocab_size`; empty for ids that stand for no text."""

    def __init__(self, context: StructuredOutputContext) -> None:
        found = context.load_tokenizer() if context.load_tokenizer is not None else _load(context.tokenizer_path)
        if found is None:
            raise PeltonError(f"{context.tokenizer_path} has no tokenizer, and structured output needs one.")
        self.tokenizer = found
        self.vocab_size = context.vocab_size
        self.eos_token_ids = list(context.eos_token_ids)
        self.special_token_ids = sorted({*self.tokenizer.special_token_ids, *self.eos_token_ids})
        self.tokens = [self.tokenizer.token_bytes(token_id) for token_id in range(self.vocab_size)]
        self.special_texts = {
            self.tokens[token_id].decode(errors="replace"): token_id
            for token_id in self.special_token_ids
            if token_id < self.vocab_size and self.tokens[token_id]
        }

    def encode(self, text: str | bytes) -> list[int]:
        """As llguidance asks for it."""
        return self.tokenizer.encode(
            text if isinstance(text, str) else text.decode(errors="replace"), add_special_tokens=False
        )


def _load(path: str) -> Tokenizer | None:
    from pelton.model.resolve import find_format
    from pelton.plugins import load_plugins

    return find_format(Path(path), load_plugins()).load_tokenizer(Path(path))
