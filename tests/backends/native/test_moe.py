"""The op of experts in C against its reference."""

from __future__ import annotations

import pytest
import torch
from pelton_moe_case import ROUTINGS, SIZES, check_copies, check_moe, check_whole_experts, moe_case

from pelton.ops.moe import RoutingSpec
from pelton_backends.native.moe import NativeMoe
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06}
IN_PANELS = 64, 32
"""Sizes whose weights are brought into panels; odd ones are read where they lie."""


@pytest.mark.parametrize("sizes", [SIZES, IN_PANELS, (33, 7)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ROUTINGS)
def test_equals_the_reference(name: str, dtype: torch.dtype, sizes: tuple[int, int], isa: str) -> None:
    for num_tokens in (1, 5, 40):
        check_moe(NativeMoe, *moe_case(CPU, ROUTINGS[name], num_tokens, dtype, sizes), tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_biases_and_the_activation_of_gpt_oss(dtype: torch.dtype, isa: str) -> None:
    for sizes in (SIZES, IN_PANELS):
        made = moe_case(
            CPU,
            RoutingSpec(num_experts=6, top_k=2),
            40,
            dtype,
            sizes,
            activation="swiglu_oai",
            limit=0.5,
            has_bias=True,
        )
        check_moe(NativeMoe, *made, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_whole_experts_of_several_ranks(num_tokens: int, isa: str) -> None:
    made = moe_case(CPU, ROUTINGS["groups"], num_tokens, sizes=IN_PANELS)
    check_whole_experts(NativeMoe, *made, counts=(1, 8, 3))
    routing = RoutingSpec(num_experts=6, top_k=2)
    made = moe_case(CPU, routing, num_tokens, activation="swiglu_oai", limit=0.5, has_bias=True)
    check_whole_experts(NativeMoe, *made, counts=(3, 3))


@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_copies_of_experts_and_halves_of_the_op(num_tokens: int, isa: str) -> None:
    check_copies(NativeMoe, num_tokens, sizes=IN_PANELS)
    check_copies(NativeMoe, num_tokens, activation="swiglu_oai", limit=0.5, has_bias=True)


def test_rows_in_several_parts_take_their_turn() -> None:
    """More pairs than fit the op's memory at once."""
    check_copies(NativeMoe, 2000, 1e-3, sizes=(2048, 256))


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_other_activations(activation: str) -> None:
    check_moe(NativeMoe, *moe_case(CPU, ROUTINGS["softmax"], 5, activation=activation), tolerance=1e-4)


def test_one_expert_has_all_tokens_in_several_groups_of_blocks() -> None:
    needs, tensors, x, slots = moe_case(CPU, RoutingSpec(num_experts=6, top_k=1), 500, sizes=IN_PANELS)
    tensors.router.zero_()
    check_moe(NativeMoe, needs, tensors, x, slots, tolerance=1e-4)


def test_other_dtypes_are_refused() -> None:
    needs, *_ = moe_case(CPU, ROUTINGS["softmax"], 1, torch.float16)
    assert NativeMoe.unsupported(needs) == ["dtype float16, only float32, bfloat16"]


def test_a_recorded_call_chooses_experts_again() -> None:
    needs, tensors, x, slots = moe_case(CPU, ROUTINGS["softmax"], 5)
    op = NativeMoe.bind(needs, tensors)
    recorder = CallGraphRecorder()
    recorder.begin()
    output = op(x, slots)
    graph = recorder.end()
    x.copy_(x.flip(0))
    slots.copy_(torch.tensor([3, -1, 4, 5, 6]))
    graph.replay()
    assert torch.equal(output, op(x, slots))
    assert not output[1].any()
