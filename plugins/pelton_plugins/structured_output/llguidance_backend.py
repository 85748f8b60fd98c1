"""Constraints by llguidance: JSON schemas, regexes, choices, context-free grammars and structural tags.

Its parser makes a mask by walking the vocabulary's tree of bytes: nothing is precomputed, compiling takes a millisecond.
What it is given comes from `sources`; JSON schemas are checked and rewritten by `json_schema` first.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import llguidance
import msgspec
import numpy as np

from pelton.config.structured_outputs import StructuredOutputsConfig
from pelton.errors import EngineError, RequestError
from pelton.logging import get_logger
from pelton.sampling_params import StructuredOutputsParams
from pelton.structured.interface import Grammar, StructuredOutputBackend, StructuredOutputContext
from pelton_plugins.structured_output.compile_process import CompileProcess
from pelton_plugins.structured_output.deep_stack import on_deep_stack
from pelton_plugins.structured_output.helper_process import NoAnswerError
from pelton_plugins.structured_output.json_schema import find_blamed
from pelton_plugins.structured_output.native_matcher import (
    ROW,
    CannotUseError,
    LateMasks,
    MaskPool,
    NativeMatcher,
    NativeTokenizer,
    make_native,
)
from pelton_plugins.structured_output.sources import Sources
from pelton_plugins.structured_output.vocabulary import Vocabulary

_MAX_CACHED = 512
"""Compiled constraints that are kept, the last used ones."""
_MOST_IDLE = 4
"""Matchers of a constraint that wait for the next request with it."""
_MOST_USES = 32
"""Requests of a matcher: what its lexer has found out stays in memory."""
_LARGE_COPY_S = 2e-3
"""A matcher whose copy takes as long is too large to be kept: a few MB."""
_SPIN_S = 1.5e-3
"""Threads that make masks look so long for those of the next step, where cores are many: in a virtual machine each takes 50 to 100 us to
wake, and has as much to do."""
_MANY_CORES = 12
_LARGE_CHARS = 8192
"""A longer source is compiled in a process first that can be stopped: the library's limits bound small ones to a second or so, but it
needs 20 s for the largest that a request may have."""
_DOUBTFUL = re.compile(r"\d{16}|\d[eE]\+?\d|multipleOf|\\u00[4-7]")
"""A source with this is compiled in that process first too. llguidance computes bounds in 64 bits, and descends without end for some
numbers beyond 2**53, which would end the engine. For {"type": "integer", "multipleOf": 123456789} it takes longer than a minute, which
none of its limits bounds. A letter that a grammar's JSON writes as an escape may be one of that keyword."""
_SLOW_S = 2e-3
"""CPU time of a first mask, made again, of a grammar whose masks are made apart from the others'."""
_TOO_MUCH = ("items; max is", "lexer error", "fuel", "too many", "TooComplex")
"""Parts of the errors of a grammar that met one of the limits below in mid-answer."""
_LIMITS: dict[str, int] = {
    "initial_lexer_fuel": 2_000_000,  # to build the lexer: 50,000 a millisecond
    "step_lexer_fuel": 200_000,  # of a mask: 14,000 a millisecond
    "step_max_items": 50_000,
    "max_lexer_states": 100_000,  # 1 to 2 kB each
    "max_grammar_size": 500_000,
}

logger = get_logger(__name__)


class Batch:
    """Grammars whose masks are made together, time and again."""

    def __init__(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]]) -> None:
        self.places = [row[1] for row in rows]
        self.tokens = [row[0].take_pending() for row in rows]
        """What each has accepted and its matcher takes in with the next masks; or one of the below."""
        self.words: Any = None  # [masks, words], the last that were made
        for index, (grammar, _, _) in enumerate(rows):  # which are not kept: they end with their requests
            grammar.batch, grammar.index = self, index

    def begin(self, bitmask: Any) -> list[int]:
        """Return what the matchers are to take in, before their masks are made there."""
        tokens, self.tokens, self.words = self.tokens, [_FRESH] * len(self.places), memoryview(bitmask)
        return tokens


