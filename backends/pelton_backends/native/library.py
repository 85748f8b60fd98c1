"""The compiled kernels as functions, and the structs that they take; mirrors those of csrc/."""

from __future__ import annotations

import ctypes
from ctypes import CDLL, POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from pelton.errors import ConfigError
from pelton.graphs.recordable import launch
from pelton_backends.native.build import BASE, CannotBuildError, available_sets, best_set, build_libraries, groups_of
from pelton_backends.native.isa import ISAS, InstructionSet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DTYPES = {"float32": 0, "bfloat16": 1, "float16": 1}
"""Of the structs: a library has one kind of numbers of 16 bits, see `InstructionSet.for_dtype`."""
FP8_DTYPES = {"fp8": 2, "fp8_e4m3": 2, "fp8_e5m2": 3}
"""Of a cache, beside the model's own."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2}
NO_ACTIVATION = -1


class Attention(Structure):
    _fields_ = (
        ("k_cache", c_void_p), ("v_cache", c_void_p),
        ("block_stride", c_int64), ("token_stride", c_int64), ("head_stride", c_int64),
        ("block_size", c_int64), ("num_heads", c_int64), ("num_kv_heads", c_int64), ("group", c_int64),
        ("head_dim", c_int64), ("window", c_int64), ("scale", c_float), ("soft_cap", c_float), ("dtype", c_int32),
        ("kv_dtype", c_int32), ("sinks", c_void_p),
    )  # fmt: skip


class Step(Structure):
    _fields_ = (
        ("query_start", c_void_p), ("seq_lens", c_void_p), ("block_table", c_void_p),
        ("table_stride", c_int64), ("num_rows", c_int64), ("is_causal", c_int32), ("common_prefix", c_void_p),
        ("ranks", c_int32), ("rank", c_int32),
    )  # fmt: skip


class Rope(Structure):
    _fields_ = (
        ("cos_sin", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("num_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64), ("rotary_dim", c_int64),
        ("q_eps", c_float), ("k_eps", c_float),
        ("q_unit_offset", c_int32), ("k_unit_offset", c_int32), ("writes_kv", c_int32), ("dtype", c_int32),
    )  # fmt: skip


class Written(Structure):
    _fields_ = (("positions", c_void_p), ("slots", c_void_p), ("num_tokens", c_int64))


class Linear(Structure):
    _fields_ = (
        ("weight", c_void_p), ("bias", c_void_p), ("norm", c_void_p), ("post_norm", c_void_p),
        ("in_features", c_int64), ("out_features", c_int64), ("output_stride", c_int64),
        ("eps", c_float), ("post_eps", c_float), ("soft_cap", c_float),
        ("unit_offset", c_int32), ("post_unit_offset", c_int32), ("activation", c_int32), ("is_logits", c_int32),
        ("dtype", c_int32), ("is_packed", c_int32), ("bare_activation", c_int32),
    )  # fmt: skip


class LayerNorm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("size", c_int64), ("eps", c_float))


class EncoderLayer(Structure):
    _fields_ = (
        ("qkv", c_void_p), ("out", c_void_p), ("up", c_void_p), ("down", c_void_p),
        ("out_norm", c_void_p), ("down_norm", c_void_p),
    )  # fmt: skip


class Encoder(Structure):
    _fields_ = (
        ("layers", POINTER(EncoderLayer)), ("num_layers", c_int64), ("num_heads", c_int64), ("head_dim", c_int64), ("scale", c_float),
    )  # fmt: skip


class EncoderInputs(Structure):
    _fields_ = (
        ("words", c_void_p), ("shared", c_void_p), ("positions", c_void_p), ("norm", POINTER(LayerNorm)),
        ("word_ids", c_void_p), ("position_ids", c_void_p),
    )  # fmt: skip


class Lora(Structure):
    _fields_ = (
        ("a", c_void_p), ("b", c_void_p), ("slots", c_void_p), ("norm", c_void_p), ("ends", c_void_p),
        ("slot_stride", c_int64), ("in_features", c_int64), ("rank", c_int64), ("num_parts", c_int64),
        ("eps", c_float), ("unit_offset", c_int32), ("activation", c_int32), ("dtype", c_int32), ("pair", c_int32),
    )  # fmt: skip


class Embed(Structure):
    _fields_ = (
        ("weight", c_void_p), ("hidden_size", c_int64), ("scale", c_float), ("dtype", c_int32), ("is_packed", c_int32),
    )  # fmt: skip


class Kernels:
    """The libraries' functions, typed: those of the base, and of each group that was asked for. Calls release the GIL."""

    def __init__(self, isa: InstructionSet, extra_flags: Sequence[str], groups: Iterable[str] = ()) -> None:
        """Raises `CannotBuildError`."""
        self.isa = isa.name
        self._set, self._extra_flags, self._loaded = isa, list(extra_flags), list[str]()
        self.load(groups)

    @property
    def groups(self) -> list[str]:
        """Those that are loaded beside the base."""
        return self._loaded[1:]

    def load(self, groups: Iterable[str]) -> None:
        """Compile or find the groups' libraries, and bind their functions. Raises `CannotBuildError`."""
        lacking = {BASE, *groups_of(self._set, groups)}.difference(self._loaded)
        if not lacking:
            return
        paths = build_libraries(self._set, sorted(lacking - {BASE}), extra_flags=self._extra_flags)
        for group, path in paths.items():
            if group not in lacking:
                continue
            try:
                library = ctypes.CDLL(str(path))
            except OSError as error:
                raise CannotBuildError(f"{path} cannot be loaded: {error}") from error
            getattr(self, f"_bind_{group}")(library)
            self._loaded.append(group)

    def _bind_base(self, library: CDLL) -> None:
        assert library.pelton_isa() == self._set.number
        self.attend = _typed(
            library.pelton_attend, c_int, POINTER(Attention), POINTER(Step), c_void_p, c_int64, c_void_p
        )
        self.attend_part = _typed(
            library.pelton_attend_part, c_int, POINTER(Attention), POINTER(Step), c_void_p, c_int64, c_void_p, c_void_p
        )
        self.rope_write = _typed(
            library.pelton_rope_write, None, POINTER(Rope), POINTER(Attention), POINTER(Written),
            c_void_p, c_void_p, c_int64,
        )  # fmt: skip
        self.rope_attend = _typed(
            library.pelton_rope_attend, c_int, POINTER(Rope), POINTER(Attention), POINTER(Written), POINTER(Step),
            c_void_p, c_void_p,
        )  # fmt: skip
        self.linear = _typed(
            library.pelton_linear, c_int, POINTER(Linear), c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p
        )
        self.allowed_logits = _typed(
            library.pelton_allowed_logits, c_int, POINTER(Linear), c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64,
            c_void_p,
        )  # fmt: skip
        self.pack = _typed(library.pelton_pack, c_int, POINTER(Linear), c_void_p)
        self.embed = _typed(library.pelton_embed, None, POINTER(Embed), c_void_p, c_int64, c_void_p)
        self.prepare_inputs = _typed(
            library.pelton_prepare_inputs, None, c_void_p, c_void_p, c_void_p, c_int64, c_int64
        )
        self.product_takes_float = _unrecorded(library.pelton_product_takes_float, c_int, POINTER(Linear))
        self.attention_takes_float = _unrecorded(library.pelton_attention_takes_float, c_int, POINTER(Attention))
        self.set_threads = _unrecorded(library.pelton_set_threads, None, c_int)
        self.rest = _unrecorded(library.pelton_rest, None)
        self.take_best = _typed(
            library.pelton_take_best, c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_void_p
        )
        self.sample = _typed(library.pelton_sample, c_int, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p)
        self.logprobs = _typed(
            library.pelton_logprobs, c_int, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64,
            c_void_p, c_void_p, c_void_p,
        )  # fmt: skip

    def _bind_quant(self, library: CDLL) -> None:
        self.moe = _typed(library.pelton_moe, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p)
        self.moe_choose = _unrecorded(
            library.pelton_moe_choose, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p
        )
        self.moe_compute = _unrecorded(
            library.pelton_moe_compute, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p
        )
        self.moe_pack = _unrecorded(library.pelton_moe_pack, c_int, c_void_p)
        self.quant = _typed(
            library.pelton_quant, c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p
        )
        self.quant_embed = _typed(library.pelton_quant_embed, None, c_void_p, c_void_p, c_int64, c_void_p)

    def _bind_lora(self, library: CDLL) -> None:
        self.lora = _typed(library.pelton_lora, c_int, POINTER(Lora), c_void_p, c_void_p, c_void_p, c_int64)

    def _bind_encoder(self, library: CDLL) -> None:
        self.layer_norm = _typed(
            library.pelton_layer_norm, None, POINTER(LayerNorm), c_void_p, c_void_p, c_int64, c_void_p
        )
        self.encode = _typed(
            library.pelton_encode, c_int, POINTER(Encoder), POINTER(EncoderInputs), c_void_p, c_int64, c_void_p
        )

    def _bind_float(self, library: CDLL) -> None:
        """It has given its functions to the base."""

    def _bind_ceiling(self, library: CDLL) -> None:
        self.fma_ceiling = _unrecorded(library.pelton_fma_ceiling, c_double)
        self.read_ceiling = _unrecorded(library.pelton_read_ceiling, c_double, c_int64)


