"""Paged prefill against float64: every feature, odd lengths, scattered blocks, poisoned neighbours."""

import pytest
import torch
from pelton_paged_case import PagedCase

MIXED = [(1, 0), (1, 40), (2, 0), (17, 16), (5, 30)]


def run(case, **changes):
    from pelton_backends.triton.attention.prefill import prefill_attention
    from pelton_backends.triton.runtime import has_pdl

    arguments = {
        "num_reqs": len(case.seq_lens), "max_query_len": max(new for new, _ in case.rows),
        "max_seq_len": case.max_seq_len, "scale": case.scale, "causal": case.causal, "sliding_window": case.window,
        "soft_cap": case.soft_cap, "sinks": case.sinks, "alibi_slopes": case.alibi_slopes,
        "pdl": has_pdl(case.device), **changes,
    }  # fmt: skip
    return prefill_attention(
        case.query, case.k_cache, case.v_cache, case.output, case.query_start_loc, case.seq_lens, case.block_table,
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize("before", [0, 1, 17, 100])
@pytest.mark.parametrize("new", [1, 2, 15, 16, 17, 63, 65, 130])
def test_one_row(device, new, before):
    case = PagedCase(device, [(new, before)], heads=1, kv_heads=1, head_dim=16)
    case.check(run(case))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"padding": 3},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "heads_first": True},
        {"kv_dtype": "bfloat16"},
        {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"},
        {"dtype": "float16", "kv_dtype": "fp8_e5m2"},
        {"heads": 3, "kv_heads": 1},
        {"heads": 7, "kv_heads": 1, "head_dim": 64},
        {"heads": 40, "kv_heads": 1, "head_dim": 16},
        {"heads": 2, "kv_heads": 2, "head_dim": 80},
        {"head_dim": 24},
        {"head_dim": 192, "heads": 2, "kv_heads": 1},
        {"head_dim": 256, "heads": 1, "kv_heads": 1, "dtype": "bfloat16"},
        {"block_size": 64},
        {"block_size": 48},
        {"block_size": 1},
        {"block_size": 7, "heads_first": True},
        {"window": 1},
        {"window": 9},
        {"window": 16, "padding": 1},
        {"window": 33, "dtype": "float16"},
        {"window": 4096},
        {"soft_cap": 2.0},
        {"soft_cap": 2.0, "window": 9},
        {"sinks": True},
        {"sinks": True, "window": 9, "dtype": "bfloat16"},
        {"alibi": True},
        {"alibi": True, "soft_cap": 5.0, "sinks": True},
        {"causal": False},
        {"causal": False, "block_size": 64, "padding": 2},
    ],
    ids=str,
)
def test_several_rows(device, change):
    case = PagedCase(device, MIXED, **change)
    case.check(run(case))


@pytest.mark.parametrize("junk", [torch.inf, 3e38])
@pytest.mark.parametrize(
    "change", [{"padding": 1}, {"window": 9, "soft_cap": 2.0}, {"dtype": "bfloat16", "sinks": True}], ids=str
)
def test_no_junk_but_nan_matters_either(device, change, junk):
    case = PagedCase(device, MIXED, junk=junk, **change)
    case.check(run(case))


def test_a_window_that_starts_inside_a_long_row(device):
    """Blocks before the window point at the null block; some key blocks are masked at both ends, some at none."""
    case = PagedCase(device, [(70, 0), (9, 190), (1, 77)], window=75, heads=2, kv_heads=1)
    case.check(run(case))


def test_single_tokens_are_left_to_the_decode_kernel(device):
    case = PagedCase(device, [(1, 3), (1, 20), (4, 0), (1, 9)], padding=1)
    case.check(run(case, skip_single=True), only=[2])


def test_rows_before_the_first_are_left_out(device):
    case = PagedCase(device, [(1, 3), (2, 20), (40, 0), (1, 9)], padding=2)
    case.check(run(case, first_row=2), only=[2, 3])


def test_every_row_is_found_among_many(device):
    rows = [(1 + 7 * (i % 3), 3 * i % 11) for i in range(37)]
    case = PagedCase(device, rows, heads=1, kv_heads=1, head_dim=16)
    case.check(run(case))


def test_no_host_reads_of_lengths(device):
    """One launch serves other lengths of the same shapes: what a captured graph needs."""
    case = PagedCase(device, [(3, 30), (9, 2)], padding=1)
    case.check(run(case, max_query_len=9, max_seq_len=4096))


LARGE = [(1, 0), (1, 3000), (2, 1), (130, 0), (63, 1000), (1025, 17), (300, 4096)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "bfloat16"},
        {"dtype": "float16", "head_dim": 64},
        {"dtype": "bfloat16", "heads": 16, "kv_heads": 2},
        {"dtype": "bfloat16", "heads": 7, "kv_heads": 1},
        {"dtype": "bfloat16", "head_dim": 80},
        {"dtype": "bfloat16", "head_dim": 192},
        {"dtype": "bfloat16", "head_dim": 256},
        {"dtype": "float16", "block_size": 256, "heads_first": True},
        {"dtype": "bfloat16", "kv_dtype": "fp8_e4m3"},
        {"dtype": "bfloat16", "kv_dtype": "fp8_e5m2", "head_dim": 64},
        {"dtype": "bfloat16", "window": 512},
        {"dtype": "float16", "window": 100, "soft_cap": 30.0, "sinks": True},
        {"dtype": "bfloat16", "alibi": True},
        {"dtype": "bfloat16", "causal": False},
        {"kv_dtype": "float16", "head_dim": 256},
    ],
    ids=str,
)
def test_on_the_device(device, change):
    case = PagedCase(device, LARGE, **{"heads": 8, "kv_heads": 2, "head_dim": 128, "padding": 5, **change})
    case.check(run(case))


