"""Rows sorted by adapter into tiles."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pelton.lora.rows import tile_rows
from pelton_platforms.device.adapter_rows import AdapterRows


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.data())
def test_every_row_is_in_one_tile_of_its_slot(num_slots, data):
    sizes = st.sampled_from([1, 2, 15, 16, 17, 40, 511, 512, 600])
    count = data.draw(sizes)
    slots = data.draw(st.lists(st.integers(-1, num_slots - 1), min_size=count, max_size=count))
    rows = AdapterRows(max_num_tokens=600, num_slots=num_slots, device=torch.device("cpu"), has_tiles=True)
    rows.place(torch.tensor([num_slots - 1] * 600))  # what an earlier step has left
    rows.place(torch.tensor(slots))
    seen: list[int] = []
    for tile in range(rows.num_tiles(count)):
        first, end = int(rows.tile_first[tile]), int(rows.tile_end[tile])
        assert end - first <= tile_rows(count)
        tokens = rows.order[first:end].tolist() if end > first else []
        assert all(slots[token] == int(rows.tile_slot[tile]) for token in tokens)
        assert all(int(rows.token_tile[token]) == tile for token in tokens)
        seen += tokens
    assert sorted(seen) == list(range(count))
    used = rows.tile_slot[: rows.num_tiles(count)] >= 0
    assert int(rows.num_used[0]) == int(used.sum())
    assert bool(used[: int(rows.num_used[0])].all())
    assert rows.token_slots[:count].tolist() == slots
