"""Log-probabilities of given tokens and of the likeliest alternatives, from raw logits.

Math   lse = log sum_t exp(l_t);  logprobs[0] = l_token - lse, rank = 1 + |{t: l_t > l_token}|; then the `NUM` largest l_t - lse
       with their tokens, equal ones by lower token first: `pelton.sampling.logprobs.gather_logprobs`.

n rows, V tokens, C chunks of `CHUNK_GROUPS` groups of 32 tokens, N groups a row
  logits  [n, V]  float32, raw
  raw_best [n, C] int32 keys, raw_sum [n, C] float64: of each chunk the best logit and the sum of exp(l - best); raw_group_best
  [n, N] int32 keys: written by `sampling_rows.scan_kernel`, or for prompts by `logprob_scan_kernel`
  logprob_ids, logprobs [>= n, 1 + NUM] int64, float32; ranks [>= n] int64: rows at any stride

Ids and ranks are exact; logprobs within 1e-5 (sums of float32 exponentials, in float64). One program a row: only groups with a
logit above the token's are read for its rank, and the best of the group bests is taken once for each alternative that the
row asks for: about 1 us each on an H200, no sort.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pelton.ops.interface import Logprobs, LogprobsNeeds, LogprobsTensors
from pelton.platform.compiling import launch
from pelton.sampling.logprobs import LogprobTensors
from pelton.sampling.side_tables import GROUP as GROUP_TOKENS
from pelton_backends.triton.ops.sampling.pieces import (
    GROUP,
    LOG2_E,
    LOWEST_KEY,
    MINUS_INF_KEY,
    exp_sum,
    group_keys,
    key_value,
    order_key,
)
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

CHUNK_GROUPS = 128
MOST_LOGPROBS = 128


@triton.jit
def logprob_scan_kernel(
    logits,
    raw_best,
    raw_sum,
    raw_group_best,
    row_stride,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK_GROUPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n, C)."""
    row, chunk = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    group = chunk * CHUNK_GROUPS + tl.arange(0, CHUNK_GROUPS)
    place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    values = tl.load(logits + row.to(tl.int64) * row_stride + place, mask=place < V, other=-float("inf"))
    keys = group_keys(values)
    best = tl.max(keys, 0)
    at = row * CHUNKS + chunk
    tl.store(raw_best + at, best)
    tl.store(raw_sum + at, exp_sum(values, best, LOG2_E))
    tl.store(raw_group_best + row.to(tl.int64) * GROUPS + group, keys, mask=group < GROUPS)


@triton.jit
def _raw(row_logits, row_raw, row_is_kept, is_other, group, GROUPS: tl.constexpr, MAY_CHANGE: tl.constexpr):
    """Where the logits of a row's group, or groups, lie as they were before anything changed them."""
    start = row_logits + group * 0
    if MAY_CHANGE:
        is_kept = tl.load(row_is_kept + group, mask=(group < GROUPS) & is_other, other=0) != 0
        start = tl.where(is_kept, row_raw, start)
    return start


@triton.jit
def _num_above(
    row_logits, row_raw, row_is_kept, is_other, own, keys, groups, group_ids,
    V: tl.constexpr, GROUPS: tl.constexpr, READ: tl.constexpr, MAY_CHANGE: tl.constexpr,
):  # fmt: skip
    """Tokens with a key above `own`, from the groups whose best is; group_ids [GROUPS] int32: scratch."""
    is_above = keys > own
    num_groups = tl.sum(is_above.to(tl.int32), 0)
    above = tl.zeros([READ], tl.int32)
    if num_groups > 0:
        tl.store(group_ids + tl.cumsum(is_above.to(tl.int32), 0) - 1, groups, mask=is_above)
        tl.debug_barrier()
        for start in range(0, num_groups, READ):
            index = start + tl.arange(0, READ)
            group = tl.load(group_ids + index, mask=index < num_groups, other=GROUPS)
            place = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            source = _raw(row_logits, row_raw, row_is_kept, is_other, group, GROUPS, MAY_CHANGE)
            values = tl.load(source[:, None] + place, mask=place < V, other=-float("inf"))
            above += tl.sum((order_key(values) > own).to(tl.int32), 1)
    return tl.sum(above, 0)


