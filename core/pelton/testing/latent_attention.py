"""Conformance of attention backends over latents (MLA), as `attention.py` is of those over keys and values.

Subclass `LatentAttentionConformance` in a test module and set `backend` (and `device`). Every number of the cache that is not one
of a row's latents is junk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

import pytest
import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, GraphSupport
from pelton.attention.metadata import BatchDescriptor
from pelton.attention.selector import refusals
from pelton.kv_cache.spec import MLASpec
from pelton.testing.attention import JUNK, MIXED, TOLERANCES, junk_of
from pelton.testing.paged_rows import own_slots, put_together, scattered_tables, slots_of, step_metadata

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentCase:
    """One step: rows of (tokens of this step, tokens before it), rows with one token first."""

    rows: tuple[tuple[int, int], ...] = MIXED
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    num_padding: int = 0
    num_ranks: int = 1  # that share the cache, of which this is number `rank`
    rank: int = 0

    def needs(self) -> AttentionNeeds:
        return AttentionNeeds(
            head_dim=self.latent_dim + self.rope_dim, num_heads=self.num_heads, num_kv_heads=1, is_mla=True,
            latent_dim=self.latent_dim, block_size=self.block_size, dtype=self.dtype,
            decode_context_parallel=self.num_ranks, context_rank=self.rank,
        )  # fmt: skip


CASES: dict[str, LatentCase] = {
    "decodes-of-odd-lengths": LatentCase(rows=((1, 0), (1, 1), (1, 15), (1, 16), (1, 17), (1, 99))),
    "chunk-after-context": LatentCase(rows=((5, 27), (16, 16))),
    "mixed": LatentCase(),
    "mixed-padded": LatentCase(num_padding=3),
    "one-head": LatentCase(num_heads=1),
    "many-heads": LatentCase(rows=((1, 40), (3, 9)), num_heads=20),
    "odd-sizes": LatentCase(latent_dim=40, rope_dim=8),
    "large-latents": LatentCase(rows=((1, 40), (3, 30)), latent_dim=512, rope_dim=64),
    "blocks-of-seven": LatentCase(block_size=7),
    "long-row": LatentCase(rows=((1, 700), (2, 300))),
    "bfloat16": LatentCase(dtype="bfloat16"),
    "float16": LatentCase(dtype="float16", num_padding=1),
    "bfloat16-of-deepseek": LatentCase(
        rows=((1, 0), (1, 63), (1, 64), (1, 300), (3, 30), (17, 128)),
        num_heads=20,
        latent_dim=512,
        rope_dim=64,
        dtype="bfloat16",
        num_padding=2,
    ),
}


class LatentStep:
    """A case made real: layer, cache, metadata, query, and the oracle's answer."""

    def __init__(self, backend: type[AttentionBackend], case: LatentCase, device: str, junk: str) -> None:
        self.case, self.device = case, torch.device(device)
        generator, needs = torch.Generator().manual_seed(0), case.needs()
        dtype: torch.dtype = getattr(torch, case.dtype)
        lengths = [sum(row) for row in case.rows]
        self.tables = scattered_tables(lengths, case.block_size * case.num_ranks, generator)
        num_blocks = 2 + sum(map(len, self.tables))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype).to(self.device)

        self.latents = [random(length, needs.head_dim) for length in lengths]
        self.num_tokens = sum(tokens for tokens, _ in case.rows)
        self.query = random(self.num_tokens + case.num_padding, case.num_heads, needs.head_dim)
        spec = MLASpec(
            block_size=case.block_size * case.num_ranks, num_ranks=case.num_ranks, latent_dim=needs.head_dim,
            dtype=case.dtype,
        )  # fmt: skip
        memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8, device=self.device)
        (self.cache,) = spec.views(memory, num_blocks, backend.kv_layout(needs))
        self.cache.fill_(junk_of(junk, dtype))
        for row, latents in enumerate(self.latents):
            slots = own_slots(self.slots(row), case.num_ranks, case.rank)
            self.cache.view(-1, needs.head_dim)[slots[slots >= 0]] = latents[slots >= 0]
        self.backend = backend(
            needs, self.device, max_num_seqs=64, max_num_tokens=4096, max_model_len=max(lengths)
        )  # fmt: skip
        self.layer = SimpleNamespace(
            layer_name="layer", needs=needs, num_heads=case.num_heads, head_dim=needs.head_dim,
            latent_dim=case.latent_dim, scale=needs.head_dim**-0.5, cache=self.cache,
        )  # fmt: skip
        self.common = step_metadata(
            case.rows, self.tables, case.block_size * case.num_ranks, num_padding=case.num_padding, beyond=num_blocks - 1,
            device=self.device,
        )  # fmt: skip

    def slots(self, row: int) -> Tensor:
        block_size = self.case.block_size * self.case.num_ranks
        return slots_of(self.tables[row], sum(self.case.rows[row]), block_size).to(self.device)

    def run(self, key: BatchDescriptor | None = None) -> Tensor:
        if key is not None:
            self.backend.reserve(key)
        output = self.query[..., : self.case.latent_dim].contiguous().fill_(float("nan"))
        self.backend.bind(self.layer)(self.query, self.backend.build(self.common, key), output)
        return output[: self.num_tokens]

    def run_part(self) -> tuple[Tensor, Tensor]:
        """Return what this rank finds, and its log-sum-exp."""
        output = self.query[..., : self.case.latent_dim].contiguous().fill_(float("nan"))
        lse = torch.full(self.query.shape[:2], float("nan"), device=self.device)
        self.backend.bind(self.layer).attend_part(self.query, self.backend.build(self.common), output, lse)
        return output[: self.num_tokens], lse[: self.num_tokens]

    def expected(self) -> Tensor:
        """The oracle: float64, one token at a time."""
        results, token = [], 0
        for (tokens, before), latents in zip(self.case.rows, self.latents, strict=True):
            seen = latents.double().cpu()
            for position in range(before, before + tokens):
                context = seen[: position + 1]
                scores = self.query[token].double().cpu() @ context.T * self.layer.scale
                results.append(scores.softmax(-1) @ context[:, : self.case.latent_dim])
                token += 1
        return torch.stack(results)


