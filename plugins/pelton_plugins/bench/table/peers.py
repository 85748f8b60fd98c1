"""Figures that the rows of the table are compared with: other engines' figures, the device's floor, and what is aimed at.

Measured on 2026-11-21 on one NVIDIA H200 (4.29 TB/s device copy, 786 TFLOP/s in bf16; Python 3.12, torch 2.11 with CUDA
13, triton 3.6): random bf16 weights of the real shapes, token-id prompts, greedy, `ignore_eos`, each engine alone on the
card with its defaults, medians. Where several runs were made the better one stands here. The floor takes each step at the
larger of its bytes over the bandwidth and its operations over the rate, with everything admitted at once. Rows over long
contexts, in FP8 and of two GPUs: 2026-11-22.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pelton_plugins.bench.table import long_context

DATE = "2026-11-21"
DEVICE = "NVIDIA H200"
VLLM, SGLANG = "vLLM 0.26.0", "SGLang 0.5.17"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    name: str
    label: str
    figure: str
    """The field of a measured row that is compared."""
    unit: str
    is_time: bool = False
    """Less is better."""
    workload: str = ""
    """What has to run; `name` when empty."""


def _decode_row(case: long_context.Case) -> Row:
    return Row(case.name, f"decode, {case.rows} x {case.context:,} cached", "tpot_ms", "ms/token", is_time=True)


def _cached_row(case: long_context.Case) -> Row:
    label = f"first token of {case.context:,} cached"
    return Row(f"cached-{case.context}", label, "ttft_ms", "ms", is_time=True, workload=case.name)


LONG_ROWS = (
    *(_decode_row(case) for case in long_context.CASES),
    *(_cached_row(case) for case in long_context.CASES if case.rows == 1),
)
ROWS = (
    Row("latency1", "latency1, one request", "tpot_ms", "ms/token", is_time=True),
    Row("ttft", "time to first token, 128 in", "ttft_ms", "ms", is_time=True, workload="latency1"),
    Row("batch32", "batch32, 128 in, 256 out", "out_tok_s", "out tokens/s"),
    Row("batch128", "batch128, 128 in, 256 out", "out_tok_s", "out tokens/s"),
    Row("nano256", "nano256, lengths 100..1024", "out_tok_s", "out tokens/s"),
    Row("sharegpt", "sharegpt, 1,000 requests", "out_tok_s", "out tokens/s"),
    Row("prefill", "prefill, 64 x 2,048 in", "total_tok_s", "tokens/s"),
    Row("start", "import and engine ready", "start_s", "s", is_time=True),
    Row("first-start", "the same, no kernel compiled yet", "start_s", "s", is_time=True),
    *LONG_ROWS,
    Row("shared-prefix", "shared-prefix, 64 x (2,000 shared)", "total_tok_s", "tokens/s"),
    Row("long-prompt", "long-prompt, 16 x 8,000 in", "total_tok_s", "tokens/s"),
    Row("sharegpt-2000", "sharegpt, 2,000 requests", "out_tok_s", "out tokens/s"),
    Row("sharegpt-4000", "sharegpt, 4,000 requests", "out_tok_s", "out tokens/s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Figures of one row and model; None where there is none."""

    vllm: float | None = None
    sglang: float | None = None
    floor: float | None = None
    target: float | None = None
    stretch: float | None = None


BANDWIDTH = 4.29e12  # bytes a second, copied


def _long_aims(
    weight_bytes: float, kv_bytes: int, longest: int, targets: dict[str, float], vllm: dict[str, float]
) -> dict[str, Aim]:
    """Return the aims of the rows over long contexts; the floor reads the weights once and every row's context once."""
    found = {}
    for case in long_context.CASES:
        if case.max_model_len <= longest:
            floor = (weight_bytes + case.rows * case.context * kv_bytes) / BANDWIDTH * 1e3
            found[case.name] = Aim(vllm=vllm.get(case.name), floor=floor, target=targets.get(case.name))
    for row in LONG_ROWS:
        if row.workload in found:
            found[row.name] = Aim(vllm=vllm.get(row.name), target=targets.get(row.name))
    return found


