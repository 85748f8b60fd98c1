"""Models as wide as people have them, of few layers and random weights, on a GPU: nothing fails, and a batch says what a row says alone.

    python tests/tools/real_widths.py                                        # all of them, three at once
    python tests/tools/real_widths.py llama 'llama={"quantization": "fp8"}' mamba2
    python tests/tools/real_widths.py --settings '{"tensor_parallel_size": 2}' --at-once 2 llama3.1-8b qwen3-30b-a3b

Tests compare tiny models number by number; kernels that wide models alone take have tests of their own. This goes through both together:
prompts from one token to 5,000, 16,384 tokens a step, 200 rows that sample and do not, prefix hits. A line a model: the start, the whole,
and the largest difference of a log-probability between a batch and a row alone, as long as both chose the same tokens. Of random weights
0.02 to 0.15 is usual in bfloat16; where experts or caps are near a tie, 0.6.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

WIDE = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 6144,
    "vocab_size": 32000,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "head_dim": 64, "num_key_value_heads": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
EXPERTS = {"num_experts": 64, "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408}
GROUPED = {**LATENT, **EXPERTS, "n_group": 8, "topk_group": 4}
HEADS_OF_256 = {"sliding_window": 512, "head_dim": 256, "num_attention_heads": 16, "query_pre_attn_scalar": 256}
STREAMS = {
    "sliding_window": 512, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 512},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {**HEADS_OF_256, "hidden_size": 3584},
    "gemma3": {**HEADS_OF_256, "hidden_size": 3840},
    "gemma3n": {**STREAMS, "vocab_size_per_layer_input": 31000, "laurel_rank": 64},
    "gemma4": {**STREAMS, "vocab_size_per_layer_input": 32000, "global_head_dim": 512},
    "smollm3": {},
    "granite": {},
    "phi3": {"hidden_size": 3072, "num_key_value_heads": 32, "head_dim": 96, "sliding_window": 512},
    "ernie4_5": {},
    "glm4": {"num_key_value_heads": 2},
    "olmo2": {},
    "cohere2": {"sliding_window": 512},
    "starcoder2": {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 2, "sliding_window": 512},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 14336},
    "qwen2_moe": {
        **EXPERTS, "num_experts": 60, "num_experts_per_tok": 4, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3_moe": {
        **EXPERTS, "num_experts": 128, "num_experts_per_tok": 8, "hidden_size": 2048, "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
    },
    "glm4_moe": {**EXPERTS, "n_group": 1, "topk_group": 1, "num_attention_heads": 96},
    "minimax_m2": {**EXPERTS, "intermediate_size": 1536, "num_attention_heads": 48, "rotary_dim": 64},
    "olmoe": {
        **EXPERTS, "intermediate_size": 1024, "num_experts_per_tok": 8, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "ernie4_5_moe": {"moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "hidden_size": 2560, "moe_layer_end_index": 3},
    "dots1": {**EXPERTS, "n_group": 1, "topk_group": 1, "sliding_window": 512},
    "solar_open": {**EXPERTS, "n_group": 1, "topk_group": 1},
    "llama4": {
        "hidden_size": 5120, "num_attention_heads": 40, "num_local_experts": 16, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "attention_chunk_size": 1024,
    },
    "gpt_oss": {
        "hidden_size": 2880, "num_attention_heads": 64, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4,
        "intermediate_size": 2880, "sliding_window": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "deepseek_v2": LATENT,
    "deepseek_v2_moe": {**GROUPED, "q_lora_rank": 1536},
    "deepseek_v3_moe": GROUPED,
    "glm_moe_dsa": {
        **GROUPED, "hidden_size": 6144, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "n_group": 1, "topk_group": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048,
    },
}  # fmt: skip
"""What differs from `WIDE`, by a family of `pelton.testing.models`."""
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"hidden_size": 2560}),
    "mamba2": ("Mamba2", {}),
    "falcon_mamba": ("FalconMamba", {}),
    "bamba": ("Bamba", {"attn_layer_indices": [2]}),
    "falcon_h1": ("FalconH1", {}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            "layer_types": ["mamba", "attention", "mamba", "mamba"], "num_local_experts": 16, "num_experts_per_tok": 4,
            "shared_intermediate_size": 1024,
        },
    ),
    "jamba": ("Jamba", {"num_hidden_layers": 8, "num_experts": 4}),
    "qwen3_next": ("Qwen3Next", {"num_experts": 64}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"]}),
    "lfm3": ("Lfm3", {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]}),
    "minimax": ("MiniMax", {"num_local_experts": 8, "intermediate_size": 3584}),
    "olmo_hybrid": ("OlmoHybrid", {}),
}  # fmt: skip
"""transformers' own sizes, of four layers: names of its classes, and what differs."""
SHAPES = (
    "llama3.1-8b",
    "qwen3-30b-a3b",
    "gpt-oss-20b",
    "deepseek-v3.2-4l",
    "llama3.1-8b-w4",
)  # of `pelton bench table`
PROMPTS = [1, 17, 250, 5000] + [600] * 12 + [2100] * 3
NUM_ROWS, NUM_TOKENS, LONGEST = 200, 12, 8192


