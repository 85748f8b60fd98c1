"""An engine core over an executor that answers at once: what is left of a step is the host's own work."""

from __future__ import annotations

from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.engine.in_process import InProcessClient
from pelton.executor.interface import Executor, ExecutorContext, StepHandle
from pelton.kv_cache.spec import FullAttentionSpec, KVCachePlan, KVCacheSpec
from pelton.messages.report import DeviceReport
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.resolved import ResolvedModel
from pelton.plugins import load_plugins

TOKEN = 5
VOCAB_SIZE = 1000
MAX_STEP_TOKENS = 8192


class _Done(StepHandle):
    def __init__(self, output: ModelOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def result(self, timeout_s: float | None = None) -> ModelOutput:
        return self._output


class NullExecutor(Executor):
    """Every row that samples gets the same token."""

    def __init__(self, context: ExecutorContext) -> None:
        self._block_size = context.config.kv_cache.block_size

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": FullAttentionSpec(block_size=self._block_size, num_kv_heads=1, head_dim=16, dtype="bfloat16")}

    def available_kv_cache_bytes(self) -> int:
        return 2**30

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        pass

    def execute(self, output: SchedulerOutput) -> StepHandle:
        tokens = [[TOKEN] if samples else [] for samples in output.samples]
        return _Done(ModelOutput(step_id=output.step_id, token_ids=tokens))

    def sample(self, masks: GrammarMasks) -> None:
        raise AssertionError("no request here has a grammar")

    def call(self, method: str, *args: Any) -> Any:
        raise AssertionError(f"nothing calls {method} here")

    def report(self) -> DeviceReport:
        return DeviceReport(device="no device: steps are answered at once")

    def shutdown(self) -> None:
        pass


def null_client(config: EngineConfig, *, max_model_len: int, max_num_seqs: int) -> InProcessClient:
    """An engine for `max_num_seqs` requests of full length."""
    from pelton.engine.core import EngineCore

    num_blocks = 1 + max_num_seqs * -(-max_model_len // config.kv_cache.block_size)
    replace = msgspec.structs.replace
    config = replace(
        config,
        scheduler=replace(config.scheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=MAX_STEP_TOKENS),
        kv_cache=replace(config.kv_cache, num_gpu_blocks_override=num_blocks),
    )
    model = ResolvedModel(
        name="null", path="", weights_format="dummy", hf_config={}, architecture="none", dtype="bfloat16",
        max_model_len=max_model_len, vocab_size=VOCAB_SIZE, eos_token_ids=[0], generation_config={},
        tokenizer_path=None,
    )  # fmt: skip
    plugins = load_plugins(only=[])
    context = ExecutorContext(config=config, model=model, plugins=plugins)
    core = EngineCore(config, model, plugins, executor=NullExecutor(context))
    return InProcessClient.over(core)