_FRESH, _STALE = -1, -2
"""Its mask is of the matcher's state; the matcher has moved on since."""


class LLGrammar(Grammar):
    """State of one request. A token that its last mask allowed is taken in with the next native call."""

    name = "llguidance"

    def __init__(self, matcher: Any, filler: BatchFiller | NativeFiller, compiled: Compiled | None = None) -> None:
        self.matcher = matcher
        self._compiled = compiled
        self.filler: BatchFiller | NativeFiller = filler
        self.pending: int | None = None  # while it is in no batch
        self.batch: Batch | None = None
        self.index = 0  # in the batch

    def accept(self, token_ids: Sequence[int]) -> bool:
        batch = self.batch
        if batch is not None and len(token_ids) == 1 and batch.tokens[self.index] == _FRESH:
            token, words = token_ids[0], batch.words
            if (
                not 0 <= token < 32 * words.shape[1]
                or not words[batch.places[self.index], token >> 5] >> (token & 31) & 1
            ):
                batch.tokens[self.index] = _STALE
                return False
            batch.tokens[self.index] = token
            return True
        self.flush()
        taken: int = self.matcher.try_consume_tokens(list(token_ids))
        return taken == len(token_ids)

    def validate(self, token_ids: Sequence[int]) -> int:
        self.flush()
        count: int = self.matcher.validate_tokens(list(token_ids))
        return count

    def fill_bitmask(self, row: bytearray | memoryview, draft_token_ids: Sequence[int] = ()) -> None:
        masks = np.full((1 + len(draft_token_ids), -(-len(row) // 4)), -1, dtype="<i4")
        self.filler.fill_alone(self, masks, list(draft_token_ids))
        self.check()
        row[:] = masks[-1].tobytes()

    def is_terminated(self) -> bool:
        self.flush()
        is_stopped: bool = self.matcher.is_stopped()
        return is_stopped

    def __del__(self) -> None:
        if self._compiled is not None:
            self._compiled.give_back(self.matcher)

    def take_pending(self) -> int:
        """Return what its matcher has not taken in yet: below 0 there is nothing. It leaves its batch."""
        token, self.pending = _STALE if self.pending is None else self.pending, None
        if self.batch is not None:
            token, self.batch.tokens[self.index] = self.batch.tokens[self.index], _STALE
            self.batch = None
        return token

    def flush(self) -> None:
        """Take in what waits."""
        late = getattr(self.matcher, "late", None)
        if late is not None:
            late.wait()
        token, self.pending = -1 if self.pending is None else self.pending, None
        if self.batch is not None:
            token, self.batch.tokens[self.index] = self.batch.tokens[self.index], _STALE
        if token >= 0 and not self.matcher.consume_token(token):
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


class Compiled:
    """A constraint with matchers in their first state. What a request has used is used again: its lexer knows most of what masks ask
    it, which takes a third of the time of those of a new one. llguidance's Python classes share theirs by themselves."""

    def __init__(self, matcher: Any, *, is_slow: bool) -> None:
        self.is_slow = is_slow
        self._matcher = matcher  # of which others are copied; used once, where it has been given back
        self._idle: list[Any] = []
        self._takes_back = isinstance(matcher, NativeMatcher)

    def take(self) -> Any:
        """A matcher for a request."""
        known = self.take_known()
        if known is None:
            started = time.perf_counter()
            known = self._matcher.deep_copy()
            if time.perf_counter() - started > _LARGE_COPY_S:
                self._takes_back, self._idle = False, []
        return known

    def take_known(self) -> Any:
        """One that need not be copied; None without one."""
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give_back(self, matcher: Any) -> None:
        """Take the matcher of a request that ended. On any thread."""
        if not self._takes_back or matcher.is_busy or matcher.num_uses >= _MOST_USES or len(self._idle) >= _MOST_IDLE:
            return
        matcher = matcher.moved()
        if matcher is None or not matcher.reset():
            return
        matcher.num_uses += 1
        if self._matcher.num_uses:
            self._idle.append(matcher)
        else:
            self._matcher = matcher


def num_threads(num_cores: int) -> int:
    """Half of the cores, of which a few compute the model and many wait for a device; more than eight have no work for long enough."""
    return min(max(num_cores // 2, 1), 8)


class BatchFiller:
    """Takes in tokens and makes masks of many grammars on native threads, without the GIL. With one thread the caller's does it: where the
    model computes on all cores, each thread that wakes holds up one of those that compute."""

    def __init__(self, num_threads: int) -> None:
        self.executor = llguidance.LLExecutor(num_threads) if num_threads > 1 else None

    def fill_alone(self, grammar: LLGrammar, masks: Any, drafts: list[int]) -> None:
        """Make the masks of one row, on any thread."""
        grammar.flush()
        if drafts:
            grammar.matcher.unsafe_compute_mask_ptr_with_draft_token(masks.ctypes.data, masks.strides[0], drafts)
        else:
            grammar.matcher.unsafe_compute_mask_ptr(masks.ctypes.data, masks.strides[0])

    def fill(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]], bitmask: Any) -> None:
        batch = Batch(rows)
        tokens = batch.begin(bitmask)
        if self.executor is None:
            self._fill_here(rows, tokens, bitmask)
            return
        matchers = [grammar.matcher for grammar, _, _ in rows]
        pending = [(matcher, token) for matcher, token in zip(matchers, tokens, strict=True) if token >= 0]
        plain = [(grammar.matcher, place) for grammar, place, drafts in rows if not drafts]
        drafted = [(grammar.matcher, place, list(drafts)) for grammar, place, drafts in rows if drafts]
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

    def _fill_here(
        self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]], tokens: Sequence[int], bitmask: Any
    ) -> None:
        address, size = bitmask.ctypes.data, bitmask.strides[0]
        for (grammar, place, drafts), token in zip(rows, tokens, strict=True):
            matcher = grammar.matcher
            if token >= 0:
                matcher.consume_token(token)
            if drafts:
                matcher.unsafe_compute_mask_ptr_with_draft_token(address + size * place, size, list(drafts))
            else:
                matcher.unsafe_compute_mask_ptr(address + size * place, size)
            if matcher.is_error():
                grammar.check()


class NativeFiller:
    """The same by one call of our own: see `native_matcher`."""

    def __init__(self, pool: MaskPool) -> None:
        self._pool = pool
        self._batch = Batch(())
        self._last: Callable[[], Any] = lambda: None  # the rows of the batch, while there are
        self._handles: list[int] = []
        self._rows = np.zeros(0, dtype=ROW)  # of these matchers
        self._places = np.zeros(0, dtype=np.int64)
        self._drafts: list[Any] = []  # the rows have their addresses

    def fill_alone(self, grammar: LLGrammar, masks: Any, drafts: list[int]) -> None:
        """Make the masks of one row, on any thread."""
        grammar.flush()
        self._pool.fill_alone(grammar.matcher.handle, masks, np.asarray(drafts, dtype=np.uint32))

    def fill(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]], bitmask: Any) -> dict[int, LateMasks]:
        if rows is not self._last():
            self._enter(rows)
        batch, table, stride = self._batch, self._rows, bitmask.strides[0]
        table["masks"] = bitmask.ctypes.data + stride * self._places
        table["token"] = batch.begin(bitmask)
        num_failed = self._pool.fill(table, 4 * bitmask.shape[1], stride)
        late = {index: self._late(index, rows[index][0], bitmask) for index in table["late"].nonzero()[0].tolist()}
        if num_failed:
            for index in table["failed"].nonzero()[0].tolist():
                rows[index][0].check()
        return late

    def _enter(self, rows: Sequence[tuple[LLGrammar, int, Sequence[int]]]) -> None:
        """Other rows than those of the last call."""
        self._batch = batch = Batch(rows)
        try:
            self._last = weakref.ref(rows)
        except TypeError:  # a plain list
            self._last = lambda: None
        self._places = np.asarray(batch.places, dtype=np.int64)
        self._drafts = [np.asarray(row[2], dtype=np.uint32) for row in rows]
        handles = [grammar.matcher.handle for grammar, _, _ in rows]
        if handles != self._handles:  # else what their masks cost stays known
            self._handles, self._rows = handles, np.zeros(len(rows), dtype=ROW)
            self._rows["matcher"] = handles
        self._rows["num_drafts"] = [len(drafts) for drafts in self._drafts]
        self._rows["drafts"] = [drafts.ctypes.data for drafts in self._drafts]

    def _late(self, index: int, grammar: LLGrammar, bitmask: Any) -> LateMasks:
        """Give up a row whose masks the others do not wait for: in this step all tokens are allowed."""
        batch, count = self._batch, 1 + len(self._drafts[index])
        place = batch.places[index]
        bitmask[place : place + count], batch.tokens[index] = -1, _STALE
        return LateMasks(int(self._rows["late"][index]), grammar.matcher, (count, bitmask.shape[1]))


