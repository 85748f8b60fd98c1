"""`pelton bench states`: layers with states, of rows that decode and of prompts.

No model: layers over random states, with the backend that a model's layers would get on this device. Each measured layer has states of
its own, so many that they do not all stay in a processor's caches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
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

    from torch import Tensor

    from pelton.attention.metadata import CommonMetadata

DOC = """Time a layer with states: its short convolution and its states, without the products around them.

  pelton bench states                                                     Mamba-2 of 2.7B: rows of one token, and prompts
  pelton bench states --kind delta_rule --rows 1 64 --query-lens 1        Qwen3-Next's layers, rows of one token"""
COPIES_BYTES, MOST_COPIES = 1 << 28, 16
"""Layers are made until their states have so many bytes, or there are so many."""
CONTEXT, TAPS = 1000, 4
"""Tokens that each row has had before the step, and those that a convolution reads."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer: heads, numbers of one, groups of heads that share B and C (or keys), numbers of a state in each."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int

    @property
    def inner(self) -> int:
        return self.num_heads * self.head_dim


KINDS = {
    "state": Sizes(80, 64, 1, 128), "delta_rule": Sizes(32, 128, 16, 128), "key_delta_rule": Sizes(32, 128, 32, 128),
    "selective_scan": Sizes(8192, 1, 1, 16), "lightning": Sizes(64, 128, 64, 128),
}  # fmt: skip
"""Layers of Mamba-2 of 2.7B, of Qwen3-Next, of Kimi Linear, of Falcon-Mamba, and of MiniMax-Text-01, whose states have as many numbers
of a key as of a value."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a layer's query, how many of them are convolved, the shape of a row's state, and the lengths of what a layer has for
    its steps and decays."""

    columns: int
    convolved: int
    state: tuple[int, ...]
    dt_bias: int
    a_log: tuple[int, ...]

    @classmethod
    def of(cls, kind: str, sizes: Sizes) -> Layout:
        heads, dim, size, inner = sizes.num_heads, sizes.head_dim, sizes.state_size, sizes.inner
        convolved = inner + 2 * sizes.num_groups * size
        if kind == "state":
            return cls(inner + convolved + heads, convolved, (heads, dim, size), heads, (heads,))
        if kind == "selective_scan":
            return cls(2 * inner, inner, (inner, size), 0, (inner, size))
        if kind == "lightning":
            return cls(4 * inner, 0, (heads, dim, dim), 0, ())
        steps = heads if kind == "delta_rule" else heads * size
        return cls(convolved + heads + steps, convolved, (heads, size, dim), steps, (heads,))


class StatesArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: the layer, and the steps that are timed."""

    kind: str = "state"
    """state (Mamba-2), delta_rule, key_delta_rule, selective_scan (Mamba) or lightning."""
    num_heads: int | None = None
    """Instead of the kind's own, as the next three."""
    head_dim: int | None = None
    num_groups: int | None = None
    state_size: int | None = None
    rows: list[int] = msgspec.field(default_factory=lambda: [1, 32])
    """Rows of the step."""
    query_lens: list[int] = msgspec.field(default_factory=lambda: [1, 512])
    """Tokens of each row that the step computes."""
    replays: int = 5
    """Runs in a row, of which the mean counts; the median of five such means is shown."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; use {', '.join(KINDS)}.")
        given = {name: value for name in Sizes.__slots__ if (value := getattr(self, name)) is not None}
        check_at_least(self, rows=1, query_lens=1, replays=1, **dict.fromkeys(given, 1))
        if self.sizes.num_heads % self.sizes.num_groups:
            raise ConfigError(
                f"num_heads is {self.sizes.num_heads} and num_groups {self.sizes.num_groups}; give a number of heads that the groups "
                "divide."
            )

    @property
    def sizes(self) -> Sizes:
        own = KINDS[self.kind]
        return Sizes(*(getattr(self, name) or getattr(own, name) for name in Sizes.__slots__))


def run(argv: list[str]) -> int:
    import torch

    parsed = parse_flags(argv, [StatesArguments], positional=None, program="pelton bench states", doc=DOC)
    arguments: StatesArguments = parsed.structs["StatesArguments"]
    bench, lines = LayerBench(parsed.config, arguments.replays), []
    with torch.inference_mode(), bench.stream():
        for query_len in arguments.query_lens:
            for rows in arguments.rows:
                step = StatesStep(arguments, rows, query_len, bench)
                lines.append(step.measure(bench.timer))
    result = {"backends": bench.backends, "is_captured": bench.is_captured, "lines": lines}
    described = bench.platform.describe()
    print(f"{described}, {bench.dtype}, {arguments.sizes.num_heads} heads, {', '.join(bench.backends)}")
    print(render(lines))
    write_json(arguments.output_json, circumstances(described, flat_settings(parsed)) | result)
    return 0


class StatesStep:
    """One step of some layers."""

    def __init__(self, arguments: StatesArguments, rows: int, query_len: int, bench: LayerBench) -> None:
        import torch

        self.rows, self.query_len, self._bench, self._sizes = rows, query_len, bench, arguments.sizes
        self._dtype: torch.dtype = getattr(torch, bench.dtype)
        sizes, num_tokens = self._sizes, rows * query_len
        self._layout = Layout.of(arguments.kind, sizes)
        self.state_bytes = rows * math.prod(self._layout.state) * 4
        query = self._random(num_tokens, self._layout.columns)
        output, common = torch.empty(num_tokens, sizes.inner, dtype=self._dtype, device=bench.device), self._describe()
        if arguments.kind == "selective_scan":  # steps, B and C
            shapes = ((num_tokens, sizes.inner), *2 * ((num_tokens, sizes.state_size),))
            self._selected = tuple(torch.rand(shape, device=bench.device) for shape in shapes)
        num_copies = min(max(-(-COPIES_BYTES // self.state_bytes), 1), MOST_COPIES)
        self._calls = [self._bound(arguments.kind, query, output, common) for _ in range(num_copies)]

    def measure(self, timer: Any) -> dict[str, Any]:
        """Return seconds of one layer, and bytes of its rows' states."""
        seconds = timer.seconds(lambda: [call() for call in self._calls]) / len(self._calls)
        return {"rows": self.rows, "query_len": self.query_len, "layer_s": seconds, "state_bytes": self.state_bytes}

    def _bound(self, kind: str, query: Tensor, output: Tensor, common: CommonMetadata) -> Callable[[], object]:
        import torch

        from pelton.attention.interface import AttentionNeeds

        sizes, bench, layout = self._sizes, self._bench, self._layout
        needs = AttentionNeeds(
            head_dim=sizes.head_dim, num_heads=sizes.num_heads, num_kv_heads=sizes.num_groups, block_size=16,
            dtype=bench.dtype, attention_type=kind,
        )  # fmt: skip
        states = torch.zeros(self.rows + 1, *layout.state, device=bench.device)
        layer = SimpleNamespace(
            layer_name=kind, needs=needs, num_heads=sizes.num_heads, head_dim=sizes.head_dim, num_groups=sizes.num_groups,
            state_size=sizes.state_size, conv_weight=self._random(layout.convolved, TAPS), conv_bias=None, max_beta=1.0,
            dt_limit=(0.0, math.inf), conv_states=self._random(self.rows + 1, layout.convolved, TAPS - 1), states=states,
            dt_bias=self._random(layout.dt_bias).float(), a_log=self._random(*layout.a_log).float(),
            d=self._random(*layout.a_log[:1]).float(), slopes=torch.rand(sizes.num_heads, device=bench.device),
            selected=lambda convolved: self._selected,
        )  # fmt: skip
        backend: Any = bench.selector.select(needs).backend
        made = backend(
            needs,
            bench.device,
            max_num_seqs=self.rows,
            max_num_tokens=len(query),
            max_model_len=CONTEXT + self.query_len,
        )
        attend, metadata = made.bind(layer), made.build(common)
        return lambda: attend(query, metadata, output)

    def _random(self, *shape: int) -> Tensor:
        import torch

        return torch.randn(shape, dtype=self._dtype, device=self._bench.device)

    def _describe(self) -> CommonMetadata:
        """Pages in any order."""
        import torch

        from pelton.attention.metadata import CommonMetadata

        rows, query_len, device = self.rows, self.query_len, self._bench.device
        num_tokens, decodes = rows * query_len, rows if query_len == 1 else 0
        return CommonMetadata(
            query_start_loc=torch.arange(0, num_tokens + 1, query_len, dtype=torch.int32, device=device),
            seq_lens=torch.full((rows,), CONTEXT + query_len, dtype=torch.int32, device=device),
            block_table=(torch.randperm(rows) + 1).view(rows, 1).int().to(device),
            slot_mapping=torch.full((num_tokens,), -1, device=device), num_reqs=rows, num_tokens=num_tokens,
            num_actual_tokens=num_tokens, num_decode_rows=decodes, num_decode_tokens=decodes, max_query_len=query_len,
            max_seq_len=CONTEXT + query_len,
        )  # fmt: skip


def render(lines: list[dict[str, Any]]) -> str:
    """Microseconds of a layer, tokens a second, and how fast states are read and written."""
    cells = [["rows", "tokens a row", "layer us", "tokens/s", "state GB/s"]]
    for line in lines:
        seconds, tokens = line["layer_s"], line["rows"] * line["query_len"]
        rates = number(tokens / seconds, 4), number(2e-9 * line["state_bytes"] / seconds, 4)
        cells.append([str(line["rows"]), f"{line['query_len']:,}", number(1e6 * seconds, 4), *rates])
    return format_table(cells[0], cells[1:])
