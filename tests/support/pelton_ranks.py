"""Ranks that are threads of one process, for tests of what each of them holds and computes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from pelton.parallel.context import ParallelContext


class ThreadContext(ParallelContext):
    """Collectives between threads of one process."""

    def __init__(self, rank, size, shared, barrier):
        super().__init__(rank, size)
        self.shared, self.barrier = shared, barrier

    def _exchange(self, tensor):
        self.shared[self.rank] = tensor.clone()
        self.barrier.wait(timeout=60)
        parts = list(self.shared)
        self.barrier.wait(timeout=60)
        return parts

    def all_reduce(self, tensor):
        return torch.stack(self._exchange(tensor)).sum(0)

    def all_gather(self, tensor, dim=-1):
        return torch.cat(self._exchange(tensor), dim)


def run_ranks(size, make_driver, path, steps):
    """Each rank's logits of the steps, from models built with that rank's shards."""
    shared, barrier = [None] * size, threading.Barrier(size)
    drivers = [make_driver(path, parallel=ThreadContext(rank, size, shared, barrier)) for rank in range(size)]

    def run(driver):
        return torch.cat([driver.step({"a": part})["a"] for part in steps])

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, drivers)), drivers
