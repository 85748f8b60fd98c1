"""Look for settings that change an answer: random requests through a plain engine, then through engines with random settings.

    python tests/tools/fuzz_settings.py FOLDER [--seed 1] [--rounds 20] [--kinds llama,mixtral]

FOLDER keeps tiny random checkpoints. Requests mix lengths, shared beginnings and repeats with penalties, bias, filters, seeds, stop ids,
`n`, logprobs and adapters; settings mix budgets, block counts that preempt, drafts, ranks, stages, policies, eager steps and prefix
caching, in float32. Ids and reasons have to be the same, logprobs within 0.01; every engine answers twice, the second time from its
prefix cache where it has one. Each finding is printed with its seed. Exit status 1 says that there was one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from pelton_transformers import make_checkpoint

from pelton import LLM, LoRARequest, SamplingParams
from pelton.errors import ConfigError

KINDS = ("llama", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
STAGED = ("llama", "qwen3", "mixtral", "gemma2")
ADAPTED = ("llama", "qwen3")
LOGPROB_TOLERANCE = 0.01


class Request(NamedTuple):
    prompt: list[int]
    sampling: dict[str, Any]
    adapter: int | None


class Answer(NamedTuple):
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]] | None


def random_requests(rng: random.Random, vocab_size: int, num_adapters: int) -> list[Request]:
    common = [rng.randrange(3, vocab_size) for _ in range(40)]
    requests = []
    for _ in range(rng.randint(3, 9)):
        shape, length = rng.random(), rng.choice([1, 2, 5, 17, 33, 60, 90])
        if shape < 0.3:
            prompt = common[: rng.randint(5, 40)] + [rng.randrange(3, vocab_size) for _ in range(rng.randint(0, 5))]
        elif shape < 0.5:
            prompt = [rng.randrange(3, vocab_size) for _ in range(4)] * (length // 4 + 2)
        else:
            prompt = [rng.randrange(3, vocab_size) for _ in range(length)]
        adapter = rng.choice([None, *range(num_adapters)]) if num_adapters else None
        requests.append(Request(prompt, random_sampling(rng, vocab_size), adapter))
    return requests


def random_sampling(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    max_tokens = rng.choice([1, 3, 12, 25])
    sampling: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": rng.random() < 0.7}
    for share, more in (
        (0.3, {"logprobs": rng.choice([0, 2, 5])}),
        (0.2, {"prompt_logprobs": rng.choice([0, 2])}),
        (0.25, {"repetition_penalty": 1.3}),
        (0.2, {"presence_penalty": 0.7, "frequency_penalty": 0.3}),
        (0.2, {"logit_bias": {rng.randrange(vocab_size): 3.0, rng.randrange(vocab_size): -100.0}}),
        (0.2, {"min_tokens": min(2, max_tokens)}),
        (0.2, {"stop_token_ids": ids(8)}),
        (0.15, {"allowed_token_ids": ids(30)}),
        (0.3, {
            "temperature": 0.8, "seed": rng.randrange(1000), "top_p": rng.choice([1.0, 0.9]),
            "top_k": rng.choice([0, 20]), "min_p": rng.choice([0.0, 0.05]),
        }),
        (0.15, {"n": 2, "seed": rng.randrange(1000), "temperature": 0.9}),
    ):  # fmt: skip
        if rng.random() < share:
            sampling |= more
    return sampling


def random_settings(rng: random.Random, kind: str, *, max_ranks: int) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for share, more in (
        (0.5, {"max_num_batched_tokens": rng.choice([16, 33, 64])}),
        (0.4, {"max_num_seqs": rng.choice([1, 2, 3])}),
        (0.4, {"num_gpu_blocks_override": rng.choice([26, 32, 40])}),
        (0.3, {"enable_prefix_caching": False}),
        (0.3, {"enforce_eager": True}),
        (0.2, {"scheduling_policy": rng.choice(["priority", "fair"])}),
        (0.2, {"async_scheduling": False}),
        (0.5, {"speculative_config": {"method": "ngram", "num_speculative_tokens": rng.choice([1, 3, 5])}}),
    ):
        if rng.random() < share:
            settings |= more
    where = rng.random() if max_ranks > 1 else 1.0
    if where < 0.2:
        settings["tensor_parallel_size"] = 2
    elif where < 0.35 and kind in STAGED:
        settings["pipeline_parallel_size"] = 2
    return settings


def answers_of(
    path: Path, requests: list[Request], adapters: list[Path], settings: dict[str, Any], order: list[int]
) -> list[list[list[Answer]]]:
    """Return, by request, the answers of each turn."""
    base = {"dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 8}
    if adapters:
        base |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    found: list[list[list[Answer]]] = [[] for _ in requests]
    chosen = [requests[index] for index in order]
    loras = [
        None if one.adapter is None else LoRARequest(f"a{one.adapter}", one.adapter + 1, str(adapters[one.adapter]))
        for one in chosen
    ]
    llm = LLM(model=str(path), kv_cache_memory_bytes=64 << 20, **(base | settings))
    try:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": one.prompt} for one in chosen],
                [SamplingParams(detokenize=False, **one.sampling) for one in chosen],
                lora_request=loras if adapters else None, use_tqdm=False,
            )  # fmt: skip
            for index, output in zip(order, outputs, strict=True):
                found[index].append([_answer(one) for one in output.outputs])
    finally:
        llm.shutdown()
    return found


def _answer(output: Any) -> Answer:
    logprobs = output.logprobs and [{token: one.logprob for token, one in row.items()} for row in output.logprobs]
    return Answer(list(output.token_ids), output.finish_reason, logprobs)


def agree(found: list[Answer], wanted: list[Answer]) -> bool:
    for mine, theirs in zip(found, wanted, strict=True):
        if mine[:2] != theirs[:2]:
            return False
        for row, other in zip(mine.logprobs or [], theirs.logprobs or [], strict=True):
            if any(abs(row[token] - other[token]) > LOGPROB_TOLERANCE for token in row.keys() & other.keys()):
                return False
    return True


def prepare(folder: Path, kind: str, *, with_adapters: bool) -> tuple[Path, list[Path]]:
    path = folder / kind
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        make_checkpoint(path, kind)
    adapters = [folder / f"{kind}-adapter{index}" for index in range(2)] if with_adapters else []
    for index, adapter in enumerate(adapters):
        if not adapter.exists():
            from pelton_lora import make_adapter

            make_adapter(adapter, str(path), seed=index, rank=4)
    return path, adapters


def look(folder: Path, seed: int, kinds: list[str], *, max_ranks: int) -> int:
    """Print what differs for this seed, and return how much it is."""
    rng = random.Random(seed)
    kind = rng.choice(kinds)
    has_peft = importlib.util.find_spec("peft") is not None
    path, adapters = prepare(folder, kind, with_adapters=has_peft and kind in ADAPTED and rng.random() < 0.4)
    requests = random_requests(rng, json.loads((path / "config.json").read_text())["vocab_size"], len(adapters))
    plain = answers_of(path, requests, adapters, {}, list(range(len(requests))))
    num_found = 0
    for _ in range(2):
        settings, order = random_settings(rng, kind, max_ranks=max_ranks), list(range(len(requests)))
        rng.shuffle(order)
        try:
            answers = answers_of(path, requests, adapters, settings, order)
        except ConfigError as error:
            print(f"seed {seed}, {kind}: {settings} refused: {error}", flush=True)
            continue
        for request, turns, wanted in zip(requests, answers, plain, strict=True):
            differing = [turn for turn in [*turns, *wanted[1:]] if not agree(turn, wanted[0])]
            if differing:
                num_found += 1
                print(
                    f"seed {seed}, {kind}: {settings}, {request}\n  plain {wanted[0]}\n  found {differing[0]}",
                    flush=True,
                )
    return num_found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1, help="the first one; each round has the next")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--max-ranks", type=int, default=1 if torch.cuda.is_available() else 2)
    arguments = parser.parse_args()
    num_found, started = 0, time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        num_found += look(arguments.folder, seed, arguments.kinds.split(","), max_ranks=arguments.max_ranks)
    print(f"{arguments.rounds} rounds, {num_found} answers differ, {time.monotonic() - started:.0f} s")
    return num_found > 0


if __name__ == "__main__":
    sys.exit(main())