@triton.jit
def list_alternatives(
    row, wanted, logits, raw_logits, is_kept, is_changed, raw_best, raw_sum, raw_group_best, logprob_ids, logprobs,
    row_stride, ids_stride, values_stride,
    V: tl.constexpr, GROUPS: tl.constexpr, GROUPS_BLOCK: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr,
    NUM: tl.constexpr, MAY_CHANGE: tl.constexpr,
):  # fmt: skip
    """Write a row's `wanted` likeliest tokens, behind the place of its own."""
    row_logits = logits + row.to(tl.int64) * row_stride
    row_raw, row_is_kept = raw_logits + row.to(tl.int64) * row_stride, is_kept + row.to(tl.int64) * GROUPS
    is_other = tl.full([], 0, tl.int1)
    if MAY_CHANGE:
        is_other = tl.load(is_changed + row) != 0
    groups, lane = tl.arange(0, GROUPS_BLOCK), tl.arange(0, GROUP)
    keys = tl.load(raw_group_best + row.to(tl.int64) * GROUPS + groups, mask=groups < GROUPS, other=LOWEST_KEY)
    normalizer = _normalizer(row, raw_best, raw_sum, CHUNKS, CHUNKS_BLOCK)
    last_key = tl.full([], 0x7FFFFFFF, tl.int32)
    last = tl.full([], -1, tl.int32)
    for index in range(0, tl.minimum(wanted, NUM).to(tl.int32)):
        best = tl.max(keys, 0)
        group = tl.min(tl.where(keys == best, groups, GROUPS_BLOCK), 0)
        place = group * GROUP + lane
        values = tl.load(row_logits + place, mask=place < V, other=-float("inf"))
        if MAY_CHANGE:  # both at once: to ask first which it is would be one more way to memory and back
            raw = tl.load(row_raw + place, mask=(place < V) & is_other, other=-float("inf"))
            values = tl.where(tl.load(row_is_kept + group, mask=is_other, other=0) != 0, raw, values)
        own = order_key(values)
        after = tl.where(best == last_key, last, -1)  # equal ones were taken from the left
        last = tl.min(tl.where((own == best) & (place > after), place, V - 1), 0)
        last_key = best
        left = tl.where((own < best) | ((own == best) & (place > last)), own, LOWEST_KEY)
        keys = tl.where(groups == group, tl.max(left, 0), keys)
        tl.store(logprob_ids + row * ids_stride + 1 + index, last.to(tl.int64))
        tl.store(logprobs + row * values_stride + 1 + index, key_value(best) - normalizer)


@triton.jit
def _normalizer(row, raw_best, raw_sum, CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr):
    chunks = tl.arange(0, CHUNKS_BLOCK)
    at = row * CHUNKS + chunks
    bests = key_value(tl.load(raw_best + at, mask=chunks < CHUNKS, other=MINUS_INF_KEY))
    sums = tl.load(raw_sum + at, mask=chunks < CHUNKS, other=0.0)
    top = tl.max(bests, 0)
    return (top.to(tl.float64) + tl.log(tl.sum(sums * tl.exp(bests - top), 0))).to(tl.float32)


for _shared in (_raw, _normalizer, list_alternatives):
    # Their keys, now: Triton's key of a kernel depends on whether what it calls had one before. Two kernels call these, in either
    # order, and a second start would compile both again. The interpreter's functions have none.
    getattr(_shared, "cache_key", None)


