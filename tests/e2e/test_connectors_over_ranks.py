"""KV blocks in a folder where several ranks have a part of each: ids equal transformers', and a block is used where all parts are there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import Reference, greedy, make_llm, references_in

NUM_TOKENS = 12
LENGTHS = (5, 33, 64, 100, 129)
NUM_BLOCKS = 2 + 4 + 6 + 8  # full ones of 16 tokens
FOUND = [0, 32, 48, 96, 128]  # the last token is always computed
SIZES = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "max_num_batched_tokens": 48},
    "tp2-pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "pipeline_layer_partition": (1, 3)},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


def run(reference: Reference, folder: Path, *, times: int = 1, **more: Any) -> list[int]:
    """Check the ids; return how many tokens of each prompt were not computed."""
    transfer = {"kv_connector": "shared_storage", "kv_connector_extra_config": {"shared_storage_path": str(folder)}}
    prompts = [{"prompt_token_ids": prompt} for prompt in reference.prompts] * times
    with make_llm(reference.path, kv_transfer_config=transfer, **more) as llm:
        outputs = llm.generate(prompts, greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == reference.outputs * times
        assert llm.kv_cache_usage() == 0.0
        assert not more.get("num_gpu_blocks_override") or llm.num_preemptions() > 0
    return [output.num_cached_tokens for output in outputs]


def files_of(folder: Path, rank: int) -> list[Path]:
    return sorted(folder.glob(f"*/*/rank{rank}/*/*.safetensors"))


def test_ranks_of_layers_with_preemption_while_blocks_are_saved(
    made: Callable[[str], Reference], tmp_path: Path
) -> None:
    """The parts of these ranks are nobody else's."""
    small = {"num_gpu_blocks_override": 14, "max_model_len": 160, "max_num_batched_tokens": 64}
    run(made("llama"), tmp_path, times=3, **SIZES["tp2"], **small)
    assert [len(files_of(tmp_path, rank)) for rank in range(2)] == [NUM_BLOCKS] * 2
    assert run(made("llama"), tmp_path, **SIZES["tp2"]) == FOUND
    assert run(made("llama"), tmp_path) == [0] * 5


def test_stages_of_two_ranks(made: Callable[[str], Reference], tmp_path: Path) -> None:
    assert run(made("llama"), tmp_path, **SIZES["tp2-pp2"]) == [0] * 5
    assert [len(files_of(tmp_path, rank)) for rank in range(4)] == [NUM_BLOCKS] * 4
    assert run(made("llama"), tmp_path, **SIZES["tp2-pp2"]) == FOUND


def test_a_block_without_one_ranks_part_is_computed(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """A part that is missing, and parts of either rank that are found to be damaged when they are loaded."""
    reference = made("llama")
    assert run(reference, tmp_path, **SIZES["pp2"]) == [0] * 5
    files_of(tmp_path, 1)[0].unlink()
    assert sum(run(reference, tmp_path, **SIZES["pp2"])) < sum(FOUND)
    assert len(files_of(tmp_path, 1)) == NUM_BLOCKS, "it is there again"
    for rank in (0, 1):
        for path in files_of(tmp_path, rank)[rank :: 5 + rank]:
            path.write_bytes(path.read_bytes()[:200])
    run(reference, tmp_path, **SIZES["pp2"])
    assert run(reference, tmp_path, **SIZES["pp2"]) == FOUND


def test_ranks_that_share_a_cache(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """Blocks of 32 tokens, of which each rank has a half; latents, with experts."""
    shared = SIZES["tp2"] | {"decode_context_parallel_size": 2}
    assert run(made("deepseek_v3_moe"), tmp_path, **shared) == [0] * 5
    assert run(made("deepseek_v3_moe"), tmp_path, **shared) == [0, 32, 32, 96, 128]


def test_an_indexers_keys_come_back_with_the_latents(made: Callable[[str], Reference], tmp_path: Path) -> None:
    assert run(made("deepseek_v32"), tmp_path, **SIZES["tp2"]) == [0] * 5
    assert run(made("deepseek_v32"), tmp_path, **SIZES["tp2"]) == FOUND
