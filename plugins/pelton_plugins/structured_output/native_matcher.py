"""llguidance's matchers through its C functions: masks of all rows in one call, on threads of our own (`csrc/mask_pool.c`).

Its Python classes let go of the interpreter's lock and take it back for each call, and their thread pool takes about as long to wake as
the masks of 64 rows take. The C functions are in the same library. Where they are not, where no C compiler is, or where they do not
say the same as the Python classes, those are used.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llguidance
import numpy as np

from pelton.errors import EngineError
from pelton.logging import get_logger
from pelton.utils.cache_folder import cache_folder
from pelton_plugins.structured_output.vocabulary import Vocabulary

logger = get_logger(__name__)

_SOURCE = Path(__file__).parent / "csrc" / "mask_pool.c"
_FLAGS = ("-O2", "-std=gnu11", "-shared", "-fPIC", "-pthread")
_SPECIAL = b"\xff"
"""Before the text of a token that stands for no text."""
_ERROR_BYTES = 1024
_LATE_S, _LATE_CPU_S = 20e-3, 2e-3
"""A mask that takes longer, or more of its thread's own time, is late: the others go on. A thread that waits for a core is not."""
_POLL_S = 50e-6
_PROBE = 'start: "ab" /[0-9]+/ | "<" /[a-z]{2}/'
ROW = np.dtype(
    [
        ("matcher", "u8"),
        ("masks", "u8"),
        ("drafts", "u8"),
        ("token", "i8"),
        ("num_drafts", "i4"),
        ("failed", "i4"),
        ("cost_ns", "i8"),
        ("late", "u8"),
    ]
)
"""`row_t` of the C file."""


class _Limits(ctypes.Structure):
    _fields_ = [
        ("max_items_in_row", ctypes.c_size_t), ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64), ("step_max_items", ctypes.c_size_t), ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t), ("precompute_large_lexemes", ctypes.c_bool), ("verbose_errors", ctypes.c_bool),
    ]  # fmt: skip


class _MatcherInit(ctypes.Structure):
    _fields_ = [
        ("tokenizer", ctypes.c_void_p), ("log_buffer_level", ctypes.c_uint32), ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool), ("backtrack_ok", ctypes.c_bool), ("limits", _Limits),
        ("room", ctypes.c_uint8 * 256),  # for fields of later versions: 0 is their default
    ]  # fmt: skip


class _TokenizerInit(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t), ("vocab_size", ctypes.c_uint32), ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p), ("token_bytes", ctypes.c_char_p), ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool), ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool), ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.POINTER(ctypes.c_char_p)), ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    ]  # fmt: skip


_POINTER, _INT, _SIZE, _BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_bool
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "llg_new_tokenizer_v2": (_POINTER, _POINTER, ctypes.c_char_p, _SIZE),
    "llg_free_tokenizer": (None, _POINTER),
    "llg_constraint_init_set_defaults": (None, _POINTER, _POINTER),
    "llg_new_matcher": (_POINTER, _POINTER, ctypes.c_char_p, ctypes.c_char_p),
    "llg_clone_matcher": (_POINTER, _POINTER),
    "llg_free_matcher": (None, _POINTER),
    "llg_matcher_compute_mask_into": (_INT, _POINTER, _POINTER, _SIZE),
    "llg_matcher_get_mask_byte_size": (_SIZE, _POINTER),
    "llg_matcher_consume_token": (_INT, _POINTER, ctypes.c_uint32),
    "llg_matcher_consume_tokens": (_INT, _POINTER, _POINTER, _SIZE),
    "llg_matcher_validate_tokens": (_INT, _POINTER, _POINTER, _SIZE),
    "llg_matcher_rollback": (_INT, _POINTER, _SIZE),
    "llg_matcher_reset": (_INT, _POINTER),
    "llg_matcher_is_stopped": (_BOOL, _POINTER),
    "llg_matcher_is_error": (_BOOL, _POINTER),
    "llg_matcher_get_error": (ctypes.c_char_p, _POINTER),
}


