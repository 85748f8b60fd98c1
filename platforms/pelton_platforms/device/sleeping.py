"""Sleep of a worker: what its memory holds is dropped, or goes to the host, until it wakes up.

The KV pool, captured steps and the state of the batch are dropped, and made anew. Level 1 moves a device's weights to the host and
later back into the same storages, where every op that was bound to them finds them; weights on a CPU stay where they are. Level 2
drops the model, and builds it anew from its checkpoint. Adapters are kept on the host at either level.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pelton.attention.kv_cache import bind_caches
from pelton.errors import NotSupportedError, RequestError
from pelton.kv_cache.planner import with_num_blocks

if TYPE_CHECKING:
    from pelton_platforms.device.adapters import AdapterStore
    from pelton_platforms.device.worker import DeviceWorker

WEIGHTS, KV_CACHE = "weights", "kv_cache"
TAGS = (WEIGHTS, KV_CACHE)
KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2
"""Levels."""


class Sleep:
    """Begins when it is made. No step comes until `wake_up` has returned True."""

    @torch.inference_mode()
    def __init__(self, worker: DeviceWorker, level: int) -> None:
        if worker.runner.connectors:
            names = ", ".join(worker.runner.connectors)
            raise NotSupportedError(
                f"KV connector {names} holds on to the KV pool: this engine cannot sleep.", param="level"
            )
        self._worker = worker
        self._left = set(TAGS)
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        self._adapters: tuple[AdapterStore, Tensor] | None = None
        if level == KEEP_WEIGHTS:
            self._kept = [(storage, _on_host(storage)) for storage in _device_storages(worker)]
            worker.drop_runner()
            bind_caches(with_num_blocks(worker.plan, 2), worker.build)  # layers let go of the pool
            for storage, _ in self._kept:
                storage.resize_(0)
        else:
            store = worker.adapters
            if store is not None:
                assert store.layers.slots is not None
                self._adapters = store, store.layers.slots.tensor.cpu()
            worker.drop_runner()
            worker.drop_model()
            if store is not None:
                store.layers.slots = None
        gc.unfreeze()  # what the engine's start has frozen is garbage now
        gc.collect()
        if worker.device.type == "cuda":
            worker.platform.synchronize()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def wake_up(self, tags: Collection[str]) -> bool:
        """Bring back what `tags` name, all when there are none; True when nothing is left to bring."""
        if not self._left:
            return True
        if unknown := set(tags) - set(TAGS):
            raise RequestError(f"tags has {', '.join(sorted(unknown))}; use {' and '.join(TAGS)}.", param="tags")
        wanted = self._left & set(tags or TAGS)
        if wanted == {KV_CACHE} and WEIGHTS in self._left:
            raise RequestError("tags is kv_cache, and the weights still sleep; wake them first, or both.", param="tags")
        if WEIGHTS in wanted:
            self._bring_weights()
            self._left.remove(WEIGHTS)
        if KV_CACHE in wanted:
            self._worker.initialize_kv_cache(self._worker.plan)
            self._worker.warm_up()
            self._left.remove(KV_CACHE)
            gc.collect()
            gc.freeze()  # as after a start: `pelton.utils.garbage`
        return not self._left

    def _bring_weights(self) -> None:
        worker = self._worker
        if "loaded" not in worker.__dict__:
            worker.load_model()
            if self._adapters is not None:
                store, slots = self._adapters
                assert worker.adapters is not None
                worker.adapters.take_over(store, slots)
                self._adapters = None
            return
        while self._kept:
            storage, memory = self._kept[-1]
            storage.resize_(memory.numel())
            _bytes_of(storage, worker.device).copy_(memory)
            self._kept.pop()


def _device_storages(worker: DeviceWorker) -> list[torch.UntypedStorage]:
    """Weights and adapters, where the host is not their device; each once."""
    if worker.device.type == "cpu":
        return []
    model: Any = worker.model  # a module
    tensors = [*model.parameters(), *model.buffers()]
    if (drafter := worker.loaded.drafter) is not None:
        tensors += [*drafter.parameters(), *drafter.buffers()]
    if worker.adapters is not None and worker.adapters.layers.slots is not None:
        tensors.append(worker.adapters.layers.slots.tensor)
    return list(
        {one.data_ptr(): one for one in (tensor.untyped_storage() for tensor in tensors) if one.nbytes()}.values()
    )


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _on_host(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(storage.nbytes(), dtype=torch.uint8).copy_(_bytes_of(storage, storage.device))
