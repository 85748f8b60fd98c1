"""Medusa heads: the drafts are those of the paper's equation over transformers' hidden states; checkpoints of other makes are refused."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_drafts import Proposal, counts, medusa, proposals, repeating, write_checkpoint
from pelton_e2e import generate, make_llm, make_prompts
from safetensors.torch import load_file
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint

PROMPTS = make_prompts(320, (1, 4, 17, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_checkpoint(tmp_path_factory.mktemp("llama"), "llama", with_tokenizer=False))


def speculation(heads: str, k: int = 3, **more) -> dict:
    return {"method": "medusa", "model": heads, "num_speculative_tokens": k, "min_acceptance_rate": 0} | more


@functools.cache
def of_transformers(model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()


def expected_drafts(model: str, tensors: dict[str, torch.Tensor], proposal: Proposal, num_layers: int) -> torch.Tensor:
    """The logits of a draft's head: x <- x + SiLU(W x + b), layer by layer, then the head's matrix. The hidden state is that of the token
    before the last known one, which has not been computed yet."""
    with torch.inference_mode():
        x = of_transformers(model).model(torch.tensor([proposal.text[:-1]])).last_hidden_state[0, -1]
        head = proposal.offset - 1
        for layer in range(num_layers):
            name = f"medusa_heads.{head}.{layer}.linear"
            x = x + silu(linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        return linear(x, tensors[f"medusa_heads.{head}.{num_layers}.weight"])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_drafts_are_those_of_the_equation(model: str, tmp_path: Path, num_layers: int) -> None:
    heads = medusa(tmp_path / "heads", model, num_layers=num_layers)
    with make_llm(model, speculative_config=speculation(heads), max_num_batched_tokens=32) as llm, proposals() as found:
        generate(llm, PROMPTS)
    tensors = load_file(f"{heads}/model.safetensors")
    assert {proposal.offset for proposal in found} == {1, 2, 3} and len({len(p.text) for p in found}) > 20
    for proposal in found[:: max(len(found) // 40, 1)]:
        logits = expected_drafts(model, tensors, proposal, num_layers)
        assert logits[proposal.token_id] >= logits.max() - 1e-4, proposal


def test_other_names_and_a_pickled_file_of_tensors(model: str, tmp_path: Path) -> None:
    heads = medusa(tmp_path / "heads", model)
    tensors = load_file(f"{heads}/model.safetensors")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes(Path(heads, "config.json").read_bytes())
    torch.save(
        {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}, pickled / "medusa_lm_head.pt"
    )
    plain = medusa(tmp_path / "plain", model, prefix="")
    blocks = {}
    for name, tensor in tensors.items():
        _, head, layer, *rest = name.split(".")
        blocks[f"blocks.{head}.layers.{layer}.{rest[-1]}" if "linear" in rest else f"lm_heads.{head}.weight"] = tensor
    named = write_checkpoint(
        tmp_path / "blocks", {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1}, blocks
    )
    found = []
    for one in (heads, plain, str(pickled), named):
        # Without a method: the config says it.
        with make_llm(model, speculative_config=speculation(one, method=None)) as llm, proposals() as drafts:
            generate(llm, PROMPTS)
        found.append(drafts)
    assert found[0] and all(one == found[0] for one in found)


def test_code_in_a_pickled_file_is_refused(model: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 3}')
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=r"medusa_lm_head\.pt is not read"):
        make_llm(model, speculative_config=speculation(str(tmp_path)))


def test_drafts_that_are_right_are_kept(model: str, tmp_path: Path) -> None:
    """Heads that say what the model says next are right wherever it repeats itself."""
    heads = repeating(tmp_path / "heads", model, "medusa")
    with make_llm(model) as llm:
        expected = generate(llm, PROMPTS)
    with (
        make_llm(model, speculative_config=speculation(heads), disable_log_stats=False) as llm,
        proposals() as drafts,
    ):
        assert generate(llm, PROMPTS) == expected
        found = counts(llm)
    assert found["num_accepted_tokens"] > 0
    tensors = load_file(f"{heads}/model.safetensors")
    for proposal in drafts[:: max(len(drafts) // 40, 1)]:  # behind drafts that were accepted too
        logits = expected_drafts(model, tensors, proposal, 1)
        assert logits[proposal.token_id] >= logits.max() - 1e-4, proposal


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"k": 4}, "num_speculative_tokens is 4, and .* has 3 heads"),
        ({"model": None}, "method is 'medusa', and there is no speculative_config.model"),
        ({"model": "no/such-heads"}, "no/such-heads"),
    ],
)
def test_what_does_not_fit_is_one_line(model: str, tmp_path: Path, settings: dict, message: str) -> None:
    heads = medusa(tmp_path / "heads", model)
    with pytest.raises(ConfigError, match=message):
        make_llm(model, speculative_config=speculation(heads, **{"k": 3} | settings))


def test_heads_of_another_model_are_refused(model: str, tmp_path: Path) -> None:
    wider = str(make_tiny_checkpoint(tmp_path / "wide", "llama", hidden_size=96, with_tokenizer=False))
    heads = medusa(tmp_path / "heads", wider)
    with pytest.raises(ConfigError, match="heads from 96 numbers to 320 tokens; the model's hidden states have 64"):
        make_llm(model, speculative_config=speculation(heads))


def test_a_folder_without_heads_is_refused(model: str, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", {"medusa_num_heads": 3}, {"x": torch.zeros(2, 2)})
    with pytest.raises(ConfigError, match="it holds no Medusa heads"):
        make_llm(model, speculative_config=speculation(other))
