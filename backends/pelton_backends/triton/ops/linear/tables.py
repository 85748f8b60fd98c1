"""Codes of four bits that stand for 16 numbers of a table: bitsandbytes' nf4 and fp4.

A byte has two codes. They become float32 to the bit: bytes of the table's numbers lie in registers, and an instruction picks four
bytes at a time by as many codes.
"""

from __future__ import annotations

import struct

import triton
import triton.language as tl

from pelton_backends.code_tables import FP4, NF4
from pelton_backends.triton.runtime import INTERPRETED

_INTERPRETED: tl.constexpr = tl.constexpr(INTERPRETED)


def _half(first_output: int, numbers: tuple[float, ...]) -> str:
    """PTX from `t`, a code in the lower half of each byte, to four float32."""
    bits = [struct.unpack("<I", struct.pack("<f", number))[0] for number in numbers]
    lines = [
        "shr.b32 s, t, 4; or.b32 s, s, t; prmt.b32 s, s, 0, 0x4420;",  # four codes side by side
        "shr.b32 m, s, 3; and.b32 m, m, 0x1111; prmt.b32 m, z, 0, m;",  # 0xff where a code is 8 and more
        "and.b32 s, s, 0x7777;",
    ]
    for byte in range(4):
        words = [sum((bits[4 * word + i] >> (8 * byte) & 255) << (8 * i) for i in range(4)) for word in range(4)]
        a, b, c, d = (f"{word:#010x}" for word in words)
        lines.append(
            f"mov.b32 p, {a}; prmt.b32 a, p, {b}, s; mov.b32 p, {c}; prmt.b32 b, p, {d}, s; lop3.b32 c{byte}, a, b, m, 0xd8;"
        )
    lines.append("prmt.b32 a, c0, c1, 0x5140; prmt.b32 b, c2, c3, 0x5140;")
    lines.append(f"prmt.b32 ${first_output}, a, b, 0x5410; prmt.b32 ${first_output + 1}, a, b, 0x7632;")
    lines.append("prmt.b32 a, c0, c1, 0x7362; prmt.b32 b, c2, c3, 0x7362;")
    lines.append(f"prmt.b32 ${first_output + 2}, a, b, 0x5410; prmt.b32 ${first_output + 3}, a, b, 0x7632;")
    return "".join(lines)


def _pair(numbers: tuple[float, ...]) -> str:
    return (
        "{ .reg .b32 a, b, c0, c1, c2, c3, m, p, s, t, z; mov.b32 z, 0x0000ff00; and.b32 t, $8, 0x0f0f0f0f;"
        + _half(0, numbers) + "shr.b32 t, $8, 4; and.b32 t, t, 0x0f0f0f0f;" + _half(4, numbers) + "}"
    )  # fmt: skip


_NF4_PAIR: tl.constexpr = tl.constexpr(_pair(NF4))
_FP4_PAIR: tl.constexpr = tl.constexpr(_pair(FP4))
_PAIR_CONSTRAINTS: tl.constexpr = tl.constexpr(",".join(["=&r"] * 8) + ",r")


@triton.jit
def _picked(code, IS_NF4: tl.constexpr):
    """For the interpreter."""
    number = code.to(tl.float32) * 0.0
    for i in tl.static_range(16):
        number = tl.where(code == i, NF4[i] if IS_NF4 else FP4[i], number)
    return number


@triton.jit
def table_pair(packed, IS_NF4: tl.constexpr):
    """Bytes -> the numbers of their lower and of their upper codes, float32."""
    if _INTERPRETED:
        low, high = _picked(packed & 15, IS_NF4), _picked(packed >> 4, IS_NF4)
    else:
        low, high = tl.inline_asm_elementwise(
            _NF4_PAIR if IS_NF4 else _FP4_PAIR, _PAIR_CONSTRAINTS, [packed], dtype=(tl.int32, tl.int32), is_pure=True, pack=4
        )  # fmt: skip
        low, high = low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True)
    return low, high
