"""Tiny checkpoints that make drafts, and what a drafter proposed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pelton.messages.step import SchedulerOutput
from pelton.spec_decode.drafter import DraftPass
from pelton_platforms.device.steps.drafter_steps import DrafterSteps
from pelton_platforms.device.steps.model_runner import ModelRunner


def config_of(model: str) -> dict[str, Any]:
    return json.loads((Path(model) / "config.json").read_text())


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors")
    )
    return str(folder)


def noisy_copy(folder: Path, model: str, noise: float) -> str:
    """A model whose answers are the same for a while: some drafts are right, and some are not."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(5)
    for file in Path(model).iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(str(Path(model) / "model.safetensors"))
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensors[name] = tensor + noise * tensor.std() * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})
    return str(folder)


def medusa(folder: Path, model: str, *, num_heads: int = 3, num_layers: int = 1, prefix: str = "medusa_heads.") -> str:
    """Random heads for `model`."""
    config = config_of(model)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(num_heads)
    tensors = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            tensors[f"{prefix}{head}.{layer}.linear.weight"] = 0.1 * torch.randn(hidden, hidden, generator=generator)
            tensors[f"{prefix}{head}.{layer}.linear.bias"] = 0.1 * torch.randn(hidden, generator=generator)
        tensors[f"{prefix}{head}.{num_layers}.weight"] = torch.randn(vocab, hidden, generator=generator)
    own = {"medusa_num_heads": num_heads, "medusa_num_layers": num_layers, "base_model_name_or_path": model}
    return write_checkpoint(folder, own, tensors)


@dataclass(frozen=True)
class Proposal:
    """One draft: `token_id` as the token at `place`, where `text` was known."""

    text: tuple[int, ...]
    place: int
    token_id: int

    @property
    def offset(self) -> int:
        """1 for the first draft behind the text's last token."""
        return self.place - len(self.text) + 1


@contextlib.contextmanager
def proposals() -> Iterator[list[Proposal]]:
    """Every draft of this process's engines within the context."""
    found: list[Proposal] = []
    draft, place = DrafterSteps.draft, DrafterSteps.place
    known: dict[int, tuple[int, ...]] = {}

    def start(self: DrafterSteps, plan: Any) -> None:
        state = self._state
        for slot in plan.sample_slots.tolist():
            known[slot] = tuple(state.token_ids[slot, : int(state.num_computed_tokens[slot]) + 1].tolist())
        draft(self, plan)

    def note(self: DrafterSteps, slots: Tensor, offset: int, token_ids: Tensor) -> None:
        place(self, slots, offset, token_ids)
        for slot, token_id in zip(slots.tolist(), token_ids.tolist(), strict=True):
            if slot != self._state.padding_slot:  # of a warm-up
                found.append(Proposal(known[slot], int(self._state.num_computed_tokens[slot]) + offset, token_id))

    with mock.patch.object(DrafterSteps, "draft", start), mock.patch.object(DrafterSteps, "place", note):
        yield found


def counts(llm: Any) -> dict[str, float]:
    """The metrics of speculation, by their names' ends; of an engine that keeps statistics."""
    start = "pelton_spec_decode_"
    return {
        metric.name.removeprefix(start): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(start) and hasattr(metric, "value") and "per_pos" not in metric.name
    }


@contextlib.contextmanager
def strict_blocks() -> Iterator[list[int]]:
    """Fail a pass of a drafter whose keys and values would lie in a block that its request was not given; the number of rows of each."""
    owned: dict[tuple[int, int], set[int]] = {}  # by group and slot
    passes: list[int] = []
    execute, one_token = ModelRunner.execute, DrafterSteps.one_token

    def track(self: ModelRunner, output: SchedulerOutput) -> Any:
        for new in output.new:
            for group, block_ids in enumerate(new.block_ids):
                owned[group, new.slot] = set(block_ids)
        for group, slot, _, block_ids in output.block_appends:
            owned[group, slot].update(block_ids)
        return execute(self, output)

    def check(self: DrafterSteps, slots: Tensor, ones: Tensor, max_seq_len: int) -> DraftPass:
        step = one_token(self, slots, ones, max_seq_len)
        if slots.tolist() == [self._state.padding_slot]:  # a warm-up
            return step
        for group, mapping in enumerate(step.batch.slot_mappings):
            for slot, place in zip(slots.tolist(), mapping.tolist(), strict=True):
                block = place // self._state.block_sizes[group]
                assert block in owned[group, slot] - {0}, f"block {block} of group {group} is not that of slot {slot}"
        passes.append(len(slots))
        return step

    with mock.patch.object(ModelRunner, "execute", track), mock.patch.object(DrafterSteps, "one_token", check):
        yield passes


