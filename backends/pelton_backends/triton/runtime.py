"""Common to all kernels: programmatic dependent launch, dtypes, the interpreter.

Programmatic dependent launch (PDL) lets a kernel start while the one before it on the stream still runs. It may then read
what no kernel writes (weights); before it touches anything else, to read *or to write*, every program of it calls
`wait_for_inputs`, which returns when all kernels before it are done and their memory is visible. Since each kernel in
the chain does so, that holds for kernels further back too. A kernel without PDL waits as kernels always do.

One exception: the early decode (`attention/decode.py`) reads the step's lengths, tables, positions and slots, and keys and values
of earlier steps, before it waits; products with adapters read `AdapterRowTensors` and the adapters' slots. A step's inputs are prepared
before its embedding, and `embed_kernel` lets no kernel start until it has waited for them itself: so whatever starts behind the
embedding finds them. Where the embedding is no kernel of ours, it starts after all before it are done, and ours after it.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pelton import env

if TYPE_CHECKING:
    import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Triton's interpreter, on CPU tensors: for tests."""


attention_starts_early: ContextVar[bool] = ContextVar("attention_starts_early", default=False)
"""Whether attention of the step that was built last copies keys while QKV's product runs, on multiprocessors where that leaves it room.
A hint: results do not follow from it."""


_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, accumulator):
    """accumulator + a b, in float32 without TF32. The interpreter holds bfloat16 as bit patterns, which it cannot multiply."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before the first access to anything but weights, in every program."""
    if PDL:
        gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """A hint, once the program's own loads are under way: the next kernel's programs may take free places."""
    if PDL:
        gdc_launch_dependents()


H200_MEMORY = 227 * 1024


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that one program may have."""
    if device.type != "cuda":
        return H200_MEMORY
    import torch

    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return int(properties.shared_memory_per_block)
    return properties.shared_memory_per_block_optin


@cache
def has_pdl(device: torch.device) -> bool:
    """Compute capability 9.0 and later, unless PELTON_DEPENDENT_LAUNCH says no."""
    if INTERPRETED or device.type != "cuda" or not env.dependent_launch():
        return False
    import torch

    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(pdl: bool) -> dict[str, Any]:
    """Keyword arguments of a launch: `kernel[grid](..., PDL=pdl, **launch_options(pdl))`."""
    return {"launch_pdl": True} if pdl else {}


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors; 8 for the interpreter."""
    if device.type != "cuda":
        return 8
    import torch

    return torch.cuda.get_device_properties(device).multi_processor_count
