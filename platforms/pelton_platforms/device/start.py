"""A worker's start once its model is made: weights, room for the KV cache, the runner over it, and what steps need before requests come."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pelton.errors import PluginError
from pelton.kv_transfer.interface import WorkerConnector
from pelton.kv_transfer.select import find_connector
from pelton.logging import phase
from pelton.plugins import FIX_IT
from pelton_platforms.device.first_start import FirstStart
from pelton_platforms.device.graphs.capture_plan import CaptureQueue, plan_captures
from pelton_platforms.device.graphs.graph_setup import setup_graphs
from pelton_platforms.device.load_weights import load_weights
from pelton_platforms.device.make_runner import make_runner
from pelton_platforms.device.memory import StepMemory
from pelton_platforms.device.speed import fit_step

if TYPE_CHECKING:
    from pelton.kv_cache.spec import KVCachePlan
    from pelton.messages.report import StepFit
    from pelton_platforms.device.loaded import LoadedModel
    from pelton_platforms.device.steps.model_runner import ModelRunner

_WARM_UP_TOKENS = 16


class Start:
    """The phases of a start, whose seconds it adds to `phase_s`. Order: `load_weights` -> `find_room` -> `make_runner` -> `warm_up`."""

    def __init__(self, loaded: LoadedModel, phase_s: dict[str, float]) -> None:
        self._loaded, self._phase_s = loaded, phase_s
        self._memory = StepMemory(loaded)
        self._first_start = FirstStart(loaded, self._memory, phase_s)

    @torch.inference_mode()
    def load_weights(self) -> int:
        """Load them while kernels are compiled; returns the bytes that they take."""
        self._first_start.compile_soon()
        return load_weights(self._loaded, self._phase_s)

    @torch.inference_mode()
    def find_room(self, weights_bytes: int) -> int:
        """Return the bytes that are there for a KV cache: see `StepMemory`."""
        with phase("profile", self._phase_s):
            self._first_start.compile_largest_step()
            return self._memory.find_room(weights_bytes)

    @torch.inference_mode()
    def make_runner(self, plan: KVCachePlan) -> ModelRunner:
        """Allocate the KV cache and all that is sized by it, and connect it. Raises `ConfigError` where the memory is not there."""
        loaded, parallel = self._loaded, self._loaded.build.parallel
        with phase("allocate KV cache", self._phase_s):
            try:
                runner = make_runner(loaded, plan, loaded.build.ops)
            except MemoryError as error:
                raise self._memory.why_no_cache(plan, error) from error
            except torch.OutOfMemoryError as error:
                raise self._memory.why_no_state() from error
            stages = parallel.stages
            rank = parallel.rank + (0 if stages is None else stages.rank * parallel.size)
            found = find_connector(loaded.config, loaded.info, loaded.plugins, plan, rank=rank)
            if found is not None:
                connector, context = found
                worker_half = connector.for_worker(context)
                if not isinstance(worker_half, WorkerConnector):
                    raise PluginError(
                        f"The KV connector {context.name!r} gives {worker_half!r} from for_worker; it has to give a "
                        f"WorkerConnector. {FIX_IT}"
                    )
                runner.add_connector(context.name, worker_half)
        return runner

    @torch.inference_mode()
    def warm_up(self, runner: ModelRunner) -> CaptureQueue | None:
        """Run small steps without graphs: libraries load and pick their code paths here, not in the first request. Then capture graphs;
        returns those that are left, None where no steps are captured."""
        loaded, captures = self._loaded, None
        setup_graphs(loaded, runner)
        self._first_start.compile_steps(runner)
        with phase("warm up", self._phase_s):
            runner.warm_up(min(_WARM_UP_TOKENS, loaded.max_num_tokens))
            loaded.platform.synchronize()
        graphs = runner.graphs
        if graphs is not None and not graphs.runs_calls:
            self._memory.make_room_for_captures(graphs)
        self._memory.take_for_steps()
        if graphs is not None:
            captures = CaptureQueue(plan_captures(runner, graphs), graphs, loaded.platform.synchronize)
            captures.capture_first(self._phase_s)
        loaded.platform.worker_ready()
        return captures

    @torch.inference_mode()
    def fit_step(self, runner: ModelRunner) -> StepFit | None:
        """Measure how large a step may be, where the platform has a target; see `Executor.fit_step`."""
        target_s = self._loaded.platform.target_step_s
        if target_s is None:
            return None
        with phase("measure speed", self._phase_s):
            return fit_step(self._loaded, runner, target_s)
