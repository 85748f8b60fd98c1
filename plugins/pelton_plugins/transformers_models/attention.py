"""Attention calls of transformers' modules: noted while a model is traced, answered from the paged cache while it runs.

Modules hand query, key and value to a function that is registered under a name; nothing of theirs is replaced. A few older ones
call torch's `scaled_dot_product_attention` themselves: a mode of torch for overriding functions sees those calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from pelton.attention.metadata import ForwardBatch
    from pelton.layers.attention import AttentionLayer

RUN = "pelton"
TRACE = "pelton_trace"
"""Names of the function. transformers makes masks for the second alone."""
TORCH = "sdpa"
"""transformers' name for torch's own function, of modules that know no other."""


class Receiver(Protocol):
    """The receiver of the attention calls of one forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        """query [1, num_heads, T, D], key [1, num_kv_heads, T, D], value [1, num_kv_heads, T, V] -> [1, T, num_heads, V]"""
        ...

    def make_mask(self, options: Mapping[str, Any]) -> Any:
        """Return what `attend` is to be given as `mask`."""
        ...


_receiver: ContextVar[Receiver] = ContextVar("pelton_transformers_attention")


@contextmanager
def received_by(receiver: Receiver) -> Iterator[None]:
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def register() -> None:
    """Enter the functions in transformers' tables."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(RUN, _attend)
    AttentionInterface.register(TRACE, _attend)
    AttentionMaskInterface.register(TRACE, _make_mask)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **options: Any
) -> tuple[Tensor, None]:
    return _receiver.get().attend(module, query, key, value, attention_mask, options), None


def _make_mask(**options: Any) -> Any:
    return _receiver.get().make_mask(options)


def without_lists(index: Any) -> Any:
    """Return `index` with slices for lists of one number: torch copies a list to the device, which no graph holds."""
    if not isinstance(index, tuple) or not all(
        one is None or isinstance(one, slice | list | type(...)) for one in index
    ):
        return index
    lists = [one for one in index if isinstance(one, list)]
    if len(lists) != 1 or len(lists[0]) != 1 or type(lists[0][0]) is not int:
        return index
    place = lists[0][0]
    narrow = slice(place, place + 1 or None)
    return tuple(narrow if isinstance(one, list) else one for one in index)


class TorchCalls(TorchFunctionMode):
    """Hands calls of torch's attention to a receiver. module: of the next call."""

    def __init__(self, receiver: Receiver, module: Callable[[], nn.Module]) -> None:
        super().__init__()
        self._receiver, self._module = receiver, module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is Tensor.__getitem__:
            args = (args[0], without_lists(args[1]))
        return func(*args, **kwargs)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        options = {"scaling": scale}
        num_groups = query.shape[2] // key.shape[2]
        if num_groups > 1:  # of one token: transformers puts the heads that share a key in the place of tokens
            key, value = (one.repeat_interleave(num_groups, dim=1) for one in (key, value))
        heads = query.reshape(1, -1, key.shape[2], query.shape[3])
        attended = self._receiver.attend(self._module(), heads, key, value, attn_mask, options).transpose(1, 2)
        return attended.reshape(*query.shape[:3], value.shape[3])


class PagedAttention:
    """A `Receiver` of steps: each module's layer over the paged cache."""

    def __init__(self, layers: Mapping[nn.Module, AttentionLayer]) -> None:
        """layers: in the order of their calls."""
        self.layers = layers
        self.batch: ForwardBatch | None = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        layer, batch = self.layers[module], self.batch
        assert batch is not None, "a step runs"
        num_tokens, value_dim = query.shape[2], value.shape[3]
        if query.shape[3] < layer.head_dim:
            query, key = (F.pad(one, (0, layer.head_dim - one.shape[3])) for one in (query, key))
        if value_dim < layer.head_dim:
            value = F.pad(value, (0, layer.head_dim - value_dim))
        qkv = torch.cat([one.transpose(1, 2).reshape(num_tokens, -1) for one in (query, key, value)], dim=-1)
        output: Tensor = layer(qkv, batch).view(1, num_tokens, layer.num_heads, layer.head_dim)
        return output[..., :value_dim]

    def make_mask(self, options: Mapping[str, Any]) -> None:
        return None


def default_scale(head_dim: int) -> float:
    return 1.0 / math.sqrt(head_dim)
