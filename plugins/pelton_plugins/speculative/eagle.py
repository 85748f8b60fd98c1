"""EAGLE: a layer that reads the model's hidden state of a token beside the next token, and says the hidden state behind that one.

    f_i+1 = layer(W [e(t_i+1); f_i]),  draft t_i+2 = argmax head(f_i+1)

Li et al., EAGLE (arXiv:2401.15077), section 4.1; e and head are the model's own embedding and output head. One chain of drafts, not a
tree. The pair of token i + 1 and hidden state i stands at position i, so its keys and values lie in token i's block. Where a prefix is
found that went on otherwise before, its last pair has the other token: a draft may be worse, and nothing else. R = rows, T = tokens,
H = hidden size, V = vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pelton.errors import ConfigError
from pelton.layers.encoder import WholeLinear
from pelton.ops.interface import Embed, EmbedNeeds, EmbedTensors, Linear, LinearNeeds, LinearTensors
from pelton.spec_decode.drafter import Drafter, DrafterContext, DraftPass, DraftRows
from pelton_plugins.speculative.checkpoint import HeadCheckpoint, head_model, join_caches
from pelton_plugins.speculative.eagle_layer import EagleLayer

IGNORED = r"(model\.)?(embed_tokens|lm_head)\.weight"
"""Copies of the model's own."""


class HiddenDrafter(Drafter):
    """Drafts from hidden states, each made of the last one and the token that it gave: the loop of all EAGLE's versions."""

    runs_on_ranks: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__()
        self.num_drafts = context.config.num_speculative_tokens
        self.checkpoint = HeadCheckpoint(context)
        self.names = self.checkpoint.shapes()
        self.hidden_size: int = context.build.hf.hidden_size
        own = self.checkpoint.hf.hidden_size
        if own != self.hidden_size:
            raise ConfigError(
                f"{self.checkpoint.path} has hidden_size {own}, and the model {self.hidden_size}. Give the head that was made for it."
            )
        self.parallel = context.build.parallel
        self._embed = _bind_embedding(head_model(context), context)

    @abstractmethod
    def advance(self, following: Tensor, hidden: Tensor, step: DraftPass) -> Tensor:
        """Tokens [T] and the hidden states in front of them [T, H] -> those behind them."""

    @abstractmethod
    def best(self, hidden: Tensor) -> Tensor:
        """Return the tokens that hidden states give: [R, H] -> [R] int64."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int64 -> [T, H]"""
        return self.parallel.all_reduce(self._embed(token_ids))

    def load_weights(self) -> None:
        self.checkpoint.load()

    def draft(self, rows: DraftRows) -> None:
        hidden = rows.memory
        assert hidden is not None, "rows have been followed"
        rows.place(self.best(hidden))
        for _ in range(rows.most - 1):
            step = rows.step()
            hidden = self.advance(step.following, hidden[: step.batch.num_tokens], step)
            rows.place(self.best(hidden))


class EagleDrafter(HiddenDrafter):
    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        build, names = self.checkpoint.build, self.names
        self._hidden_states, self._vocab_size = context.model.hidden_states, context.info.vocab_size
        weights = context.model.lm_head.linear_weights
        needs = LinearNeeds(dtype=context.build.dtype_name, linear=weights.spec)
        self._head: Linear = context.build.ops.bind("linear", needs, LinearTensors(weights))
        prefix = "model." if "model.fc.weight" in names else ""
        check_shape(self.checkpoint, names, f"{prefix}fc.weight", [self.hidden_size, 2 * self.hidden_size])
        build.weights.ignore(IGNORED)
        self.fc = WholeLinear(
            2 * self.hidden_size, {f"{prefix}fc": self.hidden_size}, config=build, bias=f"{prefix}fc.bias" in names
        )
        self.layer = EagleLayer(self.hidden_size, names, config=build, prefix=f"{prefix}layers.0")
        join_caches(build, context)

    @classmethod
    def reads(cls, hf_config: Mapping[str, Any]) -> bool:
        return is_named(hf_config, "eagle") and not is_named(hf_config, "eagle3")

    def follow(self, step: DraftPass) -> Tensor:
        """Write keys and values of all tokens; keep the hidden states behind the last ones: [r, H]."""
        return self.advance(step.following, self._hidden_states(step.hidden, None), step)[step.last]

    def advance(self, following: Tensor, hidden: Tensor, step: DraftPass) -> Tensor:
        x = self.fc(torch.cat([self.embed(following), hidden], dim=-1))
        behind: Tensor = self.layer(x, x, step.batch)
        return behind

    def best(self, hidden: Tensor) -> Tensor:
        logits = self.parallel.all_gather(self._head(hidden))
        return logits[:, : self._vocab_size].argmax(dim=-1)  # behind it is padding of the last rank


def _bind_embedding(model: Any, context: DrafterContext) -> Embed:
    """The model's, without what it multiplies embeddings by: a head has seen them as they are."""
    embedding, build = model.embed_tokens, context.build
    weights = embedding.linear_weights
    needs = EmbedNeeds(
        dtype=build.dtype_name, num_rows=embedding.num_rows, hidden_size=build.hf.hidden_size, scale=None, tp_size=build.parallel.size,
        weight_format=weights.spec.weight_format,
    )  # fmt: skip
    matrix = next(iter(weights.tensors.values()))
    bound: Embed = build.ops.bind("embed", needs, EmbedTensors(matrix, embedding.first_row, weights))
    return bound


def check_shape(checkpoint: HeadCheckpoint, names: Mapping[str, tuple[int, ...]], name: str, shape: list[int]) -> None:
    """Refuse a checkpoint that is of another kind. Made-up weights have no names."""
    found = names.get(name)
    if names and (found is None or list(found) != shape):
        has = "no" if found is None else f"{list(found)} as"
        raise ConfigError(
            f"{checkpoint.path} has {has} {name}, which has to be {shape}: it holds no such EAGLE head. Check "
            "speculative_config.method: eagle, or eagle3."
        )


def is_named(hf_config: Mapping[str, Any], word: str) -> bool:
    """Return whether the config says so: by model_type or by an architecture (EagleLlamaForCausalLM, LlamaForCausalLMEagle3)."""
    said = [hf_config.get("model_type"), *(hf_config.get("architectures") or ())]
    return any(word in str(name).lower() for name in said)
