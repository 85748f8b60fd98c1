"""Constraints of the form `choice`: the answer is one of some texts. A tree over their tokens says what may follow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext


class SkeletonGrammar(Grammar):
    """State of one request: which texts are left, and how many of their tokens came."""

    def __init__(self, texts: list[list[int]], eos_token_ids: Sequence[int]) -> None:
        self._texts = [[*text, *eos_token_ids[:1]] for text in texts]
        self._path: list[int] = []

    def _allowed(self, path: Sequence[int]) -> set[int]:
        count = len(path)
        return {text[count] for text in self._texts if len(text) > count and text[:count] == list(path)}

    def validate(self, token_ids: Sequence[int]) -> int:
        path = list(self._path)
        for index, token in enumerate(token_ids):
            if token not in self._allowed(path):
                return index
            path.append(token)
        return len(token_ids)

    def accept(self, token_ids: Sequence[int]) -> bool:
        is_allowed = self.validate(token_ids) == len(token_ids)
        if is_allowed:
            self._path += token_ids
        return is_allowed

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        row[:] = bytes(len(row))
        for token in self._allowed([*self._path, *draft_token_ids]):
            row[token // 8] |= 1 << token % 8

    def is_terminated(self) -> bool:
        return any(text[:-1] == self._path for text in self._texts) and len(self._allowed(self._path)) == 1


class SkeletonBackend(StructuredOutputBackend):
    """`compile` runs beside the step loop and may take long."""

    def __init__(self, context: StructuredOutputContext) -> None:
        from tokenizers import Tokenizer

        self._eos = context.eos_token_ids
        self._tokenizer = Tokenizer.from_file(str(Path(context.tokenizer_path) / "tokenizer.json"))

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        if not params.choice:
            raise RequestError(
                "this server serves structured outputs of the form `choice` only", param="structured_outputs"
            )
        return SkeletonGrammar([self._tokenizer.encode(text).ids for text in params.choice], self._eos)
