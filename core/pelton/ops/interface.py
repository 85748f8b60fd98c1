"""The fused ops: what a kernel may compute in a model's step instead of torch.

A sub-layer returns its bare output, partial over ranks; the op that reads it reduces it, norms it
(models with post-norms) and adds the residual. So a decode step is five calls a layer:

    add_norm_linear (QKV) -> qk_norm_rope_write_kv and attention (`BoundAttention`) -> linear (O)
    -> add_norm_gated_linear -> linear (down)

The three that begin with `add_norm_` are optional: where no kernel fits, each is composed of `add_norm`, `linear` and
`gated`, which are chosen like any other. A weight format is thus one `linear`, a reduction one `add_norm`.

For each op there is a needs dataclass (what an implementation may refuse), a tensors dataclass (what it is bound to) and a protocol of
the bound callable. Shapes: T tokens, H hidden size, D head_dim. An op must be free of host synchronisation, and must do the same work for
the same shapes. The residual between two layers belongs to the ops: a model hands it on and does not compute with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pelton.ops.speculation import LookupDraftsNeeds, LookupDraftsTensors, VerifyNeeds, VerifyTensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pelton.attention.metadata import CommonMetadata
    from pelton.sampling.logprobs import LogprobTensors
    from pelton.worker.batch_state import BatchTensors
    from pelton.worker.inputs import InputBuffers, StepShape

T = TypeVar("T")


class OpImplementation(Protocol):
    """The object that the `load` of an `OpEntry` gives: a module or class with these two functions.

    Optional:
    `configured(config) -> implementation`: what serves the engine with these settings, called once: an object with the functions below,
    and settings of your own (`read_settings`) in it.
    `handles`: names of the optional needs that it has read about (`optional`), those of specs inside its needs too. It is refused
    for any other that differs from its default.
    `token_range(needs) -> (least, most or None)`, when it serves only some batch sizes; the next fitting entry serves the others.
    `compose(needs, tensors, bind)` in place of `bind`: a callable made of other ops, each from `bind(op, needs, tensors)`.
    `is_recordable = True`: on devices that compute in the calling process, it computes with torch's ops and with functions
    that it calls by `pelton.graphs.recordable.launch` only, so that a step can be recorded and replayed. Without it none is there.

    A bound callable may have `weights_loaded()`: called once when the weights are in place. One that can read `LinearWeights` in
    another order than they are loaded in has
    `orders`: the names of those orders, the best first;
    `pack(order) -> bool`: bring the tensors into the order, in their memory; False: left as they are;
    `packed(order)`: from now on they are in it.
    The selector asks one to pack when every reader of the tensors knows the order, and tells all of them."""

    def unsupported(self, needs: Any) -> list[str]:
        """Why `needs` cannot be served; an empty list means they can."""

    def bind(self, needs: Any, tensors: Any) -> Callable[..., Any]:
        """The callable that the layer keeps. Tensors are allocated, not filled yet; their addresses do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedOp:
    """One op that implementations may be offered for: core's are `FUSED_OPS`, plugins declare theirs by `pelton_fused_ops`."""

    name: str
    needs: type
    """A frozen dataclass; fields made by `optional` are refused by implementations that do not name them."""
    tensors: type
    reference: str | None = None
    """"module:attribute" of the implementation that serves all needs on every device, and that others are tested against. None: an
    entry of `pelton_ops` called `reference.<name>` is, as for core's own."""


def optional(default: T) -> T:
    """The default of a need that an implementation must name in its `handles`, or is refused for."""
    made: T = field(default=default, metadata={"optional": True})
    return made


def optional_needs(needs: Any, *, nested: bool = True) -> dict[str, Any]:
    """The optional needs that differ from their defaults; with `nested` those of specs inside too."""
    found: dict[str, Any] = {}
    for one in fields(needs) if is_dataclass(needs) else ():
        value = getattr(needs, one.name)
        if "optional" in one.metadata and value != one.default:
            found[one.name] = value
        if nested:
            found |= optional_needs(value)
    return found


