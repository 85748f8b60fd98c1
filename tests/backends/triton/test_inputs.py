"""Prepared inputs equal the reference to the bit: worked example, random states, padding, several groups, replay."""

from __future__ import annotations

import random

import pytest
import torch

from pelton.ops.interface import PrepareInputsNeeds, PrepareInputsTensors
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import prepare_inputs

VOCAB = 50
STALE = 77  # in the block-table buffers before a step: what is not written must not matter


def make_state(device, *, num_seqs=4, max_len=64, block_sizes=(4,)) -> BatchState:
    return BatchState(
        max_num_seqs=num_seqs, max_model_len=max_len, vocab_size=VOCAB, block_sizes=block_sizes, num_side_slots=0,
        device=device,
    )  # fmt: skip


def bind(state: BatchState, buffers: InputBuffers):
    from pelton_backends.triton.ops.inputs import TritonPrepareInputs

    needs = PrepareInputsNeeds(
        max_num_tokens=buffers.input_ids.shape[0], max_num_seqs=state.max_num_seqs, block_sizes=state.block_sizes,
        max_model_len=state.max_model_len,
    )  # fmt: skip
    assert TritonPrepareInputs.unsupported(needs) == []
    return TritonPrepareInputs.bind(needs, PrepareInputsTensors(state=state, buffers=buffers))


def make_buffers(state: BatchState, max_num_tokens: int, kernel_block_sizes=None) -> InputBuffers:
    """Poisoned, but for the zero that starts `query_start_loc`."""
    buffers = InputBuffers(state, max_num_tokens=max_num_tokens, kernel_block_sizes=kernel_block_sizes)
    for tensor in (buffers.input_ids, buffers.positions, buffers.seq_lens, *buffers.slot_mapping):
        tensor.fill_(-99)
    buffers.query_start_loc[1:] = -99
    for table in buffers.block_tables:
        table.fill_(STALE)
    return buffers


def fill(state: BatchState, seed: int) -> None:
    """Random tokens and block ids; the padding row stays zeros."""
    generator = torch.Generator().manual_seed(seed)
    rows = state.max_num_seqs
    ids = torch.randint(1, VOCAB, state.token_ids[:rows].shape, generator=generator, dtype=torch.int32)
    state.token_ids[:rows] = ids.to(state.device)
    for table in state.block_tables:
        blocks = torch.randint(1, 10_000, table[:rows].shape, generator=generator, dtype=torch.int32)
        table[:rows] = blocks.to(state.device)


def step_shape(num_scheduled: list[int], max_seq_len: int, pad_reqs: int, pad_tokens: int) -> StepShape:
    total = sum(num_scheduled)
    return StepShape(
        num_reqs=len(num_scheduled), num_tokens=total, num_decode_rows=sum(n == 1 for n in num_scheduled),
        max_query_len=max(num_scheduled, default=0), max_seq_len=max_seq_len,
        num_padded_reqs=len(num_scheduled) + pad_reqs, num_padded_tokens=total + pad_tokens,
    )  # fmt: skip


def assert_equal_step(state, slots, num_scheduled, shape, kernel_block_sizes=None) -> None:
    """The op and the reference on buffers of their own."""
    size = shape.num_padded_tokens + 3
    own, reference = (make_buffers(state, size, kernel_block_sizes) for _ in range(2))
    got = bind(state, own)(slots, num_scheduled, shape)
    want = prepare_inputs(state, reference, slots, num_scheduled, shape)
    assert len(got) == len(want) == len(state.block_sizes)
    assert torch.equal(own.input_ids, reference.input_ids) and torch.equal(own.positions, reference.positions)
    for group, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        for name in ("query_start_loc", "seq_lens", "slot_mapping"):
            assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
        assert torch.equal(own.slot_mapping[group], reference.slot_mapping[group])
        for name in (
            "num_reqs", "num_tokens", "num_actual_tokens", "num_decode_rows", "num_decode_tokens", "max_query_len",
            "max_seq_len", "common_prefix_len", "causal",
        ):  # fmt: skip
            assert getattr(mine, name) == getattr(theirs, name), name
        assert mine.block_table.shape == theirs.block_table.shape
        assert mine.block_table.stride() == own.block_tables[group].stride()
        ratio = own.blocks_per_block[group]
        used = -(-theirs.seq_lens // state.block_sizes[group]) * ratio
        place = torch.arange(mine.block_table.shape[1], device=state.device)
        is_used = place < used.unsqueeze(-1)
        assert torch.equal(mine.block_table[is_used], theirs.block_table[is_used])
        empty = theirs.seq_lens == 0
        if mine.block_table.shape[1]:
            assert not mine.block_table[empty, 0].any()  # padding rows point at block 0
        written = is_used | (empty.unsqueeze(-1) & (place < ratio))
        assert (mine.block_table[~written] == STALE).all()


def test_worked_example(device):
    state = make_state(device)
    prompts, blocks = [[1, 2, 3, 4, 5], [1, 6, 5, 7, 8, 9, 10], [1, 12, 13]], [[1, 2], [3, 4], [5]]
    for slot, (prompt, ids) in enumerate(zip(prompts, blocks, strict=True)):
        state.token_ids[slot, : len(prompt)] = torch.tensor(prompt)
        state.block_tables[0][slot, : len(ids)] = torch.tensor(ids)
    buffers = make_buffers(state, 32)
    prepare = bind(state, buffers)
    slots = torch.arange(3, device=device)
    counts = torch.tensor([5, 7, 3], device=device)
    (common,) = prepare(slots, counts, step_shape([5, 7, 3], 7, 0, 0))
    assert buffers.input_ids[:15].tolist() == [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13]
    assert buffers.positions[:15].tolist() == [*range(5), *range(7), *range(3)]
    assert common.query_start_loc.tolist() == [0, 5, 12, 15] and common.seq_lens.tolist() == [5, 7, 3]
    assert common.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]
    none = torch.zeros(3, dtype=torch.int64, device=device)
    state.advance(slots, counts, slots, none, torch.tensor([14, 15, 16], device=device))
    (common,) = prepare(slots, torch.ones_like(slots), step_shape([1, 1, 1], 8, 0, 0))
    assert buffers.input_ids[:3].tolist() == [14, 15, 16] and buffers.positions[:3].tolist() == [5, 7, 3]
    assert common.slot_mapping.tolist() == [9, 19, 23] and common.query_start_loc.tolist() == [0, 1, 2, 3]
    assert common.seq_lens.tolist() == [6, 8, 4]


