"""Interface between a model's layers and the adapters of its worker: a layer registers its product, and calls it with adapters in it.

The memory of the low-rank matrices is the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pelton.lora.op import Lora, LoraNeeds
from pelton.lora.rows import AdapterRowTensors

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.layers.norm import RMSNorm
    from pelton.model.build import BuildConfig
    from pelton.quantization.interface import LinearShard


@dataclass(frozen=True, slots=True)
class BaseProduct:
    """The op that a layer calls in steps without adapters: linear, add_norm_linear or add_norm_gated_linear."""

    op: str
    needs: Any
    tensors: Any


class AdapterLayer:
    """One product that adapters add to."""

    def __init__(
        self, needs: LoraNeeds, norm: Tensor | None, rows: AdapterRowTensors, base: BaseProduct | None
    ) -> None:
        self.needs, self.norm, self.base, self._rows = needs, norm, base, rows
        self.call: Lora | None = None
        self.a_start = self.b_start = 0
        self.product: Callable[..., Any] = _no_memory
        """The base op with adapters in it, where the layer has told its base op."""

    @property
    def is_used(self) -> bool:
        """Return whether some row of the step that is being launched has an adapter."""
        return self._rows.is_used

    def __call__(self, x: Tensor, output: Tensor) -> Tensor:
        """See `Lora`."""
        assert self.call is not None, "adapters have memory"
        return self.call(x, output)


def _no_memory(*args: Any) -> Any:
    raise AssertionError("adapters have no memory yet")


class AdapterLayers(Protocol):
    """The layers of one worker that take adapters (`BuildConfig.adapters`)."""

    rows: AdapterRowTensors

    def add(
        self,
        build: BuildConfig,
        shards: Sequence[LinearShard],
        *,
        norm: RMSNorm | None = None,
        activation: str | None = None,
        base: BaseProduct | None = None,
    ) -> AdapterLayer | None:
        """Register a product of `shards`, which lie below each other; None where none of them takes adapters. Without `base` the layer
        calls it behind its own product (`AdapterLayer.__call__`)."""
        ...

    def refuse(self, name: str, why: str) -> None:
        """Say why the matrix `name`, or what is in the module of this name, takes no adapter."""
        ...
