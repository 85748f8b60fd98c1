"""One engine start and some rows of the table, in a process of their own: `python -m pelton_plugins.bench.table.measure JSON`.

Prints a JSON object a line. The time of a start counts from the import of pelton to an engine that takes requests, as it
was counted for the other engines; so nothing of pelton may be imported at the top of this file.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any


def main() -> int:
    job = json.loads(sys.argv[1])
    began = time.perf_counter()
    import pelton

    imported = time.perf_counter()
    llm = pelton.LLM(**job["settings"])
    ready = time.perf_counter()
    info = llm.llm_engine.info
    tell(
        row="start", import_s=imported - began, init_s=ready - imported, start_s=ready - began,
        device=info.report.device, phase_s=info.phase_s, notes=info.report.notes, num_blocks=info.num_blocks,
        max_num_seqs=info.max_num_seqs, max_num_batched_tokens=info.max_num_batched_tokens,
        attention_backend=info.report.attention_backend,
    )  # fmt: skip
    with llm:
        if job["rows"]:
            measure_rows(llm, job["rows"], job.get("repeats"))
    return 0


def measure_rows(llm: Any, names: list[str], repeats: int | None) -> None:
    from pelton_plugins.bench.offline import greedy, run_batch
    from pelton_plugins.bench.table import long_context, sampling_rows
    from pelton_plugins.bench.workloads import table_workloads

    todo = table_workloads(llm.llm_engine.model.vocab_size)
    run_batch(llm, [[11] * 64] * 8, greedy([16] * 8))  # warm up
    for name in names:
        if long_context.case_of(name) is not None:
            continue
        measure = sampling_rows.measure if name.startswith("sampling") else measure_row
        try:
            tell(row=name, **measure(llm, todo[name], repeats or todo[name].repeats))
        except Exception as error:  # the other rows go on
            tell(row=name, error=f"{type(error).__name__}: {error}")
    for found in long_context.measure(llm, names, repeats):
        tell(**found)


def measure_row(llm: Any, workload: Any, repeats: int) -> dict[str, Any]:
    """Medians over the repeats that follow one that does not count."""
    from pelton_plugins.bench.offline import greedy, run_batch

    counts = workload.num_output_tokens
    params, one_token = greedy(counts), greedy([1] * len(counts))
    times, first_token_times, num_preemptions = [], [], []
    for repeat in range(repeats + 1):
        prompts = workload.fresh(repeat)
        if workload.name == "latency1":
            first_token_times.append(run_batch(llm, prompts, one_token).seconds)
            prompts = [[9 + prompt[0], *prompt[1:]] for prompt in prompts]
        times.append(run_batch(llm, prompts, params).seconds)
        num_preemptions.append(llm.num_preemptions())  # since the engine's start
    seconds = statistics.median(times[1:])
    num_in, num_out = workload.num_prompt_tokens, sum(counts)
    row = {
        "seconds": seconds,
        "all_seconds": times[1:],
        "out_tok_s": num_out / seconds,
        "total_tok_s": (num_in + num_out) / seconds,
        "num_preemptions": num_preemptions[-1] - num_preemptions[0],
    }
    if first_token_times:
        one = statistics.median(first_token_times[1:])
        row |= {"ttft_ms": one * 1e3, "tpot_ms": (seconds - one) / (counts[0] - 1) * 1e3}
    return row


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    sys.exit(main())
