"""Seam `qk_norm_rope_write_kv` in one kernel: from QKV's rows to the query, keys and values written to the paged cache.

For steps with prompts in them; in decode steps the attention kernel does this work itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from pelton.ops.interface import QkNormRopeWriteKv, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.pieces import to_cache
from pelton_backends.triton.runtime import has_pdl, launch_options, let_next_start, wait_for_inputs

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = (*DTYPES, "fp8", "fp8_e4m3", "fp8_e5m2")


@triton.jit
def load_weight(weight, columns, mask, HAS_WEIGHT: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Norm weights in float32, 1 + w with the unit offset."""
    if HAS_WEIGHT:
        w = tl.load(weight + columns, mask, 0.0).to(tl.float32)
        if UNIT_OFFSET:
            w = w + 1.0
        return w
    else:
        return tl.zeros(columns.shape, tl.float32)


@triton.jit
def scaled(x, rstd, weight, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """The norm's product, rounded as the reference rounds: once with the unit offset, else before and after the weight."""
    normed = x * rstd
    if not UNIT_OFFSET:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weight).to(dtype).to(tl.float32)


@triton.jit
def norm_and_rotate(
    first,
    second,
    rest,
    weight_first,
    weight_second,
    weight_rest,
    cos,
    sin,
    eps,
    dtype: tl.constexpr,
    D: tl.constexpr,
    REST: tl.constexpr,
    NORM: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    ROPE: tl.constexpr,
):
    """[heads, half] twice and [heads, rest], all float32 -> the same of `dtype`'s values; math as in `qk_norm_rope_kernel`."""
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        if REST:
            squares += tl.sum(rest * rest, 1)
        rstd = tl.rsqrt(squares / D + eps)[:, None]
        first = scaled(first, rstd, weight_first[None, :], dtype, UNIT_OFFSET)
        second = scaled(second, rstd, weight_second[None, :], dtype, UNIT_OFFSET)
        if REST:
            rest = scaled(rest, rstd, weight_rest[None, :], dtype, UNIT_OFFSET)
    if ROPE:
        turned = first * cos[None, :] - second * sin[None, :]
        second = second * cos[None, :] + first * sin[None, :]
        first = turned
    return first.to(dtype), second.to(dtype), rest.to(dtype)