@pytest.mark.parametrize(
    "counts, pad_reqs, pad_tokens",
    [([4, 4, 4], 2, 8), ([4, 1, 3], 0, 0), ([2, 16], 1, 150), ([17, 2], 1, 1), ([1, 1], 0, 1)],
)
def test_rows_with_drafts_equal_the_reference(device, counts, pad_reqs, pad_tokens):
    """The last: one token a row, and tokens of no row behind them."""
    state = make_state(device, num_seqs=6, max_len=40, block_sizes=(4, 8))
    fill(state, 3)
    state.num_computed_tokens[:6] = torch.tensor([9, 20, 7, 3, 0, 1], device=device)
    slots = torch.tensor([1, 4, 2][: len(counts)] + [state.padding_slot] * pad_reqs, device=device)
    scheduled = torch.tensor(counts + [0] * pad_reqs, device=device)
    assert_equal_step(state, slots, scheduled, step_shape(counts, 40, pad_reqs, pad_tokens))


@pytest.mark.parametrize("seed", range(10))
def test_random_steps_equal_the_reference(device, seed):
    chooser = random.Random(seed)
    sizes = chooser.choice([(4,), (16,), (4, 8), (16, 32, 48)])
    ratios = [chooser.choice([1, 2]) for _ in sizes]
    state = make_state(device, num_seqs=10, max_len=40, block_sizes=sizes)
    fill(state, seed)
    is_decode = seed % 2 == 0
    num_rows = chooser.randint(1, 7)
    counts, contexts = [], torch.zeros(11, dtype=torch.int64)
    slots = chooser.sample(range(10), num_rows)
    for slot in slots:
        context = chooser.randint(0, 39)
        contexts[slot] = context
        counts.append(1 if is_decode else chooser.choice([1, chooser.randint(1, 40 - context)]))
    state.num_computed_tokens.copy_(contexts)
    pad_reqs = chooser.choice([0, 1, 3])
    pad_tokens = pad_reqs if is_decode and chooser.random() < 0.8 else chooser.choice([0, 5])
    shape = step_shape(counts, chooser.choice([40, 64]), pad_reqs, pad_tokens)
    to_device = [torch.tensor(v, device=device) for v in ([*slots, *[10] * pad_reqs], [*counts, *[0] * pad_reqs])]
    kernel_sizes = [size // ratio for size, ratio in zip(sizes, ratios, strict=True)]
    assert_equal_step(state, *to_device, shape, kernel_sizes)


def test_overshoot_reads_the_spare_column(device):
    """A row past the longest length, before the host noticed: its token is the spare column's, its block a lookahead one."""
    state = make_state(device, max_len=16)
    fill(state, 0)
    state.num_computed_tokens[:2] = torch.tensor([19, 16])
    slots, counts = torch.tensor([0, 1], device=device), torch.tensor([1, 1], device=device)
    assert_equal_step(state, slots, counts, step_shape([1, 1], 20, 0, 0))


def test_table_wider_than_a_tile(device):
    state = make_state(device, num_seqs=3, max_len=2600, block_sizes=(2, 4))
    fill(state, 1)
    state.num_computed_tokens[:2] = torch.tensor([2598, 1024])
    slots, counts = torch.tensor([1, 0, 3], device=device), torch.tensor([1, 1, 0], device=device)
    assert_equal_step(state, slots, counts, step_shape([1, 1], 2600, 1, 1), (1, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows, num_tokens", [(256, 256), (1024, 16_384), (1, 16_384), (300, 1000)])
def test_large_steps(device, num_rows, num_tokens):
    chooser = random.Random(num_rows)
    state = make_state(device, num_seqs=1024, max_len=40_960, block_sizes=(16,))
    fill(state, 2)
    counts = [1] * num_rows
    for _ in range(num_tokens - num_rows):
        counts[chooser.randrange(num_rows) if num_rows > 1 else 0] += 1
    slots = chooser.sample(range(1024), num_rows)
    context = torch.randint(0, 20_000, (1025,), generator=torch.Generator().manual_seed(3))
    state.num_computed_tokens.copy_(context)
    shape = step_shape(counts, 40_960, 0, 0)
    assert_equal_step(state, torch.tensor(slots, device=device), torch.tensor(counts, device=device), shape)


@pytest.mark.gpu
def test_replay_follows_the_state(device):
    state = make_state(device, num_seqs=8, max_len=256)
    fill(state, 3)
    buffers, reference = make_buffers(state, 8), make_buffers(state, 8)
    prepare = bind(state, buffers)
    slots = torch.tensor([3, 1, 0, 8], device=device)
    counts = torch.tensor([1, 1, 1, 0], device=device)
    shape = step_shape([1, 1, 1], 256, 1, 1)
    prepare(slots, counts, shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepare(slots, counts, shape)
    for step in range(3):
        state.num_computed_tokens[:8] = torch.randint(0, 250, (8,), device=device)
        slots.copy_(torch.tensor([[3, 1, 0, 8], [5, 6, 7, 4], [2, 8, 8, 8]][step]))
        counts.copy_(slots != 8)
        graph.replay()
        want = prepare_inputs(state, reference, slots, counts, shape)[0]
        assert torch.equal(buffers.input_ids[:4], reference.input_ids[:4])
        assert torch.equal(buffers.positions[:4], reference.positions[:4])
        assert torch.equal(buffers.seq_lens[:4], want.seq_lens)
        assert torch.equal(buffers.query_start_loc[:5], want.query_start_loc)
        assert torch.equal(buffers.slot_mapping[0][:4], want.slot_mapping)


def pinned(*shape: int, dtype=torch.int64) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, pin_memory=torch.cuda.is_available())


@pytest.mark.parametrize("num_rows, block_sizes", [(3, (4,)), (1, (4, 8)), (700, (2, 4))])
def test_a_step_takes_its_columns_from_pinned_memory(device, num_rows, block_sizes):
    """The second part, then the first: its columns, where its result goes, and blocks for the tables of all groups."""
    state = make_state(device, num_seqs=num_rows, max_len=16, block_sizes=block_sizes)
    op = bind(state, make_buffers(state, num_rows))
    count = (2 + 2 * len(block_sizes)) * num_rows + 5
    parts, taken = pinned(2, 2 + count + 3), pinned(1)
    turn, place = torch.tensor([7], device=device), torch.tensor([-1], device=device)
    generator, columns = torch.Generator().manual_seed(1), torch.full((count,), -1, device=device)
    for step in (7, 8):
        part = parts[step % 2]
        part[:] = torch.randint(0, 1000, part.shape, generator=generator)
        part[0] = 2**40 + step
        wanted = [table.clone() for table in state.block_tables]
        for group, table in enumerate(wanted):
            cells, ids = part[2 + (2 + 2 * group) * num_rows :][: 2 * num_rows].view(2, num_rows)
            cells.copy_(torch.randperm(table.numel(), generator=generator)[:num_rows])
            table.view(-1)[cells.to(device)] = ids.int().to(device)
        op.take(parts, turn, taken, place, columns, num_rows)
        assert columns.tolist() == part[2 : 2 + count].tolist() and place.tolist() == [2**40 + step]
        assert all(torch.equal(got, want) for got, want in zip(state.block_tables, wanted, strict=True))
        assert turn.tolist() == taken.tolist() == [step + 1]


@pytest.mark.parametrize("shape, dtype", [((3, 2), torch.int32), ((1, 7), torch.int32), ((1200,), torch.int64)])
def test_a_step_gives_its_result_to_pinned_memory(device, shape, dtype):
    state = make_state(device)
    op = bind(state, make_buffers(state, 4))
    result = torch.randint(-(2**31), 2**31, shape, dtype=dtype, device=device)
    room, place = pinned(result.numel() + 1, dtype=dtype), torch.zeros(1, dtype=torch.int64, device=device)
    op.give(result, place)  # nowhere
    place.fill_(room.data_ptr())
    op.give(result, place)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert torch.equal(room[:-1], result.view(-1).cpu()) and room[-1] == 0
