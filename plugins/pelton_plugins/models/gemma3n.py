"""Gemma 3n, text: each layer has several streams, of which one goes through attention and MLP and corrects the others (AltUp:
Baykal et al., arXiv:2301.13310), a low-rank path beside attention (LAuReL: Menghani et al., arXiv:2411.07501), an input of its own, and
in the first layers an MLP that keeps the largest gates alone. The last layers read the keys and values of earlier ones.

T tokens, H hidden size, A streams, E numbers of a layer's own input.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.linear import RowParallelLinear, ShardLinear, merged_shards
from pelton.layers.norm import RMSNorm
from pelton.model.build import BuildConfig
from pelton.ops.interface import AllReduce, AllReduceNeeds, AllReduceTensors
from pelton.ops.reference import ACTIVATIONS
from pelton_plugins.models.gemma4 import Gemma4Attention
from pelton_plugins.models.normed import NormedLinear, whole_shard
from pelton_plugins.models.own_inputs import OwnInputsDecoder, num_joined, whole_matrix

_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu"}
_LEAST_MAGNITUDE = 1e-5


class Coefficients(nn.Module):
    """A matrix of few rows or columns, which stays in the model's dtype and is torch's to multiply with; adapters add to its product."""

    def __init__(self, rows: int, columns: int, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(config.empty(rows, columns), requires_grad=False)
        config.weights.expect(f"{prefix}.weight", (rows, columns), self.weight)
        self.adapter = config.adapter_layer([whole_shard(prefix, rows, columns)])

    def forward(self, x: Tensor) -> Tensor:
        product = nn.functional.linear(x, self.weight)
        if self.adapter is not None and self.adapter.is_used:
            product = self.adapter(x, product)
        return product


class Gemma3nAltUp(nn.Module):
    """Predictions of the streams before a layer, and their correction by its result."""

    def __init__(self, *, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, self.count = hf.hidden_size, hf.altup_num_inputs
        self.active = hf.get("altup_active_idx", 0)
        self.router_norm = RMSNorm(size, config=config, prefix=f"{prefix}.router_norm")

        def coefficients(name: str, rows: int, columns: int) -> Coefficients:
            return Coefficients(rows, columns, config=config, prefix=f"{prefix}.{name}")

        self.router = coefficients("modality_router", self.count, size)
        self.prediction = coefficients("prediction_coefs", self.count**2, self.count)
        self.correction = coefficients("correction_coefs", self.count, self.count)
        self.output_scale = nn.Parameter(config.empty(size), requires_grad=False)
        config.weights.expect(f"{prefix}.correct_output_scale", (size,), self.output_scale)
        self.is_scaled = bool(hf.get("altup_correct_scale", True))

    def _modalities(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, A]"""
        routed = self.router(self.router_norm(x) * x.shape[1] ** -1.0)
        return torch.tanh(routed.float()).to(x.dtype)

    def predict(self, streams: Tensor) -> Tensor:
        """[A, T, H] -> [A, T, H]"""
        modalities = self._modalities(streams[self.active])
        factors = self.prediction(modalities).unflatten(1, (self.count, self.count))  # t, to, from
        return streams + torch.einsum("tij,jth->ith", factors, streams)

    def correct(self, predicted: Tensor, activated: Tensor) -> Tensor:
        """[A, T, H], [T, H] -> [A, T, H]"""
        factors = self.correction(self._modalities(activated)) + 1.0
        return predicted + (activated - predicted[self.active]) * factors.T[:, :, None]

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.output_scale if self.is_scaled else x


