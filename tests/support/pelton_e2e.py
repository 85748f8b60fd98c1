"""For end-to-end tests: what transformers answers on a checkpoint, and running servers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from pelton_forked import NAME, ExecPopen, ForkingPopen
from pelton_references import cached

if TYPE_CHECKING:
    from pytest import TempPathFactory

    from pelton import LLM

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
NUM_NEW_TOKENS = 17  # every prompt goes on over an end of a block: the last token's keys are not written
PROMPT_LENGTHS = (1, 2, 3, 5, 15, 16, 17, 31, 33, 48, 64, 100, 129, 200, 255, 300)


TIE = 1e-4
"""A gap between the best two float32 logits under which either may win: rounding decides, and engines round differently."""


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
    """transformers in float32, EOS ignored: the ids, and the smallest gap between the best two logits."""
    reference = gap_reference("", path, prompts, num_tokens, "cpu")
    return reference.outputs, min(min(row) for row in reference.gaps)


def references_in(
    folders: TempPathFactory,
    num_tokens: int,
    lengths: tuple[int, ...] = PROMPT_LENGTHS,
    *,
    with_tokenizer: bool = False,
) -> Callable[[str], Reference]:
    """A function from family to its tiny checkpoint with transformers' answers, each made once."""
    from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            path = str(make_tiny_checkpoint(folders.mktemp(family), family, with_tokenizer=with_tokenizer))
            stated = json.loads((Path(path) / "config.json").read_text()).get("vocab_size", VOCAB_SIZE)
            prompts = make_prompts(stated if with_tokenizer else VOCAB_SIZE, lengths)
            made[family] = Reference(family, path, prompts, *greedy_reference(path, prompts, num_tokens))
        return made[family]

    return get


@dataclass(frozen=True)
class GapReference:
    """One checkpoint, transformers' float32 greedy continuations, and at each token the gap between its best two logits."""

    family: str
    path: str
    prompts: list[list[int]]
    outputs: list[list[int]]
    gaps: list[list[float]]

    @property
    def num_tokens(self) -> int:
        """Of each continuation."""
        return len(self.outputs[0])

    @property
    def ties(self) -> list[str]:
        return [
            f"prompt {i}, token {t}: {gap:.1e}"
            for i, row in enumerate(self.gaps) for t, gap in enumerate(row) if gap < TIE
        ]  # fmt: skip

    def check(self, outputs: list[list[int]], start: int = 0) -> None:
        """`outputs` are transformers' ids from `start` on, each up to its first tie."""
        assert len(outputs) == len(self.outputs)
        for i, (got, expected, gaps) in enumerate(zip(outputs, self.outputs, self.gaps, strict=True)):
            tie = next((t for t, gap in enumerate(gaps) if gap < TIE), len(gaps))
            assert len(got) == len(expected) - start
            if got[: tie - start] != expected[start:tie]:
                wrong = next(t for t in range(start, tie) if got[t - start] != expected[t])
                raise AssertionError(
                    f"{self.family}: prompt {i} of {len(self.prompts[i])} tokens differs from transformers at token {wrong}, "
                    f"where the gap is {gaps[wrong]:.1e}: {got[wrong - start :][:8]}, not {expected[wrong:][:8]}"
                )


def gap_reference(family: str, path: str, prompts: list[list[int]], num_tokens: int, device: str) -> GapReference:
    """transformers in float32 on `device`, EOS ignored; computed once for each content of the checkpoint (pelton_references)."""

    def compute() -> tuple[list[list[int]], list[list[float]]]:
        import torch

        from pelton.testing.models import load_reference

        torch.set_float32_matmul_precision("highest")
        model = load_reference(path)
        model.to(device)
        _take_limit(model)
        with _soft_capped(model):
            return greedy_with_gaps(model, prompts, num_tokens, is_alone=is_alone)

    is_alone = "attention_chunk_size" in (Path(path) / "config.json").read_text()
    outputs, gaps = cached(path, [prompts, num_tokens, device, *(["alone"] if is_alone else [])], compute)
    return GapReference(family, path, prompts, outputs, gaps)


def _take_limit(model: Any) -> None:
    """Some versions of transformers clamp the experts of gpt-oss to 7, whatever the configuration says."""
    limit = getattr(model.config, "swiglu_limit", None)
    for module in model.modules():
        if limit is not None and hasattr(module, "gate_up_proj_bias"):
            module.limit = limit


@contextlib.contextmanager
def _soft_capped(model: Any) -> Iterator[None]:
    """transformers' Gemma 3 has a soft cap of attention in its configuration and in its attention function, and does not
    pass the one to the other."""
    cap = getattr(model.config, "attn_logit_softcapping", None)
    if cap is None:
        yield
        return
    module = sys.modules[type(model).__module__]
    plain = module.eager_attention_forward
    with mock.patch.object(module, "eager_attention_forward", functools.partial(plain, softcap=cap)):
        yield


