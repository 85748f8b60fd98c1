"""Time ways to cut a layer's products on a Hopper GPU, one product varied at a time, in a captured chain over distinct weights.

    python tests/tools/sweep_tilings.py --sizes 4096 3072 2048 14336 7168 --rows 32 128
    python tests/tools/sweep_tilings.py --sizes 2048 5120 4096 0 0 --rows 128 --products qkv o --e4m3 --list

--sizes: hidden size, QKV's columns, O's, gate's and up's together, down's; 0 and 0: a layer without the last two. Kernels are compiled by
several processes first. Each variant's result is compared with that of the tiling in use; the best of each product, and all of these
together, are printed beside it. cuBLAS, which takes large matrices of 129 rows and more, is not among them. --e4m3: weights and rows in
float8_e4m3fn, the rows rounded in the chain. --list prints the variants, without a GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from pelton.ops.interface import NormSpec
from pelton_backends.triton.ops.linear.fp8 import add_norm_rounded, rounded
from pelton_backends.triton.ops.linear.hopper_mid_batch import MidBatchProduct
from pelton_backends.triton.ops.linear.hopper_split_k import PROGRAMS, HopperProduct, HopperTiling, choose_hopper_tiling
from pelton_backends.triton.ops.linear.large_batch import add_norm
from pelton_backends.triton.ops.linear.mid_batch_tilings import (
    MidBatchTiling,
    choose_e4m3_tiling,
    choose_mid_batch_tiling,
)
from pelton_backends.triton.ops.pieces import Norm

Tiling = HopperTiling | MidBatchTiling
Rows = tuple[Tensor, Tensor | None]  # and their scales
LAYERS, REPLAYS, SHOWN = 16, 7, 6
NUM_COMPILERS = 12


def sizes_of(given: list[int]) -> dict[str, tuple[int, int, str | None]]:
    """Product -> its weight's rows, columns, and an activation."""
    hidden, qkv, o, gate_up, down = given
    found: dict[str, tuple[int, int, str | None]] = {"qkv": (qkv, hidden, None), "o": (hidden, o, None)}
    if gate_up:
        found |= {"gate_up": (gate_up, hidden, "silu"), "down": (hidden, down, None)}
    return found


def chosen(num_rows: int, size: tuple[int, int, str | None], num_bytes: int) -> Tiling:
    out, columns, activation = size
    choose = choose_mid_batch_tiling if num_bytes == 2 else choose_e4m3_tiling
    tiling = choose(num_rows, out, columns, activation is not None)
    return tiling or choose_hopper_tiling(num_rows, out, columns, num_bytes)


