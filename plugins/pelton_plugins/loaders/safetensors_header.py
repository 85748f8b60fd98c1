"""The header of a safetensors file: where each tensor lies, in order of its bytes.

The form is public: eight bytes with the header's length (little-endian), the header in JSON, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pelton.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # as the safetensors package has it
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16,
    "I8": torch.int8, "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Where one tensor lies in its file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the file's start

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    tensors: dict[str, TensorPlace]
    metadata: dict[str, str]


def read_header(name: str, size: int, read: Callable[[int, int], bytes]) -> Header:
    """The header of the file `name` of `size` bytes. read: (offset, bytes) -> bytes. Raises `ConfigError` naming the file; tensors of
    dtypes that torch does not have are left out."""
    if size < 8:
        raise _broken(name, f"it has {size} bytes")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise _broken(name, f"its header would have {length} bytes, the file has {size}")
    try:
        fields = json.loads(read(8, length))
    except (ValueError, RecursionError) as error:
        raise _broken(name, f"its header is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise _broken(name, "its header is not a JSON object")
    metadata = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _broken(name, "its __metadata__ is not a JSON object")
    start = 8 + length
    places = {key: _place(name, key, field, start, size) for key, field in fields.items()}
    found = {key: place for key, place in places.items() if place is not None}
    return Header(dict(sorted(found.items(), key=lambda item: item[1].offset)), metadata)


def _place(name: str, key: str, field: Any, start: int, size: int) -> TensorPlace | None:
    try:
        shape = tuple(int(length) for length in field["shape"])
        first, last = (int(offset) for offset in field["data_offsets"])
        dtype = DTYPES.get(field["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise _broken(name, f"its header has {field!r} for tensor {key!r}") from error
    if dtype is None:
        return None
    place = TensorPlace(dtype, shape, start + first)
    if min(shape, default=0) < 0 or first < 0 or last - first != place.num_bytes or start + last > size:
        raise _broken(name, f"tensor {key!r} does not fit into it")
    return place


def _broken(name: str, why: str) -> ConfigError:
    return ConfigError(f"{name} is not a valid safetensors file: {why}. Download it again.")


def needs_mapping(value: object, what: str) -> Mapping[str, Any]:
    """`value` as a JSON object. Raises `ConfigError` that says what it belongs to."""
    if not isinstance(value, dict):
        raise ConfigError(f"{what} is a {type(value).__name__}; expected a JSON object. Write the file again.")
    return value
