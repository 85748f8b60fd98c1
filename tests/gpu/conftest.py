"""Tiny checkpoints with the head sizes that GPU kernels are made for, and transformers' answers, computed on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import GapReference, gap_reference, make_prompts

DEVICE = "cuda"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # name: (family, fields that differ). Three share the shapes of their matrices, so that fewer kernels are compiled.
    "llama": ("llama", {"head_dim": 64}),
    "mistral": ("mistral", {"head_dim": 64}),  # a window of 24 tokens
    "qwen2": ("qwen2", {"head_dim": 64}),  # biases
    "qwen3": ("qwen3", {"head_dim": 128}),  # one KV head for four heads
    "gemma3": ("gemma3", {"head_dim": 256}),  # windows of 32 tokens in five layers of six
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "soft-caps": ("gemma3", {"head_dim": 64, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}),
    "odd-sizes": (
        "llama",
        {
            "hidden_size": 96,
            "intermediate_size": 136,
            "head_dim": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
        },
    ),
}
LENGTHS = (1, 1, 2, 15, 16, 16, 17, 33, 100, 100, 300, 300)
"""transformers computes prompts of one length together."""
NUM_TOKENS = 48

References = Callable[[str], GapReference]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """A function from name to its reference; made once per session."""
    from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint

    made: dict[str, GapReference] = {}

    def get(name: str) -> GapReference:
        if name not in made:
            family, fields = (FAMILIES | VARIANTS)[name]
            path = make_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / name, family, **fields)
            prompts = make_prompts(VOCAB_SIZE, LENGTHS)
            made[name] = gap_reference(family, str(path), prompts, NUM_TOKENS, DEVICE)
            if made[name].ties:
                print(f"ties of {name}, excepted: {'; '.join(made[name].ties)}")
        return made[name]

    return get


@pytest.fixture(params=FAMILIES)
def reference(request: pytest.FixtureRequest, references: References) -> GapReference:
    return references(request.param)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, references: References) -> GapReference:
    return references(request.param)


@pytest.fixture
def llama(references: References) -> GapReference:
    return references("llama")
