"""Choice of whether a model is run to pool, and how: from its architecture, its folder and the settings. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pelton.config import EngineConfig
from pelton.entries import POOL, ModelEntry
from pelton.errors import ConfigError
from pelton.model.pooling import ACTIVATIONS, PoolingFolder, PoolingSpec
from pelton.model.registry import ANY, causal_name, find_named

EMBEDDING_TASKS = ("embed", "token_embed")
CLASSIFICATION_TASKS = ("classify", "reward")
SCORE = "score"
SEQUENCE_HEADS = ("ForSequenceClassification",)
TOKEN_HEADS = ("ForTokenClassification",)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts of a model that are known before the settings are looked at."""

    hf_config: Mapping[str, Any]
    architecture: str
    folder: PoolingFolder
    entries: list[ModelEntry]


def resolve_pooling(config: EngineConfig, facts: ModelFacts) -> PoolingSpec | None:
    """None for a model that generates. Raises `ConfigError` where the settings ask for what it cannot do."""
    settings = config.pooling
    own = find_named(facts.entries, facts.architecture)
    base = find_named(facts.entries, facts.architecture, causal_name(facts.architecture))
    is_made_for_it = (own is not None and own.kind == POOL) or (own is None and base is not None)
    if settings.runner == "generate" and is_made_for_it:
        raise ConfigError(
            f"runner is 'generate', and {facts.architecture} makes vectors or scores, not tokens. Leave runner unset."
        )
    if settings.runner == "generate" or (
        settings.runner == "auto" and not is_made_for_it and not facts.folder.is_embedding
    ):
        _check_unused(config)
        return None
    if base is None and not any(ANY in entry.architectures for entry in facts.entries):
        return None  # the registry says which architectures there are
    return _spec(config, facts, attends_both_ways=base is not None and base.attends_both_ways)


def _check_unused(config: EngineConfig) -> None:
    given = [
        name for name in ("pooling_type", "normalize", "is_matryoshka") if getattr(config.pooling, name) is not None
    ]
    if given:
        raise ConfigError(
            f"{given[0]} is set, and this model generates. Set runner to pooling, or leave {given[0]} unset."
        )


def _spec(config: EngineConfig, facts: ModelFacts, *, attends_both_ways: bool) -> PoolingSpec:
    hf, settings, folder = facts.hf_config, config.pooling, facts.folder
    has_sequence_head = facts.architecture.endswith(SEQUENCE_HEADS)
    has_token_head = facts.architecture.endswith(TOKEN_HEADS)
    labels = _labels(hf) if has_sequence_head or has_token_head else []
    if has_token_head:
        tasks = ["token_classify"]
    elif has_sequence_head:
        tasks = [*CLASSIFICATION_TASKS, *([SCORE] if len(labels) == 1 else [])]
    else:
        tasks = list(EMBEDDING_TASKS)
    default = "cls" if attends_both_ways else "last"
    if has_sequence_head and hf.get("classifier_pooling") in ("cls", "mean"):
        default = str(hf["classifier_pooling"])
    pooling_type = settings.pooling_type or (None if labels else folder.pooling_type) or default
    normalize = settings.normalize if settings.normalize is not None else folder.normalize
    stated = hf.get("matryoshka_dimensions")
    dimensions = settings.matryoshka_dimensions or (stated if isinstance(stated, list) else [])
    is_matryoshka = settings.is_matryoshka
    if is_matryoshka is None:
        is_matryoshka = bool(hf.get("is_matryoshka")) or bool(dimensions)
    return PoolingSpec(
        tasks=tasks,
        pooling_type=pooling_type,
        attends_both_ways=attends_both_ways,
        # A folder that lists its modules, and no Normalize among them, has vectors of any length.
        normalize=not folder.is_embedding if normalize is None else normalize,
        dense=[] if labels else folder.dense,
        dimensions=dimensions,
        is_matryoshka=is_matryoshka,
        labels=labels,
        activation=_activation(hf, len(labels)),
    )


def _labels(hf: Mapping[str, Any]) -> list[str]:
    """Names by index; config.json says two where it says nothing."""
    named = hf.get("id2label")
    if isinstance(named, Mapping) and named:
        try:
            by_index = {int(index): str(label) for index, label in named.items()}
        except (TypeError, ValueError):
            raise ConfigError(f"config.json has id2label {dict(named)!r}; its keys are numbers from 0.") from None
        if sorted(by_index) != list(range(len(by_index))):
            raise ConfigError(f"config.json has id2label with the keys {sorted(by_index)}; expected 0, 1, ...")
        return [by_index[index] for index in range(len(by_index))]
    count = hf.get("num_labels", 2)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ConfigError(f"config.json has num_labels {count!r}; expected a number from 1.")
    return [f"LABEL_{index}" for index in range(count)]


def _activation(hf: Mapping[str, Any], num_labels: int) -> str:
    stated = hf.get("sbert_ce_default_activation_function") or (hf.get("sentence_transformers") or {}).get(
        "activation_fn"
    )
    if stated is not None:
        name = str(stated).rsplit(".", 1)[-1].lower()
        if name not in ACTIVATIONS:
            raise ConfigError(f"config.json has the activation {name!r}; Pelton has {', '.join(ACTIVATIONS)}.")
        return name
    problem = hf.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if problem == "multi_label_classification" or num_labels == 1 else "softmax"
