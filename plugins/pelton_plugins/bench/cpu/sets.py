"""Instruction sets of a run on CPU cores: how every engine is kept to one, and what the cores can do with it at most."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

AUTO = "auto"
CEILING_MODULE = "pelton_backends.native.ceiling"
ENVIRON = {
    name: {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}
    for name, aten, onednn, mkl in (
        ("plain", "default", "SSE41", "SSE4_2"),
        ("avx2", "avx2", "AVX2", "AVX2"),
        ("avx2_vnni", "avx2", "AVX2_VNNI", "AVX2"),
        ("avx512", "avx512", "AVX512_CORE", "AVX512"),
        ("avx512_vnni", "avx512", "AVX512_CORE_VNNI", "AVX512"),
        ("avx512_bf16", "avx512", "AVX512_CORE_BF16", "AVX512"),
    )
}
"""What keeps torch, oneDNN and MKL, which the engines use for their products, to a set."""
SHOWN_FEATURES = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16")
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def environ_of(isa: str) -> dict[str, str]:
    """Variables that keep an engine's libraries to a set; none for `auto` and for sets of other CPUs."""
    return dict(ENVIRON.get(isa, {}))


def features() -> list[str]:
    """Those of the first CPU that products and attention are made of; empty where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    words = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return [name for name in SHOWN_FEATURES if name in words]


class Ceilings:
    """Our program that measures ceilings, started at the first measurement and kept: another takes a fifth of a second.

    It is the kernels' part, which need not be installed: measurements are empty then.
    """

    def __init__(self, isa: str) -> None:
        self._isa, self._cannot_run = isa, False
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Ceilings:
        return self

    def __exit__(self, *details: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def measure(self) -> dict[str, Any]:
        """`isa`, `gflops` and `read_gb_s` of the cores that this process may use; empty when it cannot be measured."""
        if self._cannot_run:
            return {}
        self._process = self._process or self._start()
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            found = json.loads(self._process.stdout.readline())
            return {"isa": str(found["isa"]), "gflops": float(found["gflops"]), "read_gb_s": float(found["read_gb_s"])}
        except (OSError, ValueError, KeyError, TypeError):
            self._cannot_run = True
            return {}

    def _start(self) -> subprocess.Popen[str]:
        chosen = [] if self._isa == AUTO else ["--isa", self._isa]
        return subprocess.Popen(
            [sys.executable, "-m", CEILING_MODULE, "--json", "--follow", *chosen],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip


def better_ceiling(*measured: dict[str, Any]) -> dict[str, Any]:
    """The highest figures of all measurements: what others do on the machine only lowers them."""
    found = [one for one in measured if one]
    if not found:
        return {}
    return {**found[0], **{name: max(one[name] for one in found) for name in ("gflops", "read_gb_s")}}


def ceiling_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return what the machine could do during a repeat: the mean reading speed of both ends, and the better float32 rate."""
    found = better_ceiling(before, after)
    if before and after:
        found["read_gb_s"] = (before["read_gb_s"] + after["read_gb_s"]) / 2
    return found


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Weights that a token's products read, each once."""

    num_layer_weights: int
    num_head_weights: int

    def flops(self, num_tokens: int, num_logits: int) -> float:
        """Multiplications and additions of the products; attention is left out."""
        return 2.0 * (num_tokens * self.num_layer_weights + num_logits * self.num_head_weights)

    def weight_bytes(self, dtype: str) -> int:
        return (self.num_layer_weights + self.num_head_weights) * BYTES[dtype]


def work_of(config: Mapping[str, Any]) -> ModelWork | None:
    """From config.json of a plain decoder; None for a model of another form, such as one with experts."""
    try:
        hidden, inter, vocab = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
        heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    except KeyError:
        return None
    if any("expert" in name for name in config):
        return None
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    return ModelWork(layers * (attention + 3 * hidden * inter), hidden * vocab)


def share_of_ceiling(
    name: str, found: Mapping[str, Any], work: ModelWork, weight_bytes: float, requests: list[tuple[list[int], int]]
) -> float | None:
    """How near a row comes to what the cores can do: one request to reading its weights, others to float32 products."""
    ceiling = found.get("ceiling")
    if not ceiling or found.get("tpot_ms") == 0.0:  # by the clock the first token took as long as all
        return None
    if name == "latency":
        return weight_bytes / (ceiling["read_gb_s"] * 1e9) / (found["tpot_ms"] / 1e3)
    # The last token of each request is made, and not computed.
    num_tokens = sum(len(prompt) + count - 1 for prompt, count in requests)
    num_logits = sum(count for _, count in requests)
    seconds = found["ttft_ms"] / 1e3 if name == "ttft" else found["seconds"]
    return work.flops(num_tokens, num_logits) / (ceiling["gflops"] * 1e9) / seconds
