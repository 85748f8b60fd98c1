"""`Decoder`: the parts of a model in their order, and where its weights go."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from pelton.layers.decoder import Decoder
from pelton.model.interface import CausalLM
from pelton.model.weights import WeightMap


class Embedding(nn.Module):
    def forward(self, input_ids):
        return input_ids[:, None].float()


class Layer(nn.Module):
    """Adds what came before to the residual, and puts out its own factor times that."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, hidden, residual, batch):
        residual = hidden + (0 if residual is None else residual)
        return self.factor * residual * batch.scale, residual


class Head(nn.Module):
    def forward(self, hidden, residual, rows):
        return (hidden + residual)[rows]


class Chain(Decoder):
    def __init__(self, *, config, num_layers=2):
        super().__init__(config=config)
        self.embed_tokens = Embedding()
        self.layers = nn.ModuleList(Layer(factor) for factor in range(2, 2 + num_layers))
        self.lm_head = Head()


def make(**options):
    return Chain(config=SimpleNamespace(weights=WeightMap()), **options)


def test_a_layer_reads_the_last_ones_output_and_its_residual():
    model = make()
    assert isinstance(model, CausalLM)
    hidden = model(SimpleNamespace(input_ids=torch.tensor([1, 2, 3]), scale=10))
    # 1 -> (20, 1) -> (30 * 21, 21)
    assert [part[:, 0].tolist() for part in hidden] == [[630, 1260, 1890], [21, 42, 63]]
    assert model.compute_logits(hidden, torch.tensor([2, 0])).tolist() == [[1953], [651]]


def test_the_first_layer_has_no_residual():
    model = make(num_layers=0)
    hidden, residual = model(SimpleNamespace(input_ids=torch.tensor([4]), scale=1))
    assert hidden.tolist() == [[4]] and residual is None


def test_weights_go_where_the_layers_said():
    model = make()
    target = torch.zeros(2)
    model.weights.expect("a.weight", (2,), target)
    weight = SimpleNamespace(shape=(2,), fill_later=lambda *_: False, read=lambda: torch.tensor([1.0, 2.0]))
    assert model.load_weights([("a.weight", weight)]) == {"a.weight"}
    assert target.tolist() == [1, 2]
