"""Weights and inputs in e4m3 on the GPU: log-probabilities lie as near to those of the same rounded weights in float32 (torch ops
on the CPU) as those of the torch ops in bfloat16 do; captured and not, in chunks, with cached prompts, together and alone.

Ids are compared with what float32 would choose after the same tokens: a last bit of bfloat16 may become a step of e4m3, so
whole continuations differ with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from pelton_e2e import greedy, make_llm, make_prompts
from torch import Tensor

from pelton.testing.model_driver import ModelDriver
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.quantization.fp8 import Fp8AtLoad

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32
LENGTHS = (1, 2, 16, 17, 48, 100, 129)
MEAN_RATIO = 1.25
FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}),
    "qwen3": ("qwen3", {"hidden_size": 192, "intermediate_size": 272, "head_dim": 128}),
    "wide": ("llama", {"hidden_size": 1024, "intermediate_size": 1536, "head_dim": 64, "num_attention_heads": 16,
                           "num_hidden_layers": 2}),
}  # fmt: skip
MODES = [
    pytest.param({"cudagraph_mode": "FULL_AND_PIECEWISE"}, id="captured"),
    pytest.param({"cudagraph_mode": "NONE", "max_num_batched_tokens": 40}, id="eager-chunked"),
]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, and its model in e4m3 of torch ops on the CPU."""

    path: str
    exact: ModelDriver
    rounded: ModelDriver

    def logprobs(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """[tokens, vocabulary] in float32 and in bfloat16."""
        found = []
        for driver in (self.exact, self.rounded):
            found.append(driver.step({"one": ids})["one"].float().log_softmax(-1))
            driver.finish("one")
        return found[0], found[1]


@pytest.fixture(scope="module", params=FIELDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    family, fields = FIELDS[request.param]
    path = tmp_path_factory.mktemp(request.param)
    make_tiny_checkpoint(path, family, dtype="bfloat16", with_tokenizer=False, **fields)
    exact, rounded = (
        ModelDriver(path, dtype=dtype, quantization=Fp8AtLoad()) for dtype in (torch.float32, torch.bfloat16)
    )
    return Checkpoint(str(path), exact, rounded)


@dataclass
class Differences:
    """From float32's log-probabilities: the engine's, and those of torch ops in bfloat16; how often the best token is the same."""

    ours: list[Tensor]
    theirs: list[Tensor]
    same: int = 0
    same_of_theirs: int = 0
    count: int = 0

    def add(self, checkpoint: Checkpoint, output: Any) -> None:
        completion = output.outputs[0]
        ids = [*output.prompt_token_ids, *completion.token_ids]
        exact, rounded = checkpoint.logprobs(ids)
        rows = [*(output.prompt_logprobs or [])[1:], *(completion.logprobs or [])]
        for place, row in enumerate(rows, start=len(ids) - 1 - len(rows)):
            tokens = torch.tensor(list(row))
            found = torch.tensor([row[token].logprob for token in row])
            self.ours.append((found - exact[place, tokens]).abs())
            self.theirs.append((rounded[place, tokens] - exact[place, tokens]).abs())
        first = len(output.prompt_token_ids) - 1
        best = exact[first:-1].argmax(-1)
        self.same += int((torch.tensor(completion.token_ids) == best).sum())
        self.same_of_theirs += int((rounded[first:-1].argmax(-1) == best).sum())
        self.count += len(best)

    def check(self) -> None:
        ours, theirs = (torch.cat(parts).mean().item() for parts in (self.ours, self.theirs))
        print(f"mean {ours:.3f}, torch ops {theirs:.3f}; {self.same}, {self.same_of_theirs} of {self.count} ids")
        assert ours < MEAN_RATIO * theirs
        assert self.same >= self.same_of_theirs - 0.05 * self.count


@pytest.mark.parametrize("settings", MODES)
def test_logprobs_are_as_near_to_float32_as_those_of_torch_ops(
    checkpoint: Checkpoint, settings: dict[str, Any]
) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in make_prompts(VOCAB_SIZE, LENGTHS)]
    differences = Differences([], [])
    with make_llm(checkpoint.path, device="cuda", dtype="bfloat16", quantization="fp8", **settings) as llm:
        for params in (greedy(NUM_TOKENS, logprobs=5, prompt_logprobs=1), greedy(NUM_TOKENS, logprobs=5)):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for output in outputs:
                differences.add(checkpoint, output)
        assert sum(output.num_cached_tokens or 0 for output in outputs) >= 16 * 10  # the second time
        for prompt in prompts[::3]:
            differences.add(checkpoint, llm.generate([prompt], params, use_tqdm=False)[0])
    differences.check()
