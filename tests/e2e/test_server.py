"""The server under load, aborts and kills: nothing leaks, nobody else notices."""

from __future__ import annotations

import asyncio
import json
import random
import re
import urllib.request
from pathlib import Path

import httpx
import psutil
from pelton_e2e import NUM_NEW_TOKENS, Reference


def gauge(url: str, name: str) -> float:
    text = urllib.request.urlopen(url + "/metrics", timeout=60).read().decode()
    match = re.search(rf"^pelton_{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    assert match, f"no {name} in:\n{text[:2000]}"
    return float(match[1])


async def wait_until_idle(url: str) -> None:
    for _ in range(900):
        if gauge(url, "num_requests_running") == 0 and gauge(url, "kv_cache_usage_perc") == 0:
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{gauge(url, 'num_requests_running')} run, KV usage {gauge(url, 'kv_cache_usage_perc')}")


def resident_bytes(root: psutil.Process) -> int:
    return sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])


async def complete(client: httpx.AsyncClient, prompt: list[int], max_tokens: int, **more: object) -> dict[str, object]:
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    } | more
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_ids_through_the_server_equal_transformers(llama_server: tuple[str, Reference]) -> None:
    url, reference = llama_server
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        replies = await asyncio.gather(*(complete(client, p, NUM_NEW_TOKENS) for p in reference.prompts))
    assert [r["choices"][0]["token_ids"] for r in replies] == reference.outputs


async def test_a_disconnect_frees_blocks_at_once(llama_server: tuple[str, Reference]) -> None:
    url, reference = llama_server
    body = {"prompt": reference.prompts[-1], "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json=body) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    break
        await wait_until_idle(url)
        task = asyncio.create_task(complete(client, reference.prompts[-1], 200))
        await asyncio.sleep(0.05)
        task.cancel()
        await wait_until_idle(url)


async def test_a_thousand_requests_with_aborts_leave_nothing_behind(llama_server: tuple[str, Reference]) -> None:
    url, reference = llama_server
    rng = random.Random(7)
    gate = asyncio.Semaphore(64)
    port = int(url.rsplit(":", 1)[1])
    [server] = {
        psutil.Process(c.pid)
        for c in psutil.net_connections("tcp")
        if c.status == "LISTEN" and c.laddr.port == port and c.pid
    }

    async def one(client: httpx.AsyncClient, i: int) -> None:
        index = rng.randrange(len(reference.prompts))
        prompt, expected = reference.prompts[index], reference.outputs[index]
        tokens, abort = rng.randint(1, NUM_NEW_TOKENS), rng.random() < 0.3
        body = {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        async with gate:
            got: list[int] = []
            async with client.stream("POST", "/v1/completions", json=body) as stream:
                assert stream.status_code == 200
                async for line in stream.aiter_lines():
                    if line.startswith("data: {"):
                        chunk = json.loads(line[6:])
                        assert "error" not in chunk, chunk
                        got += chunk["choices"][0].get("token_ids") or []
                        if abort and len(got) > tokens // 2:
                            return
            assert got == expected[:tokens]

    async def batch(client: httpx.AsyncClient, n: int) -> int:
        await asyncio.gather(*(one(client, i) for i in range(n)))
        await wait_until_idle(url)
        return resident_bytes(server)

    limits = httpx.Limits(max_connections=80, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        before = await batch(client, 250)
        after = await batch(client, 750)
    assert after < before * 1.05 + 16 * 2**20, f"memory grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB"


def test_curl_sees_the_same(llama_server: tuple[str, Reference], tmp_path: Path) -> None:
    import subprocess

    url, reference = llama_server
    body = {
        "prompt": reference.prompts[5],
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    reply = subprocess.run(
        ["curl", "-s", url + "/v1/completions", "-H", "Content-Type: application/json", "-d", json.dumps(body)],
        capture_output=True, check=True, timeout=120,
    )  # fmt: skip
    assert json.loads(reply.stdout)["choices"][0]["token_ids"] == reference.outputs[5][:8]
