"""A fake structured-output backend, and a grammar source that compiles when a test says so."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

from pelton.errors import RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext


class FakeGrammar(Grammar):
    """Position p of the output must be a token with t % 3 != p % 3; after `length` tokens only EOS may follow."""

    def __init__(self, length: int, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.length = length
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.position = 0

    def _allows(self, position: int, token: int) -> bool:
        if position >= self.length:
            return token in self.eos_token_ids
        return token not in self.eos_token_ids and token % 3 != position % 3

    def accept(self, token_ids: Sequence[int]) -> bool:
        if self.validate(token_ids) != len(token_ids):
            return False
        self.position += len(token_ids)
        return True

    def validate(self, token_ids: Sequence[int]) -> int:
        for index, token in enumerate(token_ids):
            if not self._allows(self.position + index, token):
                return index
        return len(token_ids)

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        position = self.position + len(draft_token_ids)
        row[:] = bytes(len(row))
        for token in range(self.vocab_size):
            if self._allows(position, token):
                row[token // 8] |= 1 << (token % 8)

    def is_terminated(self) -> bool:
        return self.position >= self.length


class FakeGrammarBackend(StructuredOutputBackend):
    """`regex` is the number of tokens; what is not a number is refused."""

    def __init__(self, context: StructuredOutputContext | None = None) -> None:
        self.vocab_size = context.vocab_size if context is not None else 50
        self.eos_token_ids = context.eos_token_ids if context is not None else (0,)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        assert params.regex is not None
        if not params.regex.isdigit():
            raise RequestError("regex is not a number", param="structured_outputs", value=params.regex)
        return FakeGrammar(int(params.regex), self.vocab_size, self.eos_token_ids)


class FakeGrammarSource:
    """Compiles when the test says so: `release()`, or at once with `is_held` False."""

    def __init__(self, backend: StructuredOutputBackend | None = None, *, is_held: bool = False) -> None:
        self.backend = backend or FakeGrammarBackend()
        self.is_held = is_held
        self._held: list[tuple[Future[Grammar], StructuredOutputsParams]] = []

    def submit(self, params: StructuredOutputsParams) -> Future[Grammar]:
        future: Future[Grammar] = Future()
        self._held.append((future, params))
        if not self.is_held:
            self.release()
        return future

    def release(self) -> None:
        for future, params in self._held:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(self.backend.compile(params))
                except Exception as error:
                    future.set_exception(error)
        self._held.clear()

    def take_compile_times(self) -> list[float]:
        return []
