"""`pelton bench sparse`: an indexer's choice and attention to the chosen latents, against attention to all.

No model: layers of DeepSeek-V3.2's sizes, over random caches, with the backends that a model's layers would get on this device. Each
measured layer has caches of its own, so many that they do not all stay in a processor's caches.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.layers import LayerBench
from pelton_plugins.bench.record import circumstances, flat_settings, number, write_json
from pelton_plugins.flags import parse_flags

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from pelton.attention.interface import AttentionNeeds
    from pelton.attention.metadata import CommonMetadata
    from pelton.attention.selector import AttentionSelector

DOC = """Time sparse attention over latents: the indexer's choice, attention to what it chose, and beside them attention to all.

  pelton bench sparse --contexts 2000 8000 32000 --rows 1 32
  pelton bench sparse --contexts 4096 --rows 1 --query-len 512 --num-heads 16     a chunk of a prompt, of one rank of eight"""
COPIES_BYTES, MOST_COPIES = 1 << 28, 16
"""Caches are made until they have so many bytes, or there are so many."""


class SparseArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: sizes of the layer, and the steps that are timed."""

    contexts: list[int] = msgspec.field(default_factory=lambda: [2000, 8000, 32000])
    """Tokens of each row, those of the step among them."""
    rows: list[int] = msgspec.field(default_factory=lambda: [1, 32])
    """Rows of the step."""
    query_len: int = 1
    """Tokens of each row that the step computes: its last."""
    num_heads: int = 128
    """Query heads of this rank."""
    latent_dim: int = 512
    rope_dim: int = 64
    index_heads: int = 64
    """Heads of the indexer."""
    index_dim: int = 128
    """Numbers of each."""
    index_topk: int = 2048
    """Tokens that are chosen."""
    replays: int = 5
    """Runs in a row, of which the mean counts; the median of five such means is shown."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(
            self, contexts=1, rows=1, query_len=1, num_heads=1, latent_dim=1, rope_dim=2, index_heads=1, index_dim=1,
            index_topk=1, replays=1,
        )  # fmt: skip
        if self.query_len > min(self.contexts, default=0):
            raise ConfigError(
                f"query_len is {self.query_len}, and contexts has {min(self.contexts, default=0)}; give contexts of at least "
                "query_len tokens."
            )


def run(argv: list[str]) -> int:
    import torch

    parsed = parse_flags(argv, [SparseArguments], positional=None, program="pelton bench sparse", doc=DOC)
    arguments: SparseArguments = parsed.structs["SparseArguments"]
    bench, lines, block_size = LayerBench(parsed.config, arguments.replays), [], parsed.config.kv_cache.block_size
    with torch.inference_mode(), bench.stream():
        for context in arguments.contexts:
            for rows in arguments.rows:
                step = SparseStep(arguments, rows, context, bench.selector, bench.device, bench.dtype, block_size)
                lines.append(step.measure(bench.timer))
    result = {"backends": bench.backends, "is_captured": bench.is_captured, "lines": lines}
    described = bench.platform.describe()
    print(f"{described}, {bench.dtype}, {arguments.num_heads} heads, {', '.join(bench.backends)}")
    print(render(lines))
    write_json(arguments.output_json, circumstances(described, flat_settings(parsed)) | result)
    return 0


class SparseStep:
    """One step of some layers, with and without an indexer."""

    def __init__(
        self,
        arguments: SparseArguments,
        rows: int,
        context: int,
        selector: AttentionSelector,
        device: torch.device,
        dtype: str,
        block_size: int,
    ) -> None:
        import torch

        from pelton.attention.interface import AttentionNeeds

        self.rows, self.context, self.device = rows, context, device
        self.dtype: torch.dtype = getattr(torch, dtype)
        num_tokens, head_dim = rows * arguments.query_len, arguments.latent_dim + arguments.rope_dim
        top_k = min(arguments.index_topk, context)
        of_all: dict[str, Any] = {"num_kv_heads": 1, "block_size": block_size, "dtype": dtype}
        attention: dict[str, Any] = {
            "head_dim": head_dim,
            "num_heads": arguments.num_heads,
            "latent_dim": arguments.latent_dim,
            "is_mla": True,
        }
        needs = {
            "choose": AttentionNeeds(
                head_dim=arguments.index_dim, num_heads=arguments.index_heads, attention_type="indexer", **of_all
            ),
            "attend": AttentionNeeds(**attention, is_sparse=True, **of_all),
            "all": AttentionNeeds(**attention, **of_all),
        }
        self.common = self._describe(rows, arguments.query_len, context, block_size)
        self.num_copies = self._num_copies((head_dim + arguments.index_dim) * rows * context)
        chosen = torch.empty(num_tokens, top_k, dtype=torch.int32, device=device)
        index_query = self._random(num_tokens, arguments.index_heads, arguments.index_dim)
        weights = self._random(num_tokens, arguments.index_heads).float()
        query = self._random(num_tokens, arguments.num_heads, head_dim)
        output = torch.empty(num_tokens, arguments.num_heads, arguments.latent_dim, dtype=self.dtype, device=device)
        self._calls: dict[str, list[Callable[[], object]]] = {name: [] for name in needs}
        for _ in range(self.num_copies):
            latents, keys = (
                self._random(1 + rows * -(-context // block_size), block_size, size)
                for size in (head_dim, arguments.index_dim)
            )
            for name, need in needs.items():
                layer = SimpleNamespace(
                    layer_name=name, needs=need, num_heads=need.num_heads, head_dim=need.head_dim,
                    latent_dim=arguments.latent_dim, scale=need.head_dim**-0.5, weights=weights, chosen=chosen,
                    cache=keys if name == "choose" else latents,
                )  # fmt: skip
                given = (index_query, chosen) if name == "choose" else (query, output)
                self._calls[name].append(self._bound(selector, need, layer, *given))

    def measure(self, timer: Any) -> dict[str, Any]:
        """Return seconds of one layer by what it does. The choice comes first: what attends reads it."""
        found: dict[str, Any] = {"rows": self.rows, "context": self.context}
        for name, calls in self._calls.items():
            found[f"{name}_s"] = timer.seconds(lambda calls=calls: [call() for call in calls]) / self.num_copies
        return found

    def _bound(
        self, selector: AttentionSelector, needs: AttentionNeeds, layer: Any, query: Tensor, output: Tensor
    ) -> Callable[[], object]:
        backend_class: Any = selector.select(needs).backend
        backend = backend_class(
            needs, self.device, max_num_seqs=self.rows, max_num_tokens=len(query), max_model_len=self.context
        )
        attend, metadata = backend.bind(layer), backend.build(self.common)
        return lambda: attend(query, metadata, output)

    def _random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def _num_copies(self, numbers: int) -> int:
        return min(max(-(-COPIES_BYTES // (numbers * self.dtype.itemsize)), 1), MOST_COPIES)

    def _describe(self, rows: int, query_len: int, context: int, block_size: int) -> CommonMetadata:
        """Blocks in any order."""
        import torch

        from pelton.attention.metadata import CommonMetadata

        width, num_tokens = -(-context // block_size), rows * query_len
        tables = (torch.randperm(rows * width) + 1).view(rows, width).int().to(self.device)
        decodes = rows if query_len == 1 else 0
        return CommonMetadata(
            query_start_loc=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=self.device),
            seq_lens=torch.full((rows,), context, dtype=torch.int32, device=self.device), block_table=tables,
            slot_mapping=torch.full((num_tokens,), -1, device=self.device), num_reqs=rows, num_tokens=num_tokens,
            num_actual_tokens=num_tokens, num_decode_rows=decodes, num_decode_tokens=decodes, max_query_len=query_len,
            max_seq_len=context,
        )  # fmt: skip


def render(lines: list[dict[str, Any]]) -> str:
    """Microseconds of a layer, and how many times as long attention to all takes."""
    cells = [["rows", "context", "choice us", "chosen us", "both us", "all us", "all / both"]]
    for line in lines:
        both = line["choose_s"] + line["attend_s"]
        times = [number(1e6 * seconds, 4) for seconds in (line["choose_s"], line["attend_s"], both, line["all_s"])]
        cells.append([str(line["rows"]), f"{line['context']:,}", *times, number(line["all_s"] / both)])
    return format_table(cells[0], cells[1:])