def make_folder(name: str) -> Path:
    """config.json is all that a model with random weights needs."""
    import transformers

    from pelton.testing import models
    from pelton_plugins.bench.table.shapes import write_shape

    folder = Path(tempfile.mkdtemp())
    if name in SHAPES:
        path = Path(write_shape(name, folder))
        fields = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(
            json.dumps({**fields, "num_hidden_layers": min(4, fields["num_hidden_layers"])})
        )
        return path
    if name in STATES:
        of_class, own = STATES[name]
        class_name, model = f"{of_class}Config", f"{of_class}ForCausalLM"
        fields = {
            "num_hidden_layers": 4,
            "vocab_size": 32000,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **own,
        }
    else:
        class_name, model, own = models.FAMILIES[name]
        fields = {**models._COMMON, **own, **WIDE, **FIELDS[name]}
    config = getattr(transformers, class_name)(**{**fields, "max_position_embeddings": LONGEST})
    config.architectures, config.dtype = [model], "bfloat16"
    config.save_pretrained(folder)
    return folder


def try_model(name: str, settings: dict[str, Any]) -> None:
    from pelton import LLM, SamplingParams

    began, chooser = time.time(), random.Random(5)
    own = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": LONGEST, "max_num_batched_tokens": 2 * LONGEST,
        "max_num_seqs": 256, "kv_cache_memory_bytes": 8 << 30, "log_level": "warning",
    }  # fmt: skip
    llm = LLM(model=str(make_folder(name)), **{**own, **settings})
    started = time.time() - began

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [chooser.randrange(10, 30000) for _ in range(length)]}

    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    prompts = [prompt(length) for length in PROMPTS]
    together = llm.generate(prompts, greedy, use_tqdm=False)
    many = [prompt(chooser.choice([40, 100, 150, 300])) for _ in range(NUM_ROWS)]
    params = [
        SamplingParams(
            temperature=1 - i % 2,
            seed=i,
            max_tokens=24 if i % 5 else 60,
            ignore_eos=True,
            logprobs=None if i % 7 else 3,
        )
        for i in range(NUM_ROWS)
    ]
    found = llm.generate(many, params, use_tqdm=False)
    found += llm.generate(many[:40], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)
    alone = [llm.generate([one], greedy, use_tqdm=False)[0] for one in prompts[:6]]
    alone += llm.generate(prompts[6:12], greedy, use_tqdm=False)
    worst = max(difference(one.outputs[0], other.outputs[0]) for one, other in zip(together, alone, strict=False))
    for result in (*together, *found):
        output = result.outputs[0]
        assert len(output.token_ids) >= NUM_TOKENS, f"{len(output.token_ids)} tokens"
        for step in output.logprobs or []:
            assert all(math.isfinite(logprob.logprob) for logprob in step.values()), f"log-probabilities {step}"
    spent = time.time() - began
    print(
        f"{name:18s} {settings or ''} start {started:.0f} s, all {spent:.0f} s, a batch beside a row alone: {worst:.3f}",
        flush=True,
    )


def difference(one: Any, other: Any) -> float:
    worst = 0.0
    for place, (left, right) in enumerate(zip(one.logprobs, other.logprobs, strict=True)):
        worst = max([worst, *(abs(left[token].logprob - right[token].logprob) for token in left.keys() & right.keys())])
        if one.token_ids[place] != other.token_ids[place]:
            break
    return worst


def try_apart(name: str, settings: dict[str, Any]) -> int:
    """In a process of its own, which has imported nothing anew."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setsid()
        try_model(name, settings)
        status = 0
    except BaseException as error:
        where = " < ".join(
            f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)[:-6:-1]
        )
        print(f"{name:18s} {settings or ''} FAILED {type(error).__name__}: {str(error)[:500]} ({where})", flush=True)
    finally:
        os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", nargs="*", default=[*FIELDS, *STATES, *SHAPES], help="names, each maybe with ={settings as JSON}"
    )
    parser.add_argument("--settings", type=json.loads, default={}, help="of all of them, as JSON")
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=300.0)
    arguments = parser.parse_args()
    import transformers  # noqa: F401

    import pelton_plugins.bench.table.shapes  # noqa: F401  once for all processes
    from pelton import LLM  # noqa: F401

    waiting, running, failed = list(arguments.models), {}, 0
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            name, _, own = waiting.pop(0).partition("=")
            running[try_apart(name, {**arguments.settings, **json.loads(own or "{}")})] = name, time.time()
        process, status = os.waitpid(-1, os.WNOHANG)
        if process:
            del running[process]
            failed += status != 0
        for process, (name, began) in running.items():
            if time.time() - began > arguments.timeout_s:
                print(f"{name:18s} FAILED: not done after {arguments.timeout_s:.0f} s", flush=True)
                os.killpg(process, 9)
        time.sleep(0.05)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