EXTRA_FLAGS: list[str] = []
"""More compiler flags, for the sanitizers' run; set before the first use."""

_wanted: str | None = None
"""The name of the instruction set in use; None: the best."""


def reason_against(*groups: str, dtype: str | None = "bfloat16") -> str | None:
    """Why there are no kernels of the base and of these groups; None: there are. dtype: of the model; None: `kernels_of_any_dtype`."""
    try:
        _ = kernels_of_any_dtype() if dtype is None else kernels(*groups, dtype=dtype)
    except CannotBuildError as error:
        return str(error)
    return None


def kernels(*groups: str, dtype: str = "bfloat16", isa: InstructionSet | None = None) -> Kernels:
    """For an instruction set, the one in use by default: compiled or from the cache, loaded once a process. Raises `CannotBuildError`.

    groups: of `build.GROUPS`, beside the base. dtype: of the model. They compute on as many threads as torch does when this is called.
    """
    global _last
    _last = isa = (isa or isa_in_use()).for_dtype(dtype)
    loaded = _loaded.get(isa)
    if loaded is None:
        loaded = _loaded[isa] = Kernels(isa, EXTRA_FLAGS, groups)
    loaded.load(groups)
    loaded.set_threads(torch.get_num_threads())
    return loaded


def kernels_of_any_dtype() -> Kernels:
    """As `kernels`, for ops that read no number of 16 bits: those that were asked for last, of the model's dtype, so that a process has
    one pool of threads."""
    isa = isa_in_use()
    return kernels(dtype="float16" if _last == isa.for_dtype("float16") else "bfloat16")


