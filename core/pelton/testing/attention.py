"""Conformance of attention backends: what any implementation has to keep, run with pytest.

Subclass `AttentionBackendConformance` in a test module and set `backend` (and `device`). Every case is compared with a
float64 oracle that loops over tokens; a case whose needs the backend refuses is skipped with its reasons. Every number of the
cache that is not one of a row's keys and values is junk: NaN, infinity or the largest number. Backends of latents have a suite
of their own (`latent_attention.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.phases import BackendChoice, Phased
from pelton.attention.selector import AttentionSelector, Selection, refusals
from pelton.config import EngineConfig
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.layers.attention import AttentionLayer
from pelton.testing.model_driver import make_test_build
from pelton.testing.paged_rows import own_slots, page_views, put_together, scattered_tables, slots_of, step_metadata
from pelton.testing.plugins import plugins_of

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Absolute and relative, against float64 on the rounded inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """One step: rows of (tokens of this step, tokens before it), rows with one token first."""

    rows: tuple[tuple[int, int], ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False
    dtype: str = "float32"
    num_padding: int = 0
    num_ranks: int = 1  # that share the cache, of which this is number `rank`
    rank: int = 0

    def needs(self) -> AttentionNeeds:
        return AttentionNeeds(
            head_dim=self.head_dim, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, dtype=self.dtype,
            block_size=self.block_size, sliding_window=self.sliding_window, logit_soft_cap=self.soft_cap,
            has_sinks=self.has_sinks, has_alibi=self.has_alibi, decode_context_parallel=self.num_ranks,
            context_rank=self.rank, attention_chunk_size=self.chunk_size,
        )  # fmt: skip


MIXED = ((1, 0), (1, 15), (1, 16), (1, 40), (2, 0), (16, 0), (17, 16), (5, 30))
CASES: dict[str, AttentionCase] = {
    "one-decode": AttentionCase(rows=((1, 32),)),
    "first-token": AttentionCase(rows=((1, 0),)),
    "decodes-of-odd-lengths": AttentionCase(rows=((1, 0), (1, 1), (1, 15), (1, 16), (1, 17), (1, 99))),
    "prefill": AttentionCase(rows=((37, 0),)),
    "prefill-one-past-a-block": AttentionCase(rows=((17, 0), (33, 0))),
    "chunk-after-context": AttentionCase(rows=((5, 27), (16, 16))),
    "mixed": AttentionCase(rows=MIXED),
    "mixed-padded": AttentionCase(rows=MIXED, num_padding=3),
    "decodes-padded": AttentionCase(rows=((1, 3), (1, 20)), num_padding=2),
    "multi-head": AttentionCase(rows=MIXED, num_kv_heads=4),
    "multi-query": AttentionCase(rows=MIXED, num_heads=6, num_kv_heads=1),
    "odd-head-dim": AttentionCase(rows=MIXED, head_dim=24),
    "wide-heads": AttentionCase(rows=MIXED, head_dim=128),
    "blocks-of-one": AttentionCase(rows=MIXED, block_size=1),
    "blocks-of-seven": AttentionCase(rows=MIXED, block_size=7),
    "blocks-of-128": AttentionCase(rows=MIXED, block_size=128),
    "window": AttentionCase(rows=MIXED, sliding_window=9),
    "window-of-a-block": AttentionCase(rows=MIXED, sliding_window=16, num_padding=1),
    "window-of-one": AttentionCase(rows=MIXED, sliding_window=1),
    "window-longer-than-all": AttentionCase(rows=MIXED, sliding_window=4096),
    "chunks": AttentionCase(rows=(*MIXED, (70, 20)), chunk_size=24),
    "chunks-of-a-block": AttentionCase(rows=MIXED, chunk_size=16, num_padding=1),
    "chunks-of-seven-and-a-soft-cap": AttentionCase(rows=MIXED, chunk_size=7, soft_cap=2.0),
    "soft-cap": AttentionCase(rows=MIXED, soft_cap=2.0),
    "soft-cap-and-window": AttentionCase(rows=MIXED, soft_cap=2.0, sliding_window=9),
    "sinks": AttentionCase(rows=MIXED, has_sinks=True),
    "sinks-and-window": AttentionCase(rows=MIXED, has_sinks=True, sliding_window=9, num_padding=1),
    "alibi": AttentionCase(rows=MIXED, has_alibi=True, has_sinks=True),
    "bfloat16": AttentionCase(rows=MIXED, dtype="bfloat16"),
    "bfloat16-chunks": AttentionCase(rows=(*MIXED, (90, 40)), dtype="bfloat16", chunk_size=32, head_dim=64),
    "float16": AttentionCase(rows=MIXED, dtype="float16", sliding_window=9),
    "bfloat16-heads-of-64": AttentionCase(rows=MIXED, dtype="bfloat16", head_dim=64, sliding_window=9),
    "bfloat16-heads-of-128": AttentionCase(rows=MIXED, dtype="bfloat16", head_dim=128, num_padding=1),
}
PART_CASES = {
    name: CASES[name]
    for name in ("first-token", "decodes-of-odd-lengths", "prefill", "chunk-after-context", "mixed-padded", "multi-query",
                 "odd-head-dim", "blocks-of-seven", "soft-cap", "bfloat16-heads-of-128")
} | {"long-rows": AttentionCase(rows=((1, 2600), (1, 4500), (2, 900), (70, 300)), num_heads=8)}  # fmt: skip
"""Those that are also asked of a rank that keeps a part of each row's tokens."""
JUNK = {"nan": float("nan"), "infinity": float("inf"), "largest": 3e38}
"""What is left where nothing of a row's lies; the last one as near to it as the dtype goes."""
JUNK_CASES = (
    "first-token", "decodes-of-odd-lengths", "chunk-after-context", "mixed-padded", "odd-head-dim", "blocks-of-seven",
    "blocks-of-128", "window", "window-of-one", "chunks", "soft-cap-and-window", "sinks-and-window", "alibi", "float16",
    "bfloat16-heads-of-64", "bfloat16-heads-of-128",
)  # fmt: skip


