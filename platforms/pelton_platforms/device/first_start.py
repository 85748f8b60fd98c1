"""A first start with a model: kernels that steps will launch are compiled before a request waits for them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pelton.kv_cache.planner import plan_kv_cache, with_num_blocks
from pelton.logging import phase
from pelton_platforms.device.graphs.graph_setup import setup_graphs
from pelton_platforms.device.make_runner import make_runner
from pelton_platforms.device.warm_up import WarmUpPlan, run_with_few_layers

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.memory import StepMemory
    from pelton_platforms.device.steps.model_runner import ModelRunner

_PLENTY_BYTES = 2**50  # nothing of it is allocated


class FirstStart:
    """Asks the platform, which finds out whether something has to be compiled. Its calls come in the order of a start."""

    def __init__(self, loaded: LoadedModel, memory: StepMemory, phase_s: dict[str, float]) -> None:
        self._loaded, self._memory, self._phase_s = loaded, memory, phase_s
        self._is_one = False  # something had to be compiled

    def compile_soon(self) -> None:
        """Before there are weights, beside their loading."""
        self._is_one = self._loaded.platform.compile_soon(self._run_early)

    def compile_largest_step(self) -> None:
        """Before it is run to see what memory it takes."""
        if not self._is_one:
            run = partial(run_with_few_layers, self._loaded.model, [self._memory.run_largest_step])
            self._is_one = self._loaded.platform.compile_ahead(run) > 0

    def compile_steps(self, runner: ModelRunner) -> None:
        """All others. Otherwise the first request of each kind waits seconds for a compiler, and all others with it."""
        plan, platform = WarmUpPlan.make(runner), self._loaded.platform
        run = partial(run_with_few_layers, self._loaded.model)
        if self._is_one or platform.compile_ahead(partial(run, plan.sentinels)):
            with phase("compile kernels", self._phase_s):
                platform.compile_ahead(partial(run, plan.all()))

    def _run_early(self) -> None:
        """The largest step and all others, over a pool of two blocks."""
        loaded, model = self._loaded, self._loaded.model
        notes, kv_cache, scheduler = list(loaded.notes), loaded.config.kv_cache, loaded.config.scheduler
        plan = plan_kv_cache(
            loaded.specs, _PLENTY_BYTES, max_model_len=loaded.info.max_model_len,
            disable_hybrid=kv_cache.disable_hybrid_kv_cache_manager, max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )  # fmt: skip
        with phase("list kernels", self._phase_s):
            run_with_few_layers(model, [self._memory.run_largest_step])
            runner = make_runner(loaded, with_num_blocks(plan, 2), loaded.build.ops.fork())
            try:
                setup_graphs(loaded, runner)
                run_with_few_layers(model, WarmUpPlan.make(runner).longest_first())
            finally:
                loaded.notes[:] = notes
                if runner.cache_scales is not None:
                    runner.cache_scales.remove()
