"""One step's inputs from the batch state: the worked example, chunks, padding, kernel blocks."""

from __future__ import annotations

import pytest
import torch

from pelton.kv_cache.hashing import pack_tokens
from pelton.messages.step import NewRequest, SchedulerOutput
from pelton.sampling_params import SamplingParams
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_platforms.device.steps.batch_state import BatchState
from pelton_platforms.device.steps.reference_step import prepare_inputs
from pelton_platforms.device.steps.step_plan import plan_drafts, plan_step, ramp

PROMPTS = [[1, 2, 3, 4, 5], [1, 6, 5, 7, 8, 9, 10], [1, 12, 13]]
BLOCKS = [[1, 2], [3, 4], [5]]


def make_state(block_sizes=(4,), **fields) -> BatchState:
    return BatchState(
        max_num_seqs=4, max_model_len=64, vocab_size=50, block_sizes=block_sizes, num_side_slots=2,
        device=torch.device("cpu"), **fields,
    )  # fmt: skip


def new(slot: int, prompt: list[int], blocks: list[list[int]], **fields) -> NewRequest:
    return NewRequest(
        request_id=str(slot), slot=slot, token_ids=prompt, num_prompt_tokens=len(prompt),
        sampling_params=SamplingParams(temperature=0), block_ids=blocks, **fields,
    )  # fmt: skip


def run(state: BatchState, buffers: InputBuffers, output: SchedulerOutput, *, pad_reqs: int = 0, pad_tokens: int = 0):
    if output.new:
        state.add(output.new)
    state.append_blocks(output.block_appends)
    plan = plan_step(output, state.host)
    shape = plan.shape
    padded = StepShape(
        num_reqs=shape.num_reqs, num_tokens=shape.num_tokens, num_decode_rows=shape.num_decode_rows,
        max_query_len=shape.max_query_len, max_seq_len=shape.max_seq_len,
        num_padded_reqs=shape.num_reqs + pad_reqs, num_padded_tokens=shape.num_tokens + pad_tokens,
    )  # fmt: skip
    slots = torch.tensor([*output.slots, *[state.padding_slot] * pad_reqs])
    counts = torch.tensor([*output.num_scheduled, *[0] * pad_reqs])
    return plan, prepare_inputs(state, buffers, slots, counts, padded)


@pytest.fixture
def worked_example():
    state = make_state()
    buffers = InputBuffers(state, max_num_tokens=32)
    output = SchedulerOutput(
        step_id=0, new=[new(slot, prompt, [ids]) for slot, (prompt, ids) in enumerate(zip(PROMPTS, BLOCKS, strict=True))],
        slots=[0, 1, 2], num_scheduled=[5, 7, 3], samples=[True] * 3,
    )  # fmt: skip
    return state, buffers, output


@pytest.mark.parametrize("prompt", [PROMPTS[1], [1, 60, -3, 2]], ids=["plain", "outside of the vocabulary"])
def test_packed_tokens_are_taken_as_unpacked_ones_are(prompt):
    states = make_state(), make_state()
    states[0].add([new(2, prompt, [BLOCKS[1]])])
    states[1].add([new(2, prompt, [BLOCKS[1]], packed_token_ids=pack_tokens(prompt))])
    assert states[0].token_ids.tolist() == states[1].token_ids.tolist()
    assert states[0].host.errors == states[1].host.errors


def test_prefill_of_the_worked_example(worked_example):
    plan, (common,) = run(*worked_example)
    buffers = worked_example[1]
    assert buffers.input_ids[:15].tolist() == [1, 2, 3, 4, 5, 1, 6, 5, 7, 8, 9, 10, 1, 12, 13]
    assert buffers.positions[:15].tolist() == [*range(5), *range(7), *range(3)]
    assert common.query_start_loc.tolist() == [0, 5, 12, 15]
    assert common.seq_lens.tolist() == [5, 7, 3]
    assert common.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 15, 16, 17, 18, 20, 21, 22]
    assert plan.logit_tokens.tolist() == [4, 11, 14]
    assert common.block_table.tolist() == [[1, 2], [3, 4], [5, 0]]
    assert (common.num_decode_rows, common.max_query_len, common.max_seq_len) == (0, 7, 7)