def _layer(config: dict[str, Any], prefix: str, input_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Random weights of a decoder layer without a norm in front, whose attention reads `input_size` numbers."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = (config[f"num_{name}_heads"] * head_dim for name in ("attention", "key_value"))
    shapes = {
        "self_attn.q_proj": (heads, input_size), "self_attn.k_proj": (kv_heads, input_size),
        "self_attn.v_proj": (kv_heads, input_size), "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    found = {f"{prefix}.{name}.weight": 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    found[f"{prefix}.post_attention_layernorm.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    return found


def eagle(folder: Path, model: str, *, has_bias: bool = False) -> str:
    """A random EAGLE head for `model`, with the copy of the embedding that public ones have."""
    config = config_of(model) | {"num_hidden_layers": 1, "architectures": ["EagleLlamaForCausalLM"]}
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(3)
    tensors = _layer(config, "layers.0", hidden, generator)
    tensors["fc.weight"] = 0.3 * torch.randn(hidden, 2 * hidden, generator=generator)
    tensors["embed_tokens.weight"] = torch.zeros(config["vocab_size"], hidden)
    if has_bias:
        tensors["fc.bias"] = 0.3 * torch.randn(hidden, generator=generator)
    return write_checkpoint(folder, config, tensors)


def eagle3(
    folder: Path, model: str, *, taps: tuple[int, ...] = (1, 2, 3), num_draft_tokens: int = 200, prefix: str = "midlayer",
    **more: Any,
) -> str:  # fmt: skip
    """A random EAGLE-3 head for `model`, with an output for some of its tokens. more: fields of config.json."""
    config = config_of(model) | {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    config |= {"draft_vocab_size": num_draft_tokens, "eagle_aux_hidden_state_layer_ids": list(taps)} | more
    generator = torch.Generator().manual_seed(4)
    tensors = _layer(config, prefix, 2 * hidden, generator)
    for name in (f"{prefix}.input_layernorm", f"{prefix}.hidden_norm", "norm"):
        tensors[f"{name}.weight"] = 1 + 0.1 * torch.randn(hidden, generator=generator)
    tensors["fc.weight"] = 0.3 * torch.randn(hidden, len(taps) * hidden, generator=generator)
    tensors["lm_head.weight"] = torch.randn(num_draft_tokens, hidden, generator=generator)
    known = torch.randperm(vocab, generator=generator)[:num_draft_tokens].sort().values
    tensors["d2t"] = known - torch.arange(num_draft_tokens)
    tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill_(0, known, True)
    return write_checkpoint(folder, config, tensors)


def repeating(folder: Path, model: str, method: str) -> str:
    """A head that says what the hidden states of `model`, whose embedding is its head, say already: right where it repeats itself."""
    makers = {"medusa": medusa, "eagle": eagle, "eagle3": eagle3}
    more: dict[str, Any] = (
        {"taps": (3,), "num_draft_tokens": config_of(model)["vocab_size"]} if method == "eagle3" else {}
    )
    made = makers[method](folder, model, **more)
    tensors, hidden = load_file(f"{made}/model.safetensors"), config_of(model)["hidden_size"]
    embedding = load_file(f"{model}/model.safetensors")["model.embed_tokens.weight"]
    for name, tensor in tensors.items():
        if method == "medusa":
            tensors[name] = embedding.clone() if name.endswith("1.weight") else torch.zeros_like(tensor)
        elif "o_proj" in name or "down_proj" in name:
            tensors[name] = 0.02 * tensor
        elif name == "fc.weight":
            tensors[name] = torch.eye(hidden, tensor.shape[1]).roll(tensor.shape[1] - hidden, 1)
        elif name == "lm_head.weight":
            tensors[name] = embedding.clone()
    save_file(tensors, f"{made}/model.safetensors")
    return made