class CannotUseError(Exception):
    """Why the C functions are not used."""


class NativeTokenizer:
    """A vocabulary as the C functions read it. Forced text is not asked for, so no text is ever tokenized here."""

    def __init__(self, vocabulary: Vocabulary, slices: Sequence[str], limits: Mapping[str, int]) -> None:
        self.library = _guidance()
        special = set(vocabulary.special_token_ids)
        tokens = [_SPECIAL + text if i in special and text else text for i, text in enumerate(vocabulary.tokens)]
        lengths = np.fromiter(map(len, tokens), dtype=np.uint32, count=len(tokens))
        eos = np.asarray(vocabulary.eos_token_ids or [len(tokens) - 1], dtype=np.uint32)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit), vocab_size=vocabulary.vocab_size, tok_eos=int(eos[0]),
            token_lens=lengths.ctypes.data, token_bytes=b"".join(tokens), use_approximate_greedy_tokenize_fn=True,
            slices=(ctypes.c_char_p * (len(slices) + 1))(*(text.encode() for text in slices), None),
            tok_eos_extra=eos[1:].ctypes.data, tok_eos_extra_count=len(eos) - 1,
        )  # fmt: skip
        said = ctypes.create_string_buffer(_ERROR_BYTES)
        self.handle = self.library.llg_new_tokenizer_v2(ctypes.byref(init), said, _ERROR_BYTES)
        if not self.handle:
            raise CannotUseError(f"llguidance takes no tokenizer: {said.value.decode(errors='replace')}")
        self._init = _MatcherInit()
        self.library.llg_constraint_init_set_defaults(ctypes.byref(self._init), self.handle)
        self._init.log_buffer_level = self._init.log_stderr_level = 0
        for name, most in limits.items():
            setattr(self._init.limits, name, most)

    def matcher(self, source: str) -> NativeMatcher:
        """Compile a source: Lark's form, or a list of grammars as JSON."""
        kind = b"llguidance" if source.startswith("{") else b"lark"
        text = source.encode()
        return NativeMatcher(self, self.library.llg_new_matcher(ctypes.byref(self._init), kind, text))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.llg_free_tokenizer(self.handle)


