"""The `sample` seam in Triton: logits to tokens, and the state one token on; made for capture.

Math   `pelton.sampling.sampler.sample` and `BatchState.advance`, for rows by slot; see `Sample` in pelton.ops.interface.
       Filters as in pelton.sampling.filters: min_p, then top_k, then top_p, ties with the last kept token kept.
Paper  Holtzman et al., The Curious Case of Neural Text Degeneration, ICLR 2020 (arXiv:1904.09751): top_p.

n rows, V tokens, S slots
  logits  [n, V]  float32, rows at any stride; written where a grammar mask or a side table changes it
  slots   [n]     int64;  result [n, 2] int32, written: (token, code)

Greedy rows, codes and counts equal the reference's to the bit. A sampled row uses the same random number, thresholds and
order of tokens as the reference; weights are float32 exponentials whose last bits differ, so another token is taken only
where u * total lies within about 1e-6 of the total of a token's border, or a token within 1e-6 of top_p. The same
logits give the same token again, whatever the batch: chunks and orders of summation do not depend on n.

Work: greedy reads the logits once, in one launch. Full reads them once, in a launch, then one program a row picks: some 20 to
50 KB more where there are filters. A top_k or nucleus of more than about 150 tokens costs several passes by one program.
H200, V = 151,936, microseconds in a captured chain at 1 / 32 / 256 rows, the least of 11 replays beside other work on the
GPU (one read of the logits at 4.29 TB/s: 0.1 / 4.5 / 36):
greedy 2.8 / 6.5 / 40; full without filters 13 / 18 / 65; top_k 50: 23 / 31 / 93; top_k 50 and top_p 0.9: 29 / 38 / 106.
Sizes there: chunks of 8,192 tokens for greedy (4,096 take 45 at 256 rows, 2,048 take 46); 4,096 where each chunk also has
groups to write.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from pelton.ops.interface import Sample, SampleNeeds, SampleTensors
from pelton.sampling.logprobs import LogprobTensors
from pelton.worker.batch_state import BatchState
from pelton_backends.triton.launch import launch
from pelton_backends.triton.ops.sampling_logprobs import logprob_pick_kernel, logprob_scan_kernel
from pelton_backends.triton.ops.sampling_rows import greedy_kernel, pick_kernel, scan_kernel
from pelton_backends.triton.ops.sampling_side import change_kernel, side_addresses
from pelton_backends.triton.ops.sampling_wide import wide_kernel
from pelton_backends.triton.runtime import has_pdl, launch_options

_GROUP = 32
_GREEDY_CHUNK, _GREEDY_WARPS = 8192, 8
_CHUNK_GROUPS, _SCAN_WARPS = 128, 4
_PICK_WARPS = 8
_ROOM = 256  # groups whose tokens one program of 8 warps holds, 32 a thread
_LANES = 1024
_SPARE = 4096
_SPLITS, _CHANGE_BLOCK = 8, 2048
_MOST_LOGPROBS = 128


class TritonSample:
    """Both variants, masks and side tables."""

    @staticmethod
    def unsupported(needs: SampleNeeds) -> list[str]:
        reasons = []
        if needs.variant not in ("greedy", "full"):
            reasons.append(f"variant {needs.variant!r}")
        if needs.vocab_size > 2**20:
            reasons.append(f"a vocabulary of {needs.vocab_size}, at most {2**20}")
        if not 0 <= needs.num_logprobs <= min(needs.vocab_size, _MOST_LOGPROBS):
            reasons.append(f"{needs.num_logprobs} logprobs, at most {_MOST_LOGPROBS}")
        return reasons

    @staticmethod
    def bind(needs: SampleNeeds, tensors: SampleTensors) -> Sample:
        if needs.variant == "greedy" and tensors.mask is None and tensors.logprobs is None:
            return _Greedy(needs, tensors.state)
        return _Full(needs, tensors)


class _Greedy:
    """One launch."""

    def __init__(self, needs: SampleNeeds, state: BatchState) -> None:
        self._state, self._vocab_size = state, needs.vocab_size
        self._chunks = triton.cdiv(needs.vocab_size, _GREEDY_CHUNK)
        self._best = torch.zeros(needs.max_num_seqs, self._chunks, dtype=torch.int64, device=state.device)
        self._arrived = torch.zeros(needs.max_num_seqs, dtype=torch.int32, device=state.device)
        self._pdl = has_pdl(state.device)

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        state, num_rows = self._state, len(slots)
        if not num_rows:
            return
        launch(
            greedy_kernel, (num_rows, self._chunks),
            logits, slots, result, self._best, self._arrived, state.token_ids, state.num_computed_tokens,
            state.side_slots, state.side.counts, logits.stride(0), state.token_ids.stride(0), state.padding_slot,
            V=self._vocab_size, CHUNK=_GREEDY_CHUNK, CHUNKS=self._chunks, CHUNKS_BLOCK=triton.next_power_of_2(self._chunks),
            PDL=self._pdl, num_warps=_GREEDY_WARPS, **launch_options(self._pdl),
        )  # fmt: skip


@dataclass(slots=True)
class _Scratch:
    """What the kernels of one step hand on, for the most rows."""

    chunk_best: Tensor  # [N, C] int32
    raw_best: Tensor  # [N, SPLITS] int32
    chunk_sum: Tensor  # [N, C] float64
    chunk_above: Tensor  # [N, C] int32
    group_best: Tensor  # [N, groups] int32
    group_ids: Tensor  # [N, ROOM] int32
    spare: Tensor  # [N, SPARE] int32
    is_wide: Tensor  # [N] int32

    @staticmethod
    def make(num_rows: int, vocab_size: int, device: torch.device) -> _Scratch:
        def empty(width: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_rows, width, dtype=dtype, device=device)

        chunks, groups = triton.cdiv(vocab_size, _CHUNK_GROUPS * _GROUP), triton.cdiv(vocab_size, _GROUP)
        return _Scratch(
            empty(chunks), empty(_SPLITS), empty(chunks, torch.float64), empty(chunks), empty(groups), empty(_ROOM), empty(_SPARE),
            torch.zeros(num_rows, dtype=torch.int32, device=device),
        )  # fmt: skip


class _Full:
    """Three launches, and one before them where masks or side tables may be; first and last end at once for rows without."""

    def __init__(self, needs: SampleNeeds, tensors: SampleTensors) -> None:
        self._state, self._vocab_size = tensors.state, needs.vocab_size
        self._mask = tensors.mask
        self._logprobs, self._num_logprobs = tensors.logprobs, needs.num_logprobs
        self._scratch = _Scratch.make(needs.max_num_seqs, needs.vocab_size, tensors.state.device)
        self._chunks = triton.cdiv(needs.vocab_size, _CHUNK_GROUPS * _GROUP)
        self._groups = triton.cdiv(needs.vocab_size, _GROUP)
        self._pdl = has_pdl(tensors.state.device)
        self._has_side = self._state.side.counts.shape[0] > 0
        self._splits = _SPLITS if self._has_side or self._mask is not None else 0
        self._side, self._side_version = side_addresses(self._state), self._state.side.layout_version

    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        if not len(slots):
            return
        raw = logits
        if self._splits:
            raw = raw.clone() if self._logprobs is not None else raw
            self._change(logits, slots)
        state, scratch = self._state, self._scratch
        launch(
            scan_kernel, (len(slots), self._chunks),
            logits, slots, state.temperature, state.top_k, state.top_p, state.min_p, scratch.chunk_best,
            scratch.chunk_sum, scratch.group_best, logits.stride(0), state.padding_slot,
            V=self._vocab_size, GROUPS=self._groups, CHUNK_GROUPS=_CHUNK_GROUPS, CHUNKS=self._chunks, PDL=self._pdl,
            num_warps=_SCAN_WARPS, **launch_options(self._pdl),
        )  # fmt: skip
        self._pick(logits, slots, result)
        if self._logprobs is not None:
            self._write_logprobs(raw, slots, result, self._logprobs)

    def _change(self, logits: Tensor, slots: Tensor) -> None:
        state, mask = self._state, self._mask
        if self._side_version != state.side.layout_version:
            self._side, self._side_version = side_addresses(state), state.side.layout_version
        words, length = state.side.bad_word_prefix.shape[1:]
        launch(
            change_kernel, (len(slots), _SPLITS),
            logits, slots, self._scratch.raw_best, state.side_slots, self._side, slots if mask is None else mask[0],
            slots if mask is None else mask[1], logits.stride(0), 0 if mask is None else mask[0].stride(0),
            state.padding_slot,
            V=self._vocab_size, BLOCK=_CHANGE_BLOCK, SPLITS=_SPLITS, HAS_SIDE=self._has_side, HAS_MASK=mask is not None,
            WORDS=words, LENGTH=length, PDL=self._pdl, num_warps=4, enable_fp_fusion=False, **launch_options(self._pdl),
        )  # fmt: skip

    def _pick(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        state, scratch, chunks = self._state, self._scratch, self._chunks
        parameters = (state.temperature, state.top_k, state.top_p, state.min_p, state.seeds)
        advanced = (state.token_ids, state.num_computed_tokens, state.side_slots, state.side.counts)
        sizes = {"V": self._vocab_size, "CHUNK_GROUPS": _CHUNK_GROUPS, "CHUNKS": chunks,
                 "CHUNKS_BLOCK": triton.next_power_of_2(chunks), "PDL": self._pdl} | launch_options(self._pdl)  # fmt: skip
        launch(
            pick_kernel, (len(slots),),
            logits, slots, result, *parameters, scratch.chunk_best, scratch.raw_best, scratch.chunk_sum,
            scratch.group_best, scratch.group_ids, scratch.is_wide, *advanced, logits.stride(0),
            state.token_ids.stride(0), state.padding_slot,
            GROUPS=self._groups, GROUPS_BLOCK=triton.next_power_of_2(self._groups), ROOM=_ROOM,
            SPLITS=self._splits, num_warps=_PICK_WARPS, **sizes,
        )  # fmt: skip
        if self._groups <= _ROOM:  # all of a row fits; and triton 3.6 does not compile the other kernel for so few
            return
        launch(
            wide_kernel, (len(slots),),
            logits, slots, result, *parameters, scratch.chunk_best, scratch.spare, scratch.is_wide, *advanced,
            logits.stride(0), state.token_ids.stride(0), LANES=_LANES, SPARE=_SPARE, num_warps=16, **sizes,
        )  # fmt: skip

    def _write_logprobs(self, raw: Tensor, slots: Tensor, result: Tensor, target: LogprobTensors) -> None:
        scratch, chunks, options = self._scratch, self._chunks, launch_options(self._pdl)
        statistics = (scratch.chunk_best, scratch.chunk_sum, scratch.chunk_above, scratch.group_best)
        launch(
            logprob_scan_kernel, (len(slots), chunks),
            raw, slots, result, *statistics, raw.stride(0), self._state.padding_slot,
            V=self._vocab_size, GROUPS=self._groups, CHUNK_GROUPS=_CHUNK_GROUPS, CHUNKS=chunks, PDL=self._pdl,
            num_warps=_SCAN_WARPS, **options,
        )  # fmt: skip
        launch(
            logprob_pick_kernel, (len(slots),),
            raw, slots, result, *statistics, target.token_ids, target.logprobs, target.ranks, raw.stride(0),
            self._state.padding_slot,
            V=self._vocab_size, GROUPS=self._groups, GROUPS_BLOCK=triton.next_power_of_2(self._groups), CHUNKS=chunks,
            CHUNKS_BLOCK=triton.next_power_of_2(chunks), NUM=self._num_logprobs, PDL=self._pdl, num_warps=8, **options,
        )  # fmt: skip
