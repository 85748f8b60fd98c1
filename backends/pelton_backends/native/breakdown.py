"""Where the time of a run goes on CPU cores: `python -m pelton_backends.native.breakdown MODEL`.

Every kernel call is timed as the engine's thread sees it. What no kernel took is the host's: scheduling, inputs and outputs.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pelton import LLM, SamplingParams
from pelton.cli.table import format_table
from pelton.errors import EngineError
from pelton.graphs.recordable import launch
from pelton_backends.native import ceiling, library
from pelton_backends.native.build import GROUPS

if TYPE_CHECKING:
    from pelton_backends.native.library import Kernels

PRODUCTS = ("linear", "quant")
ROW_BOUNDS = (1, 4, 16, 32, 64, 128, 256, 1024)
WARM_UP = 4
"""Requests before those that count."""
INPUTS, OUTPUTS = (32, 256), (32, 128)
"""Lengths of prompts and outputs, as in the row `throughput` of `pelton bench cpu-table`."""


class Spent(NamedTuple):
    """Time that one kernel took, for one shape."""

    kernel: str
    shape: str
    calls: int = 0
    seconds: float = 0.0
    flops: float = 0.0


class Clock:
    """Adds up the time of every kernel call, by kernel and shape."""

    def __init__(self) -> None:
        self.spent: dict[tuple[str, str], Spent] = {}

    def watch(self, kernels: Kernels) -> None:
        """Time the calls of all functions that are bound from now on."""
        for name, function in vars(kernels).items():
            if isinstance(function, partial):
                setattr(kernels, name, partial(launch, partial(self._run, name, *function.args)))

    def _run(self, name: str, function: Callable[..., int], *arguments: Any) -> int:
        began = time.perf_counter()
        failed = function(*arguments)
        took = time.perf_counter() - began
        shape, flops = shape_of(name, arguments)
        before = self.spent.get((name, shape)) or Spent(name, shape)
        self.spent[name, shape] = before._replace(
            calls=before.calls + 1, seconds=before.seconds + took, flops=before.flops + flops
        )
        return failed


def shape_of(name: str, arguments: Sequence[Any]) -> tuple[str, float]:
    """Shape of a product and its multiplications and additions; nothing for other kernels."""
    if name not in PRODUCTS:
        return "", 0.0
    op, num_rows = arguments[0]._obj, arguments[5]
    op = getattr(op, "op", op)
    bound = next((bound for bound in ROW_BOUNDS if num_rows <= bound), num_rows)
    return f"{op.in_features} to {op.out_features}, rows <= {bound}", 2.0 * num_rows * op.in_features * op.out_features


def measure(settings: dict[str, Any], num_requests: int) -> dict[str, Any]:
    """Run the requests after a warm-up of some others, with every kernel call timed."""
    clock, isa = Clock(), settings.get("plugin_config", {}).get("native", {}).get("isa")
    library.use_isa(isa)
    kernels = library.kernels(*GROUPS)
    before = ceiling.gflops(isa), ceiling.read_gb_s(isa)
    clock.watch(kernels)
    with LLM(skip_tokenizer_init=True, enable_prefix_caching=False, log_level="warning", **settings) as llm:
        vocab_size = llm.llm_engine.model.vocab_size
        llm.generate(*_requests(min(num_requests, WARM_UP), 0, vocab_size), use_tqdm=False)
        clock.spent.clear()
        prompts, params = _requests(num_requests, 1, vocab_size)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    spent = sorted(clock.spent.values(), key=lambda one: -one.seconds)
    return {
        "isa": kernels.isa, "gflops": before[0], "read_gb_s": before[1], "seconds": seconds,
        "out_tok_s": num_tokens / seconds, "kernels": [one._asdict() for one in spent],
    }  # fmt: skip


def _requests(count: int, seed: int, vocab_size: int) -> tuple[list[Any], list[SamplingParams]]:
    lengths, tokens = random.Random("shape"), random.Random(seed)
    sizes = [(lengths.randint(*INPUTS), lengths.randint(*OUTPUTS)) for _ in range(count)]
    prompts = [{"prompt_token_ids": [tokens.randrange(vocab_size) for _ in range(size)]} for size, _ in sizes]
    params = [SamplingParams(temperature=0.0, max_tokens=size, ignore_eos=True, detokenize=False) for _, size in sizes]
    return prompts, params


def render(found: dict[str, Any]) -> str:
    total, rows = found["seconds"], []
    host = total - sum(one["seconds"] for one in found["kernels"])
    for one in [*found["kernels"], {"kernel": "host", "shape": "", "calls": 0, "seconds": host, "flops": 0.0}]:
        speed = one["flops"] / max(one["seconds"], 1e-9) * 1e-9
        rows.append((
            one["kernel"], one["shape"], str(one["calls"] or ""), f"{one['seconds'] * 1e3:.0f}",
            f"{one['seconds'] / total:.1%}", f"{speed:.0f}" if speed else "",
            f"{speed / found['gflops']:.0%}" if speed else "",
        ))  # fmt: skip
    flops = sum(one["flops"] for one in found["kernels"])
    head = (
        f"{found['isa']}: {total:.1f} s, {found['out_tok_s']:.0f} output tokens/s; products are "
        f"{flops / total / 1e9 / found['gflops']:.0%} of {found['gflops']:.0f} GFLOP/s; {found['read_gb_s']:.1f} GB/s read\n"
    )
    return head + format_table(("kernel", "shape", "calls", "ms", "share", "GFLOP/s", "of the ceiling"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pelton_backends.native.breakdown", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--isa", help="an instruction set, such as avx2; the best of this CPU by default")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--settings", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if options.num_requests < 1:
        raise EngineError(f"--num-requests is {options.num_requests}; use at least 1.")
    settings = {"model": options.model, **json.loads(options.settings)}
    if options.isa:
        settings["plugin_config"] = {**settings.get("plugin_config", {}), "native": {"isa": options.isa}}
    found = measure(settings, options.num_requests)
    print(json.dumps(found) if options.json else render(found))


if __name__ == "__main__":
    main()
