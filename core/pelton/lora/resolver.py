"""Interface of a LoRA resolver: finds an adapter by the name that a request gave as its model.

Offered through `pelton_lora_resolvers`; those that `lora_resolvers` lists are asked in its order, in the front end, when a name
is unknown. The engine's steps go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from pelton.config import EngineConfig
    from pelton.lora.request import LoRARequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolverContext:
    """Everything that a resolver is made from. A new feature is a new field with a default."""

    config: EngineConfig
    """All settings: `read_settings` gives a resolver its own."""
    max_lora_rank: int
    target_modules: Sequence[str]
    """Names of the model's layers that take adapters, such as q_proj; empty where the engine does not tell."""
    base_model_names: Sequence[str]
    """What the model is called: the setting `model`, its folder's name, and the served names."""


@runtime_checkable
class LoRAResolver(Protocol):
    """`load` of an entry gives a factory from one `ResolverContext` to this."""

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Find an adapter. None: it is none of this resolver's, and the next one is asked.

        Raises `RequestError` for one that is found and cannot be served: the request ends with that. The name comes from a
        client: it must not lead to a file outside the resolver's own folder. What takes long belongs on a thread.
        """
        ...
