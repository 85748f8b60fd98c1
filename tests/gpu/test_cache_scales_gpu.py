"""Caches in fp8 with scales on the GPU: log-probabilities of transformers whose keys and values are rounded by the same scales."""

from __future__ import annotations

from pathlib import Path

import pytest
from pelton_cache_scales import (
    PROMPTS,
    difference,
    expected,
    expected_of_checkpoint,
    logprobs_of,
    served,
    typical,
    write_checkpoint,
    write_large,
)

from pelton_platforms.device import cache_scales
from pelton_platforms.device.cache_scales import CalculatedScales

pytestmark = pytest.mark.gpu

HEAD_DIM = 64
ON_GPU = {"device": "cuda", "kv_cache_memory_bytes": 2**25}
MODES = {
    "captured": {},
    "eager": {"enforce_eager": True},
    "pieces": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_first_steps_scales_serve_all_requests(
    family: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts and what is generated. Queries and keys of qwen3 have norms."""
    made: list[CalculatedScales] = []
    make = cache_scales.CalculatedScales
    monkeypatch.setattr(cache_scales, "CalculatedScales", lambda *args: made.append(make(*args)) or made[-1])
    path = write_large(tmp_path, family, head_dim=HEAD_DIM)
    ids, found = served(path, **ON_GPU, **MODES[mode])
    wanted, scales = expected(path, ids, len(PROMPTS[0]), family == "qwen3")
    calculated = [(layer.key.item(), layer.value.item()) for layer in made[-1].layers.values()]
    print(f"{family} {mode}: {calculated}, apart {difference(found, wanted):.2g}, most {typical(found, wanted):.2g}")
    assert calculated == [scales[index] for index in sorted(scales)]
    assert max(value for _, value in calculated) > 1
    assert difference(found, wanted) < 2e-2  # where a number lies between two of e4m3
    assert typical(found, wanted) < 1e-3
    _, without = served(path, **ON_GPU, **MODES[mode], calculate_kv_scales=False)
    assert difference(without, wanted) > 0.05, "values do not fit without scales"


@pytest.mark.parametrize("family, names", [("llama", "vllm"), ("qwen3", "products"), ("qwen2", "output")])
def test_keys_and_values_are_kept_by_the_checkpoints_scales(family: str, names: str, tmp_path: Path) -> None:
    """Whole, and in chunks that read the cache of earlier ones."""
    path = write_checkpoint(tmp_path, family, names, head_dim=HEAD_DIM)
    got = [logprobs_of(path, kv_cache_dtype="fp8", **ON_GPU, **more) for more in ({}, {"max_num_batched_tokens": 7})]
    plain = logprobs_of(path, **ON_GPU)
    wanted = expected_of_checkpoint(path)
    apart = [max(abs(a - b) for a, b in zip(one, wanted, strict=True)) for one in (*got, plain)]
    print(f"{family} {names}: apart {apart}")
    assert max(apart[:2]) < 5e-3
    assert apart[2] > 5e-3, "the cache is rounded"
