"""Interface of a platform: what one kind of device offers. torch is imported only inside methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from pelton.config import CUDAGraphMode, EngineConfig

if TYPE_CHECKING:
    import torch

    from pelton.graphs.recorder import GraphRecorder
    from pelton.worker.interface import Worker


class Platform(ABC):
    """Made once per process by the platform entry's `load`, after its `probe` said that the device is here."""

    name: ClassVar[str]
    device_type: ClassVar[str]  # torch's word: "cpu", "cuda"; backends are offered by this
    default_max_num_batched_tokens: ClassVar[int] = 2048
    default_max_num_seqs: ClassVar[int] = 256
    encoder_scale: ClassVar[int] = 1
    """What both defaults are multiplied by for models whose tokens see later ones: nobody waits for a next token of theirs."""
    throughput_scale: ClassVar[int] = 1
    """What the tokens of a step are multiplied by with `performance_mode="throughput"`: nobody waits for a next token."""
    target_step_s: ClassVar[float | None] = None
    """Where `max_num_batched_tokens` is not set: how long a step may last, by the speed that the worker measures at its start;
    the default is lowered for it. None: it stays."""
    default_dtype: ClassVar[str] = "bfloat16"
    """What `dtype="auto"` becomes when the checkpoint does not say."""
    supported_dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    supported_graph_modes: ClassVar[tuple[CUDAGraphMode, ...]] = (CUDAGraphMode.NONE,)
    pads_graphs: ClassVar[bool] = True
    """Whether a captured step serves the sizes below its own too: what padding costs is less than a graph for every size."""
    dumps_graphs: ClassVar[bool] = False
    """Whether its recorder writes each graph to the folder of the setting `debug_dump_path`."""

    @abstractmethod
    def device(self, local_rank: int) -> torch.device: ...

    def prepare(self, config: EngineConfig) -> None:  # noqa: B027
        """Called once before anything else of a start that takes long, the import of torch included: what goes on beside all
        that may begin. Not called by every executor."""

    def begin_device(self, local_rank: int) -> None:  # noqa: B027
        """Called in the process of one of several ranks, perhaps before its model is known: what a device needs in any case, such as
        its context, may begin beside the imports. Returns at once."""

    @abstractmethod
    def init_device(self, config: EngineConfig, local_rank: int) -> None:
        """Select the device, bind threads; called once in the worker's thread before anything is allocated."""

    @abstractmethod
    def describe(self, local_rank: int = 0) -> str:
        """For people: "cpu: AMD EPYC, 2 threads"."""

    def capability(self, local_rank: int = 0) -> tuple[int, int] | None:
        """Compute capability where the device has one."""
        return None

    @abstractmethod
    def available_kv_cache_bytes(self, config: EngineConfig, *, weights_bytes: int, peak_activation_bytes: int) -> int:
        """Room for the KV pool, measured after weights are loaded and the largest step was run."""

    def share_host(self, local_rank: int, num_local_ranks: int) -> None:  # noqa: B027
        """Take this rank's part of what ranks of one host share, such as cores. Called first in each rank's own process."""

    def measure_peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Run the largest step and say how much memory it took at its peak, beyond what was held before. None, without
        running it, where memory is not counted: the worker then makes an estimate."""
        return None

    def compile_ahead(self, run: Callable[[], None]) -> int:
        """Run steps of padding for the kernels that they need, compiled all together: `pelton.platform.compiling.compile_only` is set
        meanwhile, which says what the steps find. Returns how many kernels no earlier start had compiled; 0, without running
        them, where kernels come compiled."""
        return 0

    def compile_soon(self, run: Callable[[], None]) -> bool:
        """Called before weights are loaded: as `compile_ahead`, but wait for nothing. What is launched later waits for its own
        kernels, and `compile_ahead` for all. False, without running anything, where that is not worth it: nothing is compiled, or
        an earlier start has compiled it."""
        return False

    def worker_ready(self) -> None:  # noqa: B027
        """Called once, when the worker can run steps: what only a start needs may go."""

    def graph_recorder(self) -> GraphRecorder | None:
        """Return what captures work on this device, on the current stream; None where nothing can. Asked once per worker, in its
        thread, when `supported_graph_modes` has more than NONE."""
        return None

    def stream_wait(self) -> Callable[[int, int], None] | None:
        """Return what lets the current stream wait until the int32 at an address in pinned memory has reached a value; or None."""
        return None

    def worker_class(self) -> type[Worker] | None:
        """The worker that serves this device; None: the best that plugins offer for its type of device (`pelton_workers`)."""
        return None

    def synchronize(self) -> None:  # noqa: B027
        """Wait for all queued work; nothing to wait for on synchronous devices."""
