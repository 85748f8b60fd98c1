"""Starts of five kernels for compute capability 9.0, with a GPU or without; says in a line of JSON what happened in each.

    python pelton_compile_ahead.py CACHE[:NAME]...      a program of its own: other tests interpret Triton's kernels

CACHE is the folder of Triton's cache. NAME: "second" launches the kernels in another order, "fails" raises at its end. Each start is a
fork of a process that has only imported modules, which takes longer than a start.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import pelton_quick_end  # noqa: F401
import torch
import triton
import triton.language as tl
from pelton_sm90 import Hopper
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pelton.platform.compiling import launch
from pelton_backends.triton.launch import Launcher
from pelton_platforms.cuda.compiler import compile_ahead


@triton.jit
def double_kernel(x, y, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at) * 2)


FACTOR = tl.constexpr(3)


@triton.jit
def scaled(values):
    return values * FACTOR


@triton.jit
def triple_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, scaled(tl.load(x + at)))


@triton.jit
def sixfold_kernel(x, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, 2 * scaled(tl.load(x + at)))


@triton.jit
def broken_kernel(x, SIZE: tl.constexpr):
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))


def start(*names: str) -> dict[str, Any]:
    driver.set_active(Hopper())
    told: dict[str, Any] = {"launched": []}
    run = JITFunction.run

    def run_or_note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if not warmup:
            told["launched"].append(kernel.fn.__name__)
            return None
        return run(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = run_or_note  # nothing can be launched here
    values, launcher = torch.arange(16), Launcher(double_kernel)

    def step() -> None:
        for size in (16, 4, 16):
            indices = torch.empty(16, dtype=torch.int64)
            launch(double_kernel, (1,), values, indices, SIZE=size)
            told["gathered"] = values[indices].tolist()
        from pelton_late_kernel import late_kernel, scaled_late

        if "second" in names:
            _ = scaled_late.cache_key
        for kernel in (triple_kernel, sixfold_kernel, late_kernel)["second" in names :]:
            launch(kernel, (1,), values, SIZE=16)
        launcher("key", (1,), (values, values), {"SIZE": 16})
        launch(broken_kernel, (1,), values, SIZE=8)
        other = threading.Thread(target=lambda: launch(triple_kernel, (1,), values, SIZE=16))
        other.start()
        other.join()
        told["others"] = [torch.empty_like(values).sum().item(), values.new_empty(3).sum().item()]
        if "fails" in names:
            raise IndexError("a step failed")

    told["compiled"] = compile_ahead(step)
    told["compiled_again"] = compile_ahead(step)
    told["kept_by_launcher"] = len(launcher._compiled)
    told["is_told_later"] = knobs.compilation.listener is not None
    launch(double_kernel, (1,), values, values, SIZE=16)
    return told


def main(*starts: str) -> None:
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has one thread of several"
    for one in starts:
        cache, *names = one.split(":")
        if os.fork() == 0:
            os.environ["TRITON_CACHE_DIR"] = cache
            print(json.dumps(start(*names)))
            return
        if status := os.wait()[1]:
            sys.exit(f"a start ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
