"""`pelton bench lora`: decoding with adapters against the same engine's base requests.

Adapters are random, of every linear layer of a Llama-shaped model. Each number of adapters has an engine in a process of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from pelton.cli.table import format_table
from pelton.errors import ConfigError, EngineError
from pelton_plugins.bench.bounds import check_at_least
from pelton_plugins.bench.record import flat_settings, number, today, versions, write_json
from pelton_plugins.bench.table.shapes import SHAPES, write_shape
from pelton_plugins.flags import parse_flags

DOC = """Measure what adapters cost: requests with adapters, in turn, and the same requests without.
--rows and --adapters belong together: 32 requests with 8 adapters, 64 with 64.

  pelton bench lora --models llama3.1-8b --rows 1 32 64 --adapters 1 8 64"""


class LoraArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure."""

    models: list[str] = msgspec.field(default_factory=lambda: ["llama3.1-8b"])
    """Shapes to measure with random weights, or models."""
    rows: list[int] = msgspec.field(default_factory=lambda: [1, 32, 64])
    """Requests at once."""
    adapters: list[int] = msgspec.field(default_factory=lambda: [1, 8, 64])
    """Adapters of these requests, one for each of --rows; also max_loras of their engine."""
    rank: int = 16
    """Of the adapters."""
    input_len: int = 128
    output_len: int = 256
    repeats: int = 3
    """Runs that count."""
    output_json: str | None = None
    """Write the result here."""

    def __post_init__(self) -> None:
        check_at_least(self, rank=1, repeats=1, input_len=1, output_len=1)
        if len(self.rows) != len(self.adapters):
            raise ConfigError(
                f"rows has {len(self.rows)} entries and adapters {len(self.adapters)}; give as many of the one as of the other."
            )


def run(argv: list[str]) -> int:
    parsed = parse_flags(argv, [LoraArguments], positional=None, program="pelton bench lora", doc=DOC)
    arguments: LoraArguments = parsed.structs["LoraArguments"]
    settings = flat_settings(parsed)
    if "model" in settings:
        raise ConfigError("Models are named by --models.")
    results: dict[str, Any] = {}
    for model in arguments.models:
        with tempfile.TemporaryDirectory(prefix="pelton-bench-") as folder:
            path = str(write_shape(model, Path(folder))) if model in SHAPES else model
            base = {"model": path, "skip_tokenizer_init": True, **({"load_format": "dummy"} if model in SHAPES else {})}
            lines = []
            for rows, adapters in zip(arguments.rows, arguments.adapters, strict=True):
                own = {
                    "enable_lora": True, "max_loras": adapters, "max_lora_rank": arguments.rank,
                    "max_model_len": arguments.input_len + arguments.output_len + 64,
                }  # fmt: skip
                job = {"settings": base | own | settings, "rows": rows, "adapters": adapters}
                lines.append(_line_of(job | {"arguments": msgspec.to_builtins(arguments)}))
                print(f"{model}: {rows} requests with {adapters} adapters done", file=sys.stderr)
            results[model] = lines
        print(f"{model}, rank {arguments.rank}, {arguments.input_len} in, {arguments.output_len} out:\n{render(lines)}")
    write_json(arguments.output_json, {"date": today(), "versions": versions(), "models": results})
    return 0


