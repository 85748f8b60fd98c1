"""`forward` and `forward_qkv`: how backends attended, and how layers called them, before `AttentionBackend.bind`.

Kept for plugins until 0.2. A backend that defines `forward` is bound by calling it; a layer that calls `forward` gets what
`bind` returns.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from pelton.attention.bound import BoundAttention
from pelton.errors import PluginError
from pelton.logging import get_logger

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.interface import AttentionBackend

_NAMES = ("forward", "forward_qkv")

logger = get_logger(__name__)


class OldMethods:
    """The base of `AttentionBackend` that knows the old names."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        own = [name for name in _NAMES if name in vars(cls)]
        if own and "bind" not in vars(cls) and _inherits_bind(cls):
            raise PluginError(
                f"Attention backend {cls.__module__}.{cls.__qualname__} overrides {own[0]}, which its base class no longer calls. "
                "Override bind, which returns a pelton.attention.interface.BoundAttention."
            )

    def bind(self, layer: Any) -> BoundAttention:
        raise NotImplementedError

    def forward(self, layer: Any, query: Tensor, metadata: Any, output: Tensor) -> Tensor:
        """Attend, for layers that call backends by this name."""
        _warn(
            f"{type(layer).__qualname__} calls AttentionBackend.forward, which 0.2 removes. Call what bind(layer) returned."
        )
        self.bind(layer)(query, metadata, output)
        return output

    def forward_qkv(self, layer: Any, qkv: Tensor, positions: Tensor, metadata: Any, output: Tensor) -> Tensor:
        """Write, then attend, for backends that define `forward`."""
        query = layer.qk_norm_rope_write_kv(qkv, positions, self.slot_mapping(metadata))
        return self.forward(layer, query, metadata, output)

    def slot_mapping(self, metadata: Any) -> Tensor:
        """Return the step's slots, for layers and backends that do not read `ForwardBatch.slot_mappings`."""
        slots: Tensor = getattr(metadata, "common", metadata).slot_mapping
        return slots


class _OldAttention(BoundAttention):
    """The attention of a backend that defines `forward`, and maybe `forward_qkv`."""

    def __init__(self, backend: AttentionBackend, layer: Any) -> None:
        super().__init__(layer)
        self._backend = backend

    def __call__(self, query: Tensor, metadata: Any, output: Tensor) -> object:
        return self._backend.forward(self.layer, query, metadata, output)

    def write_and_attend(
        self, qkv: Tensor, positions: Tensor, slot_mapping: Tensor, metadata: Any, output: Tensor
    ) -> object:
        if type(self._backend).forward_qkv is OldMethods.forward_qkv:
            return super().write_and_attend(qkv, positions, slot_mapping, metadata, output)
        return self._backend.forward_qkv(self.layer, qkv, positions, metadata, output)


def bind_old(backend: AttentionBackend, layer: Any) -> BoundAttention:
    """`AttentionBackend.bind` of a class that defines `forward` instead."""
    backend_class = type(backend)
    name = f"{backend_class.__module__}.{backend_class.__qualname__}"
    if backend_class.forward is OldMethods.forward:
        raise PluginError(f"Attention backend {name} does not define bind. Return a BoundAttention from it.")
    _warn(
        f"Attention backend {name} defines forward, which 0.2 no longer calls. Define bind, which returns a "
        "pelton.attention.interface.BoundAttention."
    )
    return _OldAttention(backend, layer)


def _inherits_bind(cls: type) -> bool:
    """Return whether the `bind` that a class inherits is a backend's own, not the default."""
    owner = next(base for base in cls.__mro__[1:] if "bind" in vars(base))
    return owner is not OldMethods and OldMethods not in owner.__bases__


@cache
def _warn(text: str) -> None:
    """Log a text once in a process."""
    logger.warning("%s", text)
