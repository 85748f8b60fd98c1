"""Decode behind a shared prefix against float64, whatever the number of splits."""

import pytest
import torch
from pelton_paged_case import PagedCase

ODD = [(1, 96), (1, 97), (1, 130), (1, 111), (1, 300)]


def run(case, prefix_len, **changes):
    from pelton_backends.triton.attention.cascade import cascade_attention
    from pelton_backends.triton.runtime import has_pdl

    arguments = {
        "num_rows": len(case.seq_lens), "prefix_len": prefix_len, "max_seq_len": case.max_seq_len, "scale": case.scale,
        "soft_cap": case.soft_cap, "sinks": case.sinks, "alibi_slopes": case.alibi_slopes, "pdl": has_pdl(case.device),
        **changes,
    }  # fmt: skip
    return cascade_attention(
        case.query, case.k_cache, case.v_cache, case.output, case.seq_lens, case.block_table, **arguments
    )


@pytest.mark.parametrize("prefix_len", [16, 48, 64, 96])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_of_odd_lengths(device, prefix_len, padding):
    case = PagedCase(device, ODD, shared=prefix_len, padding=padding)
    case.check(run(case, prefix_len))


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "bfloat16"},
        {"dtype": "float16", "heads_first": True},
        {"kv_dtype": "fp8_e4m3", "dtype": "bfloat16"},
        {"kv_dtype": "fp8_e5m2", "dtype": "float16"},
        {"heads": 7, "kv_heads": 1},
        {"heads": 3, "kv_heads": 3, "head_dim": 80},
        {"block_size": 32},
        {"block_size": 48},
        {"soft_cap": 2.0},
        {"sinks": True},
        {"alibi": True},
        {"alibi": True, "sinks": True, "soft_cap": 3.0},
    ],
    ids=str,
)
def test_features_and_dtypes(device, change):
    case = PagedCase(device, ODD, shared=96, **change)
    case.check(run(case, 96))


@pytest.mark.parametrize("junk", [torch.inf, 3e38])
def test_no_junk_but_nan_matters_either(device, junk):
    case = PagedCase(device, ODD, shared=48, padding=1, junk=junk)
    case.check(run(case, 48))


@pytest.mark.parametrize("place", [5, 110])
def test_a_key_that_is_nan_is_in_the_result_of_all_who_read_it(device, place):
    """In the prefix all do; row 2 alone reads the other."""
    case = PagedCase(device, ODD, shared=96)
    slot = int(case.slots[2][place])
    case.k_cache[slot // 16, slot % 16] = torch.nan
    found = run(case, 96).isnan().flatten(1)
    assert torch.equal(found.any(1), found.all(1))
    assert found.all(1).tolist() == [place < 96 or row == 2 for row in range(len(ODD))]


@pytest.mark.parametrize("num_rows", [1, 2, 33])
def test_numbers_of_rows(device, num_rows):
    """One tile of queries or several, and few rows, whose rest is split."""
    case = PagedCase(device, [(1, 64 + 37 * i % 200) for i in range(num_rows)], shared=64, heads=2, kv_heads=1)
    case.check(run(case, 64))


def test_a_loose_bound_of_the_lengths_is_no_matter(device):
    """More splits than a row has keys: their parts are empty."""
    case = PagedCase(device, ODD[:2], shared=32)
    case.check(run(case, 32, max_seq_len=40_000))


@pytest.mark.parametrize("prefix_len", [0, 16, 96])
def test_one_launch_shape_serves_every_prefix(device, prefix_len):
    """As captured: the length is on the device, and nothing that the host chooses depends on it."""
    case = PagedCase(device, ODD, shared=prefix_len, padding=2)
    on_device = torch.tensor([prefix_len], dtype=torch.int32, device=device)
    case.check(run(case, on_device, max_seq_len=40_000))


def test_a_prefix_ends_with_a_block(device):
    case = PagedCase(device, ODD, shared=32)
    with pytest.raises(AssertionError, match="prefix_len is 24; expected a multiple of 16"):
        run(case, 24)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "heads": 16, "kv_heads": 4},
        {"dtype": "float16", "head_dim": 256, "soft_cap": 30.0},
        {"dtype": "bfloat16", "head_dim": 80, "kv_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16", "block_size": 64, "heads_first": True, "sinks": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_rows, prefix_len", [(8, 256), (129, 2048)])
def test_on_the_device(device, change, num_rows, prefix_len):
    rows = [(1, prefix_len + 61 * i % 700) for i in range(num_rows)]
    arguments = {"heads": 8, "kv_heads": 2, "head_dim": 128, "padding": 3, **change}
    case = PagedCase(device, rows, shared=prefix_len, **arguments)
    case.check(run(case, prefix_len))
    case.output.fill_(torch.nan)
    case.check(run(case, torch.tensor([prefix_len], dtype=torch.int32, device=device), max_seq_len=40_000))
