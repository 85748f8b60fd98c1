"""Tiny checkpoints of every model family with transformers' answers, and a server over one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pelton_e2e import NUM_NEW_TOKENS, Reference, references_in, serving
from pelton_isas import TORCH

from pelton_backends.native import library
from pelton_backends.native.build import available_sets


@pytest.fixture(scope="module", autouse=True)
def all_ranks_are_forks(forks: None) -> None:
    """One server is started by `exec` (test_tensor_parallel.py)."""


@pytest.fixture
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The instruction set that C kernels are compiled for, or torch, where there is none."""
    if request.param == TORCH:
        monkeypatch.setattr(library, "reason_against", lambda *groups, dtype=None: "no C compiler on the PATH")
    elif library.reason_against():
        pytest.skip("no C compiler here")
    else:
        found = next(one for one in available_sets() if one.name == request.param)
        monkeypatch.setattr(library, "_best_set", lambda: found)
    return str(request.param)


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A function from family to its reference; made once per session."""
    return references_in(tmp_path_factory, NUM_NEW_TOKENS, with_tokenizer=True)


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
    """One server over the tiny Llama checkpoint, shared by the tests that do not hurt it. Its processes are started by `exec`: the
    growth of their memory is measured."""
    reference = references("llama")
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(reference.path, "--dtype", "float32", "--max-num-seqs", "64", log=log, is_forked=False) as (url, _):
        yield url, reference
