"""The KV pool's memory as the worker handles it: whole pages, whatever the layers' views are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pelton.messages.step import SchedulerOutput


@dataclass(slots=True)
class LayerCache:
    """One layer's views of the pool."""

    name: str
    group: int
    views: tuple[Tensor, ...]  # by block first, blocks as the backend counts them: keys and values, latents, states
    kind: str = ""  # what they hold: the name of the spec's class

    @property
    def storage(self) -> torch.UntypedStorage:
        return self.views[0].untyped_storage()


class KVPool:
    """Copy and zero blocks. Layers of different groups share memory, so buffers are found by address."""

    def __init__(self, num_blocks: int, layers: Iterable[LayerCache]) -> None:
        self.num_blocks = num_blocks
        self.layers = list(layers)
        buffers: dict[int, Tensor] = {}
        for layer in self.layers:
            storage = layer.storage
            if storage.data_ptr() not in buffers:
                memory = torch.empty(0, dtype=torch.uint8, device=layer.views[0].device).set_(storage)
                buffers[storage.data_ptr()] = memory.view(num_blocks, -1)
        self.pages = list(buffers.values())  # each [num_blocks, bytes a page]

    @property
    def num_bytes(self) -> int:
        return sum(page.numel() for page in self.pages)

    def caches(self) -> dict[str, Tensor]:
        """Layer name to its page buffer, for KV connectors."""
        by_address = {page.data_ptr(): page for page in self.pages}
        return {layer.name: by_address[layer.storage.data_ptr()] for layer in self.layers}

    def layout(self) -> str:
        """Describe a page's bytes: by layer, dtype, shape, strides and place of each view within a block."""
        described = []
        for layer in self.layers:
            views = [
                f"{view.dtype} {tuple(view.shape[1:])}x{view.shape[0] // self.num_blocks} strides {view.stride()} at "
                f"{view.storage_offset()}"
                for view in layer.views
            ]
            described.append(f"{layer.name}: {layer.kind} {', '.join(views)}")
        return "; ".join(described)

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole blocks; all are read before one is written. int64, on the pages' device."""
        for page in self.pages:
            words = page.view(torch.int64) if page.shape[1] % 8 == 0 else page
            words.index_copy_(0, targets, words.index_select(0, sources))

    def zero_blocks(self, block_ids: Tensor) -> None:
        """block_ids: int64, on the pages' device."""
        for page in self.pages:
            words = (
                page.view(torch.int64) if page.shape[1] % 8 == 0 else page
            )  # byte by byte it takes ten times as long
            words.index_fill_(0, block_ids, 0)


def copies_at_once(copies: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], list[int]]]:
    """(sources, targets) of runs of copies in which none reads or writes what one before it has written."""
    run: dict[int, int] = {}  # target -> source
    for source, target in copies:
        if source in run or target in run:
            yield list(run.values()), list(run)
            run = {}
        run[target] = source
    if run:
        yield list(run.values()), list(run)


def handed_blocks(output: SchedulerOutput, block_sizes: Sequence[int]) -> list[int]:
    """Return the blocks that requests get in this step with nothing of their own in them."""
    found = {block for *_, block_ids in output.block_appends for block in block_ids}
    for new in output.new:
        for size, table in zip(block_sizes, new.block_ids, strict=True):
            found.update(table[-(-new.num_computed_tokens // size) :])  # those before were found, or loaded
    return sorted(found - {0})
