"""Speculation's kernels: drafts and verified rows equal the references to the bit, attention of drafted rows a float64 oracle."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from pelton.attention.interface import KVLayout
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import (
    NormSpec,
    PrepareInputsNeeds,
    PrepareInputsTensors,
    QkNormRopeWriteKvNeeds,
    QkNormRopeWriteKvTensors,
)
from pelton.ops.speculation import LookupDraftsNeeds, LookupDraftsTensors, VerifyNeeds, VerifyTensors
from pelton.testing.paged_rows import page_views
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_backends.reference.ops import ReferenceQkNormRopeWriteKv
from pelton_backends.reference.speculation import ReferenceLookupDrafts, ReferenceVerify
from pelton_backends.triton.attention.decode import NewTokens, NormRope
from pelton_backends.triton.attention.decode_drafts import DraftParts, drafts_attention, drafts_shape, span
from pelton_backends.triton.attention.decode_shares import LaunchShape, deal_rows
from pelton_backends.triton.ops import drafted_inputs, inputs
from pelton_backends.triton.ops.sampling import speculation
from pelton_backends.triton.ops.sampling.best import leave_best
from pelton_backends.triton.ops.sampling.speculation import TritonLookupDrafts, TritonVerify
from pelton_backends.triton.runtime import num_sms
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import ReferencePrepareInputs

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
    monkeypatch.setattr(speculation, "TEXT_BLOCK", 16)  # several blocks of text
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


@pytest.mark.parametrize("num_drafts", [3, 15, 16])
@pytest.mark.parametrize("are_same", [True, False])
def test_inputs_look_drafts_up_as_the_reference_does(device, monkeypatch, num_drafts, are_same) -> None:
    """In one launch where a row with drafts is a row of the step; else, and where rows are long, in a launch of its own before."""
    monkeypatch.setattr(speculation, "TEXT_BLOCK", 16)
    needs = LookupDraftsNeeds(num_drafts=num_drafts, longest=4, shortest=2)
    width, num_drafted, launches = 1 + num_drafts, 0, []
    noted = inputs.launch
    for module in (drafted_inputs, inputs, speculation):
        monkeypatch.setattr(
            module, "launch", lambda *args, **options: (launches.append(args[0]), noted(*args, **options))
        )
    for seed in range(4):
        found = []
        for op, prepare in (
            (ReferenceLookupDrafts, ReferencePrepareInputs),
            (TritonLookupDrafts, inputs.TritonPrepareInputs),
        ):
            state = random_state(seed, device)
            state.num_computed_tokens.clamp_(max=MAX_LEN - width)
            table = state.block_tables[0]
            table[:ROWS] = torch.arange(ROWS * table.shape[1], device=device).view(ROWS, -1)
            buffers = InputBuffers(state, max_num_tokens=4 * width + 3)
            given = PrepareInputsNeeds(
                max_num_tokens=4 * width + 3, max_num_seqs=ROWS, block_sizes=(4,), max_model_len=MAX_LEN
            )
            bound = prepare.bind(given, PrepareInputsTensors(state, buffers))
            slots = torch.tensor([3, 0, 5, state.padding_slot], device=device)
            scheduled = torch.tensor([width, width, width, 0], device=device)
            num_draft = torch.tensor([num_drafts, 1, num_drafts, 0], device=device)
            num_found = torch.full((4,), -1, device=device)
            look_up = op.bind(needs, LookupDraftsTensors(state))
            too = getattr(bound, "look_up_too", None)
            if too is None or not too(look_up, slots if are_same else slots.clone(), num_draft, num_found):
                look_up(slots, num_draft, num_found)
            shape = StepShape(
                num_reqs=3, num_tokens=3 * width, num_decode_rows=0, max_query_len=width, max_seq_len=MAX_LEN, num_padded_reqs=4,
                num_padded_tokens=4 * width,
            )  # fmt: skip
            (common,) = bound(slots, scheduled, shape)
            written = buffers.input_ids, buffers.positions, common.slot_mapping, common.seq_lens, common.query_start_loc
            found.append(
                [num_found.tolist(), state.token_ids[:, :MAX_LEN].tolist(), *(one.tolist() for one in written)]
            )
        assert found[0] == found[1]
        num_drafted += sum(found[0][0])
    assert num_drafted > 0
    alone = speculation.lookup_kernel in launches
    assert alone == (not are_same or num_drafts > 15) and (drafted_inputs.drafted_rows_kernel in launches) != alone
    other = ReferenceLookupDrafts.bind(needs, LookupDraftsTensors(state))
    assert not bound.look_up_too(other, slots, num_draft, num_found), "another op's drafts"


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


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_rows_are_verified_by_the_best_tokens_that_came_with_their_logits(device, num_drafts) -> None:
    chooser, accepted = random.Random(num_drafts), set()
    for seed in range(8):
        state, other = random_state(seed, device), random_state(seed, device)
        slots = torch.tensor([2, 0, ROWS, 4, 5], device=device)
        num_draft = torch.tensor([chooser.randrange(num_drafts + 1), 1, 0, num_drafts, num_drafts], device=device)
        sampled = [(chooser.randrange(3), chooser.choice([0, 0, 0, 1])) for _ in range(5 * (1 + num_drafts))]
        keys = [(0x7F800000 if code else 0x3F800000) << 32 | (0x7FFFFFFF - token) for token, code in sampled]
        logits = torch.full((len(keys), 5), float("nan"), device=device)
        op = TritonVerify.bind(VerifyNeeds(num_drafts=num_drafts), VerifyTensors(state))
        results = [torch.full((5, 4 + num_drafts), -7, dtype=torch.int32, device=device) for _ in range(2)]
        assert not op.verify_greedy(slots, num_draft, logits, results[0]), "of these nothing is known"
        assert (results[0] == -7).all()
        best = torch.tensor(keys, device=device)
        assert op.verify_greedy(slots, num_draft, leave_best(logits, best), results[0])
        ReferenceVerify.bind(VerifyNeeds(num_drafts=num_drafts), VerifyTensors(other))(
            slots, num_draft, torch.tensor(sampled, dtype=torch.int32, device=device), results[1]
        )
        assert torch.equal(*results)
        assert torch.equal(state.token_ids[:, :MAX_LEN], other.token_ids[:, :MAX_LEN])
        assert torch.equal(state.num_computed_tokens, other.num_computed_tokens)
        accepted |= set(results[0][:, 0].tolist())
    assert {0, 1} <= accepted


FIXED = LaunchShape(4, 0, 32, 2, least=2)
SHAPES = {
    "fixed": FIXED,
    "alone": LaunchShape(1, 0, 32, 2, least=2),
    "dealt": LaunchShape(40, 0, 32, 2, is_dealt=True),
    "early": LaunchShape(3, 0, 16, 2, is_early=True),
    "many parts": LaunchShape(32, 0, 16, 2),
    "dealt early": LaunchShape(21, 0, 32, 2, is_early=True, is_dealt=True),
}
CASES = [
    SimpleNamespace(dtype="float32", heads=4, kv_heads=2, dim=64, window=None, cap=None, tokens=4, shape="fixed"),
    SimpleNamespace(dtype="float32", heads=4, kv_heads=1, dim=32, window=20, cap=None, tokens=3, shape="dealt"),
    SimpleNamespace(dtype="float32", heads=2, kv_heads=2, dim=80, window=None, cap=20.0, tokens=6, shape="alone"),
    SimpleNamespace(dtype="float32", heads=4, kv_heads=2, dim=32, window=None, cap=None, tokens=4, shape="many parts"),
    SimpleNamespace(dtype="bfloat16", heads=8, kv_heads=2, dim=64, window=None, cap=None, tokens=4, shape="dealt"),
]
LENGTHS = (300, 1, 33, 0, 90)


class DraftedRows:
    """Rows of one token, of some drafts and of all, padding; NaN wherever nothing may be read."""

    def __init__(self, case: SimpleNamespace, device: torch.device) -> None:
        self.case, self.device, size = case, device, 16
        self.dtype, self.generator = getattr(torch, case.dtype), torch.Generator().manual_seed(3)
        self.counts = [case.tokens, 1, min(2, case.tokens), 0, case.tokens]
        spec = FullAttentionSpec(block_size=size, num_kv_heads=case.kv_heads, head_dim=case.dim, dtype=case.dtype)
        num_blocks = sum(-(-length // size) for length in LENGTHS) + 2
        memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8, device=device)
        self.caches = page_views(memory, num_blocks, spec, KVLayout(heads_first=True))
        for cache in self.caches:
            cache.fill_(float("nan"))
        self.table = torch.zeros(len(LENGTHS), max(LENGTHS) // size + 3, dtype=torch.int32, device=device)
        self.places: list[tuple[torch.Tensor, int]] = []  # of the new tokens
        self.keys, self.values, next_block = [], [], 1
        for row, (length, count) in enumerate(zip(LENGTHS, self.counts, strict=True)):
            blocks = -(-length // size)
            self.table[row, :blocks] = torch.arange(next_block, next_block + blocks)
            next_block += blocks
            for rows, cache in zip((self.keys, self.values), self.caches, strict=True):
                rows.append(self.random(length, case.kv_heads, case.dim))
                for token in range(max(length - count + 1 - case.window, 0) if case.window else 0, length):
                    cache[self.table[row, token // size].long(), token % size] = rows[-1][token].to(device)
            self.places += [(self.table[row, t // size].long(), t % size) for t in range(length - count, length)]
        self.positions = [
            length - count + index for length, count in zip(LENGTHS, self.counts, strict=True) for index in range(count)
        ]
        self.starts = torch.tensor([0, *torch.tensor(self.counts).cumsum(0).tolist()], dtype=torch.int32, device=device)
        self.parts = DraftParts.allocate(
            device, max_rows=len(LENGTHS), num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.dim,
            num_tokens=case.tokens,
        )  # fmt: skip
        self.parts.sums.fill_(float("nan"))

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def attend(self, query: torch.Tensor, name: str, new: NewTokens | None = None) -> torch.Tensor:
        case, shape, lengths = self.case, SHAPES[name], torch.tensor(LENGTHS, dtype=torch.int32, device=self.device)
        output = torch.full((len(query), case.heads, case.dim), float("nan"), dtype=self.dtype, device=self.device)
        if shape.is_dealt:
            deal_rows(
                lengths, self.table, self.parts, shape, num_rows=len(LENGTHS), block_size=16,
                sliding_window=span(case.tokens, case.window), new_first=True,
            )  # fmt: skip
        drafts_attention(
            query, *self.caches, output, self.starts, lengths, self.table, self.parts, shape, num_rows=len(LENGTHS),
            num_tokens=case.tokens, scale=case.dim**-0.5, sliding_window=case.window, soft_cap=case.cap, new=new,
        )  # fmt: skip
        assert not self.parts.arrivals.any(), "counters are left at zero for the next launch"
        return output

    def expected(self, query: torch.Tensor) -> torch.Tensor:
        case, found, first = self.case, [], 0
        for length, count, keys, values in zip(LENGTHS, self.counts, self.keys, self.values, strict=True):
            for index in range(count):
                position = length - count + index
                start = max(position + 1 - case.window, 0) if case.window else 0
                own = query[first + index].cpu().double().view(case.kv_heads, -1, case.dim)
                logits = torch.einsum("hgd,thd->hgt", own, keys[start : position + 1].double()) * case.dim**-0.5
                if case.cap:
                    logits = case.cap * torch.tanh(logits / case.cap)
                mixed = torch.einsum("hgt,thd->hgd", logits.softmax(-1), values[start : position + 1].double())
                found.append(mixed.reshape(case.heads, case.dim))
            first += count
        return torch.stack(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.dtype}-{case.window}-{case.cap}-{case.tokens}")
def test_attention_of_drafted_rows_equals_the_oracle(device, case) -> None:
    rows = DraftedRows(case, device)
    total = sum(rows.counts)
    query = rows.random(total + 3, case.heads, case.dim).to(device)  # three of padding
    tolerance = 2e-5 if case.dtype == "float32" else 6e-2
    for _ in range(2):
        output = rows.attend(query, case.shape)
        torch.testing.assert_close(output[:total].cpu().double(), rows.expected(query), atol=tolerance, rtol=tolerance)
        assert output[total:].isnan().all()


FUSED_CASES = [
    SimpleNamespace(dtype="float32", heads=4, kv_heads=2, dim=64, window=None, cap=None, tokens=4, shape="dealt early"),
    SimpleNamespace(dtype="float32", heads=4, kv_heads=1, dim=32, window=20, cap=None, tokens=3, shape="early"),
    SimpleNamespace(dtype="float32", heads=2, kv_heads=2, dim=80, window=2, cap=20.0, tokens=6, shape="dealt early"),
    SimpleNamespace(dtype="float32", heads=6, kv_heads=2, dim=32, window=None, cap=None, tokens=17, shape="fixed"),
    SimpleNamespace(dtype="bfloat16", heads=8, kv_heads=2, dim=64, window=None, cap=None, tokens=2, shape="dealt"),
]


@pytest.mark.parametrize("case", FUSED_CASES, ids=lambda case: f"{case.shape}-{case.dtype}-{case.window}-{case.tokens}")
@pytest.mark.parametrize("has_norm", [True, False], ids=["norm", "plain"])
def test_queries_keys_and_values_of_drafted_rows_are_made_and_written_as_by_the_reference_op(
    device, case, has_norm
) -> None:
    """A slot of -1 writes nothing, and its token is attended to all the same."""
    rows, rotary_dim = DraftedRows(case, device), case.dim // 2
    total, kv_size = sum(rows.counts), case.kv_heads * case.dim
    qkv = rows.random(total + 3, case.heads * case.dim + 2 * kv_size)
    spec = NormSpec(size=case.dim, eps=1e-6) if has_norm else None
    cos_sin = torch.randn(max(LENGTHS), rotary_dim, generator=rows.generator)
    q_norm, k_norm = (rows.random(case.dim).to(device) if has_norm else None for _ in range(2))
    slots = torch.full((total + 3,), -1)
    slots[:total] = torch.tensor([int(block) * 16 + offset for block, offset in rows.places])
    positions = torch.tensor([*rows.positions, 0, 0, 0])
    needs = QkNormRopeWriteKvNeeds(
        dtype=case.dtype, kv_dtype=case.dtype, num_heads=case.heads, num_kv_heads=case.kv_heads, head_dim=case.dim,
        rotary_dim=rotary_dim, q_norm=spec, k_norm=spec,
    )  # fmt: skip
    on_device = [None if x is None else x.to(device) for x in (cos_sin, q_norm, k_norm)]
    op = ReferenceQkNormRopeWriteKv.bind(needs, QkNormRopeWriteKvTensors(*on_device))
    written = [cache.clone() for cache in rows.caches]
    query = op(qkv.to(device), positions.to(device), slots.to(device), *written)
    for block, offset in rows.places:
        for cache in rows.caches:
            cache[block, offset] = float("nan")
    first = 0
    for row, (length, count) in enumerate(zip(LENGTHS, rows.counts, strict=True)):  # what the oracle reads
        for index in range(count):
            place = rows.places[first + index]
            rows.keys[row][length - count + index], rows.values[row][length - count + index] = (
                cache[place].cpu() for cache in written
            )
        first += count
    hidden, block_and_offset = sum(rows.counts[:2]), rows.places[sum(rows.counts[:2])]
    slots[hidden] = -1
    new = NewTokens(positions.to(device), slots.to(device), NormRope(rotary_dim, *on_device, spec))
    output = rows.attend(qkv.to(device), case.shape, new)
    tolerance = 5e-5 if case.dtype == "float32" else 6e-2
    torch.testing.assert_close(output[:total].cpu().double(), rows.expected(query), atol=tolerance, rtol=tolerance)
    assert output[total:].isnan().all()
    for cache, wanted in zip(rows.caches, written, strict=True):
        assert cache[block_and_offset].isnan().all()
        wanted[block_and_offset] = float("nan")
        torch.testing.assert_close(cache, wanted, atol=tolerance, rtol=tolerance, equal_nan=True)


def test_shapes_of_drafted_launches_fit_the_buffers() -> None:
    for rows in (1, 2, 3, 8, 32, 33, 128, 1024):
        for kv_heads in (1, 2, 8, 32):
            shape = drafts_shape(rows, kv_heads, 32 // kv_heads, 4, 40_960, 256, num_sms(torch.device("meta")))
            parts = DraftParts.allocate(
                torch.device("meta"), max_rows=1024, num_heads=32, num_kv_heads=kv_heads, head_dim=128, num_tokens=4
            )
            assert parts.sums.shape[0] >= kv_heads * shape.splits * (1 if shape.is_dealt else rows)
            assert not shape.is_dealt or parts.shares.shape[0] >= shape.splits >= rows
    assert drafts_shape(1, 8, 2, 4, 128, 256, 132).splits == 2, "no more programs than pieces"
    for group, at_once in ((2, 6), (4, 4)):
        shape = drafts_shape(32, 8, group, 4, 8192, 256, 132)
        assert shape.is_dealt and 8 * shape.splits <= at_once * 132, "as many programs as registers let run at once"
