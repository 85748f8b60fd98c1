"""Attention in both directions against softmax written out, for rows of any lengths, with and without a window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import AttentionNeeds
from pelton.attention.metadata import CommonMetadata
from pelton_backends.sdpa.encoder import SDPAEncoderBackend, padded_rows, plan_rows

N, D = 3, 8
NEEDS = AttentionNeeds(
    head_dim=D, num_heads=N, num_kv_heads=N, block_size=16, dtype="float32", attention_type="encoder"
)
LENGTHS = {
    "one": [5],
    "single-tokens": [1, 1, 1],
    "even": [7, 7, 7],
    "mixed": [3, 19, 4, 19, 1, 18, 40],
    "even-but-apart": [6, 2, 6, 2, 6],
    "empty-rows-of-padding": [4, 9, 0, 0],
}


def attend(lengths, window, *, padded=False, num_padding=0):
    """(what the backend gives, query, key, value)"""
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    generator = torch.Generator().manual_seed(len(lengths))
    query, key, value = torch.randn(3, total + num_padding, N, D, generator=generator)
    backend = SDPAEncoderBackend(NEEDS, torch.device("cpu"), max_num_seqs=8, max_num_tokens=256, max_model_len=64)
    if padded:
        plan = [padded_rows(starts.long(), total, max(lengths))]
    else:
        plan = backend.build(CommonMetadata(
            query_start_loc=starts, seq_lens=starts.diff(), block_table=torch.empty(len(lengths), 0), slot_mapping=torch.empty(0),
            num_reqs=len(lengths), num_tokens=total + num_padding, num_actual_tokens=total, num_decode_rows=0, num_decode_tokens=0,
            max_query_len=max(lengths), max_seq_len=max(lengths),
        ))  # fmt: skip
    layer = SimpleNamespace(sliding_window=window, scale=0.3, num_heads=N, num_kv_heads=N)
    output = torch.full_like(query, torch.nan)
    return backend.attend(layer, query, key, value, plan, output)[:total], query, key, value


def reference(lengths, window, query, key, value):
    parts, start = [], 0
    for length in lengths:
        q, k, v = (x[start : start + length].transpose(0, 1) for x in (query, key, value))
        scores = q @ k.transpose(-1, -2) * 0.3
        place = torch.arange(length)
        if window is not None:
            scores = scores.masked_fill((place[:, None] - place).abs() > window, float("-inf"))
        parts.append((scores.softmax(-1) @ v).transpose(0, 1))
        start += length
    return torch.cat(parts)


@pytest.mark.parametrize("padded", [False, True], ids=["by-length", "padded"])
@pytest.mark.parametrize("window", [None, 0, 3, 100])
@pytest.mark.parametrize("lengths", list(LENGTHS.values()), ids=list(LENGTHS))
def test_equals_softmax_within_each_row(lengths, window, padded):
    found, *inputs = attend(lengths, window, padded=padded, num_padding=3)
    torch.testing.assert_close(found, reference(lengths, window, *inputs), atol=1e-5, rtol=1e-5)


def test_rows_of_about_one_length_are_one_call():
    def calls(*lengths):
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return sorted((rows.num_rows, rows.longest) for rows in plan_rows(starts))

    assert calls(8, 8, 8) == [(3, 8)]
    assert calls(100, 99, 98, 2, 2) == [(2, 2), (3, 100)]
    assert calls(64, 32) == [(1, 32), (1, 64)]


def test_it_is_for_encoders_only():
    assert SDPAEncoderBackend.unsupported(NEEDS) == []
    decoder = AttentionNeeds(head_dim=D, num_heads=N, num_kv_heads=N, block_size=16, dtype="float32")
    assert SDPAEncoderBackend.unsupported(decoder) == ["attention type decoder, only encoder"]
