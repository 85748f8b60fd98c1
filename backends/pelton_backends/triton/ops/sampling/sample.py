"""The op `sample` in Triton: logits to tokens, and the state one token on; made for capture.

Math   `pelton_platforms.device.sampling.sampler.sample` and `BatchState.advance`, for rows by slot; see `Sample` in pelton.ops.interface.
       Filters as in pelton_platforms.device.sampling.filters, in its order, ties with the last kept token kept.
Paper  Holtzman et al., The Curious Case of Neural Text Degeneration, ICLR 2020 (arXiv:1904.09751): top_p.

n rows, V tokens, S slots
  logits  [n, V]  float32, rows at any stride; written where a grammar mask or a side table changes it
  slots   [n]     int64;  result [n, 2] int32, written: (token, code)

Greedy rows, codes and counts equal the reference's to the bit. A sampled row uses the same random number, thresholds and
order of tokens as the reference; weights are float32 exponentials whose last bits differ, so another token is taken only
where u * total lies within about 1e-6 of the total of a token's border, or a token within 1e-6 of top_p. The same
logits give the same token again, whatever the batch: chunks and orders of summation do not depend on n.

Work: greedy reads the logits once, in one launch. Full reads them once, in a launch, then one program a row picks: some 20 to
50 KB more where there are filters. A nucleus of more than a few hundred tokens takes three more passes by many programs a
row; a top_k of more than about 150 tokens, or several filters that keep more, several by one program.
H200, V = 151,936, microseconds in a captured chain at 1 / 32 / 256 rows, the least of 6 replays (one read of the logits at
4.29 TB/s: 0.1 / 4.5 / 36): greedy 3 / 7 / 42; full without filters 20 / 28 / 109; top_k 50 and top_p 0.9: 36 / 47 / 145;
a bias 20 / 29 / 119; five logprobs 29 / 36 / 128; top_p 0.9 over a flat distribution 49 / 87 / 378; penalties, top_k, top_p and
logprobs 50 / 70 / 227.
Sizes there: chunks of 8,192 tokens for greedy (4,096 take 45 at 256 rows, 2,048 take 46); 4,096 where each chunk also has
groups to write.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
from torch import Tensor

from pelton.ops.interface import Sample, SampleNeeds, SampleTensors
from pelton.platform.compiling import launch
from pelton.sampling.side_tables import GROUP
from pelton.worker.batch_state import BatchTensors
from pelton_backends.triton.ops.sampling.best import NO_KEY, best_of, end_best_kernel
from pelton_backends.triton.ops.sampling.logprobs import MOST_LOGPROBS, RawStatistics, target_strides
from pelton_backends.triton.ops.sampling.nucleus import CUTS, finish_kernel, gather_kernel, measure_kernel
from pelton_backends.triton.ops.sampling.rows import greedy_kernel, pick_kernel, scan_kernel
from pelton_backends.triton.ops.sampling.wide import wide_kernel
from pelton_backends.triton.runtime import has_pdl, launch_options

_GREEDY_CHUNK, _GREEDY_WARPS = 8192, 8
_CHUNK_GROUPS = 128
_SCAN_WARPS = 4
# A thread's: six programs an SM, though some values go through local memory. H200, 256 rows, top_k and top_p, and the same with
# penalties and logprobs: 60 and 123 us of the scan; with 64 63 and 116, with 96 64 and 128, with 128 71 and 145.
_SCAN_REGISTERS = 80
_LISTED = 8  # groups that side tables change at a time; with 32: 67 and 150 us
# Six programs an SM. Penalties and a nucleus of many, 256 rows: 80 us a pass and 120 for gathering; with 4 warps 70 and 150.
_MEASURE_WARPS, _MEASURE_REGISTERS = 8, 40
_GATHER_WARPS, _GATHER_REGISTERS = 8, 40
# Two rows an SM: up to 264 at a time. With 16 warps and 64 registers filters take 57 us at 256 rows for 47.
_PICK_WARPS, _PICK_REGISTERS = 8, 128
_FINISH_WARPS, _FINISH_REGISTERS = 8, 128
_ROOM = 256  # groups whose tokens one program of 8 warps holds, 32 a thread
_LANES = 1024
_SPARE = 8192  # weights among which the end of a nucleus is looked for
_WIDE_SPARE = 4096


class TritonSample:
    """Both variants, masks and side tables."""

    @staticmethod
    def unsupported(needs: SampleNeeds) -> list[str]:
        reasons = []
        if needs.variant not in ("greedy", "full"):
            reasons.append(f"variant {needs.variant!r}")
        if needs.vocab_size > 2**20:
            reasons.append(f"a vocabulary of {needs.vocab_size}, at most {2**20}")
        if not 0 <= needs.num_logprobs <= min(needs.vocab_size, MOST_LOGPROBS):
            reasons.append(f"{needs.num_logprobs} logprobs, at most {MOST_LOGPROBS}")
        return reasons

    @staticmethod
    def bind(needs: SampleNeeds, tensors: SampleTensors) -> Sample:
        if needs.variant == "greedy" and tensors.mask is None and tensors.logprobs is None:
            return _Greedy(needs, tensors.state)
        return _Full(needs, tensors)


class _Greedy:
    """One launch."""

    takes_best = True

    def __init__(self, needs: SampleNeeds, state: BatchTensors) -> None:
        self._state, self._vocab_size = state, needs.vocab_size
        self._chunks = triton.cdiv(needs.vocab_size, _GREEDY_CHUNK)
        self._best = torch.zeros(needs.max_num_seqs, self._chunks, dtype=torch.int64, device=state.device)
        self._arrived = torch.zeros(needs.max_num_seqs, dtype=torch.int32, device=state.device)
        self._pdl = has_pdl(state.device)

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        if not len(slots):
            return
        best = best_of(logits)
        if best is None:
            self._read(logits, slots, result, None, self._vocab_size)
        else:
            self.end_shares(best.unsqueeze(0), self._vocab_size, slots, result)

    def _read(self, logits: Tensor, slots: Tensor, result: Tensor | None, keys: Tensor | None, count: int) -> None:
        """Read the first `count` columns."""
        state, chunks = self._state, triton.cdiv(count, _GREEDY_CHUNK)
        launch(
            greedy_kernel, (len(slots), chunks),
            logits, slots, result, self._best, self._arrived, state.token_ids, state.num_computed_tokens,
            state.side_slots, state.side.counts, state.side.touched, keys, logits.stride(0), state.token_ids.stride(0),
            state.padding_slot, V=count, CHUNK=_GREEDY_CHUNK, CHUNKS=chunks, CHUNKS_BLOCK=triton.next_power_of_2(chunks),
            PDL=self._pdl, num_warps=_GREEDY_WARPS, **launch_options(self._pdl),
        )  # fmt: skip

    def share_keys(self, logits: Tensor, slots: Tensor, count: int) -> Tensor:
        best = best_of(logits)
        if best is not None:
            return best
        keys = torch.full((len(slots),), NO_KEY, dtype=torch.int64, device=logits.device)
        if len(slots) and count > 0:
            self._read(logits, slots, None, keys, count)
        return keys

    def end_shares(self, keys: Tensor, width: int, slots: Tensor, result: Tensor) -> None:
        state, (size, num_rows) = self._state, keys.shape
        if num_rows:
            launch(
                end_best_kernel, (num_rows,),
                keys, slots, result, state.token_ids, state.num_computed_tokens, state.side_slots, state.side.counts,
                state.side.touched, num_rows, width, state.token_ids.stride(0), state.padding_slot, SIZE=size,
                V=self._vocab_size, NO_KEY=NO_KEY, PDL=self._pdl, num_warps=1, **launch_options(self._pdl),
            )  # fmt: skip


def _width(num_warps: int) -> int:
    """Tokens side by side: one a thread."""
    return min(num_warps * 32, _CHUNK_GROUPS * GROUP)


class _Scratch:
    """Memory in which the kernels of one step hand results on, for the most rows."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        def zeros(*widths: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_rows, *widths, dtype=dtype, device=device)

        self.groups = triton.cdiv(vocab_size, GROUP)
        self.chunks = triton.cdiv(self.groups, _CHUNK_GROUPS)
        self.chunk_best = zeros(self.chunks)
        self.chunk_least = zeros(self.chunks, dtype=torch.float32)
        self.chunk_sum = zeros(self.chunks, dtype=torch.float64)
        self.group_best = zeros(self.groups)
        self.group_ids = zeros(_ROOM)
        self.few = zeros(_ROOM // 2, dtype=torch.int64)
        self.is_wide = zeros()
        self.facts = zeros(4, dtype=torch.float64)
        self.totals = zeros(2, CUTS, dtype=torch.int64)
        if self.groups <= _ROOM:  # all of a row fits
            return
        self.spare, self.running = zeros(_SPARE), zeros(_SPARE, dtype=torch.int64)
        self.num_spare, self.parts = zeros(), zeros(2, self.chunks)


_scratch_of: WeakKeyDictionary[BatchTensors, _Scratch] = WeakKeyDictionary()
"""All variants of one state share it: its steps come one after the other."""


class _Full:
    """Two launches, five more that end at once where no row's filters keep many tokens (one where none has a nucleus), one for logprobs."""

    def __init__(self, needs: SampleNeeds, tensors: SampleTensors) -> None:
        device = tensors.state.device
        self._state, self._vocab_size = tensors.state, needs.vocab_size
        self._mask, self._has_nuclei = tensors.mask, needs.has_nuclei
        self._logprobs, self._num_logprobs = tensors.logprobs, needs.num_logprobs
        if tensors.state not in _scratch_of:
            _scratch_of[tensors.state] = _Scratch(needs.max_num_seqs, needs.vocab_size, device)
        self._scratch = _scratch_of[tensors.state]
        self._raw = RawStatistics(
            needs.max_num_seqs if tensors.logprobs is not None else 1, needs.vocab_size, _CHUNK_GROUPS, device
        )
        self._has_side = self._state.side.counts.shape[0] > 0
        self._may_change = self._has_side or tensors.mask is not None
        if self._may_change and tensors.logprobs is None:
            self._raw.best = torch.zeros_like(self._scratch.chunk_best)
        pdl = has_pdl(device)
        self._options: dict[str, Any] = {"PDL": pdl} | launch_options(pdl)
        chunks = self._scratch.chunks
        self._sizes: dict[str, Any] = {
            "V": needs.vocab_size, "CHUNK_GROUPS": _CHUNK_GROUPS, "CHUNKS": chunks,
            "CHUNKS_BLOCK": triton.next_power_of_2(chunks), **self._options,
        }  # fmt: skip

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        if not len(slots):
            return
        # Logprobs are of the logits before they are changed: those are kept.
        is_kept = self._may_change and self._logprobs is not None
        raw_logits = logits.new_empty_strided(logits.shape, logits.stride()) if is_kept else logits
        self._scan(logits, raw_logits, slots)
        self._pick(logits, raw_logits, slots, result)
        if self._scratch.groups > _ROOM:
            if self._has_nuclei:
                self._pick_of_nuclei(logits, slots, result)
            self._pick_of_many(logits, slots, result)
        if self._logprobs is not None:
            self._raw.pick(
                logits, result[:, 0], self._logprobs, num=self._num_logprobs, vocab_size=self._vocab_size,
                pdl=self._options["PDL"], slots=slots, num_logprobs=self._state.num_logprobs,
                padding_slot=self._state.padding_slot, raw_logits=raw_logits if is_kept else None,
            )  # fmt: skip

    def _scan(self, logits: Tensor, raw_logits: Tensor, slots: Tensor) -> None:
        state, side, scratch, raw = self._state, self._state.side, self._scratch, self._raw
        mask, has_mask = (slots, slots) if self._mask is None else self._mask
        words, length = side.bad_word_prefix.shape[1:]
        launch(
            scan_kernel, (len(slots), scratch.chunks),
            logits, raw_logits, raw.is_kept, raw.is_changed, slots, *state.sampling.values(),
            state.num_logprobs, state.side_slots, side.features, side.touched, side.banned, side.stop_ids, side.bias,
            side.counts, side.in_prompt, side.presence_penalty, side.frequency_penalty, side.repetition_penalty,
            side.min_tokens, side.bad_word_prefix, side.bad_word_prefix_len, side.bad_word_last, state.num_prompt_tokens,
            state.num_computed_tokens, state.token_ids, mask, has_mask, scratch.chunk_best, scratch.chunk_least,
            scratch.chunk_sum, scratch.group_best, raw.best, raw.sum, raw.group_best, logits.stride(0),
            state.token_ids.stride(0), mask.stride(0),
            V=self._vocab_size, GROUPS=scratch.groups, CHUNK_GROUPS=_CHUNK_GROUPS, CHUNKS=scratch.chunks, LISTED=_LISTED,
            HAS_SIDE=self._has_side, HAS_MASK=self._mask is not None, HAS_LOGPROBS=self._logprobs is not None,
            WORDS=words, LENGTH=length, num_warps=_SCAN_WARPS, maxnreg=_SCAN_REGISTERS, enable_fp_fusion=False, **self._options,
        )  # fmt: skip

    def _pick(self, logits: Tensor, raw_logits: Tensor, slots: Tensor, result: Tensor) -> None:
        state, scratch, raw, target = self._state, self._scratch, self._raw, self._logprobs
        lists, (ids, values) = (slots, slots), (0, 0)
        if target is not None:
            lists, (ids, values, _) = (target.token_ids, target.logprobs), target_strides(target)
        launch(
            pick_kernel, (len(slots) * (1 if target is None else 2),),
            logits, slots, result, *state.sampling.values(),
            state.seeds, scratch.chunk_best, scratch.chunk_least, self._raw.best, scratch.chunk_sum, scratch.group_best,
            scratch.group_ids, scratch.few, scratch.is_wide, scratch.facts, scratch.totals, state.token_ids, state.num_computed_tokens,
            state.side_slots, state.side.counts, state.side.touched, state.num_logprobs, raw_logits, raw.is_kept, raw.is_changed,
            raw.sum, raw.group_best, *lists, logits.stride(0), state.token_ids.stride(0), ids, values, state.padding_slot,
            NUM_LOGPROBS=-1 if target is None else self._num_logprobs, GROUPS=scratch.groups,
            GROUPS_BLOCK=triton.next_power_of_2(scratch.groups), ROOM=_ROOM, FEW=_ROOM // 2, CUTS=CUTS,
            MAY_CHANGE=self._may_change, num_warps=_PICK_WARPS, maxnreg=_PICK_REGISTERS, **self._sizes,
        )  # fmt: skip

    def _pick_of_nuclei(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        """Rows with a nucleus of many tokens that `_pick` has left."""
        state, scratch, num_rows = self._state, self._scratch, len(slots)
        nucleus = (scratch.is_wide, scratch.facts, scratch.totals)
        tile = {"V": self._vocab_size, "TILE": _CHUNK_GROUPS * GROUP, **self._options}
        for index in range(2):
            launch(
                measure_kernel, (num_rows, scratch.chunks),
                logits, *nucleus, logits.stride(0), WIDTH=_width(_MEASURE_WARPS), PASS=index, num_warps=_MEASURE_WARPS,
                maxnreg=_MEASURE_REGISTERS, **tile,
            )  # fmt: skip
        spare = (scratch.spare, scratch.num_spare, scratch.parts)
        launch(
            gather_kernel, (num_rows, scratch.chunks),
            logits, *nucleus, *spare, scratch.chunk_sum, logits.stride(0), CHUNKS=scratch.chunks, SPARE=_SPARE,
            WIDTH=_width(_GATHER_WARPS), num_warps=_GATHER_WARPS, maxnreg=_GATHER_REGISTERS, **tile,
        )  # fmt: skip
        launch(
            finish_kernel, (num_rows,),
            logits, slots, result, state.seeds, scratch.is_wide, scratch.facts, *spare, scratch.running,
            scratch.chunk_sum, *self._advanced(logits), SPARE=_SPARE, num_warps=_FINISH_WARPS, maxnreg=_FINISH_REGISTERS,
            **self._sizes,
        )  # fmt: skip

    def _pick_of_many(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        """Rows that are left after that."""
        state, scratch, num_rows = self._state, self._scratch, len(slots)
        launch(
            wide_kernel, (num_rows,),
            logits, slots, result, *state.sampling.values(), state.seeds, scratch.chunk_best,
            scratch.spare, scratch.is_wide, *self._advanced(logits), LANES=_LANES, SPARE=min(_SPARE, _WIDE_SPARE),
            num_warps=16, **self._sizes,
        )  # fmt: skip

    def _advanced(self, logits: Tensor) -> tuple[Any, ...]:
        """Return what the end of a row writes, and the strides."""
        state, side = self._state, self._state.side
        advanced = state.token_ids, state.num_computed_tokens, state.side_slots, side.counts, side.touched
        return *advanced, logits.stride(0), state.token_ids.stride(0)
