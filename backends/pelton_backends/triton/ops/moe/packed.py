"""Kernels of experts whose weights stay packed: e4m3 with float32 scales, mxfp4, integers in groups, or codes of a table.

A weight is decoded in registers, so that what is read from memory is what the checkpoint has. H hidden size, SIZE of an expert, K experts
a token; formats as `pelton.ops.moe.ExpertsSpec` says. e4m3: numbers meet the inputs as they are, and sums of G of them (of all with
G = 0) their scale, in float32. mxfp4: numbers times their scale are exact in every dtype; G bytes, which are 32 numbers, have a scale.
Integers with zero points meet the inputs as their difference, which every dtype has exactly, and a group's sums their scale, in float32:
weights are not rounded. Those with minima, and numbers of a table (`tables`) times their block's largest, are rounded to the inputs' dtype,
but for few pairs, whose sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pelton_backends.triton.ops.linear.grouped_kernels import scale_of
from pelton_backends.triton.ops.linear.tables import table_pair
from pelton_backends.triton.ops.moe.kernels import gated, tile_of
from pelton_backends.triton.runtime import INTERPRETED, dot, let_next_start, wait_for_inputs

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)

MX_BLOCK: tl.constexpr = tl.constexpr(32)  # numbers with one scale
MX_BYTES: tl.constexpr = tl.constexpr(16)
_TO_ONE: tl.constexpr = tl.constexpr(2.0**126)


def _two_bytes(select: str, low: int, high: int) -> str:
    """Two bytes as the lower halves of 16 bits each; a code's lowest three bits go to 6 to 8, its sign to 15."""
    parts = (("6", "12", low), ("2", "8", high))
    return f"prmt.b32 a, $4, 0, {select};" + "".join(
        f"shl.b32 b, a, {by}; shl.b32 c, a, {sign}; and.b32 b, b, 0x01c001c0; lop3.b32 ${to}, c, 0x80008000, b, 0xea;"
        for by, sign, to in parts
    )


_PAIR: tl.constexpr = tl.constexpr(
    "{ .reg .b32 a, b, c;" + _two_bytes("0x4140", 0, 2) + _two_bytes("0x4342", 1, 3) + "}"
)
"""Four bytes -> their lower codes as four bfloat16, and their upper ones: 2^-126 times their values."""


_CODES = "".join(
    f"prmt.b32 a, $4, 0, {select}; lop3.b32 ${low}, a, 0x000f000f, 0x43004300, 0xea;"
    f"shr.u32 a, a, 4; lop3.b32 ${high}, a, 0x000f000f, 0x43004300, 0xea;"
    for select, low, high in (("0x4140", 0, 2), ("0x4342", 1, 3))
)
_CODE_PAIR: tl.constexpr = tl.constexpr("{ .reg .b32 a;" + _CODES + "}")
"""Four bytes -> their lower four bits and their upper ones as four bfloat16 each, 128 more than they are."""
_WIDE: tl.constexpr = tl.constexpr("".join(f"prmt.b32 ${byte}, $4, 0x4b000000, 0x744{byte};" for byte in range(4)))
"""Four bytes -> float32, 2^23 more than they are. A conversion has a quarter of the rate of other instructions, or less."""


@triton.jit
def e2m1(code):
    """Four bits of each number -> its value, float32: they are a float's sign, last two bits of exponent and first of mantissa."""
    code = code.to(tl.int32)
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * _TO_ONE


