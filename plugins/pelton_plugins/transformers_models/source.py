"""From config.json to transformers' class, built with memory for its small tensors alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from pelton.errors import ConfigError
from pelton.model.registry import CAUSAL_SUFFIX, causal_name
from pelton_plugins.transformers_models import experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from pelton.model.build import BuildConfig

LEAST_VERSION = 5
TRACE_DTYPE = torch.bfloat16
"""All products know it on the meta device."""
_NO_NUMBERS = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}
_STATEFUL_LAYERS = ("mamba", "linear", "conv", "recurrent", "ssm")
"""In the names that config.json's `layer_types` gives to layers which keep another state than keys and values."""


def refusal(subject: str, why: str) -> ConfigError:
    """Say which part of a model cannot run, and why."""
    return ConfigError(
        f"{subject} cannot run on transformers' modules: {why}. Use a model that Pelton has itself (pelton plugins lists them), "
        "or write a model plugin (docs/plugins.md)."
    )


@dataclass(frozen=True, slots=True)
class Source:
    """A class of transformers and its configuration."""

    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return self.model_class.__name__

    def build_to_trace(self, attention: str) -> PreTrainedModel:
        """Make the model. attention: the name of an attention function of transformers."""
        return self._build(attention, TRACE_DTYPE)

    def build_without_matrices(self, attention: str) -> PreTrainedModel:
        """Make the model with buffers and vectors on the CPU. Matrices are on the meta device: they are only read from the checkpoint."""
        experts.register()
        with _MatricesOnMeta():
            return self._build(attention, self.dtype, experts_implementation=experts.NAME)

    def _build(self, attention: str, dtype: torch.dtype, **implementations: str) -> PreTrainedModel:
        text, parts = self.config.get_text_config(decoder=True), {"": attention}
        for name in self.config.sub_configs:
            part = getattr(self.config, name, None)
            is_text = part is not None and part.get_text_config(decoder=True) is text
            parts[name] = attention if is_text else "eager"  # parts that are not called may not know the function
        model: PreTrainedModel = self.model_class._from_config(
            self.config, dtype=dtype, attn_implementation=parts, **implementations
        )
        return model.eval()


class _MatricesOnMeta(TorchFunctionMode):
    """Memory that is not filled where it is made, and has two axes or more, is not there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty and kwargs.get("device") is None:
            size = kwargs.get("size", args[0] if args and isinstance(args[0], (tuple, list)) else args)
            if len(size) >= 2:
                kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def find_source(config: BuildConfig) -> Source:
    """Raises `ConfigError` where transformers is not there, does not know the model, or the model is of a kind that cannot run."""
    fields = _fields(config)
    named = (fields.get("architectures") or ["this model"])[0]
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"Pelton has no model {named!r} of its own, and transformers, whose modules it would run on, is not installed. "
            'Install it (pip install "pelton[transformers]").'
        ) from None
    if int(transformers.__version__.split(".")[0]) < LEAST_VERSION:
        raise ConfigError(
            f"transformers is {transformers.__version__}; {named} runs on its modules from version {LEAST_VERSION} on. "
            'Update it (pip install -U "pelton[transformers]").'
        )
    if config.parallel.size > 1:
        raise refusal(named, f"tensor_parallel_size is {config.parallel.size}, and these modules run on one device")
    model_type = fields.get("model_type")
    if model_type not in transformers.CONFIG_MAPPING:
        raise ConfigError(
            f"No model plugin offers architecture {named!r}, and transformers {transformers.__version__} knows no model_type "
            f"{model_type!r}. Install a plugin for it, or a newer transformers."
        )
    source_config = transformers.CONFIG_MAPPING[model_type].from_dict(fields)
    _check_kind(named, source_config)
    model_class = _model_class(named, model_type, source_config)
    if model_class is None:
        raise refusal(named, f"transformers has no causal language model of that name for model_type {model_type!r}")
    if getattr(model_class, "_is_stateful", False):
        raise refusal(named, "it keeps a state of its own for each request (Mamba and the like)")
    return Source(model_class, source_config, config.dtype)


def _model_class(named: str, model_type: str, config: PreTrainedConfig) -> Any:
    """Return the class of that name for the configuration, or the one of its model type where that has another's class."""
    import transformers

    causal = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    own = "".join(filter(str.isalnum, model_type)) + CAUSAL_SUFFIX.lower()
    if causal is not None and (causal.__name__ in (named, causal_name(named)) or named.lower() == own):
        return causal
    others = (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING)
    readers = [mapping.get(type(config), None) for mapping in others]
    return next((one for one in readers if one is not None and one.__name__ == named), None)


def _fields(config: BuildConfig) -> dict[str, Any]:
    given = config.raw_hf if list(config.raw_hf) else config.hf
    return {name: _numbers(getattr(given, name)) for name in given}


def _numbers(value: Any) -> Any:
    """Return `value` with numbers for what transformers writes in place of those that JSON lacks."""
    if isinstance(value, dict):
        named = value.get("__float__") if len(value) == 1 else None
        return _NO_NUMBERS.get(named) if named in _NO_NUMBERS else {key: _numbers(one) for key, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _check_kind(named: str, config: PreTrainedConfig) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise refusal(named, "it is an encoder with a decoder")
    config = config.get_text_config(decoder=True)
    if getattr(config, "add_cross_attention", False):
        raise refusal(named, "add_cross_attention is set")
    if getattr(config, "alibi", False):
        raise refusal(named, "its attention adds ALiBi's distances (alibi is set)")
    if getattr(config, "num_kv_shared_layers", None):
        raise refusal(named, "its last layers read the keys and values of earlier ones (num_kv_shared_layers)")
    kinds: list[str] = getattr(config, "layer_types", None) or []
    stateful = [kind for kind in kinds if any(word in kind for word in _STATEFUL_LAYERS)]
    if stateful:
        raise refusal(named, f"it has layers of type {stateful[0]!r}, which keep a state of their own")


def set_ropes(model: PreTrainedModel, max_model_len: int) -> None:
    """Fix frequencies that transformers would choose by the longest row of a step. Raises `ConfigError` where they follow each length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", None)
        by_layer: Mapping[Any, Any] = kinds if isinstance(kinds, dict) else {None: kinds}
        fixed: dict[Any, Any] = {}
        for layer_type, kind in by_layer.items():
            fixed[layer_type] = kind
            if kind not in ("dynamic", "longrope"):
                continue
            parameters = model.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            original = parameters.get("original_max_position_embeddings") or model.config.max_position_embeddings
            if max_model_len > original and kind == "dynamic":
                raise refusal(
                    f"{type(model).__name__} ({name})",
                    f"its frequencies follow the length of each row beyond {original} tokens: set max_model_len to {original} at most",
                )
            if max_model_len > original:
                options = {} if layer_type is None else {"layer_type": layer_type}
                frequencies, _ = ROPE_INIT_FUNCTIONS[kind](model.config, None, seq_len=original + 1, **options)
                buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
                getattr(module, buffer).copy_(frequencies)
            fixed[layer_type] = "fixed"
        if fixed != dict(by_layer):
            module.rope_type = fixed if isinstance(kinds, dict) else fixed[None]
