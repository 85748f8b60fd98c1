"""Read a GGUF file's header: metadata and where each tensor lies. Nothing of the tensors themselves.

Layout (little endian): magic "GGUF", u32 version, u64 tensor count, u64 metadata count; metadata as (string key, u32
type, value); tensors as (string name, u32 dimensions, u64 each, u32 type, u64 offset); padding to the alignment; data.
A string is a u64 length and UTF-8 bytes, an array a u32 type, a u64 count and the items.

The gguf package reads the same, in 2.4 s where this takes 0.03 (49k tokens and merges; it makes a numpy view an item):
long arrays are only stepped over, and decoded when asked for. Every length is checked against the file's size before it
is used, so that a broken or hostile file is a `ConfigError`.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pelton.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_METADATA = 65_536
MAX_TENSORS = 1_000_000
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d"}

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class QuantType:
    """Values are stored in blocks of `block_size`, each `block_bytes` long."""

    name: str
    block_size: int
    block_bytes: int


QUANT_TYPES = {
    0: QuantType("F32", 1, 4), 1: QuantType("F16", 1, 2), 30: QuantType("BF16", 1, 2),
    2: QuantType("Q4_0", 32, 18), 3: QuantType("Q4_1", 32, 20), 6: QuantType("Q5_0", 32, 22), 7: QuantType("Q5_1", 32, 24),
    8: QuantType("Q8_0", 32, 34), 10: QuantType("Q2_K", 256, 84), 11: QuantType("Q3_K", 256, 110),
    12: QuantType("Q4_K", 256, 144), 13: QuantType("Q5_K", 256, 176), 14: QuantType("Q6_K", 256, 210),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` in torch's order (slowest dimension first), `start` and `num_bytes` in the file."""

    name: str
    shape: tuple[int, ...]
    quant_type: QuantType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class _LazyArray:
    item_type: int
    count: int
    start: int


