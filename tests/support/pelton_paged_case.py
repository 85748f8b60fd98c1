"""A paged cache with rows in it, poisoned where nothing may be read or written, and attention over it in float64."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
"""Of the largest magnitude, against float64 on the rounded inputs; Triton's interpreter truncates to bfloat16."""


class PagedCase:
    """rows: (tokens of this step, tokens before it). `shared` tokens at the start of all rows lie in the same blocks."""

    def __init__(
        self,
        device: torch.device,
        rows: list[tuple[int, int]],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        block_size: int = 16,
        heads_first: bool = False,
        padding: int = 0,
        shared: int = 0,
        causal: bool = True,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        alibi: bool = False,
        junk: float = torch.nan,
    ) -> None:
        """junk: what lies in the cache where nothing of a row's does."""
        generator = torch.Generator(device=device).manual_seed(len(rows) + sum(map(sum, rows)))
        self.rows, self.device, self.dtype = rows, device, dtype
        self.causal, self.window, self.soft_cap = causal, window, soft_cap
        self.scale = head_dim**-0.5
        counts = [new for new, _ in rows]
        lengths = [new + before for new, before in rows]
        self.num_tokens, self.max_seq_len = sum(counts), max(lengths)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        # Queries as in QKV's rows: strided, and NaN where they are not this tensor's.
        wide = torch.full((self.num_tokens + padding, (heads + 2) * head_dim), torch.nan, device=device)
        wide = wide.to(DTYPES[dtype])
        self.query = wide[:, : heads * head_dim].unflatten(1, (heads, head_dim))
        self.query.copy_(random(*self.query.shape))
        self.sinks = random(heads) * 2 if sinks else None
        self.alibi_slopes = random(heads).abs() * 0.2 if alibi else None

        self.num_blocks = sum(-(-length // block_size) for length in lengths) + 2
        axes = (kv_heads, block_size) if heads_first else (block_size, kv_heads)
        pages = torch.full((self.num_blocks, 2, *axes, head_dim), junk, device=device)
        k_pages, v_pages = (pages.transpose(2, 3) if heads_first else pages).unbind(1)
        ids = (torch.randperm(self.num_blocks - 2, generator=generator, device=device) + 1).int().tolist()
        width = max(-(-max(lengths) // block_size), 1) + 3
        # Places beyond a row's blocks name one that it does not hold, as those of an earlier owner of its slot would.
        self.block_table = torch.full(
            (len(rows) + padding, width), self.num_blocks - 1, dtype=torch.int32, device=device
        )
        self.block_table[len(rows) :] = 0
        self.slots: list[Tensor] = []
        first_ids: list[int] = []
        for row, length in enumerate(lengths):
            count = -(-length // block_size)
            table = first_ids[: min(shared // block_size, count)]
            table += [ids.pop() for _ in range(count - len(table))]
            first_ids = first_ids or table
            # What lies behind a window has been handed back, and may be another's: the table still points there.
            passed = 0 if window is None else max(rows[row][1] - window + 1, 0) // block_size
            self.block_table[row, :count] = torch.tensor(table, dtype=torch.int32)
            position = torch.arange(length, device=device)
            slots = torch.tensor(table, device=device, dtype=torch.int64)[position // block_size] * block_size
            self.slots.append(slots + position % block_size)
            at = self.slots[-1][passed * block_size :]
            k_pages[at // block_size, at % block_size] = random(len(at), kv_heads, head_dim)
            v_pages[at // block_size, at % block_size] = random(len(at), kv_heads, head_dim)
        cache_dtype = KV_DTYPES[kv_dtype or dtype]
        stored = pages.to(cache_dtype)
        self.k_cache, self.v_cache = (stored.transpose(2, 3) if heads_first else stored).unbind(1)
        self.query_start_loc = torch.tensor([0, *counts, *[0] * padding], device=device).cumsum(0).int()
        self.seq_lens = torch.tensor(lengths + [0] * padding, dtype=torch.int32, device=device)
        self.output = torch.full(self.query.shape, torch.nan, dtype=self.query.dtype, device=device)

    def oracle(self, only: list[int] | None = None) -> Tensor:
        """[T, H, D] float64; NaN for rows that `only` leaves out."""
        result = torch.full((self.num_tokens, *self.query.shape[1:]), torch.nan, device=self.device).double()
        heads, kv_heads = self.query.shape[1], self.k_cache.shape[2]
        start = 0
        keys_all, values_all = self.k_cache.float().flatten(0, 1), self.v_cache.float().flatten(0, 1)
        for row, (new, before) in enumerate(self.rows):
            tokens = slice(start, start + new)
            start += new
            if (only is not None and row not in only) or not new:
                continue
            first = 0 if self.window is None else max(before - self.window + 1, 0)
            slots = self.slots[row][first:]
            keys = keys_all[slots].double().repeat_interleave(heads // kv_heads, 1)
            values = values_all[slots].double().repeat_interleave(heads // kv_heads, 1)
            scores = torch.einsum("thd,lhd->htl", self.query[tokens].double(), keys) * self.scale
            if self.soft_cap is not None:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            query_at = torch.arange(before, before + new, device=self.device)[:, None]
            key_at = torch.arange(first, before + new, device=self.device)[None]
            if self.alibi_slopes is not None:
                scores += self.alibi_slopes.double()[:, None, None] * (key_at - query_at)
            seen = key_at <= query_at if self.causal else torch.ones_like(key_at <= query_at)
            if self.window is not None:
                seen = seen & (query_at - key_at < self.window)
            scores = scores.masked_fill(~seen, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks.double()[:, None, None].expand(-1, new, 1)
                weights = torch.cat([scores, sink], 2).softmax(2)[..., :-1]
            else:
                weights = scores.softmax(2)
            result[tokens] = torch.einsum("htl,lhd->thd", weights, values)
        return result

    def check(self, got: Tensor, only: list[int] | None = None) -> None:
        """Close where a row attends, as poisoned as it was elsewhere."""
        want = self.oracle(only)
        assert torch.equal(got[: self.num_tokens].isnan(), want.isnan()), "a row was left out, or touched, or is NaN"
        assert got[self.num_tokens :].isnan().all(), "padding was written"
        want = want.nan_to_num(0.0)
        bound = TOLERANCE[self.dtype] * want.abs().max().clamp(min=1)
        worst = (got[: self.num_tokens].double().nan_to_num(0.0) - want).abs().max()
        assert worst <= bound, f"off by {worst:.3g}, more than {bound:.3g}"
