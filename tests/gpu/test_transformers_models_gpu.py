"""Models on transformers' modules: greedy ids on the GPU equal transformers' on the GPU, with whole steps and pieces captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pelton_e2e import GapReference, gap_reference, generate, greedy, make_llm, make_prompts
from pelton_transformers import VOCAB_SIZE, make_checkpoint

from pelton.config import CUDAGraphMode
from pelton_platforms.device.graphs.captures import FullGraphs, PiecewiseGraphs

pytestmark = pytest.mark.gpu

NUM_TOKENS = 24
LENGTHS = (1, 5, 16, 17, 40, 90)
SIZES: dict[str, dict[str, Any]] = {
    # Heads of 64: what GPU kernels are made for.
    "phi3": {"head_dim": 64, "hidden_size": 256},
    "granite": {"head_dim": 64, "hidden_size": 256},
    "olmo2": {"head_dim": 64, "hidden_size": 256},
    "stablelm": {"head_dim": 64, "hidden_size": 256},
    "cohere": {"head_dim": 64, "hidden_size": 256},
    "starcoder2": {"head_dim": 64, "hidden_size": 256},
    "glm": {"head_dim": 64},
    "falcon": {"hidden_size": 256},
    "gpt_neox": {"head_dim": 64, "hidden_size": 256},
    "gemma2": {"head_dim": 64},
    "mixtral": {"head_dim": 64},
    "opt": {"hidden_size": 256, "word_embed_proj_dim": 256},
}

References = Callable[[str], GapReference]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    made: dict[str, GapReference] = {}

    def get(model_type: str) -> GapReference:
        if model_type not in made:
            path = make_checkpoint(tmp_path_factory.mktemp(model_type), model_type, **SIZES[model_type])
            made[model_type] = gap_reference(model_type, path, make_prompts(VOCAB_SIZE, LENGTHS), NUM_TOKENS, "cuda")
        return made[model_type]

    return get


@pytest.mark.parametrize(
    "model_type, mode",
    [(name, CUDAGraphMode.FULL_AND_PIECEWISE) for name in SIZES]
    + [(name, CUDAGraphMode.PIECEWISE) for name in ("phi3", "falcon", "gemma2", "mixtral")]
    + [("phi3", CUDAGraphMode.NONE)],
)
def test_ids_equal_transformers(
    references: References, model_type: str, mode: CUDAGraphMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = references(model_type)
    engines: list[Any] = []
    for kind in (FullGraphs, PiecewiseGraphs):
        monkeypatch.setattr(kind, "__init__", _noted(kind.__init__, engines))
    settings = {
        "model_impl": "transformers", "max_num_batched_tokens": 64, "max_num_seqs": 4, "cudagraph_mode": mode, "device": "cuda",
    }  # fmt: skip
    with make_llm(reference.path, **settings) as llm:
        for _ in range(2):  # the second time with hits of the prefix cache
            reference.check(generate(llm, reference.prompts, greedy(NUM_TOKENS)))
        llm.reset_prefix_cache()
        assert generate(llm, reference.prompts[4:5], greedy(NUM_TOKENS)) == reference.outputs[4:5]
    captured = {type(one): len(one) for one in engines}
    refused = [key for one in engines for key in one._refusals._keys]
    assert not refused
    assert bool(captured.get(FullGraphs)) == (mode is CUDAGraphMode.FULL_AND_PIECEWISE)
    assert bool(captured.get(PiecewiseGraphs)) == (mode is not CUDAGraphMode.NONE)


def _noted(plain: Any, made: list[Any]) -> Any:
    def init(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        made.append(self)

    return init