# What several ops share.


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """RMS norm in float32: x / sqrt(mean(x^2) + eps) * w, or * (1 + w) with `unit_offset`."""

    size: int
    eps: float
    unit_offset: bool = optional(False)
    is_centered: bool = optional(False)  # a layer norm: x less its mean; a weight [2, size] has its bias too


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRounding:
    """How a product's inputs are rounded before it: to `dtype`, after the division by a scale."""

    dtype: str  # torch's name of an 8-bit type
    is_dynamic: bool = True
    """A scale for each token, from its largest number; False: `tensors["input_scale"]`, float32 []."""
    bound: float | None = None  # the largest number that a dynamic scale is made for; larger ones saturate


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearSpec:
    """One rank's (merged) matrix."""

    in_features: int
    out_features: int
    weight_format: str = optional("plain")
    """plain: `weight` [out, in] of the model's dtype. q8_0, q4_0, q4_1, or one a part, joined by "+": blocks as in
    `pelton.ops.packed_blocks`, a tensor `part0`, `part1`, ... for each part. fp8_e4m3: `weight` [out, in] float8_e4m3fn times
    `weight_scale` [out] float32. Others by quantization plugins."""
    has_bias: bool = optional(False)
    inputs: InputRounding | None = optional(None)  # None: as they are
    parts: tuple[int, ...] = ()  # rows of each part, in formats that keep the parts of a merged matrix apart
    group_rows: int = 1  # rows that have the same scales, from the first one on
    is_ordered: bool = optional(False)
    """Column c of the weight meets column `tensors["order"][c]` of the inputs; [in] int32."""


@dataclass(slots=True)
class LinearWeights:
    """The tensors that a quantization method allocated for one matrix."""

    spec: LinearSpec
    tensors: Mapping[str, Tensor]  # plain: {"weight": [out, in]}
    bias: Tensor | None = None  # [out]
    finish: Callable[[], None] | None = None  # called once when all parts are loaded, before any op reads the tensors


@dataclass(slots=True)
class RowsToSend:
    """Where a product's kernel leaves its partial rows for the other of two ranks while it goes on, besides its result: those that the
    other adds up, every other `turn` of them, rank 0 the first. A part counts 64 rows x 256 columns once it is there."""

    copies: tuple[Tensor, Tensor]  # the other rank's, [n, H] each: the first in calls of even number
    counts: (
        Tensor  # the other rank's, [2, blocks of 64 rows] int32, of even calls and of odd ones: one more for each part
    )
    own_counts: Tensor  # the same here: a call clears those of the next one before it counts any part
    calls: Tensor  # [2] int32: calls before this one, which it adds itself to at its end; spare, zero between calls
    rank: int
    turn: int  # a multiple of 64


class AllReduce(Protocol):
    """Sums a partial result over ranks; may reuse its memory. Optional: an attribute `add_norm(hidden, residual, norm, norm_spec,
    post_norm, post_spec)`, which is `AddNorm` with the sum in one launch, or returns None for a size that it does not serve. Optional
    with that: `to_send(num_rows) -> RowsToSend | None`, behind `open_to_send()`, which all ranks call at the same place of a model; rows
    that were sent so have an attribute `pelton_parts`, parts in a block."""

    def __call__(self, partial: Tensor) -> Tensor: ...


# embed: token ids to the first sub-layer output.


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedNeeds:
    dtype: str
    num_rows: int  # of this rank
    hidden_size: int
    scale: float | None = optional(None)
    tp_size: int = optional(1)
    weight_format: str = optional("plain")  # as in `LinearSpec`


@dataclass(slots=True)
class EmbedTensors:
    weight: Tensor  # plain: [num_rows, H]
    first_row: int  # vocabulary id of row 0
    linear: LinearWeights | None = None  # the same matrix, as a product reads it where it is tied


class Embed(Protocol):
    def __call__(self, input_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H], partial: zeros for ids of other ranks."""


# add_norm: the end of a sub-layer, and the norm of the one that reads it.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormNeeds:
    dtype: str
    norm: NormSpec
    post_norm: NormSpec | None = optional(None)
    tp_size: int = optional(1)


@dataclass(slots=True)
class AddNormTensors:
    norm: Tensor  # [H]
    post_norm: Tensor | None = None  # [H] normalises the sub-layer's output before it is added
    reduce: AllReduce | None = None  # None with one rank


class AddNorm(Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """residual' = post_norm(reduce(hidden)) + residual; returns (norm(residual'), residual').

        hidden [T, H], partial; residual [T, H], or None before the first layer. Both may be overwritten."""


# add_norm_linear: the norm before attention, and QKV.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormLinearNeeds(AddNormNeeds):
    linear: LinearSpec


@dataclass(slots=True)
class AddNormLinearTensors:
    norm: Tensor  # [H]
    linear: LinearWeights
    post_norm: Tensor | None = None  # [H] normalises the sub-layer's output before it is added
    reduce: AllReduce | None = None  # None with one rank


class AddNormLinear(Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """residual' = post_norm(reduce(hidden)) + residual; returns (linear(norm(residual')), residual').

        hidden [T, H], partial; residual [T, H], or None before the first layer. Both may be overwritten."""


# qk_norm_rope_write_kv: from QKV's rows to the query, keys and values written.


@dataclass(frozen=True, slots=True, kw_only=True)
class QkNormRopeWriteKvNeeds:
    dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int  # 0: no rotation
    q_norm: NormSpec | None = optional(None)
    k_norm: NormSpec | None = optional(None)
    writes_kv: bool = optional(True)  # False: another layer's keys and values are read; rows may be the queries' alone


@dataclass(slots=True)
class QkNormRopeWriteKvTensors:
    cos_sin: Tensor | None  # [max_model_len, rotary_dim] float32: cosines, then sines, of rotary_dim / 2 frequencies
    q_norm: Tensor | None = None  # [D]
    k_norm: Tensor | None = None


class QkNormRopeWriteKv(Protocol):
    def __call__(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, k_cache: Tensor, v_cache: Tensor
    ) -> Tensor:
        """Norm and rotate query and key, write key and value of *all* rows, return the query [T, num_heads, D].

        qkv [T, (num_heads + 2 num_kv_heads) D], may be overwritten; without writes_kv [T, num_heads D] will do. positions [T]
        int64; slot_mapping [T] int64, -1 skips the row; k_cache, v_cache [num_blocks, block_size, num_kv_heads, D] views with
        a contiguous last axis."""


# linear: O and down projections.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearNeeds:
    dtype: str
    linear: LinearSpec


@dataclass(slots=True)
class LinearTensors:
    linear: LinearWeights
    reduce: AllReduce | None = (
        None  # sums the results, which go to its `add_norm` as they are; None: something else may be done to them
    )


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], partial over ranks. Optional: `take_activation(name)`: True: results have it from now on; `read_next`
        (tensors by name): of the product that reads the results. They may be brought nearer meanwhile."""