class Gemma3nDecoderLayer(nn.Module):
    def __init__(self, index: int, *, config: BuildConfig, prefix: str, model_prefix: str) -> None:
        super().__init__()
        hf = config.hf
        size, self.index = hf.hidden_size, index

        def norm(name: str) -> RMSNorm:
            return RMSNorm(size, config=config, prefix=f"{prefix}.{name}")

        def matrix(name: str, columns: int, rows: int) -> ShardLinear:
            return whole_matrix(columns, rows, config=config, prefix=f"{prefix}.{name}")

        self.altup = Gemma3nAltUp(config=config, prefix=f"{prefix}.altup")
        self.input_layernorm = norm("input_layernorm")
        self.self_attn = Gemma4Attention(
            index, self.input_layernorm, config=config, prefix=f"{prefix}.self_attn", model_prefix=model_prefix
        )
        rank = hf.laurel_rank
        self.laurel_left, self.laurel_right = (
            matrix("laurel.linear_left", size, rank),
            matrix("laurel.linear_right", rank, size),
        )
        self.post_laurel_norm = norm("laurel.post_laurel_norm")
        self.post_attention_layernorm = norm("post_attention_layernorm")
        self.pre_feedforward_layernorm = norm("pre_feedforward_layernorm")
        widths, mlp = hf.intermediate_size, f"{prefix}.mlp"
        width = widths[index] if isinstance(widths, list) else widths
        parallel = config.parallel
        own_width = parallel.share(width, "intermediate_size")
        rows = (parallel.rank * own_width, (parallel.rank + 1) * own_width)
        shards = merged_shards(mlp, None, [(name, width, rows) for name in ("gate_proj", "up_proj")], size)
        self.gate_up_proj = NormedLinear(shards, norm=self.pre_feedforward_layernorm, is_summed=True, config=config)
        self.down_proj = RowParallelLinear(width, size, config=config, prefix=f"{mlp}.down_proj")
        self.all_reduce, self.num_ranks = config.all_reduce(size), parallel.size
        self.post_feedforward_layernorm = norm("post_feedforward_layernorm")
        self.activation = ACTIVATIONS[_ACTIVATIONS[hf.get("hidden_activation", "gelu_pytorch_tanh")]]
        shares = hf.get("activation_sparsity_pattern") or 0.0
        share = float(shares[index] if isinstance(shares, list) else shares)
        # Of a normal distribution, how many deviations above the mean that share of numbers ends.
        self.deviations = float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share))) if share > 0.0 else None
        self.sum_moments: AllReduce | None = None
        if self.deviations is not None and parallel.size > 1:
            needs = AllReduceNeeds(dtype="float32", hidden_size=3, tp_size=parallel.size)
            self.sum_moments = config.ops.bind("all_reduce", needs, AllReduceTensors(parallel))
        own = hf.hidden_size_per_layer_input
        self.per_layer_input_gate = matrix("per_layer_input_gate", size, own)
        self.per_layer_projection = matrix("per_layer_projection", own, size)
        self.post_per_layer_input_norm = norm("post_per_layer_input_norm")

    def forward(self, streams: Tensor, own_input: Tensor, batch: ForwardBatch) -> Tensor:
        """streams [A, T, H], own_input [T, E] -> [A, T, H]"""
        predicted = self.altup.predict(streams)
        active = predicted[self.altup.active]
        normed = self.input_layernorm(active)
        beside = normed + self.post_laurel_norm(self.laurel_right(self.laurel_left(normed)))
        attended, _ = self.self_attn(active.clone(), batch)
        x = (active + self.post_attention_layernorm(self._sum(attended)) + beside) * 2.0**-0.5
        gate_up, _ = self.gate_up_proj(x.clone(), None)
        gate, up = gate_up.chunk(2, dim=-1)
        output = self._sum(self.down_proj(self.activation(self._largest(gate)) * up))
        x = x + self.post_feedforward_layernorm(output)
        corrected = self.altup.correct(predicted, x)
        first = self.activation(self.per_layer_input_gate(self.altup.scaled(corrected[self.altup.active]))) * own_input
        corrected[1:] += self.post_per_layer_input_norm(self.per_layer_projection(first))
        return corrected

    def _largest(self, gate: Tensor) -> Tensor:
        """Return by how much gates exceed the least that is kept; zero for the others."""
        if self.deviations is None:
            return gate
        if self.sum_moments is None:
            mean, deviation = gate.mean(-1, keepdim=True), gate.std(-1, keepdim=True, unbiased=False)
        else:  # of the gates of all ranks, each with as many: Chan et al., Updating Formulae (1979)
            own = gate.float()
            own_mean, own_variance = own.mean(-1, keepdim=True), own.var(-1, keepdim=True, unbiased=False)
            sums = self.sum_moments(torch.cat([own_mean, own_mean.square(), own_variance], dim=-1))
            mean, squares, variance = (sums / self.num_ranks).split(1, dim=-1)
            deviation = (variance + (squares - mean.square()).clamp(min=0)).sqrt().to(gate.dtype)
            mean = mean.to(gate.dtype)
        return torch.relu(gate - (mean + deviation * self.deviations))

    def _sum(self, partial: Tensor) -> Tensor:
        return partial if self.all_reduce is None else self.all_reduce(partial)


class Gemma3nForCausalLM(OwnInputsDecoder):
    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__(config=config)
        hf, model = config.hf, f"{prefix}model"
        size, others = hf.hidden_size, range(hf.altup_num_inputs - 1)
        self.shape_before = (hf.altup_num_inputs,)
        self.make_inputs(config, model, hf.hidden_size_per_layer_input)

        def matrices(name: str, *, are_here: bool) -> nn.ModuleList:
            if not are_here:
                config.weights.ignore(rf"{re.escape(model)}\.{name}\..*")
            found = others if are_here else ()
            return nn.ModuleList(
                whole_matrix(size, size, config=config, prefix=f"{model}.{name}.{index}") for index in found
            )

        self.altup_projections = matrices("altup_projections", are_here=self._stage == 0)
        self.altup_unembed_projections = matrices("altup_unembed_projections", are_here=self._stage == self._last)
        self.layers = nn.ModuleList(
            Gemma3nDecoderLayer(index, config=config, prefix=f"{model}.layers.{index}", model_prefix=model)
            for index in self.own_layers(config, f"{model}.layers", num_joined=num_joined(config))
        )
        self.norm = RMSNorm(size, config=config, prefix=f"{model}.norm")
        self.lm_head = self.make_head(
            config, f"{prefix}lm_head", norm=self.norm, is_tied=bool(hf.get("tie_word_embeddings", True)),
            soft_cap=hf.get("final_logit_softcapping"),
        )  # fmt: skip

    def entered(self, hidden: Tensor) -> Tensor:
        """[T, H] -> [A, T, H]"""
        return torch.stack([hidden, *(_as_large(matrix(hidden), hidden) for matrix in self.altup_projections)])

    def left(self, x: Tensor) -> Tensor:
        """[A, T, H] -> [T, H]"""
        first = x[0]
        rest = [
            _as_large(matrix(stream), first)
            for matrix, stream in zip(self.altup_unembed_projections, x[1:], strict=True)
        ]
        return torch.stack([first, *rest]).mean(0)


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x [T, H], each row scaled to the magnitude of that of `like`."""
    wanted = like.square().mean(-1, keepdim=True).sqrt()
    found = x.square().mean(-1, keepdim=True).clamp(min=_LEAST_MAGNITUDE).sqrt()
    return x * wanted / found
