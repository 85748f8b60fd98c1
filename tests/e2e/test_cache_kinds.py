"""Models whose layers keep something else than keys and values each: latents, an indexer's keys, another layer's, nothing at all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, make_llm, make_prompts, references_in
from torch import Tensor, nn

from pelton.entries import ModelEntry
from pelton.hookspecs import hookimpl
from pelton.layers.decoder import Decoder
from pelton.layers.embedding import LMHead, VocabEmbedding
from pelton.layers.linear import MergedGateUp, RowParallelLinear
from pelton.layers.norm import RMSNorm
from pelton.plugins import load_plugins, register
from pelton.testing.models import VOCAB_SIZE

NUM_TOKENS = 20  # every prompt goes on over the end of a block
LENGTHS = (1, 5, 16, 17, 48, 129, 200)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """From family to its checkpoint with transformers' answers."""
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


@pytest.fixture(
    params=[
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm_moe_dsa",
        "axk2",
        "dots3_note",
        "hy_v4",
        "mistral_large4",
        "gemma4",
    ]
)
def reference(request: pytest.FixtureRequest, made: Callable[[str], Reference]) -> Reference:
    return made(request.param)


def test_reference_has_no_ties(reference: Reference) -> None:
    assert reference.min_top2_gap > 1e-4


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="batched"),
        pytest.param({"max_num_seqs": 1, "enforce_eager": True}, id="alone"),
        pytest.param({"max_num_batched_tokens": 16, "async_scheduling": False}, id="chunked"),
        pytest.param({"disable_hybrid_kv_cache_manager": True, "block_size": 8}, id="no-hybrid"),
    ],
)
def test_ids_equal_transformers(reference: Reference, settings: dict[str, Any]) -> None:
    every = slice(
        None, None, 2 if settings.get("max_num_seqs") == 1 else 1
    )  # a prompt alone is as many steps as all of them
    with make_llm(reference.path, **settings) as llm:
        assert generate(llm, reference.prompts[every], greedy(NUM_TOKENS)) == reference.outputs[every]
        assert llm.kv_cache_usage() == 0.0


def test_prefix_hits_change_nothing(reference: Reference) -> None:
    with make_llm(reference.path) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        again = llm.generate([{"prompt_token_ids": p} for p in reference.prompts], greedy(NUM_TOKENS), use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in again] == reference.outputs
        assert sum(o.num_cached_tokens or 0 for o in again) >= 256
        longer = [p + out[:8] for p, out in zip(reference.prompts, reference.outputs, strict=True)]
        assert generate(llm, longer, greedy(NUM_TOKENS - 8)) == [out[8:] for out in reference.outputs]


@pytest.mark.parametrize(
    "family, num_blocks",
    [
        ("deepseek_v3", 20),
        ("deepseek_v32", 20),
        ("glm_moe_dsa", 20),
        ("hy_v4", 20),
        ("mistral_large4", 20),
        ("gemma4", 48),
    ],
)
def test_preemption_changes_nothing(made: Callable[[str], Reference], family: str, num_blocks: int) -> None:
    """Gemma 4's local and global layers have blocks of their own."""
    reference = made(family)
    with make_llm(
        reference.path, max_model_len=256, max_num_batched_tokens=64, num_gpu_blocks_override=1 + num_blocks
    ) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
        assert llm.num_preemptions() > 0


def test_latents_take_the_bytes_of_latents(made: Callable[[str], Reference]) -> None:
    """48 numbers a token and layer, where keys and values of 4 heads would take 240."""
    reference = made("deepseek_v2")
    with make_llm(reference.path, kv_cache_memory_bytes=4 * 16 * 48 * 4 * 100) as llm:
        assert llm.llm_engine.info.num_blocks == 100


# Without any cache.


