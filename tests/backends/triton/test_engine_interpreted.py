"""The whole engine on Triton's kernels, in the interpreter: what ties kernels, backend and runner together is tested where
there is no GPU too. With a GPU, tests/gpu does that and more."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from pelton_e2e import gap_reference, generate, greedy, make_llm, make_prompts

from pelton.entries import PlatformEntry
from pelton.hookspecs import hookimpl
from pelton.plugins import Plugins, load_plugins, register
from pelton.testing.models import make_tiny_checkpoint
from pelton_platforms.cpu.platform import CPUPlatform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the engine on the GPU")


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


def test_greedy_ids_equal_transformers(plugins, tmp_path):
    """Gemma 3 has all of it: norms around each sub-layer and of queries and keys, windows, two KV groups, a tied head."""
    sizes = {"num_hidden_layers": 2, "vocab_size": 64, "layer_types": ["sliding_attention", "full_attention"]}
    path = make_tiny_checkpoint(tmp_path, "gemma3", with_tokenizer=False, sliding_window=4, **sizes)
    prompts = make_prompts(64, (1, 9))
    reference = gap_reference("gemma3", str(path), prompts, 2, "cpu")
    settings = {"max_model_len": 32, "max_num_seqs": 2, "max_num_batched_tokens": 8, "kv_cache_memory_bytes": 2**20}
    with make_llm(str(path), plugins=plugins, device="interpreted", **settings) as llm:
        reference.check(generate(llm, prompts, greedy(2)))
        assert llm.llm_engine.info.report.attention_backend == "triton"
