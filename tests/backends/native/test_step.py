"""Inputs and greedy tokens in C equal the references to the bit."""

import random

import pytest
import torch

from pelton.ops.interface import PrepareInputsNeeds, PrepareInputsTensors, SampleNeeds, SampleTensors
from pelton.sampling.error_codes import NOT_FINITE, OK
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_backends.native.sampling import NativeSample
from pelton_backends.native.step import NativePrepareInputs
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import ReferenceSample, prepare_inputs

SEQS, MAX_LEN = 10, 40
STALE = -99


def make_state(seed, block_sizes=(16,), vocab_size=50):
    state = BatchState(
        max_num_seqs=SEQS, max_model_len=MAX_LEN, vocab_size=vocab_size, block_sizes=block_sizes, num_side_slots=0,
        device=torch.device("cpu"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    for tensor, most in ((state.token_ids, vocab_size), *((table, 10_000) for table in state.block_tables)):
        tensor[:SEQS] = torch.randint(1, most, tensor[:SEQS].shape, generator=generator, dtype=torch.int32)
    return state


def make_buffers(state, num_tokens, kernel_sizes):
    buffers = InputBuffers(state, max_num_tokens=num_tokens, kernel_block_sizes=kernel_sizes)
    for tensor in (buffers.input_ids, buffers.positions, buffers.seq_lens, buffers.query_start_loc[1:]):
        tensor.fill_(STALE)
    for tensor in (*buffers.slot_mapping, *buffers.block_tables):
        tensor.fill_(STALE)
    return buffers


def bind_inputs(state, buffers):
    needs = PrepareInputsNeeds(
        max_num_tokens=buffers.max_num_tokens, max_num_seqs=SEQS, block_sizes=state.block_sizes, max_model_len=MAX_LEN
    )
    assert NativePrepareInputs.unsupported(needs) == []
    return NativePrepareInputs.bind(needs, PrepareInputsTensors(state, buffers))


def assert_equal_inputs(state, slots, counts, shape, kernel_sizes=None):
    own, other = (make_buffers(state, shape.num_padded_tokens + 3, kernel_sizes) for _ in range(2))
    slots, counts = torch.tensor(slots, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)
    got = bind_inputs(state, own)(slots, counts, shape)
    want = prepare_inputs(state, other, slots, counts, shape)
    for name in ("input_ids", "positions", "seq_lens", "query_start_loc"):
        assert torch.equal(getattr(own, name), getattr(other, name)), name
    for group, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(own.slot_mapping[group], other.slot_mapping[group])
        assert mine.block_table.data_ptr() == own.block_tables[group].data_ptr()
        assert (mine.num_reqs, mine.num_tokens, mine.max_query_len) == (
            theirs.num_reqs,
            theirs.num_tokens,
            theirs.max_query_len,
        )
        ratio = own.blocks_per_block[group]
        for row, length in enumerate(theirs.seq_lens.tolist()):
            used = max(-(-length // state.block_sizes[group]), 1) * ratio
            expected = theirs.block_table[row, :used] if length else torch.zeros(used, dtype=torch.int32)
            assert torch.equal(mine.block_table[row, :used], expected)
            assert (own.block_tables[group][row, used:] == STALE).all()


@pytest.mark.parametrize("seed", range(30))
def test_random_steps_equal_the_reference(seed):
    chooser = random.Random(seed)
    sizes = chooser.choice([(4,), (16,), (4, 8), (16, 32, 48)])
    kernel_sizes = [size // chooser.choice([1, 2]) for size in sizes]
    state = make_state(seed, sizes)
    slots = chooser.sample(range(SEQS), chooser.randint(1, 7))
    counts = []
    for slot in slots:
        state.num_computed_tokens[slot] = context = chooser.randint(0, MAX_LEN - 1)
        counts.append(1 if seed % 2 else chooser.choice([1, chooser.randint(1, MAX_LEN - context)]))
    pad_rows, pad_tokens = chooser.choice([0, 1, 3]), chooser.choice([0, 5])
    shape = StepShape(
        num_reqs=len(slots), num_tokens=sum(counts), num_decode_rows=counts.count(1), max_query_len=max(counts),
        max_seq_len=chooser.choice([MAX_LEN, 64]), num_padded_reqs=len(slots) + pad_rows,
        num_padded_tokens=sum(counts) + pad_tokens,
    )  # fmt: skip
    assert_equal_inputs(state, [*slots, *[SEQS] * pad_rows], [*counts, *[0] * pad_rows], shape, kernel_sizes)


def test_a_step_of_nothing_but_padding():
    shape = StepShape(
        num_reqs=1, num_tokens=0, num_decode_rows=0, max_query_len=4, max_seq_len=4, num_padded_reqs=1,
        num_padded_tokens=4,
    )  # fmt: skip
    assert_equal_inputs(make_state(0), [SEQS], [0], shape)


def bind_sample(op, state, **changes):
    needs = SampleNeeds(vocab_size=state.vocab_size, max_num_seqs=SEQS, variant="greedy", **changes)
    assert op.unsupported(needs) == []
    return op.bind(needs, SampleTensors(state))


@pytest.mark.parametrize("num_rows", [1, 2, 7, 9])
@pytest.mark.parametrize("vocab_size", [1, 15, 64, 130, 4099])
def test_greedy_tokens_equal_the_reference(isa, num_rows, vocab_size):
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    wide = torch.randint(-20, 20, (num_rows, vocab_size + 3), generator=generator).float()  # many are equal
    wide[:, vocab_size:] = 100.0
    logits, states, results = wide[:, :vocab_size], [], []
    slots = torch.randperm(SEQS, generator=generator)[:num_rows]
    slots[-1] = SEQS if num_rows > 2 else slots[-1]
    for op in (NativeSample, ReferenceSample):
        state = make_state(3, vocab_size=vocab_size + 2)
        state.vocab_size = vocab_size
        state.num_computed_tokens[:SEQS] = torch.arange(SEQS) * 4 + 5  # some at the end
        result = torch.full((num_rows, 2), STALE, dtype=torch.int32)
        bind_sample(op, state)(logits if op is NativeSample else logits.clone(), slots, result)
        states.append(state), results.append(result)
    assert torch.equal(*results)
    for name in ("token_ids", "num_computed_tokens"):
        assert torch.equal(*(getattr(state, name) for state in states)), name


@pytest.mark.parametrize("place", [0, 15, 16, 63, 64, 200, 257])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_says_so_and_advances(isa, place, value):
    state = make_state(0, vocab_size=258)
    logits = torch.zeros(2, 258)
    logits[0, place] = value
    if value == -float("inf"):
        logits[0] = value
    logits[1, place] = 1.0
    result = torch.zeros(2, 2, dtype=torch.int32)
    bind_sample(NativeSample, state)(logits, torch.tensor([4, 6]), result)
    assert result[:, 1].tolist() == [NOT_FINITE, OK] and 0 <= result[0, 0] < 258 and result[1, 0] == place
    assert state.num_computed_tokens[[4, 6]].tolist() == [1, 1]
