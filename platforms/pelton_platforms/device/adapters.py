"""A worker's adapters: read and checked on the host by any thread, brought to their slots by the worker's thread.

Which adapter is in which slot is the scheduler's decision (`SchedulerContext.adapters`); here is what carries it out.
"""

from __future__ import annotations

import difflib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pelton.errors import EngineError, InvalidAdapterError
from pelton.lora.peft import PeftConfig, check_targets, read_config
from pelton_platforms.device.adapter_memory import AdapterMemory, AdapterPart
from pelton_platforms.device.peft_tensors import read_tensors, split_name

if TYPE_CHECKING:
    from pelton.messages.request import AdapterRef
    from pelton.model.build import BuildConfig
    from pelton.worker.inputs import InputBuffers, StepShape


class AdapterStore:
    """Adapters of one worker; what the steps ask of it is `pelton_platforms.device.steps.step_adapters.StepAdapters`."""

    def __init__(self, layers: AdapterMemory, is_elsewhere: Callable[[str], bool] | None = None) -> None:
        """is_elsewhere: whether a layer, by its name in the checkpoint, is another stage's; None: all are here."""
        self.layers = layers
        self._is_elsewhere = is_elsewhere
        self._host: dict[int, Tensor] = {}  # by the number of the load
        self._slot_of: dict[int, int] = {}
        self._lock = threading.Lock()
        self.by_row: Tensor | None = None
        """`BatchState.adapter_slots`, once there is one."""

    # From any thread.

    @torch.inference_mode()
    def load(self, load_id: int, name: str, path: str) -> None:
        """Read an adapter into host memory. Raises `RequestError` for one that cannot be served."""
        assert self.layers.slots is not None
        config = read_config(path, max_rank=self.layers.max_rank, name=name)
        tensors = read_tensors(path, name)
        if self._is_elsewhere is None:
            check_targets(config, self.layers.target_modules, name)
        slots = self.layers.slots.tensor
        memory = pack(tensors, config, self.layers, name, slots.dtype, self._is_elsewhere)
        if slots.device.type == "cuda":
            memory = memory.pin_memory()
        with self._lock:
            self._host[load_id] = memory

    def take_over(self, other: AdapterStore, slots: Tensor) -> None:
        """Have all that `other` had, and in the slots what is in `slots`."""
        assert self.layers.slots is not None
        self._host, self._slot_of = other._host, other._slot_of
        self.layers.slots.tensor.copy_(slots)

    # From the worker's thread.

    def place(self, assignments: Sequence[tuple[int, int, int]], dropped: Sequence[int] = ()) -> None:
        """As `SchedulerOutput` has them, before the step that uses them: behind the steps that use what the slots have now."""
        assert self.layers.slots is not None
        for slot, adapter_id, load_id in assignments:
            memory = self._host.get(load_id)
            if memory is None:
                raise EngineError(f"Load {load_id} of adapter {adapter_id} is not on the host.")
            self.layers.slots.place(slot, memory)
            self._slot_of = {known: at for known, at in self._slot_of.items() if at != slot} | {adapter_id: slot}
        with self._lock:
            for load_id in dropped:
                self._host.pop(load_id, None)

    def slot_of(self, adapter: AdapterRef) -> int:
        """The slot that `place` brought it to."""
        return self._slot_of[adapter.id]

    def prepare(self, slots: Tensor, shape: StepShape, buffers: InputBuffers, *, is_used: bool) -> Any:
        """Tell each token of the step its adapter's slot."""
        rows = self.layers.rows
        rows.is_used = is_used
        if is_used:
            assert self.by_row is not None, "there is a batch state"
            num_reqs, num_tokens, places = shape.num_padded_reqs, shape.num_padded_tokens, self.by_row[slots]
            if num_reqs == num_tokens == shape.num_decode_rows:
                rows.place(places)
            else:
                ends = buffers.query_start_loc[1 : num_reqs + 1]
                row = torch.searchsorted(ends, buffers.token_index[:num_tokens], right=True)
                rows.place(torch.where(row < num_reqs, places[row.clamp(max=num_reqs - 1)], -1))
        return rows


def make_adapters(build: BuildConfig, memory: AdapterMemory | None) -> AdapterStore | None:
    """For a model that is built; None without `enable_lora`."""
    if memory is None:
        return None
    memory.allocate(build)
    if build.parallel.stages is None:
        return AdapterStore(memory)
    return AdapterStore(memory, lambda name: build.weights.ignores(f"{name}.weight"))


def pack(
    tensors: dict[str, Tensor],
    config: PeftConfig,
    layers: AdapterMemory,
    shown: str,
    dtype: torch.dtype,
    is_elsewhere: Callable[[str], bool] | None = None,
) -> Tensor:
    """An adapter on the host: each matrix at its place, filled up with zeros, and zeros where it has none. Matrices of layers that
    are elsewhere are left out.

    Raises `InvalidAdapterError` for a tensor that has no place, or another shape than its place.
    """
    pairs: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for tensor_name, tensor in tensors.items():
        name, letter = split_name(tensor_name, shown)
        pairs[name][letter] = tensor
    if not pairs:
        raise InvalidAdapterError(f"Invalid adapter configuration: adapter {shown!r} has no tensors.", param="model")
    memory = torch.zeros(layers.size, dtype=dtype)
    for name, pair in pairs.items():
        if is_elsewhere is not None and name not in layers.parts and is_elsewhere(name):
            continue
        for part in _parts_of(name, layers, shown):
            _check_pair(name, pair, part, config, shown)
            rank, shard = config.rank_of(name), part.shard
            a = memory[part.a_start : part.a_start + layers.rank * part.num_cols].view(layers.rank, part.num_cols)
            b = memory.as_strided((layers.rank, part.num_rows), part.b_strides, part.b_start)
            a[:rank] = pair["A"][:, slice(*shard.cols)].to(dtype)
            b[:rank] = (pair["B"][slice(*shard.rows)].float() * config.scale_of(name)).to(dtype).T
    if not bool(torch.isfinite(memory).all()):  # a row of another adapter is multiplied with it too, by zero
        raise InvalidAdapterError(
            f"Invalid adapter configuration: adapter {shown!r} has numbers that are infinite or NaN in "
            f"{str(dtype).removeprefix('torch.')}.",
            param="model",
        )
    return memory


def _parts_of(name: str, layers: AdapterMemory, shown: str) -> list[AdapterPart]:
    parts = layers.parts.get(layers.find(name))
    if parts is not None:
        return parts
    why = layers.why_refused(name)
    if why is None:
        close = difflib.get_close_matches(name, layers.parts, n=1)
        why = "this model has no such layer" + (f"; did you mean {close[0]!r}?" if close else "")
    raise InvalidAdapterError(
        f"Invalid adapter configuration: layer {name!r} takes no adapter: {why} (adapter {shown!r}).", param="model"
    )


def _check_pair(name: str, pair: dict[str, Tensor], part: AdapterPart, config: PeftConfig, shown: str) -> None:
    rank, shard = config.rank_of(name), part.shard
    for letter, wanted in (("A", (rank, shard.num_cols)), ("B", (shard.num_rows, rank))):
        tensor = pair.get(letter)
        if tensor is None:
            raise InvalidAdapterError(
                f"Invalid adapter configuration: {name!r} has no lora_{letter} (adapter {shown!r}).", param="model"
            )
        if tuple(tensor.shape) != wanted or not tensor.is_floating_point():
            raise InvalidAdapterError(
                f"Invalid adapter configuration: lora_{letter} of {name!r} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}; expected floating-point {list(wanted)} (adapter {shown!r}).",
                param="model",
            )