class LatentAttentionConformance:
    """The suite. Set `backend`; a backend for a device sets `device` too."""

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"

    def make_step(self, case: LatentCase, junk: str = "nan") -> LatentStep:
        if reasons := refusals(self.backend, case.needs()):
            pytest.skip(f"{self.backend.name} refuses: {', '.join(reasons)}")
        return LatentStep(self.backend, case, self.device, junk)

    def assert_close(self, got: Tensor, want: Tensor, case: LatentCase) -> None:
        tolerance = TOLERANCES[case.dtype]
        torch.testing.assert_close(got.double().cpu(), want, atol=tolerance, rtol=tolerance)

    @pytest.mark.parametrize("name", CASES)
    def test_attention_equals_the_oracle(self, name: str) -> None:
        step = self.make_step(CASES[name])
        self.assert_close(step.run(), step.expected(), step.case)

    @pytest.mark.parametrize("junk", sorted(JUNK.keys() - {"nan"}))
    @pytest.mark.parametrize("name", ["decodes-of-odd-lengths", "mixed-padded", "blocks-of-seven", "float16"])
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        """As it is where NaN lies, in every other case of this suite."""
        step = self.make_step(CASES[name], junk)
        self.assert_close(step.run(), step.expected(), step.case)

    @pytest.mark.parametrize("num_ranks", [2, 3])
    @pytest.mark.parametrize(
        "name", ["decodes-of-odd-lengths", "mixed-padded", "blocks-of-seven", "long-row", "bfloat16"]
    )
    def test_parts_of_ranks_are_the_whole(self, name: str, num_ranks: int) -> None:
        steps = [self.make_step(replace(CASES[name], num_ranks=num_ranks, rank=rank)) for rank in range(num_ranks)]
        self.assert_close(put_together([step.run_part() for step in steps]), steps[0].expected(), steps[0].case)

    @pytest.mark.parametrize("spoilt", [3, 4, 6])
    def test_nan_of_a_row_reaches_that_row_alone(self, spoilt: int) -> None:
        step = self.make_step(CASES["mixed"])
        step.cache.view(-1, step.layer.head_dim)[step.slots(spoilt)[-1]] = float("nan")
        found, want = step.run(), step.expected()
        ends = list(accumulate(tokens for tokens, _ in step.case.rows))
        first, last = ends[spoilt] - step.case.rows[spoilt][0], ends[spoilt]
        assert found[last - 1].isnan().all(), "NaN became a number"
        others = [token for token in range(step.num_tokens) if not first <= token < last]
        self.assert_close(found[others], want[others], step.case)

    @pytest.mark.parametrize(
        "rows, uniform_query_len, support",
        [
            pytest.param(((1, 3), (1, 20), (1, 0)), 1, "UNIFORM_SINGLE_TOKEN_DECODE", id="decodes"),
            pytest.param(((1, 20), (2, 5), (3, 40)), 3, "UNIFORM_BATCH", id="drafts"),
            pytest.param(tuple(reversed(MIXED)), 0, "ALWAYS", id="any-order"),
        ],
    )
    def test_as_a_captured_step_it_gives_the_same(
        self, rows: tuple[tuple[int, int], ...], uniform_query_len: int, support: str
    ) -> None:
        if self.backend.graph_support < GraphSupport[support]:
            pytest.skip(f"{self.backend.name} captures {self.backend.graph_support.name}")
        step = self.make_step(LatentCase(rows=rows))
        key = BatchDescriptor(step.common.num_tokens, len(rows), uniform_query_len)
        self.assert_close(step.run(key), step.expected(), step.case)