class LLGuidanceBackend(StructuredOutputBackend):
    """Serves every kind of constraint."""

    def __init__(self, context: StructuredOutputContext) -> None:
        config = context.engine_config
        self.settings = StructuredOutputsConfig() if config is None else config.structured_outputs
        self.vocabulary = vocabulary = Vocabulary(context)
        self._sources = Sources(vocabulary, self.settings)
        slices = llguidance.LLTokenizer.json_slices()
        # Slices of the vocabulary whose masks are known at once: what may stand in a JSON string.
        self._tokenizer = llguidance.LLTokenizer(
            _Wrapper(vocabulary),
            n_vocab=vocabulary.vocab_size,
            eos_token=vocabulary.eos_token_ids or None,
            slices=slices,
        )
        self._limits = llguidance._lib.LLParserLimits(**_LIMITS)
        num_cores = len(os.sched_getaffinity(0))
        threads = self.settings.grammar_threads or num_threads(num_cores)
        spin_s = _SPIN_S if num_cores >= _MANY_CORES else 0.0
        self._native: NativeTokenizer | None = None
        self._filler: BatchFiller | NativeFiller
        try:
            self._native, pool = make_native(vocabulary, slices, _LIMITS, self._tokenizer, threads, spin_s)
            self._filler = NativeFiller(pool)
        except CannotUseError as error:
            logger.info("Masks are made by llguidance's Python classes, which takes longer: %s.", error)
            self._filler = BatchFiller(threads)
        self._process = CompileProcess(
            vocabulary.tokens, vocabulary.special_token_ids, vocabulary.eos_token_ids, slices, _LIMITS
        )
        self._process_lock = threading.Lock()
        self._made: OrderedDict[bytes, Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self.num_compiled = 0

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        key = cache_key(params)
        with self._lock:
            found = self._made.get(key)
            if found is not None:
                self._made.move_to_end(key)
        if found is None:
            found = self._compile(params)
            with self._lock:
                self.num_compiled += 1
                self._made[key] = found
                if len(self._made) > _MAX_CACHED:
                    self._made.popitem(last=False)
        return self._grammar(found, found.take())

    def known(self, params: StructuredOutputsParams) -> Grammar | None:
        try:
            key = cache_key(params)
        except RequestError:  # `compile` says so
            return None
        with self._lock:
            found = self._made.get(key)
            matcher = None if found is None else found.take_known()
            if found is None or matcher is None:
                return None
            self._made.move_to_end(key)
        return self._grammar(found, matcher)

    def _grammar(self, compiled: Compiled, matcher: Any) -> LLGrammar:
        grammar = LLGrammar(matcher, self._filler, compiled)
        grammar.is_slow = compiled.is_slow
        return grammar

    def _compile(self, params: StructuredOutputsParams) -> Compiled:
        timeout_s = self.settings.grammar_compile_timeout_s
        try:
            made = on_deep_stack(partial(self._compile_small, params), timeout_s)
            if isinstance(made, str):
                self._check_apart(params, made)
                made = on_deep_stack(partial(self._compile_source, params, made), timeout_s)
        except TimeoutError:
            raise _cannot(params, f"it takes more than {timeout_s:g} s") from None
        return made

    def _compile_small(self, params: StructuredOutputsParams) -> Compiled | str:
        """Compiled at once; the source of one that is large, or in doubt."""
        source = self._sources.make(params)
        if "\0" in source:  # where the C functions would end it
            raise _cannot(params, "it has a NUL character; write it as an escape")
        is_apart = len(source) > _LARGE_CHARS or _DOUBTFUL.search(source)
        return source if is_apart else self._compile_source(params, source)

    def _check_apart(self, params: StructuredOutputsParams, source: str) -> None:
        """Let a process that can be stopped compile a source."""
        timeout_s = self.settings.grammar_compile_timeout_s
        if not self._process_lock.acquire(timeout=timeout_s):
            raise _cannot(params, f"others as large kept it waiting for {timeout_s:g} s")
        try:
            self._process.check(source, timeout_s)
        except NoAnswerError as error:
            raise _cannot(params, str(error)) from None
        finally:
            self._process_lock.release()

    def _compile_source(self, params: StructuredOutputsParams, source: str) -> Compiled:
        is_slow = False
        matcher = self._matcher(source)
        if matcher.is_error():
            matcher = self._matcher(self._sources.forced(params))
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first mask takes longest: the requests' copies have it
            started = time.thread_time()
            matcher.compute_bitmask()
            is_slow = time.thread_time() - started > _SLOW_S
        if matcher.is_error():
            raise refusal(params, matcher.get_error())
        return Compiled(matcher, is_slow=is_slow)

    def _matcher(self, source: str) -> Any:
        if self._native is not None:
            return self._native.matcher(source)
        return llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)