def test_decode_of_the_worked_example(worked_example):
    state, buffers, output = worked_example
    run(*worked_example)
    slots = torch.tensor(output.slots)
    state.advance(slots, torch.tensor([5, 7, 3]), slots, torch.zeros(3, dtype=torch.int64), torch.tensor([14, 15, 16]))
    decode = SchedulerOutput(step_id=1, slots=[0, 1, 2], num_scheduled=[1, 1, 1], samples=[True] * 3, max_seq_len=8)
    plan, (common,) = run(state, buffers, decode)
    assert buffers.input_ids[:3].tolist() == [14, 15, 16]
    assert buffers.positions[:3].tolist() == [5, 7, 3]
    assert common.slot_mapping.tolist() == [9, 19, 23]
    assert common.query_start_loc.tolist() == [0, 1, 2, 3]
    assert common.seq_lens.tolist() == [6, 8, 4]
    assert common.num_decode_rows == common.num_decode_tokens == 3
    assert plan.logit_tokens.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "block_size, table, start, count, slots",
    [
        pytest.param(4, [2, 7], 6, 1, [30], id="position-6-in-block-7"),
        pytest.param(16, [3, 7], 0, 20, [*range(48, 64), *range(112, 116)], id="two-blocks-of-16"),
    ],
)
def test_slot_is_block_times_size_plus_offset(block_size, table, start, count, slots):
    state = make_state((block_size,))
    buffers = InputBuffers(state, max_num_tokens=32)
    output = SchedulerOutput(
        step_id=0, new=[new(1, list(range(start + count)), [table], num_computed_tokens=start)], slots=[1],
        num_scheduled=[count], samples=[True],
    )  # fmt: skip
    _, (common,) = run(state, buffers, output)
    assert common.slot_mapping.tolist() == slots


def test_padding_rows_are_empty_and_padding_tokens_have_no_slot(worked_example):
    state, buffers, output = worked_example
    buffers.input_ids.fill_(49)
    _, (common,) = run(state, buffers, output, pad_reqs=1, pad_tokens=4)
    assert common.query_start_loc.tolist() == [0, 5, 12, 15, 15]
    assert common.seq_lens.tolist() == [5, 7, 3, 0]
    assert common.block_table[3].tolist() == [0, 0]
    assert common.slot_mapping[15:].tolist() == [-1] * 4
    assert buffers.input_ids[15:19].tolist() == [0] * 4
    assert (common.num_reqs, common.num_tokens, common.num_actual_tokens) == (4, 19, 15)


def test_buffers_keep_their_addresses(worked_example):
    state, buffers, output = worked_example
    _, (first,) = run(state, buffers, output)
    before = [t.data_ptr() for t in (first.query_start_loc, first.seq_lens, first.block_table, first.slot_mapping)]
    decode = SchedulerOutput(step_id=1, slots=[2], num_scheduled=[1], samples=[True], max_seq_len=4)
    _, (second,) = run(state, buffers, decode)
    assert before == [
        t.data_ptr() for t in (second.query_start_loc, second.seq_lens, second.block_table, second.slot_mapping)
    ]


def test_manager_blocks_become_kernel_blocks():
    state = make_state((8,))
    buffers = InputBuffers(state, max_num_tokens=32, kernel_block_sizes=[2])
    output = SchedulerOutput(
        step_id=0, new=[new(0, list(range(10)), [[3, 5]])], slots=[0], num_scheduled=[10], samples=[True]
    )
    _, (common,) = run(state, buffers, output)
    assert common.block_table.tolist() == [[12, 13, 14, 15, 20, 21, 22, 23]]
    assert common.slot_mapping.tolist() == [*range(24, 32), 40, 41]


