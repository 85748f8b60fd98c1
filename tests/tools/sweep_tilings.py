"""Time ways to cut a layer's products on a Hopper GPU, one product varied at a time, in a captured chain over distinct weights.

    python tests/tools/sweep_tilings.py --sizes 4096 3072 2048 14336 7168 --rows 32 128
    python tests/tools/sweep_tilings.py --sizes 4096 6144 4096 28672 14336 --rows 32 128 --dtype float8_e4m3fn
    python tests/tools/sweep_tilings.py --sizes 2048 5120 4096 0 0 --rows 128 --products qkv o --list

--sizes: hidden size, QKV's columns, O's, gate's and up's together, down's; 0 and 0: a layer without the last two. Kernels are compiled by
several processes first. Each variant's result is compared with that of the tiling in use; the best of each product, and all of these
together, are printed beside it. In float8_e4m3fn the chain has the kernels that round between products, too. --list prints the variants,
without a GPU.
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
from pelton_backends.triton.ops.linear.hopper_split_k import (
    PANEL_BYTES,
    PROGRAMS,
    HopperProduct,
    HopperTiling,
    choose_hopper_tiling,
)
from pelton_backends.triton.ops.linear.large_batch import add_norm
from pelton_backends.triton.ops.linear.mid_batch_tilings import (
    MidBatchTiling,
    choose_e4m3_tiling,
    choose_mid_batch_tiling,
)
from pelton_backends.triton.ops.pieces import Norm

Tiling = HopperTiling | MidBatchTiling
Size = tuple[int, int, str | None]
LAYERS, REPLAYS, SHOWN = 16, 7, 6
NUM_COMPILERS = 12


def sizes_of(given: list[int]) -> dict[str, Size]:
    """Product -> its weight's rows, columns, and an activation."""
    hidden, qkv, o, gate_up, down = given
    found: dict[str, Size] = {"qkv": (qkv, hidden, None), "o": (hidden, o, None)}
    if gate_up:
        found |= {"gate_up": (gate_up, hidden, "silu"), "down": (hidden, down, None)}
    return found


def chosen(num_rows: int, size: Size, dtype: torch.dtype) -> Tiling:
    out, columns, activation = size
    choose = choose_mid_batch_tiling if dtype.itemsize == 2 else choose_e4m3_tiling
    tiling = choose(num_rows, out, columns, activation is not None)
    return tiling or choose_hopper_tiling(num_rows, out, columns, dtype.itemsize)


