"""Compile kernels for compute capability 9.0, with a GPU or without; print what each takes, a line of JSON.

    python pelton_sm90.py DTYPE KV_DTYPE NAME...        names: of SHAPES, PRODUCTS, ADAPTED, SAMPLING, EVERY, of a method of Attention,
                                                    "experts in" a format of theirs, or "launched": names of all kernels
    python pelton_sm90.py DTYPE KV_DTYPE NAME... -- --no-code DTYPE KV_DTYPE NAME...      several at once; some without instructions
    python pelton_sm90.py DTYPE KV_DTYPE NAME=0,2 NAME=                  instructions of the first and the third launch alone; of none

A program of its own: a process either interprets Triton's kernels, as the other tests do where there is no GPU, or compiles
them. Arguments are tensors on the CPU: the compiler looks at their types, strides and addresses alone. Kernels without
instructions go through Triton's own passes alone, which refuse what the language does not allow.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pelton_quick_end  # noqa: F401
import torch
from pelton_adapted import AdaptedCase
from pelton_every_kernel import EVERY, launched_kernels
from pelton_linear_oracle import make_case
from pelton_moe_case import moe_case
from pelton_quick_compiler import quicken
from pelton_sass import INSTRUCTION, unwritten
from pelton_stages import NO_CODE, digest_of_stages, stages_of
from pelton_states import (
    DeltaCase,
    GatedConvCase,
    KeyDeltaCase,
    LightningCase,
    RgLruCase,
    ScanCase,
    StateCase,
    make_layer,
)
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pelton.attention.interface import KVLayout
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import (
    AddNormLogitsNeeds,
    AddNormLogitsTensors,
    InputRounding,
    LinearSpec,
    LinearWeights,
    LogprobsNeeds,
    LogprobsTensors,
    NormSpec,
    PrepareInputsNeeds,
    PrepareInputsTensors,
    QkNormRopeWriteKvNeeds,
    QkNormRopeWriteKvTensors,
    RowsToSend,
    SampleNeeds,
    SampleTensors,
)
from pelton.ops.moe import RoutingSpec
from pelton.ops.speculation import LookupDraftsNeeds, LookupDraftsTensors, VerifyNeeds, VerifyTensors
from pelton.sampling.logprobs import LogprobTensors
from pelton.testing.paged_rows import page_views
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_backends.triton.attention import decode_resident, latent_hopper
from pelton_backends.triton.attention.cascade import cascade_attention
from pelton_backends.triton.attention.context_part import context_part_attention
from pelton_backends.triton.attention.decode import NewTokens, NormRope, decode_attention
from pelton_backends.triton.attention.decode_drafts import DraftParts, drafts_attention, drafts_shape
from pelton_backends.triton.attention.decode_resident import (
    ResidentDecode,
    ResidentParts,
    ResidentShape,
    deal_resident,
)
from pelton_backends.triton.attention.decode_shares import LaunchShape, PartBuffers, deal_rows
from pelton_backends.triton.attention.indexer import choose_tokens
from pelton_backends.triton.attention.latent import latent_attention
from pelton_backends.triton.attention.prefill import prefill_attention
from pelton_backends.triton.attention.sparse_latent import sparse_latent_attention
from pelton_backends.triton.ops import drafted_inputs, inputs, pinned
from pelton_backends.triton.ops import logits as head
from pelton_backends.triton.ops.linear import (
    fp8,
    fp8_blocks,
    fp8_one_row,
    gemv,
    grouped,
    hopper_blocks,
    hopper_grouped,
    hopper_matmul,
    hopper_mid_batch,
    hopper_split_k,
    hopper_vocab,
    hopper_wide_vocab,
    large_batch,
    small_batch,
    split_k,
)
from pelton_backends.triton.ops.lora import gemv as lora_gemv
from pelton_backends.triton.ops.lora import hopper as lora_hopper
from pelton_backends.triton.ops.lora import hopper_many
from pelton_backends.triton.ops.lora import linear as lora
from pelton_backends.triton.ops.lora import shrink as lora_shrink
from pelton_backends.triton.ops.moe import experts as moe
from pelton_backends.triton.ops.moe import hopper_int4, hopper_mxfp4, split, streamed
from pelton_backends.triton.ops.qk_rope import TritonQkNormRopeWriteKv
from pelton_backends.triton.ops.sampling import logprobs as sampling_logprobs
from pelton_backends.triton.ops.sampling import sample as sampling
from pelton_backends.triton.ops.sampling import speculation
from pelton_backends.triton.states.backend import StateMetadata
from pelton_backends.triton.states.delta_rule import DeltaRule, KeyDeltaRule
from pelton_backends.triton.states.gated_conv import GatedConv
from pelton_backends.triton.states.lightning import Lightning
from pelton_backends.triton.states.rg_lru import RgLru
from pelton_backends.triton.states.selective_scan import SelectiveScan
from pelton_backends.triton.states.state_space import StateSpace
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.gpu.peers import norm_kernel
from pelton_platforms.gpu.peers.communicator import DTYPES

ROWS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 64, 16, 8, 128, 16, 2
VOCAB = 151_936
SMALL_VOCAB = 10_000  # of more groups than one program has room for
SHAPES = {
    "early": LaunchShape(8, 0, 32, 2, is_early=True),
    "dealt": LaunchShape(132, 0, 32, 2, is_early=True, is_dealt=True),
    "split": LaunchShape(4, 0, 16, 3, least=16),
    "streamed": LaunchShape(0, 1056, 16, 2),
}


GATED = {"activation": "silu"}
PRODUCTS: dict[str, tuple[Any, tuple[int, int, int], dict[str, Any]]] = {
    "QKV": (gemv.GemvAddNormLinear, (1, 1024, 4096), {}),
    "O": (gemv.GemvLinear, (1, 2048, 1024), {"norm": False}),
    "gate and up": (gemv.GemvAddNormGatedLinear, (1, 1024, 6144), GATED),
    "down": (gemv.GemvLinear, (1, 3072, 1024), {"norm": False}),
    "O of 32 rows": (small_batch.SmallBatchLinear, (32, 2048, 1024), {"norm": False}),
    "gate and up of 128 rows": (small_batch.SmallBatchAddNormGatedLinear, (128, 1024, 6144), GATED),
}
"""Of a layer of Qwen3-0.6B: seam, (rows, in, out), what else the case has."""
E4M3 = {
    "gate and up in e4m3": (fp8.Fp8AddNormGatedLinear, (1, 1024, 6144), GATED),
    "down in e4m3": (fp8.Fp8Linear, (1, 3072, 1024), {"norm": False}),
    "large gate and up in e4m3": (fp8.Fp8AddNormGatedLinear, (1, 1024, 17408), GATED),
    "down of 32 rows in e4m3": (fp8.Fp8Linear, (32, 3072, 1024), {"norm": False}),
    "32 normed rows in e4m3": (fp8.Fp8AddNormLinear, (32, 3072, 1024), {}),
    "one row of a long matrix in e4m3": (fp8.Fp8Linear, (1, 14336, 4096), {"norm": False}),
    "gate and up in blocks": (fp8_blocks.Fp8BlocksAddNormLinear, (1, 4096, 28672), GATED),
    "128 rows of down in blocks": (fp8_blocks.Fp8BlocksLinear, (128, 14336, 4096), {"norm": False}),
    "128 rounded rows of gate and up in blocks": (fp8_blocks.Fp8BlocksAddNormLinear, (128, 4096, 28672), GATED),
    "many rounded rows of gate and up in blocks": (fp8_blocks.Fp8BlocksAddNormLinear, (384, 1024, 512), GATED),
    "many rounded rows of down in blocks": (fp8_blocks.Fp8BlocksLinear, (384, 1024, 512), {"norm": False}),
}
ADAPTED: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "QKV with an adapter": (lora_gemv.LoraGemvAddNormLinear, [0], {"size": 1024, "parts": (2048, 1024, 1024), "norm": True}),
    "gate and up of 32 rows with adapters": (
        lora_hopper.LoraHopperAddNormLinear, [0, 1, -1, 2] * 8,
        {"size": 1024, "parts": (3072, 3072), "norm": True, "activation": "silu"},
    ),
    "O of 32 rows with adapters": (
        lora_hopper.LoraHopperLinear, [0, 1, -1, 2] * 8, {"size": 4096, "parts": (4096,), "num_slots": 8},
    ),
    "down of 32 rows with adapters": (lora_hopper.LoraHopperLinear, [0, 1, -1, 2] * 8, {"size": 3072, "parts": (1024,)}),
    "down of 64 rows, an adapter each": (
        lora_hopper.LoraHopperLinear, [*range(64)], {"size": 8192, "parts": (2048,), "num_slots": 64},
    ),
    "gate and up of prompts with adapters": (
        hopper_many.LoraManyAddNormLinear, [0, 1, -1, 2] * 528,
        {"size": 1024, "parts": (1536, 1536), "norm": True, "activation": "silu"},
    ),
    "QKV of prompts with adapters": (
        hopper_many.LoraManyAddNormLinear, [0, 1, -1, 2] * 528, {"size": 1024, "parts": (2048, 512, 512), "norm": True},
    ),
}  # fmt: skip
"""Product, slots of its rows, what the case has."""


class Hopper:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class Attention:
    """One launch of each of its kernels, of the dtypes given: a step of nothing but padding rows."""

    def __init__(self, dtype: str, kv_dtype: str, *, pdl: bool = True) -> None:
        self.dtype, self.kv_dtype, self.pdl = dtype, kv_dtype, pdl
        self.spec = NormSpec(size=HEAD_DIM, eps=1e-6)
        self.norm = self._empty(HEAD_DIM)
        self.cos_sin = torch.empty(8192, HEAD_DIM)
        self.qkv = self._empty(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.query = self._empty(ROWS, HEADS, HEAD_DIM)
        self.tokens = torch.zeros(ROWS, dtype=torch.int64)  # positions, or slots
        self.lengths = torch.zeros(ROWS, dtype=torch.int32)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.table = torch.zeros(ROWS, 512, dtype=torch.int32)
        page = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=kv_dtype)
        memory = torch.zeros(NUM_BLOCKS * page.page_size_bytes, dtype=torch.uint8)
        self.caches = page_views(memory, NUM_BLOCKS, page, KVLayout(heads_first=True))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, self.dtype))

    def decode(self, shape: LaunchShape) -> None:
        parts = PartBuffers.allocate(
            torch.device("cpu"), max_rows=ROWS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        made = NormRope(HEAD_DIM, self.cos_sin, self.norm, self.norm, self.spec)
        new = NewTokens(self.tokens, self.tokens, made)
        if shape.is_dealt:
            deal_rows(self.lengths, self.table, parts, shape, num_rows=ROWS, block_size=BLOCK_SIZE, pdl=self.pdl)
        decode_attention(
            self.qkv, *self.caches, self.query, self.lengths, self.table, parts, num_rows=ROWS, max_seq_len=8192,
            scale=1.0, new=new, pdl=self.pdl, shape=shape, is_settled=True,
        )  # fmt: skip

    def prefill(self) -> None:
        prefill_attention(
            self.query, *self.caches, self.query, self.starts, self.lengths, self.table, num_reqs=1,
            max_query_len=ROWS, max_seq_len=8192, scale=1.0, pdl=self.pdl,
        )  # fmt: skip

    def drafts(self) -> None:
        rows, shape = ROWS // 4, drafts_shape(ROWS // 4, KV_HEADS, HEADS // KV_HEADS, 4, 8192, 2 * HEAD_DIM, 132)
        parts = DraftParts.allocate(
            torch.device("cpu"), max_rows=rows, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, num_tokens=4
        )
        new = NewTokens(self.tokens, self.tokens, NormRope(HEAD_DIM, self.cos_sin, self.norm, self.norm, self.spec))
        drafts_attention(
            self.qkv, *self.caches, self.query, self.starts, self.lengths, self.table, parts, shape, num_rows=rows,
            num_tokens=4, scale=1.0, new=new, pdl=self.pdl,
        )  # fmt: skip

    def resident(self) -> None:
        """Two programs a multiprocessor, one, four, two for many rows, then rows of four tokens and of six: two tiles of columns."""
        made = NormRope(HEAD_DIM, self.cos_sin, self.norm, self.norm, self.spec)
        keys, values = self.caches
        parts = ResidentParts.allocate(keys.device)
        layer = SimpleNamespace(k_cache=keys, v_cache=values, num_heads=HEADS, scale=1.0)
        for num_tokens, warps, pieces, buffers in (
            (1, 4, 1, 2),
            (1, 4, 2, 3),
            (1, 1, 2, 3),
            (1, 4, 1, 3),
            (4, 4, 2, 3),
            (6, 4, 1, 2),
        ):
            is_ahead, starts = (num_tokens, pieces, buffers) == (1, 1, 3), self.starts if num_tokens > 1 else None
            shape = ResidentShape(32, warps, pieces, buffers, is_ahead=is_ahead)
            deal_resident(
                self.lengths, self.table, parts.shares, shape, num_rows=32, query_start_loc=starts, pdl=self.pdl
            )
            ResidentDecode(layer, parts, made, num_tokens=num_tokens, pdl=self.pdl)(
                self.qkv, self.query, self.tokens, self.tokens, starts, self.lengths, self.table, shape
            )

    def cascade(self) -> None:
        cascade_attention(
            self.query, *self.caches, self.query, self.lengths, self.table, num_rows=ROWS, prefix_len=1024,
            max_seq_len=8192, scale=1.0, pdl=self.pdl,
        )  # fmt: skip

    def latent(self) -> None:
        heads, latent_dim, rope_dim = 16, 512, 64
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, latent_dim + rope_dim, dtype=getattr(torch, self.kv_dtype))
        latent_attention(
            self._empty(2, heads, latent_dim + rope_dim), cache, self._empty(2, heads, latent_dim), self.starts[:3],
            self.lengths[:2], self.table, scale=1.0, latent_dim=latent_dim, max_seq_len=8192,
        )  # fmt: skip

    def hopper_latent(self) -> None:
        """The kernel for Hopper: 16 heads in one program, in four and in 32 that share a context, and 128 heads."""
        cache = torch.zeros(4, BLOCK_SIZE, 576, dtype=getattr(torch, self.dtype))
        for heads, splits in ((16, 1), (16, 4), (16, 32), (128, 2)):
            latent_hopper.HopperLatent(cache, num_heads=heads, scale=1.0)(
                self._empty(2, heads, 576), self._empty(2, heads, 512), self.starts[:3], self.lengths[:2], self.table,
                max_seq_len=8192, splits=splits,
            )  # fmt: skip

    def sparse(self) -> None:
        """DeepSeek-V3.2's sizes: the choice among 8,192 tokens, and attention to 2,048; with sinks and where nothing turns, too."""
        tokens, heads, latent_dim, rope_dim, index_heads, index_dim = 2, 16, 512, 64, 64, 128
        caches = [
            torch.zeros(NUM_BLOCKS, BLOCK_SIZE, size, dtype=getattr(torch, self.kv_dtype))
            for size in (index_dim, latent_dim + rope_dim)
        ]
        chosen = torch.zeros(tokens, 2048, dtype=torch.int32)
        step = (self.starts[: tokens + 1], self.lengths[:tokens], self.table)
        choose_tokens(
            self._empty(tokens, index_heads, index_dim), torch.empty(tokens, index_heads), caches[0], chosen, *step,
            max_seq_len=8192,
        )  # fmt: skip
        sinks = torch.zeros(heads, dtype=torch.float32)
        for turned, given in ((rope_dim, None), (rope_dim, sinks), (0, None)):
            cache = caches[1][..., : latent_dim + turned].contiguous()
            sparse_latent_attention(
                self._empty(tokens, heads, latent_dim + turned), cache, chosen, self._empty(tokens, heads, latent_dim),
                *step, scale=1.0, latent_dim=latent_dim, max_seq_len=8192, sinks=given,
            )  # fmt: skip

    def states(self) -> None:
        """Layers of Mamba-2's and Bamba's sizes, of the largest and the smallest that are tested: rows of one token, and others."""
        for dim, size, heads in self._first_of(((64, 128, 8), (128, 256, 8), (16, 32, 2))):
            self._with_states(
                StateCase(head_dim=dim, state_size=size, num_heads=heads, num_groups=1, dtype=self.dtype), StateSpace
            )

    def delta_rule(self) -> None:
        """Layers of Qwen3-Next's sizes, of the largest that are tested, and of small ones."""
        for dim, size in self._first_of(((128, 128), (256, 256), (24, 40))):
            self._with_states(DeltaCase(head_dim=dim, state_size=size, num_heads=4, dtype=self.dtype), DeltaRule)

    def key_delta_rule(self) -> None:
        """Layers of Kimi Linear's sizes, of the largest that are tested, and of small ones."""
        for dim, size in self._first_of(((128, 128), (256, 256), (24, 40))):
            case = KeyDeltaCase(head_dim=dim, state_size=size, num_heads=2, dtype=self.dtype)
            self._with_states(case, KeyDeltaRule)

    def other_states(self) -> None:
        self._with_states(ScanCase(head_dim=256, state_size=16, dtype=self.dtype), SelectiveScan)
        self._with_states(RgLruCase(head_dim=256, dtype=self.dtype), RgLru)
        self._with_states(GatedConvCase(head_dim=256, taps=3, dtype=self.dtype), GatedConv)
        self._with_states(LightningCase(head_dim=128, dtype=self.dtype), Lightning)

    def _first_of(self, sizes: Sequence[Any]) -> Sequence[Any]:
        """All of them in bfloat16: of another dtype the language's rules are asked alone, which are the same for any size."""
        return sizes if self.dtype == "bfloat16" else sizes[:1]

    def _with_states(self, case: StateCase, kind: Any) -> None:
        """A step of rows of one token, and one of rows of any number."""
        common = SimpleNamespace(
            query_start_loc=self.starts, seq_lens=self.lengths, block_table=self.table, num_reqs=ROWS
        )  # fmt: skip
        bound, output = kind(make_layer(case), pdl=self.pdl), self._empty(ROWS, case.inner)
        query = torch.zeros(ROWS, case.columns, dtype=output.dtype)
        for first in (ROWS, 0):
            bound(query, StateMetadata(common, single_rows=first, first_scanned_row=first, is_mixed=False), output)

    def parts(self) -> None:
        """Of ranks that share a cache: a long context of one row, many rows, and latents."""
        lse = torch.empty(ROWS, HEADS)
        for max_query_len, max_seq_len, rows in ((1, 65536, 1), (ROWS, 512, ROWS)):
            context_part_attention(
                self.query[:rows], *self.caches, self.query[:rows], lse, self.starts, self.lengths, self.table,
                num_reqs=1 if max_query_len > 1 else rows, max_query_len=max_query_len, max_seq_len=max_seq_len, scale=1.0,
                num_ranks=2, rank=1, pdl=self.pdl,
            )  # fmt: skip
        heads, latent_dim, rope_dim = 16, 512, 64
        cache = torch.zeros(NUM_BLOCKS, BLOCK_SIZE, latent_dim + rope_dim, dtype=getattr(torch, self.kv_dtype))
        latent_attention(
            self._empty(2, heads, latent_dim + rope_dim), cache, self._empty(2, heads, latent_dim), self.starts[:3],
            self.lengths[:2], self.table, scale=1.0, latent_dim=latent_dim, max_seq_len=8192, lse=lse, num_ranks=2, rank=1,
        )  # fmt: skip

    def sums(self) -> None:
        """Over ranks with residual and norm, in one shot and in two, and many rows."""
        words, width = torch.zeros(4, 2048, dtype=torch.int32), 4096
        for size in (2, 4):
            norm_kernel.sum_add_norm_kernel[(4,)](
                words, words, words, words, words[0], None, self.tokens, words[1], words[2], 4, 1000, 1e-6, 0.0,
                NUMBERS=width, ROW=2048, BLOCK=2048, RANK=1, SIZE=size, SLOTS=norm_kernel.SLOTS, TWO_SHOT=size > 2,
                DTYPE=DTYPES[getattr(torch, self.dtype)], UNIT_OFFSET=False, POST_UNIT_OFFSET=False, PDL=True, num_warps=16,
                launch_pdl=True,
            )  # fmt: skip
        norm_kernel.sum_add_norm_many_kernel[(4,)](
            words, words, words, words, words[0], None, self.tokens, words[1], words[2], 4, 1000, 1e-6, 0.0, NUMBERS=width,
            ROW=2048, BLOCK=2048, RANK=1, PROGRAMS=528, AHEAD=norm_kernel.AHEAD, DTYPE=DTYPES[getattr(torch, self.dtype)],
            UNIT_OFFSET=False, POST_UNIT_OFFSET=False, PDL=True, num_warps=4, maxnreg=norm_kernel.MOST_REGISTERS,
            launch_pdl=True,
        )  # fmt: skip

    def many_gated(self) -> None:
        """gate and up of many rows in e4m3."""
        x, scale = torch.zeros(384, 512, dtype=torch.float8_e4m3fn), torch.zeros(512)
        weight = torch.zeros(512, 512, dtype=x.dtype)
        hopper_matmul.hopper_matmul(x, weight, "silu", scales=(scale, scale), dtype=torch.bfloat16)

    def sent(self) -> None:
        """A product whose rows go to another rank on the way, and their sum."""
        x, weight, counts = torch.zeros(384, 512), torch.zeros(512, 512), torch.zeros(2, 256, dtype=torch.int32)
        x, weight = x.to(torch.bfloat16), weight.to(torch.bfloat16)
        rows = hopper_matmul.hopper_matmul(
            x, weight, None, RowsToSend((x, x.clone()), counts, counts.clone(), counts[0], 0, 384)
        )
        words = rows.view(torch.int32)
        norm_kernel.sum_sent_add_norm_kernel[(384,)](
            words, words, words, words, words[0], None, words, counts, counts[0], words, counts[0], counts[1], counts[1], 384, 1000, 2,
            1e-6, 0.0, 384, NUMBERS=512, ROW=256, BLOCK=256, COUNTS=256, RANK=0, TURN=384, DTYPE=DTYPES[torch.bfloat16],
            UNIT_OFFSET=False, POST_UNIT_OFFSET=False, PDL=True, num_warps=1, launch_pdl=True,
        )  # fmt: skip

    def write(self) -> None:
        needs = QkNormRopeWriteKvNeeds(
            dtype=self.dtype, kv_dtype=self.kv_dtype, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            rotary_dim=HEAD_DIM, q_norm=self.spec, k_norm=self.spec,
        )  # fmt: skip
        tensors = QkNormRopeWriteKvTensors(self.cos_sin, self.norm, self.norm)
        TritonQkNormRopeWriteKv.bind(needs, tensors)(self.qkv, self.tokens, self.tokens, *self.caches)


