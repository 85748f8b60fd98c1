"""Checkpoints that read images or sound as well give their text: greedy ids equal transformers' float32 ids of the text part."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_e2e import Reference, generate, greedy, make_llm, references_in
from pelton_stacked import stacked
from safetensors.torch import load_file, save_file

from pelton.errors import ConfigError
from pelton.testing.models import VOCAB_SIZE

NUM_TOKENS = 12
LENGTHS = (1, 16, 33, 70)
RELEASED = {
    # family: (architecture, what text tensors begin with instead of what, tensors of other parts)
    "mistral": ("Mistral3ForConditionalGeneration", ("", "language_model."),
                ("vision_tower.patch_conv.weight", "multi_modal_projector.linear_1.weight")),
    "gemma3": ("Gemma3ForConditionalGeneration", ("", "language_model."),
               ("vision_tower.vision_model.embeddings.patch_embedding.weight", "multi_modal_projector.mm_soft_emb_norm.weight")),
    "gemma3n": ("Gemma3nForConditionalGeneration", ("model.", "model.language_model."),
                ("model.vision_tower.timm_model.conv_stem.conv.weight", "model.audio_tower.conformer.0.norm.weight",
                 "model.embed_vision.embedding.weight", "model.embed_audio.embedding.weight")),
    "gemma4": ("Gemma4ForConditionalGeneration", ("model.", "model.language_model."),
               ("model.vision_tower.encoder.layers.0.mlp.up_proj.weight", "model.embed_vision.embedding_projection.weight")),
    "qwen2": ("Qwen2_5_VLForConditionalGeneration", ("", ""), ("visual.patch_embed.proj.weight",)),
    "qwen3": ("Qwen3VLForConditionalGeneration", ("model.", "model.language_model."), ("model.visual.patch_embed.proj.weight",)),
    "qwen3_moe": ("Qwen3VLMoeForConditionalGeneration", ("model.", "model.language_model."), ("model.visual.patch_embed.proj.weight",)),
}  # fmt: skip
_MROPE = {"rope_type": "default", "mrope_section": [6, 5, 5], "mrope_interleaved": True}
TEXT_TYPES = {
    "qwen2": {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "qwen3": {"model_type": "qwen3_vl_text", "rope_scaling": _MROPE},
    "qwen3_moe": {"model_type": "qwen3_vl_moe_text", "rope_scaling": _MROPE},
}
"""Fields that these have beside those of the text model alone."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    return references_in(tmp_path_factory, NUM_TOKENS, LENGTHS)