AIMS: dict[str, dict[str, Aim]] = {
    "qwen3-0.6b": {
        # The floor of latency1 is 3,508 tokens/s with the prompt's own step in them.
        "latency1": Aim(vllm=1.66, sglang=1.57, floor=1e3 / 3508, target=0.80, stretch=0.70),
        "ttft": Aim(vllm=8.3, sglang=9.1, target=4.0),
        "batch32": Aim(vllm=13_965, sglang=16_400, floor=62_182, target=30_000, stretch=36_000),
        "batch128": Aim(vllm=33_994, sglang=37_470, floor=104_301, target=60_000),
        "nano256": Aim(vllm=24_584, sglang=24_075, floor=38_612, target=29_500, stretch=31_000),
        "sharegpt": Aim(vllm=24_826, sglang=26_488, floor=66_949, target=40_000),
        "prefill": Aim(vllm=346_102, sglang=377_196, floor=704_748, target=420_000, stretch=450_000),
        "start": Aim(vllm=8.6 + 35, sglang=12.7 + 36, target=8.0),
        "first-start": Aim(target=20.0),
        **_long_aims(1.19e9, 28 * 2 * 8 * 128 * 2, 40_960, {"decode-1x8000": 0.85, "decode-1x32000": 1.6}, {}),
    },
    "llama3.1-8b": {
        "latency1": Aim(vllm=4.94, sglang=4.76, floor=1e3 / 285, target=4.17, stretch=4.03),
        "ttft": Aim(vllm=9.8, sglang=13.2, target=8.0),
        "batch32": Aim(vllm=5_387, sglang=5_595, floor=7_951, target=6_500),
        "batch128": Aim(vllm=14_245, sglang=14_604, floor=22_730, target=16_800),
        "nano256": Aim(vllm=10_075, sglang=10_437, floor=14_566, target=11_700, stretch=12_200),
        "sharegpt": Aim(vllm=11_829, sglang=12_341, floor=19_469, target=13_800, stretch=14_500),
        "prefill": Aim(vllm=41_217, sglang=43_303, floor=54_248, target=45_500, stretch=47_000),
        "start": Aim(vllm=8.6 + 69, sglang=11.5 + 39, target=15.0),
        **_long_aims(
            15.0e9,
            32 * 2 * 8 * 128 * 2,
            131_072,
            {"decode-1x8000": 4.3, "decode-1x32000": 5.0, "decode-1x120000": 8.2, "cached-120000": 20.0},
            {
                "decode-1x8000": 5.20,
                "decode-1x32000": 6.02,
                "decode-1x120000": 8.60,
                "decode-4x32000": 8.80,
                "decode-8x16000": 8.80,
                "cached-8000": 17.9,
                "cached-32000": 26.6,
                "cached-120000": 85.5,
            },
        ),
    },
    # 4 bits in groups of 128: 0.53 bytes a weight, and the head in 16 bits.
    "llama3.1-8b-w4": {"latency1": Aim(floor=1.18, target=1.75)},
    "qwen3-30b-a3b": {
        # Floors of rows read each expert's weights once a step where routing is uniform.
        "latency1": Aim(vllm=4.10, sglang=4.07, floor=1.41, target=2.4),
        "batch32": Aim(vllm=1_780, sglang=2_030, floor=2_584, target=2_350),
        "batch128": Aim(vllm=6_484, sglang=6_572, floor=9_081, target=8_000),
        "nano256": Aim(vllm=6_177, sglang=6_181, target=7_500),
        "prefill": Aim(vllm=68_500, sglang=65_600, target=85_000),
        "start": Aim(vllm=87.0, sglang=106.0, target=20.0),
    },
    "llama3.1-8b fp8": {
        "latency1": Aim(vllm=3.46, floor=1.87, target=2.35),
        "batch32": Aim(vllm=6_742, target=10_500),
        "batch128": Aim(vllm=18_563, target=25_000),
        "prefill": Aim(vllm=64_887, target=72_000),
    },
    "qwen3-30b-a3b fp8": {"latency1": Aim(floor=0.99, target=1.9), "batch128": Aim(target=14_000)},
    "llama3.1-8b tp2": {  # two GPUs, NVLink without multicast
        "latency1": Aim(vllm=3.47, sglang=3.20, floor=2.13, target=2.55),
        "ttft": Aim(vllm=9.4, sglang=20.0),
        "batch32": Aim(vllm=7_826, sglang=8_181, target=11_000),
        "batch128": Aim(vllm=21_842, sglang=21_720, target=27_500),
        "sharegpt": Aim(vllm=18_000, sglang=12_158, target=22_500),
        "prefill": Aim(vllm=70_945, sglang=70_358, target=84_000),
        "start": Aim(vllm=10.8 + 77.9, sglang=18.8 + 136),
    },
    "llama3.1-8b tp4": {"latency1": Aim(floor=1.36, target=1.75)},
    "llama3.1-70b tp4": {"latency1": Aim(floor=9.4, target=11.0)},
    "gpt-oss-20b": {"latency1": Aim(target=2.4)},  # 4.03 ms was measured on an H100
    "deepseek-v3.2-4l": {},  # speed is reported, not compared: `--rows` names what is measured
}


SIZES = {
    "tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size",
    "dcp": "decode_context_parallel_size",
}  # fmt: skip


def variant(model: str, settings: Mapping[str, Any]) -> str:
    """The model's name and what it is run with, where figures of it run otherwise say nothing of that: ranks and weights."""
    words = [f"{short}{size}" for short, name in SIZES.items() if (size := settings.get(name) or 1) != 1]
    words += ["ep"] if settings.get("enable_expert_parallel") else []
    words += [str(settings["quantization"])] if settings.get("quantization") else []
    return " ".join([model, *words])


def better_peer(row: Row, aim: Aim) -> float | None:
    figures = [figure for figure in (aim.vllm, aim.sglang) if figure is not None]
    if not figures:
        return None
    return min(figures) if row.is_time else max(figures)


def times_better(row: Row, ours: float, other: float | None) -> float | None:
    """How many times as good as `other`: above 1 is better, whatever the unit."""
    if other is None or not ours:
        return None
    return other / ours if row.is_time else ours / other
