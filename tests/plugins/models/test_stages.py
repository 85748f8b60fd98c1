"""Which parts of a model a stage makes, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pelton.config import EngineConfig
from pelton.errors import ConfigError
from pelton.layers.decoder import Decoder
from pelton.model.build import BuildConfig
from pelton.model.registry import build_model
from pelton.parallel.context import ParallelContext
from pelton.plugins import load_plugins
from pelton.testing.model_driver import make_test_build
from pelton_plugins.models.llama import LlamaForCausalLM

HF = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "query_pre_attn_scalar": 8,
}  # fmt: skip


def make(
    stage: int,
    num_stages: int,
    architecture: str = "LlamaForCausalLM",
    hf: dict[str, Any] | None = None,
    **settings: Any,
) -> Any:
    stages: Any = SimpleNamespace(rank=stage, size=num_stages) if num_stages > 1 else None
    build = make_test_build(
        {**HF, **(hf or {})}, parallel=ParallelContext(0, 1, stages), engine_config=EngineConfig.from_flat(**settings)
    )
    return build_model(build, architecture, load_plugins(only=[])), build


@pytest.mark.parametrize(
    "num_stages, settings, counts",
    [(2, {}, [3, 2]), (3, {}, [2, 2, 1]), (5, {}, [1] * 5), (2, {"pipeline_layer_partition": (4, 1)}, [4, 1])],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_each_part_is_in_one_stage(num_stages: int, settings: dict[str, Any], counts: list[int], is_tied: bool) -> None:
    """And a tied embedding in the first and in the last one. What one stage reads of a checkpoint the others skip."""
    names: set[str] = set()
    for stage in range(num_stages):
        model, build = make(stage, num_stages, hf={"tie_word_embeddings": is_tied}, **settings)
        is_first, is_last = stage == 0, stage == num_stages - 1
        assert len(model.layers) == len(build.cache_layers) == counts[stage]
        assert (model.embed_tokens is not None) == (is_first or (is_last and is_tied))
        assert (model.lm_head is not None) == is_last
        own = set(build.weights.expected())
        assert not names & own - {"model.norm.weight", *(["model.embed_tokens.weight"] if is_tied else [])}
        names |= own
    build = make(0, 1)[1]
    assert names | {"lm_head.weight"} == set(build.weights.expected())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("stage, num_stages", [(0, 1), (1, 2)])
def test_a_greedy_step_may_take_the_heads_best_tokens(stage: int, num_stages: int, architecture: str) -> None:
    """`StepProgram` asks for best tokens in place of logits where nothing stands between the head and the step."""
    model = make(stage, num_stages, architecture)[0]
    assert model.compute_logits.__func__ is Decoder.compute_logits


def test_stages_before_the_last_have_no_logits() -> None:
    logits = make(0, 2)[0].compute_logits((None, None), torch.arange(3))
    assert logits.shape == (3, HF["vocab_size"]) and not logits.any()


@pytest.mark.parametrize(
    "num_stages, architecture, settings, message",
    [
        (6, "LlamaForCausalLM", {}, "pipeline_parallel_size is 6, and the model has 5 layers. Use at most 5"),
        (
            2,
            "LlamaForCausalLM",
            {"pipeline_layer_partition": (1, 2)},
            "pipeline_layer_partition is 1, 2; give 2 numbers of 1 or more .* add up to the model's 5 layers",
        ),
        (
            1,
            "LlamaForCausalLM",
            {"pipeline_layer_partition": (2, 3)},
            "pipeline_layer_partition is 2, 3; give 1 number",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused(
    num_stages: int, architecture: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(0, num_stages, architecture, **settings)


KINDS = ["sliding_attention", "full_attention"]
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SHARED = {  # layers 3 and 4 read the keys and values of layers 1 and 2
    "layer_types": [*KINDS, *KINDS, KINDS[0]], "rope_parameters": dict.fromkeys(KINDS, ROPE),
    "global_head_dim": 8, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "laurel_rank": 4, "altup_num_inputs": 2, "intermediate_size": 24,
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["Gemma3nForCausalLM", "Gemma4ForCausalLM"])
@pytest.mark.parametrize("num_stages, settings", [(2, {}), (2, {"pipeline_layer_partition": (1, 4)})])
def test_layers_that_share_a_cache_are_in_one_stage(
    architecture: str, num_stages: int, settings: dict[str, Any]
) -> None:
    """And each tensor of the checkpoint in one stage, but for the last norm and the tied embedding."""
    made = [make(stage, num_stages, architecture, SHARED, **settings) for stage in range(num_stages)]
    assert [len(model.layers) for model, _ in made] == [1, 4]
    first, last = (set(build.weights.expected()) for _, build in made)
    assert first & last == {"model.norm.weight", "model.embed_tokens.weight"}
    assert first | last == set(make(0, 1, architecture, SHARED)[1].weights.expected())


@pytest.mark.parametrize(
    "num_stages, settings, message",
    [
        (3, {}, "has 5 layers, of which the last 4 share a cache and stay together. Use at most 2"),
        (
            2,
            {"pipeline_layer_partition": (2, 3)},
            "pipeline_layer_partition is 2, 3, and the model's last 4 layers, .* Give the last stage 4 or more",
        ),
    ],
)
def test_stages_that_would_part_layers_from_their_cache_are_refused(
    num_stages: int, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(0, num_stages, "Gemma4ForCausalLM", SHARED, **settings)


def test_a_model_that_does_not_run_in_stages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def whole(self: LlamaForCausalLM, *, config: BuildConfig, prefix: str = "") -> None:
        Decoder.__init__(self, config=config)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", whole)
    with pytest.raises(ConfigError, match="pipeline_parallel_size is 2; LlamaForCausalLM does not run in stages"):
        make(0, 2)
