"""Interface of a drafter: draft tokens that workers make from weights of its own, beside the model. Imports torch.

R = rows of a step that get drafts, r = rows that sample, T = tokens of a step, H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn

if TYPE_CHECKING:
    from pelton.attention.metadata import ForwardBatch
    from pelton.config import EngineConfig, SpeculativeConfig
    from pelton.model.build import BuildConfig
    from pelton.model.resolved import ResolvedModel
    from pelton.plugins import Plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterContext:
    """Everything that a drafter is made from: the model's modules are there, its weights come later. New fields have defaults."""

    config: SpeculativeConfig
    engine_config: EngineConfig
    info: ResolvedModel
    model: Any
    """The `CausalLM` that verifies the drafts."""
    build: BuildConfig
    """What the model was made with. The drafter's layers with a cache belong in `cache_layers`, under names of their own: they
    share the block tables of the model's. Ops of its own weights are bound by `build.ops.fork()`."""
    plugins: Plugins


@dataclass(slots=True, kw_only=True)
class DraftPass:
    """Tokens for a drafter to compute, with the metadata of attention: each token's keys and values have room in its block."""

    batch: ForwardBatch
    following: Tensor  # [T] int64, the token behind each; behind a rejected draft, or the last known token, any
    hidden: Any = None  # `Drafter.follow`: what the model's forward pass gave
    last: Tensor  # [r] int64, `Drafter.follow`: index of each sampling row's last token that counts


class DraftRows(Protocol):
    """Rows of a step that is about to run. Those with most drafts come first, so that rows which are done leave at the end."""

    most: int
    """Drafts of the first row, at least 1."""
    memory: Tensor | None
    """[R, ...], what `Drafter.follow` gave for each row at the end of its last step."""

    def place(self, token_ids: Tensor) -> None:
        """Put the next draft of each row behind its tokens: [R] or of the first rows, int64."""
        ...

    def step(self) -> DraftPass:
        """One token of each row that still wants a draft: its last known one in the first call, then draft by draft."""
        ...


class Drafter(nn.Module, ABC):
    """Class that the `load` of a `pelton_draft_proposers` entry names, where workers make the drafts: made as `Drafter(context)`.

    Drafts are the tokens that it holds most likely, and right or wrong they change no output. Each worker makes one, under inference
    mode, and nothing may ask the device for a value. `follow` is called behind each step, `draft` in front of a step with drafts.
    """

    num_drafts: int
    """Most drafts of a row in one step."""
    reads_hidden: ClassVar[bool] = True
    """Whether `follow` reads `DraftPass.hidden`: then the model computes it for all tokens of a step."""
    hooks_layers: ClassVar[bool] = False
    """Whether it has hooks on the model's layers: then no part of a step is captured."""
    runs_on_ranks: ClassVar[bool] = False
    """Whether each rank of tensor parallelism makes the same drafts, by collectives of `build.parallel`."""

    @classmethod
    def reads(cls, hf_config: Mapping[str, Any]) -> bool:
        """Return whether a checkpoint with this config.json is for this drafter: asked where the settings have no method."""
        return False

    @abstractmethod
    def load_weights(self) -> None:
        """Read the checkpoint, once. Raises `ConfigError` naming what is missing or misshapen."""

    def follow(self, step: DraftPass) -> Tensor | None:
        """Take in a step's tokens, prompts too; return what `draft` needs of each sampling row: [r, ...], always of one shape."""
        return None

    @abstractmethod
    def draft(self, rows: DraftRows) -> None:
        """Place up to `rows.most` drafts."""
