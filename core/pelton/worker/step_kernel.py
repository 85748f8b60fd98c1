"""Interface of a whole-step kernel: a backend's own way from a decode step's inputs to its logits, for one kind of model.

A plugin offers one through the hook `pelton_step_kernels`. It takes the place of the model's forward pass and logits in steps in which
every row has one token; prompts, drafts and steps with adapters are computed by the model's layers. What follows the logits stays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pelton.ops.interface import optional

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.attention.metadata import ForwardBatch
    from pelton.model.build import BuildConfig, HFConfig

NO_KERNEL = "none"
"""Of the setting `step_kernel`: layer by layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNeeds:
    """A model's decode steps. A new capability is a new optional field here: a kernel that does not name it is refused."""

    architecture: str
    hf: HFConfig
    """config.json's text part."""
    device_type: str
    dtype: str
    block_size: int  # tokens
    max_num_seqs: int
    capability: tuple[int, int] | None = None
    kv_dtype: str = optional("auto")
    quantization: str = optional("plain")
    tp_size: int = optional(1)
    has_adapters: bool = False
    """The engine serves adapters. Refuses nobody: the model's layers compute the steps that have one."""


class StepKernel(ABC):
    """Life cycle: `unsupported` and `__init__` before weights are loaded -> caches are bound to the model's layers -> calls, from one
    thread. Captured and eager steps call the same object."""

    handles: ClassVar[frozenset[str]] = frozenset()
    """Optional needs that it has read about."""
    orders: ClassVar[tuple[str, ...]] = ()
    """Orders of packed weights that it reads beside the plain one; `packed(order)` then tells it. See `OpImplementation`."""
    is_recordable: ClassVar[bool] = False
    """As of an op: without it no step is captured on devices that compute in the calling process."""

    def __init__(self, model: Any, build: BuildConfig) -> None:
        """model: made, its weights allocated where they stay; build: what its layers were made with."""
        self.model, self.build = model, build

    @classmethod
    @abstractmethod
    def unsupported(cls, needs: StepNeeds) -> list[str]:
        """Say why this kernel cannot serve `needs`; an empty list means it can."""

    @abstractmethod
    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Return logits [R, vocab_size] float32 of R rows of one token, once their keys and values are in the cache.

        Row r is token r of `input_ids` and `positions`; `groups` has block tables, sequence lengths and slots for each KV group. Padding
        rows have length 0 and slot -1: nothing of theirs may be written, and what they give is not read. Asks the device nothing.
        """

    def pack(self, order: str) -> bool:
        """See `OpImplementation`: a kernel brings nothing into an order unless it says so."""
        return False

    def packed(self, order: str) -> None:  # noqa: B027
        """From now on the weights lie in this order."""
