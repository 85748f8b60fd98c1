"""One rank of `sum_add_norm_kernel`'s tests: `python -m pelton_add_norm_ranks RANK SIZE STORE DEVICE`. Prints what is wrong, as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator

import pelton_quick_end  # noqa: F401
import torch

from pelton.ops.interface import AddNormNeeds, AddNormTensors, AllReduceNeeds, AllReduceTensors, NormSpec, RowsToSend
from pelton.parallel.communicator import CommunicatorContext, GroupContext
from pelton.platform.compiling import compile_only
from pelton_backends.reference.ops import ReferenceAddNorm
from pelton_platforms.gpu.peers import add_norm, norm_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 64), (3, 320))
MANY_SHAPES, GPU_MANY_SHAPES = ((1, 64), (23, 320)), ((1, 64), (1300, 64))
"""Of 23 rows each of two programs uses a place twice."""
GPU_SENT_SHAPES = ((1300, 64),)
GPU_SHAPES = {torch.float32: ((3, 320),), torch.bfloat16: ((1, 4096), (7, 2880), (70, 64)), torch.float16: ((2, 64),)}
"""Of 70 rows some programs have two; in the interpreter, whose time goes with the rows, there are two programs. A kernel is compiled for
each width."""


WAYS = ((True, False, False), (True, True, True), (False, False, True))
"""With a residual, a norm of the sum, weights from 0 on."""


def given(seed: int, rank: int, shape: tuple[int, int], dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def send(target: RowsToSend, rows: torch.Tensor) -> None:
    """What a product does beside its result, each block of 64 rows in three parts: half of the rows are the other rank's to add up."""
    parity, num_rows = int(target.calls[0]) & 1, len(rows)
    target.own_counts[1 - parity] = 0
    theirs = torch.arange(num_rows) // target.turn % 2 != target.rank
    target.copies[parity][:num_rows][theirs] = rows[theirs]
    if rows.is_cuda:
        torch.cuda.synchronize()
    target.counts[parity, : -(-num_rows // 64)] += 3
    target.calls[0] += 1
    rows.pelton_parts = 3


class Checks:
    def __init__(self, communicator, device: str) -> None:
        self.group, self.device = communicator, device
        self.number = self.num_runs = 0

    def bound(self, width: int, dtype: torch.dtype):
        needs = AllReduceNeeds(dtype=str(dtype).removeprefix("torch."), hidden_size=width, tp_size=self.group.size)
        return add_norm.PeerAllReduce.bind(needs, AllReduceTensors(GroupContext(self.group)))

    def run(self, shapes: tuple[tuple[int, int], ...] = (), *, is_sent: bool = False) -> Iterator[str]:
        self.is_sent = is_sent
        self.num_runs += 1
        for place, dtype in enumerate(DTYPES):
            for turn, shape in enumerate(shapes or (SHAPES if self.device == "cpu" else GPU_SHAPES[dtype])):
                reduce = self.bound(shape[1], dtype)
                if is_sent:
                    reduce.open_to_send()
                # In the interpreter one way in turn: every shape meets all, every dtype meets two, and in the next run the third.
                for way in [(2 * place + turn + self.num_runs) % 3] if self.device == "cpu" else range(3):
                    yield from self.compare(reduce, shape, dtype, *WAYS[way])

    def compare(self, reduce, shape, dtype, has_residual: bool, has_post: bool, unit_offset: bool) -> Iterator[str]:
        self.number += 1
        what = f"{dtype} {shape} residual {has_residual} post {has_post}"
        spec = NormSpec(size=shape[1], eps=1e-5, unit_offset=unit_offset)
        parts = [given(self.number, rank, shape, dtype, self.device) for rank in range(self.group.size)]
        residual = given(self.number, 90, shape, dtype, self.device) if has_residual else None
        norm, post = (given(self.number, rank, (1, shape[1]), dtype, self.device)[0] for rank in (91, 92))
        total = torch.zeros(shape, device=self.device)
        for part in parts:  # in order of rank
            total += part.float()
        needs = AddNormNeeds(
            dtype=str(dtype).removeprefix("torch."), norm=spec, post_norm=spec if has_post else None, tp_size=1
        )
        reference = ReferenceAddNorm.bind(needs, AddNormTensors(norm, post if has_post else None))
        rows, expected = reference(total.to(dtype), None if residual is None else residual.clone())
        own = parts[self.group.rank].clone()
        if self.is_sent:
            send(reduce.to_send(shape[0]), own)
            if self.number % 4 == 0:  # nobody takes what was sent
                own = own.clone()
        found = reduce.add_norm(
            own, None if residual is None else residual.clone(), norm, spec,
            post if has_post else None, spec if has_post else None,
        )  # fmt: skip
        if found is None:
            yield f"{what}: not served"
            return
        # A sum of squares in another order moves a normed number by one step of its dtype, and so what is made of it: of large ones that
        # nearly cancel too.
        step = 4 * torch.finfo(dtype).eps
        exact = not has_post and (
            self.device != "cpu" or dtype != torch.bfloat16
        )  # the interpreter cuts off what it rounds to it
        for name, mine, wanted, is_exact in (("residual", found[1], expected, exact), ("rows", found[0], rows, False)):
            if is_exact and not torch.equal(mine, wanted):
                yield f"{what}: {name} differs by {(mine.float() - wanted.float()).abs().max():.2e}"
            elif not torch.allclose(mine.float(), wanted.float(), rtol=step, atol=step * wanted.abs().max().item()):
                yield f"{what}: {name} is off by {(mine.float() - wanted.float()).abs().max():.2e}"

    def nothing(self) -> Iterator[str]:
        reduce = self.bound(1024, torch.float32)
        spec, norm = NormSpec(size=1024, eps=1e-5), torch.ones(1024, device=self.device)
        if reduce.add_norm(torch.zeros(0, 1024, device=self.device), None, norm, spec, None, None) is not None:
            yield "no rows are served"

    def nothing_is_sent(self) -> Iterator[str]:
        """Products send rows between two ranks alone: more of them sum rows themselves."""
        reduce = self.bound(64, torch.bfloat16)
        reduce.open_to_send()
        if reduce.to_send(23) is not None:
            yield f"rows of a product are sent among {self.group.size} ranks"

    def compiled_alone(self) -> Iterator[str]:
        """A rank that goes through steps for their kernels alone brings nothing and waits for nobody: the others may not do so."""
        dtype, width = torch.float32, 64
        reduce, spec = self.bound(width, dtype), NormSpec(size=width, eps=1e-5)
        if self.group.rank == 0:
            is_set = compile_only.set(True)
            for rows in (1, MANY_SHAPES[1][0]):
                found = reduce.add_norm(
                    *torch.zeros(2, rows, width, device=self.device),
                    torch.ones(width, device=self.device),
                    spec,
                    None,
                    None,
                )
                if found is None or found[0].shape != (rows, width):
                    yield f"{rows} rows: {found}"
            self.group.all_gather(self.group.all_reduce(torch.zeros(rows, width, device=self.device)))
            self.group.send(torch.zeros(3, device=self.device), 1)
            compile_only.reset(is_set)
        yield from self.compare(reduce, (3, width), dtype, True, False, False)
        yield from self.compare(reduce, (MANY_SHAPES[1][0], width), dtype, True, False, False)

    def captured(self) -> Iterator[str]:
        """Layers one after another in a graph that is replayed: every call has its own number."""
        dtype, shape, layers = torch.bfloat16, (5, 1024), 7
        reduce, spec = self.bound(1024, dtype), NormSpec(size=1024, eps=1e-5)
        norm = torch.ones(1024, dtype=dtype, device=self.device)
        hidden, residual = (torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(2))

        def chain(one, other, sums):
            for _ in range(layers):
                one, other = sums(one.clone(), other)
            return one, other

        def fused(one, other):
            return reduce.add_norm(one, other, norm, spec, None, None)

        def apart(one, other):
            total = reduce(one).float() + other.float()
            total = total.to(dtype)
            return torch.nn.functional.rms_norm(total.float(), (1024,), None, 1e-5).to(dtype), total

        fused(hidden.clone(), residual.clone())  # compiled
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = chain(hidden, residual.clone(), fused)
        for turn in range(5):
            hidden.copy_(given(turn, self.group.rank, shape, dtype, self.device))
            residual.copy_(given(turn, 90, shape, dtype, self.device))
            graph.replay()
            wanted = chain(hidden, residual.clone(), apart)
            for mine, one in zip(found, wanted, strict=True):
                if not torch.allclose(mine.float(), one.float(), rtol=0.05, atol=0.05):
                    yield f"replay {turn} is off by {(mine.float() - one.float()).abs().max():.2e}"


def main() -> int:
    rank, size, store, device = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    load = (
        "pelton_host_peers:HostPeers" if device == "cpu" else "pelton_platforms.gpu.peers.communicator:PeerCommunicator"
    )
    if device == "cpu":
        norm_kernel.PROGRAMS = 2
        add_norm.SENT_TURN = 8
    else:
        torch.cuda.set_device(device)
    module, _, name = load.partition(":")
    communicator = getattr(importlib.import_module(module), name)(
        CommunicatorContext(rank=rank, size=size, device=torch.device(device), store=store, timeout_s=60.0)
    )
    checks = Checks(communicator, device)
    report = {"one shot": list(checks.run()), "no rows": list(checks.nothing())}
    if device != "cpu":
        report["captured"] = list(checks.captured())
    if size > 2:
        add_norm.TWO_SHOTS_FROM_BYTES = 0
        report["two shots"] = list(checks.run())
    add_norm.MANY_FROM_BYTES = add_norm.MANY_FROM_BYTES_OF_MORE = 0
    report["compiled alone"] = list(checks.compiled_alone())
    report["many rows"] = list(checks.run(MANY_SHAPES if device == "cpu" else GPU_MANY_SHAPES))
    if device != "cpu":
        report["many rows captured"] = list(checks.captured())
    if size == 2:
        report["sent rows"] = list(checks.run(((1, 64), (70, 320), *GPU_SENT_SHAPES[: device != "cpu"]), is_sent=True))
    else:
        report["nothing is sent"] = list(checks.nothing_is_sent())
    communicator.all_reduce(torch.ones(1, device=device))  # nobody leaves before all are done
    print(json.dumps(report), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
