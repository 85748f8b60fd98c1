"""Tiny checkpoints of every model family with transformers' answers, and a server over one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pelton_e2e import NUM_NEW_TOKENS, Reference, greedy_reference, make_prompts, serving


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A function from family to its reference; made once per session."""
    from pelton.testing.models import make_tiny_checkpoint

    made: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in made:
            path = str(make_tiny_checkpoint(tmp_path_factory.mktemp(family), family))
            vocab_size = json.loads((Path(path) / "config.json").read_text())["vocab_size"]
            prompts = make_prompts(vocab_size)
            outputs, gap = greedy_reference(path, prompts, NUM_NEW_TOKENS)
            made[family] = Reference(family, path, prompts, outputs, gap)
        return made[family]

    return get


@pytest.fixture(params=["llama", "mistral", "gemma3"])
def reference(request: pytest.FixtureRequest, references: Callable[[str], Reference]) -> Reference:
    """A family of each kind of KV cache: all tokens kept, a window, and both in one model. The others differ from Llama by
    what a layer computes: test_cpu_paths has them all."""
    return references(request.param)


@pytest.fixture
def llama(references: Callable[[str], Reference]) -> Reference:
    return references("llama")


@pytest.fixture(scope="session")
def llama_server(
    references: Callable[[str], Reference], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Reference]]:
    """One server over the tiny Llama checkpoint, shared by the tests that do not hurt it."""
    reference = references("llama")
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(reference.path, "--dtype", "float32", "--max-num-seqs", "64", log=log) as (url, _):
        yield url, reference
