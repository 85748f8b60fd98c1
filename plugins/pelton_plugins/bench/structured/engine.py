"""The cost of token masks in a step: requests at once, each with a schema of its own, beside the same requests without.

Each constraint is an array of what its schema says, with so many items that no request ends: all rows are there in all steps.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pelton import LLM, SamplingParams
from pelton.cli.table import format_table
from pelton.errors import ConfigError
from pelton.sampling_params import StructuredOutputsParams

if TYPE_CHECKING:
    from pelton_plugins.bench.structured.command import StructuredArguments

_MANY_ITEMS = 10_000
MOST_COST = 1.03
"""What is aimed at: a token with masks by one without."""


def measure_engine(
    samples: Sequence[dict[str, Any]], arguments: StructuredArguments, settings: dict[str, Any]
) -> dict[str, Any]:
    rows = arguments.rows
    settings = {"model": "smollm2", "max_model_len": 1024, "max_num_seqs": rows, "disable_log_stats": True} | settings
    prompts = [{"prompt_token_ids": [5 + place % 40, 7, 9, 11]} for place in range(rows)]
    plain = SamplingParams(max_tokens=arguments.output_len, ignore_eos=True, detokenize=False, seed=1)
    with LLM(**settings) as llm:
        masked = _constraints(llm, samples, rows, plain)

        def timed(params: Any) -> tuple[float, float]:
            """Seconds a step, and those of this process' cores."""
            started, cpu_started = time.perf_counter(), time.process_time()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            took, cpu_took = time.perf_counter() - started, time.process_time() - cpu_started
            count = sum(len(output.outputs[0].token_ids) for output in outputs)
            if count != rows * arguments.output_len:
                raise ConfigError(
                    f"{count} tokens came back, not {rows * arguments.output_len}: a request ended early."
                )
            return took / arguments.output_len, cpu_took / arguments.output_len

        for params in (plain, masked, plain, masked):  # what is compiled and captured on the way
            timed(params)
        pairs = [(timed(plain), timed(masked)) for _ in range(arguments.repeats)]
    steps = [(plain_s, masked_s) for (plain_s, _), (masked_s, _) in pairs]
    cores = [(plain_s, masked_s) for (_, plain_s), (_, masked_s) in pairs]
    return {
        "rows": rows, "output_len": arguments.output_len, "step_s": statistics.median(plain_s for plain_s, _ in steps),
        "masked_step_s": statistics.median(masked_s for _, masked_s in steps),
        "cost": statistics.median(masked_s / plain_s for plain_s, masked_s in steps),
        "costs": [masked_s / plain_s for plain_s, masked_s in steps],
        "processor_cost": statistics.median(masked_s / plain_s for plain_s, masked_s in cores),
    }  # fmt: skip


def _constraints(
    llm: LLM, samples: Sequence[dict[str, Any]], count: int, plain: SamplingParams
) -> list[SamplingParams]:
    """The first schemas that compile, one a request."""
    found: list[SamplingParams] = []
    schemas = (sample["schema"] for sample in samples)
    while len(found) < count:
        part = list(itertools.islice(schemas, count - len(found)))
        if not part:
            raise ConfigError(f"{len(found)} schemas of the file compile; {count} are needed.")
        made = [_with(plain, schema) for schema in part]
        outputs = llm.generate([{"prompt_token_ids": [5]}] * len(part), made, use_tqdm=False)
        found += [
            params for params, output in zip(made, outputs, strict=True)
            if output.error is None and len(output.outputs[0].token_ids) == plain.max_tokens
        ]  # fmt: skip
    return found


def _with(plain: SamplingParams, schema: dict[str, Any]) -> SamplingParams:
    """An endless array of what the schema says. References of the schema stay, for it keeps its definitions."""
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    items = {key: value for key, value in schema.items() if key not in (*shared, "$schema", "$id", "id")}
    array = {"type": "array", "items": items, "minItems": _MANY_ITEMS, **shared}
    params = plain.clone()
    params.ignore_eos = False  # it is never allowed
    params.structured_outputs = StructuredOutputsParams(json=json.dumps(array))
    return params


def render_engine(result: dict[str, Any]) -> str:
    spread = " ".join(f"{cost:.3f}" for cost in sorted(result["costs"]))
    line = [
        str(result["rows"]), f"{1e3 * result['step_s']:.3f}", f"{1e3 * result['masked_step_s']:.3f}", f"{result['cost']:.3f}",
        spread, f"{result['processor_cost']:.3f}", "yes" if result["cost"] < MOST_COST else "no",
    ]  # fmt: skip
    return format_table(
        ("rows", "ms a step", "with masks", "x", "each pair", "x of processor time", "reached"), [line], indent="  "
    )
