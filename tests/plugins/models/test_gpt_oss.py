"""gpt-oss's experts in four bits, shared among ranks: together they are what one rank computes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pelton.model.weights import WeightMap
from pelton.ops.moe import ExpertsSpec, MoeNeeds, MoeTensors, RoutingSpec
from pelton.testing.model_driver import TensorWeight
from pelton_backends.reference.moe import ReferenceMoe
from pelton_plugins.models import gpt_oss


def rank_of_experts(
    tensors: dict[str, torch.Tensor], rank: int, size: int
) -> tuple[ExpertsSpec, dict[str, torch.Tensor]]:
    """What a rank keeps of a layer's experts in four bits: `_experts` over memory in which anything may have been."""
    count, rows, blocks, _ = tensors["e.gate_up_proj_blocks"].shape
    whole, hidden = rows // 2, blocks * 32

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full(shape, 255 if dtype == torch.uint8 else torch.nan, dtype=dtype)

    hf = SimpleNamespace(
        num_local_experts=count, intermediate_size=whole, quantization_config={"quant_method": "mxfp4"}
    )
    hf.get = lambda name, default=None: getattr(hf, name, default)
    parallel = SimpleNamespace(rank=rank, size=size)
    config: Any = SimpleNamespace(hf=hf, parallel=parallel, weights=WeightMap(), empty=empty, has_whole_experts=False)
    width = -(-whole // (size * gpt_oss._PART)) * gpt_oss._PART
    spec = ExpertsSpec(
        hidden_size=hidden,
        intermediate_size=width,
        activation="swiglu_oai",
        limit=7.0,
        weight_format="mxfp4",
        has_bias=True,
    )
    made = gpt_oss._experts(config, "e", spec)
    config.weights.load([(name, TensorWeight(tensor)) for name, tensor in tensors.items()])
    return spec, {name: parameter.data for name, parameter in made.items()}


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("whole", [64, 160])
def test_ranks_have_whole_blocks_of_experts_in_four_bits(whole: int, size: int) -> None:
    """160 numbers of an expert: two ranks have 128 and 32, three and four 64, 64 and 32, the last of four nothing, and zeros behind."""
    count, hidden = 3, 64
    draw = torch.Generator().manual_seed(size)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    tensors = {"e.gate_up_proj_bias": numbers(count, 2 * whole), "e.down_proj_bias": numbers(count, hidden)}
    for name, rows, columns in (("gate_up_proj", 2 * whole, hidden), ("down_proj", hidden, whole)):
        blocks = torch.randint(0, 256, (count, rows, columns // 32, 16), generator=draw)
        scales = torch.randint(121, 125, (count, rows, columns // 32), generator=draw)
        tensors |= {f"e.{name}_blocks": blocks.to(torch.uint8), f"e.{name}_scales": scales.to(torch.uint8)}
    routing, x, slots = RoutingSpec(num_experts=count, top_k=2), numbers(5, hidden), torch.arange(5)
    router, router_bias = numbers(count, hidden), numbers(count)

    def output(rank: int, size: int) -> torch.Tensor:
        spec, parts = rank_of_experts(tensors, rank, size)
        assert spec.intermediate_size % gpt_oss._PART == 0 or size == 1
        needs = MoeNeeds(dtype="float32", routing=routing, experts=spec, max_num_tokens=5, has_router_bias=True)
        return ReferenceMoe.bind(needs, MoeTensors(router, parts, router_bias))(x.clone(), slots)

    want = output(0, 1)
    got = torch.stack([output(rank, size) for rank in range(size)]).sum(0)
    assert want.norm() > 1
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
