"""The whole engine on Triton's kernels, in the interpreter: what ties kernels, backend and runner together is tested where
there is no GPU too. With a GPU, tests/gpu does that and more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from pelton_common_prefix import PrefixReads, check_common_prefix, prefix_reads, prefix_reference
from pelton_drafts import counts, eagle, eagle3, medusa
from pelton_e2e import gap_reference, generate, greedy, make_llm, make_prompts

from pelton import SamplingParams
from pelton.config import CUDAGraphMode
from pelton.entries import PlatformEntry
from pelton.hookspecs import hookimpl
from pelton.plugins import Plugins, load_plugins, register
from pelton.testing.graphs import FakeGraphRecorder
from pelton.testing.models import make_tiny_checkpoint
from pelton_backends.triton.ops.moe.unsummed import UnsummedRows
from pelton_platforms.cpu.platform import CPUPlatform
from pelton_platforms.device.graphs.captures import FullGraphs, PiecewiseGraphs

__all__ = ["prefix_reads"]  # a fixture

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the engine on the GPU"),
    pytest.mark.usefixtures("large_programs"),
]


class InterpretedPlatform(CPUPlatform):
    """The CPU, offered what is made for CUDA."""

    name = "interpreted"
    device_type = "cuda"


@hookimpl
def pelton_platforms() -> Sequence[PlatformEntry]:
    return [PlatformEntry(name="interpreted", load=f"{__name__}:InterpretedPlatform", probe=lambda: None)]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    module = ModuleType("interpreted_plugin")
    module.PELTON_API = ">=1,<2"
    module.pelton_platforms = pelton_platforms
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or ModuleType(__name__))
    monkeypatch.setattr(sys.modules[__name__], "InterpretedPlatform", InterpretedPlatform, raising=False)
    plugins = load_plugins(only=[])
    register(plugins.manager, module, "interpreted_plugin", "test")
    return plugins


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform with graphs, which hold what kernels and torch's ops do, and run it again."""
    from triton.runtime.interpreter import GridExecutor

    recorder, run = FakeGraphRecorder(), GridExecutor.__call__

    def launch(self: GridExecutor, *args: Any, **named: Any) -> None:
        tensors = [value for value in (*args, *named.values()) if isinstance(value, torch.Tensor)]
        if recorder._mode is not None and self.fn.__name__ in ("take_kernel", "give_kernel"):
            # What they write at addresses would not be put back, so that they only run in a replay, as on a device.
            recorder._mode.graph.ops.append((lambda: run(self, *args, **named), (), {}, []))
            return
        recorder.launch(lambda: run(self, *args, **named), tensors)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(InterpretedPlatform, "supported_graph_modes", tuple(CUDAGraphMode))
    monkeypatch.setattr(InterpretedPlatform, "graph_recorder", lambda self: recorder)