def release(reference: Reference, folder: Path, *, is_transposed: bool = True, **outer: Any) -> str:
    """The family's checkpoint as it is released; is_transposed: experts of Qwen3-VL."""
    architecture, (old, new), others = RELEASED[reference.family]
    shutil.copytree(reference.path, folder)
    tensors = load_file(folder / "model.safetensors")
    if reference.family == "qwen3_moe":
        tensors = {n: t.mT.contiguous() if is_transposed and t.dim() == 3 else t for n, t in stacked(tensors).items()}
    moved = {new + name.removeprefix(old): tensor.clone() for name, tensor in tensors.items() if name.startswith(old)}
    rest = {name: tensor.clone() for name, tensor in tensors.items() if not name.startswith(old)}  # the head
    save_file({**moved, **rest, **{name: torch.zeros(4) for name in others}}, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    if own := TEXT_TYPES.get(reference.family):
        theta = text.pop("rope_parameters")["rope_theta"]
        text |= {**own, "rope_theta": theta}
    within = (
        text if reference.family == "qwen2" else {"text_config": text}
    )  # it is released with all fields at one level
    whole = {**within, "architectures": [architecture], "vision_config": {"hidden_size": 16}, **outer}
    (folder / "config.json").write_text(json.dumps(whole))
    return str(folder)


@pytest.mark.parametrize("family", RELEASED)
def test_the_text_of_a_released_checkpoint(made: Callable[[str], Reference], family: str, tmp_path: Path) -> None:
    reference = made(family)
    with make_llm(release(reference, tmp_path / family), max_num_batched_tokens=40) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_text_behind_the_model(made: Callable[[str], Reference], family: str, tmp_path: Path) -> None:
    """`model.language_model.layers...`, as some tools write what is released as `language_model.model.layers...`."""
    folder = Path(release(made(family), tmp_path / family))
    file = folder / "model.safetensors"
    tensors = load_file(file)
    moved = {name.replace("language_model.model.", "model.language_model."): tensor for name, tensor in tensors.items()}
    moved = {name.replace("language_model.lm_head", "lm_head"): tensor for name, tensor in moved.items()}
    assert not any(name.startswith("language_model.") for name in moved)
    save_file({re.sub("^(vision|multi)", r"model.\1", name): tensor for name, tensor in moved.items()}, file)
    with make_llm(str(folder)) as llm:
        assert generate(llm, made(family).prompts[:2], greedy(NUM_TOKENS)) == made(family).outputs[:2]


def test_experts_as_transformers_writes_them(made: Callable[[str], Reference], tmp_path: Path) -> None:
    reference = made("qwen3_moe")
    path = release(reference, tmp_path / "written", is_transposed=False)
    with make_llm(path) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs
    with pytest.raises(ConfigError, match="norm_topk_prob is False; this model has True"):
        make_llm(path, hf_overrides={"text_config": {"norm_topk_prob": False}})


def test_fields_that_gemma_leaves_out_have_their_values(made: Callable[[str], Reference], tmp_path: Path) -> None:
    folder = Path(release(made("gemma3"), tmp_path / "gemma"))
    config = json.loads((folder / "config.json").read_text())
    for name in ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"):
        del config["text_config"][name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=rf"embed_tokens.weight is \[{VOCAB_SIZE}, 64\]; config.json makes it \[262208, 64\]"
    ):
        make_llm(str(folder))
    sizes = {"vocab_size": VOCAB_SIZE, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    with make_llm(str(folder), hf_overrides=sizes, max_model_len=256) as llm:
        reference = made("gemma3")
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_gemma3n_as_it_is_released(made: Callable[[str], Reference], tmp_path: Path) -> None:
    """Ropes by the older fields, and keys and values of layers that share those of others."""
    reference = made("gemma3n")
    folder = Path(release(reference, tmp_path / "gemma3n"))
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    ropes = text.pop("rope_parameters")
    text |= {"rope_theta": ropes["full_attention"]["rope_theta"], "rope_scaling": None}
    text["rope_local_base_freq"] = ropes["sliding_attention"]["rope_theta"]
    assert text["rope_theta"] != text["rope_local_base_freq"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    last = f"model.language_model.layers.{text['num_hidden_layers'] - 1}.self_attn"
    unread = {f"{last}.{name}.weight": torch.ones(4) for name in ("k_proj", "v_proj", "k_norm")}
    assert not unread.keys() & tensors.keys()
    save_file(tensors | unread, folder / "model.safetensors")
    with make_llm(str(folder)) as llm:
        assert generate(llm, reference.prompts, greedy(NUM_TOKENS)) == reference.outputs


def test_a_text_part_of_another_kind_is_refused(made: Callable[[str], Reference], tmp_path: Path) -> None:
    path = release(made("mistral"), tmp_path / "mistral")
    with pytest.raises(
        ConfigError, match="text_config has model_type 'mistral4'; of this architecture only mistral and ministral3"
    ):
        make_llm(path, hf_overrides={"text_config": {"model_type": "mistral4"}})


def test_attention_to_later_tokens_is_refused(made: Callable[[str], Reference]) -> None:
    with pytest.raises(ConfigError, match="use_bidirectional_attention is True; this model has False"):
        make_llm(made("gemma3").path, hf_overrides={"use_bidirectional_attention": True})


def test_the_outer_level_says_whether_the_head_is_the_embedding(
    made: Callable[[str], Reference], tmp_path: Path
) -> None:
    """transformers writes both fields, and goes by the outer one."""
    path = Path(release(made("gemma3"), tmp_path / "tied", tie_word_embeddings=True))
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    reference = made("gemma3")
    with make_llm(str(path)) as llm:
        assert generate(llm, reference.prompts[:2], greedy(NUM_TOKENS)) == reference.outputs[:2]
