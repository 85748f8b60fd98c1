"""Constraints by llguidance: JSON schemas, regexes, choices, context-free grammars and structural tags.

Its parser makes a mask by walking the vocabulary's tree of bytes: nothing is precomputed, compiling takes a millisecond.
What it is given comes from `sources`; JSON schemas are checked and rewritten by `json_schema` first.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import llguidance
import msgspec
import numpy as np

from pelton.config.structured_outputs import StructuredOutputsConfig
from pelton.errors import EngineError, RequestError
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton_plugins.structured_output.json_schema import find_blamed
from pelton_plugins.structured_output.sources import Sources
from pelton_plugins.structured_output.vocabulary import Vocabulary

_MAX_CACHED = 512
"""Compiled constraints that are kept, the last used ones."""
_SLOW_S = 2e-3
"""CPU time of a first mask, made again, of a grammar whose masks are made apart from the others'."""
_STACK_BYTES = 256 * 2**20
"""Of the thread that compiles. The library descends a level for each rule or reference that leads to the next, and needs up to 4 kB for
it; a constraint of the greatest length has 33,000. It is address space: what is not touched takes no memory."""
_TOO_MUCH = ("items; max is", "lexer error", "fuel", "too many", "TooComplex")
"""Parts of the errors of a grammar that met one of the limits below in mid-answer."""
_LIMITS: dict[str, int] = {
    "initial_lexer_fuel": 2_000_000,  # to build the lexer: 50,000 a millisecond
    "step_lexer_fuel": 200_000,  # of a mask: 14,000 a millisecond
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,  # 1 to 2 kB each
    "max_grammar_size": 500_000,
}


_stack_lock = threading.Lock()
T = TypeVar("T")


class LLGrammar(Grammar):
    """State of one request. A token that its last mask allowed is taken in with the next native call."""

    name = "llguidance"

    def __init__(self, matcher: Any, filler: BatchFiller) -> None:
        self.matcher = matcher
        self.filler: BatchFiller = filler
        self.pending: int | None = None
        self.masks: Any = None  # the last one made, of the state before `pending`, and others: int32 words
        self.place = 0  # of its own among them

    def accept(self, token_ids: Sequence[int]) -> bool:
        if len(token_ids) == 1 and self.masks is not None:
            token, masks, self.masks = token_ids[0], self.masks, None
            if not 0 <= token < 32 * masks.shape[1] or not int(masks[self.place, token >> 5]) >> (token & 31) & 1:
                return False
            self.pending = token
            return True
        self.flush()
        self.masks = None
        taken: int = self.matcher.try_consume_tokens(list(token_ids))
        return taken == len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        self.flush()
        count: int = self.matcher.validate_tokens(list(token_ids))
        return count

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        self.flush()
        drafts = list(draft_token_ids)
        masks = np.full((1 + len(drafts), -(-len(row) // 4)), -1, dtype="<i4")
        if drafts:
            self.matcher.unsafe_compute_mask_ptr_with_draft_token(masks.ctypes.data, masks.strides[0], drafts)
        else:
            self.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.strides[0])
        self.check()
        row[:] = masks[-1].tobytes()

    def is_terminated(self) -> bool:
        self.flush()
        is_stopped: bool = self.matcher.is_stopped()
        return is_stopped

    def flush(self) -> None:
        """Take in what waits."""
        if self.pending is not None:
            token, self.pending = self.pending, None
            if not self.matcher.consume_token(token):
                self.check()

    def check(self) -> None:
        if self.matcher.is_error():
            message = _first_line(self.matcher.get_error())
            if any(sign in message for sign in _TOO_MUCH):
                raise RequestError(
                    f"structured_outputs takes more work at this place than a token may: {message}",
                    param="structured_outputs",
                )
            raise EngineError(f"llguidance: {message}")


def num_threads(num_cores: int) -> int:
    """Half of a few cores, which the model computes on; most of many."""
    return max(num_cores // 2, 1) if num_cores < 8 else min(num_cores - 4, 16)


class BatchFiller:
    """Takes in tokens and makes masks of many grammars on native threads, without the GIL. With one thread the caller's does it: where the
    model computes on all cores, each thread that wakes holds up one of those that compute."""

    def __init__(self, num_threads: int) -> None:
        self.executor = llguidance.LLExecutor(num_threads) if num_threads > 1 else None

    def fill(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]], bitmask: Any) -> None:
        if self.executor is None:
            self._fill_here(rows, bitmask)
            return
        pending, plain, drafted = [], [], []
        for grammar, place, drafts in rows:
            matcher = grammar.matcher
            if grammar.pending is not None:
                pending.append((matcher, grammar.pending))
                grammar.pending = None
            grammar.masks, grammar.place = bitmask, place
            if drafts:
                drafted.append((matcher, place, list(drafts)))
            else:
                plain.append((matcher, place))
        address, size, count = bitmask.ctypes.data, bitmask.strides[0], len(bitmask)
        if pending:
            self.executor.consume_token_par(pending)
        if plain:
            self.executor.unsafe_compute_mask_ptr(plain, address, size, count)
        if drafted:
            self.executor.unsafe_compute_mask_ptr_with_draft_token(drafted, address, size, count)
        for grammar, _, _ in rows:
            if grammar.matcher.is_error():
                grammar.check()

    def _fill_here(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]], bitmask: Any) -> None:
        address, size = bitmask.ctypes.data, bitmask.strides[0]
        for grammar, place, drafts in rows:
            matcher, token = grammar.matcher, grammar.pending
            if token is not None:
                grammar.pending = None
                matcher.consume_token(token)
            grammar.masks, grammar.place = bitmask, place
            if drafts:
                matcher.unsafe_compute_mask_ptr_with_draft_token(address + size * place, size, list(drafts))
            else:
                matcher.unsafe_compute_mask_ptr(address + size * place, size)
            if matcher.is_error():
                grammar.check()


