"""The op of experts against its reference."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from pelton_assembly import as_bfloat16, run_assembly
from pelton_moe_case import ROUTINGS, check_copies, check_moe, check_whole_experts, moe_case

from pelton.ops.interface import InputRounding, NormSpec
from pelton.ops.moe import AddNormMoeNeeds, AddNormMoeTensors, Moe, MoeNeeds, MoeTensors, RoutingSpec
from pelton.ops.selector import reasons_against
from pelton_backends.reference.composed_moe import ComposedAddNormMoe
from pelton_backends.reference.moe import ReferenceMoe
from pelton_backends.triton.ops.moe import (
    experts,
    hopper,
    hopper_int4,
    hopper_mxfp4,
    hopper_three_groups,
    streamed,
)
from pelton_backends.triton.ops.moe.experts import FEW_PAIRS, TritonMoe
from pelton_backends.triton.ops.moe.normed import FewAddNormMoe
from pelton_backends.triton.ops.moe.split import SplitRows, split
from pelton_plugins.weight_forms.expert_codes import put_codes
from pelton_plugins.weight_forms.groups import pack_scales

pytestmark = pytest.mark.usefixtures("large_programs")
ON_HOPPER = [hopper, hopper_three_groups]


def take_product(monkeypatch: pytest.MonkeyPatch, product: ModuleType) -> None:
    """Sorted rows take this one's tiles, however many rows an expert has."""
    least = 0 if product is hopper_three_groups else 1 << 30
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts._THREE_GROUPS_PAIRS", least)