def test_groups_have_their_own_tables_and_sizes():
    state = make_state((4, 8))
    buffers = InputBuffers(state, max_num_tokens=32)
    output = SchedulerOutput(
        step_id=0, new=[new(0, list(range(6)), [[1, 2], [9]])], slots=[0], num_scheduled=[6], samples=[True]
    )
    _, (small, large) = run(state, buffers, output)
    assert small.slot_mapping.tolist() == [4, 5, 6, 7, 8, 9]
    assert large.slot_mapping.tolist() == [72, 73, 74, 75, 76, 77]


def test_appended_blocks_go_to_their_places():
    state = make_state((4, 4))
    state.add([new(0, [1], [[1], [2]]), new(2, [1], [[3], [4]])])
    state.append_blocks([(0, 2, 1, [5, 6]), (1, 0, 1, [7]), (0, 0, 1, [8])])
    assert state.block_tables[0][0, :3].tolist() == [1, 8, 0]
    assert state.block_tables[0][2, :4].tolist() == [3, 5, 6, 0]
    assert state.block_tables[1][0, :3].tolist() == [2, 7, 0]
    assert state.block_tables[1][2, :2].tolist() == [4, 0]


def test_long_rows_are_copied_beside_short_ones(monkeypatch):
    monkeypatch.setattr("pelton_platforms.device.steps.batch_state._LONG", 4)
    state = make_state()
    prompts, blocks = [[1, 2], [5, 6, 7, 8, 9], [3] * 4], [[1], [2, 3, 4, 5], [6]]
    state.add([new(slot, prompt, [ids]) for slot, (prompt, ids) in enumerate(zip(prompts, blocks, strict=True))])
    for slot, (prompt, ids) in enumerate(zip(prompts, blocks, strict=True)):
        assert state.token_ids[slot, : len(prompt) + 1].tolist() == [*prompt, 0]
        assert state.block_tables[0][slot, : len(ids)].tolist() == ids
        assert not state.block_tables[0][slot, len(ids) :].any()


def test_rows_with_one_token_count_as_decodes():
    state = make_state()
    state.add([new(s, [1] * 6, [[s + 1, s + 5]]) for s in range(3)])
    output = SchedulerOutput(step_id=1, slots=[2, 0, 1], num_scheduled=[1, 1, 4], samples=[False, True, True],
                             num_draft=[0, 0, 3], max_seq_len=9)  # fmt: skip
    plan = plan_step(output, state.host)
    assert plan.shape.num_decode_rows == 2
    assert plan.sample_rows.tolist() == [1, 2]
    assert plan.logit_starts.tolist() == [0, 1, 5]
    assert plan.logit_tokens.tolist() == [1, 2, 3, 4, 5]
    assert plan.logit_slots.tolist() == [0, 1, 1, 1, 1]
    grid, is_draft = plan.draft_grid()
    assert grid.tolist() == [[0, 0, 0, 0], [1, 2, 3, 4]]
    assert is_draft.tolist() == [[False] * 4, [True, True, True, False]]


def test_drafts_of_host_and_device_are_told_apart():
    state = make_state()
    state.add([new(s, [1] * 6, [[s + 1, s + 5]]) for s in range(3)])
    output = SchedulerOutput(step_id=1, slots=[2, 0, 1], num_scheduled=[1, 3, 4], samples=[True] * 3,
                             num_draft=[0, 2, 3], draft_token_ids=[[], [7, 8], []], max_seq_len=9)  # fmt: skip
    plan = plan_step(output, state.host)
    drafts = plan_drafts(output, plan.slots, plan.num_scheduled)
    assert drafts is not None and drafts.has_device_values
    assert drafts.values.tolist() == [7, 8, -1, -1, -1]
    assert drafts.slots.tolist() == [0, 0, 1, 1, 1]
    assert drafts.offsets.tolist() == [1, 2, 1, 2, 3]
    assert drafts.places.tolist() == [0, 1, 0, 1, 2]


def test_ramp_counts_within_each_part():
    assert ramp(torch.tensor([3, 0, 2, 1]).numpy()).tolist() == [0, 1, 2, 0, 1, 0]
    assert ramp(torch.tensor([], dtype=torch.int64).numpy()).tolist() == []