def _line_of(job: dict[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "pelton_plugins.bench.lora", json.dumps(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    found: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not found:
        raise EngineError(f"The measuring process ended with status {done.returncode}; its messages are above.")
    return found[-1]


CAPTURES = 12
"""Runs after which every kind of step has its graph."""
HEADER = ("rows", "adapters", "base tokens/s", "with adapters", "share", "start s", "load s", "longest gap ms")


def render(lines: list[dict[str, Any]]) -> str:
    cells = [
        [
            str(one["rows"]), str(one["adapters"]), number(one["base_tok_s"], 5), number(one["adapter_tok_s"], 5),
            f"{100 * one['adapter_tok_s'] / one['base_tok_s']:.1f} %", f"{one['start_s']:.1f}", f"{one['load_s']:.2f}",
            f"{one['gap_ms']:.1f} ({one['usual_gap_ms']:.1f})",
        ]
        for one in lines
    ]  # fmt: skip
    note = "load: of one adapter; gap: between two steps while it loads, and in brackets while nothing does"
    return f"{format_table(HEADER, cells, indent='  ')}\n  {note}"


# In the measuring process.


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Medians of runs without and with adapters, in turn."""
    from pelton import LLM, LoRARequest

    arguments = msgspec.convert(job["arguments"], LoraArguments)
    began = time.perf_counter()
    with LLM(**job["settings"]) as llm, tempfile.TemporaryDirectory(prefix="pelton-adapter-") as folder:
        start_s = time.perf_counter() - began
        write_adapter(Path(folder), llm.llm_engine.model.hf_config, arguments.rank)
        requests = [LoRARequest(f"a{index}", index + 1, folder) for index in range(job["adapters"])]
        began = time.perf_counter()
        llm.add_lora(requests[0])
        load_s = time.perf_counter() - began
        for request in requests[1:]:
            llm.add_lora(request)
        given = [requests[index % len(requests)] for index in range(job["rows"])]
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for repeat in range(arguments.repeats + 2):  # the first two capture what they need
            for has_adapters in (False, True):
                prompts = [_prompt(repeat, has_adapters, row, arguments.input_len) for row in range(job["rows"])]
                took = _timed(llm, prompts, arguments.output_len, given if has_adapters else None)
                seconds[has_adapters].append(took)
        base_s, adapter_s = (statistics.median(seconds[kind][2:]) for kind in (False, True))
        usual = longest_gap(llm, arguments, None)
        for _ in range(CAPTURES):  # of the steps in which a request with an adapter joins: they are not the load's
            longest_gap(llm, arguments, requests[0])
        gap = longest_gap(llm, arguments, LoRARequest("late", 1, folder))
    num_tokens = job["rows"] * arguments.output_len
    return {
        "rows": job["rows"], "adapters": job["adapters"], "base_tok_s": num_tokens / base_s,
        "adapter_tok_s": num_tokens / adapter_s, "start_s": start_s, "load_s": load_s, "gap_ms": gap * 1e3,
        "usual_gap_ms": usual * 1e3, "seconds": {str(kind): found for kind, found in seconds.items()},
    }  # fmt: skip


def longest_gap(llm: Any, arguments: LoraArguments, late: Any) -> float:
    """Seconds between two steps of a base request, at most, while a request with the adapter `late` comes and is served."""
    from pelton_plugins.bench.offline import greedy

    engine = llm.llm_engine
    (params,) = greedy([arguments.output_len])
    engine.add_request("running", {"prompt_token_ids": _prompt(90, late is None, 0, arguments.input_len)}, params)
    gaps, last, count = [], None, 0
    while engine.has_unfinished_requests():
        engine.step()
        now = time.perf_counter()
        if last is not None and count > 8:
            gaps.append(now - last)
        last, count = now, count + 1
        if count == 16 and late is not None:
            (short,) = greedy([1])
            engine.add_request("late", {"prompt_token_ids": [7, 8, 9]}, short, lora_request=late)
    return max(gaps, default=0.0)


def write_adapter(folder: Path, config: dict[str, Any], rank: int) -> None:
    """A random adapter of every linear layer, as PEFT saves one."""
    import torch
    from safetensors.torch import save_file

    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv, inner = config.get("num_key_value_heads", heads) * head_dim, config["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (rows, cols) in sizes.items():
            full = f"base_model.model.model.layers.{layer}.{name}"
            for letter, shape in (("A", (rank, cols)), ("B", (rows, rank))):
                tensors[f"{full}.lora_{letter}.weight"] = torch.randn(shape, generator=generator).mul_(0.01).bfloat16()
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "base_model_name_or_path": "bench",
        "target_modules": [name.partition(".")[2] for name in sizes],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(fields))


def _prompt(repeat: int, has_adapters: bool, row: int, length: int) -> list[int]:
    """No two begin alike: nothing is found in the prefix cache."""
    return [3 + repeat, 5 + has_adapters, 7 + row, *(11 + index % 200 for index in range(length - 3))][:length]


def _timed(llm: Any, prompts: list[list[int]], output_len: int, lora_request: Any) -> float:
    from pelton_plugins.bench.offline import greedy

    began = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts], greedy([output_len] * len(prompts)), use_tqdm=False,
        lora_request=lora_request,
    )  # fmt: skip
    took = time.perf_counter() - began
    for output in outputs:
        if output.error is not None:
            raise EngineError(output.error.message)
    return took


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