def refusal(params: StructuredOutputsParams, message: str) -> RequestError:
    """The refusal of what llguidance does not take, with its place where that can be found."""
    kind, of_schema = params.kind, message.partition(_OF_SCHEMA)
    if of_schema[1]:
        message = _EXCERPT.split(of_schema[2], maxsplit=1)[0]
    message = _first_line(message)
    name, pointer = f"structured_outputs.{kind}", ""
    schemas = [(name, params.json)] if params.json is not None else []
    if isinstance(params.structural_tag, dict):
        schemas = [*_named_parts(params.structural_tag, "json_schema")]
        grammars = dict(_named_parts(params.structural_tag, "json_text"))
        if grammars and not of_schema[1]:
            name = " or ".join(grammars)
    found = ((name, find_blamed(schema, message)) for name, schema in schemas)
    name, pointer = next(((name, place) for name, place in found if place), (name, pointer))
    place = f" at {pointer}" if pointer else ""
    is_known = "nimplemented" in message or "not supported" in message
    return RequestError(
        f"{name}{place} cannot be {'enforced' if is_known else 'compiled'}: {message}", param="structured_outputs"
    )


_OF_SCHEMA = "failed to compile JSON schema: "
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
"""Lines of a grammar, behind what is wrong with it."""


def _named_parts(part: Any, kind: str) -> Iterator[tuple[str, Any]]:
    """Parts of a structural tag that have a name for errors: a schema's, or what holds one."""
    if isinstance(part, dict) and part.get("type") == kind and "name" in part:
        yield part["name"], part.get("json_schema")
    elif isinstance(part, (dict, list)):
        for one in part.values() if isinstance(part, dict) else part:
            yield from _named_parts(one, kind)


def _cannot(params: StructuredOutputsParams, why: str) -> RequestError:
    return RequestError(f"structured_outputs.{params.kind} cannot be compiled: {why}", param="structured_outputs")


def cache_key(params: StructuredOutputsParams) -> bytes:
    """Equal for constraints of equal content. Raises `RequestError` for one that is nested without end, or that JSON has no words for."""
    try:
        return msgspec.json.encode(msgspec.structs.replace(params, reasoning_end=None))
    except RecursionError:
        raise RequestError(
            f"structured_outputs.{params.kind} is nested too deeply", param="structured_outputs"
        ) from None
    except (TypeError, ValueError) as error:
        raise _cannot(params, f"it cannot be written as JSON: {error}") from None


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
