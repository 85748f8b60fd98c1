"""Quantized blocks to float32, bit for bit as the gguf package does it.

The kinds that small models come in are written out here (0.2 s for SmolLM2-135M on one core, where the
package takes 0.45, and it need not be installed); all others go through the package.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from pelton.errors import ConfigError
from pelton_plugins.loaders.gguf.file import QuantType

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_THREADS = 8
BYTES_AT_ONCE = 2**20  # of results: what is worked on stays in cache, and little is held beside the result


def dequantize(rows: NDArray[np.uint8], quant_type: QuantType) -> NDArray[np.float32]:
    """Rows of blocks [n, bytes] -> [n, values]."""
    width = rows.shape[1] // quant_type.block_bytes * quant_type.block_size
    result = np.empty((rows.shape[0], width), dtype=np.float32)
    step = max(1, BYTES_AT_ONCE // (4 * width))
    convert = KINDS.get(quant_type.name)

    def run(first: int) -> None:
        part = np.ascontiguousarray(rows[first : first + step])
        target = result[first : first + step]
        if convert is None:
            target[:] = _through_package(part, quant_type)
        else:
            convert(part.reshape(-1, quant_type.block_bytes), target.reshape(-1, quant_type.block_size))

    starts = range(0, rows.shape[0], step)
    for _ in map(run, starts) if len(starts) == 1 else _threads().map(run, starts):
        pass
    return result


@cache
def _threads() -> ThreadPoolExecutor:
    """NumPy lets go of the GIL: the demo's weights take 0.16 s on two cores where one takes 0.22."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(count, MOST_THREADS), thread_name_prefix="pelton-dequantize")


def _half(blocks: NDArray[np.uint8], start: int) -> NDArray[np.float32]:
    """The float16 at byte `start` of each block [b, bytes] -> [b, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """[b, 16] bytes -> [b, 32]: low halves first, then high halves."""
    out[:, :16] = packed & 15
    out[:, 16:] = packed >> 4


def _q8_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    out[:] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _q4_0(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    _nibbles(blocks[:, 2:], out)
    out -= 8.0
    out *= _half(blocks, 0)


def _q4_1(blocks: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    _nibbles(blocks[:, 4:], out)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


KINDS: dict[str, Callable[[NDArray[np.uint8], NDArray[np.float32]], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
}


def _through_package(rows: NDArray[np.uint8], quant_type: QuantType) -> NDArray[Any]:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"{quant_type.name} weights need the gguf package: pip install 'pelton[gguf]'") from error
    values: NDArray[Any] = gguf.dequantize(rows, gguf.GGMLQuantizationType[quant_type.name])
    return values