# gated: the activation between the matrices of an MLP.


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNeeds:
    dtype: str
    size: int  # I
    activation: str  # silu, gelu, gelu_tanh


@dataclass(slots=True)
class GatedTensors:
    device: torch.device


class Gated(Protocol):
    def __call__(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I], gate and up -> activation(gate) * up [T, I]."""


# add_norm_gated_linear: the norm before the MLP, gate and up, activation.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormGatedLinearNeeds(AddNormLinearNeeds):
    """`linear` has out_features = 2 I: gate rows, then up rows."""

    activation: str  # silu, gelu, gelu_tanh


@dataclass(slots=True)
class AddNormGatedLinearTensors(AddNormLinearTensors):
    pass


class AddNormGatedLinear(Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `AddNormLinear`, but returns (activation(gate) * up [T, I], residual')."""


# add_norm_logits: the end of the model, for the rows that sample.


@dataclass(frozen=True, slots=True, kw_only=True)
class AddNormLogitsNeeds(AddNormLinearNeeds):
    """`linear` has out_features = this rank's vocabulary rows."""

    vocab_size: int  # columns kept of the gathered logits
    soft_cap: float | None = optional(None)


@dataclass(slots=True)
class AddNormLogitsTensors(AddNormLinearTensors):
    gather: Callable[[Tensor], Tensor] | None = None  # [n, rows of this rank] -> [n, rows of all]; None with one rank


class AddNormLogits(Protocol):
    def __call__(self, hidden: Tensor, residual: Tensor | None, rows: Tensor) -> Tensor:
        """hidden, residual [T, H], left as they are; rows [n] int64 -> logits [n, vocab_size] float32."""


# all_reduce: bound once, used by the ops that read partial results.


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceNeeds:
    dtype: str
    hidden_size: int
    tp_size: int


@dataclass(slots=True)
class AllReduceTensors:
    parallel: Any  # pelton.parallel.context.ParallelContext


# sample: the tail of a step in which every row of logits gives its request one token.


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleNeeds:
    vocab_size: int
    max_num_seqs: int  # a step never has more rows, padding included
    variant: str = "full"  # greedy: every row takes its best token; full: by its parameters, greedy rows among them
    has_mask: bool = False  # `SampleTensors.mask` is there
    num_logprobs: int = 0  # alternatives beside the chosen token, where `SampleTensors.logprobs` is there
    has_nuclei: bool = True  # False: no row has a top_p without another filter


@dataclass(slots=True)
class SampleTensors:
    state: BatchTensors
    mask: tuple[Tensor, Tensor] | None = None  # by slot: words [S + 1, ceil(V / 32)] int32, has_mask [S + 1] bool
    logprobs: LogprobTensors | None = None  # by row of the step: [>= n, 1 + num_logprobs] twice, ranks [>= n]; written


