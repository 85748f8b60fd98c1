"""q/k norm, rope and KV writes in C against the torch reference, by each instruction set that this CPU has."""

import pytest
import torch

from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.native.rope import NativeQkNormRopeWriteKv
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv

pytestmark = pytest.mark.covering(3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "head_dim, rotary_dim, norm",
    [(16, 16, None), (64, 64, False), (24, 8, True), (16, 0, None), (7, 6, True)],
)
@pytest.mark.parametrize("num_tokens", [0, 1, 19])
def test_equals_the_reference(isa, dtype, heads_first, head_dim, rotary_dim, norm, num_tokens):
    generator = torch.Generator().manual_seed(3)
    heads, kv_heads, block_size, num_blocks = 6, 2, 4, 9
    kind = getattr(torch, dtype)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    spec = None if norm is None else NormSpec(size=head_dim, eps=1e-5, unit_offset=norm)
    needs = QkNormRopeWriteKvNeeds(
        dtype=dtype, kv_dtype=dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary_dim,
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
        pages = torch.zeros(num_blocks, 2, *axes, head_dim, dtype=kind)
        views = (pages.transpose(2, 3) if heads_first else pages).unbind(1)
        found.append([op.bind(needs, tensors)(qkv.clone(), positions, slots, *views), *views])
    for got, want in zip(*found, strict=True):
        tolerance = 1e-5 if dtype == "float32" else 1.6e-2
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)
