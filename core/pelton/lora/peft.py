"""adapter_config.json as PEFT saves it: what the matrices beside it mean. Front ends and workers read it, and no tensor.

Whatever this reader does not understand is an error that names it. Nothing of an adapter is left out in silence.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pelton import moved
from pelton.errors import AdapterNotFoundError, AdapterRankError, InvalidAdapterError

if not TYPE_CHECKING:
    __getattr__ = moved.names_of(__name__)

CONFIG_NAME = "adapter_config.json"
WEIGHT_NAMES = ("adapter_model.safetensors", "adapter_model.bin")
_MAX_CONFIG_BYTES = 1 << 20
_FEATURES = {
    "use_dora": "DoRA scales the columns of the merged weights",
    "use_qalora": "QA-LoRA pools the inputs",
    "use_bdlora": "the matrices are block-diagonal",
    "layer_replication": "layers are replicated",
    "trainable_token_indices": "embeddings of some tokens are replaced",
    "target_parameters": "parameters outside linear layers are adapted",
    "alora_invocation_tokens": "the adapter starts at some tokens (aLoRA)",
    "arrow_config": "adapters are mixed (Arrow)",
    "fan_in_fan_out": "it is for layers that store transposed weights",
}
"""Settings that change what an adapter computes, and how."""
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways of `init_lora_weights` that leave the base model as it is. The others take a part of its weights away."""
_MOST_PATTERNS = 2
"""Of ".*" in a key of rank_pattern or alpha_pattern: matching more may take long."""


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """The part of adapter_config.json that says what the matrices mean."""

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    target_modules: Sequence[str] | str
    base_model: str | None

    @property
    def largest_rank(self) -> int:
        return max([self.rank, *self.rank_pattern.values()])

    def rank_of(self, name: str) -> int:
        return int(_by_pattern(self.rank_pattern, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return what B A x of the matrix `name` is multiplied by: alpha / r, or with rsLoRA alpha / sqrt(r) (arXiv:2312.03732)."""
        rank, alpha = self.rank_of(name), float(_by_pattern(self.alpha_pattern, name, self.alpha))
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def read_config(folder: str | os.PathLike[str], *, max_rank: int, name: str = "") -> PeftConfig:
    """Read and check adapter_config.json. Raises `AdapterNotFoundError`, `AdapterRankError` or `InvalidAdapterError`."""
    folder = Path(folder)
    shown = name or folder.name
    path = folder / CONFIG_NAME
    if not path.is_file() or not any((folder / weights).is_file() for weights in WEIGHT_NAMES):
        wanted = f"{CONFIG_NAME} and {' or '.join(WEIGHT_NAMES)}"
        raise AdapterNotFoundError(f"LoRA adapter {shown!r} not found: its folder needs {wanted}.", param="model")
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ValueError(f"it is larger than {_MAX_CONFIG_BYTES} bytes")
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise invalid_adapter(shown, f"{CONFIG_NAME} cannot be read as JSON: {error}") from None
    if not isinstance(fields, dict):
        raise invalid_adapter(shown, f"{CONFIG_NAME} is a {type(fields).__name__}, not an object")
    config = check_config(fields, shown)
    if config.largest_rank > max_rank:
        raise AdapterRankError(
            f"LoRA rank exceeds maximum: adapter {shown!r} has r {config.largest_rank}, and max_lora_rank is {max_rank}. "
            "Start the engine with a higher --max-lora-rank.",
            param="model",
        )
    return config


def check_config(fields: Mapping[str, Any], shown: str) -> PeftConfig:
    """The content of adapter_config.json, checked. Raises `InvalidAdapterError`."""
    if fields.get("peft_type") != "LORA":
        raise invalid_adapter(shown, f"peft_type is {fields.get('peft_type')!r}; only 'LORA' is served")
    rank, alpha = fields.get("r"), fields.get("lora_alpha", 8)
    if type(rank) is not int or rank < 1:
        raise invalid_adapter(shown, f"r is {rank!r}; it must be a positive integer")
    if not _is_number(alpha):
        raise invalid_adapter(shown, f"lora_alpha is {alpha!r}; it must be a number")
    if fields.get("bias", "none") != "none":
        raise invalid_adapter(shown, f"bias is {fields['bias']!r}: biases are not served. Train it with bias 'none'")
    if fields.get("lora_bias"):
        raise invalid_adapter(shown, "lora_bias is set: biases of the matrices are not served. Train it without")
    if fields.get("modules_to_save"):
        saved = ", ".join(map(str, fields["modules_to_save"]))
        raise invalid_adapter(
            shown, f"modules_to_save is {saved}: whole modules are not served. Merge them into the base model"
        )
    for field, what in _FEATURES.items():
        if fields.get(field):
            raise invalid_adapter(
                shown, f"{field} is set ({what}), which is not served. Merge the adapter into the base model"
            )
    if fields.get("init_lora_weights", True) not in _KEEPS_BASE:
        raise invalid_adapter(
            shown,
            f"init_lora_weights is {fields['init_lora_weights']!r}, which changes the base model. Convert the adapter "
            "when it is saved (path_initial_model_for_weight_conversion)",
        )
    targets = fields.get("target_modules")
    if not (isinstance(targets, str) and targets) and not (
        isinstance(targets, list) and targets and all(isinstance(one, str) and one for one in targets)
    ):
        raise invalid_adapter(
            shown, f"target_modules is {targets!r}; it must be a list of names, such as ['q_proj', 'v_proj']"
        )
    patterns = {}
    for field, kind in (("rank_pattern", int), ("alpha_pattern", float)):
        pattern = fields.get(field) or {}
        is_right = isinstance(pattern, dict) and all(
            (type(value) is int and value > 0) if kind is int else _is_number(value) for value in pattern.values()
        )
        if not is_right:
            raise invalid_adapter(shown, f"{field} is {pattern!r}; it must be a map from names to numbers")
        for key in pattern:
            _compile(key, field, shown)
        patterns[field] = pattern
    base = fields.get("base_model_name_or_path")
    return PeftConfig(
        rank=rank, alpha=float(alpha), use_rslora=bool(fields.get("use_rslora")), target_modules=targets,
        base_model=base if isinstance(base, str) and base else None, **patterns,
    )  # fmt: skip


def check_targets(config: PeftConfig, known: Sequence[str], shown: str) -> None:
    """Raise `InvalidAdapterError` where target_modules lists a module that this model has not. A string is an expression, of which
    the tensors themselves tell."""
    if isinstance(config.target_modules, str) or not known:
        return
    for target in config.target_modules:
        if target.rpartition(".")[2] not in known:
            raise invalid_adapter(
                shown,
                f"target_modules has {target!r}, which no layer of this engine takes; there are {', '.join(known)}",
            )


def _by_pattern(pattern: Mapping[str, Any], name: str, default: Any) -> Any:
    """As PEFT looks values up: a key is an expression for the end of a name."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", name)), default)


def _compile(key: str, field: str, shown: str) -> None:
    """Raise `InvalidAdapterError` for a key that is not a valid expression, or that could take long to match."""
    rest = key.replace(".*", "", _MOST_PATTERNS)
    try:
        if any(sign in rest for sign in "*+?{}"):
            raise re.error("it repeats too much")
        re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        raise invalid_adapter(
            shown, f"{field} has {key!r}, which is not a valid name or pattern of modules: {error}"
        ) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def invalid_adapter(shown: str, why: str) -> InvalidAdapterError:
    """Make the error of an adapter that cannot be served; shown: its name or folder."""
    return InvalidAdapterError(f"Invalid adapter configuration: {why} (adapter {shown!r}).", param="model")