@triton.jit
def qk_norm_rope_kernel(
    qkv,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    cos_sin,
    q_weight,
    k_weight,
    qkv_stride,
    k_block_stride,
    k_slot_stride,
    k_head_stride,
    v_block_stride,
    v_slot_stride,
    v_head_stride,
    q_eps,
    k_eps,
    H: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    Q_UNIT_OFFSET: tl.constexpr,
    K_UNIT_OFFSET: tl.constexpr,
    ROPE: tl.constexpr,
    WRITES_KV: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program a token. HALF is half of the rotated numbers, of all numbers when nothing is rotated."""
    half, rest = tl.arange(0, BLOCK_HALF), 2 * HALF + tl.arange(0, BLOCK_REST)
    q_head, kv_head = tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_N)[:, None]
    in_half, in_rest = half < HALF, rest < D
    REST: tl.constexpr = 2 * HALF < D
    dtype: tl.constexpr = qkv.dtype.element_ty
    qw_first = load_weight(q_weight, half, in_half, Q_NORM, Q_UNIT_OFFSET)
    qw_second = load_weight(q_weight, half + HALF, in_half, Q_NORM, Q_UNIT_OFFSET)
    qw_rest = load_weight(q_weight, rest, in_rest, Q_NORM and REST, Q_UNIT_OFFSET)
    kw_first = load_weight(k_weight, half, in_half, K_NORM, K_UNIT_OFFSET)
    kw_second = load_weight(k_weight, half + HALF, in_half, K_NORM, K_UNIT_OFFSET)
    kw_rest = load_weight(k_weight, rest, in_rest, K_NORM and REST, K_UNIT_OFFSET)
    wait_for_inputs(PDL)

    token = tl.program_id(0).to(tl.int64)
    query = qkv + token * qkv_stride + q_head * D
    key = qkv + token * qkv_stride + H * D + kv_head * D
    q_half, q_rest = (q_head < H) & in_half[None, :], (q_head < H) & in_rest[None, :]
    kv_half, kv_rest = (kv_head < N) & in_half[None, :], (kv_head < N) & in_rest[None, :]
    # All loads before their first use: one trip to memory.
    position = tl.load(positions + token)
    if WRITES_KV:
        slot = tl.load(slot_mapping + token)
    q_first = tl.load(query + half[None, :], q_half, 0.0)
    q_second = tl.load(query + HALF + half[None, :], q_half, 0.0)
    if REST:
        q_last = tl.load(query + rest[None, :], q_rest, 0.0)
    else:
        q_last = tl.zeros((1, 1), dtype)
    if WRITES_KV:
        k_first = tl.load(key + half[None, :], kv_half, 0.0)
        k_second = tl.load(key + HALF + half[None, :], kv_half, 0.0)
        if REST:
            k_last = tl.load(key + rest[None, :], kv_rest, 0.0)
        else:
            k_last = tl.zeros((1, 1), dtype)
        column = tl.arange(0, BLOCK_D)[None, :]
        kv = (kv_head < N) & (column < D)
        value = tl.load(key + N * D + column, kv, 0.0)
    if ROPE:
        cos = tl.load(cos_sin + position * (2 * HALF) + half, in_half, 0.0)
        sin = tl.load(cos_sin + position * (2 * HALF) + HALF + half, in_half, 0.0)
    else:
        cos, sin = qw_first, qw_first
    let_next_start(PDL)

    if Q_NORM or ROPE:
        q_first, q_second, q_last = norm_and_rotate(
            q_first.to(tl.float32), q_second.to(tl.float32), q_last.to(tl.float32), qw_first, qw_second, qw_rest,
            cos, sin, q_eps, dtype, D, REST, Q_NORM, Q_UNIT_OFFSET, ROPE,
        )  # fmt: skip
        tl.store(query + half[None, :], q_first, q_half)
        tl.store(query + HALF + half[None, :], q_second, q_half)
        if REST and Q_NORM:
            tl.store(query + rest[None, :], q_last, q_rest)
    if WRITES_KV:
        k_first, k_second, k_last = norm_and_rotate(
            k_first.to(tl.float32), k_second.to(tl.float32), k_last.to(tl.float32), kw_first, kw_second, kw_rest,
            cos, sin, k_eps, dtype, D, REST, K_NORM, K_UNIT_OFFSET, ROPE,
        )  # fmt: skip
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        k_to = k_cache + block * k_block_stride + offset * k_slot_stride + kv_head * k_head_stride
        v_to = v_cache + block * v_block_stride + offset * v_slot_stride + kv_head * v_head_stride
        kv_dtype: tl.constexpr = k_cache.dtype.element_ty
        is_kept = slot >= 0
        tl.store(k_to + half[None, :], to_cache(k_first, kv_dtype), kv_half & is_kept)
        tl.store(k_to + HALF + half[None, :], to_cache(k_second, kv_dtype), kv_half & is_kept)
        if REST:
            tl.store(k_to + rest[None, :], to_cache(k_last, kv_dtype), kv_rest & is_kept)
        tl.store(v_to + column, to_cache(value, kv_dtype), kv & is_kept)


class TritonQkNormRopeWriteKv:
    handles = frozenset(["q_norm", "k_norm", "writes_kv", "unit_offset"])

    """Norm and rotate query and key, write key and value; the query is returned in place.

    Math   q = rope(norm(qkv[t, :H])), k = rope(norm(qkv[t, H:H+N])), v = qkv[t, H+N:];
           norm(x) = x rsqrt(mean(x^2) + eps) w (1 + w with the unit offset), rope turns pairs (i, i + F) of the first 2F
           numbers by the angle of `positions[t]`; k_cache[slot // S, slot % S] = k, same for v; slot -1 writes nothing.
    Paper  Su et al., RoFormer (arXiv:2104.09864); Zhang and Sennrich, RMSNorm (arXiv:1910.07467).

    T tokens, H heads, N kv heads, D head_dim, F rotary_dim / 2, P blocks, S block_size
      qkv               [T, (H + 2N) D]      float32, bfloat16, float16; last axis contiguous; the query part is overwritten;
                                             [T, H D] will do where nothing is written
      positions         [T]                  int64
      slot_mapping      [T]                  int64
      k_cache, v_cache  [P, S, N, D]         the model's dtype, another float, or fp8 (saturating); any strides, last axis 1
      returns           [T, H, D]            a view of qkv

    Norm and rotation in float32, rounded where core's reference rounds (after the norm, after the weight, after the rotation);
    float32 equals it to 2e-6, 16-bit dtypes to one last place. Memory bound: one program a token, all loads in flight
    before the first use; 3.8 TB/s read and written at 16,384 tokens, 2.7 us at 256, 1.1 us at 1 (H200, 16 and 32 heads over 8).
    """

    @staticmethod
    def unsupported(needs: QkNormRopeWriteKvNeeds) -> list[str]:
        reasons = []
        if needs.dtype not in DTYPES:
            reasons.append(f"dtype {needs.dtype}, only {', '.join(DTYPES)}")
        if needs.kv_dtype not in KV_DTYPES:
            reasons.append(f"kv dtype {needs.kv_dtype}, only {', '.join(KV_DTYPES)}")
        if needs.rotary_dim % 2 or needs.rotary_dim > needs.head_dim:
            reasons.append(f"rotary_dim {needs.rotary_dim}, only even and up to head_dim")
        return reasons

    @staticmethod
    def bind(needs: QkNormRopeWriteKvNeeds, tensors: QkNormRopeWriteKvTensors) -> QkNormRopeWriteKv:
        heads, kv_heads, head_dim = needs.num_heads, needs.num_kv_heads, needs.head_dim
        half = (needs.rotary_dim or head_dim) // 2
        q_norm, k_norm = needs.q_norm, needs.k_norm
        constants = {
            "H": heads, "N": kv_heads, "D": head_dim, "HALF": half,
            "BLOCK_H": triton.next_power_of_2(heads), "BLOCK_N": triton.next_power_of_2(kv_heads),
            "BLOCK_HALF": triton.next_power_of_2(half), "BLOCK_D": triton.next_power_of_2(head_dim),
            "BLOCK_REST": triton.next_power_of_2(max(head_dim - 2 * half, 1)),
            "Q_NORM": q_norm is not None, "K_NORM": k_norm is not None,
            "Q_UNIT_OFFSET": q_norm is not None and q_norm.unit_offset,
            "K_UNIT_OFFSET": k_norm is not None and k_norm.unit_offset,
            "ROPE": needs.rotary_dim > 0, "WRITES_KV": needs.writes_kv,
        }  # fmt: skip
        # 16,384 tokens of 32 heads over 4 take 86.9 us on an H200 with four warps, 100.3 with eight, 90.4 with two.
        num_warps = 8 if (heads + 2 * kv_heads) * head_dim >= 4096 and kv_heads >= 8 else 4
        launch = Launcher(qk_norm_rope_kernel)
        q_eps, k_eps = q_norm.eps if q_norm else 0.0, k_norm.eps if k_norm else 0.0
        cos_sin, q_weight, k_weight = tensors.cos_sin, tensors.q_norm, tensors.k_norm
        q_size = heads * head_dim

        def qk_norm_rope_write_kv(
            qkv: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
        ) -> Tensor:
            num_tokens = qkv.shape[0]
            if num_tokens:
                pdl = has_pdl(qkv.device)
                strides = (qkv.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3])
                block_size = k_cache.shape[1]
                key = (
                    *strides, block_size, qkv.dtype, k_cache.dtype, qkv.device.index,
                    alignment(qkv, positions, slot_mapping, k_cache, v_cache),
                )  # fmt: skip
                arguments = (
                    qkv, positions, slot_mapping, k_cache, v_cache, cos_sin, q_weight, k_weight, *strides, q_eps, k_eps,
                )  # fmt: skip
                values = {**constants, "BLOCK_SIZE": block_size, "PDL": pdl}
                launch(key, (num_tokens,), arguments, values, num_warps=num_warps, **launch_options(pdl))
            return qkv[:, :q_size].unflatten(1, (heads, head_dim))

        return qk_norm_rope_write_kv