class LLGuidanceBackend(StructuredOutputBackend):
    """Serves every kind of constraint."""

    def __init__(self, context: StructuredOutputContext) -> None:
        config = context.engine_config
        self.settings = StructuredOutputsConfig() if config is None else config.structured_outputs
        self.vocabulary = vocabulary = Vocabulary(context)
        self._sources = Sources(vocabulary, self.settings)
        # Slices of the vocabulary whose masks are known at once: what may stand in a JSON string.
        self._tokenizer = llguidance.LLTokenizer(
            _Wrapper(vocabulary),
            n_vocab=vocabulary.vocab_size,
            eos_token=vocabulary.eos_token_ids or None,
            slices=llguidance.LLTokenizer.json_slices(),
        )
        self._limits = llguidance._lib.LLParserLimits(**_LIMITS)
        self._filler = BatchFiller(self.settings.grammar_threads or num_threads(os.cpu_count() or 2))
        self._made: OrderedDict[bytes, tuple[Any, bool]] = OrderedDict()  # (matcher in its first state, is slow)
        self._lock = threading.Lock()
        self.num_compiled = 0

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        key = cache_key(params)
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
        if found is None:
            found = on_deep_stack(partial(self._compile, params))
            with self._lock:
                self.num_compiled += 1
                self._made[key] = found
                if len(self._made) > _MAX_CACHED:
                    self._made.popitem(last=False)
        grammar = LLGrammar(found[0].deep_copy(), self._filler)
        grammar.is_slow = found[1]
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> tuple[Any, bool]:
        is_slow = False
        matcher = self._matcher(self._sources.make(params))
        if matcher.is_error():
            matcher = self._matcher(self._sources.forced(params))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest: the requests' copies have it
            started = time.thread_time()
            matcher.compute_bitmask()
            is_slow = time.thread_time() - started > _SLOW_S
        if matcher.is_error():
            raise refusal(params, matcher.get_error())
        return matcher, is_slow

    def _matcher(self, source: str) -> Any:
        return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)


def on_deep_stack(function: Callable[[], T]) -> T:
    """Call a function on a thread of its own, with room for deep recursion in native code: what overflows a stack ends the process."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(function())
        except BaseException as error:
            made.set_exception(error)

    with _stack_lock:  # the size is that of all threads which start meanwhile
        before = threading.stack_size(_STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="pelton-compile")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    return made.result()


def refusal(params: StructuredOutputsParams, message: str) -> RequestError:
    """The refusal of what llguidance does not take, with its place where that can be found."""
    message, kind = _first_line(message), params.kind
    pointer = find_blamed(params.json, message) if params.json is not None else None
    place = f" at {pointer}" if pointer else ""
    return RequestError(
        f"structured_outputs.{kind}{place} cannot be enforced: {message}"
        if "nimplemented" in message or "not supported" in message
        else f"structured_outputs.{kind}{place} cannot be compiled: {message}",
        param="structured_outputs",
    )


def cache_key(params: StructuredOutputsParams) -> bytes:
    """Equal for constraints of equal content. Raises `RequestError` for one that is nested without end."""
    try:
        return msgspec.json.encode(msgspec.structs.replace(params, reasoning_end=None))
    except RecursionError:
        raise RequestError(
            f"structured_outputs.{params.kind} is nested too deeply", param="structured_outputs"
        ) from None


def _first_line(message: str) -> str:
    """The text of a library's error, without the state of its parser."""
    lines = [line.strip() for line in message.split("<state>")[0].splitlines() if line.strip()]
    return " ".join(lines)[:600]


class _Wrapper:
    """A vocabulary with the names that `LLTokenizer` reads."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0] if vocabulary.eos_token_ids else len(self.tokens) - 1
        self._encode = vocabulary.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text)
