"""Encoder attention in C against softmax written out in float64, for rows of any lengths, on the rows of a QKV product."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds
from pelton.attention.metadata import CommonMetadata
from pelton_backends.native.encoder import NativeEncoderBackend

pytestmark = pytest.mark.covering(3)


def needs(num_heads=3, num_kv_heads=3, head_dim=8, **changes):
    given = {"block_size": 16, "dtype": "float32", "attention_type": "encoder"}
    return AttentionNeeds(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, **given | changes)


def attend(lengths, heads, kv_heads, head_dim, *, split=True, num_padding=0):
    """(what the backend gives, query, key, value); split: views of one product's rows."""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    qkv = torch.randn(total + num_padding, heads + 2 * kv_heads, head_dim)
    query, key, value = qkv.split([heads, kv_heads, kv_heads], dim=1)
    if not split:
        query, key, value = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value))
    backend = NativeEncoderBackend(
        needs(heads, kv_heads, head_dim), torch.device("cpu"), max_num_seqs=16, max_num_tokens=1024, max_model_len=512
    )
    step = backend.build(CommonMetadata(
        query_start_loc=starts, seq_lens=starts.diff(), block_table=torch.empty(len(lengths), 0), slot_mapping=torch.empty(0),
        num_reqs=len(lengths), num_tokens=total + num_padding, num_actual_tokens=total, num_decode_rows=0, num_decode_tokens=0,
        max_query_len=max(lengths), max_seq_len=max(lengths),
    ))  # fmt: skip
    layer = SimpleNamespace(sliding_window=None, scale=0.3, num_heads=heads, num_kv_heads=kv_heads)
    output = torch.full((total + num_padding, heads, head_dim), torch.nan)
    return backend.attend(layer, query, key, value, step, output)[:total], query, key, value


def expected(lengths, query, key, value):
    parts, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1).double() for x in (query, key, value))
        k, v = (x.repeat_interleave(len(q) // len(x), dim=0) for x in (k, v))
        parts.append(((q @ k.transpose(-1, -2) * 0.3).softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts).float()


@pytest.mark.parametrize(
    "heads, kv_heads, head_dim", [(3, 3, 32), (2, 2, 64), (3, 3, 8), (2, 2, 20), (4, 2, 16), (6, 2, 5)]
)
@pytest.mark.parametrize("lengths", [
    [5], [1, 1, 1], [7, 7, 7], [3, 19, 4, 19, 1, 18, 40], [4, 9, 0, 0], [24, 25, 32, 33, 48, 49], [63, 64, 65], [200, 2, 500],
], ids=str)  # fmt: skip
def test_equals_softmax_within_each_row(isa, heads, kv_heads, head_dim, lengths):
    found, *inputs = attend(lengths, heads, kv_heads, head_dim, num_padding=3)
    torch.testing.assert_close(found, expected(lengths, *inputs), atol=1e-5, rtol=1e-5)


def test_heads_that_do_not_lie_behind_each_other(isa):
    found, *inputs = attend([3, 40, 7], 3, 3, 32, split=False)
    torch.testing.assert_close(found, expected([3, 40, 7], *inputs), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_the_others(isa):
    torch.manual_seed(0)
    together, *_ = attend([33, 70, 5], 3, 3, 32)
    torch.manual_seed(0)
    alone, *_ = attend([33], 3, 3, 32)  # the first numbers are the same
    assert torch.equal(together[:33], alone)


@pytest.mark.parametrize("changes, reason", [
    ({"dtype": "bfloat16"}, "dtype bfloat16, only float32"),
    ({"attention_type": "decoder"}, "attention type decoder, only encoder"),
    ({"num_kv_heads": 2}, "3 heads are not a multiple of 2 kv heads"),
])  # fmt: skip
def test_what_it_refuses(changes, reason):
    assert NativeEncoderBackend.unsupported(needs(**changes)) == [reason]
    assert NativeEncoderBackend.unsupported(needs()) == []
