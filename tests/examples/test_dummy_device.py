"""The equality tests on a device that came as a plugin: it keeps the platform, worker and backend interfaces honest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pelton_e2e import greedy_reference, make_prompts

from pelton import LLM, SamplingParams
from pelton.config import EngineConfig
from pelton.testing.communicator import CommunicatorConformance
from pelton.testing.models import make_tiny_checkpoint
from pelton.testing.platform import PlatformConformance

pytestmark = pytest.mark.usefixtures("forks")
NUM_NEW_TOKENS = 24
LENGTHS = (1, 2, 15, 16, 17, 33, 100, 300)
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, detokenize=False)

SETTINGS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 16},
    "no-overlap": {"async_scheduling": False, "max_num_batched_tokens": 64},
    "preempted": {"max_model_len": 384, "max_num_batched_tokens": 16},  # and a pool as in SMALL_POOL
}
SMALL_POOL = {"mistral": 1 + 10, "gemma3": 1 + 24 + 5 * 8}
"""Blocks: the longest request fits, all do not. A window keeps few; 384 tokens of full attention take 24 (all others)."""


@pytest.fixture(scope="module", params=["llama", "mistral", "gemma3"])  # one of each kind of KV cache
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[Any], list[Any]]:
    path = make_tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    prompts = make_prompts(320, LENGTHS)
    outputs, gap = greedy_reference(str(path), prompts, NUM_NEW_TOKENS)
    assert gap > 1e-4
    return request.param, path, prompts, outputs


def make_llm(path: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {
        "device": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "max_model_len": 512,
        "disable_log_stats": True, "kv_cache_memory_bytes": 32 * 2**20,
    }  # fmt: skip
    return LLM(model=str(path), **(defaults | settings))


def generate(llm: LLM, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.covering(1)  # each kind of cache and each setting; with each other on a CPU, in e2e
@pytest.mark.parametrize("name", SETTINGS)
def test_ids_equal_transformers_on_the_dummy_device(installed, case, name):
    family, path, prompts, expected = case
    settings = dict(SETTINGS[name])
    if name == "preempted":
        settings["num_gpu_blocks_override"] = SMALL_POOL.get(family, 1 + 24)
    with make_llm(path, **settings) as llm:
        report = llm.llm_engine.info.report
        assert (report.platform, report.attention_backend) == ("dummy", "dummy_loop")
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected  # from the prefix cache
        assert llm.kv_cache_usage() == 0.0
        assert (llm.num_preemptions() > 0) == (name == "preempted")


def test_seeded_samples_equal_those_of_the_cpu_platform(installed, case):
    family, path, prompts, _ = case
    params = SamplingParams(
        n=2, temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=12, ignore_eos=True, detokenize=False
    )
    answers = []
    for device in ("dummy", "cpu"):
        with make_llm(path, device=device) as llm:
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
            answers.append([[list(completion.token_ids) for completion in output.outputs] for output in outputs])
    assert answers[0] == answers[1], family
    assert answers[0][0][0] != answers[0][0][1], "two samples of one prompt differ"


@pytest.mark.parametrize("case", ["gemma3"], indirect=True)
def test_two_ranks_answer_over_the_devices_own_communicator(installed, case):
    """Sums between ranks go over the plugin's sockets: the device type has no other communicator."""
    _, path, prompts, expected = case
    with make_llm(path, tensor_parallel_size=2, max_num_batched_tokens=48) as llm:
        assert generate(llm, prompts) == expected
        assert generate(llm, prompts) == expected  # from the prefix cache


class TestDummyCommunicator(CommunicatorConformance):
    load = "pelton_dummy_device.communicator:SocketCommunicator"
    size = 3

    @pytest.fixture(autouse=True)
    def _installed(self, installed):
        """For the ranks' processes, too."""


class TestDummyPlatform(PlatformConformance):
    @pytest.fixture
    def platform(self, installed, config):
        from pelton_dummy_device.platform import DummyPlatform

        platform = DummyPlatform()
        platform.init_device(config, 0)
        return platform


def test_the_documented_command_has_room_for_the_default_model(installed):
    """SmolLM2-135M in float32: 8192 tokens take 180.4 MiB."""
    from pelton_dummy_device.platform import DummyPlatform

    room = DummyPlatform().available_kv_cache_bytes(EngineConfig(), weights_bytes=0, peak_activation_bytes=0)
    assert room >= 181 * 2**20