class TokenOnly(nn.Module):
    """Norm, gated MLP."""

    def __init__(self, *, config: Any, prefix: str) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hf.hidden_size, config=config, prefix=f"{prefix}.norm")
        self.gate_up = MergedGateUp(
            config.hf.hidden_size, config.hf.intermediate_size, activation="silu", norm=self.norm, config=config,
            prefix=prefix,
        )  # fmt: skip
        self.down = RowParallelLinear(
            config.hf.intermediate_size, config.hf.hidden_size, config=config, prefix=f"{prefix}.down_proj"
        )

    def forward(self, hidden: Tensor, residual: Tensor | None, batch: Any) -> tuple[Tensor, Tensor]:
        activated, residual = self.gate_up(hidden, residual)
        return self.down(activated), residual


class TokenOnlyForCausalLM(Decoder):
    """The next token follows from the last one alone."""

    def __init__(self, *, config: Any, prefix: str = "") -> None:
        super().__init__(config=config)
        hf = config.hf
        self.embed_tokens = VocabEmbedding(hf.vocab_size, hf.hidden_size, config=config, prefix="embed_tokens")
        self.layers = nn.ModuleList(TokenOnly(config=config, prefix=f"layers.{i}") for i in range(hf.num_hidden_layers))
        self.norm = RMSNorm(hf.hidden_size, config=config, prefix="norm")
        self.lm_head = LMHead(norm=self.norm, embedding=self.embed_tokens, config=config)


@pytest.fixture
def token_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Any, list[int]]:
    """Checkpoint, plugins with its model, and the token that follows each."""
    from safetensors.torch import save_file

    generator, size, inner = torch.Generator().manual_seed(0), 32, 48
    shapes = {"embed_tokens.weight": (VOCAB_SIZE, size), "lm_head.weight": (VOCAB_SIZE, size), "norm.weight": (size,)}
    for i in range(2):
        shapes |= {
            f"layers.{i}.norm.weight": (size,), f"layers.{i}.gate_proj.weight": (inner, size),
            f"layers.{i}.up_proj.weight": (inner, size), f"layers.{i}.down_proj.weight": (size, inner),
        }  # fmt: skip
    weights = {
        name: torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * 3 * shape[1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(weights, tmp_path / "model.safetensors")
    fields = {
        "architectures": ["TokenOnlyForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": size,
        "intermediate_size": inner, "num_hidden_layers": 2, "max_position_embeddings": 512, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))

    hidden = weights["embed_tokens.weight"].double()

    def normed(x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    for i in range(2):
        x = normed(hidden)
        gate, up, down = (weights[f"layers.{i}.{name}_proj.weight"].double() for name in ("gate", "up", "down"))
        hidden = hidden + (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    following = (normed(hidden) @ weights["lm_head.weight"].double().T).argmax(-1).tolist()

    module = ModuleType("token_only_model")
    module.TokenOnlyForCausalLM = TokenOnlyForCausalLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    entry = ModelEntry(
        name="token_only", load="token_only_model:TokenOnlyForCausalLM", architectures=("TokenOnlyForCausalLM",)
    )
    plugins = load_plugins()
    register(
        plugins.manager,
        SimpleNamespace(PELTON_API=">=1,<2", pelton_models=hookimpl(lambda: [entry])),
        "token_only",
        "test",
    )
    return str(tmp_path), plugins, following


@pytest.mark.parametrize(
    "settings", [{}, {"max_num_batched_tokens": 16, "async_scheduling": False}, {"max_num_seqs": 1}], ids=str
)
def test_a_model_without_any_cache_generates(token_only: tuple[str, Any, list[int]], settings: dict[str, Any]) -> None:
    path, plugins, following = token_only
    prompts = make_prompts(VOCAB_SIZE, LENGTHS)
    expected = []
    for prompt in prompts:
        tokens = [prompt[-1]]
        for _ in range(NUM_TOKENS):
            tokens.append(following[tokens[-1]])
        expected.append(tokens[1:])
    with make_llm(path, plugins=plugins, **settings) as llm:
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
        assert generate(llm, prompts, greedy(NUM_TOKENS)) == expected
