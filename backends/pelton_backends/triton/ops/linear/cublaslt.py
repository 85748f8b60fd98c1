"""Products by cuBLASLt with an algorithm of our choosing: its own choice is not always its fastest.

The library is the one that torch has loaded, called through ctypes; steps call it while they are captured, so its price on the
host counts once. An algorithm that this library or device does not know is refused, and torch's choice serves.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pelton.logging import get_logger
from pelton.platform.compiling import compile_only
from pelton_backends.triton.ops.pieces import is_hopper

if TYPE_CHECKING:
    from torch import Tensor

logger = get_logger(__name__)

WORKSPACE_BYTES = 32 * 2**20
MOST_OFF = 0.02  # of the result's norm, where sums in another order are off by 0.003
# Values of the library's enumerations (cublasLt.h, library_types.h).
_COMPUTE_FLOAT32, _FLOAT32, _TRANSPOSED_A, _TRANSPOSED = 68, 0, 3, 1
_TYPES = {torch.bfloat16: 14, torch.float16: 2, torch.float32: _FLOAT32}
_ATTRIBUTES = (1, 6, 2, 3, 4, 5, 7, 8)
_SHORT_ATTRIBUTES = (7, 8)


class Algorithm(NamedTuple):
    """Attributes of an algorithm, by the names of `cublasLtMatmulAlgoConfigAttributes_t`."""

    id: int
    tile: int
    stages: int
    split_k: int = 1
    reduction: int = 0
    swizzling: int = 0
    custom: int = 0
    inner: int = 0
    cluster: int = 0


class _Result(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class _Library:
    def __init__(self) -> None:
        with open("/proc/self/maps") as maps:
            path = next(line.split()[-1] for line in maps if "libcublasLt.so" in line)
        self.calls = ctypes.CDLL(path)
        self.handle = ctypes.c_void_p()
        self.check("Create", ctypes.byref(self.handle))
        self.operation = ctypes.c_void_p()
        self.check("MatmulDescCreate", ctypes.byref(self.operation), _COMPUTE_FLOAT32, _FLOAT32)
        transposed = ctypes.c_int32(_TRANSPOSED)
        self.check(
            "MatmulDescSetAttribute", self.operation, _TRANSPOSED_A, ctypes.byref(transposed), ctypes.c_size_t(4)
        )
        self.one, self.zero = ctypes.c_float(1), ctypes.c_float(0)

    def check(self, name: str, *arguments: Any) -> None:
        status = getattr(self.calls, f"cublasLt{name}")(*arguments)
        if status:
            raise RuntimeError(f"cublasLt{name} gave status {status}.")

    def layout(self, rows: int, columns: int, stride: int, dtype: torch.dtype) -> ctypes.c_void_p:
        """Describe a matrix whose columns follow each other, `stride` numbers from one to the next."""
        made, sizes = ctypes.c_void_p(), (ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(stride))
        self.check("MatrixLayoutCreate", ctypes.byref(made), _TYPES[dtype], *sizes)
        return made

    def algorithm(self, chosen: Algorithm, types: tuple[int, ...], layouts: tuple[ctypes.c_void_p, ...]) -> Any:
        made = _Result()
        place = ctypes.byref(made.algorithm)
        self.check("MatmulAlgoInit", self.handle, _COMPUTE_FLOAT32, _FLOAT32, *types, chosen.id, place)
        for attribute, value in zip(_ATTRIBUTES, chosen[1:], strict=True):
            size = 2 if attribute in _SHORT_ATTRIBUTES else 4
            given = ctypes.c_uint32(value)
            self.check("MatmulAlgoConfigSetAttribute", place, attribute, ctypes.byref(given), ctypes.c_size_t(size))
        needs = _Result()
        self.check("MatmulAlgoCheck", self.handle, self.operation, *layouts, place, ctypes.byref(needs))
        if needs.workspace_bytes > WORKSPACE_BYTES:
            raise RuntimeError(f"it asks for {needs.workspace_bytes} bytes of workspace.")
        return made


Measured = tuple[tuple[int, Algorithm | None], ...]
"""Most rows, and the algorithm for these and for what is below, down to those of the entry before; None: torch's choice."""


