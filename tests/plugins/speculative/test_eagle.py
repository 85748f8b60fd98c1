"""EAGLE and EAGLE-3 heads: the drafts are those of the papers' equations over transformers' hidden states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pelton_drafts import config_of, counts, eagle, eagle3, medusa, proposals, repeating
from pelton_e2e import generate, make_llm, make_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM

from pelton.errors import ConfigError
from pelton.testing.models import make_tiny_checkpoint

PROMPTS = make_prompts(320, (1, 4, 17, 40, 70))


@pytest.fixture(scope="module", params=["llama", "qwen3"])  # a tied head, and one of its own
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp(request.param)
    return str(make_tiny_checkpoint(folder, request.param, with_tokenizer=False))


def speculation(head: str, method: str | None, k: int = 3) -> dict[str, Any]:
    return {"method": method, "model": head, "num_speculative_tokens": k, "min_acceptance_rate": 0}


class PlainLayer:
    """A decoder layer over whole sequences, by its equations: [T, input] and the residual [T, H] -> [T, H]."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], prefix: str) -> None:
        self.config, self.tensors, self.prefix = config, tensors, prefix

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
        head_dim = self.config["head_dim"]
        query, key, value = (
            linear(x, self.weight(f"self_attn.{name}_proj")).unflatten(1, (-1, head_dim)).transpose(0, 1)
            for name in "qkv"
        )
        query, key = self.rotated(query), self.rotated(key)
        repeats = len(query) // len(key)
        key, value = key.repeat_interleave(repeats, 0), value.repeat_interleave(repeats, 0)
        logits = query @ key.transpose(1, 2) / head_dim**0.5
        logits += torch.full(logits.shape[1:], float("-inf")).triu(1)
        attended = (logits.softmax(-1) @ value).transpose(0, 1).flatten(1)
        hidden = residual + linear(attended, self.weight("self_attn.o_proj"))
        normed = rms_norm(hidden, self.weight("post_attention_layernorm"), self.config)
        gate, up = linear(normed, self.weight("mlp.gate_proj")), linear(normed, self.weight("mlp.up_proj"))
        return hidden + linear(silu(gate) * up, self.weight("mlp.down_proj"))

    def rotated(self, x: Tensor) -> Tensor:
        half, theta = x.shape[-1] // 2, self.config["rope_parameters"]["rope_theta"]
        angles = torch.arange(x.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )


def rms_norm(x: Tensor, weight: Tensor, config: dict[str, Any]) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight


