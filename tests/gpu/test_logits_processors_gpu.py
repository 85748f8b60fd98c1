"""The example logits processor on a GPU: transformers is its oracle; other rows keep the captured tail."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pelton_e2e import make_llm, make_prompts

from pelton import SamplingParams, hookimpl
from pelton.entries import Entry
from pelton.plugins import load_plugins, register
from pelton.testing.models import VOCAB_SIZE, load_reference, make_tiny_checkpoint
from pelton_platforms.device.steps.step_sampler import StepSampler

pytestmark = pytest.mark.gpu

PACKAGE = Path(__file__).resolve().parents[2] / "examples/plugins/pelton-no-repeat"
NUM_TOKENS = 32
ARGS = (2, None, 1, 3)


class Plugin:
    PELTON_API = ">=1.2,<2"

    @hookimpl
    def pelton_logits_processors(self):
        return [Entry(name="no_repeat", load="pelton_no_repeat.processor:NoRepeat")]


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(PACKAGE))
    loaded = load_plugins(only=[])
    register(loaded.manager, Plugin(), "no_repeat", "test")
    return loaded


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    path = str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", head_dim=64))
    prompts = [row[: len(row) // 2] * 2 + row[: len(row) % 2] for row in make_prompts(VOCAB_SIZE, (2, 5, 17, 33))]
    model = load_reference(path)
    answers = [
        model.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False,
            no_repeat_ngram_size=n or 0, pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()
        for prompt, n in zip(prompts, ARGS, strict=True)
    ]  # fmt: skip
    return SimpleNamespace(path=path, prompts=prompts, answers=answers)


def params(size: int | None) -> SamplingParams:
    given = None if size is None else {"no_repeat": size}
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logits_processor_args=given)


@pytest.mark.parametrize(
    "settings",
    [
        {"cudagraph_mode": "FULL_AND_PIECEWISE"},
        {"cudagraph_mode": "NONE", "async_scheduling": False},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "drafts_on_device": False}},
    ],
    ids=["graphs", "without-graphs", "drafts", "drafts-of-the-host"],
)
def test_greedy_ids_equal_transformers(plugins: Any, case: SimpleNamespace, settings: dict[str, Any]) -> None:
    with make_llm(case.path, device="cuda", dtype="float32", plugins=plugins, **settings) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in case.prompts], [params(n) for n in ARGS], use_tqdm=False
        )
    assert [list(output.outputs[0].token_ids) for output in outputs] == case.answers


def test_other_steps_keep_the_captured_tail(
    plugins: Any, case: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    plain = StepSampler.sample
    monkeypatch.setattr(StepSampler, "sample", lambda self, *args: (calls.append(1), plain(self, *args))[1])
    prompts = [{"prompt_token_ids": prompt} for prompt in case.prompts]
    with make_llm(case.path, device="cuda", plugins=plugins, dtype="float32") as llm:
        llm.generate(prompts, params(None), use_tqdm=False)
        llm.generate(
            prompts, SamplingParams(temperature=1.0, seed=1, max_tokens=NUM_TOKENS, ignore_eos=True), use_tqdm=False
        )
        assert not calls
        llm.generate(prompts[0], params(2), use_tqdm=False)
        assert len(calls) >= NUM_TOKENS
