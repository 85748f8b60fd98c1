"""`DeviceWorker`: one device's model, KV pool and runner. Every platform's worker unless it names its own."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pelton.attention.interface import AttentionNeeds
from pelton.attention.kv_cache import bind_caches, cache_specs
from pelton.attention.metadata import BatchDescriptor, ForwardBatch
from pelton.attention.support import GraphSupport
from pelton.config import CUDAGraphMode
from pelton.config.adjust import take_settings
from pelton.errors import ConfigError
from pelton.graphs.dispatcher import MAX_MIXED_TOKENS, GraphDispatcher
from pelton.graphs.modes import captures_decode, captures_pieces, lower_mode, requested_mode
from pelton.kv_cache.planner import plan_groups, plan_kv_cache, with_num_blocks
from pelton.kv_cache.spec import KVCachePlan, KVCacheSpec
from pelton.kv_transfer.select import find_connector
from pelton.layers.embedding import VocabMatrix
from pelton.layers.linear import LinearModule
from pelton.logging import Progress, phase
from pelton.messages.report import DeviceReport, StepFit
from pelton.messages.step import GrammarMasks, ModelOutput, SchedulerOutput
from pelton.model.build import BuildConfig, make_build_config
from pelton.model.interface import CausalLM
from pelton.model.loading import LazyWeight, WeightLoader
from pelton.model.registry import build_model
from pelton.ops.selector import OpSelector
from pelton.sampling.side_tables import side_table_bytes
from pelton.spec_decode.select import make_draft_proposer
from pelton.worker.batch_state import BatchState
from pelton.worker.inputs import InputBuffers, padding_shape
from pelton.worker.interface import Worker
from pelton.worker.kv_pool import KVPool, LayerCache
from pelton.worker.model_runner import ModelRunner
from pelton.worker.pending import PendingOutput
from pelton.worker.rehearsal import few_layers, rehearsal
from pelton.worker.speed import LEAST_STEP_TOKENS, fitting_tokens, measure_speed
from pelton.worker.step_graphs import StepGraphs
from pelton.worker.step_ops import StepOps

_WARM_UP_TOKENS = 16
_FIRST_GRAPH_TOKENS = 8
"""Graphs up to this size are captured at the start; larger ones in idle moments, or when a step first has their size."""

_HIDING_OPERATIONS = 6e11
"""Of a layer's products that hide the launches of a layer without graphs: 0.86 ms at the 700 TFLOP/s that large ones reach on an
H200. Those launches take a slow host 0.5 to 0.7 ms, one step in ten up to 1 (docs/performance.md)."""
_MAX_PIECE_TOKENS = 16_384

_PLENTY_BYTES = 2**50  # nothing of it is allocated

_ATTENTION_BYTES = 64 << 20
"""Of partial results of long contexts, which a backend keeps for a KV group: 8 kv heads of 128 numbers take about half."""


class DeviceWorker(Worker):
    """Weights by the loader of the checkpoint's form, attention and ops by what plugins offer for the device."""

    build: BuildConfig
    model: CausalLM
    runner: ModelRunner

    def init_device(self) -> None:
        self.phase_s: dict[str, float] = {}
        self.weights_bytes = 0
        self.notes: list[str] = []
        self._kv_cache_room = 0  # bytes, as the platform found it
        self._peak_bytes = 0  # of the largest step, where the platform can measure it
        self._num_device_drafts = 0
        self._is_first_start = False  # with this model: something had to be compiled
        self._to_capture: deque[tuple[CUDAGraphMode, BatchDescriptor]] = deque()
        scheduler = self.config.scheduler
        self.max_num_seqs = scheduler.max_num_seqs or self.platform.default_max_num_seqs
        self.max_num_tokens = scheduler.max_num_batched_tokens or self.platform.default_max_num_batched_tokens
        with phase("device", self.phase_s):
            self.platform.init_device(self.config, self.rank)
            self.choices = take_settings(self.config, self.plugins, self.platform.device_type)
            self.device = self.platform.device(self.rank)
        self._check_dtype()

    @torch.inference_mode()
    def load_model(self) -> None:
        with phase("build model", self.phase_s):
            self.build = make_build_config(
                self.config,
                self.model_info,
                self.plugins,
                device=self.device,
                device_type=self.platform.device_type,
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=self.max_num_tokens,
                capability=self.platform.capability(self.rank),
                parallel=self.parallel,
            )
            self.model = build_model(self.build, self.model_info.architecture, self.plugins)
        self._is_first_start = self.platform.compile_soon(self._run_early)
        loader = self._make_loader()
        expected = self.build.weights.expected()
        loader.expect(expected)
        item_bytes = self.build.dtype.itemsize
        total = sum(math.prod(shape) for shape in expected.values()) * item_bytes
        with phase("load weights", self.phase_s, total=total, unit="B") as progress:
            self.model.load_weights(_watched(loader.weights(), progress, item_bytes))
            self.build.ops.weights_loaded()
        self.weights_bytes = module_bytes(self.model)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return cache_specs(self.build)

    @torch.inference_mode()
    def available_kv_cache_bytes(self) -> int:
        """After the largest step has run, where the platform can say what it took; else after an estimate of it."""
        with phase("profile", self.phase_s):
            if not self._is_first_start:
                self._is_first_start = (
                    self.platform.compile_ahead(partial(self._run_few_layers, [self._run_largest_step])) > 0
                )
            peak = self.platform.measure_peak_bytes(self._run_largest_step)
            if peak is None:
                peak = self._estimate_peak_bytes()
            else:
                self._peak_bytes = peak
            self._kv_cache_room = self.platform.available_kv_cache_bytes(
                self.config, weights_bytes=self.weights_bytes, peak_activation_bytes=peak + self._state_bytes()
            )
            return self._kv_cache_room

    @torch.inference_mode()
    def initialize_kv_cache(self, plan: KVCachePlan) -> None:
        with phase("allocate KV cache", self.phase_s):
            try:
                self.runner = self._make_runner(plan, self.build.ops)
            except MemoryError as error:
                raise ConfigError(self._too_large(plan, error)) from error
            except torch.OutOfMemoryError as error:
                raise ConfigError(
                    f"The state of {self.max_num_seqs} requests takes about {self._state_bytes()} bytes, which are not left beside "
                    "the KV cache. Set num_gpu_blocks_override, kv_cache_memory_bytes, max_num_seqs or max_side_table_seqs lower."
                ) from error
            self._add_connector(plan)

    def _add_connector(self, plan: KVCachePlan) -> None:
        found = find_connector(self.config, self.model_info, self.plugins, plan)
        if found is not None:
            connector, context = found
            self.runner.add_connector(context.name, connector.for_worker(context))

    def _make_runner(self, plan: KVCachePlan, ops: OpSelector) -> ModelRunner:
        """With the pool that `plan` says."""
        bound = bind_caches(plan, self.build)
        caches = [LayerCache(one.name, one.group_id, one.views, type(one.spec).__name__) for one in bound.layers]
        pool = KVPool(plan.num_blocks, caches)
        state = BatchState(
            max_num_seqs=self.max_num_seqs,
            max_model_len=self.model_info.max_model_len,
            vocab_size=self.model_info.vocab_size,
            block_sizes=[group.spec.block_size for group in plan.groups],
            num_side_slots=self.config.scheduler.num_side_slots(self.max_num_seqs),
            device=self.device,
            num_parts=self._num_parts(),
        )
        buffers = InputBuffers(state, max_num_tokens=self.max_num_tokens, kernel_block_sizes=bound.kernel_block_sizes)
        step_ops = StepOps(ops, state, buffers)
        self._use_drafts(step_ops)
        return ModelRunner(
            self.model, state, buffers, bound.backends, pool, step_ops, num_staging_parts=4 * self._num_parts()
        )

    def _use_drafts(self, step_ops: StepOps) -> None:
        proposer = make_draft_proposer(self.config, self.model_info, self.plugins)
        if proposer is None:
            return
        on_device = self.config.speculative.drafts_on_device
        lookup = proposer.lookup if on_device or (on_device is None and self.device.type != "cpu") else None
        step_ops.use_drafts(proposer.max_draft_tokens, lookup)
        self._num_device_drafts = proposer.max_draft_tokens if lookup is not None else 0

    def _too_large(self, plan: KVCachePlan, error: MemoryError) -> str:
        kv_cache, num_bytes = self.config.kv_cache, sum(tensor.size_bytes for tensor in plan.tensors)
        names = ("num_gpu_blocks_override", "kv_cache_memory_bytes", "gpu_memory_utilization")
        name = next(name for name in names if getattr(kv_cache, name) is not None)
        room = self._kv_cache_room
        fits = (
            f": {room * plan.num_blocks // num_bytes} blocks, {room} bytes, were found to fit"
            if room < num_bytes
            else ""
        )
        return (
            f"{name} is {getattr(kv_cache, name)}: a KV cache of {plan.num_blocks} blocks takes {num_bytes} bytes, which "
            f"cannot be allocated ({error}). Set it lower{fits}."
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Small steps without graphs: libraries load and pick their code paths here, not in the first request. Then the
        graphs."""
        mode = self._graph_mode()
        if mode is not CUDAGraphMode.NONE:
            self._make_graphs(mode)
        self._compile_ahead()
        with phase("warm up", self.phase_s):
            self.runner.warm_up(min(_WARM_UP_TOKENS, self.max_num_tokens))
            self.platform.synchronize()
        graphs = self.runner.graphs
        if graphs is not None and not graphs.runs_calls:
            self._make_room(graphs)
        self._take_step_memory()
        if graphs is not None:
            self._capture(graphs)
        self.platform.worker_ready()

    def _run_early(self) -> None:
        """The largest step and all others, over a pool of two blocks, before there are weights."""
        notes = list(self.notes)
        kv_cache, scheduler = self.config.kv_cache, self.config.scheduler
        plan = plan_kv_cache(
            self.kv_cache_specs(), _PLENTY_BYTES, max_model_len=self.model_info.max_model_len,
            disable_hybrid=kv_cache.disable_hybrid_kv_cache_manager, max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )  # fmt: skip
        with phase("list kernels", self.phase_s):
            self._run_few_layers([self._run_largest_step])
            self.runner = self._make_runner(with_num_blocks(plan, 2), self.build.ops.fork())
            try:
                mode = self._graph_mode()
                if mode is not CUDAGraphMode.NONE:
                    self._make_graphs(mode)
                steps = rehearsal(self.runner)
                self._run_few_layers([*steps[-3::-1], *steps[-2:]])  # long prompts first: their kernels take longest
            finally:
                del self.runner
                self.notes[:] = notes

    def _run_few_layers(self, steps: Sequence[Callable[[], None]]) -> None:
        with few_layers(self.model):
            for step in steps:
                step()

    @torch.inference_mode()
    def fit_step(self) -> StepFit | None:
        """Padding is computed for it: attention over a long context is reckoned by its operations."""
        target_s = self.platform.target_step_s
        if target_s is None:
            return None

        def run(num_tokens: int) -> None:
            self.runner.run_padding(padding_shape(num_tokens, num_tokens))
            self.platform.synchronize()

        with phase("measure speed", self.phase_s):
            speed = measure_speed(run, self.max_num_tokens)
        least = max(LEAST_STEP_TOKENS, self.max_num_seqs, self.config.kv_cache.block_size)
        count = fitting_tokens(speed, target_s, least, self.max_num_tokens)
        if count < self.max_num_tokens:
            self.notes.append(
                f"max_num_batched_tokens {count}: {count / speed:.1f} s a step at the measured {speed:.0f} tokens/s"
            )
        return StepFit(num_tokens=count, context_tokens=context_tokens(self.model, self.build.cache_layers.values()))

    def _compile_ahead(self) -> None:
        """Compile what steps will launch, on a first start. Otherwise the first request of each kind waits seconds for a compiler, and
        all others with it."""
        steps = rehearsal(self.runner)
        if self._is_first_start or self.platform.compile_ahead(partial(self._run_few_layers, steps[-2:])):
            with phase("compile kernels", self.phase_s):
                self.platform.compile_ahead(partial(self._run_few_layers, steps))

    def _make_room(self, graphs: StepGraphs) -> None:
        """For what all captures compute in."""
        dispatcher = graphs.dispatcher
        most_tokens = max((sizes[-1] for sizes in dispatcher.decode_sizes.values() if sizes), default=0)
        num_bytes = self._step_bytes(max([most_tokens, *dispatcher.mixed_sizes]), most_tokens)
        try:
            graphs.make_room(num_bytes)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"Captured graphs compute in {num_bytes} bytes, which are not left beside the KV cache. Set num_gpu_blocks_override, "
                "kv_cache_memory_bytes, max_num_batched_tokens or max_num_seqs lower, or enforce_eager."
            ) from error

    def _take_step_memory(self) -> None:
        """Have torch take what the largest step needs, in one piece. Otherwise the first large steps under load take it
        from the driver, each in pieces of its own sizes."""
        try:
            torch.empty(self._peak_bytes, dtype=torch.uint8, device=self.device)
        except RuntimeError as error:
            self.notes.append(
                f"less memory is left than the largest step takes ({self._peak_bytes} bytes), so large steps may fail: set "
                f"num_gpu_blocks_override, kv_cache_memory_bytes or max_num_batched_tokens lower ({str(error).splitlines()[0]})"
            )

    def _graph_mode(self) -> CUDAGraphMode:
        """Return the mode that the settings ask for, lowered to what backends and platform can do. A note says why, but where a
        platform with graphs makes of a level's mode what it always does."""
        compilation, offered = self.config.compilation, self.platform.supported_graph_modes
        named, requested = compilation.cudagraph_mode, requested_mode(compilation)
        mode, why = lower_mode(requested, self.build.attention.graph_support(), offered=offered)
        usual, _ = lower_mode(requested, GraphSupport.ALWAYS, offered=offered)
        is_usual = mode is usual and (mode is not CUDAGraphMode.NONE or set(offered) == {CUDAGraphMode.NONE})
        if mode is not requested and (named is not None or not is_usual):
            self.notes.append(f"cudagraph_mode {requested} became {mode}: {why}")
        if compilation.enforce_eager and named not in (None, CUDAGraphMode.NONE):
            self.notes.append(f"enforce_eager wins over cudagraph_mode {named}: no graphs are captured")
        sizes, folder = compilation.cudagraph_capture_sizes, compilation.debug_dump_path
        if mode is CUDAGraphMode.NONE and sizes is not None:
            self.notes.append(f"cudagraph_capture_sizes {', '.join(map(str, sizes))} left out: no graphs are captured")
        if folder is not None and (mode is CUDAGraphMode.NONE or not self.platform.dumps_graphs):
            why = (
                "no graphs are captured"
                if mode is CUDAGraphMode.NONE
                else f"platform {self.platform.name!r} writes none"
            )
            self.notes.append(f"debug_dump_path {folder} stays empty: {why}")
        return mode

    def _make_graphs(self, mode: CUDAGraphMode) -> None:
        """From now on the runner captures and replays steps, where the platform can."""
        recorder = self.platform.graph_recorder()
        if recorder is None:
            self.notes.append(f"cudagraph_mode {mode} became NONE: platform {self.platform.name!r} gives no recorder")
            return
        foreign = self.build.ops.unrecordable() if recorder.runs_calls else []
        if foreign:
            self.notes.append(f"cudagraph_mode {mode} became NONE: {', '.join(foreign)} may not be recordable")
            return
        if recorder.runs_calls and captures_pieces(mode):  # it would run the model again, without attention
            whole = CUDAGraphMode.FULL_DECODE_ONLY if captures_decode(mode) else CUDAGraphMode.NONE
            self.notes.append(
                f"cudagraph_mode {mode} became {whole}: platform {self.platform.name!r} records no pieces"
            )
            mode = whole
        drafts, support = self.runner.ops.drafts, self.build.attention.graph_support()
        takes_drafts = support >= GraphSupport.UNIFORM_BATCH and not recorder.runs_calls
        dispatcher = GraphDispatcher(
            mode, max_num_seqs=self.max_num_seqs, max_num_tokens=self.max_num_tokens, sizes=self._graph_sizes(),
            decode_query_len=drafts.width if drafts is not None and takes_drafts else 1,
            max_piece_tokens=max_piece_tokens(self.model, len(self.build.cache_layers)),
            captures_prompts=not recorder.runs_calls and support is GraphSupport.ALWAYS,
        )  # fmt: skip
        keys = dispatcher.valid_keys()
        too_large = [
            size for size in self.config.compilation.cudagraph_capture_sizes or () if size > dispatcher.most_tokens
        ]
        if too_large:
            self.notes.append(
                f"cudagraph_capture_sizes {', '.join(map(str, too_large))} left out: steps that {mode} captures have at most "
                f"{dispatcher.most_tokens} tokens" + ("" if keys else "; nothing is captured")
            )
        if keys:
            self.runner.use_graphs(dispatcher, recorder)

    def _capture(self, graphs: StepGraphs) -> None:
        """Steps of the smallest sizes now; the others wait for `prepare_ahead`."""
        tails = self.runner.tail_variants
        first_tails = tails[:1] if graphs.runs_calls else tails  # a step that is recorded late loses little
        for kind, key in sorted(graphs.dispatcher.valid_keys(), key=_in_order_of_use):
            variants = first_tails if key.uniform_query_len else ("",)
            self._to_capture.extend((kind, replace(key, sampling=variant)) for variant in variants)
        first = sum(key.num_tokens <= _FIRST_GRAPH_TOKENS for _, key in self._to_capture)
        with phase("capture graphs", self.phase_s, total=first, unit=" graphs") as progress:
            for _ in range(first):
                graphs.warm_up(*self._to_capture.popleft())
                progress.advance(1)
            self.platform.synchronize()

    def _graph_sizes(self) -> Sequence[int] | None:
        sizes = self.config.compilation.cudagraph_capture_sizes
        return range(1, self.max_num_seqs + 1) if sizes is None and not self.platform.pads_graphs else sizes

    @torch.inference_mode()
    def prepare_ahead(self) -> bool:
        """One more graph, of those that are left."""
        graphs = self.runner.graphs
        while graphs is not None and self._to_capture:
            kind, key = self._to_capture.popleft()
            if not graphs.has(kind, key):
                graphs.warm_up(kind, key)
                self.platform.synchronize()
                return True
        return False

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelOutput | PendingOutput | None:
        return self.runner.execute(output)

    @torch.inference_mode()
    def sample(self, masks: GrammarMasks) -> ModelOutput | PendingOutput:
        return self.runner.sample(masks)

    def check_device(self) -> None:
        self.platform.synchronize()

    def report(self) -> DeviceReport:
        selections = self.build.attention.selections()
        return DeviceReport(
            device=self.platform.describe(self.rank),
            platform=self.platform.name,
            attention_backend=", ".join(dict.fromkeys(selection.name for selection in selections)),
            attention_reason="; ".join(dict.fromkeys(selection.reason for selection in selections)),
            choices=self.choices,
            weights_bytes=self.weights_bytes,
            phase_s=self.phase_s,
            notes=self.notes,
            num_draft_tokens=self._num_device_drafts,
        )

    def shutdown(self) -> None:
        """Let go of the model and the pool: their memory is free once nothing else refers to it."""
        runner = self.__dict__.get("runner")
        for connector in runner.connectors.values() if runner is not None else ():
            connector.shutdown()
        for name in ("runner", "model", "build"):
            self.__dict__.pop(name, None)

    def _check_dtype(self) -> None:
        dtype, known = self.model_info.dtype, self.platform.supported_dtypes
        if dtype not in known:
            raise ConfigError(
                f"dtype is {dtype!r}, which platform {self.platform.name!r} does not compute in; use one of {', '.join(known)}."
            )

    def _make_loader(self) -> WeightLoader:
        named = self.config.load.load_format
        name = self.model_info.weights_format if named == "auto" else named
        entry = self.plugins.find("pelton_model_loaders", name, setting="load_format")
        loader: WeightLoader = entry.resolve()(self.config, self.model_info)
        return loader

    def _num_parts(self) -> int:
        return self.config.scheduler.max_steps_in_flight + 1

    def _run_largest_step(self) -> None:
        """Run its forward pass, and a tail that samples every row in float32. There is no pool yet: attention gives zeros, and
        `_state_bytes` has what it computes in."""
        tokens = torch.arange(self.max_num_tokens, device=self.device)
        batch = ForwardBatch(
            input_ids=torch.zeros_like(tokens),
            positions=tokens.clamp(max=self.model_info.max_model_len - 1),
            attention=(),
            num_tokens=self.max_num_tokens,
        )
        hidden = self.model.forward(batch)
        logits = self.model.compute_logits(hidden, tokens[: self.max_num_seqs])
        logits.softmax(dim=-1, dtype=torch.float32)

    def _state_bytes(self) -> int:
        """About what is allocated after the profile, whether steps are captured or not: token ids and block tables of every
        row, side tables, and attention's scratch."""
        specs, max_model_len = self.kv_cache_specs(), self.model_info.max_model_len
        side = side_table_bytes(self.config.scheduler.num_side_slots(self.max_num_seqs), self.model_info.vocab_size)
        num_groups = len(plan_groups(specs)[0]) if specs else 0
        blocks = 2 * num_groups * -(-max_model_len // self.config.kv_cache.block_size)  # of the state, and of a step
        return self.max_num_seqs * (max_model_len + blocks) * 4 + side + num_groups * _ATTENTION_BYTES

    def _estimate_peak_bytes(self) -> int:
        """Logits, probabilities and their float64 sums for every row; hidden states of the largest step."""
        return self._step_bytes(self.max_num_tokens, self.max_num_seqs, bytes_a_logit=16)

    def _step_bytes(self, num_tokens: int, num_rows: int, *, bytes_a_logit: int = 4) -> int:
        """About what a step computes in: hidden states of its tokens, logits of its rows."""
        hf, item_bytes = self.build.hf, self.build.dtype.itemsize
        widest = max(hf.get("intermediate_size", 0) * 2, hf.get("hidden_size", 0) * 4)
        hidden_bytes: int = num_tokens * widest * item_bytes * 2
        return hidden_bytes + num_rows * self.model_info.vocab_size * bytes_a_logit


def _watched(
    weights: Iterator[tuple[str, LazyWeight]], progress: Progress, item_bytes: int
) -> Iterator[tuple[str, LazyWeight]]:
    for name, weight in weights:
        yield name, weight
        progress.advance(math.prod(weight.shape) * item_bytes)


def max_piece_tokens(model: Any, num_layers: int) -> int:
    """Tokens up to which a step is worth capturing in pieces: with more, a layer's products take the device longer than all
    launches of a layer take the host. All experts of a layer count."""
    operations = product_operations(model)
    if not operations:
        return MAX_MIXED_TOKENS
    tokens = int(_HIDING_OPERATIONS * num_layers / operations)
    return min(max(tokens // 64 * 64, MAX_MIXED_TOKENS), _MAX_PIECE_TOKENS)


def product_operations(model: Any) -> int:
    """Operations of a token's products, the vocabulary's left out. All experts of a layer count."""
    return 2 * sum(
        module.spec.in_features * module.spec.out_features
        for module in model.modules()
        if isinstance(module, LinearModule) and not isinstance(module, VocabMatrix)
    )


def context_tokens(model: Any, layers: Iterable[Any]) -> int:
    """Tokens of context at which a token's attention in these layers has as many operations as its products; 0 where none
    attends to all. Layers with a window read no more of a long context, and those of other kinds a state."""
    needs = [layer.needs for layer in layers if isinstance(getattr(layer, "needs", None), AttentionNeeds)]
    operations = sum(4 * need.num_heads * need.head_dim for need in needs if not need.sliding_window)
    return product_operations(model) // operations if operations else 0


def module_bytes(module: Any) -> int:
    """Bytes of a module's parameters and buffers; shared memory counts once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in [*module.parameters(), *module.buffers()]
    }
    total: int = sum(storages.values())
    return total


def _in_order_of_use(item: tuple[CUDAGraphMode, BatchDescriptor]) -> tuple[bool, int]:
    """Sort key: what the first requests need, then sizes that may stand in for many others, then the rest."""
    key, size = item[1], item[1].num_tokens
    is_stand_in = (
        size & (size - 1) == 0 and not key.is_prompt and (size <= MAX_MIXED_TOKENS or key.uniform_query_len > 0)
    )
    return size > _FIRST_GRAPH_TOKENS and not is_stand_in, size
