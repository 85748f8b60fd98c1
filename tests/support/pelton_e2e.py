"""For end-to-end tests: what transformers answers on a checkpoint, and running servers."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
NUM_NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 48, 64, 100, 129, 200, 255, 300)


@dataclass(frozen=True)
class Reference:
    """One family's checkpoint and transformers' float32 greedy continuations."""

    family: str
    path: str
    prompts: list[list[int]]
    outputs: list[list[int]]
    min_top2_gap: float


def make_prompts(vocab_size: int, lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(length)] for length in lengths]


def greedy_reference(path: str, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], float]:
    """transformers in float32, one prompt at a time, EOS ignored: the ids, and the smallest gap between the best two logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    outputs, gap = [], float("inf")
    with torch.inference_mode():
        for prompt in prompts:
            ids, cache, out = torch.tensor([prompt]), None, []
            for _ in range(num_tokens):
                step = model(input_ids=ids, past_key_values=cache, use_cache=True)
                cache = step.past_key_values
                best = step.logits[0, -1].float().topk(2)
                gap = min(gap, float(best.values[0] - best.values[1]))
                out.append(int(best.indices[0]))
                ids = torch.tensor([[out[-1]]])
            outputs.append(out)
    return outputs, gap


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def serving(
    model: str, *flags: str, log: Path, timeout_s: float = 120.0
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`pelton serve` on a free port until the block ends; gives (base URL, process)."""
    port = free_port()
    command = [sys.executable, "-m", "pelton.cli.main", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                if urllib.request.urlopen(url + "/health", timeout=2).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not come up (exit {process.poll()}):\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
