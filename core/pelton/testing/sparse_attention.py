"""Conformance of backends that choose which tokens each token attends to, and attend to these latents.

Subclass `SparseAttentionConformance` in a test module and set `backend` (and `device`). Indexer and attention have caches and block
tables of their own. Every number of a cache that is not one of a row's is junk. Keys, queries and weights of the indexer are small
whole numbers: every sum is exact, and many tokens score alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch

from pelton.attention.interface import AttentionBackend, AttentionNeeds, GraphSupport
from pelton.attention.metadata import BatchDescriptor, CommonMetadata
from pelton.attention.selector import refusals
from pelton.kv_cache.spec import MLASpec
from pelton.testing.attention import JUNK, MIXED, TOLERANCES, junk_of
from pelton.testing.paged_rows import scattered_tables, slots_of, step_metadata

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseCase:
    """One step: rows of (tokens of this step, tokens before it), rows with one token first."""

    rows: tuple[tuple[int, int], ...] = MIXED
    top_k: int = 8
    num_heads: int = 4
    latent_dim: int = 32
    rope_dim: int = 16
    index_heads: int = 4
    index_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    num_padding: int = 0
    has_sinks: bool = False

    def needs(self, *, is_indexer: bool) -> AttentionNeeds:
        of_all: dict[str, Any] = {"num_kv_heads": 1, "block_size": self.block_size, "dtype": self.dtype}
        if is_indexer:
            return AttentionNeeds(
                head_dim=self.index_dim, num_heads=self.index_heads, attention_type="indexer", **of_all
            )
        return AttentionNeeds(
            head_dim=self.latent_dim + self.rope_dim, num_heads=self.num_heads, is_mla=True, is_sparse=True,
            latent_dim=self.latent_dim, has_sinks=self.has_sinks, **of_all,
        )  # fmt: skip


CASES: dict[str, SparseCase] = {
    "decodes-of-odd-lengths": SparseCase(
        rows=((1, 0), (1, 1), (1, 6), (1, 7), (1, 8), (1, 9), (1, 15), (1, 16), (1, 99))
    ),
    "chunk-after-context": SparseCase(rows=((5, 27), (16, 16))),
    "prompts-that-grow-past-the-choice": SparseCase(rows=((7, 0), (8, 0), (9, 0), (25, 0))),
    "mixed": SparseCase(),
    "mixed-padded": SparseCase(num_padding=3),
    "one-token-chosen": SparseCase(top_k=1),
    "more-than-there-are": SparseCase(top_k=200),
    "odd-sizes": SparseCase(top_k=11, latent_dim=40, rope_dim=8, index_heads=3, index_dim=24),
    "nothing-turns": SparseCase(rope_dim=0),
    "sinks": SparseCase(has_sinks=True, num_padding=1),
    "sinks-in-bfloat16": SparseCase(
        rows=((1, 0), (1, 300), (3, 130)), top_k=70, num_heads=20, has_sinks=True, dtype="bfloat16"
    ),
    "many-heads": SparseCase(rows=((1, 40), (3, 9)), num_heads=20, index_heads=20),
    "blocks-of-seven": SparseCase(block_size=7),
    "long-row": SparseCase(rows=((1, 1200), (2, 300)), top_k=70),
    "bfloat16": SparseCase(dtype="bfloat16", top_k=32),
    "float16": SparseCase(dtype="float16", num_padding=1),
    "bfloat16-of-deepseek": SparseCase(
        rows=((1, 0), (1, 300), (3, 130)),
        top_k=128,
        num_heads=16,
        latent_dim=512,
        rope_dim=64,
        index_heads=64,
        index_dim=128,
        dtype="bfloat16",
    ),
}


class SparseStep:
    """A case made real: both layers, their metadata, queries, and the oracle's answers."""

    def __init__(self, backend: type[AttentionBackend], case: SparseCase, device: str, junk: str) -> None:
        self.case, self.device = case, torch.device(device)
        self.generator = torch.Generator().manual_seed(0)
        self.lengths = [sum(row) for row in case.rows]
        self.num_tokens = sum(tokens for tokens, _ in case.rows)
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        total = self.num_tokens + case.num_padding
        self.chosen = torch.full((total + 5, case.top_k), -7, dtype=torch.int32, device=self.device)
        # The indexer.
        needs = case.needs(is_indexer=True)
        self.keys = [self._whole(length, case.index_dim) for length in self.lengths]
        self.index_query = self._whole(total, case.index_heads, case.index_dim)
        self.weights = self._whole(total, case.index_heads)
        self.index_cache, self.index_common = self._paged(self.keys, backend, needs, junk)
        self.indexer_backend = self._make(backend, needs)
        self.indexer = SimpleNamespace(
            layer_name="indexer", needs=needs, num_heads=case.index_heads, head_dim=case.index_dim,
            cache=self.index_cache, weights=self.weights.float(),
        )  # fmt: skip
        # The attention.
        needs = case.needs(is_indexer=False)
        self.latents = [self._random(length, needs.head_dim) for length in self.lengths]
        self.query = self._random(total, case.num_heads, needs.head_dim)
        self.cache, self.common = self._paged(self.latents, backend, needs, junk)
        self.backend = self._make(backend, needs)
        self.layer = SimpleNamespace(
            layer_name="layer", needs=needs, num_heads=case.num_heads, head_dim=needs.head_dim,
            latent_dim=case.latent_dim, scale=needs.head_dim**-0.5, cache=self.cache, chosen=self.chosen,
            sinks=self._random(case.num_heads) * 2 if case.has_sinks else None,
        )  # fmt: skip

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def _whole(self, *shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=self.generator).to(self.dtype).to(self.device)

    def _make(self, backend: type[AttentionBackend], needs: AttentionNeeds) -> AttentionBackend:
        return backend(needs, self.device, max_num_seqs=64, max_num_tokens=4096, max_model_len=max(self.lengths))

    def _paged(
        self, contexts: list[Tensor], backend: type[AttentionBackend], needs: AttentionNeeds, junk: str
    ) -> tuple[Tensor, CommonMetadata]:
        """A cache with these rows, and a step over it, in blocks of its own."""
        case = self.case
        tables = scattered_tables(self.lengths, case.block_size, self.generator)
        num_blocks = 2 + sum(map(len, tables))
        spec = MLASpec(block_size=case.block_size, latent_dim=needs.head_dim, dtype=case.dtype)
        memory = torch.zeros(num_blocks * spec.page_size_bytes, dtype=torch.uint8, device=self.device)
        (cache,) = spec.views(memory, num_blocks, backend.kv_layout(needs))
        cache.fill_(junk_of(junk, self.dtype))
        for table, context in zip(tables, contexts, strict=True):
            cache.view(-1, needs.head_dim)[slots_of(table, len(context), case.block_size).to(self.device)] = context
        common = step_metadata(
            case.rows, tables, case.block_size, num_padding=case.num_padding, beyond=num_blocks - 1, device=self.device
        )
        return cache, common

    def choose(self, key: BatchDescriptor | None = None) -> list[list[int]]:
        """Return what the backend chooses for each token, in order."""
        if key is not None:
            self.indexer_backend.reserve(key)
        output = self.chosen[: self.num_tokens + self.case.num_padding]
        self.indexer_backend.bind(self.indexer)(
            self.index_query, self.indexer_backend.build(self.index_common, key), output
        )
        found = self.chosen[: self.num_tokens].tolist()
        for row in found:
            is_there = [token >= 0 for token in row]
            assert is_there == sorted(is_there, reverse=True), "nothing stands in front of a token"
            assert set(row[sum(is_there) :]) <= {-1}
        return [sorted(token for token in row if token >= 0) for row in found]

    def attend(self, key: BatchDescriptor | None = None) -> Tensor:
        if key is not None:
            self.backend.reserve(key)
        output = torch.full_like(self.query[..., : self.case.latent_dim], float("nan")).contiguous()
        self.backend.bind(self.layer)(self.query, self.backend.build(self.common, key), output)
        return output[: self.num_tokens]

    def expected_choice(self) -> list[list[int]]:
        """The oracle: whole numbers, one token at a time."""
        chosen, token = [], 0
        for (tokens, before), keys in zip(self.case.rows, self.keys, strict=True):
            for position in range(before, before + tokens):
                products = self.index_query[token].double().cpu() @ keys[: position + 1].double().cpu().T
                scores = (self.weights[token].double().cpu() @ products.relu()).tolist()
                best = sorted(range(position + 1), key=lambda place: (-scores[place], place))
                chosen.append(sorted(best[: self.case.top_k]))
                token += 1
        return chosen

    def expected(self, chosen: list[list[int]]) -> Tensor:
        """The oracle: float64, one token at a time."""
        rows = [row for row, (tokens, _) in enumerate(self.case.rows) for _ in range(tokens)]
        results = []
        for token, row in enumerate(rows):
            context = self.latents[row].double().cpu()[chosen[token]]
            scores = self.query[token].double().cpu() @ context.T * self.layer.scale
            if self.layer.sinks is not None:  # one more term of the denominator
                scores = torch.cat([scores, self.layer.sinks.double().cpu()[:, None]], dim=-1)
            results.append(scores.softmax(-1)[:, : len(context)] @ context[:, : self.case.latent_dim])
        return torch.stack(results)


