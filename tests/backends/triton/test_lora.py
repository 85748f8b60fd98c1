"""Adapters against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from pelton_lora_op import SHAPES, check_lora, make_lora_case

from pelton_backends.triton.ops.lora.linear import TritonLora, block_columns, block_width


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("slots", "size", "parts", "options"), SHAPES, ids=lambda value: "")
def test_follows_the_reference(slots, size, parts, options, dtype, device):
    case = make_lora_case(slots, size, parts, dtype=dtype, device=device, has_tiles=True, **options)
    check_lora(case, TritonLora, slots)


@pytest.mark.parametrize("slots", [[-1], [2, 2, 2], [-1, 0, 2, 1] * 25, [0] * 40 + [-1] * 5], ids=len)
def test_rows_are_sorted_as_by_torch(slots, device):
    expected = make_lora_case(slots, 16, (16,), device=device, has_tiles=True).tensors.rows
    case = make_lora_case(slots, 16, (16,), device=device, has_tiles=True)
    rows = case.tensors.rows
    TritonLora.bind(case.needs, case.tensors)
    assert rows.sort is not None
    for tensor in (rows.order, rows.tile_slot, rows.tile_first, rows.tile_end, rows.token_tile, rows.num_used):
        tensor.fill_(7)
    rows.place(torch.tensor(slots, device=device))
    count, num_tiles = len(slots), rows.num_tiles(len(slots))
    assert rows.order[:count].tolist() == expected.order[:count].tolist()
    assert rows.token_tile[:count].tolist() == expected.token_tile[:count].tolist()
    assert rows.num_used.tolist() == expected.num_used.tolist()
    for name in ("tile_slot", "tile_first", "tile_end"):
        assert getattr(rows, name)[:num_tiles].tolist() == getattr(expected, name)[:num_tiles].tolist()
    for rows.unit_slots in (1, 2):
        rows.place(torch.tensor(slots, device=device))
        used = sorted({slot // rows.unit_slots for slot in slots if slot >= 0})
        assert rows.num_units.tolist() == [len(used)]
        assert rows.units[: len(used)].tolist() == used
        assert all(unit * rows.unit_slots >= rows.num_slots for unit in rows.units[len(used) :][:8].tolist())
    before = int(rows.step)
    rows.place(torch.tensor(slots, device=device))
    assert int(rows.step) == before + 1


@pytest.mark.parametrize(
    ("parts", "options"),
    [
        pytest.param((32,), {"norm": True}, id="one-part"),
        pytest.param((1088, 40, 40), {}, id="more-columns-than-a-program-has"),
        pytest.param((1100, 1100), {"norm": True, "activation": "silu"}, id="gate-and-up"),
        pytest.param((48, 16), {"rank": 128}, id="parts-apart"),
    ],
)
def test_large_steps_have_large_tiles(parts, options, device):
    slots = [-1, 0, 2] * 170 + [0] * 10
    case = make_lora_case(slots, 600 if len(parts) > 1 else 64, parts, device=device, has_tiles=True, **options)
    check_lora(case, TritonLora, slots)


@pytest.mark.parametrize("element_size", [2, 4])
@pytest.mark.parametrize("rank", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("memory", [64 << 10, 99 << 10, 227 << 10])
def test_blocks_fit_into_shared_memory(rows, rank, element_size, memory):
    columns = block_columns(rows, rank, element_size, memory)
    assert columns >= 16
    assert 2 * (rows + rank) * columns * element_size <= memory or columns == 16
    for is_gated in (False, True):
        width = block_width(rows, rank, element_size, memory, is_gated=is_gated)
        assert width >= 16
        assert (rows + 2 * width) * rank * element_size <= memory or width == 16
