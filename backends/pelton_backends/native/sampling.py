"""A step's tail in C: the token that each row takes by its own parameters, and logarithms of probabilities."""

from __future__ import annotations

from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_int64, c_void_p, pointer
from typing import TYPE_CHECKING, ClassVar

import torch

from pelton.errors import EngineError
from pelton.ops.interface import Logprobs, LogprobsNeeds, LogprobsTensors, Sample, SampleNeeds, SampleTensors
from pelton.sampling.columns import SAMPLING_COLUMNS
from pelton_backends.native import library
from pelton_backends.native.reader import reader
from pelton_backends.native.step import Batch, make_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from pelton.sampling.logprobs import LogprobTensors
    from pelton.sampling.side_tables import SideTensors

MOST_LOGPROBS = 128
"""Alternatives, of which each is put in its place among those before it."""


class _SideTables(Structure):
    _fields_ = (
        ("counts", c_void_p), ("in_prompt", c_void_p), ("banned", c_void_p), ("stop_ids", c_void_p), ("bias", c_void_p),
        ("presence", c_void_p), ("frequency", c_void_p), ("repetition", c_void_p), ("min_tokens", c_void_p),
        ("bad_word_prefix", c_void_p), ("bad_word_prefix_len", c_void_p), ("bad_word_last", c_void_p),
        ("num_words", c_int64), ("word_length", c_int64),
        ("has_penalties", c_void_p), ("has_bias", c_void_p), ("has_banned", c_void_p), ("has_min_tokens", c_void_p),
        ("has_bad_words", c_void_p),
    )  # fmt: skip


class _Sampler(Structure):
    _fields_ = (
        ("batch", POINTER(Batch)), ("vocab_size", c_int64),
        ("seeds", c_void_p), ("side_slots", c_void_p), ("num_prompt_tokens", c_void_p),
        *((column.name, c_void_p) for column in SAMPLING_COLUMNS),
        ("side", POINTER(_SideTables)), ("mask_words", c_void_p), ("has_mask", c_void_p), ("mask_stride", c_int64),
        ("logprob_ids", c_void_p), ("logprobs", c_void_p), ("ranks", c_void_p), ("num_logprobs", c_int64),
        ("is_partial", c_void_p),
    )  # fmt: skip


class NativeSample:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: SampleNeeds) -> list[str]:
        reasons = []
        if needs.variant not in ("greedy", "full"):
            reasons.append(f"variant {needs.variant!r}")
        if needs.num_logprobs > MOST_LOGPROBS:
            reasons.append(f"{needs.num_logprobs} logprobs, at most {MOST_LOGPROBS}")
        why = library.reason_against(dtype=None)
        return reasons or ([why] if why else [])

    @staticmethod
    def bind(needs: SampleNeeds, tensors: SampleTensors) -> Sample:
        if needs.variant == "greedy" and tensors.mask is None and tensors.logprobs is None:
            return _Greedy(tensors)
        return _Full(needs, tensors)


class _Greedy:
    skips_unused: ClassVar[bool] = True

    def __init__(self, tensors: SampleTensors) -> None:
        self._tensors = tensors  # the struct has their addresses
        self._struct, self._run = byref(make_batch(tensors.state)), library.kernels_of_any_dtype().take_best

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        logits, slots = _row_wise(logits), slots.contiguous()
        assert result.is_contiguous()
        failed = self._run(
            self._struct, logits.data_ptr(), logits.stride(0), logits.shape[1], slots.data_ptr(), len(slots),
            result.data_ptr(),
        )  # fmt: skip
        _check(failed)


