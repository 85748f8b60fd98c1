"""Adapters against the reference, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from pelton_lora_op import SHAPES, check_lora, make_lora_case

from pelton_backends.triton.ops.lora.linear import TritonLora


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


def test_large_steps_have_large_tiles(device):
    slots = [-1, 0, 2] * 170 + [0] * 10
    case = make_lora_case(slots, 64, (32,), device=device, has_tiles=True, norm=True)
    check_lora(case, TritonLora, slots)
