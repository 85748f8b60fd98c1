"""Blocks and panels: against the gguf package, and against themselves."""

import gguf
import numpy as np
import pytest
import torch

from pelton.ops.interface import LinearSpec, LinearWeights
from pelton.ops.packed_blocks import (
    KINDS,
    PANEL_ROWS,
    dense,
    dequantize,
    kinds_of,
    panels_shape,
    weight_format,
)
from pelton_plugins.weight_forms.block_writing import pack, quantize

SHAPES = [(1, 32), (16, 64), (37, 96), (0, 32)]


def packed(rows, kind, shape):
    panels = torch.full(panels_shape(kind, *shape), 0xA5, dtype=torch.uint8)
    pack(rows, kind, panels)
    return panels


def package_values(rows, kind):
    if rows.shape[0] == 0:
        return torch.zeros(0, rows.shape[1] // kind.block_bytes * 32)
    return torch.from_numpy(np.array(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind.name.upper()])))


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_panels_say_what_the_files_blocks_say(kind, shape):
    num_rows, num_cols = shape
    row_bytes = num_cols // 32 * kind.block_bytes
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (num_rows, row_bytes), np.uint8))
    heads = rows.view(num_rows, num_cols // 32, kind.block_bytes)[..., : kind.head_bytes]
    heads[..., 1::2] &= 0xBB  # no infinite scales, no NaN
    panels = packed(rows, kind, shape)
    assert panels.numel() == -(-num_rows // PANEL_ROWS) * PANEL_ROWS * rows.shape[1]  # not a byte more but whole panels
    assert torch.equal(dequantize(panels, kind, num_rows), package_values(rows, kind))
    padding = dequantize(panels, kind, panels.shape[0] * PANEL_ROWS)[num_rows:]
    assert not padding.any()


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_quantizing_is_as_near_as_the_gguf_package(kind):
    values = torch.randn(40, 128, generator=torch.Generator().manual_seed(0))
    values[3, 32:64] = 0.0
    ours = package_values(quantize(values, kind), kind)
    theirs = torch.from_numpy(gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[kind.name.upper()]))
    wanted = (package_values(theirs, kind) - values).norm()
    assert (ours - values).norm() <= 1.001 * wanted
    assert not ours[3, 32:64].any()


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_quantizing_what_blocks_hold_changes_nothing(kind):
    values = package_values(quantize(torch.randn(40, 128), kind), kind)
    again = package_values(quantize(values, kind), kind)
    torch.testing.assert_close(again, values, rtol=2e-3, atol=2e-3)


def test_formats_are_named_by_their_parts():
    q8, q4 = KINDS["q8_0"], KINDS["q4_1"]
    assert weight_format([q4, q4, q4]) == "q4_1" and kinds_of("q4_1") == [q4]
    assert weight_format([q4, q4, q8]) == "q4_1+q4_1+q8_0" and kinds_of("q4_1+q4_1+q8_0") == [q4, q4, q8]
    assert kinds_of("plain") is None and kinds_of("q4_1+fp8") is None


def test_parts_lie_below_each_other():
    values = torch.randn(20, 64)
    kinds = [KINDS["q8_0"], KINDS["q4_1"]]
    tensors = {f"part{i}": packed(quantize(rows, kind), kind, rows.shape)
               for i, (rows, kind) in enumerate(zip(values.split([17, 3]), kinds, strict=True))}  # fmt: skip
    spec = LinearSpec(in_features=64, out_features=20, weight_format=weight_format(kinds), parts=(17, 3))
    assert (dense(LinearWeights(spec, tensors)) - values).abs().max() < 0.3
