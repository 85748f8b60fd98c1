"""From a layer's memory to the tensors that its kernels read.

A layer's memory is `num_blocks` pages, one after the other. A spec says what a page holds (`KVCacheSpec.views`), the
backend says in which order (`KVLayout`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pelton.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_TORCH_NAMES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a backend wants one layer's page pool: axes in memory order, and tokens of a block as its kernels count them.

    Keys and values: memory is [num_blocks, 2, block_size, num_kv_heads, head_dim], or with `heads_first`
    [num_blocks, 2, num_kv_heads, block_size, head_dim]. Either way the layer is handed `k_cache, v_cache` views of logical
    shape [num_blocks, block_size, num_kv_heads, head_dim]. A latent has one head, so that the order is the same.
    """

    heads_first: bool = False
    kernel_block_size: int | None = None  # None: the manager's


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a spec's `dtype`."""
    import torch

    dtype: torch.dtype = getattr(torch, _TORCH_NAMES.get(name, name))
    return dtype


def token_rows(
    memory: Tensor, num_blocks: int, block_size: int, row: Sequence[int], dtype: str, layout: KVLayout
) -> Tensor:
    """[num_blocks, block_size, *row] of pages that hold a row of numbers for each token.

    With kernel blocks, a manager block is `ratio` of them one after the other: the view has num_blocks * ratio blocks, block
    `b` of the manager is `b * ratio` and on, and a slot keeps its number.
    """
    kernel_size = kernel_block_size(block_size, layout)
    return memory.view(torch_dtype(dtype)).view(num_blocks * (block_size // kernel_size), kernel_size, *row)


def keys_and_values(
    memory: Tensor, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str, layout: KVLayout
) -> tuple[Tensor, Tensor]:
    """Keys and values, each [num_blocks, block_size, num_kv_heads, head_dim], as `layout` lays them. Kernel blocks are
    counted as `token_rows` does; each has its keys and its values."""
    kernel_size = kernel_block_size(block_size, layout)
    axes = (num_kv_heads, kernel_size) if layout.heads_first else (kernel_size, num_kv_heads)
    pages = memory.view(torch_dtype(dtype)).view(num_blocks * (block_size // kernel_size), 2, *axes, head_dim)
    if layout.heads_first:
        pages = pages.transpose(2, 3)
    keys, values = pages.unbind(1)
    return keys, values


def state_views(
    memory: Tensor, num_blocks: int, page_size_bytes: int, shapes: Sequence[tuple[tuple[int, ...], str]]
) -> tuple[Tensor, ...]:
    """One tensor [num_blocks, *shape] for each (shape, dtype), which lie one after the other in a page."""
    pages, start, found = memory.view(num_blocks, page_size_bytes), 0, []
    for shape, name in shapes:
        dtype = torch_dtype(name)
        stop = start + math.prod(shape) * dtype.itemsize
        found.append(pages[:, start:stop].view(dtype).view(num_blocks, *shape))
        start = stop
    return tuple(found)


def kernel_block_size(block_size: int, layout: KVLayout) -> int:
    """Tokens of a block as the backend counts. Raises `ConfigError` when blocks do not consist of its blocks."""
    kernel_size = layout.kernel_block_size or block_size
    if block_size % kernel_size:
        raise ConfigError(
            f"The backend wants kernel blocks of {kernel_size} tokens, and blocks have {block_size}; "
            f"set block_size to a multiple of {kernel_size}."
        )
    return kernel_size