def variants(num_rows: int, size: Size, dtype: torch.dtype) -> Iterator[Tiling]:
    """Tilings that fit, in 48 to twice as many programs as there are multiprocessors."""
    out, columns, activation = size
    for rows, split, tokens in itertools.product((64, 128), (1, 2, 4), (16, 32, 64, 128)):
        programs = -(-out // rows) * split * -(-num_rows // tokens)
        if rows * tokens > 16384 or tokens >= 2 * max(num_rows, 16) or not 48 <= programs <= 2 * PROGRAMS:
            continue
        for row_bytes, memory in itertools.product((256, 512), (200_000, 100_000)):
            columns_at_once = row_bytes // dtype.itemsize
            stages = min(memory // ((rows + tokens) * row_bytes), -(-columns // (columns_at_once * split)), 9)
            if stages >= 2 and columns % columns_at_once == 0:
                yield HopperTiling(rows, columns_at_once, split, stages, tokens)
    for run, groups, split in itertools.product(range(32, 257, 16), (1, 2), (1, 2, 4)):
        programs = -(-out // run) * -(-num_rows // (64 * groups)) * split
        if run.bit_count() > 3 or not 84 <= programs <= PROGRAMS or columns % (PANEL_BYTES // dtype.itemsize * split):
            continue
        if (activation is not None and split > 1) or 64 * groups >= 2 * max(num_rows, 64):
            continue
        stages = min(225_000 // ((1 << (run - 1).bit_length()) * 128 + groups * 64 * 128), 9)
        if stages >= 2:
            yield MidBatchTiling(run, run, groups, split, stages)
            if run <= 96:
                yield MidBatchTiling(run, run, groups, split, stages, 128 if groups == 1 else 72)


class Layers:
    """The products of some layers, and the chain over them."""

    def __init__(self, given: list[int], num_rows: int, num_layers: int, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.sizes, self.num_layers, self.dtype = sizes_of(given), num_layers, dtype
        counters = torch.zeros(1 << 16, dtype=torch.int32, device="cuda")
        self._products: dict[str, list[tuple[HopperProduct, MidBatchProduct]]] = {
            name: [self._made(size, counters) for _ in range(num_layers)] for name, size in self.sizes.items()
        }
        self.x = torch.randn(num_rows, given[0], dtype=torch.bfloat16, device="cuda")
        self._norm = torch.ones(given[0], dtype=torch.bfloat16, device="cuda")
        self._spec = NormSpec(size=given[0], eps=1e-5)

    def _made(self, size: Size, counters: Tensor) -> tuple[HopperProduct, MidBatchProduct]:
        out, columns, activation = size
        weight, scale = torch.randn(out, columns, dtype=torch.bfloat16, device="cuda"), None
        if self.dtype.itemsize == 2:
            weight /= columns**0.5
        else:
            weight = weight.to(self.dtype)
            scale = (1 + torch.rand(out, device="cuda")) / columns**0.5
        given = weight, None, activation, counters, scale
        return HopperProduct(*given), MidBatchProduct(*given)

    def run(self, name: str, layer: int, x: Tensor | tuple[Tensor, Tensor], tiling: Tiling) -> Tensor:
        """x: rows, or rows in e4m3 and their scales."""
        few, more = self._products[name][layer]
        rows, scales = (x, None) if isinstance(x, Tensor) else x
        if isinstance(tiling, HopperTiling):
            return few(rows, tiling, x_scale=scales, dtype=torch.bfloat16)
        return more(rows, tiling, x_scale=scales, dtype=torch.bfloat16)

    def _rounded(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return x if self.dtype.itemsize == 2 else rounded(x)

    def _normed(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        if self.dtype.itemsize == 2:
            return add_norm(x, residual, self._norm, self._spec)
        residual, rows, scales = add_norm_rounded(
            x, residual, Norm(self._norm, self._spec.eps, False), None, None, None
        )
        return residual, (rows, scales)

    def alone(self, name: str, tiling: Tiling) -> Tensor:
        """One product of fixed numbers."""
        repeats = -(-self.sizes[name][1] // self.x.shape[1])
        x = torch.cat([self.x] * repeats, 1)[:, : self.sizes[name][1]].contiguous()
        return self.run(name, 0, self._rounded(x), tiling)

    def chain(self, tilings: dict[str, Tiling]) -> None:
        residual, rows = self._normed(self.x, self.x.clone())
        for layer in range(self.num_layers):
            qkv = self.run("qkv", layer, rows, tilings["qkv"])
            out = self.run("o", layer, self._rounded(qkv[:, : self.sizes["o"][1]]), tilings["o"])
            residual, rows = self._normed(out, residual)
            if "down" in tilings:
                out = self.run("gate_up", layer, rows, tilings["gate_up"])
                out = self.run("down", layer, self._rounded(out), tilings["down"])
                residual, rows = self._normed(out, residual)

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


def compile_part(given: list[int], num_rows: int, names: list[str], dtype: torch.dtype, part: int) -> None:
    layers = Layers(given, num_rows, 1, dtype)
    every = [(name, tiling) for name in names for tiling in variants(num_rows, layers.sizes[name], dtype)]
    for name, tiling in every[part::NUM_COMPILERS]:
        attempt(lambda name=name, tiling=tiling: layers.alone(name, tiling))  # type: ignore[misc]


def attempt(call: Callable[[], Any]) -> Any:
    """None: the tiling does not fit."""
    try:
        return call()
    except Exception as error:
        print(f"  left out: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None


def sweep(given: list[int], num_rows: int, names: list[str], dtype: torch.dtype, seconds: float) -> None:
    layers = Layers(given, num_rows, LAYERS, dtype)
    base = {name: chosen(num_rows, size, dtype) for name, size in layers.sizes.items()}
    ends, best = time.monotonic() + seconds, dict(base)
    print(f"{num_rows} rows: {layers.timed(base):.2f} us a layer as it is, {base}", flush=True)
    for name in names:
        found, want = [], layers.alone(name, base[name]).float()
        for tiling in variants(num_rows, layers.sizes[name], dtype):
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
    parser.add_argument("--dtype", choices=("bfloat16", "float8_e4m3fn"), default="bfloat16")
    parser.add_argument("--seconds", type=float, default=60.0, help="for the variants of one number of rows")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    names, dtype = arguments.products or list(sizes_of(arguments.sizes)), getattr(torch, arguments.dtype)
    for num_rows in arguments.rows:
        if arguments.list:
            for name in names:
                size = sizes_of(arguments.sizes)[name]
                print(f"{num_rows} rows, {name}: {chosen(num_rows, size, dtype)}; variants:")
                print("".join(f"  {tiling}\n" for tiling in variants(num_rows, size, dtype)), end="")
        elif arguments.part is not None:
            compile_part(arguments.sizes, num_rows, names, dtype, arguments.part)
        else:
            command = [sys.executable, __file__, *sys.argv[1:], "--part"]
            compilers = [
                subprocess.Popen([*command, str(part)], stdout=subprocess.DEVNULL) for part in range(NUM_COMPILERS)
            ]
            for compiler in compilers:
                compiler.wait()
            sweep(arguments.sizes, num_rows, names, dtype, arguments.seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
