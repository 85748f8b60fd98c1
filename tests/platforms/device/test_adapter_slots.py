"""Slots whose matrices lie together by layers, as off CPUs."""

from __future__ import annotations

import pytest
import torch

from pelton_platforms.device.adapter_slots import LayeredSlotMemory, PackedLayer, aligned

RANK, SLOTS = 16, 5
KINDS = {"qkv": (48, 24, 20), "down": (16, 40, 12)}  # ranks of all parts, columns of A, of B


def packed_layers(names: list[str]) -> tuple[list[PackedLayer], int]:
    layers, end = [], 0
    for name in names:
        ranks, in_features, columns = KINDS[name]
        b_start = end + aligned(ranks * in_features)
        layers.append(PackedLayer(end, b_start, ranks, in_features, columns))
        end = b_start + aligned(columns * RANK)
    return layers, end


@pytest.mark.parametrize(
    ("names", "num_copies"),
    [
        pytest.param(["qkv", "down"] * 3, 2, id="even"),
        pytest.param(["qkv", "down", "down", "qkv", "down"], 4, id="uneven"),
        pytest.param(["qkv"], 1, id="one"),
    ],
)
def test_an_adapter_comes_to_its_slot_and_to_no_other(names: list[str], num_copies: int) -> None:
    layers, size = packed_layers(names)
    memory = LayeredSlotMemory(
        layers, size=size, num_slots=SLOTS, rank=RANK, dtype=torch.float32, device=torch.device("cpu")
    )
    adapters = {slot: torch.randn(size, generator=torch.Generator().manual_seed(slot)) for slot in (3, 0)}
    for slot, adapter in adapters.items():
        memory.place(slot, adapter)
    assert len(memory._runs) == num_copies
    for index, layer in enumerate(layers):
        a, b = memory.of(index)
        assert a.shape == (SLOTS, layer.num_ranks, layer.in_features)
        assert b.stride() == (RANK, 1, 128), "ranks of all slots lie beside each other, in whole panels"
        for slot in range(SLOTS):
            adapter = adapters.get(slot, torch.zeros(size))
            assert torch.equal(a[slot].flatten(), adapter[layer.a_start :][: a[slot].numel()])
            expected = adapter[layer.b_start :][: layer.columns * RANK].view(layer.columns, RANK)
            assert torch.equal(b[slot].T, expected)
