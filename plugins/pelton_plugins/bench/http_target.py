"""A server at a URL as a target: streamed completions over plain sockets, so that reading costs the clock little."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import msgspec

from pelton import __version__, env
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.metrics import RequestTimes
from pelton_plugins.bench.table.targets import Target, TargetState

CONNECT_TIMEOUT_S = 30.0
MAX_LINE_BYTES = 2**24  # a whole answer with logprobs of a long prompt is one line
UNTOLD_LEN = sys.maxsize  # of a server that names no max_model_len: it alone can refuse what is too long


class _Usage(msgspec.Struct):
    completion_tokens: int = 0


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class HttpTarget(Target):
    """An OpenAI-compatible server.

    Prompts are token ids, which vLLM and SGLang take as well. With running usage in the chunks every token has its time;
    a server that does not send it counts one token a chunk.
    """

    is_ours = False

    def __init__(self, url: str, *, model: str | None = None, vocab_size: int = 10_000) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url is {url!r}; use an address such as http://127.0.0.1:8000.")
        self.url = url
        self.host, self.prefix = parts.hostname, parts.path.rstrip("/").removesuffix("/v1")
        # Reads the system's certificates: 65 ms of processor time, which no request may wait for.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.port = parts.port or (443 if self._tls is not None else 80)
        self.model = model
        self.device = f"server {self.host}:{self.port}"
        self.vocab_size = vocab_size
        key = env.api_key()
        self._auth = f"Authorization: Bearer {key}\r\n" if key else ""

    async def start(self) -> None:
        models = msgspec.json.decode(await self._get("/v1/models"))["data"]
        self.model = self.model or str(models[0]["id"])
        told = (m.get("max_model_len") for m in models if m["id"] == self.model)
        self.max_model_len = next(told, None) or UNTOLD_LEN
        self.max_num_seqs = 256

    async def request(self, prompt: list[int], num_tokens: int, stop_after: int | None, times: RequestTimes) -> None:
        body = msgspec.json.encode(
            {
                "model": self.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True,
                "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
        )  # fmt: skip
        times.num_prompt_tokens = len(prompt)
        began = times.sent_s = time.perf_counter()
        try:
            async with self._connection("POST", "/v1/completions", body) as lines:
                async for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        break
                    self._take(data, time.perf_counter() - began, times)
                    if stop_after is not None and stop_after <= len(times.tokens) < num_tokens:
                        times.was_aborted = True
                        return
        except (EngineError, OSError, asyncio.IncompleteReadError, msgspec.DecodeError, ValueError) as error:
            times.error = f"{type(error).__name__}: {error}"
        if times.error is None and not times.tokens:
            times.error = "The stream ended without a token."

    @staticmethod
    def _take(data: bytes, now: float, times: RequestTimes) -> None:
        chunk = msgspec.json.decode(data, type=_Chunk)
        if chunk.error is not None:
            raise EngineError(str(chunk.error))
        if chunk.usage is not None:
            # Tokens without text of their own come with the next chunk that has some.
            times.tokens += [now] * (chunk.usage.completion_tokens - len(times.tokens))
        elif chunk.choices and chunk.choices[0].finish_reason is None:
            times.tokens.append(now)

    async def state(self) -> TargetState:
        text = (await self._get("/metrics")).decode()
        return TargetState(
            _gauge(text, "kv_cache_usage_perc"),
            round(_gauge(text, "num_requests_running") + _gauge(text, "num_requests_waiting")),
        )

    async def close(self) -> None:
        pass

    async def _get(self, path: str) -> bytes:
        async with self._connection("GET", path, b"") as lines:
            return b"".join([line async for line in lines])

    @contextlib.asynccontextmanager
    async def _connection(self, method: str, path: str, body: bytes) -> AsyncIterator[AsyncIterator[bytes]]:
        """One exchange: the lines of the answer's body. Leaving early closes the connection, which ends the request."""
        reader, writer = await asyncio.wait_for(
            asyncio.open_connection(self.host, self.port, ssl=self._tls, limit=MAX_LINE_BYTES), CONNECT_TIMEOUT_S
        )
        try:
            head = (
                f"{method} {self.prefix}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nConnection: close\r\n"
                f"User-Agent: pelton-bench/{__version__}\r\nContent-Type: application/json\r\n{self._auth}"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            status, is_chunked = await _read_head(reader)
            lines = _chunked_lines(reader) if is_chunked else _plain_lines(reader)
            if status != 200:
                text = b"".join([line async for line in lines])
                raise EngineError(f"{self.url} answered {status}: {text[:500].decode('utf-8', 'replace')}")
            yield lines
        finally:
            writer.close()
            with contextlib.suppress(OSError, ssl.SSLError):
                await writer.wait_closed()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """(status, whether the body is chunked)"""
    first = await reader.readline()
    match = re.match(rb"HTTP/1\.[01] (\d{3})", first)
    if match is None:
        raise EngineError(f"No HTTP answer: {first[:80]!r}")
    is_chunked = False
    while (line := (await reader.readline()).strip().lower()) != b"":
        is_chunked |= line.startswith(b"transfer-encoding:") and b"chunked" in line
    return int(match[1]), is_chunked


async def _chunked_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    left = b""
    while True:
        size = int((await reader.readline()).split(b";")[0] or b"0", 16)
        data = await reader.readexactly(size + 2)
        if not size:
            break
        *lines, left = (left + data[:-2]).split(b"\n")
        for line in lines:
            yield line + b"\n"
    if left:
        yield left


async def _plain_lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while line := await reader.readline():
        yield line


def _gauge(text: str, name: str) -> float:
    """The sum over engines of a Prometheus gauge, whatever its prefix."""
    values = re.findall(rf"^[\w:]*{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    if not values:
        raise EngineError(f"/metrics has no {name}: is it a server of Pelton or vLLM, with statistics on?")
    return sum(map(float, values))
