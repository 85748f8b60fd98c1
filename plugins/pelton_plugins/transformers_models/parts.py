"""Attention and gated MLPs in the place of transformers' modules that compute the same (`trials`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pelton.ops.interface import Gated, GatedNeeds, GatedTensors
from pelton_plugins.transformers_models.trials import AttentionPart, GatedPart

if TYPE_CHECKING:
    from pelton.layers.attention import AttentionLayer
    from pelton.model.build import BuildConfig
    from pelton_plugins.transformers_models.attention import PagedAttention
    from pelton_plugins.transformers_models.products import Products


class FusedAttention(nn.Module):
    """Products, norms, rotation and attention of a module, [1, T, H] -> [1, T, H]."""

    def __init__(
        self, part: AttentionPart, qkv: Products, attend: AttentionLayer, output: Products, paged: PagedAttention
    ) -> None:
        """paged: knows the step."""
        super().__init__()
        self._hidden, self._num_results = part.hidden, part.num_results
        self.qkv, self.attend, self.output = qkv, attend, output
        self._paged = paged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden: Tensor = args[self._hidden] if isinstance(self._hidden, int) else kwargs[self._hidden]
        batch = self._paged.batch
        assert batch is not None, "a step runs"
        output = self.output(self.attend(self.qkv(hidden[0]), batch))[None]
        return output if self._num_results is None else (output, *[None] * (self._num_results - 1))


class GatedMLP(nn.Module):
    """Products and activation of a module."""

    def __init__(self, part: GatedPart, gate_up: Products, down: Products, *, config: BuildConfig) -> None:
        super().__init__()
        self._hidden = part.hidden
        self.gate_up, self.down = gate_up, down
        needs = GatedNeeds(dtype=config.dtype_name, size=sum(gate_up.sizes) // 2, activation=part.activation)
        self._gated: Gated = config.ops.bind("gated", needs, GatedTensors(config.device))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden: Tensor = args[self._hidden] if isinstance(self._hidden, int) else kwargs[self._hidden]
        down: Tensor = self.down(self._gated(self.gate_up(hidden.reshape(-1, hidden.shape[-1]))))
        return down.view(*hidden.shape[:-1], down.shape[-1])