def junk_of(name: str, dtype: torch.dtype) -> float:
    """One of `JUNK`, as a number of the dtype."""
    return min(JUNK[name], torch.finfo(dtype).max) if name == "largest" else JUNK[name]


class AttentionStep:
    """A case made real: layer, cache, metadata, inputs, and the oracle's answer. junk: of `JUNK`."""

    def __init__(
        self, backend: BackendChoice, case: AttentionCase, device: str = "cpu", seed: int = 0, junk: str = "nan"
    ) -> None:
        self.case, self.device, self.junk = case, torch.device(device), junk
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.lengths = [tokens + before for tokens, before in case.rows]
        self.num_tokens = sum(tokens for tokens, _ in case.rows)
        self.sinks = self._random(case.num_heads) if case.has_sinks else None
        self.alibi_slopes = self._random(case.num_heads).abs() * 0.1 if case.has_alibi else None
        self.layer = self._layer(backend)
        self.tables = scattered_tables(self.lengths, case.block_size * case.num_ranks, self.generator)
        num_blocks = 2 + sum(map(len, self.tables))
        self._bind(backend, num_blocks)
        shape = (case.num_kv_heads, case.head_dim)
        self.keys = [self._random(length, *shape) for length in self.lengths]
        self.values = [self._random(length, *shape) for length in self.lengths]
        self.query = self._random(self.num_tokens + case.num_padding, case.num_heads, case.head_dim)
        self.common = self._common()

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def _layer(self, backend: BackendChoice) -> AttentionLayer:
        case = self.case
        build = make_test_build(
            {}, plugins_of(), dtype=self.dtype, attention=_OneBackend(backend), block_size=case.block_size
        )
        build.device = self.device
        layer = AttentionLayer(
            case.num_heads, case.num_kv_heads, case.head_dim, config=build, prefix="layer", rope=None,
            sliding_window=case.sliding_window, soft_cap=case.soft_cap, sinks=self.sinks,
            attention_chunk_size=case.chunk_size, alibi_slopes=self.alibi_slopes,
        )  # fmt: skip
        layer.needs = case.needs()
        return layer

    def _bind(self, backend: BackendChoice, num_blocks: int) -> None:
        case = self.case
        spec = FullAttentionSpec(
            block_size=case.block_size * case.num_ranks, num_ranks=case.num_ranks, num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim, dtype=case.dtype,
        )  # fmt: skip
        memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8, device=self.device)
        k_cache, v_cache = page_views(memory, num_blocks, spec, backend.kv_layout(self.layer.needs))
        # Nothing that a request has not written may matter: blocks are handed on with what the last one left, and tables name
        # blocks beyond a row's end that others hold. Values at masked places are selected away, never multiplied.
        k_cache.fill_(junk_of(self.junk, self.dtype))
        v_cache.fill_(-junk_of(self.junk, self.dtype))
        instance = backend(  # a row's own blocks are zeroed for one that asks for it
            self.layer.needs, self.device, max_num_seqs=64, max_num_tokens=4096, max_model_len=max(self.lengths)
        )
        if instance.needs_zeroed_blocks:
            ratio = case.block_size // k_cache.shape[1]
            own = [block * ratio + part for table in self.tables for block in table for part in range(ratio)]
            k_cache[own], v_cache[own] = 0.0, 0.0
        self.layer.bind_cache((k_cache, v_cache), 0, instance)
        self.backend, self.num_blocks = instance, num_blocks

    def slots(self, row: int) -> Tensor:
        """[length] of every position; negative in blocks that a window has left: they were handed back and may be another's by
        now, while the table still names them."""
        case = self.case
        slots = slots_of(self.tables[row], self.lengths[row], case.block_size * case.num_ranks)
        if case.num_ranks > 1:
            slots = own_slots(slots, case.num_ranks, case.rank)
        if case.sliding_window is not None:
            passed = max(case.rows[row][1] - case.sliding_window + 1, 0) // case.block_size
            slots[: passed * case.block_size] = -1
        if case.chunk_size is not None:
            passed = case.rows[row][1] // case.chunk_size * case.chunk_size // case.block_size
            slots[: passed * case.block_size] = -1
        return slots.to(self.device)

    def share_prefix(self, source: int, num_tokens: int) -> None:
        """All rows start with the source's first blocks and what is in them."""
        count = num_tokens // self.case.block_size
        for table in self.tables:
            table[:count] = self.tables[source][:count]
        for rows in (self.keys, self.values):
            for row in rows:
                row[:num_tokens] = rows[source][:num_tokens]
        self.common = self._common()

    def write(self, *, only_context: bool = False) -> None:
        """Put keys and values in place, all or those that no row of this step writes."""
        size = self.layer.k_cache.shape[1]
        for row, (_, before) in enumerate(self.case.rows):
            slots = self.slots(row)[: before if only_context else None]
            kept = slots >= 0
            if only_context:
                kept &= ~torch.isin(slots, self.common.slot_mapping)
            blocks, offsets = slots[kept] // size, slots[kept] % size
            self.layer.k_cache[blocks, offsets] = self.keys[row][: len(slots)][kept].to(self.layer.k_cache.dtype)
            self.layer.v_cache[blocks, offsets] = self.values[row][: len(slots)][kept].to(self.layer.v_cache.dtype)

    def _common(self) -> CommonMetadata:
        return self.metadata_of(self.case.rows)

    def metadata_of(self, rows: tuple[tuple[int, int], ...], first: int = 0) -> CommonMetadata:
        """Make the metadata of a step of as many tokens, over the tables from `first` on."""
        return step_metadata(
            rows, self.tables[first : first + len(rows)], self.case.block_size * self.case.num_ranks,
            kernel_block_size=self.layer.k_cache.shape[1] * self.case.num_ranks,
            num_padding=self.num_tokens + self.case.num_padding - sum(tokens for tokens, _ in rows),
            beyond=self.num_blocks - 1, device=self.device,
        )  # fmt: skip

    def run(self, key: BatchDescriptor | None = None) -> Tensor:
        """Attention of the real tokens, with everything written before. key: as in a captured step."""
        if key is not None:
            self.backend.reserve(key)
        output = torch.full_like(self.query, float("nan"))
        self.layer.attend(self.query, self.backend.build(self.common, key), output)
        return output[: self.num_tokens]

    def run_part(self) -> tuple[Tensor, Tensor]:
        """Return what this rank finds with its keys, and its log-sum-exp."""
        output = torch.full_like(self.query, float("nan"))
        lse = torch.full(self.query.shape[:2], float("nan"), device=self.device)
        self.layer.attend.attend_part(self.query, self.backend.build(self.common), output, lse)
        return output[: self.num_tokens], lse[: self.num_tokens]

    def expected(self) -> Tensor:
        """The oracle: float64, one token at a time."""
        case, results, token = self.case, [], 0
        group = case.num_heads // case.num_kv_heads
        for row, (tokens, before) in enumerate(case.rows):
            keys, values = (
                x[row].double().cpu().repeat_interleave(group, 1).transpose(0, 1) for x in (self.keys, self.values)
            )
            for position in range(before, before + tokens):
                first = 0 if case.sliding_window is None else max(position - case.sliding_window + 1, 0)
                if case.chunk_size is not None:
                    first = position // case.chunk_size * case.chunk_size
                scores = keys[:, first : position + 1] @ self.query[token].double().cpu()[:, :, None] * self.layer.scale
                if case.soft_cap is not None:
                    scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
                if self.alibi_slopes is not None:
                    distances = torch.arange(first, position + 1) - position
                    scores = scores + self.alibi_slopes.double().cpu()[:, None, None] * distances[:, None]
                if self.sinks is not None:
                    scores = torch.cat([scores, self.sinks.double().cpu()[:, None, None]], 1)
                weights = scores.softmax(1)[:, : position + 1 - first]
                results.append((weights * values[:, first : position + 1]).sum(1))
                token += 1
        return torch.stack(results).view(self.num_tokens, case.num_heads, case.head_dim)