def greedy_with_gaps(
    model: Any, prompts: list[list[int]], num_tokens: int, *, is_alone: bool
) -> tuple[list[list[int]], list[list[float]]]:
    """is_alone: without padding, which transformers' Llama 4 counts as positions (chunks, scales of queries)."""
    outputs: list[list[int]] = [[] for _ in prompts]
    gaps: list[list[float]] = [[] for _ in prompts]
    for rows in [[i] for i in range(len(prompts))] if is_alone else _of_similar_length(prompts):
        tokens, differences = _greedy_batch(model, [prompts[i] for i in rows], num_tokens)
        for i, own_tokens, own_gaps in zip(rows, tokens, differences, strict=True):
            outputs[i], gaps[i] = own_tokens, own_gaps
    return outputs, gaps


def _of_similar_length(prompts: list[list[int]]) -> list[list[int]]:
    """Indices of prompts that are computed together: some hundred tokens of padding take less than the steps of a batch more."""
    batches: list[list[int]] = []
    for i in sorted(range(len(prompts)), key=lambda i: len(prompts[i])):
        if batches and len(prompts[i]) <= 2 * len(prompts[batches[-1][0]]) + 512:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _greedy_batch(model: Any, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
    """With padding on the left, which attention is masked from."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    steps, cache = [], None
    with torch.inference_mode():
        for _ in range(num_tokens):
            step = model(
                input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True,
                logits_to_keep=1,
            )  # fmt: skip
            cache = step.past_key_values
            best = step.logits[:, -1].float().topk(2)
            steps.append((best.indices[:, 0], best.values[:, 0] - best.values[:, 1]))
            ids, positions = best.indices[:, :1], positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], 1)
    tokens, differences = (torch.stack(part, 1).tolist() for part in zip(*steps, strict=True))
    return tokens, differences


def make_llm(path: str, **settings: Any) -> LLM:
    """The engine on a tiny checkpoint, in float32, with a small pool."""
    from pelton import LLM

    defaults: dict[str, Any] = {
        "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512, "max_num_seqs": 16,
        "kv_cache_memory_bytes": (64 if path == "smollm2" else 16) * 2**20, "disable_log_stats": True,
    }  # fmt: skip
    return LLM(model=path, **(defaults | settings))


def generate(llm: LLM, prompts: list[list[int]], params: Any = None) -> list[list[int]]:
    """Output ids; NUM_NEW_TOKENS greedy ones unless `params` say other."""
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params or greedy(), use_tqdm=False)
    assert not (errors := {o.error.message for o in outputs if o.error is not None}), errors
    assert [o.prompt_token_ids for o in outputs] == prompts
    return [list(o.outputs[0].token_ids) for o in outputs]


def greedy(num_tokens: int = NUM_NEW_TOKENS, **more: Any) -> Any:
    from pelton import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, "detokenize": False} | more
    )


SMALL_POOL = {"mistral": 1 + 2 * 10, "gemma3": 1 + 24 + 5 * 8 + 24}
"""Blocks: the longest request fits, all do not. A window keeps few; 384 tokens of full attention take 24 (all others)."""


def small_pool(family: str) -> int:
    return SMALL_POOL.get(family, 1 + 2 * 24)


_offsets = itertools.count(random.SystemRandom().randrange(0, 16_000, 4), 4)


def free_port() -> int:
    """A port below those that the system hands out, or somebody may get it before it is used; each is given once."""
    while True:
        port = 14_001 + next(_offsets) % 16_000
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def serving(
    model: str, *flags: str, log: Path, timeout_s: float = 240.0, is_forked: bool = True
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`pelton serve` on a free port until the block ends; gives (base URL, process). is_forked: see pelton_forked.py."""
    port = free_port()
    command = [sys.executable, "-m", "pelton.cli.main", "serve", model, "--port", str(port), *flags]
    with log.open("wb") as out:
        process = (ForkingPopen if is_forked else ExecPopen)(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                if urllib.request.urlopen(url + "/health", timeout=20).status == 200:
                    break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not come up (exit {process.poll()}):\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        yield url, process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def ranks_below(pid: int) -> list[int]:
    """Processes of ranks that descend from `pid`."""
    found = []
    with contextlib.suppress(OSError):  # it has just ended
        children = " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))  # of each thread
        for child in map(int, children.split()):
            with contextlib.suppress(OSError):
                if b"executors.multiproc.rank" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(child)
            found += ranks_below(child)
    return found


def processes_of(pid: int) -> Counter[str]:
    """Every process of a running server, by what it is."""
    import psutil

    from pelton_plugins.bench.soak.chaos import API, ENGINE, RANK

    parts = {ENGINE: "engine", API: "API process", RANK: "rank", "pelton.cli.main": "server"}
    server = psutil.Process(pid)
    commands = [one.cmdline() for one in (server, *server.children(recursive=True))]
    commands = [command for command in commands if not any(NAME in word for word in command)]
    return Counter(
        next((part for module, part in parts.items() if module in command), " ".join(command)) for command in commands
    )


def gauge(url: str, name: str) -> float:
    """One of a server's metrics."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as reply:
        found = re.search(rf"^pelton_{name}(?:{{.*}})? (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found, name
    return float(found[1])


def eventually(condition: Callable[[], bool], seconds: float = 90.0) -> bool:
    """Whether it holds before the time is over, which no machine is so slow as to need. Looks ever less often: many ask a server."""
    end, pause_s = time.monotonic() + seconds, 0.02
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, 0.2)
    return condition()