@pytest.mark.gpu
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dtype": "float16", "head_dim": 64},
        {"heads": 3, "kv_heads": 3},
        {"heads": 14, "kv_heads": 2},
        {"heads": 64, "kv_heads": 1, "head_dim": 64},
        {"block_size": 48},
        {"block_size": 128},
        {"window": 1},
        {"window": 200},
        {"window": 1000, "sinks": True, "head_dim": 64},
        {"sinks": True},
        {"causal": False},
        {"causal": False, "window": 300},
    ],
    ids=str,
)
def test_the_kernel_for_hopper(device, change, heads_first):
    from pelton_backends.triton.attention.prefill import _hopper

    arguments = {"dtype": "bfloat16", "heads": 8, "kv_heads": 2, "head_dim": 128, "padding": 2, **change}
    case = PagedCase(device, [*LARGE, (129, 127), (128, 128)], heads_first=heads_first, **arguments)
    hopper = _hopper(device)
    if hopper is None:
        pytest.skip("compute capability 9.0 only")
    assert hopper.serves(case.k_cache, case.v_cache, num_heads=arguments["heads"], dtype=case.query.dtype)
    case.check(run(case, max_query_len=1025))
    case.output.fill_(torch.nan)
    case.check(run(case, max_query_len=1025, skip_single=True), only=[2, 3, 4, 5, 6, 7, 8])


@pytest.mark.gpu
@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 3e38])
@pytest.mark.parametrize("head_dim, sinks", [(64, False), (128, True)])
@pytest.mark.parametrize("window", [None, 1, 9, 100, 128, 129])
def test_no_junk_reaches_the_kernel_for_hopper(device, window, head_dim, sinks, junk):
    """Rows that end on every side of a page, of a tile and of a block of queries; keys shared by programs, or not."""
    ends = [(new, before) for new in (2, 16, 65, 130) for before in (0, 14, 111, 112, 127, 300)]
    for rows in (ends, [(17, 1100), (64, 1983)]):
        case = PagedCase(
            device, rows, dtype="bfloat16", heads=8, kv_heads=2, head_dim=head_dim, window=window, sinks=sinks, junk=junk,
            padding=1,
        )  # fmt: skip
        case.check(run(case, max_query_len=130))


@pytest.mark.gpu
def test_a_bound_kernel_for_hopper_serves_steps_of_every_kind(device):
    """One after the other: keys split and not, rows left out and not, longer and shorter bounds."""
    from pelton_backends.triton.attention.prefill import bind_hopper
    from pelton_backends.triton.runtime import has_pdl

    case = PagedCase(
        device, [(1, 50), (129, 4000), (5, 100)], dtype="bfloat16", heads=8, kv_heads=2, head_dim=128, padding=2
    )
    bound = bind_hopper(
        case.k_cache, case.v_cache, num_heads=8, dtype=case.query.dtype, scale=case.scale, sliding_window=None, soft_cap=None,
        sinks=None, alibi_slopes=None, pdl=has_pdl(device),
    )  # fmt: skip
    if bound is None:
        pytest.skip("compute capability 9.0 only")
    steps = [(0, case.max_seq_len, None), (0, 1, None), (2, case.max_seq_len, [2]), (1, 1, [1, 2])]
    for first_row, max_seq_len, only in [*steps, *reversed(steps)]:
        case.output.fill_(torch.nan)
        bound(
            case.query, case.output, case.query_start_loc, case.seq_lens, case.block_table, num_reqs=len(case.seq_lens),
            first_row=first_row, max_seq_len=max_seq_len, causal=True, skip_single=False,
        )  # fmt: skip
        case.check(case.output, **({} if only is None else {"only": only}))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [[(1, 50), (129, 4000), (5, 100)], [(3, 2000)], [(40, 3000), (1, 0)]], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 700},
        {"window": 50, "sinks": True, "head_dim": 64},
        {"sinks": True},
        {"causal": False},
        {"heads": 7, "kv_heads": 1, "dtype": "float16"},
    ],
    ids=str,
)
def test_few_rows_behind_a_long_context_are_split(device, change, rows):
    arguments = {"dtype": "bfloat16", "heads": 8, "kv_heads": 2, "head_dim": 128, "padding": 2, **change}
    case = PagedCase(device, rows, **arguments)
    case.check(run(case))
    case.output.fill_(torch.nan)
    case.check(run(case, first_row=len(rows) - 1), only=[len(rows) - 1])


@pytest.mark.parametrize(
    "num_programs, max_seq_len, expected",
    [(24, 8000, 5), (24, 1023, 1), (24, 1024, 2), (4, 100_000, 16), (132, 8000, 1), (67, 8000, 1), (400, 8000, 1)],
)
def test_splits_fill_the_multiprocessors_with_enough_keys_each(num_programs, max_seq_len, expected):
    from pelton_backends.triton.attention.prefill_hopper import choose_splits

    assert choose_splits(num_programs, max_seq_len, 132) == expected
