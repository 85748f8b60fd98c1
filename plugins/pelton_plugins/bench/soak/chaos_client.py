"""A client that asks for something at random, may leave or read slowly, and says how its request ended."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass
from typing import Any

TIMEOUT_S = 40.0
DONE = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    """whole, error (a clear one), refused (503 or no connection), cut (the connection ended), left, or wrong."""
    detail: str = ""


async def ask(host: str, port: int, rng: random.Random, *, plain: bool = False, prompt_len: int = 3) -> Outcome:
    """One request. plain: a stream that is read to its end. prompt_len: at most, half of it shared with others."""
    num_tokens = rng.choice((1, 8, 60, 200))
    streams = plain or rng.random() < 0.7
    leaves = not plain and rng.random() < 0.15
    is_slow = not plain and rng.random() < 0.15
    prompt = [1 + rng.randrange(20)] * (prompt_len // 2) + [rng.randrange(1, 200) for _ in range(-(-prompt_len // 2))]
    body = {
        "prompt": prompt[: rng.randint(1, prompt_len)],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": streams,
    }
    try:
        return await asyncio.wait_for(_ask(host, port, body, leaves=leaves, is_slow=is_slow, rng=rng), TIMEOUT_S)
    except TimeoutError:
        return Outcome("wrong", f"no end within {TIMEOUT_S:g} s: {body}")
    except ConnectionRefusedError:
        return Outcome("refused")
    except (OSError, asyncio.IncompleteReadError):
        return Outcome("cut")


async def _ask(
    host: str, port: int, body: dict[str, Any], *, leaves: bool, is_slow: bool, rng: random.Random
) -> Outcome:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        await _send(writer, "POST", "/v1/completions", host, json.dumps(body).encode())
        status = int((await reader.readuntil(b"\r\n")).split()[1])
        if leaves:
            await asyncio.sleep(rng.uniform(0.0, 0.5))
            return Outcome("left")
        parts = []
        while part := await reader.read(rng.choice((16, 4096)) if is_slow else 65_536):
            parts.append(part)
            if is_slow and len(parts) % 8 == 0:
                await asyncio.sleep(0.01)
        return judge(status, b"".join(parts), body)
    finally:
        writer.close()


def judge(status: int, rest: bytes, body: dict[str, Any]) -> Outcome:
    """How an answer ended; rest: headers and body."""
    _, _, found = rest.partition(b"\r\n\r\n")
    if status == 503:
        return (
            Outcome("refused")
            if b'"message":"' in found
            else Outcome("wrong", f"503 without a message: {found[:200]!r}")
        )
    if status != 200:
        is_clear = status == 500 and b'"message":"' in found
        return Outcome("error") if is_clear else Outcome("wrong", f"{status}: {found[:200]!r}")
    if not body["stream"]:
        try:
            tokens = json.loads(found)["usage"]["completion_tokens"]
        except (ValueError, KeyError):
            return Outcome("cut")
        whole = tokens == body["max_tokens"]
        return Outcome("whole") if whole else Outcome("wrong", f"{tokens} tokens of {body['max_tokens']}")
    if DONE not in found:
        return Outcome("cut")
    if b'data: {"error":' in found:
        return Outcome("error")
    num_words = found.count(b"w") + found.count(b"the")
    if b'"finish_reason":"length"' not in found or not num_words:
        return Outcome("wrong", f"a stream without its end: {found[-300:]!r}")
    return Outcome("whole")


async def get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body of an answer of one piece."""
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), 5)
    try:
        await _send(writer, "GET", path, host, b"")
        status = int((await asyncio.wait_for(reader.readuntil(b"\r\n"), 10)).split()[1])
        rest = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    return status, rest.partition(b"\r\n\r\n")[2]


async def _send(writer: asyncio.StreamWriter, method: str, path: str, host: str, body: bytes) -> None:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
