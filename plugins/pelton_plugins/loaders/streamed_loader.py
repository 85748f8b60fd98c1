"""Weights from one place, a file or an HTTP server that answers range requests, without a copy on the disk: `--load-format streamed`.

    --model-loader-extra-config '{"uri": "http://store:8000/llama/model.safetensors"}'

The model itself names a folder with the config and the tokenizer. `uri` names a .safetensors file, or the
model.safetensors.index.json of several that lie beside it. Parts are asked for by several connections at once, and go straight
into place; what has to be packed or converted first is read a tensor at a time.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urljoin, urlsplit

import msgspec
import torch

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.resolved import ResolvedModel
from pelton_plugins.loaders.extra_config import read_extra_config
from pelton_plugins.loaders.parallel_reader import ByteSource, FileSource, ParallelReader, bytes_of
from pelton_plugins.loaders.safetensors_header import TensorPlace, needs_mapping, read_header

if TYPE_CHECKING:
    from torch import Tensor

MAX_INDEX_BYTES = 256 * 2**20
MAX_CONCURRENCY = 256
ATTEMPTS = 4
FIRST_PAUSE_S = 0.2  # before the second attempt; doubled for each further one


class StreamSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model_loader_extra_config` of `streamed`."""

    uri: str = ""
    """http(s) address or path of a .safetensors file, or of a model.safetensors.index.json."""
    concurrency: int = 8
    """Connections, or threads that read the file."""
    timeout_s: float = 60.0
    """For which a connection may stay silent."""

    def __post_init__(self) -> None:
        if not self.uri:
            raise ValueError("it has no uri")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ValueError(f"concurrency is {self.concurrency}, use 1 to {MAX_CONCURRENCY}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}, use a number above 0")


class HttpSource:
    """A file of an HTTP server, by range requests; a connection for each thread that reads."""

    def __init__(self, uri: str, timeout_s: float) -> None:
        self.name = uri
        self._parts: SplitResult = urlsplit(uri)
        self._timeout_s = timeout_s
        self._local = threading.local()
        self.size = 0
        self._request(0, memoryview(bytearray(1)))

    def read_into(self, offset: int, view: memoryview) -> None:
        for attempt in range(ATTEMPTS):
            try:
                self._request(offset, view)
                return
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if attempt == ATTEMPTS - 1:
                    raise ConfigError(
                        f"{self.name} cannot be read ({type(error).__name__}: {error}; {ATTEMPTS} attempts). Is the server up?"
                    ) from error
                time.sleep(FIRST_PAUSE_S * 2**attempt)

    def _request(self, offset: int, view: memoryview) -> None:
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        connection = self._connection()
        connection.request("GET", path, headers={"Range": f"bytes={offset}-{offset + len(view) - 1}"})
        response = connection.getresponse()
        if response.status != http.client.PARTIAL_CONTENT:
            self._local.connection = None
            if response.status >= 500:
                raise http.client.HTTPException(f"status {response.status}")
            what = "it sends whole files only" if response.status == http.client.OK else f"status {response.status}"
            raise ConfigError(
                f"{self.name} cannot be read by range requests: {what}. Use a server that answers them with 206."
            )
        self.size = int((response.getheader("Content-Range") or "/0").rpartition("/")[2])
        while len(view):
            count = response.readinto(view)
            if count == 0:
                raise http.client.IncompleteRead(b"", len(view))
            view = view[count:]
        response.read()  # so that the connection is free for the next request

    def _connection(self) -> http.client.HTTPConnection:
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            host = self._parts.hostname or ""
            if self._parts.scheme == "https":
                connection = http.client.HTTPSConnection(
                    host, self._parts.port, timeout=self._timeout_s, context=ssl.create_default_context()
                )
            else:
                connection = http.client.HTTPConnection(host, self._parts.port, timeout=self._timeout_s)
            self._local.connection = connection
        return connection