class PlainEagle:
    def __init__(self, model: str, head: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.config, self.tensors = config_of(head), load_file(f"{head}/model.safetensors")
        self.layer = PlainLayer(self.config, self.tensors, "layers.0")

    def features(self, text: tuple[int, ...]) -> Tensor:
        return self.model.model(torch.tensor([text])).last_hidden_state[0]

    def behind(self, tokens: Tensor, features: Tensor) -> Tensor:
        pairs = torch.cat([self.model.model.embed_tokens(tokens), features], -1)
        x = linear(pairs, self.tensors["fc.weight"], self.tensors.get("fc.bias"))
        return self.layer(x, x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.lm_head(hidden)

    def of_drafts(self, text: tuple[int, ...], drafts: list[int]) -> Iterator[Tensor]:
        """The logits of each draft [V], behind the drafts before it. Of the text's last token there is no hidden state yet."""
        features, tokens = self.features(text[:-1]), list(text[1:])
        for draft in drafts:
            hidden = self.behind(torch.tensor(tokens), features)[-1:]
            yield self.logits(hidden)[0]
            features, tokens = torch.cat([features, hidden]), [*tokens, draft]


class PlainEagle3(PlainEagle):
    def __init__(self, model: str, head: str) -> None:
        super().__init__(model, head)
        self.prefix = "midlayer" if "midlayer.hidden_norm.weight" in self.tensors else "layers.0"
        self.layer = PlainLayer(self.config, self.tensors, self.prefix)

    def features(self, text: tuple[int, ...]) -> Tensor:
        states = self.model.model(torch.tensor([text]), output_hidden_states=True).hidden_states
        tapped = torch.cat([states[index][0] for index in self.config["eagle_aux_hidden_state_layer_ids"]], -1)
        return linear(tapped, self.tensors["fc.weight"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config)

    def behind(self, tokens: Tensor, features: Tensor) -> Tensor:
        embedded = self.norm(f"{self.prefix}.input_layernorm", self.model.model.embed_tokens(tokens))
        normed = self.norm(f"{self.prefix}.hidden_norm", features)
        residual = normed if self.config.get("norm_before_residual") else features
        return self.layer(torch.cat([embedded, normed], -1), residual)

    def logits(self, hidden: Tensor) -> Tensor:
        small = linear(self.norm("norm", hidden), self.tensors["lm_head.weight"])
        whole = torch.full((len(hidden), self.config["vocab_size"]), float("-inf"))
        return whole.index_copy_(1, torch.arange(small.shape[1]) + self.tensors["d2t"], small)


def check_drafts(plain: PlainEagle, found: list[Any], k: int) -> None:
    drafts: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for proposal in found:
        own = drafts[proposal.text]
        if len(own) < proposal.offset:
            assert proposal.offset == len(own) + 1
            own.append(proposal.token_id)
    assert max(map(len, drafts.values())) == k and len(drafts) > 20
    with torch.inference_mode():
        for text, own in list(drafts.items())[:: max(len(drafts) // 25, 1)]:
            for place, (draft, logits) in enumerate(zip(own, plain.of_drafts(text, own), strict=True)):
                assert logits[draft] >= logits.max() - 1e-4, (len(text), place, draft, int(logits.argmax()))


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 16}], ids=["whole", "chunked"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_eagle_drafts_are_those_of_the_equation(
    model: str, tmp_path: Path, has_bias: bool, settings: dict[str, Any]
) -> None:
    head = eagle(tmp_path / "head", model, has_bias=has_bias)
    with make_llm(model, speculative_config=speculation(head, "eagle"), **settings) as llm, proposals() as found:
        generate(llm, PROMPTS)
    check_drafts(PlainEagle(model, head), found, 3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix": "layers.0", "num_draft_tokens": 320, "norm_before_residual": True},
        {"taps": (0, 1, 3)},
    ],
    ids=["some-tokens", "other-names", "other-layers"],
)
def test_eagle3_drafts_are_those_of_the_equation(model: str, tmp_path: Path, options: dict[str, Any]) -> None:
    head = eagle3(tmp_path / "head", model, **options)
    with (
        make_llm(model, speculative_config=speculation(head, "eagle3", 4), max_num_batched_tokens=32) as llm,
        proposals() as found,
    ):
        generate(llm, PROMPTS)
    check_drafts(PlainEagle3(model, head), found, 4)


@pytest.mark.parametrize("method, plain", [("eagle", PlainEagle), ("eagle3", PlainEagle3)])
def test_drafts_behind_accepted_ones(tmp_path: Path, method: str, plain: type[PlainEagle]) -> None:
    llama = str(make_tiny_checkpoint(tmp_path / "llama", "llama", with_tokenizer=False))
    head = repeating(tmp_path / "head", llama, method)
    with (
        make_llm(llama, speculative_config=speculation(head, method), disable_log_stats=False) as llm,
        proposals() as found,
    ):
        generate(llm, PROMPTS)
        assert counts(llm)["num_accepted_tokens"] > 0
    check_drafts(plain(llama, head), found, 3)


def test_the_checkpoint_says_the_method(model: str, tmp_path: Path) -> None:
    for make, plain in ((eagle, PlainEagle), (eagle3, PlainEagle3)):
        head = make(tmp_path / make.__name__, model)
        with make_llm(model, speculative_config=speculation(head, None)) as llm, proposals() as found:
            generate(llm, PROMPTS)
        check_drafts(plain(model, head), found, 3)


@pytest.mark.parametrize(
    "make, method, message",
    [
        (eagle3, "eagle", r"fc.weight, which has to be \[64, 128\]: it holds no such EAGLE head"),
        (eagle, "eagle3", r"\[64, 128\] as fc.weight, which has to be \[64, 192\]"),
        (medusa, "eagle", "config.json has no field 'hidden_size'"),
        (
            lambda *given: eagle3(*given, norm_before_fc=True),
            "eagle3",
            "sets norm_before_fc, which Pelton does not compute",
        ),
        (lambda *given: eagle3(*given, taps=(1, 2, 9)), "eagle3", "the layers 1, 2, 9 of the model, which has 4"),
        (lambda *given: eagle3(*given, hidden_size=32), "eagle3", "has hidden_size 32, and the model 64"),
    ],
)
def test_what_does_not_fit_is_one_line(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, make: Any, method: str, message: str
) -> None:
    llama = str(make_tiny_checkpoint(tmp_path / "llama", "llama", with_tokenizer=False))
    with pytest.raises(ConfigError, match=message):
        make_llm(llama, speculative_config=speculation(make(tmp_path / "head", llama), method))


@pytest.mark.parametrize(
    "family, message",
    [("gemma3", "norms what its layers give"), ("gemma4", "takes no hidden states and residual of one shape")],
)
def test_a_model_of_another_form_has_no_taps(tmp_path: Path, family: str, message: str) -> None:
    gemma = str(make_tiny_checkpoint(tmp_path / "gemma", family, with_tokenizer=False))
    with pytest.raises(ConfigError, match=message):
        make_llm(gemma, speculative_config=speculation(eagle3(tmp_path / "head", gemma), "eagle3"))


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    llama = str(make_tiny_checkpoint(tmp_path / "llama", "llama", with_tokenizer=False))
    head = eagle(tmp_path / "head", llama)
    tensors = load_file(f"{head}/model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, f"{head}/model.safetensors")
    with pytest.raises(ConfigError, match=r"missing layers\.0\.mlp\.up_proj\.weight"):
        make_llm(llama, speculative_config=speculation(head, "eagle"))