def replace_product(monkeypatch: pytest.MonkeyPatch, product: ModuleType, multiply: Any) -> None:
    """Sorted rows are multiplied by `multiply`, in tiles of few rows; the other file's product is not there."""
    take_product(monkeypatch, product)
    for module in ON_HOPPER:
        monkeypatch.setattr(module, "experts_matmul", multiply if module is product else None)
    monkeypatch.setattr(product, "ROWS", 6 if product is hopper_three_groups else 4)
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.BANDS", (4, 8, 16))


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
@pytest.mark.parametrize("name", ROUTINGS)
def test_equals_the_reference(name: str, num_tokens: int, device: torch.device) -> None:
    check_moe(TritonMoe, *moe_case(device, ROUTINGS[name], num_tokens), tolerance=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_inputs_that_are_scaled_meet_packed_weights(num_tokens: int, device: torch.device) -> None:
    for form in ("int4_grouped", "int8_grouped"):
        made = moe_case(device, ROUTINGS["input"], num_tokens, sizes=(96, 160), weight_format=form, group_size=32)
        check_moe(TritonMoe, *made, tolerance=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_whole_experts_of_several_ranks(num_tokens: int, device: torch.device) -> None:
    check_whole_experts(TritonMoe, *moe_case(device, ROUTINGS["groups"], num_tokens), counts=(1, 8, 3))
    routing = RoutingSpec(num_experts=6, top_k=2)
    form = {"weight_format": "mxfp4", "activation": "swiglu_oai", "limit": 0.5, "has_bias": True}
    check_whole_experts(TritonMoe, *moe_case(device, routing, num_tokens, sizes=(96, 160), **form), counts=(2, 4))


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_copies_of_experts(num_tokens: int, device: torch.device) -> None:
    check_copies(TritonMoe, num_tokens, device=device)
    check_copies(TritonMoe, num_tokens, device=device, activation="swiglu_oai", limit=0.5, has_bias=True)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_biases_and_the_activation_of_gpt_oss(num_tokens: int, device: torch.device) -> None:
    routing = RoutingSpec(num_experts=6, top_k=2)
    made = moe_case(device, routing, num_tokens, activation="swiglu_oai", limit=0.5, has_bias=True)
    check_moe(TritonMoe, *made, tolerance=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize("form", [{}, {"weight_format": "e4m3", "group_size": 32}], ids=["plain", "e4m3"])
def test_the_activation_of_hy4(num_tokens: int, form: dict[str, Any], device: torch.device) -> None:
    made = moe_case(
        device, ROUTINGS["groups"], num_tokens, sizes=(96, 160), activation="silu_clamped", limit=0.5, **form
    )
    check_moe(TritonMoe, *made, tolerance=1e-4)


@pytest.mark.parametrize("num_tokens", [3, 40])
@pytest.mark.parametrize(
    "form, sizes",
    [
        ({"weight_format": "e4m3"}, (72, 40)),
        ({"weight_format": "e4m3", "group_size": 32}, (160, 72)),
        ({"weight_format": "mxfp4", "activation": "swiglu_oai", "limit": 0.5, "has_bias": True}, (96, 160)),
        ({"weight_format": "int4_grouped", "group_size": 32}, (96, 160)),
        (
            {"weight_format": "int4_grouped", "group_size": 128, "activation": "swiglu_oai", "has_bias": True},
            (256, 128),
        ),
        ({"weight_format": "int4_grouped"}, (96, 160)),
        ({"weight_format": "int8_grouped"}, (72, 40)),
        ({"weight_format": "int8_grouped", "group_size": 64}, (128, 192)),
        ({"weight_format": "int4_minima", "group_size": 32}, (96, 160)),
        ({"weight_format": "int8_minima", "group_size": 32}, (96, 160)),
        ({"weight_format": "nf4", "group_size": 64}, (128, 192)),
        ({"weight_format": "fp4", "group_size": 64, "activation": "swiglu_oai", "has_bias": True}, (64, 128)),
    ],
    ids=str,
)
def test_packed_weights(form: dict[str, Any], sizes: tuple[int, int], num_tokens: int, device: torch.device) -> None:
    routing = RoutingSpec(num_experts=6, top_k=2)
    check_moe(TritonMoe, *moe_case(device, routing, num_tokens, sizes=sizes, **form), tolerance=1e-4)


def test_one_tokens_rows_in_e4m3_of_many_experts_and_several_pieces(device: torch.device) -> None:
    for routing, size in ((RoutingSpec(num_experts=20, top_k=18), 300), (RoutingSpec(num_experts=3, top_k=2), 1100)):
        case = moe_case(device, routing, 1, sizes=(72, size), weight_format="e4m3")
        check_moe(TritonMoe, *case, tolerance=2e-4)


@pytest.mark.parametrize(
    "form",
    [
        {"weight_format": "e4m3", "group_size": 32}, {"weight_format": "mxfp4"}, {"weight_format": "int4_grouped", "group_size": 32},
        {"weight_format": "int8_grouped"}, {"weight_format": "int8_minima", "group_size": 32},
        {"weight_format": "nf4", "group_size": 32},
    ],
    ids=str,
)  # fmt: skip
def test_packed_weights_are_decoded_for_many_tokens(
    form: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.BANDS", (4, 8, 16))
    made = moe_case(device, RoutingSpec(num_experts=6, top_k=2), 40, sizes=(96, 160), **form)
    check_moe(TritonMoe, *made, tolerance=1e-4)


@pytest.mark.parametrize(
    "num_tokens, dtype, has_residual",
    [
        (1, torch.float32, True), (5, torch.float32, False), (5, torch.float16, True), (21, torch.float16, False),
        (22, torch.float16, True),
    ],
    ids=str,
)  # fmt: skip
def test_behind_its_norm(
    num_tokens: int, dtype: torch.dtype, has_residual: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norm and logits are one kernel: what the parts give, residuals of other strides among them."""
    monkeypatch.setattr("pelton_backends.triton.ops.moe.normed._MANY_TOKENS", 22)
    moe, tensors, hidden, slots = moe_case(device, ROUTINGS["corrected"], num_tokens, dtype)
    norm = NormSpec(size=hidden.shape[1], eps=1e-6, unit_offset=num_tokens == 5)
    needs = AddNormMoeNeeds(dtype=moe.dtype, norm=norm, moe=moe)
    bound = AddNormMoeTensors(torch.rand_like(hidden[0]) + 0.5, tensors)
    assert reasons_against(FewAddNormMoe, needs) == []
    assert FewAddNormMoe.token_range(needs)[1] >= num_tokens
    residual = (
        torch.randn(num_tokens, 2 * norm.size, device=device, dtype=dtype)[:, : norm.size] if has_residual else None
    )
    copies = hidden.clone(), None if residual is None else residual.clone()
    for found, want in zip(
        FewAddNormMoe.bind(needs, bound)(hidden, residual, slots), ComposedAddNormMoe.bind(needs, bound)(*copies, slots),
        strict=True,
    ):  # fmt: skip
        tolerance = 1e-4 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)


def test_one_expert_has_all_tokens(device: torch.device) -> None:
    needs, tensors, x, slots = moe_case(device, RoutingSpec(num_experts=6, top_k=1), 40)
    tensors.router.zero_()
    check_moe(TritonMoe, needs, tensors, x, slots, tolerance=1e-4)
    assert tensors.load is not None
    assert tensors.load.tolist()[1:] == [0] * 5


@pytest.mark.parametrize("num_tokens", [3, 20])
def test_of_equal_scores_the_first_experts_are_chosen(num_tokens: int, device: torch.device) -> None:
    needs, tensors, x, slots = moe_case(device, RoutingSpec(num_experts=6, top_k=4), num_tokens)
    tensors.router.zero_()
    check_moe(TritonMoe, needs, tensors, x, slots, tolerance=1e-4)
    assert tensors.load is not None
    assert tensors.load.tolist() == [int((slots >= 0).sum())] * 4 + [0, 0]


def test_both_ways_are_taken() -> None:
    assert 5 * 2 <= FEW_PAIRS < 40


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 300, 600, 3000])
def test_bfloat16_stays_near(num_tokens: int, device: torch.device) -> None:
    routing = RoutingSpec(num_experts=64, top_k=8)
    check_moe(TritonMoe, *moe_case(device, routing, num_tokens, torch.bfloat16), tolerance=0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_format", ["plain", "mxfp4"])
@pytest.mark.parametrize("num_tokens", [600, 1500])
def test_many_tokens_have_biases_and_a_limit(weight_format: str, num_tokens: int, device: torch.device) -> None:
    routing, form = RoutingSpec(num_experts=16, top_k=4), {**OF_GPT_OSS, "weight_format": weight_format}
    made = moe_case(device, routing, num_tokens, torch.bfloat16, sizes=(320, 192), **form)
    assert TritonMoe.bind(*made[:2])._is_sorted  # type: ignore[attr-defined]
    check_moe(TritonMoe, *made, tolerance=0.06)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 40), (192, 40), (192, 136)], ids=str)
@pytest.mark.parametrize("product", ON_HOPPER)
def test_rows_of_many_tokens_are_gathered(
    product: ModuleType, sizes: tuple[int, int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_product(monkeypatch, product)
    made = moe_case(device, RoutingSpec(num_experts=16, top_k=4), 1500, torch.bfloat16, sizes=sizes)
    check_moe(TritonMoe, *made, tolerance=0.06)
    needs, tensors, x, slots = made
    strided = torch.cat([x, x], dim=1)[:, : x.shape[1]]
    op = TritonMoe.bind(needs, tensors)
    torch.testing.assert_close(op(strided, slots), op(x, slots))


def test_layers_that_differ_in_their_experts_alone_do_not_share_kernels(device: torch.device) -> None:
    for routing in (RoutingSpec(num_experts=8, top_k=2), RoutingSpec(num_experts=9, top_k=4)):
        check_moe(TritonMoe, *moe_case(device, routing, 40), tolerance=1e-4)


OF_GPT_OSS: dict[str, Any] = {"has_bias": True, "activation": "swiglu_oai", "limit": 0.5}


@pytest.mark.parametrize(
    "product, form", [*((product, {}) for product in ON_HOPPER), (hopper, OF_GPT_OSS)], ids=["128", "192", "gpt-oss"]
)
@pytest.mark.parametrize("name", [name for name in ROUTINGS if name != "input"])
def test_many_tokens_are_sorted_by_expert(
    product: ModuleType, name: str, form: dict[str, Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch in place of the product, which is for Hopper alone."""

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        experts: torch.Tensor,
        tile_rows: torch.Tensor,
        num_tiles: torch.Tensor,
        activation: str | None = None,
        source: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        limit: float | None = None,
    ) -> torch.Tensor:
        if source is not None:  # what is not written may be any number
            is_pair = torch.arange(source.shape[0], device=x.device) % product.ROWS < tile_rows.repeat_interleave(
                product.ROWS
            )
            x = x[torch.where(is_pair & (source >= 0) & (source < x.shape[0]), source, 0)]
        assert x.shape[0] == experts.shape[0] * product.ROWS >= num_tiles.item() * product.ROWS
        out = []
        for tile in range(int(num_tiles)):
            rows = x[tile * product.ROWS : (tile + 1) * product.ROWS] @ weight[experts[tile]].T
            rows += 0 if bias is None else bias[experts[tile]]
            rows[max(int(tile_rows[tile]), 0) :] = torch.nan  # what no pair has may be left out
            gate, up = rows.chunk(2, dim=-1)
            if activation == "swiglu_oai":
                gate, up = gate.clamp(max=limit), up.clamp(-(limit or 0), limit)
                out.append(gate * torch.sigmoid(1.702 * gate) * (up + 1))
            else:
                out.append(rows if activation is None else torch.nn.functional.silu(gate) * up)
        return torch.cat([*out, out[0].new_full((x.shape[0] - len(out) * product.ROWS, out[0].shape[1]), torch.nan)])

    needs, tensors, x, slots = moe_case(device, ROUTINGS[name], 40, **form)

    class Sorted(TritonMoe):
        @staticmethod
        def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
            op = TritonMoe.bind(needs, tensors)
            op._is_sorted = True  # type: ignore[attr-defined]
            return op

    replace_product(monkeypatch, product, multiply)
    for _ in range(2):  # what the first call leaves behind does no harm
        check_moe(Sorted, needs, tensors, x, slots, tolerance=1e-4)
    assert tensors.load is not None
    tensors.load.zero_()
    check_whole_experts(Sorted, needs, tensors, x, slots, counts=(1, needs.routing.num_experts - 1))


DYNAMIC = InputRounding(dtype="float8_e4m3fn")


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """[R, K] in e4m3, float64: each row's largest number is brought to 128 to 256 by a power of two."""
    power = torch.exp2(8.0 - torch.frexp(rows.float().abs().amax(1, keepdim=True)).exponent)
    return (rows.float() * power).to(torch.float8_e4m3fn).double() / power.double()


def gated(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """silu(gate) * up, float64, rounded to dtype where kernels do."""
    gate, up = sums.to(dtype).double().chunk(2, dim=1)
    return ((gate * torch.sigmoid(gate)).to(dtype).double() * up).to(dtype).double()


def matrix_of(tensors: MoeTensors, name: str, expert: int) -> torch.Tensor:
    """An expert's matrix in e4m3, float64."""
    weight, scale = tensors.experts[name][expert].double(), tensors.experts[f"{name}_scale"][expert].double()
    return weight * scale.repeat_interleave(weight.shape[1] // scale.shape[1], dim=1)


def layer_of_rounded_rows(needs: MoeNeeds, tensors: MoeTensors, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The layer in float64, with both products' inputs rounded to e4m3."""
    chosen, shares = ReferenceMoe.bind(needs, tensors).choose(x.clone(), slots)
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in range(needs.routing.num_experts):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        inner = gated(rounded(x[token]) @ matrix_of(tensors, "gate_up", expert).T, x.dtype)
        rows = (rounded(inner) @ matrix_of(tensors, "down", expert).T).to(x.dtype).double()
        out[token] += rows * shares[token, place, None].double()
    return out


@pytest.mark.parametrize("is_rounded, product", [(False, hopper), (True, hopper), (True, hopper_three_groups)])
@pytest.mark.parametrize("name", ["softmax", "corrected"])
def test_sorted_rows_meet_weights_in_e4m3_as_sums_of_two_or_rounded(
    name: str, is_rounded: bool, product: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, with torch in place of the product. Rounded rows are those of a layer in float64 whose products' inputs are, and off
    by 0.047 of a row's norm in the middle from a layer whose are not: in float64, of random numbers."""

    def multiply(
        x: SplitRows,
        weight: torch.Tensor,
        experts: torch.Tensor,
        tile_rows: torch.Tensor,
        num_tiles: torch.Tensor,
        activation: str | None = None,
        source: torch.Tensor | None = None,
        weight_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert weight_scale is not None and weight.dtype == torch.float8_e4m3fn
        assert x.is_rounded == is_rounded
        high, low = (x.rows.float(), 0) if is_rounded else x.rows.float().chunk(2, dim=1)
        rows = (high + low) * x.inverse[:, None]
        if source is not None:
            rows = rows[source.clamp(0, len(rows) - 1)]
        out = torch.full((len(rows), weight.shape[1]), torch.nan, dtype=x.dtype, device=device)
        for tile in range(int(num_tiles)):
            expert, place = experts[tile], tile * product.ROWS
            scaled = weight[expert].float() * weight_scale[expert]
            count = min(int(tile_rows[tile]), product.ROWS)
            out[place : place + count] = (rows[place : place + count] @ scaled.T).to(x.dtype)
        gate, up = out.chunk(2, dim=-1)
        return out if activation is None else torch.nn.functional.silu(gate) * up

    class Sorted(TritonMoe):
        @staticmethod
        def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
            op = TritonMoe.bind(needs, tensors)
            op._is_sorted = op._splits_rows = True  # type: ignore[attr-defined]
            op._rounds_rows = is_rounded  # type: ignore[attr-defined]
            return op

    replace_product(monkeypatch, product, multiply)
    needs, tensors, x, slots = moe_case(
        device, ROUTINGS[name], 40, torch.bfloat16, sizes=(96, 64), weight_format="e4m3"
    )
    as_it_is = ReferenceMoe.bind(needs, tensors)(x.clone(), slots).float()
    want = layer_of_rounded_rows(needs, tensors, x, slots).float() if is_rounded else as_it_is
    op = Sorted.bind(needs, tensors)
    for _ in range(2):  # what the first call leaves behind does no harm
        got = op(x, slots).float()
        assert not got[slots < 0].any()
        assert (((got - want).norm(dim=1) / want.norm(dim=1))[slots >= 0] < 0.015).float().mean() > 0.95
        off = ((got - as_it_is).norm(dim=1) / as_it_is.norm(dim=1))[slots >= 0]
        assert (off.median() > 0.03) == is_rounded and off.median() < 0.06


def test_rows_of_few_tokens_are_not_rounded(device: torch.device) -> None:
    """40 tokens are not sorted anywhere."""
    needs, tensors, x, slots = moe_case(device, ROUTINGS["softmax"], 40, sizes=(128, 128), weight_format="e4m3")
    allowed = replace(needs, experts=replace(needs.experts, inputs=DYNAMIC))
    found, want = (TritonMoe.bind(one, tensors)(x, slots) for one in (allowed, needs))
    assert torch.equal(found, want)


@pytest.mark.parametrize(
    "form, splits",
    [({"weight_format": "e4m3"}, True), ({}, False), ({"weight_format": "e4m3", "group_size": 32}, False),
     ({"weight_format": "e4m3", "group_size": 128, "group_rows": 128}, True),
     ({"weight_format": "e4m3", "group_size": 128, "group_rows": 64}, False), ({"weight_format": "mxfp4"}, False)],
    ids=str,
)  # fmt: skip
def test_whose_rows_are_sums_of_two(form: dict[str, Any], splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.is_hopper", lambda device: True)
    routing = RoutingSpec(num_experts=6, top_k=2)
    for dtype, sizes, expected in (
        (torch.bfloat16, (256, 128), splits),
        (torch.float32, (256, 128), False),
        (torch.bfloat16, (192, 128), False),
    ):
        needs, tensors, *_ = moe_case(torch.device("cpu"), routing, 2, dtype, sizes=sizes, **form)
        assert TritonMoe.bind(needs, tensors)._splits_rows == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "form, rounds",
    [({"inputs": DYNAMIC}, True), ({}, False), ({"inputs": replace(DYNAMIC, is_dynamic=False)}, False),
     ({"inputs": replace(DYNAMIC, bound=2.0)}, False), ({"inputs": InputRounding(dtype="int8")}, False),
     ({"inputs": DYNAMIC, "group_size": 128, "group_rows": 128}, True),
     ({"inputs": DYNAMIC, "group_size": 128, "group_rows": 64}, False)],
    ids=str,
)  # fmt: skip
def test_whose_rows_are_rounded(form: dict[str, Any], rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that may be, and would be sums of two."""
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.is_hopper", lambda device: True)
    routing = RoutingSpec(num_experts=6, top_k=2)
    for dtype, expected in ((torch.bfloat16, rounds), (torch.float32, False)):
        case = moe_case(torch.device("cpu"), routing, 2, dtype, sizes=(256, 128), weight_format="e4m3", **form)
        assert reasons_against(TritonMoe, case[0]) == []
        assert TritonMoe.bind(*case[:2])._rounds_rows == expected  # type: ignore[attr-defined]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [600, 2500])
@pytest.mark.parametrize("blocks", [{}, {"group_size": 128, "group_rows": 128}], ids=["rows", "blocks"])
def test_sorted_experts_in_e4m3_stay_near(blocks: dict[str, int], num_tokens: int, device: torch.device) -> None:
    """As `test_streamed_experts_stay_near`, with rows of very different sizes, and blocks whose scales are 0 or far apart."""
    routing = RoutingSpec(num_experts=64, top_k=4)
    needs, tensors, x, slots = moe_case(
        device, routing, num_tokens, torch.bfloat16, sizes=(2048, 384), weight_format="e4m3", **blocks
    )
    if blocks:
        for scale in (tensors.experts["gate_up_scale"], tensors.experts["down_scale"]):
            scale[:, :, 1] *= 1e-6
            scale[:, :, 2] = 0
    x *= torch.logspace(-3, 3, num_tokens, device=device)[torch.randperm(num_tokens, device=device), None].to(x.dtype)
    for _ in range(2):
        op = TritonMoe.bind(needs, tensors)
        assert op._splits_rows  # type: ignore[attr-defined]
        check_rows_are_near(op, needs, tensors, x, slots)
        tensors.router.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [600, 2500])
@pytest.mark.parametrize(
    "blocks, product",
    [({}, hopper), ({}, hopper_three_groups), ({"group_size": 128, "group_rows": 128}, hopper)],
    ids=["rows", "rows in tiles of 192", "blocks"],
)
def test_sorted_experts_whose_inputs_are_rounded(
    blocks: dict[str, int], product: ModuleType, num_tokens: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each product against float64 with the same rows, and the whole layer against one whose inputs are not rounded: 0.047 of a row's
    norm off in the middle, at most 0.074 (float64 on a CPU, 400 rows of random numbers)."""
    calls: list[tuple[tuple[Any, ...], torch.Tensor]] = []
    take_product(monkeypatch, product)
    multiply = product.experts_matmul

    def recorded(*args: Any, **options: Any) -> torch.Tensor:
        calls.append((args, multiply(*args, **options)))
        return calls[-1][1]

    monkeypatch.setattr(product, "experts_matmul", recorded)
    routing = RoutingSpec(num_experts=64, top_k=4)
    needs, tensors, x, slots = moe_case(
        device, routing, num_tokens, torch.bfloat16, sizes=(2048, 384), weight_format="e4m3", inputs=DYNAMIC, **blocks
    )
    if blocks:
        for scale in (tensors.experts["gate_up_scale"], tensors.experts["down_scale"]):
            scale[:, :, 1] *= 1e-6
            scale[:, :, 2] = 0
    x *= torch.logspace(-3, 3, num_tokens, device=device)[torch.randperm(num_tokens, device=device), None].to(x.dtype)
    for _ in range(2):
        op = TritonMoe.bind(needs, tensors)
        assert op._rounds_rows  # type: ignore[attr-defined]
        got, want = op(x, slots).float(), ReferenceMoe.bind(needs, tensors)(x.clone(), slots).float()
        assert not got[slots < 0].any()
        off = ((got - want).norm(dim=1) / want.norm(dim=1))[slots >= 0]
        assert 0.03 < off.median() < 0.06 and (off < 0.08).float().mean() > 0.95
        (first, inner), (second, pairs) = calls
        check_product_of_rounded_rows(tensors, "gate_up", x, first, inner, product.ROWS)
        check_product_of_rounded_rows(tensors, "down", inner, second, pairs, product.ROWS)
        calls.clear()
        tensors.router.zero_()


def check_product_of_rounded_rows(
    tensors: MoeTensors, name: str, plain: torch.Tensor, args: tuple[Any, ...], out: torch.Tensor, tile_size: int
) -> None:
    """Of each pair's row: what it is rounded to, exactly, and the product. Every 32 numbers the device cuts a sum to 13 bits behind the
    first one; results are rounded to 2^-9 once, gate, up, activation and product four times. plain: the rows before."""
    x, _, tile_expert, tile_rows, num_tiles, *gathered = args
    assert x.is_rounded and x.rows.shape == plain.shape
    worst = 0.0
    for tile in range(int(num_tiles)):
        count = min(int(tile_rows[tile]), tile_size)
        if count <= 0:
            continue
        places = torch.arange(tile * tile_size, tile * tile_size + count, device=out.device)
        rows = gathered[1][places].long() if gathered else places
        same = x.rows[rows].double() * x.inverse[rows, None].double()
        assert torch.equal(same, rounded(plain[rows]))
        sums = same @ matrix_of(tensors, name, int(tile_expert[tile])).T
        want = gated(sums, out.dtype) if gathered else sums
        worst = max(worst, ((out[places] - want).norm(dim=1) / want.norm(dim=1)).max().item())
    # In blocks a sum is of 128 numbers. Of 2,048 an H200's was off by 0.017, 8 % more than each cut on its own allows.
    cuts = 4 if tensors.experts[f"{name}_scale"].shape[2] > 1 else plain.shape[1] / 32
    assert 0 < worst < 1.25 * (cuts * 2.0**-13 + (4 if gathered else 1) * 2.0**-9)


def sorted_rows(counts: list[int], num_tokens: int, tile_size: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Rows of experts with so many pairs each: source, with -5 where no pair is, tile_expert, tile_rows, num_tiles."""
    generator, experts, rows, source = torch.Generator().manual_seed(1), [], [], []
    for expert, count in enumerate(counts):
        for first in range(0, count, tile_size):
            experts.append(expert)
            rows.append(count - first)
        chosen = torch.randint(0, num_tokens, (count,), generator=generator)
        source.append(torch.cat([chosen, torch.full((-count % tile_size,), -5)]))
    spare = [-7] * 3  # tiles that are not there
    numbers = torch.cat([*source, torch.full((3 * tile_size,), -5)]), experts + spare, rows + spare, [len(experts)]
    return tuple(torch.as_tensor(one, dtype=torch.int32).to(device) for one in numbers)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("product", ON_HOPPER)
@pytest.mark.parametrize("sizes", [(64, 8), (128, 136), (192, 256), (256, 40), (2048, 768)], ids=str)
def test_products_of_uneven_experts(
    sizes: tuple[int, int], product: ModuleType, dtype: torch.dtype, device: torch.device
) -> None:
    """Experts with no row, with one, with as many as a warp group's or a tile's and one more, and no expert with any: each pair's row
    against float64."""
    hidden, size = sizes
    is_rounded = dtype == torch.float8_e4m3fn
    if is_rounded and not hopper.can_split(hidden, hidden):
        pytest.skip("rows of e4m3 are whole steps")
    kind, generator = torch.bfloat16 if is_rounded else dtype, torch.Generator(device).manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    for counts in ([0, 1, 64, 65, 0, 128, 129, 192, 193, 700, 3, 0], [0, 0, 0], [5000, 0, 1]):
        source, *tiles = sorted_rows(counts, 500, product.ROWS, device)
        tile_expert, tile_rows, num_tiles = tiles
        for activation, out_features in (("silu", 2 * size), (None, max(size // 8 * 8, 8))):
            plain = numbers(500 if activation else source.shape[0], hidden).to(kind)
            weight = (numbers(len(counts), out_features, hidden) * hidden**-0.5).to(dtype)
            scale = (
                torch.rand(len(counts), out_features, 1, generator=generator, device=device) + 0.5
                if is_rounded
                else None
            )
            x = split(plain, is_rounded=True) if is_rounded else plain
            got = product.experts_matmul(x, weight, *tiles, activation, source if activation else None, scale)
            same = rounded(plain) if is_rounded else plain.double()
            for tile in range(int(num_tiles)):
                places = torch.arange(min(int(tile_rows[tile]), product.ROWS), device=device) + tile * product.ROWS
                rows, expert = source[places].long() if activation else places, tile_expert[tile]
                sums = same[rows] @ (weight[expert].double() * (1 if scale is None else scale[expert].double())).T
                want = gated(sums, kind) if activation else sums
                off = (got[places].double() - want).norm(dim=1) / want.norm(dim=1)
                assert off.max() < (0.025 if is_rounded else 0.01), (counts, activation, tile)


def check_rows_are_near(op: Moe, needs: MoeNeeds, tensors: MoeTensors, x: torch.Tensor, slots: torch.Tensor) -> None:
    want = ReferenceMoe.bind(needs, tensors)(x.clone(), slots).float()
    got = op(x, slots).float()
    assert not got[slots < 0].any()
    off = ((got - want).norm(dim=1) / want.norm(dim=1))[slots >= 0]
    assert (off < 0.015).float().mean() > 0.95


class Streamed(TritonMoe):
    @staticmethod
    def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
        op = TritonMoe.bind(needs, tensors)
        op._is_streamed = True  # type: ignore[attr-defined]
        return op


@pytest.mark.parametrize("num_tokens, is_streamed", [(40, True), (23, False)])
def test_products_of_some_tokens_in_e4m3_stream(
    num_tokens: int, is_streamed: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch in place of the product, which is for Hopper alone; what no pair has is any number."""
    calls: list[tuple[Any, str | None]] = []

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        share: torch.Tensor,
        out: torch.Tensor,
        order: torch.Tensor,
        counts: torch.Tensor,
        top_k: int,
        tiling: Any,
        activation: str | None = None,
    ) -> None:
        calls.append((tiling, activation))
        out.fill_(torch.nan)
        for expert, count in enumerate(counts.tolist()):
            pairs = order[expert, :count].long()
            rows = x[pairs // top_k] @ (weight[expert].to(x.dtype) * weight_scale[expert]).T
            if activation is None:
                out[pairs] = rows * share.flatten()[pairs][:, None]
            else:
                gate, up = rows.chunk(2, dim=-1)
                out[pairs] = torch.nn.functional.silu(gate) * up

    monkeypatch.setattr(streamed, "experts_product", multiply)
    monkeypatch.setattr(streamed, "choose_tilings", lambda *sizes: [(*sizes, "first"), (*sizes, "second")])
    made = moe_case(device, ROUTINGS["groups"], num_tokens, sizes=(80, 48), weight_format="e4m3")
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts._STREAMED_PAIRS", 23 * 3 / 12 + 0.1)
    check_moe(Streamed, *made, tolerance=1e-4)
    sizes = 12, 80, 48, 32, 1
    assert calls == ([((*sizes, "first"), "silu"), ((*sizes, "second"), None)] if is_streamed else [])


@pytest.mark.parametrize(
    "form, is_streamed",
    [({"weight_format": "e4m3"}, True), ({}, True), ({"weight_format": "e4m3", "group_size": 32}, False),
     ({"weight_format": "e4m3", "group_size": 128, "group_rows": 64}, True),
     ({"weight_format": "e4m3", "group_size": 128, "group_rows": 32}, False),
     ({"weight_format": "e4m3", "has_bias": True}, False), ({"weight_format": "mxfp4"}, False)],
    ids=str,
)  # fmt: skip
def test_which_experts_stream(form: dict[str, Any], is_streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.is_hopper", lambda device: True)
    routing = RoutingSpec(num_experts=6, top_k=2)
    for dtype, expected in ((torch.bfloat16, is_streamed), (torch.float32, False)):
        needs, tensors, *_ = moe_case(torch.device("cpu"), routing, 2, dtype, sizes=(96, 160), **form)
        assert TritonMoe.bind(needs, tensors)._is_streamed == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("sizes", [(128, 2048, 768), (64, 2048, 768), (60, 2048, 1536), (64, 512, 512)], ids=str)
def test_programs_that_stream_have_equal_parts_and_room(sizes: tuple[int, int, int]) -> None:
    experts, hidden, width = sizes
    for pairs in (16, 32):
        tilings = streamed.choose_tilings(experts, hidden, width, pairs)
        assert tilings is not None
        for tiling, out_features, in_features in zip(tilings, (2 * width, hidden), (hidden, width), strict=True):
            assert tiling.programs * tiling.own * streamed.ROWS == experts * out_features
            assert streamed.MIN_PROGRAMS <= tiling.programs <= streamed.PROGRAMS
            assert tiling.stages * tiling.lines * 128 <= in_features * tiling.own
            held = in_features * 2 * pairs
            assert held + tiling.stages * tiling.lines * 128 * streamed.ROWS < 227 * 1024


def test_the_sizes_that_were_measured_have_the_buffers_that_were_compared() -> None:
    found = [streamed.choose_tilings(128, 2048, 768, pairs) for pairs in (16, 32)]
    assert [[(one.lines, one.stages) for one in pair] for pair in found if pair is not None] == [
        [(2, 5), (2, 6)], [(2, 3), (2, 5)],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "sizes, why", [((128, 2048, 1408, 16), "not whole lines"), ((8, 4096, 14336, 32), "rows that no program has room for"),
                   ((6, 256, 128, 16), "too few programs"), ((83, 2048, 768, 16), "no equal parts"),
                   ((128, 2048, 768, 64), "more pairs of an expert than were tried")],
)  # fmt: skip
def test_other_sizes_are_not_streamed(sizes: tuple[int, int, int, int], why: str) -> None:
    assert streamed.choose_tilings(*sizes) is None, why


def test_two_byte_weights_stream_where_that_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    routing = RoutingSpec(num_experts=16, top_k=2)
    needs, tensors, *_ = moe_case(torch.device("cpu"), routing, 2, torch.bfloat16, sizes=(96, 160))
    monkeypatch.setattr(streamed, "choose_tilings", lambda *sizes: sizes)
    op = TritonMoe.bind(needs, tensors)
    streams = op._streams  # type: ignore[attr-defined]
    assert streams(3 * 16, 16) == (16, 96, 160, 16, 2) and streams(16 * 16, 32) == (16, 96, 160, 32, 2)
    assert streams(3 * 16 - 1, 16) is None


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [40, 128, 200])
@pytest.mark.parametrize(
    "form",
    [
        {"weight_format": "e4m3"},
        {"weight_format": "e4m3", "group_size": 128, "group_rows": 64},
        {"weight_format": "plain"},
    ],
    ids=["rows", "blocks", "plain"],
)
def test_streamed_experts_stay_near(num_tokens: int, form: dict[str, Any], device: torch.device) -> None:
    """Choices that are even, and the same for all tokens: most pairs are in tiles beyond an expert's first, and most experts have none.

    The reference rounds too: its rows are off by up to 0.007 of their norm from sums in float64, on a CPU. A few rows may have other
    experts, where two are almost equally good."""
    routing = RoutingSpec(num_experts=64, top_k=4)
    needs, tensors, x, slots = moe_case(device, routing, num_tokens, torch.bfloat16, sizes=(2048, 256), **form)
    for _ in range(2):
        check_rows_are_near(TritonMoe.bind(needs, tensors), needs, tensors, x, slots)
        tensors.router.zero_()


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ORDER = [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]  # of 16 numbers, as a thread's words have their codes


def test_rows_are_reordered_for_words_of_codes(device: torch.device) -> None:
    x = torch.arange(3 * 160, device=device).view(3, 160)[:, :96].to(torch.bfloat16)
    want = x.view(3, 6, 16)[:, :, ORDER].reshape(3, 96)
    assert torch.equal(hopper_mxfp4.reordered(x), want)


def test_instructions_make_numbers_of_codes() -> None:
    """Every code at every place of a word, among others of any kind; and scales, two a number."""
    words = torch.randint(0, 2**32, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    words += [code * 0x11111111 for code in range(16)]
    for word in words:
        codes = [word >> 4 * i & 15 for i in range(8)]
        found = run_assembly(hopper_mxfp4._DECODE, {"$8": word, "$9": 0x3F803F80})
        want = [(-1 if code & 8 else 1) * E2M1[code & 7] for code in (*codes[::2], *codes[1::2])]
        assert [as_bfloat16(found[f"${i}"]) * 2.0**126 for i in range(8)] == want
    for scales in ((0, 127), (64, 190), (113, 121)):
        found = run_assembly(hopper_mxfp4._FACTORS_ASM.value, {"$2": scales[0] | scales[1] << 8})
        for name, scale in zip(("$0", "$1"), scales, strict=True):
            halves = found[name] & 0xFFFF, found[name] >> 16
            assert [as_bfloat16(half) for half in halves] == [2.0 ** (scale - 127 + 126 - 63)] * 2


def operand_of(words: torch.Tensor, scale: int) -> list[float]:
    """A group's words [4, own], four threads' own ones, as the tensor cores take them with scale and zero point `scale`, times 64."""
    zeros = run_assembly(hopper_int4._ZEROS, {"$1": scale})["$0"]
    numbers = [0.0] * (8 * words.numel())
    for thread, own in enumerate(words.tolist()):
        for i, word in enumerate(own):
            found = run_assembly(hopper_int4._DECODE, {"$8": word & 0xFFFFFFFF, "$9": zeros})
            for j in range(8):  # two numbers of either half of 16 columns, of two products
                place = (2 * i + j // 4) * 16 + j // 2 % 2 * 8 + 2 * thread + j % 2
                numbers[place] = as_bfloat16(found[f"${j}"]) * 64
    return numbers


@pytest.mark.parametrize("group_size", hopper_int4.GROUP_SIZES)
def test_words_of_integers_become_numbers_in_the_order_of_the_rows(group_size: int, device: torch.device) -> None:
    """Every code with every zero point, and at every place of a word."""
    generator = torch.Generator().manual_seed(0)
    for zero in (*range(17), 255):
        codes = torch.randint(0, 16, (1, group_size), generator=generator)
        codes[0, zero % 16 :: 2] = torch.arange(group_size)[: codes[0, zero % 16 :: 2].numel()] % 16
        packed = torch.empty(1, group_size // 2, dtype=torch.uint8)
        put_codes(codes, packed)
        scale = int(pack_scales(torch.tensor([[0.75]]), torch.tensor([[zero]])).item())
        found = operand_of(packed.view(torch.int32).view(4, -1), scale)
        want = hopper_int4.reordered((codes - zero).to(device, torch.bfloat16), group_size)
        assert found == want.flatten().tolist()


def test_rows_are_reordered_within_groups(device: torch.device) -> None:
    x = torch.arange(3 * 192, device=device).view(3, 192)[:, :128]
    found = hopper_int4.reordered(x.to(torch.float32), 64).long()
    assert torch.equal(found.unflatten(1, (2, 64)).sort().values.flatten(1), x)
    assert (found[0, :8] % 64).tolist() == [0, 2, 8, 10, 32, 34, 40, 42]  # four threads have the words of 8 bytes each


FORMS_OF_HOPPER = {
    "mxfp4": {"weight_format": "mxfp4", "activation": "swiglu_oai", "limit": 0.5, "has_bias": True},
    "int4": {
        "weight_format": "int4_grouped", "group_size": 64, "activation": "swiglu_oai", "limit": 0.5, "has_bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("num_tokens, is_taken", [(40, True), (3, True), (1, False), (600, True), (2049, False)])
@pytest.mark.parametrize("name", FORMS_OF_HOPPER)
def test_products_of_some_tokens_in_four_bits_on_hopper(
    name: str, num_tokens: int, is_taken: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch in place of the product, which is for Hopper alone: what it is given, and in which order its rows are."""
    calls: list[tuple[int, str | None, float | None]] = []
    is_int4 = name == "int4"
    numbers = torch.arange(64, device=device)[None].float()
    places = (hopper_int4.reordered(numbers, 64) if is_int4 else in_order(numbers, torch.tensor(ORDER, device=device)))[
        0
    ].long()

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor, share: torch.Tensor, out: torch.Tensor,
        order: torch.Tensor, counts: torch.Tensor, top_k: int, most_pairs: int, activation: str | None = None, limit: float | None = None,
    ) -> None:  # fmt: skip
        calls.append((most_pairs, activation, limit))
        out.fill_(torch.nan)
        x = in_order(x, places.argsort()).float()
        for expert, count in enumerate(counts.tolist()):
            pairs = order[expert, :count].long()
            matrix = (decode_int4 if is_int4 else decode_mxfp4)(weight[expert], scale[expert]).float()
            rows = x[pairs // top_k] @ matrix.T + bias[expert].float()
            if activation is None:
                out[pairs] = (rows * share.flatten()[pairs][:, None]).to(out.dtype)
            else:
                gate, up = rows.chunk(2, dim=-1)
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                out[pairs] = in_order((gate * torch.sigmoid(1.702 * gate) * (up + 1)).to(out.dtype), places)

    monkeypatch.setattr(hopper_int4 if is_int4 else hopper_mxfp4, "experts_product", multiply)
    routing = RoutingSpec(num_experts=12, top_k=3)
    case = moe_case(device, routing, num_tokens, torch.bfloat16, sizes=(192, 128), **FORMS_OF_HOPPER[name])

    class Decoded(TritonMoe):
        @staticmethod
        def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
            op = TritonMoe.bind(needs, tensors)
            setattr(op, f"_is_{name}", True)
            op._bands = experts.BANDS_IN_REGISTERS  # type: ignore[attr-defined]
            return op

    check_moe(Decoded, *case, tolerance=2e-2)
    most_pairs = 32 if num_tokens <= 64 else 128  # of 12 experts 64 tokens have 16 pairs on average
    assert calls == ([(most_pairs, "swiglu_oai", 0.5), (most_pairs, None, None)] if is_taken else [])


def test_sizes_that_are_decoded_where_they_are_multiplied() -> None:
    in_mxfp4 = [hopper_mxfp4.can_multiply(*sizes) for sizes in ((2880, 320), (2880, 256), (2880, 288))]
    assert in_mxfp4 == [True, False, False]
    sizes = (
        (2048, 768, 128),
        (2048, 384, 128),
        (2880, 288, 32),
        (2880, 288, 64),
        (2048, 256, 128),
        (2048, 768, None),
        (2048, 768, 256),
    )
    assert [hopper_int4.can_multiply(*size) for size in sizes] == [True, True, True, False, False, False, False]


@pytest.mark.parametrize(
    "form, is_taken",
    [({"group_size": 32}, True), ({"group_size": 128}, False), ({}, False), ({"group_size": 32, "has_bias": True}, False),
     ({"group_size": 32, "activation": "gelu"}, False), ({"group_size": 32, "weight_format": "int4_minima"}, False)],
    ids=str,
)  # fmt: skip
def test_which_experts_in_int4_are_decoded_where_they_are_multiplied(
    form: dict[str, Any], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that were run on a device, by sizes that are multiples of the group."""
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.is_hopper", lambda device: True)
    form = {"weight_format": "int4_grouped", **form}
    for dtype, expected in ((torch.bfloat16, is_taken), (torch.float16, False)):
        sizes = (512, 384) if form.get("group_size") != 128 else (512, 256)
        needs, tensors, *_ = moe_case(
            torch.device("cpu"), RoutingSpec(num_experts=6, top_k=2), 2, dtype, sizes=sizes, **form
        )
        assert TritonMoe.bind(needs, tensors)._is_int4 == expected  # type: ignore[attr-defined]


def in_order(rows: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Rows with each part of so many numbers in this order."""
    return rows.unflatten(1, (-1, len(order)))[:, :, order].flatten(1)


def decode_int4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [rows, K / 2], bytes as those of `decode_mxfp4`; scale [rows, groups] int32 with zero points -> [rows, K] float64."""
    blocks = weight.unflatten(1, (-1, 16)).long()
    codes = torch.cat([blocks & 15, blocks >> 4], dim=2).flatten(1).unflatten(1, (scale.shape[1], -1))
    factor = (scale & -256).view(torch.float32).double()
    return ((codes - (scale & 255)[:, :, None]) * factor[:, :, None]).flatten(1)


def decode_mxfp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight [rows, K / 2], byte b of a block of 32 numbers b and 16 + b; scale [rows, K / 32] -> [rows, K] float32."""
    blocks = weight.unflatten(1, (-1, 16)).long()
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], device=weight.device)
    numbers = torch.cat([table[blocks & 15], table[blocks >> 4]], dim=2)
    return (numbers * torch.exp2(scale.float() - 127)[:, :, None]).flatten(1)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [9, 40, 128, 250, 500, 1000, 2048, 2049])
@pytest.mark.parametrize("sizes", [(2880, 2880), (320, 576), (704, 1088)], ids=str)
@pytest.mark.parametrize("form", [{"activation": "swiglu_oai", "limit": 7.0, "has_bias": True}, {}], ids=str)
def test_experts_in_mxfp4_stay_near(
    form: dict[str, Any], sizes: tuple[int, int], num_tokens: int, device: torch.device
) -> None:
    """As `test_streamed_experts_stay_near`; sizes that are no whole steps, and tiles of rows that an expert's last one does not fill."""
    routing = RoutingSpec(num_experts=16, top_k=4)
    needs, tensors, x, slots = moe_case(
        device, routing, num_tokens, torch.bfloat16, sizes=sizes, weight_format="mxfp4", **form
    )
    for _ in range(2):
        op = TritonMoe.bind(needs, tensors)
        assert op._is_mxfp4  # type: ignore[attr-defined]
        check_rows_are_near(op, needs, tensors, x, slots)
        tensors.router.zero_()


SIZES_IN_INT4 = [((2048, 768), 128), ((2048, 768), 32), ((2880, 1440), 32), ((704, 1088), 64), ((640, 384), 128)]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 9, 40, 128, 250, 512])
@pytest.mark.parametrize("sizes, group_size", SIZES_IN_INT4, ids=str)
@pytest.mark.parametrize("has_zeros", [True, False])
def test_products_in_int4_are_those_of_float64(
    has_zeros: bool, sizes: tuple[int, int], group_size: int, num_tokens: int, device: torch.device
) -> None:
    """Choices that are even, and the same for all tokens. Weights are exact: what is off is the rounding of results, of a row's norm."""
    num_experts, top_k = 16, 4
    hidden, size = sizes
    generator = torch.Generator().manual_seed(num_tokens)

    def integers(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        codes = torch.randint(0, 256, (num_experts, rows, width // 2), dtype=torch.uint8, generator=generator)
        scales = (torch.rand(num_experts, rows, width // group_size, generator=generator) + 0.5) * width**-0.5 / 4
        zeros = torch.randint(0, 17, scales.shape, generator=generator) if has_zeros else torch.full(scales.shape, 8)
        return codes.to(device), pack_scales(scales.bfloat16(), zeros).to(device)

    gate_up, down = integers(2 * size, hidden), integers(hidden, size)
    x = torch.randn(num_tokens, hidden, generator=generator).to(device, torch.bfloat16)
    share = torch.rand(num_tokens * top_k, generator=generator).to(device) + 0.5
    for is_even in (True, False):
        scores = torch.rand(num_tokens if is_even else 1, num_experts, generator=generator)
        chosen = scores.topk(top_k).indices.expand(num_tokens, top_k).flatten()
        order = torch.zeros(num_experts, num_tokens, dtype=torch.int32)
        for expert in range(num_experts):
            pairs = (chosen == expert).nonzero().flatten()
            order[expert, : len(pairs)] = pairs
        counts = chosen.bincount(minlength=num_experts).to(device, torch.int32)
        most_pairs = min(max(triton.next_power_of_2(2 * num_tokens * top_k // num_experts), 16), 64)
        inner = torch.full((num_tokens * top_k, size), torch.nan, device=device, dtype=torch.bfloat16)
        out = torch.full((num_tokens * top_k, hidden), torch.nan, device=device, dtype=torch.bfloat16)
        pairs_of = order.to(device), counts
        rows = hopper_int4.reordered(x, group_size)
        hopper_int4.experts_product(rows, *gate_up, None, share, inner, *pairs_of, top_k, most_pairs, "silu")
        hopper_int4.experts_product(inner, *down, None, share, out, *pairs_of, 1, most_pairs)
        back = (
            hopper_int4.reordered(torch.arange(group_size, device=device)[None].float(), group_size)[0].long().argsort()
        )
        inner = in_order(inner, back)
        want_inner, want = inner.double(), out.double()
        for expert in chosen.unique().tolist():
            pairs = (chosen == expert).nonzero().flatten().to(device)
            sums = x[pairs // top_k].double() @ decode_int4(gate_up[0][expert], gate_up[1][expert]).T
            gate, up = sums.to(torch.bfloat16).double().chunk(2, dim=1)
            want_inner[pairs] = (gate * torch.sigmoid(gate)).to(torch.bfloat16).double() * up
            sums = inner[pairs].double() @ decode_int4(down[0][expert], down[1][expert]).T
            want[pairs] = sums * share[pairs, None].double()
        assert ((inner - want_inner).norm(dim=1) / want_inner.norm(dim=1)).max() < 0.005
        assert ((out - want).norm(dim=1) / want.norm(dim=1)).max() < 0.002


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [2, 9, 128, 500, 1000, 2048, 2049])
@pytest.mark.parametrize("sizes, group_size", [((2048, 768), 128), ((2880, 1440), 32)], ids=str)
def test_experts_in_int4_stay_near(
    sizes: tuple[int, int], group_size: int, num_tokens: int, device: torch.device
) -> None:
    """As `test_experts_in_mxfp4_stay_near`."""
    form = {"weight_format": "int4_grouped", "group_size": group_size}
    routing = RoutingSpec(num_experts=16, top_k=4)
    needs, tensors, x, slots = moe_case(device, routing, num_tokens, torch.bfloat16, sizes=sizes, **form)
    for _ in range(2):
        op = TritonMoe.bind(needs, tensors)
        assert op._is_int4  # type: ignore[attr-defined]
        check_rows_are_near(op, needs, tensors, x, slots)
        tensors.router.zero_()
