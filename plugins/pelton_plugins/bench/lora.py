"""`pelton bench lora`: decoding with adapters against the same engine's base requests.

Adapters are random, of a Llama-shaped model's linear layers. Each number of adapters, and each set of layers, has an engine in a
process of its own.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
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

"memory allows" is the share that there would be if adapters cost what it takes to read A and B of all of them once a step, at this
device's copy bandwidth, beside the base's step.

  pelton bench lora --models llama3.1-8b --rows 1 32 64 --adapters 1 8 64 --target-modules all attention"""

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TARGETS = {"all": LINEAR, "attention": LINEAR[:4], "qv": ("q_proj", "v_proj")}
"""Sets of modules: every linear layer; those of the attention (Hu et al. 2021, section 4.2); PEFT's default for Llama."""
COPY_BYTES = {True: 1 << 30, False: 1 << 28}  # on a GPU, and on a CPU
GAP_TOKENS = 128  # of the request that runs while another adapter is loaded


class LoraArguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments: what to measure."""

    models: list[str] = msgspec.field(default_factory=lambda: ["llama3.1-8b"])
    """Shapes to measure with random weights, or models."""
    rows: list[int] = msgspec.field(default_factory=lambda: [1, 32, 64])
    """Requests at once."""
    adapters: list[int] = msgspec.field(default_factory=lambda: [1, 8, 64])
    """Adapters of these requests, one for each of --rows; also max_loras of their engine."""
    target_modules: list[str] = msgspec.field(default_factory=lambda: ["all"])
    """Matrices that are adapted: all, attention, qv, or names such as q_proj,o_proj; of several such sets each is measured."""
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
        for name in self.target_modules:
            targets_of(name)


def targets_of(name: str) -> tuple[str, ...]:
    """The modules of a set. Raises `ConfigError`."""
    found = TARGETS.get(name) or tuple(name.split(","))
    unknown = [one for one in found if one not in LINEAR]
    if unknown:
        raise ConfigError(
            f"target_modules has {', '.join(unknown)!r}; write {', '.join(TARGETS)}, or names of {', '.join(LINEAR)} with commas "
            "between them."
        )
    return found


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
            pairs = zip(arguments.rows, arguments.adapters, strict=True)
            for (rows, adapters), targets in itertools.product(pairs, arguments.target_modules):
                own = {
                    "enable_lora": True, "max_loras": adapters, "max_lora_rank": arguments.rank,
                    "max_model_len": arguments.input_len + arguments.output_len + 64,
                    "lora_target_modules": [] if targets == "all" else list(targets_of(targets)),
                }  # fmt: skip
                job = {"settings": base | own | settings, "rows": rows, "adapters": adapters, "targets": targets}
                lines.append(_line_of(job | {"arguments": msgspec.to_builtins(arguments)}))
                print(f"{model}: {rows} requests with {adapters} adapters ({targets}) done", file=sys.stderr)
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
HEADER = (
    "rows", "adapters", "modules", "base tokens/s", "with adapters", "share", "memory allows", "reached", "start s", "load s",
    "longest gap ms",
)  # fmt: skip


def render(lines: list[dict[str, Any]]) -> str:
    cells = []
    for one in lines:
        share, allowed = one["adapter_tok_s"] / one["base_tok_s"], allowed_share(one)
        cells.append(
            [
                str(one["rows"]), str(one["adapters"]), one["targets"], number(one["base_tok_s"], 5),
                number(one["adapter_tok_s"], 5), f"{100 * share:.1f} %", f"{100 * allowed:.1f} %", f"{100 * share / allowed:.0f} %",
                f"{one['start_s']:.1f}", f"{one['load_s']:.2f}", f"{one['gap_ms']:.1f} ({one['usual_gap_ms']:.1f})",
            ]
        )  # fmt: skip
    sizes = ", ".join(f"{one['adapter_bytes'] / 1e6:,.0f}" for one in lines)
    notes = (
        f"memory allows: with A and B of a step's adapters read once a step ({sizes} MB) at {lines[0]['bandwidth_gb_s']:,.0f} GB/s, the "
        "copy bandwidth; reached: the share of that",
        "load: of one adapter; gap: between two steps while it loads, and in brackets while nothing does",
    )
    return "\n  ".join([format_table(HEADER, cells, indent="  "), *notes])


def allowed_share(one: dict[str, Any]) -> float:
    """The base's time over that and what reading the adapters of each step takes at least."""
    base_s = one["rows"] / one["base_tok_s"]  # of a step, its share of the prompts in it
    return float(base_s / (base_s + one["adapter_bytes"] / one["bandwidth_gb_s"] / 1e9))


# In the measuring process.


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Medians of runs without and with adapters, in turn."""
    from pelton import LLM, LoRARequest

    arguments, targets = msgspec.convert(job["arguments"], LoraArguments), targets_of(job["targets"])
    bandwidth = copy_bandwidth(job["settings"].get("device"))
    began = time.perf_counter()
    with LLM(**job["settings"]) as llm, tempfile.TemporaryDirectory(prefix="pelton-adapter-") as folder:
        start_s = time.perf_counter() - began
        model = llm.llm_engine.model
        write_adapter(Path(folder), model.hf_config, arguments.rank, targets)
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
        "targets": job["targets"], "adapter_bytes": job["adapters"] * adapter_bytes(model, arguments.rank, targets),
        "bandwidth_gb_s": bandwidth / 1e9,
        "adapter_tok_s": num_tokens / adapter_s, "start_s": start_s, "load_s": load_s, "gap_ms": gap * 1e3,
        "usual_gap_ms": usual * 1e3, "seconds": {str(kind): found for kind, found in seconds.items()},
    }  # fmt: skip


def copy_bandwidth(device: str | None) -> float:
    """Bytes that a copy of this device reads and writes in a second."""
    import torch

    is_gpu = torch.cuda.is_available() and device != "cpu"
    source = torch.ones(COPY_BYTES[is_gpu], dtype=torch.uint8, device="cuda" if is_gpu else "cpu")
    target, times = torch.empty_like(source), []
    for _ in range(8):
        began = time.perf_counter()
        target.copy_(source)
        if is_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    found = 2 * len(source) / min(times)
    del source, target
    if is_gpu:
        torch.cuda.empty_cache()  # the engine counts what is free
    return found


def longest_gap(llm: Any, arguments: LoraArguments, late: Any) -> float:
    """Seconds between two steps of a base request, at most, while a request with the adapter `late` comes and is served."""
    from pelton_plugins.bench.offline import greedy

    engine = llm.llm_engine
    (params,) = greedy([min(arguments.output_len, GAP_TOKENS)])
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


def matrix_sizes(config: dict[str, Any], targets: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Rows and columns of a layer's adapted matrices."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv, inner = config.get("num_key_value_heads", heads) * head_dim, config["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (heads * head_dim, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    return {name: size for name, size in sizes.items() if name.partition(".")[2] in targets}


def adapter_bytes(model: Any, rank: int, targets: Sequence[str]) -> int:
    """Bytes of the A and B of one adapter, in all layers."""
    numbers = sum(rank * (rows + cols) for rows, cols in matrix_sizes(model.hf_config, targets).values())
    return int(model.hf_config["num_hidden_layers"] * numbers * (4 if model.dtype == "float32" else 2))


def write_adapter(folder: Path, config: dict[str, Any], rank: int, targets: Sequence[str]) -> None:
    """A random adapter of each layer's `targets`, as PEFT saves one."""
    import torch
    from safetensors.torch import save_file

    sizes = matrix_sizes(config, targets)
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