class StreamedWeight(LazyWeight):
    """A tensor of a source."""

    def __init__(self, source: ByteSource, place: TensorPlace, reader: ParallelReader) -> None:
        self.shape, self.dtype = place.shape, place.dtype
        self._source, self._place, self._reader = source, place, reader
        self._whole: Tensor | None = None  # its slices may be asked for one by one

    def read(self, dim: int | None = None, start: int = 0, stop: int | None = None) -> Tensor:
        place = self._place
        if dim == 0 and place.num_bytes:
            last = place.shape[0] if stop is None else stop
            row_bytes = place.num_bytes // place.shape[0]
            return self._read((last - start, *place.shape[1:]), place.offset + start * row_bytes)
        if self._whole is None:
            self._whole = self._read(place.shape, place.offset)
        last = 0 if dim is None else (place.shape[dim] if stop is None else stop)
        return self._whole if dim is None else self._whole.narrow(dim, start, last - start)

    def _read(self, shape: tuple[int, ...], offset: int) -> Tensor:
        found = torch.empty(shape, dtype=self._place.dtype)
        part = TensorPlace(self._place.dtype, shape, offset)
        if self._reader.fill(self._source, part, found, None, 0, None):
            self._reader.finish()
        elif found.numel():
            self._source.read_into(offset, bytes_of(found))
        return found

    def fill(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        is_filled = self.fill_later(target, dim, start, stop)
        if is_filled:
            self._reader.finish()
        return is_filled

    def fill_later(self, target: Tensor, dim: int | None = None, start: int = 0, stop: int | None = None) -> bool:
        return self._reader.fill(self._source, self._place, target, dim, start, stop)


class StreamedLoader(WeightLoader):
    """Headers are read when this is made: a file that is not there is an error before anything is loaded."""

    def __init__(self, config: EngineConfig, model: ResolvedModel) -> None:
        self._settings = read_extra_config(config, StreamSettings, '{"uri": "http://host/model.safetensors"}')
        self._files = [(source, self._tensors(source, names)) for source, names in self._sources()]

    def _sources(self) -> list[tuple[ByteSource, set[str] | None]]:
        uri = self._settings.uri
        if not uri.endswith(".json"):
            return [(self._open(uri), None)]
        index = self._open(uri)
        if index.size > MAX_INDEX_BYTES:
            raise ConfigError(
                f"{uri} has {index.size} bytes; at most {MAX_INDEX_BYTES} are read. Is it the right file?"
            )
        found = bytearray(index.size)
        index.read_into(0, memoryview(found))
        try:
            weight_map = needs_mapping(json.loads(found), uri).get("weight_map")
        except ValueError as error:
            raise ConfigError(f"{uri} is not readable as JSON: {error}.") from error
        files: dict[str, set[str]] = {}
        for name, file in needs_mapping(weight_map, f"weight_map of {uri}").items():
            if not isinstance(file, str) or "/" in file or not file.endswith(".safetensors"):
                raise ConfigError(
                    f"{uri} puts {name!r} into {file!r}; expected the name of a .safetensors file beside it."
                )
            files.setdefault(file, set()).add(name)
        return [(self._open(beside(uri, file)), files[file]) for file in sorted(files)]

    def _open(self, uri: str) -> ByteSource:
        scheme = urlsplit(uri).scheme
        if scheme in ("http", "https"):
            try:
                return HttpSource(uri, self._settings.timeout_s)
            except (OSError, ValueError, http.client.HTTPException) as error:
                raise ConfigError(
                    f"{uri} cannot be read ({type(error).__name__}: {error}). Is the server up?"
                ) from error
        if scheme not in ("", "file"):
            raise ConfigError(f"model_loader_extra_config has the uri {uri!r}; use http://, https:// or a path.")
        return FileSource(Path(uri.removeprefix("file://")))

    def _tensors(self, source: ByteSource, names: set[str] | None) -> dict[str, TensorPlace]:
        def read(offset: int, size: int) -> bytes:
            found = bytearray(size)
            source.read_into(offset, memoryview(found))
            return bytes(found)

        tensors = read_header(source.name, source.size, read).tensors
        missing = sorted((names or set()) - tensors.keys())
        if missing:
            raise ConfigError(
                f"{source.name} lacks {missing[0]!r} and {len(missing) - 1} other tensors that the index puts there."
            )
        return tensors if names is None else {name: place for name, place in tensors.items() if name in names}

    def weights(self) -> Iterator[tuple[str, LazyWeight]]:
        reader = ParallelReader(self._settings.concurrency)
        with reader.running():
            for source, tensors in self._files:
                for name, place in tensors.items():
                    yield name, StreamedWeight(source, place, reader)

    @property
    def total_bytes(self) -> int:
        return sum(
            math.prod(place.shape) * place.dtype.itemsize for _, tensors in self._files for place in tensors.values()
        )


def beside(uri: str, file: str) -> str:
    """The address of `file` in the folder of `uri`."""
    return urljoin(uri, file) if "://" in uri else str(Path(uri).parent / file)