def sample(num_logprobs: int | None, num_side_slots: int, *, has_mask: bool) -> None:
    """All kernels of a step's end; with logprobs those of a prompt's too. The order of their instructions is that of any vocabulary;
    loops over the pieces of a chunk are unrolled: of a fourth of a chunk the compiler takes a third of the time."""
    sampling._CHUNK_GROUPS = 32
    state = BatchState(
        max_num_seqs=2, max_model_len=64, vocab_size=SMALL_VOCAB, block_sizes=(16,), num_side_slots=num_side_slots,
        device=torch.device("cpu"),
    )  # fmt: skip
    target = None if num_logprobs is None else LogprobTensors.make(2, num_logprobs, state.device)
    mask = (torch.zeros(3, -(-SMALL_VOCAB // 32), dtype=torch.int32), torch.zeros(3, dtype=torch.bool))
    tensors = SampleTensors(state, mask=mask if has_mask else None, logprobs=target)
    needs = SampleNeeds(vocab_size=SMALL_VOCAB, max_num_seqs=2, has_mask=has_mask, num_logprobs=num_logprobs or 0)
    logits, tokens = torch.zeros(2, SMALL_VOCAB), torch.zeros(2, dtype=torch.int64)
    sampling.TritonSample.bind(needs, tensors)(logits, tokens, torch.zeros(2, 2, dtype=torch.int32))
    if target is not None:
        own = LogprobsNeeds(vocab_size=SMALL_VOCAB, max_rows=2, num_logprobs=num_logprobs or 0)
        sampling_logprobs.TritonLogprobs.bind(own, LogprobsTensors(state.device))(logits, tokens, target)


def shares() -> None:
    """The end of a greedy step over two ranks, of logits that were written: the first of each rank's share, then of both."""
    state = BatchState(
        max_num_seqs=2, max_model_len=64, vocab_size=2 * SMALL_VOCAB, block_sizes=(16,), num_side_slots=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    op = sampling.TritonSample.bind(
        SampleNeeds(vocab_size=2 * SMALL_VOCAB, max_num_seqs=2, variant="greedy"), SampleTensors(state)
    )
    slots, spec = torch.zeros(2, dtype=torch.int64), LinearSpec(in_features=1024, out_features=SMALL_VOCAB)
    needs = AddNormLogitsNeeds(
        dtype="bfloat16", norm=NormSpec(size=1024, eps=1e-6), linear=spec, vocab_size=2 * SMALL_VOCAB, tp_size=2
    )
    weight, rows = torch.empty(SMALL_VOCAB, 1024, dtype=torch.bfloat16), torch.zeros(2, 1024, dtype=torch.bfloat16)
    tensors = AddNormLogitsTensors(
        rows[0], LinearWeights(spec, {"weight": weight}), None, lambda partial: partial, lambda logits: logits
    )
    share = head.TritonAddNormLogits.bind(needs, tensors)(rows, rows.clone(), slots)
    keys = op.share_keys(share, slots, SMALL_VOCAB)  # type: ignore[attr-defined]
    op.end_shares(torch.stack([keys, keys]), SMALL_VOCAB, slots, torch.zeros(2, 2, dtype=torch.int32))  # type: ignore[attr-defined]


def speculate() -> None:
    """Drafts looked up, alone and with the inputs, and verified."""
    state = BatchState(
        max_num_seqs=2,
        max_model_len=64,
        vocab_size=VOCAB,
        block_sizes=(16,),
        num_side_slots=0,
        device=torch.device("cpu"),
    )
    slots, drafted = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    needs = LookupDraftsNeeds(num_drafts=3, longest=5, shortest=3)
    look_up = speculation.TritonLookupDrafts.bind(needs, LookupDraftsTensors(state))
    look_up(slots, drafted, drafted.clone())
    buffers = InputBuffers(state, max_num_tokens=8)
    sizes = PrepareInputsNeeds(max_num_tokens=8, max_num_seqs=2, block_sizes=(16,), max_model_len=64)
    prepare: Any = inputs.TritonPrepareInputs.bind(sizes, PrepareInputsTensors(state, buffers))
    prepare.look_up_too(look_up, slots, drafted, drafted.clone())
    shape = StepShape(
        num_reqs=2, num_tokens=8, num_decode_rows=0, max_query_len=4, max_seq_len=64, num_padded_reqs=2, num_padded_tokens=8
    )  # fmt: skip
    prepare(slots, slots, shape)
    sampled, result = (torch.zeros(shape, dtype=torch.int32) for shape in ((8, 2), (2, 7)))
    speculation.TritonVerify.bind(VerifyNeeds(num_drafts=3), VerifyTensors(state))(slots, drafted, sampled, result)


def logits() -> None:
    """Those of 64 and of 128 rows, of which the best are wanted alone."""
    weight, best = torch.empty(VOCAB, 1024, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int64)
    for rows in (64, 128):
        hopper_vocab.VocabProduct(weight)(torch.empty(rows, 1024, dtype=torch.bfloat16), best, is_written=False)


def columns() -> None:
    """A decode step of 32 rows takes its columns."""
    parts, one, taken = torch.zeros(12, 2 + 1024, dtype=torch.int64), *torch.zeros(2, 1, dtype=torch.int64)
    memory = pinned.PinnedMemory(torch.zeros(1, 8, dtype=torch.int64))
    memory.take(parts, one, taken, one.clone(), parts[0, :128], 32)


def before_a_large_matrix() -> None:
    """O of one row in 4 bits, before gate and up."""
    spec = LinearSpec(in_features=4096, out_features=4096, weight_format="int4_grouped")
    tensors = {"codes": torch.empty(4096, 512, dtype=torch.int32), "scales": torch.empty(4096, 32, dtype=torch.int32)}
    matrix = grouped.GroupedMatrix(LinearWeights(spec, tensors), "bfloat16")
    matrix.read_next({"codes": torch.empty(28672, 512, dtype=torch.int32)})
    matrix.multiply_one(torch.empty(1, 4096, dtype=torch.bfloat16))


SAMPLING = {
    "columns": columns,
    "O before a large matrix": before_a_large_matrix,
    "logits": logits,
    "shares": shares,
    "speculation": speculate,
    "sampling": lambda: sample(None, 0, has_mask=False),
    "sampling with all": lambda: sample(20, 2, has_mask=True),
}


def multiply(dtype: str, name: str) -> None:
    seam, (rows, size, out), options = PRODUCTS[name]
    case = make_case(rows, size, out, getattr(torch, dtype), torch.device("cpu"), **options)
    case.call(seam.bind(case.needs, case.tensors))


def multiply_adapted(dtype: str, name: str) -> None:
    product, slots, options = ADAPTED[name]
    case = AdaptedCase(slots, dtype=getattr(torch, dtype), device="cpu", **options)
    case.run(product.bind(case.needs, case.tensors))


def multiply_e4m3(dtype: str, name: str) -> None:
    op, (rows, size, out), options = E4M3[name]
    case = make_case(rows, size, out, getattr(torch, dtype), torch.device("cpu"), **options)
    spec, scales = case.needs.linear, torch.empty(out)
    if "blocks" in name:
        inputs = InputRounding(dtype="float8_e4m3fn") if "rounded" in name else None
        spec = replace(spec, weight_format="fp8_blocks", group_rows=128, inputs=inputs)
        scales = torch.empty(out, size // 128)
    else:
        spec = replace(spec, weight_format="fp8_e4m3", inputs=InputRounding(dtype="float8_e4m3fn"))
    tensors = {"weight": torch.empty(out, size, dtype=torch.float8_e4m3fn), "weight_scale": scales}
    case.packed = LinearWeights(spec, tensors)
    case.call(op.bind(case.needs, case.tensors))


def experts(dtype: str, weight_format: str) -> None:
    """All kernels that read packed experts: of few pairs, of more, and of those that are decoded first."""
    routing = RoutingSpec(num_experts=8, top_k=2)
    form = {"weight_format": weight_format, "group_size": 128, "sizes": (256, 128)}
    needs, tensors, x, slots = moe_case(torch.device("cpu"), routing, 64, getattr(torch, dtype), **form)
    op = moe.BoundMoe(needs, tensors)
    for num_tokens in (1, 64):
        op(x[:num_tokens], slots[:num_tokens])
    op._decoded("gate_up", x)


def hopper_experts(dtype: str) -> None:
    """Experts of two bytes and in e4m3 of many tokens on a Hopper device; rows are sums of two numbers, then rounded. gpt-oss's, and
    tiles of 192 rows, come last."""
    moe.is_hopper = moe.has_pdl = split.has_pdl = lambda device: True
    routing = RoutingSpec(num_experts=8, top_k=2)
    rows: dict[str, Any] = {"weight_format": "e4m3"}
    blocks = rows | {"group_size": 128, "group_rows": 128}
    rounded = {"inputs": InputRounding(dtype="float8_e4m3fn")}
    plain, never = {"weight_format": "plain"}, 1 << 30
    cases = (
        (plain, 128, never),
        (rows, 128, never),
        (blocks, 256, never),
        (rows | rounded, 128, never),
        (blocks | rounded, 256, never),
        ({"weight_format": "mxfp4", "has_bias": True, "activation": "swiglu_oai", "limit": 7.0}, 128, never),
        (plain, 128, 0),
        (rows | rounded, 128, 0),
    )
    for form, size, least_pairs in cases:
        moe._THREE_GROUPS_PAIRS = least_pairs
        made = moe_case(torch.device("cpu"), routing, 600, getattr(torch, dtype), sizes=(256, size), **form)
        needs, tensors, x, slots = made
        moe.BoundMoe(needs, tensors)(x, slots)


def streamed_experts(dtype: str) -> None:
    """Experts in e4m3 and of two bytes of some tokens on a Hopper device."""
    moe.is_hopper = moe.has_pdl = streamed.has_pdl = lambda device: True
    routing = RoutingSpec(num_experts=64, top_k=4)
    blocks = {"weight_format": "e4m3", "group_size": 128, "group_rows": 64}
    for form, numbers_of_tokens in (
        ({"weight_format": "e4m3"}, (64, 200)),
        ({"weight_format": "plain"}, (128,)),
        (blocks, (200,)),
    ):
        made = moe_case(torch.device("cpu"), routing, 200, getattr(torch, dtype), sizes=(512, 512), **form)
        needs, tensors, x, slots = made
        op = moe.BoundMoe(needs, tensors)
        for num_tokens in numbers_of_tokens:
            op(x[:num_tokens], slots[:num_tokens])


def experts_in_four_bits(dtype: str, name: str) -> None:
    """Experts of some tokens on a Hopper device, in tiles of 16, 32 and 64 pairs."""
    moe.is_hopper = moe.has_pdl = hopper_int4.has_pdl = hopper_mxfp4.has_pdl = lambda device: True
    form: dict[str, Any] = {"weight_format": "int4_grouped", "group_size": 128, "sizes": (640, 384)}
    if name == "experts in mxfp4 on Hopper":
        form = {
            "activation": "swiglu_oai",
            "limit": 7.0,
            "has_bias": True,
            "weight_format": "mxfp4",
            "sizes": (576, 576),
        }
    routing, cpu = RoutingSpec(num_experts=32, top_k=4), torch.device("cpu")
    needs, tensors, x, slots = moe_case(cpu, routing, 200, getattr(torch, dtype), **form)
    op = moe.BoundMoe(needs, tensors)
    for num_tokens in (64, 128, 200):
        op(x[:num_tokens], slots[:num_tokens])


def products_in_int4(dtype: str) -> None:
    """Some rows by a matrix in groups of 128 and 64, and by gate and up, on a Hopper device."""
    hopper_grouped.is_hopper = hopper_grouped.has_pdl = lambda device: True
    for group_size, activation in ((128, "silu"), (64, None)):
        spec = LinearSpec(in_features=4096, out_features=4096, weight_format="int4_grouped")
        codes, scales = (
            torch.empty(4096, 512, dtype=torch.int32),
            torch.empty(4096, 4096 // group_size, dtype=torch.int32),
        )
        matrix = grouped.GroupedMatrix(
            LinearWeights(spec, {"codes": codes, "scales": scales}), dtype, activation, has_norm=True
        )
        for rows in (16, 32, 64, 128):
            matrix(torch.empty(rows, 4096, dtype=getattr(torch, dtype)))


def make_nothing() -> None:
    """Random numbers of cases are zeros: the compiler looks at no number."""

    def zeros(*shape: Any, generator: Any = None, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options)

    torch.randn = torch.rand = zeros


def pretend_everywhere() -> None:
    """Every module compiles for an H200's multiprocessors and for programmatic dependent launch, from here on."""
    answers = {"has_pdl": True, "num_sms": 132}
    for module, name in itertools.product(list(sys.modules.values()), answers):
        if module.__name__.startswith("pelton_backends.triton.") and hasattr(module, name):
            setattr(module, name, lambda device, name=name: answers[name])


def code_of(cubin: bytes) -> bytes:
    """The instructions of its one kernel: of an ELF file the section that is named after it."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, table + index * size) for index in range(count)]
    name_of = [cubin[sections[names][4] + section[0] :].partition(b"\0")[0] for section in sections]
    (code,) = (section for section, name in zip(sections, name_of, strict=True) if name.startswith(b".text."))
    return cubin[code[4] : code[4] + code[5]]


def disassemble(codes: Sequence[bytes]) -> list[list[tuple[str, str]]]:
    """The instructions' names and operands. All at once: a start of the disassembler takes as long as a hundred kernels."""
    if not codes:
        return []
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(codes))
        file.flush()
        command = [knobs.nvidia.nvdisasm.path, "--binary", "SM90a", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    ends = list(itertools.accumulate(map(len, codes)))
    found: list[list[tuple[str, str]]] = [[] for _ in codes]
    for place, *instruction in INSTRUCTION.findall(text):
        found[bisect.bisect_right(ends, int(place, 16))].append(tuple(instruction))
    return found


def registers_of(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", text).groups())
    return {"registers": registers, "stack": stack}


def main(*arguments: str) -> None:
    compiled: list[Any] = []
    run = JITFunction.run

    folder = os.path.join(knobs.cache.dir, f"first_{digest_of_stages()}")  # kept from run to run, as instructions are

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if wanted.has_code(len(compiled)):
            compiled.append((self, run(self, *args, grid=grid, warmup=True, **options)))
            return
        with without_code(folder):
            compiled.append((self, run(self, *args, grid=grid, warmup=True, **options)))
        self.device_caches.clear()  # else who wants its code is given this one

    quicken()
    make_nothing()
    JITFunction.run = compile_only
    driver.set_active(Hopper())
    hopper_split_k.is_hopper = gemv.has_pdl = fp8.has_pdl = split_k.has_pdl = hopper_split_k.has_pdl = (
        fp8_one_row.has_pdl
    ) = lambda device: True
    hopper_blocks.has_pdl = fp8_blocks.has_pdl = lambda device: True
    hopper_vocab.has_pdl = hopper_wide_vocab.has_pdl = hopper_mid_batch.has_pdl = head.has_pdl = lambda device: True
    hopper_matmul.is_hopper = latent_hopper.has_pdl = lambda device: True
    hopper_matmul.num_sms = latent_hopper.num_sms = lora_hopper.num_sms = grouped.num_sms = hopper_many.num_sms = (
        large_batch.num_sms
    ) = decode_resident.num_sms = lambda device: 132
    grouped.has_pdl = pinned.has_pdl = lora.has_pdl = lora_hopper.has_pdl = lora_shrink.has_pdl = (
        large_batch.has_pdl
    ) = lambda device: True
    sampling.has_pdl = sampling_logprobs.has_pdl = speculation.has_pdl = drafted_inputs.has_pdl = lambda device: True
    made: list[tuple[dict[str, Any], bytes]] = []  # what is known of a kernel, and what it was compiled to
    for is_end, group in itertools.groupby(arguments, "--".__eq__):
        if is_end:
            continue
        given = list(group)
        words = [word for word in given if word != "--no-code"]
        wanted.is_none = len(words) < len(given)
        made += compile_kernels(compiled, *words)
    instructions = iter(disassemble([code_of(cubin) for _, cubin in made if cubin != NO_CODE]))
    for known, cubin in made:
        if cubin != NO_CODE:
            code = next(instructions)
            names = [name.partition(".")[0] for name, _ in code]
            known |= registers_of(cubin) | {"instructions": names, "unwritten": sorted(unwritten(code))}
        print(json.dumps(known))


class Wanted:
    """Of which launches of a name the instructions are wanted."""

    def __init__(self) -> None:
        self.is_none = False  # of a whole group of names
        self.places: set[int] | None = None  # None: of all launches

    def has_code(self, place: int) -> bool:
        return not self.is_none and (self.places is None or place in self.places)

    def choose(self, word: str) -> str:
        """Return the name in NAME or NAME=PLACE,PLACE..., of launches in their order; in NAME= of none."""
        name, has_places, places = word.partition("=")
        self.places = {int(place) for place in places.split(",") if place} if has_places else None
        return name


wanted = Wanted()


@contextlib.contextmanager
def without_code(folder: str) -> Iterator[None]:
    """In a cache of its own: Triton's names of what it keeps do not tell these kernels from whole ones."""
    with knobs.cache.scope(), knobs.runtime.scope():
        knobs.cache.dir = folder
        knobs.runtime.add_stages_inspection_hook = stages_of(("ttir",))
        yield


OF_TRITON = re.compile(r"\btt\.(load|store|atomic)|\bgriddepcontrol\.(wait|launch_dependents)")
OF_GLUON = re.compile(r"\btt\.(atomic)|\bttn?g\.(warp_group_dot|async_tma_\w+)")


def operations_of(kernel: Any) -> list[str]:
    """Accesses to memory, waits and starts, in the order in which Triton's first representation has them, where calls are inlined. In
    Gluon's they are not: products of tensor cores, copies and atomics, and e4m3 where there are such numbers."""
    if "ttir" in kernel.asm:
        return ["".join(found) for found in OF_TRITON.findall(kernel.asm["ttir"])]
    text = kernel.asm["ttgir"]
    return ["".join(found) for found in OF_GLUON.findall(text)] + ["e4m3"] * ("f8E4M3FN" in text)


def compile_kernels(
    compiled: list[Any], dtype: str, kv_dtype: str, *names: str
) -> Iterator[tuple[dict[str, Any], bytes]]:
    attention = Attention(dtype, kv_dtype)
    for name in map(wanted.choose, names):
        if name in SHAPES:
            attention.decode(SHAPES[name])
        elif name in PRODUCTS:
            multiply(dtype, name)
        elif name in ADAPTED:
            multiply_adapted(dtype, name)
        elif name in E4M3:
            multiply_e4m3(dtype, name)
        elif name in SAMPLING:
            SAMPLING[name]()
        elif name == "experts on Hopper":
            hopper_experts(dtype)
        elif name == "experts that stream":
            streamed_experts(dtype)
        elif name == "products in int4 on Hopper":
            products_in_int4(dtype)
        elif name in ("experts in int4 on Hopper", "experts in mxfp4 on Hopper"):
            experts_in_four_bits(dtype, name)
        elif name in EVERY:
            pretend_everywhere()
            EVERY[name]()
        elif name == "launched":
            yield {"dtypes": [dtype, kv_dtype], "of": name, "kernels": sorted(launched_kernels())}, NO_CODE
        elif name.startswith("experts in "):
            experts(dtype, name.removeprefix("experts in "))
        else:
            getattr(attention, name)()
        for function, kernel in compiled:
            known = {
                "dtypes": [dtype, kv_dtype],
                "of": name,
                "module": function.fn.__module__,
                "kernel": function.__name__,
            }
            if kernel.asm["cubin"] == NO_CODE:
                known["operations"] = operations_of(kernel)
            yield known | {"shared": kernel.metadata.shared}, kernel.asm["cubin"]
        compiled.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