def kv_dtype_of(dtype: str, kv_dtype: str) -> int:
    """Return what the structs call a cache's dtype. dtype: of the model."""
    return FP8_DTYPES.get(kv_dtype, DTYPES[dtype])


def kv_refusals(dtype: str, kv_dtype: str) -> list[str]:
    if kv_dtype in ("auto", dtype, *FP8_DTYPES):
        return []
    return [f"kv dtype {kv_dtype}, only that of the model, {', '.join(FP8_DTYPES)}"]


def groups_of_dtype(dtype: str) -> tuple[str, ...]:
    """Return the groups that all ops in this dtype need: to be compiled beside the base, which takes less time than after it."""
    return ("float",) if dtype == "float32" else ()


def kernels_for(*ops: Linear | Attention, dtype: str) -> Kernels:
    """As `kernels`, with what these ops need beside the base."""
    found = kernels(dtype=dtype)
    for op in ops:
        takes_float = found.product_takes_float if isinstance(op, Linear) else found.attention_takes_float
        if takes_float(op):
            found.load(["float"])
    return found


def isa_in_use() -> InstructionSet:
    """Raises `CannotBuildError`."""
    return next((one for one in ISAS if one.name == _wanted), None) or _best_set()


def use_isa(name: str | None) -> None:
    """Use the instruction set called `name` for what is made from now on, None for the best. Raises `ConfigError`."""
    global _wanted
    if name is not None and name not in (here := [one.name for one in _available_sets()]):
        lacking = "this CPU or its compiler lacks it" if name in [one.name for one in ISAS] else "there is no such set"
        raise ConfigError(f"plugin_config.native.isa is {name!r}: {lacking}. Use one of {', '.join(here)}.")
    _wanted = name


_best_set, _available_sets = cache(best_set), cache(available_sets)
_loaded: dict[InstructionSet, Kernels] = {}
_last: InstructionSet | None = None


def _typed(function: Any, result: type | None, *arguments: type) -> Callable[..., int]:
    """Record its calls in the call graph of a step that is being captured."""
    return partial(launch, _unrecorded(function, result, *arguments))


def _unrecorded(function: Any, result: type | None, *arguments: type) -> Callable[..., int]:
    function.restype, function.argtypes = result, list(arguments)
    typed: Callable[..., int] = function
    return typed
