"""q/k norm, rope and KV writes in C against the torch reference, by each instruction set that this CPU has."""

import pytest
import torch

from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.native.rope import NativeQkNormRopeWriteKv
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv

pytestmark = pytest.mark.covering(3)


FP8 = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
STEPS = {torch.float8_e4m3fn: 0.125, torch.float8_e5m2: 0.25}
"""Between numbers, relative: keys that differ by less may be rounded to either side."""


@pytest.mark.parametrize(
    "dtype, kv_dtype",
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "fp8"),
        ("bfloat16", "fp8_e5m2"),
        ("float16", "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "head_dim, rotary_dim, norm",
    [(16, 16, None), (64, 64, False), (24, 8, True), (16, 0, None), (7, 6, True)],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_equals_the_reference(isa, dtype, kv_dtype, heads_first, head_dim, rotary_dim, norm, num_tokens):
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, block_size, num_blocks = 6, 2, 4, 9
    kind = getattr(torch, dtype)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    spec = None if norm is None else NormSpec(size=head_dim, eps=1e-5, unit_offset=norm)
    needs = QkNormRopeWriteKvNeeds(
        dtype=dtype, kv_dtype=kv_dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim,
        q_norm=spec, k_norm=spec,
    )  # fmt: skip
    tensors = QkNormRopeWriteKvTensors(
        normal(30, rotary_dim) if rotary_dim else None,
        normal(head_dim).to(kind) if spec else None,
        normal(head_dim).to(kind) if spec else None,
    )
    qkv = normal(num_tokens, (heads + 2 * kv_heads) * head_dim).to(kind)
    positions = torch.randint(0, 30, (num_tokens,), generator=generator)
    slots = torch.randperm(block_size * (num_blocks - 1), generator=generator)[:num_tokens] + block_size
    slots[1::5] = -1
    found = []
    for op in (NativeQkNormRopeWriteKv, ReferenceQkNormRopeWriteKv):
        assert op.unsupported(needs) == []
        axes = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        pages = torch.zeros(num_blocks, 2, *axes, head_dim, dtype=FP8.get(kv_dtype, kind))
        views = (pages.transpose(2, 3) if heads_first else pages).unbind(1)
        found.append([op.bind(needs, tensors)(qkv.clone(), positions, slots, *views), *views])
    for got, want in zip(*found, strict=True):
        tolerance = STEPS.get(got.dtype, 1e-5 if dtype == "float32" else 1.6e-2)
        torch.testing.assert_close(got.float(), want.float(), atol=min(tolerance, 1.6e-2), rtol=tolerance)
    assert kv_dtype == dtype or torch.equal(*(views[2].view(torch.uint8) for views in found)), "values are not turned"


def every_number(dtype):
    """All of 16 bits; as float32 those of both kinds, and their neighbours."""
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    if dtype != "float32":
        return bits.view(getattr(torch, dtype))
    wide = torch.cat([bits.view(torch.bfloat16).float(), bits.view(torch.float16).float()]).view(torch.int32)
    return torch.cat([wide - 1, wide, wide + 1]).view(torch.float32)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numbers_are_rounded_to_8_bits_as_by_the_reference(isa, dtype, kv_dtype):
    """Ties, NaN, infinity, numbers that are too large or too small: to the byte."""
    rows = every_number(dtype).view(-1, 64)
    needs = QkNormRopeWriteKvNeeds(
        dtype=dtype, kv_dtype=kv_dtype, num_heads=1, num_kv_heads=1, head_dim=64, rotary_dim=0
    )
    slots, found = torch.arange(len(rows)), []
    for op in (NativeQkNormRopeWriteKv, ReferenceQkNormRopeWriteKv):
        pages = torch.zeros(len(rows) // 16, 2, 16, 1, 64, dtype=FP8[kv_dtype])
        bound = op.bind(needs, QkNormRopeWriteKvTensors(None, None, None))
        bound(torch.cat([rows, rows.flip(0), rows], dim=1), slots, slots, *pages.unbind(1))
        found.append(pages.view(torch.uint8))
    assert torch.equal(*found)
