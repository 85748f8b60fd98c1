"""Embeddings in a request's body: base64 of a safetensors file, or of what `torch.save` writes of one tensor.

Nothing is unpickled. Of `torch.save`'s file the program inside is read, opcode by opcode, and only the one that describes a single
plain tensor is understood: it yields sizes and a place in the file, and calls nothing.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec

from pelton.errors import RequestError
from pelton.messages.request import DTYPE_BYTES, TensorData

_ADVICE = "send base64 of a safetensors file with one tensor, or of torch.save(tensor, file)"
_SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_STORAGES = {"torch FloatStorage": "float32", "torch BFloat16Storage": "bfloat16", "torch HalfStorage": "float16"}
_MAX_HEADER_BYTES = 65_536  # of either form: what describes one tensor has some hundred


def decode_embeds(text: str, field: str) -> TensorData:
    """The tensor of one prompt. Raises `RequestError` that names `field`."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(f"{field} is no base64 ({error}); {_ADVICE}.", param=field) from None
    try:
        return _of_torch(data) if data[:4] == b"PK\3\4" else _of_safetensors(data)
    except RequestError as error:  # of the tensor's own checks
        raise RequestError(f"{field}: {error}", param=field) from None
    except _MALFORMED as error:
        raise RequestError(f"{field} cannot be read ({str(error)[:200]}); {_ADVICE}.", param=field) from None


class _UnreadableError(Exception):
    """The file is not what it should be."""


_MALFORMED = (
    _UnreadableError, zipfile.BadZipFile, zlib.error, struct.error, AttributeError, EOFError, LookupError, OverflowError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""What reading a malformed file raises here, in zipfile and in pickletools."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _of_safetensors(data: bytes) -> TensorData:
    size = int.from_bytes(data[:8], "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, len(data) - 8):
        raise _UnreadableError("neither a safetensors nor a torch file")
    header = msgspec.json.decode(data[8 : 8 + size], type=dict[str, Any])
    header.pop("__metadata__", None)
    if len(header) != 1:
        raise _UnreadableError(f"{len(header)} tensors in one file")
    entry = msgspec.convert(next(iter(header.values())), _Entry)
    if entry.dtype not in _SAFETENSORS:
        raise _UnreadableError(f"dtype {entry.dtype[:20]!r}; use {', '.join(_SAFETENSORS)}")
    first, last = entry.data_offsets
    if not 0 <= first <= last <= len(data) - 8 - size:
        raise _UnreadableError("offsets beyond the file")
    return TensorData(data[8 + size + first : 8 + size + last], _SAFETENSORS[entry.dtype], tuple(entry.shape))


def _of_torch(data: bytes) -> TensorData:
    """torch.save's zip: `*/data.pkl` describes the tensor, `*/data/0` are its numbers."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        members = {info.filename.partition("/")[2]: info for info in file.infolist()}
        if any(info.compress_type != zipfile.ZIP_STORED or info.file_size > len(data) for info in members.values()):
            raise _UnreadableError("compressed members")
        if members["data.pkl"].file_size > _MAX_HEADER_BYTES:
            raise _UnreadableError("more than one tensor")
        if "byteorder" in members and file.read(members["byteorder"]) != b"little":
            raise _UnreadableError("numbers are big-endian")
        found = _described(file.read(members["data.pkl"]))
        numbers = file.read(members[f"data/{found.key}"])
    rows, columns = found.shape
    if found.stride[1] != 1 or (rows > 1 and found.stride[0] != columns):
        raise _UnreadableError("not contiguous; save tensor.contiguous()")
    size = DTYPE_BYTES[found.dtype]
    first = found.offset * size
    return TensorData(numbers[first : first + rows * columns * size], found.dtype, (rows, columns))


@dataclass(slots=True)
class _Found:
    dtype: str
    key: str
    offset: int
    shape: tuple[int, int]
    stride: tuple[int, int]


@dataclass(slots=True, frozen=True)
class _Name:
    """A global that the program names: never looked up."""

    name: str


_MARK = object()
_VALUES = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE"}
_CONSTANTS: dict[str, Any] = {"NEWTRUE": True, "NEWFALSE": False, "NONE": None, "EMPTY_TUPLE": (), "MARK": _MARK}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def _described(program: bytes) -> _Found:
    """Read the program of one tensor: a stack of numbers, texts, names and tuples. Anything else is refused."""
    stack: list[Any] = []
    for opcode, argument, _ in pickletools.genops(program):
        name = opcode.name
        if name in _VALUES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "GLOBAL":
            stack.append(_Name(str(argument)))
        elif name in _TUPLES:
            stack[-_TUPLES[name] :] = [tuple(stack[-_TUPLES[name] :])]
        elif name == "TUPLE":
            start = max(place for place, value in enumerate(stack) if value is _MARK)
            stack[start:] = [tuple(stack[start + 1 :])]
        elif name == "BINPERSID":
            pass  # the tuple that says where the numbers are stays as it is
        elif name == "REDUCE":
            stack[-2:] = [(stack[-2], stack[-1])]
        elif name == "STOP":
            break
        elif name not in ("PROTO", "BINPUT", "LONG_BINPUT"):
            raise _UnreadableError(f"not one plain tensor: opcode {name}")
    (((made, (storage, offset, shape, stride, *_)),)) = stack
    kind, storage_type, key, *_ = storage
    if made != _Name("torch._utils _rebuild_tensor_v2") or kind != "storage" or storage_type.name not in _STORAGES:
        raise _UnreadableError("not one plain tensor of float32, bfloat16 or float16")
    if len(shape) == 3 and shape[0] == 1:
        shape, stride = shape[1:], stride[1:]
    numbers = (offset, *shape, *stride)
    if len(shape) != 2 or len(stride) != 2 or not all(type(n) is int and 0 <= n < 2**40 for n in numbers):
        raise _UnreadableError("its shape is not [tokens, hidden size]")
    return _Found(_STORAGES[storage_type.name], str(key), offset, shape, stride)
