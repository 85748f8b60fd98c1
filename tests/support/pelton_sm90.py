"""Compile the kernels of a decode layer for compute capability 9.0 on a machine without a GPU, and print their machine code.

    python pelton_sm90.py        JSON: {name: [instructions, in order]}

A driver stands in that says what the device is; kernels compile and never run. Run without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", re.MULTILINE)


class _H200:
    """What Triton's runtime asks of a driver before it compiles."""

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: Any = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def compiled_by(call: Callable[[], object]) -> list[Any]:
    """The kernels that a call launches, compiled."""
    found: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only  # type: ignore[method-assign]
    try:
        call()
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
    return found


def instructions(kernel: Any) -> list[str]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        listing = subprocess.run([BIN / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    return INSTRUCTION.findall(listing.stdout)


def decode_layer() -> dict[str, Callable[[], object]]:
    """Qwen3-0.6B's seams at one row and at 32, and attention for few rows and for many."""
    from pelton_linear_oracle import make_case

    from pelton.ops.interface import NormSpec
    from pelton_backends.triton.attention.decode import NewTokens, PartBuffers, decode_attention
    from pelton_backends.triton.ops import gemv, hopper_split_k, small_batch

    hopper_split_k.is_hopper = lambda device: True
    for module in (gemv, hopper_split_k):
        module.has_pdl = lambda device: True  # type: ignore[attr-defined]
    cpu = torch.device("cpu")

    def product(seam: Any, rows: int, size: int, out: int, **options: Any) -> Callable[[], object]:
        case = make_case(rows, size, out, torch.bfloat16, cpu, **options)
        bound = seam.bind(case.needs, case.tensors)
        return lambda: case.call(bound)

    def attention(rows: int) -> Callable[[], object]:
        heads, kv_heads, dim = 16, 8, 128
        cache = torch.empty(4, 2, kv_heads, 16, dim, dtype=torch.bfloat16).transpose(2, 3)
        norm, spec = torch.ones(dim, dtype=torch.bfloat16), NormSpec(size=dim, eps=1e-6)
        numbers = torch.zeros(rows, dtype=torch.int64)
        new = NewTokens(numbers, numbers, dim, torch.empty(64, dim), norm, norm, spec)
        parts = PartBuffers.allocate(cpu, max_rows=rows, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim)
        qkv = torch.empty(rows, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
        return lambda: decode_attention(
            qkv, cache[:, 0], cache[:, 1], torch.empty(rows, heads, dim, dtype=torch.bfloat16),
            torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, 512, dtype=torch.int32), parts, num_rows=rows,
            max_seq_len=8192, scale=1.0, new=new, pdl=True,
        )  # fmt: skip

    few, more = gemv, small_batch
    return {
        "QKV, 1 row": product(few.GemvAddNormLinear, 1, 1024, 4096),
        "O, 1 row": product(few.GemvLinear, 1, 2048, 1024, norm=False),
        "gate and up, 1 row": product(few.GemvAddNormGatedLinear, 1, 1024, 6144, activation="silu"),
        "down, 1 row": product(few.GemvLinear, 1, 3072, 1024, norm=False),
        "O, 32 rows": product(more.SmallBatchLinear, 32, 2048, 1024, norm=False),
        "attention, 1 row": attention(1),
        "attention, 64 rows": attention(64),
    }


def main() -> None:
    driver.set_active(_H200())
    print(json.dumps({name: [instructions(k) for k in compiled_by(call)] for name, call in decode_layer().items()}))


if __name__ == "__main__":
    main()