@pytest.mark.parametrize(
    "mode, device_type",
    [(CUDAGraphMode.PIECEWISE, "cuda"), (CUDAGraphMode.NONE, "rocm")],
    ids=str,
)
def test_greedy_ids_equal_transformers(plugins, captures, tmp_path, monkeypatch, mode, device_type):
    """Gemma 3 has all of it: norms around each sub-layer and of queries and keys, windows, two KV groups, a tied head."""
    monkeypatch.setattr(InterpretedPlatform, "device_type", device_type)
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "layer_types": ["sliding_attention", "full_attention"]}
    path = make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False, sliding_window=4, **sizes)
    prompts = make_prompts(64, (1, 9))
    reference = gap_reference("gemma3", str(path), prompts, 2, "cpu")
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_memory_bytes": 2**20}
    settings["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [8]}
    with make_llm(str(path), plugins=plugins, device="interpreted", **settings) as llm:
        reference.check(generate(llm, prompts, greedy(2)))
        assert llm.llm_engine.info.report.attention_backend == "triton"


def test_experts_sinks_and_windows_of_gpt_oss(plugins: Plugins, tmp_path: Any) -> None:
    sizes = {"num_hidden_layers": 2, "vocab_size": 64}
    path = make_tiny_checkpoint(tmp_path, "gpt_oss", with_tokenizer=False, **sizes)
    prompts = make_prompts(64, (1, 9))
    reference = gap_reference("gpt_oss", str(path), prompts, 2, "cpu")
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_memory_bytes": 2**20}
    with make_llm(str(path), plugins=plugins, device="interpreted", **settings) as llm:
        reference.check(generate(llm, prompts, greedy(2)))
        assert llm.llm_engine.info.report.attention_backend == "triton"


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE], ids=str)
def test_sums_of_experts_are_left_to_the_next_layer(
    plugins: Plugins, captures: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, mode: CUDAGraphMode
) -> None:
    """Where that is the op that adds and norms; of few tokens it is another, and behind the last layer nobody takes them."""
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.FEW_PAIRS", 4)
    read, take = [], UnsummedRows.take

    def noted(self: UnsummedRows) -> Any:
        read.append(self.shape[0])
        return take(self)

    monkeypatch.setattr(UnsummedRows, "take", noted)
    sizes = {"num_hidden_layers": 3, "vocab_size": 64}
    path = make_tiny_checkpoint(tmp_path, "qwen3_moe", with_tokenizer=False, **sizes)
    prompts = make_prompts(64, (1, 29))
    reference = gap_reference("qwen3_moe", str(path), prompts, 3, "cpu")
    settings = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 2**20}
    settings["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [2]}
    with make_llm(str(path), plugins=plugins, device="interpreted", **settings) as llm:
        read.clear()
        reference.check(generate(llm, prompts, greedy(3)))
    assert len(read) == 2 and min(read) >= 29, "two of three layers, of the step with the prompts alone"


def test_sums_of_experts_that_a_drafter_reads_are_added_up(
    plugins: Plugins, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EAGLE-3 reads what goes into the layers 1 and 3; what the layer 1 gives is left to the layer 2."""
    monkeypatch.setattr("pelton_backends.triton.ops.moe.experts.FEW_PAIRS", 4)
    read, take = [], UnsummedRows.take
    monkeypatch.setattr(UnsummedRows, "take", lambda self: (read.append(self.shape[0]), take(self))[1])
    path = str(
        make_tiny_checkpoint(tmp_path / "model", "qwen3_moe", with_tokenizer=False, num_hidden_layers=4, vocab_size=64)
    )
    head = eagle3(tmp_path / "head", path, taps=(1, 3), num_draft_tokens=48)
    prompts = make_prompts(64, (1, 18))
    reference = gap_reference("qwen3_moe", path, prompts, 4, "cpu")
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 32, "kv_cache_memory_bytes": 2**20}
    speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": 2, "min_acceptance_rate": 0}
    with make_llm(
        path, plugins=plugins, device="interpreted", disable_log_stats=False, speculative_config=speculation, **settings
    ) as llm:
        read.clear()
        reference.check(generate(llm, prompts, greedy(4)))
        assert counts(llm)["num_draft_tokens"] > 0
    assert [num_tokens for num_tokens in read if num_tokens >= 19] == [19], "of one layer, of the prompts"


@pytest.mark.parametrize("mode", [CUDAGraphMode.NONE, CUDAGraphMode.FULL_DECODE_ONLY], ids=str)
def test_a_prefix_of_all_requests_is_read_once(
    plugins: Plugins,
    captures: None,
    prefix_reads: PrefixReads,
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: CUDAGraphMode,
) -> None:
    monkeypatch.setattr("pelton_backends.triton.backend.pays", lambda num_rows, prefix_len: prefix_len >= 32)
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, **sizes)
    reference = prefix_reference(str(path), 64, num_rows=8, prefix_len=32, device="cpu")
    check_common_prefix(
        reference, prefix_reads, is_captured=mode is not CUDAGraphMode.NONE, plugins=plugins, device="interpreted",
        kv_cache_memory_bytes=2**20, compilation_config={"cudagraph_mode": mode, "cudagraph_capture_sizes": [8]},
    )  # fmt: skip


def test_drafts_are_made_and_verified_in_graphs(
    plugins: Plugins, captures: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a greedy row and of a sampled one, side by side."""
    sizes = {"num_hidden_layers": 1, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    path = make_tiny_checkpoint(tmp_path, "llama", with_tokenizer=False, **sizes)
    prompts, keys, run = [[5, 6, 7] * 4, [5, 6, 7] * 3], [], FullGraphs.run

    def noted(self: FullGraphs, mode: Any, key: Any, call: Any) -> Any:
        keys.append(key.uniform_query_len)
        return run(self, mode, key, call)

    monkeypatch.setattr(FullGraphs, "run", noted)
    params = [
        SamplingParams(temperature=temperature, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True)
        for temperature in (0.0, 0.8)
    ]
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "drafts_on_device": True}
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 2**20}
    settings["compilation_config"] = {"cudagraph_mode": CUDAGraphMode.FULL_DECODE_ONLY, "cudagraph_capture_sizes": [2]}
    found = []
    for speculation in ({}, {"speculative_config": ngram}):
        keys.clear()
        with make_llm(str(path), plugins=plugins, device="interpreted", **settings, **speculation) as llm:
            found.append(generate(llm, prompts, params))
    assert found[0] == found[1] and keys.count(3) >= 2


@pytest.mark.parametrize(
    "method, mode",
    [
        ("draft_model", CUDAGraphMode.PIECEWISE),
        ("eagle", CUDAGraphMode.PIECEWISE),
        ("eagle3", CUDAGraphMode.NONE),
        ("medusa", CUDAGraphMode.NONE),
    ],
)
def test_drafters(
    plugins: Plugins, captures: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, method: str, mode: CUDAGraphMode
) -> None:
    """A drafter's passes over the block tables of the model, by the kernels that prepare a step's inputs and attention's."""
    modes: list[CUDAGraphMode] = []
    run = PiecewiseGraphs.run
    monkeypatch.setattr(
        PiecewiseGraphs, "run", lambda self, mode, *rest: (modes.append(mode), run(self, mode, *rest))[1]
    )
    sizes = {
        "num_hidden_layers": 4 if method == "eagle3" else 1,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
    }
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama", with_tokenizer=False, **sizes))
    makers = {"eagle": eagle, "eagle3": partial(eagle3, num_draft_tokens=48), "medusa": medusa}
    speculation = {
        "model": makers[method](tmp_path / "head", path) if method in makers else path,
        "num_speculative_tokens": 2,
    }
    prompts = make_prompts(64, (1, 18))
    reference = gap_reference("llama", path, prompts, 7, "cpu")
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 2**20}
    settings["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [4, 16]}
    with make_llm(
        path, plugins=plugins, device="interpreted", disable_log_stats=False, **settings,
        speculative_config=speculation | {"method": method, "min_acceptance_rate": 0},
    ) as llm:  # fmt: skip
        reference.check(generate(llm, prompts, greedy(7)))
        assert llm.llm_engine.info.report.attention_backend == "triton"
        assert set(modes) == ({mode} if mode is CUDAGraphMode.PIECEWISE else set())
        found = counts(llm)
    assert found["num_draft_tokens"] > 0
    assert method != "draft_model" or found["num_accepted_tokens"] == found["num_draft_tokens"]


STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba2": ("triton_state", {
        "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 16, "tie_word_embeddings": False,
    }),
    "Bamba": ("triton_state, triton", {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "attn_layer_indices": [1],
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
    "Qwen3Next": ("triton_delta_rule, triton", {
        "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 12,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0, 1],
    }),
    "KimiLinear": ("triton_key_delta_rule, triton_mla", {
        "num_attention_heads": 2, "num_key_value_heads": 2, "linear_head_dim": 16, "linear_num_heads": 2, "kv_lora_rank": 48,
        "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 20, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 32,
    }),
    "Jamba": ("triton_selective_scan, triton", {
        "mamba_d_state": 12, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }),
    "MiniMax": ("triton, triton_lightning", {
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "linear_attention"], "block_size": 32,
    }),
    "Lfm2": ("triton_short_conv, triton", {
        "layer_types": ["conv", "full_attention"], "block_multiple_of": 32, "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
    "Lfm3": ("triton_short_conv, triton", {
        "num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention", "full_attention"], "sliding_window": 24,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
    "BailingHybrid": ("triton_key_delta_rule, triton_mla", {
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "kv_lora_rank": 48, "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16, "v_head_dim": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    }),
    "RecurrentGemma": ("triton_rg_lru, triton", {
        "block_types": ["recurrent", "attention"], "attention_window_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1,
    }),
}  # fmt: skip
"""By transformers' name: the backends, and fields."""
_BOTH = CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    "family, mode",
    [
        ("Bamba", CUDAGraphMode.NONE),
        ("Mamba2", CUDAGraphMode.FULL),
        *((family, _BOTH) for family in STATES if family != "Mamba2"),
    ],
    ids=str,
)
def test_layers_with_states(
    plugins: Plugins, captures: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, family: str, mode: CUDAGraphMode
) -> None:
    """Prompts in chunks beside rows of one token, and more requests than rows: later ones get blocks that others have left."""
    import transformers

    backends, fields = STATES[family]
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, **fields}
    path = make_tiny_checkpoint(
        tmp_path, config_class=getattr(transformers, f"{family}Config"), with_tokenizer=False,
        model_class=getattr(transformers, f"{family}ForCausalLM"), **sizes,
    )  # fmt: skip
    prompts, params, replayed, run = make_prompts(64, (1, 11, 40, 2)), greedy(4), set(), FullGraphs.run

    def noted(self: FullGraphs, mode: Any, key: Any, call: Any) -> Any:
        if mode is CUDAGraphMode.FULL and key in self:
            replayed.add((key.uniform_query_len, key.is_prompt))
        return run(self, mode, key, call)

    monkeypatch.setattr(FullGraphs, "run", noted)
    with make_llm(str(path), max_model_len=64) as llm:
        expected = generate(llm, prompts, params)
    assert len({token for ids in expected for token in ids}) > 4
    replayed.clear()
    settings = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "kv_cache_memory_bytes": 2**20}
    settings["compilation_config"] = {"cudagraph_mode": mode, "cudagraph_capture_sizes": [2, 16]}
    with make_llm(str(path), plugins=plugins, device="interpreted", **settings) as llm:
        assert generate(llm, prompts, params) == expected
        assert llm.llm_engine.info.report.attention_backend == backends
        assert not any("became" in note for note in llm.llm_engine.info.report.notes)
    wanted = {CUDAGraphMode.FULL: {(0, False), (1, False)}, CUDAGraphMode.FULL_AND_PIECEWISE: {(1, False)}}
    assert replayed >= wanted.get(mode, set()), replayed