class GGUFFile:
    """An open, memory-mapped GGUF file. `data` stays mapped while this or a view of it lives."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise ConfigError(f"{self.path} cannot be read: {error}.") from error
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self.broken(f"its header ends early or is damaged ({error})") from error

    def broken(self, what: str) -> ConfigError:
        return ConfigError(f"{self.path} is not a valid GGUF file: {what}. Download it again.")

    def get(self, key: str, default: Any = None) -> Any:
        """A metadata value; arrays as lists, decoded now."""
        value = self._values.get(key, default)
        if isinstance(value, _LazyArray):
            value = self._values[key] = self._decode(value, key)
        return value

    def __contains__(self, key: str) -> bool:
        return key in self._values

    @property
    def architecture(self) -> str:
        return str(self.get("general.architecture", ""))

    def _read_header(self) -> None:
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", self.data, 0)
        if magic != MAGIC:
            raise ConfigError(f"{self.path} is not a GGUF file: it starts with {magic!r}, not {MAGIC!r}.")
        if version not in VERSIONS:
            hint = " (a big-endian file?)" if version >= 2**16 else ""
            raise ConfigError(
                f"{self.path} is GGUF version {version}{hint}; versions 2 and 3, little endian, are read."
            )
        if num_values > MAX_METADATA or num_tensors > MAX_TENSORS:
            raise self.broken(f"it claims {num_values} metadata values and {num_tensors} tensors")
        position = struct.calcsize("<4sIQQ")
        for _ in range(num_values):
            key, position = self._string(position)
            (kind,) = _U32.unpack_from(self.data, position)
            self._values[key], position = self._value(kind, position + 4, key)
        found = []
        for _ in range(num_tensors):
            tensor, position = self._tensor(position)
            found.append(tensor)
        self._place(found, position)

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self.data, position)
        start = position + 8
        self._check_room(start, length, "a string")
        return self.data[start : start + length].decode("utf-8"), start + length

    def _check_room(self, start: int, num_bytes: int, what: str) -> None:
        if num_bytes > len(self.data) - start:
            raise self.broken(f"{what} at byte {start} claims {num_bytes} bytes, the file has {len(self.data)}")

    def _value(self, kind: int, position: int, key: str) -> tuple[Any, int]:
        if kind == STRING:
            start = position
            (length,) = _U64.unpack_from(self.data, start)
            self._check_room(start + 8, length, f"{key!r}")
            text = self.data[start + 8 : start + 8 + length].decode("utf-8", errors="replace")
            return text, start + 8 + length
        if kind in SCALARS:
            (value,) = struct.unpack_from("<" + SCALARS[kind], self.data, position)
            return value, position + struct.calcsize("<" + SCALARS[kind])
        if kind != ARRAY:
            raise self.broken(f"metadata {key!r} has unknown type {kind}")
        item_type, count = struct.unpack_from("<IQ", self.data, position)
        start = position + 12
        if item_type == STRING:
            self._check_room(start, 8 * count, f"{key!r}")
            return _LazyArray(item_type, count, start), self._after_strings(start, count, key)
        if item_type not in SCALARS:
            raise self.broken(f"metadata {key!r} is an array of type {item_type}")
        num_bytes = count * struct.calcsize("<" + SCALARS[item_type])
        self._check_room(start, num_bytes, f"{key!r}")
        return _LazyArray(item_type, count, start), start + num_bytes

    def _after_strings(self, position: int, count: int, key: str) -> int:
        data, read = self.data, _U64.unpack_from
        for _ in range(count):
            position += 8 + read(data, position)[0]
            if position > len(data):
                raise self.broken(f"a string of {key!r} ends past the file's end")
        return position

    def _decode(self, array: _LazyArray, key: str) -> list[Any]:
        if array.item_type != STRING:
            return list(struct.unpack_from(f"<{array.count}{SCALARS[array.item_type]}", self.data, array.start))
        data, read, position = self.data, _U64.unpack_from, array.start
        strings = []
        for _ in range(array.count):
            end = position + 8 + read(data, position)[0]
            strings.append(data[position + 8 : end].decode("utf-8", errors="replace"))
            position = end
        return strings

    def _tensor(self, position: int) -> tuple[TensorInfo, int]:
        name, position = self._string(position)
        (num_dims,) = _U32.unpack_from(self.data, position)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self.broken(f"tensor {name!r} has {num_dims} dimensions")
        dims = struct.unpack_from(f"<{num_dims}Q", self.data, position + 4)
        kind, offset = struct.unpack_from("<IQ", self.data, position + 4 + 8 * num_dims)
        quant_type = QUANT_TYPES.get(kind)
        if quant_type is None:
            known = ", ".join(quant.name for quant in QUANT_TYPES.values())
            raise ConfigError(
                f"{self.path}: tensor {name!r} has GGML type {kind}, which is not read. Read are {known}."
            )
        if dims[0] % quant_type.block_size:
            raise self.broken(f"rows of tensor {name!r} have {dims[0]} values, no multiple of {quant_type.block_size}")
        num_bytes = math.prod(dims) // quant_type.block_size * quant_type.block_bytes
        return TensorInfo(name, dims[::-1], quant_type, offset, num_bytes), position + 16 + 8 * num_dims

    def _place(self, found: list[TensorInfo], header_end: int) -> None:
        """Turn offsets into file positions, once the header's length is known."""
        alignment = self._values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self.broken(f"general.alignment is {alignment!r}, no power of two")
        data_start = -(-header_end // alignment) * alignment
        for tensor in found:
            start = data_start + tensor.start
            if tensor.start % alignment:
                raise self.broken(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
            if start + tensor.num_bytes > len(self.data):
                raise self.broken(
                    f"tensor {tensor.name!r} of shape {list(tensor.shape)} ends at byte {start + tensor.num_bytes}, "
                    f"the file has {len(self.data)}"
                )
            if tensor.name in self.tensors:
                raise self.broken(f"tensor {tensor.name!r} is there twice")
            self.tensors[tensor.name] = TensorInfo(
                tensor.name, tensor.shape, tensor.quant_type, start, tensor.num_bytes
            )

    def forget_pages(self, tensor: TensorInfo) -> None:
        """Say that this tensor will not be read again soon: its pages no longer count as this process's memory."""
        if hasattr(self.data, "madvise"):
            first = -(-tensor.start // mmap.PAGESIZE) * mmap.PAGESIZE
            length = tensor.start + tensor.num_bytes - first
            if length > 0:
                self.data.madvise(mmap.MADV_DONTNEED, first, length)

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty when it is not there."""
        value = self.get(key, [])
        if not isinstance(value, list) or (value and not isinstance(value[0], str)):
            raise self.broken(f"metadata {key!r} is {type(value).__name__}, expected an array of strings")
        return value

    def section(self, prefix: str) -> Mapping[str, Any]:
        """Single values whose key starts with `prefix` and a dot, by the rest of the key."""
        return dict(self._section(prefix + "."))

    def _section(self, prefix: str) -> Iterator[tuple[str, Any]]:
        for key in self._values:
            if key.startswith(prefix):
                yield key.removeprefix(prefix), self.get(key)
