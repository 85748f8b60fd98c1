"""Steps of nothing but padding rows, as warm-up has them: no kernel accesses anything before or behind its tensors.

All lengths, query lengths, positions and block tables are zeros; each tensor begins and ends with its storage. In the interpreter an
access outside is a fault (pelton_interpreter_bounds.py).
"""

from __future__ import annotations

from typing import Any

import pelton_sm90
import pytest
import torch

from pelton.ops.interface import PrepareInputsNeeds, PrepareInputsTensors
from pelton.worker.inputs import InputBuffers, StepShape
from pelton_backends.triton.attention.decode_resident import ResidentParts, ResidentShape, deal_resident
from pelton_backends.triton.ops.inputs import TritonPrepareInputs
from pelton_platforms.device.steps.batch_state import BatchState

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU tells of no access outside")


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(pelton_sm90, "ROWS", 8)
    return pelton_sm90.Attention("float32", "float32", pdl=False)


@pytest.mark.parametrize("name", pelton_sm90.SHAPES)
def test_rows_of_one_token(attention: Any, name: str) -> None:
    attention.decode(pelton_sm90.SHAPES[name])


@pytest.mark.parametrize(
    "name", ["prefill", "drafts", "cascade", "latent", "sparse", "parts", "states", "delta_rule", "key_delta_rule", "other_states"]
)  # fmt: skip
def test_rows_of_any_kind(attention: Any, name: str) -> None:
    getattr(attention, name)()


@pytest.mark.parametrize("num_tokens, warps, pieces, buffers", [(1, 4, 1, 3), (1, 4, 2, 3), (1, 1, 2, 3), (4, 4, 1, 2)])
def test_rows_that_are_dealt_to_resident_programs(
    attention: Any, num_tokens: int, warps: int, pieces: int, buffers: int
) -> None:
    """What attends to them is no kernel of the interpreter's."""
    shares, shape = ResidentParts.allocate(torch.device("cpu")).shares, ResidentShape(8, warps, pieces, buffers)
    starts = attention.starts if num_tokens > 1 else None
    deal_resident(attention.lengths, attention.table, shares, shape, num_rows=8, query_start_loc=starts, pdl=False)


def test_speculation() -> None:
    pelton_sm90.speculate()


@pytest.mark.parametrize("num_tokens, longest", [(4, 1), (8, 4), (64, 33)])
def test_inputs(num_tokens: int, longest: int) -> None:
    state = BatchState(
        max_num_seqs=4, max_model_len=64, vocab_size=1000, block_sizes=(16, 8), num_side_slots=0, device=torch.device("cpu")
    )  # fmt: skip
    needs = PrepareInputsNeeds(max_num_tokens=64, max_num_seqs=4, block_sizes=(16, 8), max_model_len=64)
    buffers = InputBuffers(state, max_num_tokens=64)
    shape = StepShape(
        num_reqs=0, num_tokens=0, num_decode_rows=0, max_query_len=longest, max_seq_len=64, num_padded_reqs=4,
        num_padded_tokens=num_tokens,
    )  # fmt: skip
    slots = torch.full((4,), 4)
    TritonPrepareInputs.bind(needs, PrepareInputsTensors(state, buffers))(
        slots, torch.zeros(4, dtype=torch.int64), shape
    )
    assert buffers.seq_lens[:4].tolist() == [0] * 4 and (buffers.slot_mapping[0][:num_tokens] == -1).all()
