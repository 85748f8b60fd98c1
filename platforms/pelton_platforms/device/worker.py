"""`DeviceWorker`: one device's model, KV pool and runner. Every platform's worker unless it names its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.kv_cache import cache_specs
from pelton.config.adjust import take_settings
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.logging import phase
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.worker.interface import Worker, WorkerContext
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.make_model import check_dtype, make_model
from pelton_platforms.device.profiling import Profiling
from pelton_platforms.device.start import Start
from pelton_platforms.device.start_report import make_report
from pelton_platforms.device.steps.step_shapes import padding_shape

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig
    from pelton.model.interface import CausalLM
    from pelton_platforms.device.adapters import AdapterStore
    from pelton_platforms.device.graphs.capture_plan import CaptureQueue
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.sleeping import Sleep
    from pelton_platforms.device.steps.model_runner import ModelRunner


class DeviceWorker(Worker):
    """Weights by the loader of the checkpoint's form, attention and ops by what plugins offer for the device."""

    loaded: LoadedModel
    runner: ModelRunner
    plan: KVCachePlan

    def init_device(self) -> None:
        self.phase_s: dict[str, float] = {}
        self.weights_bytes = 0
        self.notes: list[str] = []
        self._captures: CaptureQueue | None = None
        self._sleep: Sleep | None = None
        self._profiling = Profiling()
        scheduler = self.config.scheduler
        self.max_num_seqs = scheduler.max_num_seqs or self.platform.default_max_num_seqs
        self.max_num_tokens = scheduler.max_num_batched_tokens or self.platform.default_max_num_batched_tokens
        with phase("device", self.phase_s):
            self.platform.init_device(self.config, self.rank)
            self.choices = take_settings(self.config, self.plugins, self.platform.device_type)
            self.device = self.platform.device(self.rank)
        if not isinstance(self.device, torch.device):
            raise TypeError(f"device() gives {self.device!r}, not a torch.device")
        check_dtype(self.model_info, self.platform)

    def load_model(self) -> None:
        context = WorkerContext(
            config=self.config, model=self.model_info, platform=self.platform, plugins=self.plugins, rank=self.rank,
            parallel=self.parallel,
        )  # fmt: skip
        with phase("build model", self.phase_s):
            self.loaded = make_model(
                context, device=self.device, max_num_seqs=self.max_num_seqs, max_num_tokens=self.max_num_tokens,
                choices=self.choices, notes=self.notes,
            )  # fmt: skip
        self._start = Start(self.loaded, self.phase_s)
        self.weights_bytes = self._start.load_weights()

    @property
    def build(self) -> BuildConfig:
        return self.loaded.build

    @property
    def model(self) -> CausalLM:
        model: CausalLM = self.loaded.model
        return model

    @property
    def adapters(self) -> AdapterStore | None:
        return self.loaded.adapters

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return cache_specs(self.loaded.build)

    def available_kv_cache_bytes(self) -> int:
        return self._start.find_room(self.weights_bytes)

    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self.plan = plan
        self.runner = self._start.make_runner(plan)

    def warm_up(self) -> None:
        self._captures = self._start.warm_up(self.runner)

    def fit_step(self) -> StepFit | None:
        return self._start.fit_step(self.runner)

    def prepare_ahead(self) -> bool:
        """Capture one more graph, of those that are left."""
        return self._captures is not None and self._captures.capture_next()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        if self.adapters is not None and (output.adapter_slots or output.dropped_adapters):
            self.adapters.place(output.adapter_slots, output.dropped_adapters)
        return self.runner.execute(output)

    @torch.inference_mode()
    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        return self.runner.sample(masks)

    def bring_masks(self, masks: GrammarMasks) -> None:
        self.runner.bring_masks(masks)

    def mask_room(self, step_id: int) -> Any:
        return self.runner.mask_room(step_id)

    def load_adapter(self, load_id: int, name: str, path: str) -> None:
        """Read an adapter into host memory; from any thread. `SchedulerOutput.adapter_slots` brings it to the device."""
        assert self.adapters is not None, "enable_lora is set"
        self.adapters.load(load_id, name, path)

    @torch.inference_mode()
    def execute_dummy_batch(self) -> None:
        """Run one row of padding through the model: ranks that have no request meet the collectives of those that have."""
        self.runner.run_padding(padding_shape(1, self.model_info.max_model_len))

    def expert_load(self, reset: bool = False) -> dict[str, list[int]]:
        """See `read_expert_load`."""
        from pelton_platforms.device.expert_load import read_expert_load

        return read_expert_load(self.loaded, reset=reset)

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`. level 1: weights go to the host; 2: they are dropped."""
        from pelton_platforms.device.sleeping import Sleep

        self._sleep = Sleep(self, level)

    def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back what `tags` name (weights, kv_cache), all when there are none; True when the worker is awake."""
        return self._sleep is None or self._sleep.wake_up(tags)

    def start_profile(self, folder: str) -> None:
        """Record what this process and its device do, until `stop_profile`."""
        self._profiling.start(folder, self.rank)

    def stop_profile(self) -> str:
        """Write the trace of torch's profiler; return its file."""
        return self._profiling.stop()

    def drop_runner(self) -> None:
        """Drop the KV pool, captured steps and the state of the batch."""
        self._captures = None
        del self.runner
        if self.adapters is not None:
            self.adapters.by_row = None

    def drop_model(self) -> None:
        """Drop the model, and what was bound to it."""
        del self.loaded, self._start

    def check_device(self) -> None:
        if self.runner.awaits_masks:  # it has work that will not end before the caller goes on
            torch.accelerator.current_stream().query()
        else:
            self.platform.synchronize()

    def report(self) -> DeviceReport:
        runner = self.__dict__.get("runner")  # there with the KV cache
        return make_report(self.loaded, runner, weights_bytes=self.weights_bytes, phase_s=self.phase_s)

    def shutdown(self) -> None:
        """Let go of the model and the pool: their memory is free once nothing else refers to it."""
        runner = self.__dict__.get("runner")
        for connector in runner.connectors.values() if runner is not None else ():
            connector.shutdown()
        for name in ("runner", "_captures", "_sleep", "loaded", "_start"):
            self.__dict__.pop(name, None)
