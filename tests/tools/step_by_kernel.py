"""Where a captured step's time goes, without drafts and with: by how much each kernel ends later than the ones before it.

    python tests/tools/step_by_kernel.py --model qwen3-0.6b --rows 32 --num-drafts 3

Needs a GPU; some 20 s. Kernels overlap (dependent launch: one starts and waits while those before run), so durations add up to more than
the step; differences of ends add up to the step. Places are counted from attention on: 0 is attention, 1 the product behind it, and so on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pelton_plugins.bench.table import chain_process
from pelton_plugins.bench.table.shapes import SHAPES, write_shape

ATTENTION = ("decode_kernel", "drafts_kernel")  # parts of names
REPLAYS, TURNS, PROFILED = 20, 9, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a shape of `pelton bench table`, or a folder")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--num-drafts", type=int, default=3)
    parser.add_argument("--context-len", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        path = write_shape(arguments.model, Path(folder)) if arguments.model in SHAPES else Path(arguments.model)
        measure(path, arguments.rows, arguments.num_drafts, arguments.context_len, Path(folder))


def measure(path: Path, rows: int, num_drafts: int, context_len: int, folder: Path) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": num_drafts, "drafts_on_device": True}
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 8192, "model": str(path)}
    worker = chain_process.make_worker({**settings, "speculative_config": drafts}, rows)
    chain_process.give_memory(worker, rows, context_len, num_drafts)
    recorder, steps = worker.platform.graph_recorder(), {}
    for count in (0, num_drafts):
        step = chain_process.DecodeStep(worker, rows, context_len, count)
        kept = [run(step), run(step)]  # compiles, loads
        worker.platform.synchronize()
        recorder.begin()
        kept.append(run(step))
        steps[count] = step, recorder.end(), kept
    spent: dict[int, list[float]] = defaultdict(list)
    for _ in range(TURNS):
        for count, (step, graph, _) in steps.items():
            spent[count].append(replay_us(step, graph))
    medians = {count: statistics.median(found) for count, found in spent.items()}
    print({count: round(us, 1) for count, us in medians.items()}, "us;", round(medians[num_drafts] / medians[0], 3))
    for count, (step, graph, _) in steps.items():
        file = folder / f"{count}.json"
        step.start_again()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                graph.replay()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(file))
        show(count, json.loads(file.read_text())["traceEvents"])


def run(step: Any) -> Any:
    logits = step.logits()
    step.sample(logits)
    return logits


def replay_us(step: Any, graph: Any) -> float:
    step.start_again()
    graph.replay()
    step.start_again()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS


def show(num_drafts: int, events: list[dict[str, Any]]) -> None:
    """A line a place and kernel: how many a step, us of one, of all of a step, and how long before the end of the one before it starts."""
    found = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sorted((event["ts"] + event["dur"], event["ts"], event["name"]) for event in found)
    kernels = kernels[len(kernels) // PROFILED :]  # the first step waits for nothing
    end, place, spent = kernels[0][0], -1, defaultdict(list)
    for last, start, name in kernels[1:]:
        if any(part in name for part in ATTENTION):
            place = 0
        elif place >= 0:
            place += 1
        spent[place, name].append((max(last - end, 0.0), start - end))
        end = max(end, last)
    steps = PROFILED - 1
    print(f"{num_drafts} drafts, {len(kernels) // steps} kernels a step, us (place, kernel, a step, one, all, starts):")
    for (place, name), times in sorted(spent.items()):
        one, begin = (statistics.median(time[index] for time in times) for index in range(2))
        total = sum(time[0] for time in times) / steps
        print(f"  {place:3d} {name[:40]:40s} {len(times) / steps:5.1f} {one:7.2f} {total:8.1f} {begin:8.2f}")


if __name__ == "__main__":
    main()
