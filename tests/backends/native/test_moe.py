"""The op of experts in C against its reference."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pelton_moe_case import ROUTINGS, SIZES, check_copies, check_moe, check_whole_experts, moe_case

from pelton.ops.moe import RoutingSpec
from pelton_backends.native.moe import NativeMoe
from pelton_platforms.device.graphs.call_graph import CallGraphRecorder

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.06, torch.float16: 0.01}
IN_BLOCKS = 2e-4
"""Of float32, root mean square: inputs are rounded to 16 bits."""
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


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_activation_of_hy4(dtype: torch.dtype, isa: str) -> None:
    for sizes in (SIZES, IN_PANELS):
        for num_tokens in (1, 40):
            made = moe_case(CPU, ROUTINGS["groups"], num_tokens, dtype, sizes, activation="silu_clamped", limit=0.5)
            check_moe(NativeMoe, *made, tolerance=TOLERANCE[dtype])
    made = moe_case(
        CPU, ROUTINGS["groups"], 40, dtype, IN_PANELS, activation="silu_clamped", limit=0.5, weight_format="q8_0"
    )
    check_moe(NativeMoe, *made, tolerance=2 * TOLERANCE[dtype])


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


@pytest.mark.parametrize("sizes", [IN_PANELS, (96, 64)], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("weight_format", ["q8_0", "q4_0", "q4_1", "q4_0+q4_1+q8_0"])
def test_weights_in_blocks(weight_format: str, dtype: torch.dtype, sizes: tuple[int, int], isa: str) -> None:
    """Inputs are rounded to 16 bits. Few rows of an expert and many take two ways."""
    tolerance = IN_BLOCKS if dtype == torch.float32 else 0.01  # the reference rounds weights to bfloat16
    for name, num_tokens in (("softmax", 1), ("groups", 5), ("corrected", 40), ("input", 70), ("softmax", 200)):
        made = moe_case(CPU, ROUTINGS[name], num_tokens, dtype, sizes, weight_format=weight_format)
        check_moe(NativeMoe, *made, tolerance=tolerance)


def test_blocks_with_biases_and_on_several_ranks(isa: str) -> None:
    routing = RoutingSpec(num_experts=6, top_k=2)
    for num_tokens in (1, 40):
        for check in (check_moe, partial(check_whole_experts, counts=(1, 2, 3))):
            made = moe_case(
                CPU, routing, num_tokens, sizes=IN_PANELS, activation="swiglu_oai", limit=0.5, has_bias=True, weight_format="q8_0"
            )  # fmt: skip
            check(NativeMoe, *made, tolerance=IN_BLOCKS)


def test_a_row_in_blocks_is_the_same_alone() -> None:
    """Up to eight rows of an expert, and any number where no panels are dequantized."""
    needs, tensors, x, slots = moe_case(CPU, ROUTINGS["groups"], 8, sizes=IN_PANELS, weight_format="q4_1")
    slots = torch.arange(8)
    op = NativeMoe.bind(needs, tensors)
    together = op(x, slots)
    for row in range(8):
        assert torch.equal(op(x[row : row + 1], slots[:1]), together[row : row + 1])


def test_other_dtypes_and_forms_are_refused() -> None:
    needs, *_ = moe_case(CPU, ROUTINGS["softmax"], 1, torch.float64)
    assert NativeMoe.unsupported(needs) == ["dtype float64, only float32, bfloat16, float16"]
    needs, *_ = moe_case(CPU, ROUTINGS["softmax"], 1, sizes=IN_PANELS, weight_format="int4_grouped", group_size=32)
    assert NativeMoe.unsupported(needs) == ["weight format 'int4_grouped', only plain, q8_0, q4_0, q4_1"]


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