class NativeMatcher:
    """With the names of llguidance's own `LLMatcher`."""

    __slots__ = ("_library", "_tokenizer", "handle", "late", "num_uses")

    def __init__(self, tokenizer: NativeTokenizer, handle: int) -> None:
        self._tokenizer = tokenizer  # it may not be freed before
        self._library = tokenizer.library
        self.handle = handle
        self.num_uses = 0  # requests that it, or what it is a copy of, has served
        self.late: LateMasks | None = None  # a thread is at work on it

    @property
    def is_busy(self) -> bool:
        return self.late is not None and not self.late.done()

    def __del__(self) -> None:
        if self.late is not None:
            self.late.wait()
        handle, self.handle = self.handle, 0
        if handle:
            self._library.llg_free_matcher(handle)

    def moved(self) -> NativeMatcher | None:
        """Another object with the matcher of this one, which has none any more; None where it has none already: who is in a cycle that is
        collected may find it finalized."""
        handle, self.handle = self.handle, 0
        if not handle:
            return None
        other = NativeMatcher(self._tokenizer, handle)
        other.num_uses = self.num_uses
        return other

    def deep_copy(self) -> NativeMatcher:
        copy = NativeMatcher(self._tokenizer, self._library.llg_clone_matcher(self.handle))
        copy.num_uses = self.num_uses
        return copy

    def reset(self) -> bool:
        """Go back to the first state; False where that cannot be: it has failed."""
        failed: int = self._library.llg_matcher_reset(self.handle)
        return not failed

    def is_error(self) -> bool:
        found: bool = self._library.llg_matcher_is_error(self.handle)
        return found

    def get_error(self) -> str:
        return (self._library.llg_matcher_get_error(self.handle) or b"").decode(errors="replace")

    def is_stopped(self) -> bool:
        found: bool = self._library.llg_matcher_is_stopped(self.handle)
        return found

    def compute_bitmask(self) -> bytes:
        mask = np.zeros(self._library.llg_matcher_get_mask_byte_size(self.handle) // 4, dtype="<i4")
        self.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return mask.tobytes()

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._library.llg_matcher_compute_mask_into(self.handle, address, num_bytes)

    def consume_token(self, token: int) -> bool:
        failed: int = self._library.llg_matcher_consume_token(self.handle, token)
        return not failed

    def try_consume_tokens(self, tokens: Sequence[int]) -> int:
        """As many as are allowed; without an error behind them."""
        given = np.asarray(tokens, dtype=np.uint32)
        count = max(int(self._library.llg_matcher_validate_tokens(self.handle, given.ctypes.data, len(given))), 0)
        failed = count and self._library.llg_matcher_consume_tokens(self.handle, given.ctypes.data, count)
        return 0 if failed else count

    def validate_tokens(self, tokens: Sequence[int]) -> int:
        given = np.asarray(tokens, dtype=np.uint32)
        return max(int(self._library.llg_matcher_validate_tokens(self.handle, given.ctypes.data, len(given))), 0)


class LateMasks:
    """Masks of one row that are made on while the others are used. With the names of a future."""

    def __init__(self, handle: int, matcher: NativeMatcher, shape: tuple[int, int]) -> None:
        self._library, self._handle, self._shape = _pool(), handle, shape
        self._matcher = matcher
        matcher.late = self

    def done(self) -> bool:
        is_done: bool = not self._handle or self._library.pelton_late_is_done(self._handle)
        return is_done

    def cancel(self) -> bool:
        return False

    def wait(self) -> None:
        while not self.done():
            time.sleep(_POLL_S)

    def result(self, timeout_s: float | None = None) -> Any:
        """[1 + drafts, words]"""
        self.wait()
        masks = np.full(self._shape, -1, dtype="<i4")
        failed = self._library.pelton_late_take(self._handle, masks.ctypes.data, 4 * self._shape[1])
        self._matcher.late = None
        if failed:
            raise EngineError(f"llguidance: {self._matcher.get_error().strip().splitlines()[0][:600]}")
        return masks

    def __del__(self) -> None:
        self.wait()
        handle, self._handle = self._handle, 0  # its matcher, which is in a cycle with it, may still ask
        if handle:
            self._library.pelton_late_let_go(handle)


class MaskPool:
    """Threads that make masks. Used by one thread at a time, which waits for them: it may not be held up itself."""

    def __init__(self, num_threads: int, spin_s: float = 0.0) -> None:
        """spin_s: how long a thread looks for the next masks before it sleeps: to wake takes as long as its part of them."""
        guidance = _guidance()
        names = ("consume_token", "compute_mask_into", "rollback", "is_stopped")
        functions = [ctypes.cast(getattr(guidance, f"llg_matcher_{name}"), _POINTER).value for name in names]
        self._open(num_threads, spin_s, functions)

    def _open(self, num_threads: int, spin_s: float, functions: Sequence[int | None]) -> None:
        self._library = _pool()
        times = [int(1e9 * seconds) for seconds in (spin_s, _LATE_S, _LATE_CPU_S)]
        self._handle = self._library.pelton_mask_pool(num_threads, *times, *functions)
        if not self._handle:
            raise CannotUseError("no memory is left for threads that make masks")

    def fill(self, rows: Any, num_bytes: int, stride: int) -> int:
        """rows: of `ROW`. Returns how many failed. A row with `late` has no masks; whoever makes `LateMasks` of that gets them."""
        failed: int = self._library.pelton_mask_pool_fill(self._handle, rows.ctypes.data, len(rows), num_bytes, stride)
        if failed < 0:
            raise MemoryError("no memory is left to make masks")
        return failed

    def fill_alone(self, matcher: int, masks: Any, drafts: Any) -> None:
        """Make the masks of one matcher on the caller's thread; any may. masks: [1 + drafts, words]. The matcher says what failed."""
        row = np.zeros(1, dtype=ROW)
        row[0] = (matcher, masks.ctypes.data, drafts.ctypes.data, -1, len(drafts), 0, 0, 0)
        self._library.pelton_mask_row(self._handle, row.ctypes.data, masks.shape[1] * 4, masks.strides[0])

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.pelton_mask_pool_close(self._handle)


def make_native(
    vocabulary: Vocabulary,
    slices: Sequence[str],
    limits: Mapping[str, int],
    tokenizer: Any,
    num_threads: int,
    spin_s: float,
) -> tuple[NativeTokenizer, MaskPool]:
    """The C functions, once they have made the same masks as the Python classes do. tokenizer: an `LLTokenizer`.
    Raises `CannotUseError`."""
    made, pool = NativeTokenizer(vocabulary, slices, limits), MaskPool(num_threads, spin_s)
    known = llguidance.LLMatcher(tokenizer, f"%llguidance {json.dumps({'no_forcing': True})}\n{_PROBE}", log_level=0)
    probe = made.matcher(_PROBE)
    for text in (b"", b"a", b"b", b"7"):
        tokens = [token for token, one in enumerate(vocabulary.tokens) if text and one == text][:1]
        if text and (not tokens or not known.consume_token(tokens[0]) or not probe.consume_token(tokens[0])):
            break
        mask = probe.compute_bitmask()
        if (
            probe.is_error()
            or len(mask) != 4 * -(-vocabulary.vocab_size // 32)
            or not known.compute_bitmask().startswith(mask)
        ):
            raise CannotUseError("llguidance's C functions do not make the masks that its Python classes make")
    return made, pool


@cache
def _guidance() -> Any:
    """The library that is loaded already."""
    try:
        library: Any = ctypes.CDLL(llguidance._lib.__file__)
        for name, (result, *arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise CannotUseError(f"this llguidance has no C functions: {error}") from None
    return library


@cache
def _pool() -> Any:
    library = ctypes.CDLL(str(_build()))
    library.pelton_mask_pool.restype, library.pelton_mask_pool.argtypes = (
        _POINTER,
        [_INT, *[ctypes.c_uint64] * 3, *[_POINTER] * 4],
    )
    library.pelton_mask_pool_fill.argtypes = [_POINTER, _POINTER, _INT, _SIZE, _SIZE]
    library.pelton_mask_row.restype, library.pelton_mask_row.argtypes = None, [_POINTER, _POINTER, _SIZE, _SIZE]
    library.pelton_late_is_done.restype, library.pelton_late_is_done.argtypes = _BOOL, [_POINTER]
    library.pelton_late_take.argtypes = [_POINTER, _POINTER, _SIZE]
    library.pelton_late_let_go.restype, library.pelton_late_let_go.argtypes = None, [_POINTER]
    library.pelton_mask_pool_close.restype, library.pelton_mask_pool_close.argtypes = None, [_POINTER]
    return library


def _build() -> Path:
    """The compiled C file, once for each content."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise CannotUseError("no C compiler is on the PATH")
    folder, source = cache_folder("native"), _SOURCE.read_bytes()
    key = hashlib.sha256(b"\0".join([source, compiler.encode(), *map(str.encode, _FLAGS)])).hexdigest()[:24]
    library = folder / f"mask_pool-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as place:
            made = Path(place) / "library.so"
            command = [compiler, *_FLAGS, str(_SOURCE), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise CannotUseError(f"{compiler} cannot be run: {error}") from None
            if done.returncode:
                raise CannotUseError(f"the C compiler failed: {done.stderr.strip()[-200:]}")
            os.replace(made, library)
    return library
