"""The op of a layer of experts: router, the experts that it chooses for each token, and their weighted sum.

T tokens, H hidden size, E experts, k experts a token, I intermediate size of an expert (of this rank). Fedus et al., Switch
Transformers (arXiv:2101.03961), section 2; groups and correction: DeepSeek-V3 (arXiv:2412.19437), section 2.1.2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from pelton.ops.interface import AddNormNeeds, AllReduce, FusedOp, InputRounding, optional

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSpec:
    """From the router's E logits (float32) to k experts and their weights.

    scores = scoring(logits). Experts are chosen by scores + correction, with groups only from the `top_groups` best groups;
    equal ones by the lower index. Their weights are their scores, divided by their sum where `is_renormalized`, times `scale`."""

    num_experts: int  # E
    top_k: int  # k
    scoring: str = "softmax"  # softmax, sigmoid
    is_renormalized: bool = True
    scale: float = 1.0
    num_groups: int = 1  # of E / num_groups experts, which follow each other
    top_groups: int = 1
    group_score: str = "max"  # of a group: max, its best expert; top2, the sum of its best two
    has_correction: bool = optional(False)  # `MoeTensors.correction` is there
    scales_input: bool = optional(False)  # weights multiply what experts read, not what they give (Llama 4)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """One rank's part of the experts: down(gated(gate_up(x)))."""

    hidden_size: int  # H
    intermediate_size: int  # I
    activation: str = "silu"  # silu, gelu, gelu_tanh: activation(gate) * up
    """swiglu_oai: gate and up clamped to `limit`, gate * sigmoid(1.702 gate) * (up + 1) (gpt-oss); silu_clamped: silu of the same (Hy4)."""
    limit: float | None = optional(None)
    weight_format: str = optional("plain")
    """plain: `gate_up` [E, 2 I, H], gate rows first, and `down` [E, H, I], of the model's dtype. Others have `gate_up_scale`, `down_scale`
    [E, rows, groups] too. e4m3: float32. mxfp4: uint8 [E, rows, columns / 2], byte b of a block of 32 has number b below number 16 + b;
    uint8, powers of two from 2^-127, of 32. nf4, fp4: bytes alike; float32. int4_grouped, int4_minima: bytes alike, int8_grouped,
    int8_minima: uint8 codes; int32. Of `packed_blocks`, as `weight_format` there says: `gate`, `up`, `down` [E, *panels_shape] in place."""
    group_size: int | None = optional(None)  # numbers of a row with one scale, but for mxfp4; None: all
    group_rows: int = 1  # rows that have the same scales, from the first one of gate, of up and of down on
    inputs: InputRounding | None = None
    """What both products read may be rounded so or left as it is, whichever an op finds faster; None: it is left as it is."""
    has_bias: bool = optional(False)  # `gate_up_bias` [E, 2 I] and `down_bias` [E, H]
    first_expert: int = optional(0)
    num_held: int | None = optional(None)
    """Expert parallelism: this rank has these alone, from `first_expert` on, each whole, and E is `num_held` in the shapes above. It
    leaves to other ranks what those they have give. None: it has all, of each a part. Where experts have copies (`MoeTensors.copies`)
    these are places, not numbers of experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeNeeds:
    dtype: str
    routing: RoutingSpec
    experts: ExpertsSpec
    max_num_tokens: int  # T is never more
    has_router_bias: bool = optional(False)
    counts_load: bool = optional(False)  # `MoeTensors.load` is there
    num_engines: int = optional(1)  # that share the experts: `MoeTensors.exchange` is there where there are several
    has_copies: bool = optional(False)  # `MoeTensors.copies` is there
    has_parts: bool = optional(False)  # `choose` and `compute` of the bound op are called too (`MoeParts`)


class TokenExchange(Protocol):
    """Between engines that share the experts of their layers. All enter the same layers in the same order, each with its own tokens."""

    rank: int
    size: int
    rows: Sequence[int]
    """Tokens of each engine in this step, at most; empty where nobody else is there. All go one way: `gather`, `scatter`, or two swaps."""

    def swap(
        self, rows: Tensor, counts: Sequence[int], back: Sequence[int] | None = None
    ) -> tuple[Tensor, Sequence[int]]:
        """Send `counts[r]` of the rows [sum(counts), W] to each engine r, one part after another. Return what came, in order of engine, and
        how many from each. back: how many will come, in the answer to a first call."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """[T, W] of this engine -> [size x M, W] of all, in order of engine. M >= T is the same for all; each one's rows are followed by
        zeros."""
        ...

    def scatter(self, rows: Tensor, num_rows: int) -> Tensor:
        """[size x M, H], partial -> [num_rows, H], the sums of this engine's own."""
        ...

    def add_layer(self, join: Callable[[], object]) -> None:
        """Say how a layer is entered without tokens, in the order of layers."""
        ...


@dataclass(slots=True)
class MoeTensors:
    router: Tensor  # [E, H], of the model's dtype or float32
    experts: dict[str, Tensor]  # by the names of `ExpertsSpec`
    router_bias: Tensor | None = None  # [E]
    correction: Tensor | None = None  # [E] float32
    load: Tensor | None = None  # [E], of copies [P], int64: how many tokens each that this rank has was given; added to
    exchange: TokenExchange | None = None
    copies: Tensor | None = None
    """[E, 1 + C] int32: how many of the P places have an expert, and which; row t takes the (t mod n)-th."""
    held_by: Sequence[range] = ()  # of each engine: places of its rank that the exchange is with


class Moe(Protocol):
    """Optional, of `AddNormMoe` as well: `read_by(reader)`. What is returned of n tokens is then given to `reader(n)` alone, which may
    have agreed with the op on something else that has a tensor's place and `shape`. None, also of `reader(n)`: anybody may read it."""

    def __call__(self, x: Tensor, slot_mapping: Tensor) -> Tensor:
        """[T, H] -> [T, H], partial over ranks; logits of the router, weights and sums are float32.

        slot_mapping [T] int64: a token with -1 is padding, chooses no expert, and gets zeros. Nothing is asked of the device."""
        ...


class MoeParts(Moe, Protocol):
    """The halves of the op, for tokens that are on their way between them."""

    def choose(self, x: Tensor, slot_mapping: Tensor) -> tuple[Tensor, Tensor]:
        """Return the places of each token's experts among those of all ranks [T, k] int32, -1 of padding, and their weights float32."""
        ...

    def compute(self, x: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """[T, H] -> [T, H], partial, of such a choice."""
        ...


MOE = FusedOp(name="moe", needs=MoeNeeds, tensors=MoeTensors)


# add_norm_moe: the norm before a layer of experts, and the layer. Optional, as `add_norm_linear` is: composed of `add_norm` and `moe`
# where no kernel fits.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormMoeNeeds(AddNormNeeds):
    moe: MoeNeeds


@dataclass(slots=True)
class AddNormMoeTensors:
    norm: Tensor  # [H]
    moe: MoeTensors
    post_norm: Tensor | None = None  # [H] normalises the sub-layer's output before it is added
    reduce: AllReduce | None = None  # None with one rank


class AddNormMoe(Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None, slot_mapping: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """residual' = post_norm(reduce(hidden)) + residual, x = norm(residual'); returns (moe(x, slot_mapping), x, residual').

        hidden [T, H], partial; residual [T, H], or None before the first layer. Both may be overwritten."""
        ...


ADD_NORM_MOE = FusedOp(name="add_norm_moe", needs=AddNormMoeNeeds, tensors=AddNormMoeTensors)