class _Full:
    """Side tables that have moved are noticed at a call, not by a step that was recorded before: see `layout_version`."""

    skips_unused: ClassVar[bool] = True

    def __init__(self, needs: SampleNeeds, tensors: SampleTensors) -> None:
        state, mask, logprobs = tensors.state, tensors.mask, tensors.logprobs
        self._tensors, self._side = tensors, state.side  # the structs have their addresses
        self._run = library.kernels_of_any_dtype().sample
        self._op = _Sampler(
            batch=pointer(make_batch(state)), vocab_size=needs.vocab_size,
            seeds=state.seeds.data_ptr(), side_slots=state.side_slots.data_ptr(),
            num_prompt_tokens=state.num_prompt_tokens.data_ptr(), num_logprobs=needs.num_logprobs,
            **{name: column.data_ptr() for name, column in state.sampling.items()},
        )  # fmt: skip
        self._is_partial = None  # [slots]
        if mask is not None and logprobs is None:
            self._is_partial = torch.zeros(len(mask[1]), dtype=torch.uint8)
            self._op.is_partial = self._is_partial.data_ptr()
        if mask is not None:
            self._op.mask_words, self._op.mask_stride = mask[0].data_ptr(), mask[0].stride(0)
            self._op.has_mask = mask[1].data_ptr()
        if logprobs is not None:
            assert logprobs.token_ids.shape[1] == logprobs.logprobs.shape[1] == 1 + needs.num_logprobs
            assert logprobs.token_ids.is_contiguous() and logprobs.logprobs.is_contiguous()
            self._op.logprob_ids, self._op.logprobs = logprobs.token_ids.data_ptr(), logprobs.logprobs.data_ptr()
            self._op.ranks = logprobs.ranks.data_ptr()
        self._struct = byref(self._op)
        self._tables = _SideTables()
        self._find_tables()

    def _find_tables(self) -> None:
        side, tables = self._side, self._tables
        self._version = side.layout_version
        if not side.counts.shape[0]:
            return
        for name, value in _side_addresses(side).items():
            setattr(tables, name, value)
        self._op.side = pointer(tables)

    @contextmanager
    def reading(self, slots: Tensor) -> Iterator[None]:
        """Logits that are computed inside are for the next call of this op with these slots: of a row whose mask allows few tokens
        there may be theirs alone."""
        if self._is_partial is None:
            yield
            return
        token = reader.set((self._struct, slots.contiguous()))
        try:
            yield
        finally:
            reader.reset(token)

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        if self._version != self._side.layout_version:
            self._find_tables()
        logits, slots = _row_wise(logits), slots.contiguous()
        assert result.is_contiguous()
        failed = self._run(
            self._struct, logits.data_ptr(), logits.stride(0), slots.data_ptr(), len(slots), result.data_ptr()
        )
        _check(failed)


class NativeLogprobs:
    is_recordable: ClassVar[bool] = True

    @staticmethod
    def unsupported(needs: LogprobsNeeds) -> list[str]:
        if needs.num_logprobs > MOST_LOGPROBS:
            return [f"{needs.num_logprobs} logprobs, at most {MOST_LOGPROBS}"]
        why = library.reason_against(dtype=None)
        return [why] if why else []

    @staticmethod
    def bind(needs: LogprobsNeeds, tensors: LogprobsTensors) -> Logprobs:
        run = library.kernels_of_any_dtype().logprobs

        def write(logits: Tensor, token_ids: Tensor, target: LogprobTensors) -> None:
            logits, token_ids = _row_wise(logits), token_ids.contiguous()
            assert all(part.is_contiguous() for part in target.tensors())
            failed = run(
                logits.data_ptr(), logits.stride(0), needs.vocab_size, token_ids.data_ptr(), len(token_ids),
                needs.num_logprobs, *(part.data_ptr() for part in target.tensors()),
            )  # fmt: skip
            _check(failed)

        return write


def _side_addresses(side: SideTensors) -> dict[str, int]:
    tensors = {
        "counts": side.counts, "in_prompt": side.in_prompt, "banned": side.banned, "stop_ids": side.stop_ids,
        "bias": side.bias, "presence": side.presence_penalty, "frequency": side.frequency_penalty,
        "repetition": side.repetition_penalty, "min_tokens": side.min_tokens, "bad_word_prefix": side.bad_word_prefix,
        "bad_word_prefix_len": side.bad_word_prefix_len, "bad_word_last": side.bad_word_last,
    }  # fmt: skip
    flags = {name: getattr(side, name) for name, _ in _SideTables._fields_ if name.startswith("has_")}
    return {
        **{name: tensor.data_ptr() for name, tensor in tensors.items()},
        **{name: flag.ctypes.data for name, flag in flags.items()},
        "num_words": side.bad_word_prefix.shape[1],
        "word_length": side.bad_word_prefix.shape[2],
    }


def _row_wise(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _check(failed: int) -> None:
    if failed:
        raise EngineError("Sampling found no memory. Give the process more memory.")
