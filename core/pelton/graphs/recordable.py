"""Rules of a recorded step: functions of C go through `launch`, and no op of torch may read on the host.

A recorder of calls, for a device that computes in the calling process, sets `recording` while it records on a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_HOST_READS = (
    "aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.allclose", "aten.nonzero", "aten.argwhere",
    "aten.where.default", "aten.masked_select", "aten.unique", "aten._unique", "aten.bincount",
)  # fmt: skip
_INDEXING = ("aten.index.", "aten.index_put", "aten._index_put_impl", "aten._unsafe_index")

recording: ContextVar[list[Callable[[], Any]] | None] = ContextVar("pelton_recorded_calls", default=None)
"""The calls that this thread records, in their order; None while it records none."""


home: ContextVar[Tensor | None] = ContextVar("pelton_home", default=None)
"""Memory for the next empty tensor of its shape and dtype that this thread makes while it records: a result comes to lie where it is
to stay, without a copy. Taken once. A recorder may leave it alone."""


def launch(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that computes in memory given by address; where this thread records its calls, it becomes one of them.

    arguments: numbers, addresses and structs, which stay as they are. It returns 0 or None, or it failed.
    """
    calls = recording.get()
    if calls is not None:
        calls.append(partial(function, *arguments))
    return function(*arguments)


def reads_on_host(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> bool:
    """Return whether an op of torch brings values from the device to the host, or makes a shape of them: a recorded step cannot have
    one. Of what passes no dispatcher, `Tensor.tolist` and `numpy` on a CPU, nothing is seen."""
    name = str(func)
    if name.startswith(_INDEXING):
        return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in tree_leaves(args[1]))
    if name in ("aten.repeat_interleave.Tensor", "aten.repeat_interleave.self_Tensor"):
        return (kwargs or {}).get("output_size") is None
    return name.startswith(_HOST_READS)
