"""Cost of the pool of threads beside OpenMP: `python -m pelton_backends.native.compare_pools MODEL`.

One engine computes with two libraries in turn. They are compiled from the same files, one with pool.c and one with OpenMP in
its place (pool_openmp.h), so weights, cache and memory pages are the same. Every pair of measurements gives a ratio.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from pelton import LLM, SamplingParams
from pelton.cli.table import format_table
from pelton.graphs.recordable import launch
from pelton_backends.native import library
from pelton_backends.native.build import GROUPS
from pelton_backends.native.library import Kernels

POOL, OPENMP = "pool", "OpenMP"
OPENMP_FLAGS = ("-fopenmp", "-DPELTON_OPENMP")
PROMPT = 512
CONTEXT = 128
"""Tokens of a prompt in front of those that are decoded."""
STEPS = 5
"""Decode steps of a measurement, the first of which only wakes the threads up."""
REST_S = 0.01
"""Before each measurement: the other library's threads are asleep by then (libgomp's spin for some milliseconds)."""


class Switch:
    """Functions of two libraries behind the names of one."""

    def __init__(self) -> None:
        self.kernels = library.kernels(*GROUPS)
        other = Kernels(library.isa_in_use(), [*library.EXTRA_FLAGS, *OPENMP_FLAGS], GROUPS)
        self._functions: dict[str, dict[str, Callable[..., int]]] = {POOL: {}, OPENMP: {}}
        for name, function in list(vars(self.kernels).items()):
            if isinstance(function, partial):
                self._functions[POOL][name] = function.args[0]
                self._functions[OPENMP][name] = getattr(other, name).args[0]
                setattr(self.kernels, name, partial(launch, partial(self._run, name)))
        self._other = other
        self.use(POOL)

    def use(self, which: str) -> None:
        self._in_use = self._functions[which]

    def share_threads(self, count: int) -> None:
        self._other.set_threads(count)

    def _run(self, name: str, *arguments: Any) -> int:
        return self._in_use[name](*arguments)


class Work:
    """Steps of an engine, timed."""

    def __init__(self, llm: LLM) -> None:
        self._engine = llm.llm_engine
        self._num_requests = 0

    def prompt(self) -> float:
        """Seconds of a request for one token."""
        self._add(PROMPT, 1)
        began = time.perf_counter()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return time.perf_counter() - began

    def decode(self, num_rows: int, num_steps: int) -> Iterator[Callable[[], float]]:
        """Yield a function that runs some decode steps, seconds a step, as often as `num_steps` allow it."""
        ids = [self._add(CONTEXT, num_steps + 4 * STEPS) for _ in range(num_rows)]
        while len(self._engine.step()) < num_rows:
            pass

        def steps() -> float:
            self._engine.step()
            began = time.perf_counter()
            for _ in range(STEPS - 1):
                self._engine.step()
            return (time.perf_counter() - began) / (STEPS - 1)

        for _ in range(num_steps // STEPS):
            yield steps
        self._engine.abort_request(ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(self, num_in: int, num_out: int) -> str:
        self._num_requests += 1
        vocab_size = self._engine.model.vocab_size
        prompt = [10 + (self._num_requests * 7919 + place * 31) % (vocab_size - 10) for place in range(num_in)]
        params = SamplingParams(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._num_requests), {"prompt_token_ids": prompt}, params)
        return str(self._num_requests)


def measure(settings: dict[str, Any], rows: Sequence[int], num_pairs: int) -> dict[str, Any]:
    """Seconds of each pair by name of the work: {name: [(pool, OpenMP), ...]}."""
    library.use_isa(settings.get("plugin_config", {}).get("native", {}).get("isa"))
    switch = Switch()
    defaults = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "log_level": "warning"}
    found: dict[str, Any] = {}
    with LLM(**{**defaults, "max_num_batched_tokens": PROMPT, **settings}) as llm:
        import torch

        switch.share_threads(torch.get_num_threads())
        work = Work(llm)
        for num_rows in rows:
            if num_rows == 0:
                found[f"a prompt of {PROMPT}"] = _pairs(switch, [work.prompt] * (2 * num_pairs + 2))
            else:
                found[f"{num_rows} rows"] = _pairs(switch, work.decode(num_rows, (2 * num_pairs + 2) * STEPS))
    return found


def _pairs(switch: Switch, work: Any) -> list[tuple[float, float]]:
    """Each two measurements are a pair, and every second pair is the other way round. The first pair does not count."""
    pairs: list[tuple[float, float]] = []
    pair: dict[str, float] = {}
    for index, run in enumerate(work):
        order = (POOL, OPENMP) if index // 2 % 2 else (OPENMP, POOL)
        switch.use(order[index % 2])
        time.sleep(REST_S)
        pair[order[index % 2]] = run()
        if index % 2:
            pairs.append((pair[POOL], pair[OPENMP]))
    switch.use(POOL)
    return pairs[1:]


def ratio_of(pairs: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Median of the first by the second, and the bounds of its 95 % interval by order statistics."""
    ratios = sorted(one / other for one, other in pairs)
    count = len(ratios)
    low = max(math.floor(count / 2 - 0.98 * math.sqrt(count)), 0)
    return statistics.median(ratios), ratios[low], ratios[count - 1 - low]


def render(found: dict[str, Any]) -> str:
    lines = []
    for name, pairs in found.items():
        ratio, low, high = ratio_of(pairs)
        pool, openmp = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
        lines.append((name, f"{pool:.2f}", f"{openmp:.2f}", f"{ratio:.4f}", f"{low:.4f} to {high:.4f}", len(pairs)))
    return format_table(("", "pool, ms", "OpenMP, ms", "pool by OpenMP", "95 %", "pairs"), lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pelton_backends.native.compare_pools", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--isa", help="an instruction set, such as avx2; the best of this CPU by default")
    parser.add_argument("--rows", default="1,16,64,0", help=f"rows of decode steps; 0 is a prompt of {PROMPT}")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--settings", default="{}", help="settings of the engine, as JSON")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    settings = {"model": options.model, **json.loads(options.settings)}
    if options.isa:
        settings["plugin_config"] = {**settings.get("plugin_config", {}), "native": {"isa": options.isa}}
    found = measure(settings, [int(one) for one in options.rows.split(",")], max(options.pairs, 1))
    print(json.dumps(found) if options.json else render(found))


if __name__ == "__main__":
    main()
