"""Sleep on the GPU: the driver has the memory of pool and weights back, and captured steps give the same ids afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pelton_e2e import generate, make_llm, make_prompts

from pelton.testing.models import make_tiny_checkpoint

pytestmark = pytest.mark.gpu

POOL_BYTES = 2 << 30


def test_memory_comes_back_and_ids_stay(tmp_path: Path) -> None:
    path = str(make_tiny_checkpoint(tmp_path / "model", "llama", with_tokenizer=False))
    prompts = make_prompts(320, (1, 17, 48, 200))
    with make_llm(path, device="cuda", kv_cache_memory_bytes=POOL_BYTES, enable_lora=True) as llm:
        # With nothing cached, and with prefixes found; in float32, since those sums are made in other orders.
        expected = [generate(llm, prompts) for _ in range(2)]
        for level in (1, 2, 1):
            before, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
            llm.sleep(level)
            assert torch.cuda.mem_get_info()[0] - before > POOL_BYTES * 0.9
            assert torch.cuda.memory_allocated() < allocated - POOL_BYTES * 0.9
            llm.wake_up(["weights"])
            llm.wake_up(["kv_cache"])
            assert [generate(llm, prompts) for _ in range(2)] == expected