@triton.jit
def e2m1_pair(packed):
    """Values of the bytes' lower and of their upper codes, float32."""
    if _INTERPRETED:
        low, high = e2m1(packed & 15), e2m1(packed >> 4)
    else:
        low, high = tl.inline_asm_elementwise(
            _PAIR, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        low, high = low.to(tl.float32) * _TO_ONE, high.to(tl.float32) * _TO_ONE
    return low, high


@triton.jit
def code_pair(packed, IS_WIDE: tl.constexpr):
    """The bytes' lower and upper four bits, each more by `code_offset`: bfloat16, or float32 where IS_WIDE."""
    if _INTERPRETED:
        low, high = (packed & 15).to(tl.float32), (packed >> 4).to(tl.float32)
    else:
        low, high = tl.inline_asm_elementwise(
            _CODE_PAIR, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        if IS_WIDE:
            low, high = low.to(tl.float32), high.to(tl.float32)
    return low, high


@triton.jit
def number_pair(packed, FORMAT: tl.constexpr):
    """`code_pair` or `table_pair`, float32."""
    if FORMAT == "nf4" or FORMAT == "fp4":
        low, high = table_pair(packed, FORMAT == "nf4")
    else:
        low, high = code_pair(packed, True)
    return low, high


@triton.jit
def code_offset(IS_INT4: tl.constexpr):
    if _INTERPRETED or not IS_INT4:
        return 0.0
    return 128.0


@triton.jit
def codes_of(packed):
    """Bytes -> float32."""
    if _INTERPRETED:
        return packed.to(tl.float32)
    bits = tl.inline_asm_elementwise(_WIDE, "=r,=r,=r,=r,r", [packed], dtype=tl.int32, is_pure=True, pack=4)
    return bits.to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def scale_and_minimum(word, FORMAT: tl.constexpr):
    """Return what turns a number of `number_pair` or `codes_of` into its weight: a factor and a summand, float32."""
    if FORMAT == "nf4" or FORMAT == "fp4":
        scale, other = word, word * 0.0
    else:
        scale, other = scale_of(word, FORMAT == "int4_minima" or FORMAT == "int8_minima")
        if FORMAT == "int4_grouped" or FORMAT == "int8_grouped":
            other = -other * scale
        other -= scale * code_offset(FORMAT == "int4_grouped" or FORMAT == "int4_minima")
    return scale, other


@triton.jit
def power(exponent):
    """2 ** (exponent - 127), float32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _product_e4m3(
    total, inputs, weights, scales, is_row, is_column, share, WIDTH: tl.constexpr, G: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """total [BM, BN] + rows of inputs [BM] times rows of weights [BN], of WIDTH numbers; pointers to each one's first.

    By way of float32: straight from e4m3 to bfloat16 is one slow conversion a number, which bound the product (219 us for 128 tokens
    of Qwen3-30B-A3B's experts on an H200, whose bytes take 141)."""
    lane = tl.arange(0, BK)
    for k in range(0, WIDTH, BK):
        is_in = k + lane < WIDTH
        x = tl.load(inputs[:, None] + k + lane[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        if SCALES_INPUT:
            x = (x.to(tl.float32) * share[:, None]).to(x.dtype)
        weight = tl.load(weights[None, :] + k + lane[:, None], mask=is_in[:, None] & is_column[None, :], other=0.0)
        if G:
            scale = tl.load(scales + k // G, mask=is_column, other=0.0)
            total += dot(x, weight.to(tl.float32).to(x.dtype), None) * scale[None, :]
        else:
            total = dot(x, weight.to(tl.float32).to(x.dtype), total)
    if not G:
        total *= tl.load(scales, mask=is_column, other=0.0)[None, :]
    return total


@triton.jit
def _product_mxfp4(
    total, inputs, weights, scales, is_row, is_column, share, WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """As `_product_e4m3`; a byte has a number of its block's first half below one of its second."""
    BYTES: tl.constexpr = BK // 2
    lane = tl.arange(0, BYTES)
    group = tl.arange(0, BYTES // MX_BYTES)
    column = lane // MX_BYTES * (2 * MX_BYTES) + lane % MX_BYTES
    for k in range(0, WIDTH, BK):
        is_in = k + column < WIDTH
        low = tl.load(inputs[:, None] + k + column[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        high = tl.load(
            inputs[:, None] + k + MX_BYTES + column[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0
        )
        if SCALES_INPUT:
            low = (low.to(tl.float32) * share[:, None]).to(low.dtype)
            high = (high.to(tl.float32) * share[:, None]).to(high.dtype)
        packed = tl.load(weights[None, :] + k // 2 + lane[:, None], mask=is_in[:, None] & is_column[None, :], other=0)
        is_group = k + group * (2 * MX_BYTES) < WIDTH
        exponent = tl.load(
            scales[None, :] + k // (2 * MX_BYTES) + group[:, None], mask=is_group[:, None] & is_column[None, :], other=0
        )
        scale = tl.broadcast_to(power(exponent)[:, None, :], (BYTES // MX_BYTES, MX_BYTES, BN))
        scale = tl.reshape(scale, (BYTES, BN))
        first, second = e2m1_pair(packed)
        total = dot(low, (first * scale).to(low.dtype), total)
        total = dot(high, (second * scale).to(high.dtype), total)
    return total


@triton.jit
def _product_grouped(
    total, inputs, weights, scales, is_row, is_column, share, WIDTH: tl.constexpr, IS_INT4: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """As `_product_e4m3`, of codes with zero points, whose differences every dtype has exactly; BK divides G, or one group is all.

    On an H200 128 tokens of Qwen3-30B-A3B's experts take 175 us in 4 bits with groups of 128, in bfloat16 295; 380 with sums of the
    inputs, which meet the zero points in float32, and 214 where each weight meets its scale before the product."""
    PER_BYTE: tl.constexpr = 2 if IS_INT4 else 1
    dtype: tl.constexpr = inputs.dtype.element_ty
    lane = tl.arange(0, BK // PER_BYTE)
    place = lane // MX_BYTES * (2 * MX_BYTES) + lane % MX_BYTES if IS_INT4 else lane
    for k in range(0, WIDTH, BK):
        is_in = k + place < WIDTH
        x = tl.load(inputs[:, None] + k + place[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        if SCALES_INPUT:
            x = (x.to(tl.float32) * share[:, None]).to(dtype)
        codes = weights[None, :] + k // PER_BYTE + lane[:, None]
        packed = tl.load(codes, mask=is_in[:, None] & is_column[None, :], other=0)
        scale, zero = scale_of(tl.load(scales + (k // G if G else 0), mask=is_column, other=0), False)
        if IS_INT4:
            high = tl.load(
                inputs[:, None] + k + MX_BYTES + place[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0
            )
            if SCALES_INPUT:
                high = (high.to(tl.float32) * share[:, None]).to(dtype)
            first, second = code_pair(packed, dtype != tl.bfloat16)
            less = (zero + code_offset(True)).to(dtype)[None, :]
            part = dot(x, first.to(dtype) - less, None)
            part = dot(high, second.to(dtype) - less, part)
        else:
            part = dot(x, (codes_of(packed) - zero[None, :]).to(dtype), None)
        total += part * scale[None, :]
    return total


@triton.jit
def _spread(factors, GROUPS: tl.constexpr, OWN: tl.constexpr, BN: tl.constexpr):
    """[GROUPS, BN] -> [GROUPS OWN, BN]"""
    return tl.reshape(tl.broadcast_to(factors[:, None, :], (GROUPS, OWN, BN)), (GROUPS * OWN, BN))


@triton.jit
def _product_minima(
    total, inputs, weights, scales, is_row, is_column, share, WIDTH: tl.constexpr, FORMAT: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """As `_product_e4m3`, of codes with minima or of a table: weights are rounded to the inputs' dtype."""
    IS_INT4: tl.constexpr = FORMAT != "int8_minima"
    PER_BYTE: tl.constexpr = 2 if IS_INT4 else 1
    OWN: tl.constexpr = min(G, BK) if G else BK
    dtype: tl.constexpr = inputs.dtype.element_ty
    lane = tl.arange(0, BK // PER_BYTE)
    group = tl.arange(0, BK // OWN)
    place = lane // MX_BYTES * (2 * MX_BYTES) + lane % MX_BYTES if IS_INT4 else lane
    for k in range(0, WIDTH, BK):
        is_in = k + place < WIDTH
        x = tl.load(inputs[:, None] + k + place[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0)
        if SCALES_INPUT:
            x = (x.to(tl.float32) * share[:, None]).to(dtype)
        codes = weights[None, :] + k // PER_BYTE + lane[:, None]
        packed = tl.load(codes, mask=is_in[:, None] & is_column[None, :], other=0)
        number = (k + group * OWN) // G if G else group * 0
        is_group = k + group * OWN < WIDTH
        word = tl.load(scales[None, :] + number[:, None], mask=is_group[:, None] & is_column[None, :], other=0)
        scale, minimum = scale_and_minimum(word, FORMAT)
        scale, minimum = (
            _spread(scale, BK // OWN, OWN // PER_BYTE, BN), _spread(minimum, BK // OWN, OWN // PER_BYTE, BN)
        )  # fmt: skip
        if IS_INT4:
            high = tl.load(
                inputs[:, None] + k + MX_BYTES + place[None, :], mask=is_row[:, None] & is_in[None, :], other=0.0
            )
            if SCALES_INPUT:
                high = (high.to(tl.float32) * share[:, None]).to(dtype)
            first, second = number_pair(packed, FORMAT)
            total = dot(x, (first * scale + minimum).to(dtype), total)
            total = dot(high, (second * scale + minimum).to(dtype), total)
        else:
            total = dot(x, (codes_of(packed) * scale + minimum).to(dtype), total)
    return total


@triton.jit
def _product(
    inputs, weight_ptr, scale_ptr, row, columns, is_row, is_column, share, WIDTH: tl.constexpr, FORMAT: tl.constexpr, G: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """Rows of inputs [BM] (pointers) by rows row + columns [BN] of all experts' matrices -> [BM, BN] float32."""
    total = tl.zeros((BM, BN), tl.float32)
    rows = row + columns
    if FORMAT == "mxfp4":
        weights, scales = weight_ptr + rows * (WIDTH // 2), scale_ptr + rows * (WIDTH // (2 * MX_BYTES))
        total = _product_mxfp4(
            total, inputs, weights, scales, is_row, is_column, share, WIDTH, BM, BN, BK, SCALES_INPUT
        )
    elif FORMAT != "e4m3":
        BYTES: tl.constexpr = WIDTH if FORMAT == "int8_grouped" or FORMAT == "int8_minima" else WIDTH // 2
        weights, scales = weight_ptr + rows * BYTES, scale_ptr + rows * (WIDTH // G if G else 1)
        if FORMAT == "int4_grouped" or FORMAT == "int8_grouped":
            total = _product_grouped(
                total, inputs, weights, scales, is_row, is_column, share, WIDTH, FORMAT == "int4_grouped", G, BM, BN, BK, SCALES_INPUT
            )  # fmt: skip
        else:
            total = _product_minima(
                total, inputs, weights, scales, is_row, is_column, share, WIDTH, FORMAT, G, BM, BN, BK, SCALES_INPUT
            )
    else:
        GROUPS: tl.constexpr = (WIDTH + G - 1) // G if G else 1
        weights, scales = weight_ptr + rows * WIDTH, scale_ptr + rows * GROUPS
        total = _product_e4m3(
            total, inputs, weights, scales, is_row, is_column, share, WIDTH, G, BM, BN, BK, SCALES_INPUT
        )
    return total


@triton.jit(do_not_specialize=["capacity"])
def packed_gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, share_ptr, inner_ptr, order_ptr, count_ptr, capacity, x_stride,
    E: tl.constexpr, EB: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, G: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SCALES_INPUT: tl.constexpr,
    KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `gate_up_kernel`."""
    tile, columns = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert, pairs, is_row, is_tile = tile_of(order_ptr, count_ptr, capacity, tile, E, EB, BM)
    if not is_tile:
        return
    share = tl.zeros((BM,), tl.float32)
    if SCALES_INPUT:
        share = tl.load(share_ptr + pairs, mask=is_row, other=0.0)
    is_column = columns < SIZE
    inputs = x_ptr + (pairs // K).to(tl.int64) * x_stride
    row = expert * (2 * SIZE)
    gate = _product(
        inputs, weight_ptr, scale_ptr, row, columns, is_row, is_column, share, H, FORMAT, G, BM, BN, BK, SCALES_INPUT
    )
    up = _product(
        inputs, weight_ptr, scale_ptr, row + SIZE, columns, is_row, is_column, share, H, FORMAT, G, BM, BN, BK, SCALES_INPUT
    )  # fmt: skip
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + row + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + row + SIZE + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    result = gated(gate, up, LIMIT, ACTIVATION, inner_ptr.dtype.element_ty)
    target = inner_ptr + pairs.to(tl.int64)[:, None] * SIZE + columns[None, :]
    tl.store(target, result, mask=is_row[:, None] & is_column[None, :], eviction_policy=KEPT)


@triton.jit(do_not_specialize=["capacity"])
def packed_down_kernel(
    inner_ptr, weight_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, order_ptr, count_ptr, capacity,
    E: tl.constexpr, EB: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, G: tl.constexpr, SCALES_INPUT: tl.constexpr, KEPT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `down_kernel`."""
    tile, columns = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert, pairs, is_row, is_tile = tile_of(order_ptr, count_ptr, capacity, tile, E, EB, BM)
    if not is_tile:
        return
    is_column = columns < H
    inputs = inner_ptr + pairs.to(tl.int64) * SIZE
    share = tl.load(share_ptr + pairs, mask=is_row, other=0.0)
    row = expert * H
    result = _product(
        inputs, weight_ptr, scale_ptr, row, columns, is_row, is_column, share, SIZE, FORMAT, G, BM, BN, BK, False
    )
    if bias_ptr is not None:
        result += tl.load(bias_ptr + row + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if not SCALES_INPUT:
        result *= share[:, None]
    target = out_ptr + pairs.to(tl.int64)[:, None] * H + columns[None, :]
    result = result.to(out_ptr.dtype.element_ty)
    tl.store(target, result, mask=is_row[:, None] & is_column[None, :], eviction_policy=KEPT)


@triton.jit
def _row_sums_integers(
    inputs, weight_ptr, scale_ptr, rows, is_row, share, WIDTH: tl.constexpr, FORMAT: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """As `_row_sums`, with pointers to inputs [R, 1] or [1, 1]."""
    IS_INT4: tl.constexpr = FORMAT != "int8_grouped" and FORMAT != "int8_minima"
    dtype = inputs.dtype.element_ty
    PER_BYTE: tl.constexpr = 2 if IS_INT4 else 1
    GROUPS: tl.constexpr = WIDTH // G if G else 1
    OWN: tl.constexpr = min(G, BK) if G else BK
    lane = tl.arange(0, BK // PER_BYTE)
    group = tl.arange(0, BK // OWN)
    column = lane // MX_BYTES * (2 * MX_BYTES) + lane % MX_BYTES if IS_INT4 else lane
    total = tl.zeros((R, BK // OWN), tl.float32)
    for k in range(0, WIDTH, BK):
        is_in = k + column < WIDTH
        places = weight_ptr + rows[:, None] * (WIDTH // PER_BYTE) + k // PER_BYTE + lane[None, :]
        packed = tl.load(places, mask=is_row[:, None] & is_in[None, :], other=0, eviction_policy="evict_first")
        number = (k + group * OWN) // G if G else group * 0
        word = tl.load(
            scale_ptr + rows[:, None] * GROUPS + number[None, :], mask=is_row[:, None] & (number < GROUPS)[None, :], other=0
        )  # fmt: skip
        x = tl.load(inputs + (k + column)[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
        if SCALES_INPUT:
            x = (x * share).to(dtype).to(tl.float32)
        if IS_INT4:
            high = tl.load(inputs + (k + column + MX_BYTES)[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
            if SCALES_INPUT:
                high = (high * share).to(dtype).to(tl.float32)
            first, second = number_pair(packed, FORMAT)
            products = first * x + second * high
            x += high
        else:
            products = codes_of(packed) * x
        part = tl.sum(tl.reshape(products, (R, BK // OWN, OWN // PER_BYTE)), axis=2)
        sums = tl.sum(tl.reshape(x, (x.shape[0], BK // OWN, OWN // PER_BYTE)), axis=2)
        scale, minimum = scale_and_minimum(word, FORMAT)
        total += part * scale + sums * minimum
    return tl.sum(total, axis=1)


@triton.jit
def _row_sums(
    inputs, weight_ptr, scale_ptr, rows, is_row, share, WIDTH: tl.constexpr, FORMAT: tl.constexpr, G: tl.constexpr, R: tl.constexpr,
    BK: tl.constexpr, SCALES_INPUT: tl.constexpr,
):  # fmt: skip
    """Rows [R] of all experts' matrices, times a row of inputs each (pointers, [R], or [1] where it is the same one): [R] float32."""
    dtype = inputs.dtype.element_ty
    inputs = inputs[:, None]
    if FORMAT == "mxfp4":
        BYTES: tl.constexpr = BK // 2
        lane = tl.arange(0, BYTES)
        group = tl.arange(0, BYTES // MX_BYTES)
        column = lane // MX_BYTES * (2 * MX_BYTES) + lane % MX_BYTES
        sums = tl.zeros((R, BYTES // MX_BYTES), tl.float32)
        for k in range(0, WIDTH, BK):
            is_in = k + column < WIDTH
            places = rows[:, None] * (WIDTH // 2) + k // 2 + lane[None, :]
            packed = tl.load(
                weight_ptr + places, mask=is_row[:, None] & is_in[None, :], other=0, eviction_policy="evict_first"
            )
            is_group = k + group * (2 * MX_BYTES) < WIDTH
            scales = scale_ptr + rows[:, None] * (WIDTH // (2 * MX_BYTES)) + k // (2 * MX_BYTES) + group[None, :]
            exponent = tl.load(scales, mask=is_row[:, None] & is_group[None, :], other=0)
            low = tl.load(inputs + (k + column)[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
            high = tl.load(inputs + (k + column + MX_BYTES)[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
            if SCALES_INPUT:
                low, high = (low * share).to(dtype).to(tl.float32), (high * share).to(dtype).to(tl.float32)
            first, second = e2m1_pair(packed)
            products = first * low + second * high
            products = tl.reshape(products, (R, BYTES // MX_BYTES, MX_BYTES))
            sums += tl.sum(products, axis=2) * power(exponent)
        result = tl.sum(sums, axis=1)
    elif FORMAT != "e4m3":
        result = _row_sums_integers(
            inputs, weight_ptr, scale_ptr, rows, is_row, share, WIDTH, FORMAT, G, R, BK, SCALES_INPUT
        )
    else:
        GROUPS: tl.constexpr = (WIDTH + G - 1) // G if G else 1
        OWN: tl.constexpr = min(G, BK) if G else BK
        lane = tl.arange(0, BK)
        group = tl.arange(0, BK // OWN)
        sums = tl.zeros((R, BK // OWN), tl.float32)
        if not G:
            row_scale = tl.load(
                scale_ptr + rows, mask=is_row, other=0.0
            )  # before sums, behind whose barriers it would be late
        for k in range(0, WIDTH, BK):
            is_in = k + lane < WIDTH
            mask = is_row[:, None] & is_in[None, :]
            weight = tl.load(
                weight_ptr + rows[:, None] * WIDTH + k + lane[None, :],
                mask=mask,
                other=0.0,
                eviction_policy="evict_first",
            )
            x = tl.load(inputs + (k + lane)[None, :], mask=is_in[None, :], other=0.0).to(tl.float32)
            if SCALES_INPUT:
                x = (x * share).to(dtype).to(tl.float32)
            if G:
                number = (k + group * OWN) // G
                scales = scale_ptr + rows[:, None] * GROUPS + number[None, :]
                scale = tl.load(scales, mask=is_row[:, None] & (number < GROUPS)[None, :], other=0.0)
            part = tl.sum(tl.reshape(weight.to(tl.float32) * x, (R, BK // OWN, OWN)), axis=2)
            if G:
                part *= scale
            sums += part
        result = tl.sum(sums, axis=1)
        if not G:
            result *= row_scale
    return result


@triton.jit
def packed_few_gate_up_kernel(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, expert_ptr, share_ptr, inner_ptr, x_stride,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, G: tl.constexpr, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, SCALES_INPUT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """As `few_gate_up_kernel`."""
    pair, place = (
        tl.program_id(1),
        tl.arange(0, 2 * R),
    )  # rows of gate, then the same ones of up: all weights are asked for at once
    rows = tl.program_id(0) * R + tl.arange(0, R)
    own = tl.program_id(0) * R + place % R
    let_next_start(PDL)
    wait_for_inputs(PDL)
    expert = tl.load(expert_ptr + pair).to(tl.int64)
    if expert >= E:
        return
    share = tl.load(share_ptr + pair)
    inputs = x_ptr + (pair // K).to(tl.int64) * x_stride + tl.arange(0, 1)
    weight_rows = expert * (2 * SIZE) + own + place // R * SIZE
    sums = _row_sums(
        inputs, weight_ptr, scale_ptr, weight_rows, own < SIZE, share, H, FORMAT, G, 2 * R, BK, SCALES_INPUT
    )
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_rows, mask=own < SIZE, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(sums, (2, R)), (1, 0)))
    is_row = rows < SIZE
    result = gated(gate, up, LIMIT, ACTIVATION, inner_ptr.dtype.element_ty)
    tl.store(inner_ptr + pair.to(tl.int64) * SIZE + rows, result, mask=is_row)


@triton.jit
def _pairs_and_rows(
    expert_ptr, share_ptr, E: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr
):
    """R output rows of one token by each of its K experts, as one axis of R KB, so that all weights are asked for at once: pair,
    row of all experts' matrices, row of an expert's, which of them there are, and the pairs' weights."""
    place = tl.arange(0, R * KB)
    choice, row = place % KB, tl.program_id(0) * R + place // KB
    pair = tl.program_id(1).to(tl.int64) * K + choice
    expert = tl.load(expert_ptr + pair, mask=choice < K, other=E)
    is_row = (expert < E) & (row < H)
    share = tl.load(share_ptr + pair, mask=is_row, other=0.0)
    return pair, expert.to(tl.int64) * H + row, is_row, share


@triton.jit
def packed_few_down_kernel(
    inner_ptr, weight_ptr, scale_ptr, bias_ptr, expert_ptr, share_ptr, out_ptr,
    E: tl.constexpr, H: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, KB: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    FORMAT: tl.constexpr, G: tl.constexpr, SCALES_INPUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `few_down_kernel`."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    pair, weight_row, is_row, share = _pairs_and_rows(expert_ptr, share_ptr, E, H, K, KB, R)
    inputs = inner_ptr + tl.where(is_row, pair, 0) * SIZE
    result = _row_sums(inputs, weight_ptr, scale_ptr, weight_row, is_row, share, SIZE, FORMAT, G, R * KB, BK, False)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + weight_row, mask=is_row, other=0.0).to(tl.float32)
    if not SCALES_INPUT:
        result *= share
    rows = tl.program_id(0) * R + tl.arange(0, R)
    total = tl.sum(tl.reshape(tl.where(is_row, result, 0.0), (R, KB)), axis=1)
    tl.store(out_ptr + tl.program_id(1).to(tl.int64) * H + rows, total.to(out_ptr.dtype.element_ty), mask=rows < H)


@triton.jit
def decode_kernel(
    weight_ptr, scale_ptr, out_ptr, WIDTH: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr,
    G: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """R rows of all experts' matrices a program -> [rows, WIDTH] of the output's dtype; the number of rows is a multiple of R."""
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    let_next_start(PDL)
    wait_for_inputs(PDL)  # for the memory it writes
    for k in range(0, WIDTH, BLOCK):
        if FORMAT != "e4m3":  # blocks of 32 numbers, which have one scale
            IS_INT4: tl.constexpr = FORMAT != "int8_grouped" and FORMAT != "int8_minima"
            PER_BYTE: tl.constexpr = 2 if IS_INT4 else 1
            starts = k + tl.arange(0, BLOCK // MX_BLOCK) * MX_BLOCK
            is_block = (starts < WIDTH)[None, :]
            byte, number = tl.arange(0, MX_BLOCK // PER_BYTE), tl.arange(0, MX_BLOCK)
            places = rows[:, None] * (WIDTH // PER_BYTE) + (starts // PER_BYTE)[None, :]
            is_byte = (starts[:, None] + byte[None, :] < WIDTH)[None, :, :]
            packed = tl.load(weight_ptr + places[:, :, None] + byte[None, None, :], mask=is_byte, other=0)
            if FORMAT == "mxfp4":
                exponents = scale_ptr + rows[:, None] * (WIDTH // MX_BLOCK) + (starts // MX_BLOCK)[None, :]
                scale = power(tl.load(exponents, mask=is_block, other=0))
                first, second = e2m1_pair(packed)
            else:
                words = (
                    scale_ptr + rows[:, None] * (WIDTH // G if G else 1) + (starts // G if G else starts * 0)[None, :]
                )
                scale, minimum = scale_and_minimum(tl.load(words, mask=is_block, other=0), FORMAT)
                if IS_INT4:
                    first, second = number_pair(packed, FORMAT)
            if IS_INT4:  # number b of a block lies below number 16 + b
                numbers = tl.permute(tl.join(first, second), (0, 1, 3, 2))
                numbers = tl.reshape(numbers, (R, BLOCK // MX_BLOCK, MX_BLOCK))
            else:
                numbers = codes_of(packed)
            numbers *= scale[:, :, None]
            if FORMAT != "mxfp4":
                numbers += minimum[:, :, None]
            target = out_ptr + (rows[:, None] * WIDTH + starts[None, :])[:, :, None] + number[None, None, :]
            is_number = (starts[:, None] + number[None, :] < WIDTH)[None, :, :]
            tl.store(target, numbers.to(out_ptr.dtype.element_ty), mask=is_number)
        else:
            target = out_ptr + rows[:, None] * WIDTH + k
            GROUPS: tl.constexpr = (WIDTH + G - 1) // G if G else 1
            column = tl.arange(0, BLOCK)
            mask = (k + column < WIDTH)[None, :]
            number = tl.load(weight_ptr + rows[:, None] * WIDTH + k + column[None, :], mask=mask, other=0.0)
            group = ((k + column) // G if G else column * 0)[None, :]
            scale = tl.load(scale_ptr + rows[:, None] * GROUPS + group, mask=mask, other=0.0)
            tl.store(target + column[None, :], (number.to(tl.float32) * scale).to(out_ptr.dtype.element_ty), mask=mask)
