"""Models with states (Mamba-2): greedy ids equal transformers' float32 ids, whatever happens to the batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, make_llm, make_prompts

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

NUM_TOKENS = 12
LENGTHS = (1, 2, 5, 16, 33, 70, 130)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("Bamba", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24, "attn_layer_indices": [1, 3],
    }),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "tie_word_embeddings": False}),
}  # fmt: skip


def checkpoint(folder: Path, family: str) -> str:
    import transformers

    name, fields = FAMILIES[family]
    classes = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")
    made = make_tiny_checkpoint(
        folder / family, config_class=classes[0], model_class=classes[1], with_tokenizer=False, **fields
    )
    return str(made)


@torch.inference_mode()
def continuations(path: str, prompts: list[list[int]]) -> tuple[list[list[int]], float]:
    """transformers' greedy ids, each from all tokens before it; and the smallest gap between the best two logits."""
    from transformers import AutoModelForCausalLM

    model, outputs, gap = AutoModelForCausalLM.from_pretrained(path).float().eval(), [], 1.0
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            best = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
        outputs.append(tokens[len(prompt) :])
    return outputs, gap


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    path = checkpoint(tmp_path_factory.mktemp("state"), request.param)
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    return Reference(request.param, path, prompts, *continuations(path, prompts))


def test_batched_and_again(reference: Reference) -> None:
    """A state is not found again: the second time everything is computed, over blocks that others have left."""
    assert reference.min_top2_gap > 1e-4
    assert len({token for ids in reference.outputs for token in ids}) > 10
    with make_llm(reference.path) as llm:
        for _ in range(2):
            prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts]
            outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == reference.outputs
            assert not any(output.num_cached_tokens for output in outputs)
        assert llm.kv_cache_usage() == 0.0


def test_alone(reference: Reference) -> None:
    with make_llm(reference.path, max_num_seqs=1, async_scheduling=False) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_in_chunks(reference: Reference) -> None:
    with make_llm(reference.path, max_num_batched_tokens=16) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_preempted(reference: Reference) -> None:
    """Requests that give up their blocks compute their states again. A state alone never wants another block."""
    prompts = make_prompts(VOCAB_SIZE, (60, 61, 62))  # all of them want a second block of 64 tokens soon
    expected, _ = continuations(reference.path, prompts)
    tight = {"num_gpu_blocks_override": 8, "max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 3}
    with make_llm(reference.path, **tight) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
        assert (llm.num_preemptions() > 0) == (reference.family == "bamba")


def test_samples_and_a_request_that_leaves(reference: Reference) -> None:
    from pelton import SamplingParams

    with make_llm(reference.path) as llm:
        params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=6, ignore_eos=True)
        prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts[:3]]
        first = llm.generate(prompts, params, use_tqdm=False)
        again = llm.generate(prompts, params, use_tqdm=False)
        ids = [[list(one.token_ids) for one in output.outputs] for output in first]
        assert ids == [[list(one.token_ids) for one in output.outputs] for output in again]
        llm.llm_engine.add_request("gone", {"prompt_token_ids": reference.prompts[-1]}, greedy(50))
        llm.llm_engine.step()
        llm.llm_engine.abort_request("gone")
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


CONNECTOR = {"kv_connector": "shared_storage", "kv_connector_extra_config": {"shared_storage_path": "nowhere"}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_config": {"method": "ngram"}}, "a state cannot leave a rejected draft out again"),
        ({"kv_transfer_config": CONNECTOR}, "keeps what models have of each token; this one has states"),
        ({"kv_transfer_config": CONNECTOR, "disable_hybrid_kv_cache_manager": True}, "this one has states"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and layers with states run on one rank"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
    ],
)
def test_what_a_state_does_not_go_with(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(checkpoint(tmp_path, "bamba"), **settings)
