"""EAGLE-3: hidden states of three depths of the model are the input, and the output head is its own, often of a part of the vocabulary.

    g_i = W [h_low; h_mid; h_high],  a_i+1 = layer([norm e(t_i+1); norm g_i]) with the residual g_i
    draft t_i+2 = argmax head(norm a_i+1), and a_i+1 is what the next draft reads in place of g

Li et al., EAGLE-3 (arXiv:2503.01840), section 3. Pairs stand as in EAGLE (`eagle.py`). `d2t` [draft vocabulary] is the difference
between a token's id and its number in the head. T = tokens, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pelton.errors import ConfigError
from pelton.layers.encoder import WholeLinear
from pelton.layers.norm import RMSNorm
from pelton.parallel.context import ParallelContext
from pelton.spec_decode.drafter import DrafterContext, DraftPass
from pelton_plugins.speculative.checkpoint import HeadCheckpoint, join_caches
from pelton_plugins.speculative.eagle import HiddenDrafter, check_shape, is_named
from pelton_plugins.speculative.eagle_layer import EagleLayer

NOT_THERE = ("norm_before_fc",)
"""Switches of config.json that change what the head computes."""


class Taps:
    """Inputs of some layers of the model in a step: the sum of hidden states and residual, each [T, H]."""

    def __init__(self, layers: Sequence[nn.Module], indices: Sequence[int], parallel: ParallelContext) -> None:
        self._parallel = parallel
        self._taken: dict[int, Tensor] = {}
        self._indices = indices
        for index in dict.fromkeys(indices):
            layers[index].register_forward_pre_hook(self._hook(index))

    def _hook(self, index: int) -> Any:
        def take(layer: nn.Module, given: tuple[Any, ...]) -> None:
            hidden, residual = given[:2]
            if hidden.dim() != 2 or (residual is not None and residual.shape != hidden.shape):
                raise ConfigError(
                    f"speculative_config.method is eagle3, and {type(layer).__name__} takes no hidden states and residual of one shape. "
                    "Use eagle, medusa or draft_model."
                )
            hidden = self._parallel.all_reduce(hidden.clone())
            self._taken[index] = hidden if residual is None else hidden + residual

        return take

    def take(self, like: Tensor) -> Tensor:
        """[T, n H]; a warm-up that leaves layers out gives zeros for them. like: [T, H]"""
        taken, self._taken = self._taken, {}
        return torch.cat([taken.get(index, torch.zeros_like(like)) for index in self._indices], dim=-1)


class Eagle3Drafter(HiddenDrafter):
    d2t: Tensor | None
    hooks_layers: ClassVar[bool] = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        build, names, hidden_size = self.checkpoint.build, self.names, self.hidden_size
        hf = build.hf
        if wrong := [name for name in NOT_THERE if hf.get(name)]:
            raise ConfigError(
                f"config.json of {self.checkpoint.path} sets {wrong[0]}, which Pelton does not compute. Give a head without it."
            )
        indices = _tapped_layers(self.checkpoint, context)
        self._taps = Taps(context.model.layers, indices, context.build.parallel)
        check_shape(self.checkpoint, names, "fc.weight", [hidden_size, len(indices) * hidden_size])
        prefix = "layers.0" if "layers.0.hidden_norm.weight" in names else "midlayer"
        self.fc = WholeLinear(len(indices) * hidden_size, {"fc": hidden_size}, config=build, bias="fc.bias" in names)
        self.input_layernorm = RMSNorm(hidden_size, config=build, prefix=f"{prefix}.input_layernorm")
        self.hidden_norm = RMSNorm(hidden_size, config=build, prefix=f"{prefix}.hidden_norm")
        self.layer = EagleLayer(2 * hidden_size, names, config=build, prefix=prefix)
        self.norm = RMSNorm(hidden_size, config=build, prefix="norm")
        self._norms_residual = bool(hf.get("norm_before_residual"))
        num_rows = int(hf.get("draft_vocab_size") or hf.vocab_size)
        self.lm_head = WholeLinear(hidden_size, {"lm_head": num_rows}, config=build, bias=False)
        self.register_buffer("d2t", None)
        if "d2t" in names:
            self.d2t = torch.zeros(num_rows, dtype=torch.int64, device=build.device)
            build.weights.expect("d2t", (num_rows,), self.d2t)
        build.weights.ignore(r"t2d|embed_tokens\.weight")
        join_caches(build, context)

    @classmethod
    def reads(cls, hf_config: Mapping[str, Any]) -> bool:
        return is_named(hf_config, "eagle3")

    def follow(self, step: DraftPass) -> Tensor:
        """Write keys and values of all tokens; keep the hidden states behind the last ones: [r, H]."""
        embedded = self.embed(step.following)
        return self._advance(embedded, self.fc(self._taps.take(embedded)), step)[step.last]

    def advance(self, following: Tensor, hidden: Tensor, step: DraftPass) -> Tensor:
        return self._advance(self.embed(following), hidden, step)

    def _advance(self, embedded: Tensor, hidden: Tensor, step: DraftPass) -> Tensor:
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        behind: Tensor = self.layer(x, normed if self._norms_residual else hidden, step.batch)
        return behind

    def best(self, hidden: Tensor) -> Tensor:
        tokens: Tensor = self.lm_head(self.norm(hidden)).argmax(dim=-1)
        return tokens if self.d2t is None else tokens + self.d2t[tokens]


def _tapped_layers(checkpoint: HeadCheckpoint, context: DrafterContext) -> list[int]:
    """Those of config.json, else three: a low one, the middle one and a high one, as the paper's heads have them."""
    layers = context.model.layers
    total, hf = len(layers), checkpoint.hf
    stated = hf.get("eagle_aux_hidden_state_layer_ids") or (hf.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    indices = sorted(stated or (2, total // 2, total - 3))
    if not all(isinstance(index, int) and 0 <= index < total for index in indices):
        raise ConfigError(
            f"{checkpoint.path} reads what goes into the layers {', '.join(map(str, indices))} of the model, which has {total}. Set "
            "eagle_aux_hidden_state_layer_ids in its config.json."
        )
    if context.model.lm_head.has_post_norm:
        raise ConfigError(
            f"speculative_config.method is eagle3, and {context.info.architecture} norms what its layers give before it is added: hidden "
            "states between layers are not there. Use eagle, medusa or draft_model."
        )
    return indices