@triton.jit
def logprob_pick_kernel(
    logits,
    raw_logits,
    is_kept,
    is_changed,
    slots,
    num_logprobs,
    tokens,
    raw_best,
    raw_sum,
    raw_group_best,
    group_ids,
    logprob_ids,
    logprobs,
    ranks,
    row_stride,
    token_stride,
    ids_stride,
    values_stride,
    ranks_stride,
    padding_slot,
    V: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUPS_BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNKS_BLOCK: tl.constexpr,
    NUM: tl.constexpr,
    READ: tl.constexpr,
    BY_SLOT: tl.constexpr,
    MAY_CHANGE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (n). Token of row r: tokens[r * token_stride]. BY_SLOT: num_logprobs [S + 1] int64 says by slot how many a row wants,
    negative for none, and `sampling_rows.pick_kernel` has listed the alternatives; else every row wants `NUM`.
    MAY_CHANGE: of rows with is_changed [n] int32 the groups with is_kept [n, GROUPS] int8 are in `raw_logits`."""
    row = tl.program_id(0)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    # What needs neither the slot nor the token is fetched beside them.
    groups = tl.arange(0, GROUPS_BLOCK)
    keys = tl.load(raw_group_best + row.to(tl.int64) * GROUPS + groups, mask=groups < GROUPS, other=LOWEST_KEY)
    normalizer = _normalizer(row, raw_best, raw_sum, CHUNKS, CHUNKS_BLOCK)
    token = tl.load(tokens + row.to(tl.int64) * token_stride).to(tl.int32)
    is_other = tl.full([], 0, tl.int1)
    if MAY_CHANGE:
        is_other = tl.load(is_changed + row) != 0
    wanted = tl.full([], NUM, tl.int64)
    if BY_SLOT:
        slot = tl.load(slots + row)
        wanted = tl.where(slot == padding_slot, -1, tl.load(num_logprobs + slot))
    if wanted >= 0:
        row_logits = logits + row.to(tl.int64) * row_stride
        row_raw, row_is_kept = raw_logits + row.to(tl.int64) * row_stride, is_kept + row.to(tl.int64) * GROUPS
        own_value = tl.load(
            _raw(row_logits, row_raw, row_is_kept, is_other, token // GROUP, GROUPS, MAY_CHANGE) + token
        )
        own_ids = group_ids + row.to(tl.int64) * GROUPS
        above = _num_above(
            row_logits, row_raw, row_is_kept, is_other, order_key(own_value), keys, groups, own_ids, V, GROUPS, READ,
            MAY_CHANGE,
        )  # fmt: skip
        tl.store(ranks + row * ranks_stride, (above + 1).to(tl.int64))
        tl.store(logprob_ids + row * ids_stride, token.to(tl.int64))
        tl.store(logprobs + row * values_stride, own_value - normalizer)
        if not BY_SLOT:
            list_alternatives(
                row, wanted, logits, raw_logits, is_kept, is_changed, raw_best, raw_sum, raw_group_best, logprob_ids,
                logprobs, row_stride, ids_stride, values_stride, V, GROUPS, GROUPS_BLOCK, CHUNKS, CHUNKS_BLOCK, NUM,
                MAY_CHANGE,
            )  # fmt: skip


def target_strides(target: LogprobTensors) -> tuple[int, int, int]:
    """From row to row."""
    return target.token_ids.stride(0), target.logprobs.stride(0), target.ranks.stride(0)


class RawStatistics:
    """Results that a scan leaves for `logprob_pick_kernel`, of at most `num_rows` rows."""

    def __init__(self, num_rows: int, vocab_size: int, chunk_groups: int, device: torch.device) -> None:
        self.groups = triton.cdiv(vocab_size, GROUP_TOKENS)
        self.chunks = triton.cdiv(self.groups, chunk_groups)
        self.best = torch.zeros(num_rows, self.chunks, dtype=torch.int32, device=device)
        self.sum = torch.zeros(num_rows, self.chunks, dtype=torch.float64, device=device)
        self.group_best = torch.zeros(num_rows, self.groups, dtype=torch.int32, device=device)
        self.group_ids = torch.zeros(num_rows, self.groups, dtype=torch.int32, device=device)
        self.is_changed = torch.zeros(num_rows, dtype=torch.int32, device=device)
        self.is_kept = torch.zeros(num_rows, self.groups, dtype=torch.int8, device=device)

    def pick(
        self, logits: Tensor, tokens: Tensor, target: LogprobTensors, *, num: int, vocab_size: int, pdl: bool,
        slots: Tensor | None = None, num_logprobs: Tensor | None = None, padding_slot: int = -1,
        raw_logits: Tensor | None = None,
    ) -> None:  # fmt: skip
        """tokens: one a row, at any stride. slots, num_logprobs, raw_logits: see the kernel."""
        options: dict[str, Any] = {"PDL": pdl, "num_warps": 8, "maxnreg": 128} | launch_options(pdl)
        launch(
            logprob_pick_kernel, (len(logits),),
            logits, logits if raw_logits is None else raw_logits, self.is_kept, self.is_changed,
            tokens if slots is None else slots, tokens if num_logprobs is None else num_logprobs, tokens, self.best,
            self.sum, self.group_best, self.group_ids, target.token_ids, target.logprobs, target.ranks,
            logits.stride(0), tokens.stride(0), *target_strides(target), padding_slot,
            V=vocab_size, GROUPS=self.groups, GROUPS_BLOCK=triton.next_power_of_2(self.groups), CHUNKS=self.chunks,
            CHUNKS_BLOCK=triton.next_power_of_2(self.chunks), NUM=num, READ=min(128, triton.next_power_of_2(self.groups)),
            BY_SLOT=slots is not None, MAY_CHANGE=raw_logits is not None, **options,
        )  # fmt: skip


class TritonLogprobs:
    """See `Logprobs`: two launches."""

    @staticmethod
    def unsupported(needs: LogprobsNeeds) -> list[str]:
        if not 0 <= needs.num_logprobs <= min(needs.vocab_size, MOST_LOGPROBS):
            return [f"{needs.num_logprobs} logprobs, at most {min(needs.vocab_size, MOST_LOGPROBS)}"]
        return []

    @staticmethod
    def bind(needs: LogprobsNeeds, tensors: LogprobsTensors) -> Logprobs:
        statistics = RawStatistics(needs.max_rows, needs.vocab_size, CHUNK_GROUPS, tensors.device)
        pdl = has_pdl(tensors.device)

        def write(logits: Tensor, token_ids: Tensor, target: LogprobTensors) -> None:
            launch(
                logprob_scan_kernel, (len(logits), statistics.chunks),
                logits, statistics.best, statistics.sum, statistics.group_best, logits.stride(0),
                V=needs.vocab_size, GROUPS=statistics.groups, CHUNK_GROUPS=CHUNK_GROUPS, CHUNKS=statistics.chunks, PDL=pdl,
                num_warps=4, **launch_options(pdl),
            )  # fmt: skip
            statistics.pick(logits, token_ids, target, num=needs.num_logprobs, vocab_size=needs.vocab_size, pdl=pdl)

        return write
