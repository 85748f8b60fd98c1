"""The op of experts.

Few tokens are organised by output rows: each program reads rows of the experts that one token chose. More are ordered by expert, so
that each expert's weights are read once for all its tokens, in tiles of its pairs; of many tokens the rows are sorted by expert, and
both matrices are one product each (`hopper`). All sizes of memory and of grids follow from the number of tokens, so that a captured
step serves whatever is chosen; a tile that no expert has ends at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from pelton_backends.triton.launch import Launcher, alignment
from pelton_backends.triton.ops.linear.gemv import DTYPES, inner_contiguous
from pelton_backends.triton.ops.moe import choose, hopper, kernels
from pelton_backends.triton.ops.pieces import ACTIVATIONS, is_hopper
from pelton_backends.triton.runtime import has_pdl, launch_options

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.moe import Moe, MoeNeeds, MoeTensors

FEW_PAIRS = 32  # up to here by output rows
FEW_LOGITS = 8  # tokens whose router's product is ours: a kernel of cuBLAS lets none start ahead
BANDS = (64, 256, 1024)
"""Tokens up to which tiles are equally large: warm-up has a step in each band. More tokens are sorted, where the device can."""
_MAX_EXPERTS = 1024

_few_logits = Launcher(choose.few_logits_kernel)
_route = Launcher(choose.route_kernel)
_order = Launcher(kernels.order_kernel)
_gate_up = Launcher(kernels.gate_up_kernel)
_down = Launcher(kernels.down_kernel)
_combine = Launcher(kernels.combine_kernel)
_place = Launcher(kernels.place_kernel)
_few_gate_up = Launcher(kernels.few_gate_up_kernel)
_few_down = Launcher(kernels.few_down_kernel)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Columns of a program in the first product (of gate, and as many of up) and in the second, and numbers of a sum at a time."""

    gate_columns: int
    down_columns: int
    inner: int
    warps: int
    stages: int


class TritonMoe:
    handles = frozenset(
        ["has_correction", "scales_input", "limit", "has_bias", "has_router_bias", "counts_load", "weight_format"]
    )

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        reasons = [] if needs.dtype in DTYPES else [f"dtype {needs.dtype}"]
        if needs.experts.weight_format != "plain":
            reasons.append(f"weight format {needs.experts.weight_format!r}, only 'plain'")
        if needs.experts.activation not in (*ACTIVATIONS, "swiglu_oai"):
            reasons.append(f"activation {needs.experts.activation!r}")
        if needs.routing.num_experts > _MAX_EXPERTS:
            reasons.append(f"{needs.routing.num_experts} experts, at most {_MAX_EXPERTS}")
        return reasons

    @staticmethod
    def bind(needs: MoeNeeds, tensors: MoeTensors) -> Moe:
        return _BoundMoe(needs, tensors)


