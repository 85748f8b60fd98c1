"""Several ranks on GPUs: greedy ids equal transformers' float32 greedy ids. Where there are fewer devices than ranks they share one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts

from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

pytestmark = pytest.mark.gpu

NUM_TOKENS = 8


LENGTHS = (1, 16, 33, 129)
SIZES = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2-dcp2": {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
    "tp2-experts": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "tp4": {"tensor_parallel_size": 4},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp4-experts": {"tensor_parallel_size": 4, "enable_expert_parallel": True},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], GapReference]:
    @cache
    def make(family: str) -> GapReference:
        path = str(make_tiny_checkpoint(tmp_path_factory.mktemp(family) / "model", family, with_tokenizer=False))
        return gap_reference(family, path, make_prompts(VOCAB_SIZE, LENGTHS), NUM_TOKENS, "cuda")

    return make


@pytest.mark.parametrize(
    "family, sizes",
    [
        ("llama", "tp2"),
        ("llama", "pp2"),
        ("deepseek_v3_moe", "tp2-experts"),
        ("qwen3", "tp2-dcp2"),
        ("deepseek_v3_moe", "tp2-dcp2"),
        ("llama", "tp4"),
        ("llama", "tp2-pp2"),
        ("deepseek_v3_moe", "tp4-experts"),
    ],
)
def test_ids_are_those_of_one_device(
    made: Callable[[str], GapReference], family: str, sizes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batched, with captured steps and chunks; then a prompt alone, with prefix hits."""
    num_ranks = SIZES[sizes].get("tensor_parallel_size", 1) * SIZES[sizes].get("pipeline_parallel_size", 1)
    num_devices = torch.cuda.device_count()
    if num_devices < num_ranks:
        monkeypatch.setenv("PELTON_RANKS_PER_DEVICE", str(-(-num_ranks // num_devices)))
    reference = made(family)
    with make_llm(reference.path, device="cuda", max_num_batched_tokens=48, max_num_seqs=4, **SIZES[sizes]) as llm:
        reference.check(generate(llm, reference.prompts, greedy(NUM_TOKENS)))
        [alone] = generate(llm, reference.prompts[-1:], greedy(NUM_TOKENS))
        reference.check([*reference.outputs[:-1], alone])