class SparseAttentionConformance:
    """The suite. Set `backend`; a backend for a device sets `device` too."""

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"

    def make_step(self, case: SparseCase, junk: str = "nan") -> SparseStep:
        for is_indexer in (True, False):
            if reasons := refusals(self.backend, case.needs(is_indexer=is_indexer)):
                pytest.skip(f"{self.backend.name} refuses: {', '.join(reasons)}")
        return SparseStep(self.backend, case, self.device, junk)

    def check(self, step: SparseStep, key: BatchDescriptor | None = None) -> None:
        chosen = step.expected_choice()
        assert step.choose(key) == chosen
        tolerance = TOLERANCES[step.case.dtype]
        torch.testing.assert_close(
            step.attend(key).double().cpu(), step.expected(chosen), atol=tolerance, rtol=tolerance
        )

    @pytest.mark.parametrize("name", CASES)
    def test_choice_and_attention_equal_the_oracle(self, name: str) -> None:
        self.check(self.make_step(CASES[name]))

    @pytest.mark.parametrize("junk", sorted(JUNK.keys() - {"nan"}))
    @pytest.mark.parametrize("name", ["decodes-of-odd-lengths", "mixed-padded", "blocks-of-seven", "float16"])
    def test_what_is_no_rows_is_selected_away(self, name: str, junk: str) -> None:
        """As it is where NaN lies, in every other case of this suite."""
        self.check(self.make_step(CASES[name], junk))

    def test_a_choice_made_before_is_forgotten(self) -> None:
        step = self.make_step(CASES["mixed"])
        step.chosen.fill_(3)
        self.check(step)

    def test_attention_reads_what_was_chosen(self) -> None:
        """Not what it would choose: each token's last tokens, in reverse."""
        step = self.make_step(CASES["chunk-after-context"])
        positions = [position for tokens, before in step.case.rows for position in range(before, before + tokens)]
        last = [list(range(position, position - step.case.top_k, -1)) for position in positions]
        step.chosen[: step.num_tokens] = torch.tensor(last, dtype=torch.int32)
        torch.testing.assert_close(step.attend().double().cpu(), step.expected(last), atol=2e-5, rtol=2e-5)

    def test_a_key_that_is_nan_is_chosen_by_its_row_alone(self) -> None:
        step = self.make_step(CASES["mixed"])
        spoilt, first = 3, sum(tokens for tokens, _ in step.case.rows[:3])
        slots = slots_of(step.index_common.block_table[spoilt].tolist(), step.lengths[spoilt], step.case.block_size)
        step.index_cache.view(-1, step.case.index_dim)[slots[5]] = float("nan")
        found, want = step.choose(), step.expected_choice()
        assert 5 in found[first] and set(found[first]) - {5} <= set(want[first])
        assert found[:first] + found[first + 1 :] == want[:first] + want[first + 1 :]

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
        step = self.make_step(SparseCase(rows=rows))
        self.check(step, BatchDescriptor(step.common.num_tokens, len(rows), uniform_query_len))
