"""Speculation's kernels: drafts and verified rows equal the references to the bit, attention of drafted rows a float64 oracle."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import KVLayout
from pelton.attention.kv_cache import page_views
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.reference_speculation import ReferenceLookupDrafts, ReferenceVerify
from pelton.ops.speculation import LookupDraftsNeeds, LookupDraftsTensors, VerifyNeeds, VerifyTensors
from pelton_backends.triton.attention.decode_drafts import DraftParts, choose_splits, drafts_attention
from pelton_backends.triton.ops import speculation
from pelton_backends.triton.ops.speculation import TritonLookupDrafts, TritonVerify
from pelton_platforms.device.steps.batch_state import BatchState

ROWS, MAX_LEN = 6, 100


def random_state(seed: int, device: torch.device) -> BatchState:
    """Texts of three tokens, so that n-grams come again."""
    state = BatchState(
        max_num_seqs=ROWS, max_model_len=MAX_LEN, vocab_size=5, block_sizes=(4,), num_side_slots=0, device=device
    )
    chooser = random.Random(seed)
    for slot in range(ROWS):
        ids = [chooser.randrange(3) for _ in range(MAX_LEN)]
        state.token_ids[slot, :MAX_LEN] = torch.tensor(ids, dtype=torch.int32)
        state.num_computed_tokens[slot] = chooser.choice([0, 1, 2, 7, 30, MAX_LEN - 3, MAX_LEN - 1])
    return state


@pytest.mark.parametrize("num_drafts, longest, shortest", [(3, 5, 3), (1, 1, 1), (5, 3, 2)])
def test_drafts_are_the_reference_s(device, monkeypatch, num_drafts, longest, shortest) -> None:
    monkeypatch.setattr(speculation, "_TEXT_BLOCK", 16)  # several blocks of text
    needs = LookupDraftsNeeds(num_drafts=num_drafts, longest=longest, shortest=shortest)
    assert TritonLookupDrafts.unsupported(needs) == []
    num_drafted = 0
    for seed in range(6):
        found = []
        for op in (ReferenceLookupDrafts, TritonLookupDrafts):
            state = random_state(seed, device)
            slots = torch.tensor([3, 0, 5, state.padding_slot, 1], device=device)
            num_draft = torch.tensor([num_drafts, 1, num_drafts, 0, 0], device=device)
            num_found = torch.full((5,), -1, device=device)
            op.bind(needs, LookupDraftsTensors(state))(slots, num_draft, num_found)
            found.append((num_found.tolist(), state.token_ids[:, :MAX_LEN].tolist()))
        assert found[0] == found[1]
        num_drafted += sum(found[0][0])
    assert num_drafted > 0


@pytest.mark.parametrize("num_drafts", [1, 3, 5])
def test_verified_rows_are_the_reference_s(device, num_drafts) -> None:
    needs, chooser, accepted = VerifyNeeds(num_drafts=num_drafts), random.Random(num_drafts), set()
    assert TritonVerify.unsupported(needs) == []
    for seed in range(8):
        slots = [2, 0, ROWS, 4, 5]
        num_draft = [chooser.randrange(num_drafts + 1) for _ in slots[:2]] + [0, num_drafts, num_drafts]
        sampled = [(chooser.randrange(3), chooser.choice([0, 0, 0, 1])) for _ in range(5 * (1 + num_drafts))]
        found = []
        for op in (ReferenceVerify, TritonVerify):
            state = random_state(seed, device)
            result = torch.full((5, 4 + num_drafts), -7, dtype=torch.int32, device=device)
            op.bind(needs, VerifyTensors(state))(
                torch.tensor(slots, device=device), torch.tensor(num_draft, device=device),
                torch.tensor(sampled, dtype=torch.int32, device=device), result,
            )  # fmt: skip
            found.append((result.tolist(), state.token_ids[:, :MAX_LEN].tolist(), state.num_computed_tokens.tolist()))
        assert found[0] == found[1]
        assert found[0][0][2] == [0] * (4 + num_drafts), "padding"
        accepted |= {row[0] for row in found[0][0]}
    assert {0, 1} <= accepted


CASES = [
    SimpleNamespace(dtype="float32", heads=4, kv_heads=2, dim=64, window=None, cap=None, tokens=4, splits=None),
    SimpleNamespace(dtype="float32", heads=4, kv_heads=1, dim=32, window=20, cap=None, tokens=3, splits=None),
    SimpleNamespace(dtype="float32", heads=2, kv_heads=2, dim=80, window=None, cap=20.0, tokens=6, splits=1),
    SimpleNamespace(dtype="bfloat16", heads=8, kv_heads=2, dim=64, window=None, cap=None, tokens=4, splits=None),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.window}-{case.cap}-{case.tokens}")
def test_attention_of_drafted_rows_equals_the_oracle(device, monkeypatch, case) -> None:
    """Rows of one token, of some drafts and of all, padding; NaN wherever nothing may be read."""
    if case.splits:
        monkeypatch.setattr("pelton_backends.triton.attention.decode_drafts._MOST_SPLITS", case.splits)
    dtype, size, generator = getattr(torch, case.dtype), 16, torch.Generator().manual_seed(3)
    lengths, counts = [300, 1, 33, 0, 90], [case.tokens, 1, min(2, case.tokens), 0, case.tokens]
    spec = FullAttentionSpec(block_size=size, num_kv_heads=case.kv_heads, head_dim=case.dim, dtype=case.dtype)
    num_blocks = sum(-(-length // size) for length in lengths) + 2
    memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8, device=device)
    k_cache, v_cache = page_views(memory, num_blocks, spec, KVLayout(heads_first=True))
    k_cache.fill_(float("nan"))
    v_cache.fill_(float("nan"))
    table = torch.zeros(len(lengths), max(lengths) // size + 3, dtype=torch.int32, device=device)
    total = sum(counts) + 3  # padding tokens
    query = torch.randn(total, case.heads, case.dim, generator=generator).to(dtype).to(device)
    output = torch.full_like(query, float("nan"))
    expected, next_block, first = [], 1, 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        blocks = -(-length // size)
        table[row, :blocks] = torch.arange(next_block, next_block + blocks)
        keys, values = (torch.randn(length, case.kv_heads, case.dim, generator=generator).to(dtype) for _ in range(2))
        seen_from = max(length - count + 1 - case.window, 0) if case.window else 0
        for token in range(seen_from, length):
            place = table[row, token // size].long(), token % size
            k_cache[place], v_cache[place] = keys[token].to(device), values[token].to(device)
        for index in range(count):
            position = length - count + index
            start = max(position + 1 - case.window, 0) if case.window else 0
            own = query[first + index].cpu().double().view(case.kv_heads, -1, case.dim)
            logits = torch.einsum("hgd,thd->hgt", own, keys[start : position + 1].double()) * case.dim**-0.5
            if case.cap:
                logits = case.cap * torch.tanh(logits / case.cap)
            mixed = torch.einsum("hgt,thd->hgd", logits.softmax(-1), values[start : position + 1].double())
            expected.append(mixed.reshape(case.heads, case.dim))
        next_block, first = next_block + blocks, first + count
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
    parts = DraftParts.allocate(
        device, max_rows=len(lengths), num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.dim,
        num_tokens=case.tokens,
    )  # fmt: skip
    parts.sums.fill_(float("nan"))
    for _ in range(2):  # counters are zero again
        output.fill_(float("nan"))
        drafts_attention(
            query, k_cache, v_cache, output, starts, torch.tensor(lengths, dtype=torch.int32, device=device), table, parts,
            num_rows=len(lengths), num_tokens=case.tokens, max_seq_len=512, scale=case.dim**-0.5,
            sliding_window=case.window, soft_cap=case.cap,
        )  # fmt: skip
        tolerance = 2e-5 if case.dtype == "float32" else 6e-2
        torch.testing.assert_close(
            output[: sum(counts)].cpu().double(), torch.stack(expected), atol=tolerance, rtol=tolerance
        )
        assert output[sum(counts) :].isnan().all(), "padding is left as it is"


def test_parts_fit_into_their_places() -> None:
    for num_pairs in (1, 8, 64, 256, 1000, 4096):
        splits = choose_splits(num_pairs, 40_960, 2112)
        assert splits == 1 or splits * num_pairs <= 2112
    assert choose_splits(8, 256, 2112) == 4 and choose_splits(8, 131_072, 2112) == 64
