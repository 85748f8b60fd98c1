"""Dense families: greedy ids equal transformers' float32 greedy ids, whatever happens to the batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pelton_e2e import Reference, generate, greedy, greedy_reference, make_llm, make_prompts

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

FAMILIES = (
    "gemma2", "gemma3n", "cohere2", "olmo2", "phi3", "granite", "glm4", "starcoder2", "ernie4_5", "seed_oss", "smollm3",
)  # fmt: skip
WINDOWED = ("gemma2", "gemma3n", "cohere2")
"""Of local and global layers, each with blocks of their own."""
NUM_TOKENS = 17
LENGTHS = (1, 5, 16, 33, 100, 160)


@pytest.fixture(scope="module", params=FAMILIES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    family = request.param
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family, with_tokenizer=False))
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    return Reference(family, path, prompts, *greedy_reference(path, prompts, NUM_TOKENS))


def test_batched_and_with_prefix_hits(reference: Reference) -> None:
    assert reference.min_top2_gap > 1e-4
    assert len({token for ids in reference.outputs for token in ids}) > 10
    with make_llm(reference.path) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        again = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in again] == reference.outputs
        assert sum(o.num_cached_tokens or 0 for o in again) >= 128
        assert llm.kv_cache_usage() == 0.0


def test_queries_of_ministral3_are_scaled_by_position(tmp_path: Path) -> None:
    import transformers

    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 16.0, "original_max_position_embeddings": 32, "mscale": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 2.0, "beta_fast": 32.0, "beta_slow": 1.0, "max_position_embeddings": 512,
    }  # fmt: skip
    path = make_tiny_checkpoint(
        tmp_path / "m", config_class=transformers.Ministral3Config, model_class=transformers.Ministral3ForCausalLM,
        with_tokenizer=False, rope_parameters=rope,
    )  # fmt: skip
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    outputs, gap = greedy_reference(str(path), prompts, 8)
    assert gap > 1e-4
    with make_llm(str(path), max_num_batched_tokens=32) as llm:
        assert generate(llm, prompts, greedy(8)) == outputs
        assert generate(llm, prompts, greedy(8)) == outputs
    rope["llama_4_scaling_beta"] = 0.0
    with make_llm(str(path), hf_overrides={"rope_parameters": rope}) as llm:
        assert generate(llm, prompts, greedy(8)) != outputs


def test_alone(reference: Reference) -> None:
    with make_llm(reference.path, max_num_seqs=1, enforce_eager=True) as llm:
        assert generate(llm, reference.prompts[::2], greedy(NUM_TOKENS)) == reference.outputs[::2]


def test_chunked_and_preempted(reference: Reference) -> None:
    num_blocks = 1 + (32 if reference.family in WINDOWED else 14)
    with make_llm(
        reference.path, max_model_len=192, max_num_batched_tokens=16, async_scheduling=False,
        num_gpu_blocks_override=num_blocks,
    ) as llm:  # fmt: skip
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_a_head_that_nothing_is_said_about_is_the_embedding(tmp_path: Path) -> None:
    """SmolLM3 and ERNIE 4.5 leave the field out, as transformers does where it is true."""
    for family in ("smollm3", "ernie4_5"):
        path = make_tiny_checkpoint(tmp_path / family, family, with_tokenizer=False, tie_word_embeddings=True)
        config = json.loads((path / "config.json").read_text())
        assert config.pop("tie_word_embeddings")
        (path / "config.json").write_text(json.dumps(config))
        prompts = make_prompts(VOCAB_SIZE, (5, 16))
        with make_llm(str(path)) as llm:
            assert generate(llm, prompts, greedy(4)) == greedy_reference(str(path), prompts, 4)[0]
