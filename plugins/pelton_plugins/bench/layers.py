"""Layers without a model, for measurements: the backends that a model's layers would get on this device, and a timer."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pelton.config import EngineConfig


class LayerBench:
    """The choice of the engine's settings: a platform's first device, a dtype, and attention backends."""

    def __init__(self, config: EngineConfig, replays: int) -> None:
        from pelton.attention.selector import AttentionSelector
        from pelton.platform.select import select_platform
        from pelton.plugins import load_plugins
        from pelton_plugins.bench.table.chain_process import Timer

        plugins = load_plugins()
        self.platform = select_platform(config, plugins)
        self.selector = AttentionSelector(
            plugins.entries("pelton_attention_backends", device_type=self.platform.device_type),
            capability=self.platform.capability(), config=config,
        )  # fmt: skip
        self.dtype = "bfloat16" if config.model.dtype == "auto" else config.model.dtype
        self.device = self.platform.device(0)
        self._timer = Timer(SimpleNamespace(platform=self.platform, device=self.device), replays)

    @property
    def timer(self) -> Any:
        """Captures, unless a backend that was chosen cannot be captured."""
        from pelton.attention.interface import GraphSupport

        if self.selector.graph_support() is GraphSupport.NEVER:
            self._timer.recorder = None
        return self._timer

    @property
    def is_captured(self) -> bool:
        return self._timer.recorder is not None

    @property
    def backends(self) -> list[str]:
        """Names of those that were chosen."""
        return list(dict.fromkeys(selection.name for selection in self.selector.selections()))

    def stream(self) -> AbstractContextManager[Any]:
        """A stream of its own where there are streams: a capture may not be on the default one."""
        import torch

        return torch.cuda.stream(torch.cuda.Stream()) if self.device.type == "cuda" else nullcontext()
