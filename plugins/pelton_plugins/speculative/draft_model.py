"""A small model of the same vocabulary that drafts token by token: Leviathan et al. (arXiv:2211.17192), Chen et al. (arXiv:2302.01318).

Its layers' keys and values lie in the blocks of the model's own, so a prefix that is found is found for both. R = rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec

from pelton.config import EngineConfig
from pelton.config.eplb import EPLBConfig
from pelton.errors import ConfigError
from pelton.model.build import BuildConfig, make_build_config
from pelton.model.registry import build_model
from pelton.model.resolve import resolve_model
from pelton.model.resolved import ResolvedModel
from pelton.spec_decode.drafter import Drafter, DrafterContext, DraftPass, DraftRows
from pelton.spec_decode.select import find_checkpoint
from pelton_plugins.speculative.checkpoint import join_caches, make_loader


class DraftModel(Drafter):
    reads_hidden = False
    runs_on_ranks = True

    def __init__(self, context: DrafterContext) -> None:
        super().__init__()
        self.num_drafts = context.config.num_speculative_tokens
        self._plugins = context.plugins
        self._settings = _settings(context)
        self._info = resolve_model(self._settings, context.plugins)
        _check(self._info, context)
        self._build = _build(self._settings, self._info, context)
        self.model = build_model(self._build, self._info.architecture, context.plugins)
        join_caches(self._build, context)

    @classmethod
    def reads(cls, hf_config: Mapping[str, Any]) -> bool:
        return bool(hf_config.get("architectures"))

    def load_weights(self) -> None:
        loader = make_loader(self._settings, self._info, self._build, self._plugins)
        self.model.load_weights(loader.weights())
        self._build.ops.weights_loaded()

    def follow(self, step: DraftPass) -> None:
        """Write keys and values of the step's tokens."""
        self.model.forward(step.batch)

    def draft(self, rows: DraftRows) -> None:
        for _ in range(rows.most):
            step = rows.step()
            logits = self.model.compute_logits(self.model.forward(step.batch), step.last)
            rows.place(logits.argmax(dim=-1))


def _settings(context: DrafterContext) -> EngineConfig:
    """The engine's, for this model in place of the one that verifies."""
    path, _ = find_checkpoint(context.engine_config, context.plugins)
    model = msgspec.structs.replace(
        context.engine_config.model, model=str(path), tokenizer=None, skip_tokenizer_init=True, dtype=context.info.dtype,
        max_model_len=None, revision=None, hf_overrides={}, generation_config="pelton", override_generation_config={},
        quantization=None,
    )  # fmt: skip
    return msgspec.structs.replace(context.engine_config, model=model, eplb=EPLBConfig())


def _check(info: ResolvedModel, context: DrafterContext) -> None:
    if info.vocab_size != context.info.vocab_size:
        raise ConfigError(
            f"speculative_config.model is {info.name!r} with a vocabulary of {info.vocab_size} tokens, and the model has "
            f"{context.info.vocab_size}. A draft model needs the same vocabulary."
        )
    if info.max_model_len < context.info.max_model_len:
        raise ConfigError(
            f"max_model_len is {context.info.max_model_len}, and the draft model {info.name!r} reads {info.max_model_len} tokens. Set "
            f"max_model_len to at most {info.max_model_len}."
        )
    if info.pooling is not None:
        raise ConfigError(f"speculative_config.model is {info.name!r}, which pools; a draft model generates.")


def _build(settings: EngineConfig, info: ResolvedModel, context: DrafterContext) -> BuildConfig:
    """Return the config that its layers are made with: the model's ops and attention backends, on their device."""
    target, parallel = context.build, copy(context.build.parallel)
    parallel.experts = None  # engines draft when they have drafts to make: each has all of the draft's experts
    made = make_build_config(
        settings, info, context.plugins, device=target.device, device_type=target.device_type,
        max_num_seqs=target.max_num_seqs, max_num_batched_tokens=target.max_num_batched_tokens, parallel=parallel,
    )  # fmt: skip
    made.weights.make_copier = target.weights.make_copier
    return replace(
        made, max_model_len=target.max_model_len, ops=target.ops.fork(), attention=target.attention, allocate=target.allocate
    )  # fmt: skip
