"""Conformance of executors: what any implementation has to keep, run with pytest.

Subclass `ExecutorConformance` in a test module and set `executor_class`. It runs a tiny Llama with random weights (load
format "dummy"), so a plugin that offers `LlamaForCausalLM` has to be installed, as the built-in one is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from pelton.config import EngineConfig
from pelton.errors import NotSupportedError, PeltonError
from pelton.executor.interface import Executor, ExecutorContext, StepHandle
from pelton.kv_cache.planner import plan_kv_cache
from pelton.kv_cache.spec import KVCachePlan
from pelton.messages.step import GrammarMasks, ModelOutput, NewRequest, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.plugins import Plugins, load_plugins
from pelton.sampling_params import SamplingParams

VOCAB = 128
MAX_MODEL_LEN = 64
_BLOCKS_PER_REQUEST = MAX_MODEL_LEN // 16
_TIMEOUT_S = 60.0


def tiny_model() -> ResolvedModel:
    """A Llama of a few thousand parameters that needs no file."""
    return ResolvedModel(
        name="tiny", path="", weights_format="dummy", architecture="LlamaForCausalLM", dtype="float32",
        max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB, eos_token_ids=[2], generation_config={}, tokenizer_path=None,
        hf_config={
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32,
            "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 8, "max_position_embeddings": MAX_MODEL_LEN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False,
        },
    )  # fmt: skip


def new_request(slot: int, prompt: list[int], num_groups: int, **params: Any) -> NewRequest:
    """A request with all the blocks that it may ever need; slots do not share any."""
    first = 1 + slot * _BLOCKS_PER_REQUEST
    return NewRequest(
        request_id=f"r{slot}", slot=slot, token_ids=prompt, num_prompt_tokens=len(prompt), seed=slot,
        sampling_params=SamplingParams(**{"temperature": 0.0, "max_tokens": 40, **params}),
        block_ids=[list(range(first, first + _BLOCKS_PER_REQUEST))] * num_groups,
    )  # fmt: skip


class ExecutorConformance:
    executor_class: ClassVar[type[Executor]]
    settings: ClassVar[dict[str, Any]] = {}
    """More flat settings, such as sizes of parallel groups."""

    def plugins(self) -> Plugins:
        """Return the plugins that it runs with: all that are installed."""
        return load_plugins()

    def make_executor(self, context: ExecutorContext) -> Executor:
        return self.executor_class(context)

    @pytest.fixture
    def executor(self) -> Iterator[Executor]:
        flat = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "load_format": "dummy", **self.settings}
        executor = self.make_executor(
            ExecutorContext(config=EngineConfig.from_flat(**flat), model=tiny_model(), plugins=self.plugins())
        )
        yield executor
        executor.shutdown()

    @pytest.fixture
    def plan(self, executor: Executor) -> KVCachePlan:
        return self.make_plan(executor)

    def make_plan(self, executor: Executor) -> KVCachePlan:
        assert executor.available_kv_cache_bytes() > 0
        plan = plan_kv_cache(
            executor.kv_cache_specs(),
            2**22,
            num_blocks_override=1 + 4 * _BLOCKS_PER_REQUEST,
            max_model_len=MAX_MODEL_LEN,
        )
        executor.initialize_kv_cache(plan)
        return plan

    def start(self, step_id: int, slot: int, plan: KVCachePlan, prompt: list[int], **params: Any) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=step_id, new=[new_request(slot, prompt, len(plan.groups), **params)], slots=[slot],
            num_scheduled=[len(prompt)], samples=[True], max_query_len=len(prompt), max_seq_len=len(prompt),
            total_num_scheduled_tokens=len(prompt),
        )  # fmt: skip

    def go_on(self, step_id: int, slots: list[int], length: int) -> SchedulerOutput:
        return SchedulerOutput(
            step_id=step_id, slots=slots, num_scheduled=[1] * len(slots), samples=[True] * len(slots), max_query_len=1,
            max_seq_len=length, total_num_scheduled_tokens=len(slots),
        )  # fmt: skip

    def result(self, handle: StepHandle) -> ModelOutput:
        return handle.result(_TIMEOUT_S)

    def generate(self, executor: Executor, plan: KVCachePlan, slot: int, prompt: list[int], count: int) -> list[int]:
        tokens = self.result(executor.execute(self.start(0, slot, plan, prompt))).token_ids[0]
        for done in range(1, count):
            output = self.go_on(done, [slot], len(prompt) + done)
            tokens = tokens + self.result(executor.execute(output)).token_ids[0]
        return tokens

    def test_specs_and_report(self, executor: Executor) -> None:
        assert len(executor.kv_cache_specs()) == 2
        report = executor.report()
        assert report.device and report.platform and report.attention_backend and report.weights_bytes > 0
        assert executor.max_concurrent_steps >= 1

    def test_open_steps_give_what_steps_one_by_one_give(self, executor: Executor, plan: KVCachePlan) -> None:
        """The values of a step's tokens are not needed to launch the next one."""
        prompt = [5, 9, 100, 7]
        expected = self.generate(executor, plan, 0, prompt, 12)
        handles = [executor.execute(self.start(0, 1, plan, prompt))]
        tokens: list[int] = []
        for step in range(1, 12):
            handles.append(executor.execute(self.go_on(step, [1], len(prompt) + step)))
            if len(handles) == executor.max_concurrent_steps:
                tokens += self.result(handles.pop(0)).token_ids[0]
        for handle in handles:
            tokens += self.result(handle).token_ids[0]
        assert tokens == expected

    def test_results_name_their_step(self, executor: Executor, plan: KVCachePlan) -> None:
        handle = executor.execute(self.start(41, 0, plan, [1, 2, 3]))
        assert self.result(handle).step_id == 41
        assert handle.ready()
        assert self.result(handle).step_id == 41

    def test_sampling_with_a_seed_is_repeatable(self, executor: Executor, plan: KVCachePlan) -> None:
        outputs = [
            self.result(executor.execute(self.start(step, 2, plan, [3, 4], temperature=1.0))).token_ids
            for step in (0, 1)
        ]
        assert outputs[0] == outputs[1]

    def test_step_with_grammar_gets_its_masks_later(self, executor: Executor, plan: KVCachePlan) -> None:
        output = self.start(7, 0, plan, [1, 2, 3])
        output.grammar_rows = [0]
        handle = executor.execute(output)
        time.sleep(0.05)
        assert not handle.ready()
        allowed = np.zeros(VOCAB, dtype=np.uint8)
        allowed[77] = 1
        bitmask = np.packbits(allowed, bitorder="little").tobytes()
        executor.sample(GrammarMasks(step_id=7, bitmask=bitmask, num_masks=[1]))
        assert self.result(handle).token_ids == [[77]]

    def test_failed_step_raises_in_result_and_the_next_one_runs(self, executor: Executor, plan: KVCachePlan) -> None:
        broken = self.go_on(0, [0], 1)
        broken.block_appends = [(len(plan.groups) + 5, 0, 0, [1])]  # a group that is not there
        handle = executor.execute(broken)
        with pytest.raises(Exception, match=r".+"):
            self.result(handle)
        executor.check_health()
        assert len(self.generate(executor, plan, 0, [1, 2], 3)) == 3

    def test_unknown_method_is_refused_by_name(self, executor: Executor) -> None:
        with pytest.raises(NotSupportedError, match="fly"):
            executor.call("fly")

    def test_shutdown_is_prompt_and_idempotent(self, executor: Executor, plan: KVCachePlan) -> None:
        executor.execute(self.start(0, 0, plan, [1, 2, 3]))
        started = time.monotonic()
        executor.shutdown()
        executor.shutdown()
        assert time.monotonic() - started < 10
        with pytest.raises(PeltonError):
            executor.check_health()
