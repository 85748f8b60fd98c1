"""Products that add adapters themselves, in Triton's interpreter or on a GPU; those for Hopper: tests/gpu/test_lora_gpu.py."""

from __future__ import annotations

import pytest
import torch
from pelton_adapted import CASES, TOLERANCE, AdaptedCase, check_adapted

from pelton.lora.rows import SPAN
from pelton_backends.triton.ops.lora import gemv as lora_gemv
from pelton_backends.triton.ops.lora import hopper
from pelton_backends.triton.ops.lora import shrink as lora_shrink
from pelton_backends.triton.ops.lora.linear import sort_rows
from pelton_platforms.device.adapter_rows import AdapterRows

INTERPRETED_BFLOAT16 = 0.1  # the interpreter cuts bits off instead of rounding


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_near_merged_weights(name, dtype, device):
    slots, options = CASES[name]
    is_cut = dtype is torch.bfloat16 and torch.device(device).type == "cpu"
    case = AdaptedCase(slots, dtype=dtype, device=device, **options)
    tolerance = INTERPRETED_BFLOAT16 if is_cut else TOLERANCE[dtype]
    for family in ("gemv", "many"):
        check_adapted(case, family, tolerance)


def test_slots_of_a_span_are_listed_once(device):
    slots = [3, -1, 3, 0] * 50 + [2] * 100 + [-1] * 300
    rows = AdapterRows(max_num_tokens=len(slots), num_slots=4, device=torch.device(device), has_tiles=True)
    rows.sort = sort_rows
    rows.place(torch.tensor(slots, device=device))
    listed, counts = rows.span_slots.view(-1, SPAN).tolist(), rows.num_span_slots.tolist()
    assert [span[:count] for span, count in zip(listed, counts, strict=True)] == [[3, 0], [3, 0, 2], [], []]


@pytest.mark.parametrize("count", [17, 64])
def test_shares_of_many_rows(count, device):
    """A x of tiles of 16 rows, as the products for Hopper read it."""
    slots = [index % 4 - 1 for index in range(count)]
    case = AdaptedCase(slots, 300, (64, 16), dtype=torch.float32, device=device)
    low = lora_shrink.Shrink(case.needs.adapter, case.tensors.adapter)(case.inputs[0])
    found = low.sums.view(count, low.splits, 2 * 16).sum(1)
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected = case.tensors.adapter.a[slot] @ case.inputs[0][row]
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_what_is_left_to_the_composed_product(device):
    case = AdaptedCase([0], 64, (16, 16, 16, 16), dtype=torch.float32, device=device, rank=128, norm=True)
    reasons = lora_gemv.LoraGemvAddNormLinear.unsupported(case.needs)
    assert reasons == ["rank 128, at most 64", "4 parts, at most 3"]


@pytest.mark.parametrize(
    ("num_tokens", "size", "rank"),
    [(1, 4096, 16), (1, 14336, 64), (1, 64, 16), (32, 4096, 16), (32, 14336, 64), (64, 576, 32)],
)
def test_shares_cover_all_columns(num_tokens, size, rank):
    splits, steps, warps, columns, rows = lora_shrink.sizes_of(num_tokens, size, rank)
    assert (splits - 1) * steps * warps * columns < size <= splits * steps * warps * columns
    assert columns >= 16
    assert rows == (1 if num_tokens == 1 else 16)


@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "in_features", "shares"),
    [
        (32, 8, 4096, 8),
        (2, 8, 4096, 8),
        (32, 8, 2048, 4),
        (32, 8, 8192, 4),
        (32, 16, 4096, 4),
        (64, 8, 4096, 4),
        (64, 64, 4096, 4),
    ],
)
def test_few_adapters_of_gate_and_up_are_cut_into_more_shares(num_tokens, num_slots, in_features, shares):
    tiling = hopper.choose_adapted_tiling(num_tokens, 28672, in_features, 16, 2, num_slots, is_gated=True)
    assert tiling.shares == shares
    if shares == 8:
        assert in_features <= tiling.columns * tiling.stages * shares, "a share comes in before the wait"


@pytest.mark.parametrize("num_sms", [78, 132])
@pytest.mark.parametrize(("num_tokens", "num_slots", "rank"), [(32, 8, 16), (64, 64, 16), (17, 3, 64), (64, 20, 32)])
@pytest.mark.parametrize(("out_features", "in_features"), [(6144, 4096), (4096, 14336), (512, 9216), (1024, 1024)])
def test_programs_that_wait_for_one_another_run_at_once(
    out_features, in_features, num_tokens, num_slots, rank, num_sms
):
    tiling = hopper.choose_adapted_tiling(num_tokens, out_features, in_features, rank, 1, num_slots, is_gated=False)
    num_blocks = -(-num_tokens // tiling.tokens)
    num_programs = -(-out_features // tiling.rows) * tiling.split * num_blocks
    num_low = hopper.low_tiles(num_tokens, num_slots, rank, tiling.rows) * num_blocks * tiling.shares
    shares = hopper.shared_shares(num_programs, num_low, tiling.shares, num_blocks, num_sms)
    assert shares is None or (num_programs <= num_sms and 1 <= shares <= hopper.MOST_SHARES)
    if (num_tokens, in_features, num_sms) == (64, 14336, 132):
        assert shares is not None, "the weight leaves four multiprocessors"
    if (num_tokens, out_features, num_sms) == (32, 6144, 132):
        assert shares is None, "all programs run at once"