class _OneBackend(AttentionSelector):
    """Takes the backend of the suite for all layers."""

    def __init__(self, backend: BackendChoice) -> None:
        super().__init__([])
        self._backend = backend

    def _select(self, needs: AttentionNeeds) -> Selection:
        return Selection(self._backend.name, self._backend, needs, "the one that is tested", ())


def classes_of(backend: BackendChoice) -> tuple[type[AttentionBackend], ...]:
    return (backend.decode, backend.prefill) if isinstance(backend, Phased) else (backend,)


def refusals_of(backend: BackendChoice, needs: AttentionNeeds) -> list[str]:
    """Why a backend, or one of two, cannot serve `needs`."""
    return [reason for each in classes_of(backend) for reason in refusals(each, needs)]


class AttentionBackendConformance:
    """The suite. Set `backend`; a backend for a device sets `device` too."""

    backend: ClassVar[BackendChoice]
    device: ClassVar[str] = "cpu"
    changes: ClassVar[Mapping[str, Any]] = {}
    """Fields of `AttentionCase` that are others in every case: {"head_dim": 96} for a backend of such heads alone."""

    def test_some_case_is_served(self) -> None:
        """A suite of which every case is skipped has tested nothing."""
        refused = [refusals_of(self.backend, replace(case, **self.changes).needs()) for case in CASES.values()]
        assert not all(refused), (
            f"{self.backend.name} refuses every case, so nothing is tested; the first one: {', '.join(refused[0])}. Set `changes`."
        )

    def make_step(self, case: AttentionCase, seed: int = 0, junk: str = "nan") -> AttentionStep:
        case = replace(case, **self.changes)
        if reasons := refusals_of(self.backend, case.needs()):
            pytest.skip(f"{self.backend.name} refuses: {', '.join(reasons)}")
        return AttentionStep(self.backend, case, self.device, seed, junk)

    def assert_close(self, got: Tensor, want: Tensor, case: AttentionCase) -> None:
        tolerance = TOLERANCES[case.dtype]
        torch.testing.assert_close(got.double().cpu(), want.double().cpu(), atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("case", CASES.values(), ids=CASES)
    def test_attention_equals_the_oracle(self, case: AttentionCase) -> None:
        step = self.make_step(case)
        step.write()
        self.assert_close(step.run(), step.expected(), step.case)

    @pytest.mark.parametrize("junk", ["infinity", "largest"])
    @pytest.mark.parametrize("name", JUNK_CASES)
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        """As it is where NaN lies, in every other case of this suite."""
        step = self.make_step(CASES[name], junk=junk)
        step.write()
        self.assert_close(step.run(), step.expected(), step.case)

    @pytest.mark.parametrize("in_keys", [True, False], ids=["keys", "values"])
    @pytest.mark.parametrize("spoilt", [3, 4, 6])
    @pytest.mark.parametrize("name", ["mixed", "window", "bfloat16-heads-of-128"])
    def test_nan_of_a_row_reaches_that_row_alone(self, name: str, spoilt: int, in_keys: bool) -> None:
        """A request whose own values are NaN has to be told of it; the others go on."""
        step = self.make_step(CASES[name])
        step.write()
        block, offset = divmod(int(step.slots(spoilt)[-1]), step.layer.k_cache.shape[1])
        (step.layer.k_cache if in_keys else step.layer.v_cache)[block, offset] = float("nan")
        found, want = step.run(), step.expected()
        ends = list(accumulate(tokens for tokens, _ in step.case.rows))
        first, last = ends[spoilt] - step.case.rows[spoilt][0], ends[spoilt]
        assert found[last - 1].isnan().all(), "NaN became a number"
        others = [token for token in range(step.num_tokens) if not first <= token < last]
        self.assert_close(found[others], want[others], step.case)

    @pytest.mark.parametrize("junk", ["nan", "largest"])
    @pytest.mark.parametrize(
        "rows, uniform_query_len, is_prompt, support",
        [
            pytest.param(((1, 3), (1, 20), (1, 0)), 1, False, "UNIFORM_SINGLE_TOKEN_DECODE", id="decodes"),
            pytest.param(((3, 10), (3, 0), (3, 33)), 3, False, "UNIFORM_BATCH", id="drafts"),
            pytest.param(((1, 20), (2, 5), (3, 40)), 3, False, "UNIFORM_BATCH", id="fewer-drafts"),
            pytest.param(MIXED, 0, False, "ALWAYS", id="any-rows"),
            pytest.param(tuple(reversed(MIXED)), 0, False, "ALWAYS", id="any-order"),
            pytest.param(((21, 0),), 0, True, "ALWAYS", id="prompt"),
        ],
    )
    def test_as_a_captured_step_it_gives_the_same(
        self,
        rows: tuple[tuple[int, int], ...],
        uniform_query_len: int,
        is_prompt: bool,
        support: str,
        junk: str,
    ) -> None:
        """Compare with a capture, where rows and lengths are not known to the host."""
        if self.backend.graph_support < GraphSupport[support]:
            pytest.skip(f"{self.backend.name} captures {self.backend.graph_support.name}")
        step = self.make_step(AttentionCase(rows=rows), junk=junk)
        step.write()
        key = BatchDescriptor(step.common.num_tokens, len(rows), uniform_query_len, is_prompt=is_prompt)
        self.assert_close(step.run(key), step.expected(), step.case)

    @pytest.mark.parametrize("name", ["mixed-padded", "window"])
    def test_one_bound_layer_serves_steps_of_all_kinds(self, name: str) -> None:
        """One after the other, on the same tensors, as if it had been bound for each."""
        step = self.make_step(CASES[name])
        step.write()
        rows, output = step.case.rows, torch.empty_like(step.query)
        kinds = [(0, rows), (0, tuple((1, sum(row) - 1) for row in rows)), (len(rows) - 1, rows[-1:]), (1, rows[1:3])]
        if step.case.sliding_window is None:  # whose tables have no blocks of what is out of its sight
            kinds.append((0, tuple((tokens, before // 2) for tokens, before in rows)))
        wanted = {}
        for kind in [*kinds, *reversed(kinds)]:
            first, others = kind
            metadata, count = step.backend.build(step.metadata_of(others, first)), sum(tokens for tokens, _ in others)
            if kind not in wanted:
                step.backend.bind(step.layer)(step.query, metadata, output)
                wanted[kind] = output[:count].clone()
            output.fill_(float("nan"))
            step.layer.attend(step.query, metadata, output)
            self.assert_close(output[:count], wanted[kind], step.case)

    @pytest.mark.parametrize("num_ranks", [2, 3])
    @pytest.mark.parametrize("name", PART_CASES)
    def test_parts_of_ranks_are_the_whole(self, name: str, num_ranks: int) -> None:
        """With the same seed each rank has the same keys, and keeps its own."""
        steps = [self.make_step(replace(PART_CASES[name], num_ranks=num_ranks, rank=rank)) for rank in range(num_ranks)]
        for step in steps:
            step.write()
        self.assert_close(put_together([step.run_part() for step in steps]), steps[0].expected(), steps[0].case)

    @pytest.mark.parametrize(
        "name", ["mixed", "mixed-padded", "blocks-of-seven", "window", "chunks", "bfloat16", "multi-query"]
    )
    def test_it_writes_all_rows_then_attends(self, name: str) -> None:
        self.check_write_and_attend(self.make_step(CASES[name]))

    @pytest.mark.parametrize(
        "rows, writer",
        [
            pytest.param(((20, 10), (5, 16)), 0, id="writer-first"),
            pytest.param(((5, 16), (20, 10)), 1, id="reader-first"),
            pytest.param(((1, 16), (20, 10)), 1, id="reader-of-one-token"),
        ],
    )
    def test_a_row_reads_a_block_that_another_fills_in_this_step(
        self, rows: tuple[tuple[int, int], ...], writer: int
    ) -> None:
        step = self.make_step(AttentionCase(rows=rows))
        step.share_prefix(writer, 16)
        self.check_write_and_attend(step)

    def check_write_and_attend(self, step: AttentionStep) -> None:
        """From the rows of QKV's product, with a cache that holds the context alone."""
        case = step.case
        step.write(only_context=True)
        new = [(k[before:], v[before:]) for k, v, (_, before) in zip(step.keys, step.values, case.rows, strict=True)]
        padding = torch.full((case.num_padding, *step.keys[0].shape[1:]), float("nan"), device=step.device).to(
            step.dtype
        )
        keys, values = torch.cat([k for k, _ in new] + [padding]), torch.cat([v for _, v in new] + [padding])
        qkv = torch.cat([step.query.flatten(1), keys.flatten(1), values.flatten(1)], dim=1)
        positions = torch.zeros(qkv.shape[0], dtype=torch.int64, device=step.device)
        metadata, output = step.backend.build(step.common), torch.zeros_like(step.query)
        step.layer.attend.write_and_attend(qkv, positions, step.common.slot_mapping, metadata, output)
        got_k, got_v = step.layer.k_cache.clone(), step.layer.v_cache.clone()
        self.assert_close(output[: step.num_tokens], step.expected(), case)
        step.write()
        assert torch.equal(got_k.nan_to_num(9.0), step.layer.k_cache.nan_to_num(9.0)), "keys written elsewhere, or not"
        assert torch.equal(got_v.nan_to_num(9.0), step.layer.v_cache.nan_to_num(9.0)), (
            "values written elsewhere, or not"
        )

    @pytest.mark.parametrize("window", [None, 9])
    def test_a_row_alone_gives_what_it_gives_in_a_batch(self, window: int | None) -> None:
        case = replace(CASES["mixed"], sliding_window=window)
        batch = self.make_step(case)
        batch.write()
        together = batch.run()
        token = 0
        for row, (tokens, before) in enumerate(case.rows):
            alone = self.make_step(replace(case, rows=((tokens, before),)))
            alone.keys, alone.values = [batch.keys[row]], [batch.values[row]]
            alone.query = batch.query[token : token + tokens]
            alone.write()
            self.assert_close(alone.run(), together[token : token + tokens], case)
            token += tokens

    def test_a_table_wider_than_the_step_is_no_matter(self) -> None:
        step = self.make_step(CASES["mixed"])
        step.write()
        want = step.run()
        step.common.block_table = torch.nn.functional.pad(step.common.block_table, (0, 50))
        self.assert_close(step.run(), want, step.case)

    @pytest.mark.parametrize(
        "need",
        [
            {"has_sinks": True},
            {"is_mla": True},
            {"attention_type": "cross"},
            {"has_alibi": True},
            {"attention_chunk_size": 8},
        ],
        ids=str,
    )
    def test_needs_it_has_not_read_about_are_refused(self, need: dict[str, Any]) -> None:
        (name,) = need
        reasons = refusals_of(self.backend, replace(AttentionCase(rows=((1, 0),)).needs(), **need))
        if not reasons:
            pytest.skip(f"{self.backend.name} handles {name}")
        assert name in reasons[0]

    def test_settings_make_a_class_of_their_own(self) -> None:
        """An engine's settings leave the class as it was, for another engine of the same process."""
        for each in classes_of(self.backend):
            before = dict(vars(each))
            made = each.configured(EngineConfig())
            assert issubclass(made, AttentionBackend) and made.name == each.name, f"configured gives {made!r}"
            assert dict(vars(each)) == before, f"configured changes {each.__qualname__}; return a subclass"

    def test_it_has_a_name_and_says_what_it_can_capture(self) -> None:
        assert self.backend.name and self.backend.graph_support in (0, 1, 2, 3)
