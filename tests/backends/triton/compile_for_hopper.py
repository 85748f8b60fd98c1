"""Compile the paged kernels for compute capability 9.0, with a GPU or without; print what each takes, a line of JSON.

A program of its own: a process either interprets Triton's kernels, as the other tests do where there is no GPU, or compiles
them. Arguments are tensors on the CPU: the compiler looks at their types, strides and addresses alone.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pelton.attention.interface import KVLayout
from pelton.attention.kv_cache import page_views
from pelton.kv_cache.spec import FullAttentionSpec
from pelton.ops.interface import NormSpec, QkNormRopeWriteKvNeeds, QkNormRopeWriteKvTensors
from pelton_backends.triton.attention.cascade import cascade_attention
from pelton_backends.triton.attention.decode import LaunchShape, NewTokens, PartBuffers, decode_attention
from pelton_backends.triton.attention.prefill import prefill_attention
from pelton_backends.triton.ops.qk_rope import TritonQkNormRopeWriteKv

ROWS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 64, 16, 8, 128, 16, 2
SHAPES = {
    "early": LaunchShape(8, 0, 32, 2, is_early=True),
    "split": LaunchShape(4, 0, 16, 3, least=16),
    "streamed": LaunchShape(0, 1056, 16, 2),
}


class Hopper:
    """What the compiler asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Step:
    """One launch of each kernel, of the dtypes given."""

    def __init__(self, dtype: str, kv_dtype: str) -> None:
        self.dtype, self.kv_dtype = dtype, kv_dtype
        self.spec = NormSpec(size=HEAD_DIM, eps=1e-6)
        self.norm = self._empty(HEAD_DIM)
        self.cos_sin = torch.empty(8192, HEAD_DIM)
        self.qkv = self._empty(ROWS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.query = self._empty(ROWS, HEADS, HEAD_DIM)
        self.tokens = torch.zeros(ROWS, dtype=torch.int64)  # positions, or slots
        self.lengths = torch.zeros(ROWS, dtype=torch.int32)
        self.starts = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.table = torch.zeros(ROWS, 512, dtype=torch.int32)
        page = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=kv_dtype)
        memory = torch.zeros(NUM_BLOCKS * page.page_size_bytes, dtype=torch.uint8)
        self.caches = page_views(memory, NUM_BLOCKS, page, KVLayout(heads_first=True))

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, self.dtype))

    def decode(self, shape: LaunchShape) -> None:
        parts = PartBuffers.allocate(
            torch.device("cpu"), max_rows=ROWS, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM
        )
        new = NewTokens(self.tokens, self.tokens, HEAD_DIM, self.cos_sin, self.norm, self.norm, self.spec)
        decode_attention(
            self.qkv, *self.caches, self.query, self.lengths, self.table, parts, num_rows=ROWS, max_seq_len=8192,
            scale=1.0, new=new, pdl=True, shape=shape,
        )  # fmt: skip

    def prefill(self) -> None:
        prefill_attention(
            self.query, *self.caches, self.query, self.starts, self.lengths, self.table, num_reqs=1,
            max_query_len=ROWS, max_seq_len=8192, scale=1.0, pdl=True,
        )  # fmt: skip

    def cascade(self) -> None:
        cascade_attention(
            self.query, *self.caches, self.query, self.lengths, self.table, num_rows=ROWS, prefix_len=1024,
            max_seq_len=8192, scale=1.0, pdl=True,
        )  # fmt: skip

    def write(self) -> None:
        needs = QkNormRopeWriteKvNeeds(
            dtype=self.dtype, kv_dtype=self.kv_dtype, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            rotary_dim=HEAD_DIM, q_norm=self.spec, k_norm=self.spec,
        )  # fmt: skip
        tensors = QkNormRopeWriteKvTensors(self.cos_sin, self.norm, self.norm)
        TritonQkNormRopeWriteKv.bind(needs, tensors)(self.qkv, self.tokens, self.tokens, *self.caches)


def main(dtype: str, kv_dtype: str, *names: str) -> None:
    """names: of SHAPES, or of a method of Step."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    driver.set_active(Hopper())
    step = Step(dtype, kv_dtype)
    for name in names:
        if name in SHAPES:
            step.decode(SHAPES[name])
        else:
            getattr(step, name)()
        for kernel in compiled:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(kernel.asm["cubin"])
                file.flush()
                command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
                usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
            print(json.dumps({"of": name, "kernel": kernel.name, "registers": registers, "stack": stack}))
        compiled.clear()


if __name__ == "__main__":
    main(*sys.argv[1:])