def _nvjet(tile: int, *rest: int) -> Algorithm:
    return Algorithm(66, tile, 35, *rest)


# Tiles for products of any number of rows: named by what they were best at.
_448_ROWS = _nvjet(201, 1, 0, 0, 2, 0, 5)
_576_ROWS = _nvjet(29, 1, 0, 0, 1, 0, 3)
_704_ROWS = _nvjet(197, 1, 0, 0, 2, 0, 5)
_832_ROWS = _nvjet(20, 1, 0, 0, 1, 0, 3)
_NARROW_160_ROWS = _nvjet(18, 1, 0, 0, 1, 0, 4)
_NARROW_208_ROWS = _nvjet(135, 1, 0, 0, 2, 0, 7)
_NARROW_896_ROWS = _nvjet(165, 1, 0, 0, 2, 0, 2)

MEASURED: dict[tuple[int, int], Measured] = {
    # gate and up: 130 to 119, 285 to 160, 192 to 170, 221 to 209, 244 to 225, 292 to 264, 292 to 267, 334 to 306, 322 to 297, 357 to 343
    (28672, 4096): (
        (288, None), (320, _nvjet(400, 1, 0, 0, 3, 0, 5)), (416, None), (480, _448_ROWS), (512, None), (640, _576_ROWS),
        (768, _704_ROWS), (896, _832_ROWS), (960, None), (1024, _448_ROWS),
    ),
    # down: 39.7 to 38.4, 44.2 to 42, 49.1 to 47.3, 54.1 to 51.6, 53.2 to 49, 194 to 172
    (4096, 14336): (
        (128, None), (144, _nvjet(400, 2, 2, 0, 3, 0, 5)), (160, None), (176, _nvjet(33, 2, 2, 0, 3, 0, 5)), (192, None),
        (208, _nvjet(403, 2, 2, 0, 3, 0, 5)), (224, _nvjet(414, 4, 2, 0, 5, 0, 3)), (240, _nvjet(18, 1, 0, 0, 3, 0, 5)),
        (832, None), (896, _NARROW_896_ROWS),
    ),
    # QKV: 24 to 20.2, 26.6 to 23, 25.5 to 23.5, 85.5 to 70.5
    (6144, 4096): (
        (160, None), (176, _nvjet(328, 1, 0, 0, 1, 0, 4)), (208, None), (224, _nvjet(165, 1, 0, 0, 2, 0, 7)),
        (240, _nvjet(208, 1, 0, 0, 3, 0, 5)), (768, None), (832, _nvjet(201, 1, 0, 0, 0, 0, 3)),
    ),
    # O: 18.8 to 15.8, 17.9 to 15.4, 17.2 to 15, 17.8 to 16.2, 19.2 to 16.8, 29 to 26.8, 52.3 to 49.5
    (4096, 4096): (
        (144, None), (176, _NARROW_160_ROWS), (192, _nvjet(164, 1, 0, 0, 0, 0, 4)), (224, _NARROW_208_ROWS), (384, None),
        (416, _832_ROWS), (832, None), (896, _NARROW_896_ROWS),
    ),
}  # fmt: skip
"""By [N, K] of the weight, where one is faster than torch's choice by 3 % and more: Llama-3.1-8B's, H200, cuBLAS 13.1, bfloat16, at the
sizes that steps are padded to, us of a product in a captured chain over distinct weights, torch's in turn with it on a card at
its power limit: torch's choice to this."""


_TRIED: dict[tuple[Any, ...], bool] = {}
"""Whether an algorithm is right for a weight's shape and a number of rows."""


def choose_algorithm(num_rows: int, measured: Measured) -> Algorithm | None:
    return next((algorithm for most, algorithm in measured if num_rows <= most), None)


