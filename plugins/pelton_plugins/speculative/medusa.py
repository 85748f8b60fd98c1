"""Medusa heads: head i reads the hidden state of a row's last token, and says the token i + 1 places behind the next one.

    p_i = softmax(W_i' (x + SiLU(W_i x + b_i))), each residual block once a layer

Cai et al., Medusa (arXiv:2401.10774), section 2.1. One chain of most likely tokens is verified, not a tree of them. H = hidden size,
V = vocabulary, R = rows.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count, takewhile
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import silu

from pelton.errors import ConfigError
from pelton.layers.encoder import WholeLinear
from pelton.model.build import BuildConfig
from pelton.spec_decode.drafter import Drafter, DrafterContext, DraftPass, DraftRows
from pelton_plugins.speculative.checkpoint import HeadCheckpoint, head_model

NAMES = (
    ("medusa_heads.{head}.{layer}.linear", "medusa_heads.{head}.{num_layers}"),
    ("{head}.{layer}.linear", "{head}.{num_layers}"),
    ("blocks.{head}.layers.{layer}", "lm_heads.{head}"),
)
"""Of a block's product and of a head's, in checkpoints."""


class MedusaHead(nn.Module):
    """[R, H] -> logits [R, V]"""

    def __init__(
        self, block_names: list[str], name: str, sizes: tuple[int, int], shapes: Collection[str], config: BuildConfig
    ) -> None:
        """sizes: H and V."""
        super().__init__()
        hidden_size, vocab_size = sizes
        self.blocks = nn.ModuleList(
            WholeLinear(hidden_size, {block: hidden_size}, config=config, bias=f"{block}.bias" in shapes)
            for block in block_names
        )
        self.head = WholeLinear(hidden_size, {name: vocab_size}, config=config, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = hidden + silu(block(hidden))
        logits: Tensor = self.head(hidden)
        return logits


class MedusaDrafter(Drafter):
    runs_on_ranks = True  # each has all of the heads

    def __init__(self, context: DrafterContext) -> None:
        super().__init__()
        self._checkpoint = checkpoint = HeadCheckpoint(context)
        self._hidden_states = head_model(context).hidden_states
        self.num_drafts = context.config.num_speculative_tokens
        shapes = checkpoint.shapes()
        block, head = _names(shapes, checkpoint)
        num_heads, num_layers = _counts(block, shapes, checkpoint)
        if self.num_drafts > num_heads:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_drafts}, and {checkpoint.path} has {num_heads} heads, each for one draft. Use at "
                f"most {num_heads}."
            )
        sizes = (context.build.hf.hidden_size, context.info.vocab_size)
        _check_sizes(shapes.get(f"{head.format(head=0, num_layers=num_layers)}.weight"), sizes, checkpoint)
        self.heads = nn.ModuleList()
        for index in range(num_heads):
            blocks = [block.format(head=index, layer=layer) for layer in range(num_layers)]
            name = head.format(head=index, num_layers=num_layers)
            if index < self.num_drafts:
                self.heads.append(MedusaHead(blocks, name, sizes, shapes, checkpoint.build))
            else:
                for unused in (*blocks, name):
                    checkpoint.build.weights.ignore(rf"{unused}\.(weight|bias)")

    @classmethod
    def reads(cls, hf_config: Mapping[str, Any]) -> bool:
        return hf_config.get("model_type") == "medusa" or "medusa_num_heads" in hf_config

    def load_weights(self) -> None:
        self._checkpoint.load()

    def follow(self, step: DraftPass) -> Tensor:
        """Keep the hidden states of last tokens: [r, H]."""
        hidden: Tensor = self._hidden_states(step.hidden, step.last)
        return hidden

    def draft(self, rows: DraftRows) -> None:
        for head in list(self.heads)[: rows.most]:
            rows.place(head(rows.memory).argmax(dim=-1))


def _counts(block: str, shapes: Collection[str], checkpoint: HeadCheckpoint) -> tuple[int, int]:
    """Heads of the checkpoint, and layers of each. Where weights are made up, its config.json says them."""
    if not shapes:
        hf = checkpoint.hf
        return int(hf.get("medusa_num_heads") or hf.num_heads), int(hf.get("medusa_num_layers", 1))
    heads = takewhile(lambda head: f"{block.format(head=head, layer=0)}.weight" in shapes, count())
    layers = takewhile(lambda layer: f"{block.format(head=0, layer=layer)}.weight" in shapes, count())
    return len(list(heads)), len(list(layers))


def _check_sizes(found: tuple[int, ...] | None, sizes: tuple[int, int], checkpoint: HeadCheckpoint) -> None:
    """found: [V, H] of the first head; None where it is not there, which loading says."""
    if found is not None and found != sizes[::-1]:
        raise ConfigError(
            f"{checkpoint.path} has heads from {found[-1]} numbers to {found[0]} tokens; the model's hidden states have {sizes[0]} "
            f"numbers, and its vocabulary {sizes[1]} tokens. Give the heads that were made for it."
        )


def _names(shapes: Collection[str], checkpoint: HeadCheckpoint) -> tuple[str, str]:
    """The names of blocks and heads that this checkpoint has."""
    firsts = [f"{block.format(head=0, layer=0)}.weight" for block, _ in NAMES]
    for names, first in zip(NAMES, firsts, strict=True):
        if first in shapes:
            return names
    if not shapes:  # weights that are made up have no names of their own
        return NAMES[0]
    raise ConfigError(f"{checkpoint.path} has no tensor {', '.join(firsts)}: it holds no Medusa heads.")
