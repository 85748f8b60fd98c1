"""Whole-step kernels in an engine: the skeleton's computes what the model's layers do, captured or not, and refuses what it cannot."""

from __future__ import annotations

import pytest
from pelton_e2e import generate, greedy, make_llm, make_prompts
from pelton_lora import merged_checkpoint

from pelton import LoRARequest, SamplingParams, hookimpl
from pelton.engine.start_table import start_table
from pelton.entries import Entry
from pelton.errors import ConfigError
from pelton.plugins import load_plugins, register
from pelton.testing.models import VOCAB_SIZE, make_tiny_checkpoint
from pelton_plugins.commands.plugin_author import write_skeleton

PROMPTS = make_prompts(VOCAB_SIZE, (1, 5, 16, 33, 100))
GREEDY = greedy(24)


class StepPlugin:
    PELTON_API = ">=1.2,<2"

    @hookimpl
    def pelton_step_kernels(self, device_type):
        return [Entry(name="one", load="pelton_one_step.kernel:OneStepStep")] if device_type == "cpu" else []


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    return str(write_skeleton("step-kernel", "one-step", str(tmp_path_factory.mktemp("package") / "one-step")))


@pytest.fixture
def plugins(package, monkeypatch):
    monkeypatch.syspath_prepend(package)
    loaded = load_plugins(only=[])
    register(loaded.manager, StepPlugin(), "one_step", "test")
    return loaded


@pytest.fixture
def calls(plugins, monkeypatch):
    from pelton_one_step.kernel import OneStepStep

    found = []
    plain = OneStepStep.__call__
    monkeypatch.setattr(
        OneStepStep, "__call__", lambda self, batch: (found.append(len(batch.input_ids)), plain(self, batch))[1]
    )
    return found


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=False))


@pytest.fixture(scope="module")
def expected(llama):
    with make_llm(llama, plugins=load_plugins(only=[])) as llm:
        return generate(llm, PROMPTS, GREEDY)


@pytest.fixture(scope="module")
def adapted(llama, tmp_path_factory):
    """An adapter, and what its merged weights answer."""
    folder = tmp_path_factory.mktemp("adapter")
    path, merged = merged_checkpoint(folder, llama, seed=3, rank=8)
    with make_llm(merged, plugins=load_plugins(only=[])) as llm:
        return LoRARequest("one", 1, path), generate(llm, PROMPTS, GREEDY)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="captured"),
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({"enforce_eager": True, "max_num_batched_tokens": 16, "async_scheduling": False}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 12, "max_model_len": 176}, id="preempted"),
    ],
)
def test_greedy_ids_are_those_of_the_layers(plugins, calls, llama, expected, settings):
    with make_llm(llama, plugins=plugins, **settings) as llm:
        for _ in range(2):  # then from the prefix cache
            assert generate(llm, PROMPTS, GREEDY) == expected
        assert llm.llm_engine.info.report.choices["step kernel"] == "one"
        assert "step kernel" in start_table(llm.llm_engine.info, llm.llm_engine.model)
    assert calls


def test_logprobs_and_penalties_follow_it(plugins, calls, llama):
    params = SamplingParams(
        temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3, repetition_penalty=1.3, prompt_logprobs=1
    )
    found = []
    for kernel in ("one", "none"):
        with make_llm(llama, plugins=plugins, step_kernel=kernel) as llm:
            (output,) = llm.generate({"prompt_token_ids": PROMPTS[3]}, params, use_tqdm=False)
            assert len(output.prompt_logprobs) == len(PROMPTS[3])
            found.append((output.outputs[0].token_ids, pytest.approx(output.outputs[0].cumulative_logprob, abs=1e-2)))
        assert bool(calls) and calls.clear() is None if kernel == "one" else not calls
    assert found[0][0] == found[1][0] and found[0][1].expected == found[1][1]


def test_drafts_are_computed_by_the_layers(plugins, calls, llama, expected):
    with make_llm(llama, plugins=plugins, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert generate(llm, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="captured"),
        pytest.param({"enforce_eager": True}, id="eager"),
        pytest.param({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, id="with-drafts"),
    ],
)
def test_steps_with_adapters_are_computed_by_the_layers(plugins, calls, llama, expected, adapted, settings):
    lora, merged = adapted
    with make_llm(llama, plugins=plugins, step_kernel="one", enable_lora=True, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [{"prompt_token_ids": prompt} for prompt in PROMPTS], GREEDY, use_tqdm=False,
                lora_request=[None, lora, None, lora, lora],
            )  # fmt: skip
            found = [list(output.outputs[0].token_ids) for output in outputs]
            assert found == [merged[i] if i in (1, 3, 4) else expected[i] for i in range(len(PROMPTS))]
        calls.clear()
        assert generate(llm, PROMPTS[:1], GREEDY) == expected[:1]
        assert calls or "enforce_eager" not in settings, "steps without an adapter are the kernel's"


def test_one_that_may_not_be_recorded_leaves_no_graphs(plugins, calls, llama, expected, monkeypatch):
    from pelton_one_step.kernel import OneStepStep

    monkeypatch.setattr(OneStepStep, "is_recordable", False)
    with make_llm(llama, plugins=plugins) as llm:
        assert any("step kernel OneStepStep may not be recordable" in note for note in llm.llm_engine.info.report.notes)
        assert generate(llm, PROMPTS, GREEDY) == expected


def test_one_that_refuses_says_why(plugins, calls, llama, tmp_path):
    qwen = str(make_tiny_checkpoint(tmp_path / "qwen", "qwen2", with_tokenizer=False))
    with make_llm(qwen, plugins=plugins) as llm:
        assert "step kernel" not in llm.llm_engine.info.report.choices
        assert "step kernel one: architecture Qwen2ForCausalLM" in llm.llm_engine.info.report.notes
        generate(llm, PROMPTS[:2], GREEDY)
    with pytest.raises(ConfigError, match="step_kernel is 'one': one: architecture Qwen2ForCausalLM"):
        make_llm(qwen, plugins=plugins, step_kernel="one")
    with pytest.raises(ConfigError, match="step_kernel is 'two': available: one"):
        make_llm(llama, plugins=plugins, step_kernel="two")
    with pytest.raises(ConfigError, match="does not handle quantization=q8_0"):
        make_llm(llama, plugins=plugins, step_kernel="one", quantization="q8_0")
    assert not calls
