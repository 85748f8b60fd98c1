"""`DeviceWorker`: one device's model, KV pool and runner. Every platform's worker unless it names its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from pelton.attention.kv_cache import cache_specs
from pelton.config.adjust import take_settings
from pelton.errors import ConfigError, NotSupportedError
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.kv_transfer.select import find_connector
from pelton.logging import phase
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.build import BuildConfig, make_build_config
from pelton.model.interface import CausalLM
from pelton.model.registry import build_model
from pelton.worker.interface import Worker
from pelton.worker.pending import PendingOutput
from pelton_platforms.device.device_memory import use_device_memory
from pelton_platforms.device.first_start import FirstStart
from pelton_platforms.device.graphs.capture_plan import CaptureQueue, plan_captures
from pelton_platforms.device.graphs.graph_setup import limits_of_stages, setup_graphs
from pelton_platforms.device.load_weights import load_weights
from pelton_platforms.device.loaded import LoadedModel
from pelton_platforms.device.make_runner import make_runner
from pelton_platforms.device.memory import StepMemory, module_bytes
from pelton_platforms.device.profiling import Profiling
from pelton_platforms.device.sleeping import Sleep
from pelton_platforms.device.speed import fit_step
from pelton_platforms.device.step_kernel import make_step_kernel
from pelton_platforms.device.steps.model_runner import ModelRunner
from pelton_platforms.device.steps.step_shapes import padding_shape
from pelton_platforms.device.work import work_of

if TYPE_CHECKING:
    from pelton.spec_decode.drafter import Drafter
    from pelton_platforms.device.adapters import AdapterStore

_WARM_UP_TOKENS = 16


class DeviceWorker(Worker):
    """Weights by the loader of the checkpoint's form, attention and ops by what plugins offer for the device."""

    build: BuildConfig
    model: CausalLM
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
        dtype, known = self.model_info.dtype, self.platform.supported_dtypes
        if dtype not in known:
            raise ConfigError(
                f"dtype is {dtype!r}, which platform {self.platform.name!r} does not compute in; use one of {', '.join(known)}."
            )

    @torch.inference_mode()
    def load_model(self) -> None:
        with phase("build model", self.phase_s):
            parallel = self.parallel
            if parallel.size > 1:
                from pelton_platforms.device.steps.logit_shares import LogitShares

                parallel = LogitShares(parallel)
            self.build = make_build_config(
                self.config, self.model_info, self.plugins, device=self.device, device_type=self.platform.device_type,
                max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_tokens,
                capability=self.platform.capability(self.rank), parallel=parallel,
            )  # fmt: skip
            use_device_memory(self.build)
            memory = None
            if self.config.lora.enable_lora:
                from pelton_platforms.device.adapter_memory import make_adapter_memory

                self.build.adapters = memory = make_adapter_memory(self.config, self.device, self.max_num_tokens)
            self.model = build_model(self.build, self.model_info.architecture, self.plugins)
            self._graph_limits = limits_of_stages(self.build, self.model)
            self.adapters: AdapterStore | None = None
            if memory is not None:
                from pelton_platforms.device.adapters import make_adapters

                self.adapters = make_adapters(self.build, memory)
            self.drafter: Drafter | None = None
            if self.config.speculative.method is not None or self.config.speculative.model is not None:
                from pelton_platforms.device.drafters import make_drafter

                self.drafter = make_drafter(self)
            self.step_kernel = None if self.drafter is not None else make_step_kernel(self)
        self._memory = StepMemory(self.loaded)
        self._first_start = FirstStart(self.loaded, self._memory, self.phase_s)
        self._first_start.compile_soon()
        self.weights_bytes = load_weights(self.loaded, self.phase_s)
        if self.drafter is not None:
            with phase("load draft weights", self.phase_s):
                self.drafter.load_weights()
            self.weights_bytes += module_bytes(self.drafter)

    @property
    def loaded(self) -> LoadedModel:
        return LoadedModel(
            config=self.config, info=self.model_info, platform=self.platform, plugins=self.plugins, build=self.build,
            model=self.model, specs=self.kv_cache_specs(), device=self.device, max_num_seqs=self.max_num_seqs,
            max_num_tokens=self.max_num_tokens, adapters=self.adapters, notes=self.notes, step_kernel=self.step_kernel,
            drafter=self.drafter, graph_limits=self._graph_limits,
        )  # fmt: skip

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return cache_specs(self.build)

    @torch.inference_mode()
    def available_kv_cache_bytes(self) -> int:
        with phase("profile", self.phase_s):
            self._first_start.compile_largest_step()
            return self._memory.find_room(self.weights_bytes)

    @torch.inference_mode()
    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        self.plan = plan
        with phase("allocate KV cache", self.phase_s):
            try:
                self.runner = make_runner(self.loaded, plan, self.build.ops)
            except MemoryError as error:
                raise self._memory.why_no_cache(plan, self.config.kv_cache, error) from error
            except torch.OutOfMemoryError as error:
                raise self._memory.why_no_state() from error
            stages = self.parallel.stages
            rank = self.parallel.rank + (0 if stages is None else stages.rank * self.parallel.size)
            found = find_connector(self.config, self.model_info, self.plugins, plan, rank=rank)
            if found is not None:
                connector, context = found
                self.runner.add_connector(context.name, connector.for_worker(context))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Small steps without graphs: libraries load and pick their code paths here, not in the first request. Then the
        graphs."""
        setup_graphs(self.loaded, self.runner)
        self._first_start.compile_steps(self.runner)
        with phase("warm up", self.phase_s):
            self.runner.warm_up(min(_WARM_UP_TOKENS, self.max_num_tokens))
            self.platform.synchronize()
        graphs = self.runner.graphs
        if graphs is not None and not graphs.runs_calls:
            self._memory.make_room_for_captures(graphs)
        self._memory.take_for_steps()
        if graphs is not None:
            self._captures = CaptureQueue(plan_captures(self.runner, graphs), graphs, self.platform.synchronize)
            self._captures.capture_first(self.phase_s)
        self.platform.worker_ready()

    @torch.inference_mode()
    def fit_step(self) -> StepFit | None:
        target_s = self.platform.target_step_s
        if target_s is None:
            return None
        with phase("measure speed", self.phase_s):
            return fit_step(self.loaded, self.runner, target_s)

    @torch.inference_mode()
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

    @torch.inference_mode()
    def expert_load(self, reset: bool = False) -> dict[str, list[int]]:
        """How many tokens each expert of each layer was given since the start or the last reset; layers by their modules' names, experts of
        all ranks. Raises `NotSupportedError` where nothing is counted, and where stages have the layers."""
        model: Any = self.model
        loads = {name: getattr(module, "expert_load", None) for name, module in model.named_modules()}
        counters = {name: counter for name, counter in loads.items() if counter is not None}
        if not counters:
            raise NotSupportedError(
                "No layer counts what its experts get. Set plugin_config.models.count_expert_load, for a model with experts."
            )
        if self.parallel.stages is not None:
            raise NotSupportedError(
                "Stages (pipeline_parallel_size) do not tell each other what their experts get. Use one stage."
            )
        total = torch.stack(list(counters.values()))
        if reset:
            for counter in counters.values():
                counter.zero_()
        if self.build.has_whole_experts:  # else every rank counts all tokens
            total = self.parallel.all_reduce(total)
        found = dict(zip(counters, total.tolist(), strict=True))
        for name, load in found.items():  # experts may have changed places
            placement = getattr(model.get_submodule(name), "placement", range(len(load)))
            found[name] = [0] * (max(placement) + 1)
            for expert, count in zip(placement, load, strict=True):
                found[name][expert] += count
        return found

    @torch.inference_mode()
    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`. level 1: weights go to the host; 2: they are dropped."""
        self._sleep = Sleep(self, level)

    @torch.inference_mode()
    def wake_up(self, tags: Sequence[str]) -> bool:
        """Take back what `tags` name (weights, kv_cache), all when there are none; True when the worker is awake."""
        if self._sleep is not None and self._sleep.wake_up(tags):
            self._sleep = None
        return self._sleep is None

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
        for name in ("model", "build", "adapters", "drafter", "step_kernel", "_memory", "_first_start"):
            self.__dict__.pop(name, None)

    def check_device(self) -> None:
        if self.runner.awaits_masks:  # it has work that will not end before the caller goes on
            torch.accelerator.current_stream().query()
        else:
            self.platform.synchronize()

    def report(self) -> DeviceReport:
        selections = self.build.attention.selections()
        runner = self.__dict__.get("runner")  # there with the KV cache
        drafts = None if runner is None else runner.ops.drafts
        processors = None if runner is None else runner.state.host.processors
        return DeviceReport(
            device=self.platform.describe(self.rank),
            platform=self.platform.name,
            attention_backend=", ".join(dict.fromkeys(selection.name for selection in selections)),
            attention_reason="; ".join(dict.fromkeys(selection.reason for selection in selections)),
            choices=self.choices,
            weights_bytes=self.weights_bytes,
            work=work_of(self.loaded),
            phase_s=self.phase_s,
            notes=self.notes,
            logits_processors=[] if processors is None else processors.names,
            num_draft_tokens=drafts.width - 1 if drafts is not None and drafts.are_made_here else 0,
            adapter_modules=[] if self.adapters is None else self.adapters.layers.target_modules,
        )

    def shutdown(self) -> None:
        """Let go of the model and the pool: their memory is free once nothing else refers to it."""
        runner = self.__dict__.get("runner")
        for connector in runner.connectors.values() if runner is not None else ():
            connector.shutdown()
        for name in ("runner", "_captures", "_sleep"):
            self.__dict__.pop(name, None)
        self.drop_model()