class _BoundMoe:
    """Shapes and dtypes as `pelton.ops.moe.Moe` says."""

    def __init__(self, needs: MoeNeeds, tensors: MoeTensors) -> None:
        routing, experts = needs.routing, needs.experts
        self._tensors, self._weights = tensors, tensors.experts
        self._num_experts, self._top_k = routing.num_experts, routing.top_k
        self._hidden, self._size = experts.hidden_size, experts.intermediate_size
        self._pdl = has_pdl(tensors.router.device)
        size = routing.num_experts // routing.num_groups
        self._routing = {
            "E": routing.num_experts, "K": routing.top_k, "KB": triton.next_power_of_2(routing.top_k),
            "GROUPS": routing.num_groups, "GB": triton.next_power_of_2(routing.num_groups), "SIZE": size,
            "SB": triton.next_power_of_2(size), "TOP_GROUPS": routing.top_groups,
            "IS_TOP2": routing.group_score == "top2", "IS_SIGMOID": routing.scoring == "sigmoid",
            "IS_RENORMALIZED": routing.is_renormalized, "SCALE": float(routing.scale), "PDL": self._pdl,
        }  # fmt: skip
        self._activation = {"ACTIVATION": experts.activation, "LIMIT": experts.limit}
        self._common = {"SCALES_INPUT": routing.scales_input, "PDL": self._pdl}
        self._options = launch_options(self._pdl)
        self._is_wide = tensors.router.dtype == torch.float32
        device = tensors.router.device
        self._is_sorted = (
            is_hopper(device) and needs.dtype in ("bfloat16", "float16") and not routing.scales_input
            and not experts.has_bias and experts.activation in ACTIVATIONS
            and experts.hidden_size % 8 == experts.intermediate_size % 8 == 0 and alignment(*tensors.experts.values()) == 0
        )  # fmt: skip

    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        num_tokens = x.shape[0]
        if num_tokens == 0:
            return torch.empty_like(x)
        x = inner_contiguous(x)
        if num_tokens > BANDS[-1] and self._is_sorted:
            return self._sorted(x, slot_mapping)
        experts, shares = self._choose(x, slot_mapping)
        if num_tokens * self._top_k <= FEW_PAIRS:
            return self._few(x, experts, shares)
        return self._many(x, experts, shares)

    def _key(self, x: Tensor, *more: Any) -> tuple[Any, ...]:
        bound = self._weights["gate_up"], self._weights["down"]
        return (x.dtype, x.device, x.stride(0), self._hidden, self._size, alignment(x, *bound), *more)

    def _logits(self, x: Tensor) -> Tensor:
        """[T, E] float32"""
        router = self._tensors.router
        if x.shape[0] <= FEW_LOGITS:
            return self._few_logits(x)
        if x.dtype == torch.float32 or self._is_wide or x.device.type != "cuda":
            return torch.mm(x.float(), router.float().t())
        return torch.mm(x, router.t(), out_dtype=torch.float32)

    def _few_logits(self, x: Tensor) -> Tensor:
        router, hidden, rows = self._tensors.router, self._hidden, 2
        logits = torch.empty((x.shape[0], self._num_experts), dtype=torch.float32, device=x.device)
        block = min(triton.next_power_of_2(hidden), 1024)
        constants = {
            "E": self._num_experts, "H": hidden, "R": rows, "BK": block, "AHEAD": min(triton.cdiv(hidden, block), 4),
            "PDL": self._pdl,
        }  # fmt: skip
        _few_logits(
            (x.dtype, router.dtype, x.device, x.stride(0), alignment(x, router), *constants.values()),
            (triton.cdiv(self._num_experts, rows), x.shape[0]), (x, router, logits, x.stride(0)), constants,
            num_warps=4, **self._options,
        )  # fmt: skip
        return logits

    def _choose(
        self, x: Tensor, slots: Tensor, ranks: Tensor | None = None, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Experts [T, k] int32 and their weights [T, k] float32. ranks [T, k] int32: is given each pair's place among its expert's;
        counts [E] int32, zeros: is given how many there are."""
        num_tokens, tensors = x.shape[0], self._tensors
        experts = torch.empty((num_tokens, self._top_k), dtype=torch.int32, device=x.device)
        shares = torch.empty((num_tokens, self._top_k), dtype=torch.float32, device=x.device)
        _route(
            (x.device, tuple(self._routing.values()), tensors.router_bias is None or tensors.router_bias.dtype,
             tensors.correction is None, tensors.load is None, ranks is None),
            (num_tokens,),
            (self._logits(x), tensors.router_bias, tensors.correction, slots, experts, shares, tensors.load,
             counts, ranks),
            self._routing, num_warps=1 if self._num_experts <= 128 else 4, **self._options,
        )  # fmt: skip
        return experts, shares

    def _few(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        hidden, size, weights = self._hidden, self._size, self._weights
        num_pairs = experts.numel()
        inner = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        out = torch.empty((x.shape[0], hidden), dtype=x.dtype, device=x.device)
        sizes = {"E": self._num_experts, "H": hidden, "SIZE": size, "K": self._top_k}
        gate = {**sizes, "R": 2, "BK": min(triton.next_power_of_2(hidden), 1024), **self._activation, **self._common}
        _few_gate_up(
            self._key(x, *gate.values()), (triton.cdiv(size, 2), num_pairs),
            (x, weights["gate_up"], weights.get("gate_up_bias"), experts, shares, inner, x.stride(0)),
            gate, num_warps=4, **self._options,
        )  # fmt: skip
        down = {**sizes, "R": 2, "BK": min(triton.next_power_of_2(size), 512), **self._common}
        _few_down(
            self._key(x, *down.values()), (triton.cdiv(hidden, 2), x.shape[0]),
            (inner, weights["down"], weights.get("down_bias"), experts, shares, out),
            down, num_warps=2, **self._options,
        )  # fmt: skip
        return out

    def _many(self, x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
        hidden, size, top_k, weights = self._hidden, self._size, self._top_k, self._weights
        num_tokens, num_pairs = x.shape[0], experts.numel()
        block_rows = self._tile_rows(num_tokens)
        num_tiles = min(num_pairs, triton.cdiv(num_pairs, block_rows) + self._num_experts)
        order, tiles = self._ordered(experts, block_rows, num_tiles)
        inner = torch.empty((num_pairs, size), dtype=x.dtype, device=x.device)
        tile = self._tile(block_rows, x.element_size())
        gate = {
            "H": hidden, "SIZE": size, "K": top_k, "BM": block_rows, "BN": tile.gate_columns, "BK": tile.inner,
            **self._activation, **self._common,
        }  # fmt: skip
        _gate_up(
            self._key(x, *gate.values()), (triton.cdiv(size, tile.gate_columns), num_tiles),
            (x, weights["gate_up"], weights.get("gate_up_bias"), shares, inner, order, *tiles, x.stride(0)),
            gate, num_warps=tile.warps, num_stages=tile.stages, **self._options,
        )  # fmt: skip
        # Few sums stay as they are computed; of many, two bytes each are enough to write and to read.
        dtype = torch.float32 if num_tokens <= BANDS[1] else x.dtype
        pairs = torch.empty((num_pairs, hidden), dtype=dtype, device=x.device)
        down = {
            "H": hidden, "SIZE": size, "BM": block_rows, "BN": tile.down_columns, "BK": tile.inner, **self._common,
        }  # fmt: skip
        _down(
            self._key(x, dtype, *down.values()), (triton.cdiv(hidden, tile.down_columns), num_tiles),
            (inner, weights["down"], weights.get("down_bias"), shares, pairs, order, *tiles),
            down, num_warps=tile.warps, num_stages=tile.stages, **self._options,
        )  # fmt: skip
        return self._combined(x, pairs, experts)

    def _combined(
        self, x: Tensor, pairs: Tensor, experts: Tensor, places: Tensor | None = None, shares: Tensor | None = None
    ) -> Tensor:
        num_tokens, hidden, num_experts = x.shape[0], self._hidden, self._num_experts
        out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
        block = min(triton.next_power_of_2(hidden), 1024)
        constants = {
            "H": hidden, "E": num_experts, "K": self._top_k, "BLOCK": block, "PDL": self._pdl,
        }  # fmt: skip
        _combine(
            self._key(x, pairs.dtype, places is None, *constants.values()), (num_tokens, triton.cdiv(hidden, block)),
            (pairs, experts, shares, places, out),
            constants, num_warps=4, **self._options,
        )  # fmt: skip
        return out

    def _sorted(self, x: Tensor, slots: Tensor) -> Tensor:
        hidden, num_experts, weights, rows = self._hidden, self._num_experts, self._weights, hopper.ROWS
        num_tokens, num_pairs = x.shape[0], x.shape[0] * self._top_k
        ranks = torch.empty((num_tokens, self._top_k), dtype=torch.int32, device=x.device)
        places = torch.empty_like(ranks)
        counts = torch.zeros(num_experts, dtype=torch.int32, device=x.device)
        experts, shares = self._choose(x, slots, ranks, counts)
        most_tiles = triton.cdiv(num_pairs, rows) + num_experts
        arranged = torch.empty((most_tiles * rows, hidden), dtype=x.dtype, device=x.device)
        tile_expert = torch.empty(most_tiles, dtype=torch.int32, device=x.device)
        num_tiles = torch.empty(1, dtype=torch.int32, device=x.device)
        constants = {
            "H": hidden, "HB": triton.next_power_of_2(hidden), "E": num_experts,
            "EB": triton.next_power_of_2(num_experts), "K": self._top_k, "BM": rows, "PDL": self._pdl,
        }  # fmt: skip
        _place(
            self._key(x, *constants.values()), (num_tokens,),
            (x, experts, ranks, counts, places, arranged, tile_expert, num_tiles, x.stride(0)),
            constants, num_warps=4, **self._options,
        )  # fmt: skip
        activation = str(self._activation["ACTIVATION"])
        inner = hopper.experts_matmul(arranged, weights["gate_up"], tile_expert, num_tiles, activation)
        pairs = hopper.experts_matmul(inner, weights["down"], tile_expert, num_tiles)
        return self._combined(x, pairs, experts, places, shares)

    @staticmethod
    def _tile(block_rows: int, element_size: int) -> _Tile:
        """As measured on an H200 with Qwen3-30B-A3B's experts: 8,192 tokens take 1.25 ms, with half as many columns 1.58 ms."""
        if element_size == 4:
            return _Tile(32, 64, 32, warps=4, stages=2)
        if block_rows <= 32:
            return _Tile(32, 64, 128, warps=4, stages=4)
        if block_rows < 128:
            return _Tile(64, 128, 64, warps=4, stages=4)
        return _Tile(128, 256, 64, warps=8, stages=3)

    def _tile_rows(self, num_tokens: int) -> int:
        """Rows of a tile: about the pairs of an expert of the band's last number of tokens, where they spread evenly."""
        last = next((band for band in BANDS if num_tokens <= band), 4 * BANDS[-1])
        return min(max(triton.next_power_of_2(last * self._top_k // self._num_experts), 16), 128)

    def _ordered(
        self, experts: Tensor, block_rows: int, num_tiles: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Pairs by expert [P] int32; of each tile its expert, and its places [start, stop) in them, int32."""
        num_pairs = experts.numel()
        order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
        # Rows of whole 16 bytes, and one of two lengths: the kernel is compiled for few kinds of arguments.
        tiles = torch.empty((3, triton.cdiv(num_tiles, 4) * 4), dtype=torch.int32, device=experts.device).unbind()
        constants = {
            "E": self._num_experts, "EB": triton.next_power_of_2(self._num_experts + 1), "BM": block_rows,
            "BLOCK": 256 if num_pairs <= 256 else 4096, "PDL": self._pdl,
        }  # fmt: skip
        _order(
            (experts.device, *constants.values()), (self._num_experts,),
            (experts, order, *tiles, num_pairs, num_tiles), constants, num_warps=1 if num_pairs <= 256 else 8, **self._options,
        )  # fmt: skip
        return order, (tiles[0], tiles[1], tiles[2])