@cache
def _library() -> _Library:
    return _Library()


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class LibraryProduct:
    """x [T, K] -> x @ weight.T [T, N] with one weight: by the algorithm that was measured, else by torch's."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight
        self._calls: dict[tuple[int, int, int], Any] = {}
        is_known = weight.dtype == torch.bfloat16 and tuple(weight.shape) in MEASURED and weight.stride(1) == 1
        self._algorithms = MEASURED[weight.shape[0], weight.shape[1]] if is_known and is_hopper(weight.device) else ()
        if self._algorithms:
            _workspace(weight.device)  # not while a step is captured: its memory would be the capture's

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        algorithm = choose_algorithm(len(x), self._algorithms)
        if algorithm is not None and x.stride(1) == 1 and x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0:
            if out is None:
                out = x.new_empty(len(x), len(self._weight))
            if self._run(x, algorithm, out):
                return out
        return torch.mm(x, self._weight.T) if out is None else torch.mm(x, self._weight.T, out=out)

    def _run(self, x: Tensor, algorithm: Algorithm, out: Tensor) -> bool:
        """False where this library does not have the algorithm."""
        key = len(x), x.stride(0), out.stride(0)
        if key not in self._calls:
            self._calls[key] = self._prepared(x, algorithm, out)
        prepared = self._calls[key]
        if prepared is None or not self._is_right(x, algorithm, prepared, out):
            return False
        self._multiply(x, prepared, out)
        return True

    def _multiply(self, x: Tensor, prepared: Any, out: Tensor) -> None:
        library, ((a, b, d), chosen) = _library(), prepared
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (self._weight, x, out)]
        library.check(
            "Matmul", library.handle, library.operation, ctypes.byref(library.one), pointers[0], a, pointers[1], b,
            ctypes.byref(library.zero), pointers[2], d, pointers[2], d, ctypes.byref(chosen.algorithm),
            ctypes.c_void_p(_workspace(x.device).data_ptr()), ctypes.c_size_t(WORKSPACE_BYTES),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )  # fmt: skip

    def _is_right(self, x: Tensor, algorithm: Algorithm, prepared: Any, out: Tensor) -> bool:
        """Before an algorithm is used for the first time, its result is held against torch's. Steps run once before they are captured:
        a capture waits for nothing."""
        tried = *self._weight.shape, len(x), algorithm
        if tried not in _TRIED:
            if compile_only.get() or torch.cuda.is_current_stream_capturing():
                return False
            want = torch.mm(x, self._weight.T).float()
            self._multiply(x, prepared, out)
            is_known = want.isfinite()  # rows of padding may hold anything
            norm = torch.where(is_known, want, 0).norm()
            off = float(torch.where(is_known, out.float() - want, 0).norm() / norm)
            if not float(norm):
                return False
            _TRIED[tried] = off < MOST_OFF
            if not _TRIED[tried]:
                found = f"{algorithm} is off by {off:.3f} for {len(x)} rows of {tuple(self._weight.shape)}"
                logger.warning("cuBLASLt's %s; torch's choice serves.", found)
        return _TRIED[tried]

    def _prepared(self, x: Tensor, algorithm: Algorithm, out: Tensor) -> Any:
        weight = self._weight
        (num_columns, size), types = weight.shape, tuple(_TYPES[each.dtype] for each in (weight, x, out, out))
        try:
            library = _library()
            layouts = (
                library.layout(size, num_columns, weight.stride(0), weight.dtype),
                library.layout(size, len(x), x.stride(0), x.dtype),
                library.layout(num_columns, len(x), out.stride(0), out.dtype),
            )
            return layouts, library.algorithm(algorithm, types, (*layouts, layouts[2]))
        except (RuntimeError, OSError, StopIteration, AttributeError) as error:
            logger.info(
                "cuBLASLt has no algorithm %s for %d rows of %s: %s", algorithm, len(x), tuple(weight.shape), error
            )
            return None
