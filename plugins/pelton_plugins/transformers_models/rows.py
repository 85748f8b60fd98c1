"""Check that a model computes each token by itself, but for attention: a batch has tokens of several requests in one row.

Two small passes after the weights are there show it. What a module counts or shifts over a row (positions of its own, a convolution)
would mix requests without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from pelton.errors import ConfigError

_ORDER = (2, 0, 4, 1, 3)
NUM_CHECKED = len(_ORDER)
_TOLERANCES = {torch.float32: 1e-3}
_COARSE = 0.05

Pass = Callable[[Tensor, "Tensor | None"], Tensor]
"""From ids [T] and positions [T] (None: the model's own) to hidden states [T, H]."""


class AloneAttention:
    """A `Receiver` with which each token attends to itself: its key and query count as well, so that their rotation shows."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        size = value.shape[3]
        attended = value + F.pad(key, (0, size - key.shape[3]))
        attended = attended.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        return (attended + F.pad(query, (0, size - query.shape[3]))).transpose(1, 2).contiguous()

    def make_mask(self, options: Mapping[str, Any]) -> None:
        return None


def check_rows(run: Pass, body: nn.Module, ids: Tensor, refuse: Callable[[str, str], ConfigError]) -> None:
    """Raise what `refuse` makes of a module's name and why, where a token's hidden states follow from more than it and its position.

    ids [5]: tokens, none of them padding.
    """
    order = torch.tensor(_ORDER, device=ids.device)
    positions = torch.arange(len(_ORDER), device=ids.device)
    hidden = run(ids, positions)
    if not (
        _is_near(run(ids[order], positions[order]), hidden[order])
        and _is_near(run(ids[2:3], positions[2:3]), hidden[2:3])
    ):
        raise refuse(
            _first_of_other_rows(run, body, ids, order),
            "what it makes of a token follows from the token's place in the batch, not from its position alone "
            "(it counts positions itself, or mixes neighbours outside attention)",
        )
    if not _is_near(run(ids, None), hidden):
        raise refuse("", "the positions that it counts by itself do not begin at 0")


def _is_near(one: Tensor, other: Tensor) -> bool:
    tolerance = _TOLERANCES.get(other.dtype, _COARSE)
    return one.shape == other.shape and float((one - other).float().norm()) <= tolerance * float(other.float().norm())


def _first_of_other_rows(run: Pass, body: nn.Module, ids: Tensor, order: Tensor) -> str:
    """Return the name of the innermost module that gets the same tokens in another order, and returns others."""
    positions = torch.arange(len(ids), device=ids.device)
    straight = _calls(run, body, ids, positions)
    turned = _calls(run, body, ids[order], positions[order])
    for (name, before), (_, after) in zip(straight, turned, strict=True):
        same = [_is_same(one, two, order) for one, two in zip(before, after, strict=False)]
        if all(same[:-1]) and not same[-1]:
            return name
    return ""


def _calls(run: Pass, body: nn.Module, ids: Tensor, positions: Tensor) -> list[tuple[str, list[Tensor]]]:
    """Return each module's call, innermost first: the tensors that it got, and the one that it gave."""
    seen: list[tuple[str, list[Tensor]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple | list) else getattr(output, "last_hidden_state", output)
            given = [one for one in (*args, *kwargs.values(), first) if isinstance(one, Tensor)]
            if isinstance(first, Tensor):
                seen.append((name, [one.clone() for one in given]))

        return hook

    hooks = [one.register_forward_hook(note(name), with_kwargs=True) for name, one in body.named_modules()]
    try:
        run(ids, positions)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _is_same(one: Tensor, other: Tensor, order: Tensor) -> bool:
    axis = next((axis for axis, size in enumerate(one.shape) if size == len(order)), None)
    return _is_near(other, one if axis is None else one.index_select(axis, order))