class Sample(Protocol):
    def __call__(self, logits: Tensor, slots: Tensor, result: Tensor) -> None:
        """Sample, write `result`, advance the state: all on the device, made for capture.

        logits [n, V] float32, may be overwritten; slots [n] int64, distinct but for padding; result [n, 2] int32, written:
        (token id, code of `pelton.sampling.error_codes`). A row whose slot is `state.padding_slot` does nothing and gets 0, 0.
        The token's position is p = num_computed_tokens[slot] + 1, its random number the uniform one of (seeds[slot], p); logits
        become tokens as the entry `reference.sample` has it, side tables of rows with `state.side_slots` >= 0 included
        (variant full). Then token_ids[slot, min(p, max_model_len)] = token, num_computed_tokens[slot] += 1, and a side
        row's output counts take the token; a row with an error advances too.
        Where rows had more than one token scheduled, add the others to `num_computed_tokens` first.
        Optional: an attribute `skips_unused = True` of the callable, when a filter or table costs only the rows that use it. A
        CPU's steps then end in this op whatever their rows ask for. Optional: `reading(slots)`, a context in which the logits of its next
        call are computed: those of rows whose mask allows few tokens may be left out but for these. Greedy, over ranks:
        `share_keys(logits, slots, count) -> [n] int64`, larger ones of better tokens, of a rank's logits whose first `count` columns
        are tokens, and `end_shares(keys [ranks, n], width, slots, result)` for the rest; rank r has the tokens from r `width` on."""


# logprobs: of given tokens, as prompts ask for them.


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsNeeds:
    vocab_size: int
    max_rows: int  # of one call
    num_logprobs: int  # alternatives beside the given token


@dataclass(slots=True)
class LogprobsTensors:
    device: torch.device


class Logprobs(Protocol):
    def __call__(self, logits: Tensor, token_ids: Tensor, target: LogprobTensors) -> None:
        """Write `pelton.sampling.logprobs.gather_logprobs` of raw logits to `target`.

        logits [n, V] float32; token_ids [n] int64; target [n, 1 + num_logprobs] twice, ranks [n], contiguous. Alternatives
        that are equally likely may come in any order."""


# prepare_inputs: from the batch state and one step's columns to input ids, positions and attention metadata.


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareInputsNeeds:
    max_num_tokens: int
    max_num_seqs: int
    block_sizes: tuple[int, ...]  # of each KV group
    max_model_len: int


@dataclass(slots=True)
class PrepareInputsTensors:
    state: BatchTensors
    buffers: InputBuffers


class PrepareInputs(Protocol):
    def __call__(self, slots: Tensor, num_scheduled: Tensor, shape: StepShape) -> list[CommonMetadata]:
        """Fill the buffers; one `CommonMetadata` for each KV group, over views of them.

        slots, num_scheduled [R] int64, R = shape.num_padded_reqs; padding rows come last, with `state.padding_slot` and 0.
        Of a row's block table only the blocks that hold its tokens need be written.

        Optional, where kernels reach pinned host memory, both made for capture: `take(parts [P, 2 + N], turn [1], taken [1], place [1],
        columns [n], num_rows)`, all int64, parts and taken pinned. Of part turn % P the first number goes to `place`, those from the
        third on to `columns`; columns 2 + 2 g and 3 + 2 g, of num_rows each, are cells of group g's block table and the ids for them,
        which it gets; turn + 1 goes to `turn`, and to `taken` when the part is read. `give(result, place [1])` copies `result`,
        contiguous, to the pinned memory whose address `place` has, and nowhere when that is 0."""


# All of them.

FUSED_OPS = {
    op.name: op
    for op in (
        FusedOp(name="embed", needs=EmbedNeeds, tensors=EmbedTensors),
        FusedOp(name="add_norm", needs=AddNormNeeds, tensors=AddNormTensors),
        FusedOp(name="linear", needs=LinearNeeds, tensors=LinearTensors),
        FusedOp(name="gated", needs=GatedNeeds, tensors=GatedTensors),
        FusedOp(name="add_norm_linear", needs=AddNormLinearNeeds, tensors=AddNormLinearTensors),
        FusedOp(name="add_norm_gated_linear", needs=AddNormGatedLinearNeeds, tensors=AddNormGatedLinearTensors),
        FusedOp(name="add_norm_logits", needs=AddNormLogitsNeeds, tensors=AddNormLogitsTensors),
        FusedOp(name="qk_norm_rope_write_kv", needs=QkNormRopeWriteKvNeeds, tensors=QkNormRopeWriteKvTensors),
        FusedOp(name="all_reduce", needs=AllReduceNeeds, tensors=AllReduceTensors),
        FusedOp(name="prepare_inputs", needs=PrepareInputsNeeds, tensors=PrepareInputsTensors),
        FusedOp(name="sample", needs=SampleNeeds, tensors=SampleTensors),
        FusedOp(name="logprobs", needs=LogprobsNeeds, tensors=LogprobsTensors),
        FusedOp(name="lookup_drafts", needs=LookupDraftsNeeds, tensors=LookupDraftsTensors),
        FusedOp(name="verify", needs=VerifyNeeds, tensors=VerifyTensors),
    )
}
SEAMS = tuple(FUSED_OPS)
"""The old name, kept for plugins."""
