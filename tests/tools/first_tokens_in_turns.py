"""Time to the first token with several installed trees, whose engines are all alive on one device and take turns.

    python tests/tools/first_tokens_in_turns.py --trees now=/tmp/now before=/tmp/before --model FOLDER --turns 8 --requests 15

A tree is a folder that `pip install --no-deps --target FOLDER .` has filled (several with ":" between them). From start to start an
engine's first tokens scatter by more than trees differ; within one run they do not. The order of the trees changes every turn. Prompts are
new each time, and the first two requests of a turn do not count. FOLDER has a config.json; weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time

ENGINE = "--engine"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", nargs="+", required=True, metavar="NAME=PATH", help="the one in question first")
    parser.add_argument("--model", required=True)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--requests", type=int, default=15)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engines, as JSON")
    arguments = parser.parse_args()
    trees = dict(tree.split("=", 1) for tree in arguments.trees)
    settings = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 8192,
        "kv_cache_memory_bytes": 8 << 30,
    }
    engines = {}
    for name, path in trees.items():
        job = {"model": arguments.model, **settings, **arguments.settings}
        engines[name] = subprocess.Popen(
            [sys.executable, __file__, ENGINE, json.dumps(job)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )  # fmt: skip
        answer_of(engines[name])
    medians: dict[str, list[float]] = {name: [] for name in trees}
    for turn in range(arguments.turns):
        order = list(trees) if turn % 2 == 0 else list(trees)[::-1]
        for name in order:
            stdin = engines[name].stdin
            assert stdin is not None
            print(json.dumps([turn, arguments.requests, arguments.prompt_len]), file=stdin, flush=True)
            medians[name].append(answer_of(engines[name]))
    for engine in engines.values():
        engine.kill()
    first, *others = trees
    for name, found in medians.items():
        print(f"{name}: {', '.join(f'{ms:.2f}' for ms in found)}; median {statistics.median(found):.3f} ms")
    for name in others:
        pairs = [one / other for one, other in zip(medians[first], medians[name], strict=True)]
        print(f"{first} / {name}: {statistics.median(pairs):.4f} ({min(pairs):.3f} to {max(pairs):.3f})")
    return 0


def answer_of(engine: subprocess.Popen[str]) -> float:
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("ms "):
            return float(line.split()[1])
    raise SystemExit(f"An engine ended with status {engine.wait()}.")


def engine() -> int:
    import pelton
    from pelton import SamplingParams

    llm = pelton.LLM(**json.loads(sys.argv[2]))
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    rng = random.Random(0)

    def first_token(length: int) -> float:
        prompt = [rng.randrange(100, 20_000) for _ in range(length)]
        began = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return time.perf_counter() - began

    first_token(128)
    print("ms 0", flush=True)
    for line in sys.stdin:
        _, count, length = json.loads(line)
        times = [first_token(length) for _ in range(count + 2)][2:]
        print(f"ms {statistics.median(times) * 1e3}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(engine() if ENGINE in sys.argv[1:2] else main())