def variants(num_rows: int, size: tuple[int, int, str | None], num_bytes: int) -> Iterator[Tiling]:
    """Tilings of numbers of so many bytes that fit, in 48 to twice as many programs as there are multiprocessors."""
    out, columns, activation = size
    for rows, split, tokens in itertools.product((64, 128), (1, 2, 4), (16, 32, 64, 128)):
        programs = -(-out // rows) * split * -(-num_rows // tokens)
        if rows * tokens > 8192 or tokens >= 2 * max(num_rows, 16) or not 48 <= programs <= 2 * PROGRAMS:
            continue
        for panels, memory in itertools.product((2, 4), (200_000, 100_000)):
            columns_at_once = panels * 128 // num_bytes
            stages = min(memory // ((rows + tokens) * panels * 128), -(-columns // (columns_at_once * split)), 9)
            if stages >= 2:
                yield HopperTiling(rows, columns_at_once, split, stages, tokens)
    if num_rows <= 64:
        return
    for run, groups, split in itertools.product(range(32, 257, 16), (1, 2), (1, 2, 4)):
        programs = -(-out // run) * -(-num_rows // (64 * groups)) * split
        if run.bit_count() > 3 or not 84 <= programs <= PROGRAMS or columns % (128 // num_bytes * split):
            continue
        if activation is not None and split > 1:
            continue
        stages = min(225_000 // ((1 << (run - 1).bit_length()) * 128 + groups * 64 * 128), 9)
        if stages >= 2:
            yield MidBatchTiling(run, run, groups, split, stages)
            if run <= 96:
                yield MidBatchTiling(run, run, groups, split, stages, 128 if groups == 1 else 72)


class Layers:
    """The products of some layers, and the chain over them."""

    def __init__(self, given: list[int], num_rows: int, num_layers: int, num_bytes: int) -> None:
        torch.manual_seed(0)
        self.sizes, self.num_layers, self.num_bytes = sizes_of(given), num_layers, num_bytes
        counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self._products: dict[str, list[tuple[HopperProduct, MidBatchProduct]]] = {
            name: [self._made(size, counters) for _ in range(num_layers)] for name, size in self.sizes.items()
        }
        self.x = torch.randn(num_rows, given[0], dtype=torch.bfloat16, device="cuda")
        self._norm = torch.ones(given[0], dtype=torch.bfloat16, device="cuda")
        self._spec = NormSpec(size=given[0], eps=1e-5)
        self._normed = Norm(self._norm, self._spec.eps, False)

    def _made(self, size: tuple[int, int, str | None], counters: Tensor) -> tuple[HopperProduct, MidBatchProduct]:
        out, columns, activation = size
        weight = torch.randn(out, columns, dtype=torch.bfloat16, device="cuda") / columns**0.5
        scales = None
        if self.num_bytes == 1:
            weight, scales = rounded(weight)
        rest = None, activation, counters, scales
        return HopperProduct(weight, *rest), MidBatchProduct(weight, *rest)

    def run(self, name: str, layer: int, x: Rows, tiling: Tiling) -> Tensor:
        few, more = self._products[name][layer]
        rows, scales = x
        product = few if isinstance(tiling, HopperTiling) else more
        return product(rows, tiling, x_scale=scales, dtype=torch.bfloat16)  # type: ignore[arg-type]

    def rows_of(self, x: Tensor) -> Rows:
        return rounded(x) if self.num_bytes == 1 else (x, None)

    def alone(self, name: str, tiling: Tiling) -> Tensor:
        """One product of fixed numbers."""
        repeats = -(-self.sizes[name][1] // self.x.shape[1])
        rows = torch.cat([self.x] * repeats, 1)[:, : self.sizes[name][1]].contiguous()
        return self.run(name, 0, self.rows_of(rows), tiling)

    def chain(self, tilings: dict[str, Tiling]) -> None:
        residual, rows = self.x.clone(), self.rows_of(self.x)
        for layer in range(self.num_layers):
            qkv = self.run("qkv", layer, rows, tilings["qkv"])
            out = self.run("o", layer, self.rows_of(qkv[:, : self.sizes["o"][1]]), tilings["o"])
            residual, rows = self.normed(out, residual)
            if "down" in tilings:
                inner = self.run("gate_up", layer, rows, tilings["gate_up"])
                residual, rows = self.normed(self.run("down", layer, self.rows_of(inner), tilings["down"]), residual)

    def normed(self, out: Tensor, residual: Tensor) -> tuple[Tensor, Rows]:
        if self.num_bytes == 1:
            residual, *rows = add_norm_rounded(out, residual, self._normed, None, None, None)
            return residual, (rows[0], rows[1])
        residual, x = add_norm(out, residual, self._norm, self._spec)
        return residual, (x, None)

    def timed(self, tilings: dict[str, Tiling]) -> float:
        """us a layer."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.chain(tilings)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                self.chain(tilings)
            graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            events[0].record()
            for event in events[1:]:
                graph.replay()
                event.record()
        torch.cuda.synchronize()
        times = (one.elapsed_time(other) for one, other in itertools.pairwise(events))
        return 1e3 * statistics.median(times) / self.num_layers


def compile_part(given: list[int], num_rows: int, num_bytes: int, names: list[str], part: int) -> None:
    layers = Layers(given, num_rows, 1, num_bytes)
    every = [(name, tiling) for name in names for tiling in variants(num_rows, layers.sizes[name], num_bytes)]
    for name, tiling in every[part::NUM_COMPILERS]:
        attempt(lambda name=name, tiling=tiling: layers.alone(name, tiling))  # type: ignore[misc]


def attempt(call: Callable[[], Any]) -> Any:
    """None: the tiling does not fit."""
    try:
        return call()
    except Exception as error:
        print(f"  left out: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None


def sweep(given: list[int], num_rows: int, num_bytes: int, names: list[str], seconds: float) -> None:
    layers = Layers(given, num_rows, LAYERS, num_bytes)
    base = {name: chosen(num_rows, size, num_bytes) for name, size in layers.sizes.items()}
    ends, best = time.monotonic() + seconds, dict(base)
    print(f"{num_rows} rows: {layers.timed(base):.2f} us a layer as it is, {base}", flush=True)
    for name in names:
        found, want = [], layers.alone(name, base[name]).float()
        for tiling in variants(num_rows, layers.sizes[name], num_bytes):
            if time.monotonic() > ends:
                print(f"  the time is over at {name} {tiling}", flush=True)
                break
            got = attempt(lambda name=name, tiling=tiling: layers.alone(name, tiling))  # type: ignore[misc]
            if got is not None:
                off = (got.float() - want).abs().max().item()
                found.append((layers.timed({**base, name: tiling}), off, tiling))
        print(f"  {name}, as it is {layers.timed(base):.2f}", flush=True)
        for us, off, tiling in sorted(found, key=lambda one: one[0])[:SHOWN]:
            print(f"    {us:.2f}  off by {off:.4f}  {tiling}", flush=True)
        if found:
            best[name] = min(found, key=lambda one: one[0])[2]
    print(f"  all best {layers.timed(best):.2f}, as it is {layers.timed(base):.2f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs=5, required=True, metavar=("HIDDEN", "QKV", "O", "GATE_UP", "DOWN"))
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--products", nargs="+", choices=("qkv", "o", "gate_up", "down"))
    parser.add_argument("--seconds", type=float, default=60.0, help="for the variants of one number of rows")
    parser.add_argument("--e4m3", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names, num_bytes = arguments.products or list(sizes_of(arguments.sizes)), 1 if arguments.e4m3 else 2
    for num_rows in arguments.rows:
        if arguments.list:
            for name in names:
                size = sizes_of(arguments.sizes)[name]
                print(f"{num_rows} rows, {name}: {chosen(num_rows, size, num_bytes)}; variants:")
                print("".join(f"  {tiling}\n" for tiling in variants(num_rows, size, num_bytes)), end="")
        elif arguments.part is not None:
            compile_part(arguments.sizes, num_rows, num_bytes, names, arguments.part)
        else:
            command = [sys.executable, __file__, *sys.argv[1:], "--part"]
            compilers = [
                subprocess.Popen([*command, str(part)], stdout=subprocess.DEVNULL) for part in range(NUM_COMPILERS)
            ]
            for compiler in compilers:
                compiler.wait()
            sweep(arguments.sizes, num_rows, num_bytes, names, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
