"""transformers' linear modules as `linear` ops: one product for those that read the same input."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pelton.layers.embedding import VocabEmbedding
from pelton.layers.linear import LinearModule
from pelton.ops.interface import Linear, LinearNeeds, LinearTensors, LinearWeights
from pelton.quantization.interface import LinearShard

if TYPE_CHECKING:
    from pelton.model.build import BuildConfig

_TOLERANCE = 1e-5


def is_linear(module: nn.Module) -> bool:
    """Return whether it computes x @ weight.T + bias: subclasses of torch's class are tried on a small matrix."""
    return isinstance(module, nn.Linear) and (type(module) is nn.Linear or _computes_products(type(module), module))


_tried: dict[type[nn.Module], bool] = {}


def _computes_products(kind: type[nn.Module], module: nn.Module) -> bool:
    if kind not in _tried:
        random = torch.Generator().manual_seed(0)
        weight, bias, x = (torch.randn(shape, generator=random) for shape in ((3, 5), (3,), (2, 5)))
        x[1] *= 1e3  # what clips shows
        small: Any = copy.copy(module)
        small._parameters = {"weight": nn.Parameter(weight), "bias": nn.Parameter(bias)}
        small.in_features, small.out_features = 5, 3
        try:
            with torch.no_grad():
                _tried[kind] = not module._buffers and torch.allclose(
                    small(x), F.linear(x, weight, bias), atol=_TOLERANCE
                )
        except Exception:
            _tried[kind] = False
    return _tried[kind]


class Products(LinearModule):
    """Matrices below each other, which read one input."""

    def __init__(
        self,
        names: Sequence[str],
        linears: Sequence[nn.Linear],
        *,
        config: BuildConfig,
        is_vocabulary: bool = False,
        reads_tokens: bool = True,
    ) -> None:
        """names: in the checkpoint, without ".weight". is_vocabulary: the one matrix is the output head. reads_tokens: its rows are the
        step's tokens, so that adapters know theirs."""
        shards = [
            LinearShard(name, one.out_features, one.in_features, (0, one.out_features), (0, one.in_features))
            for name, one in zip(names, linears, strict=True)
        ]
        has_bias = linears[0].bias is not None
        weights = config.create_weights(shards, bias=has_bias, is_vocabulary=is_vocabulary)
        super().__init__(weights)
        self._product = _bind(weights, config)
        self.adapter = None
        if reads_tokens and not is_vocabulary:
            self.adapter = config.adapter_layer(shards)
        elif config.adapters is not None:
            why = "embeddings and output heads take none" if is_vocabulary else "its rows are not the tokens of a step"
            for name in names:
                config.adapters.refuse(name, why)
        self.sizes = [one.out_features for one in linears]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        product = self._product(rows)
        if self.adapter is not None and self.adapter.is_used:
            product = self.adapter(rows, product)
        return product.view(*x.shape[:-1], product.shape[-1])

    def parts(self) -> list[nn.Module]:
        """A module in the place of each matrix."""
        if len(self.sizes) == 1:
            return [self]
        shared = _Shared(self)
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        return [
            _Part(shared, start, size, is_last=index == len(starts) - 1)
            for index, (start, size) in enumerate(zip(starts, self.sizes, strict=True))
        ]


class _Shared(nn.Module):
    """The product that the parts of a step have in common."""

    def __init__(self, products: Products) -> None:
        super().__init__()
        self.products = products
        self.input: Tensor | None = None
        self.product: Tensor | None = None


class _Part(nn.Module):
    """Columns of a common product. The first part that is called with an input computes it, the last one lets go of it."""

    def __init__(self, shared: _Shared, start: int, size: int, *, is_last: bool) -> None:
        super().__init__()
        self.shared, self.start, self.size, self.is_last = shared, start, size, is_last

    def forward(self, x: Tensor) -> Tensor:
        shared = self.shared
        if shared.input is not x or self.start == 0:
            shared.input, shared.product = x, shared.products(x)
        assert shared.product is not None
        part = shared.product.narrow(-1, self.start, self.size)
        if self.is_last:
            shared.input = shared.product = None
        return part


class TokenEmbedding(nn.Module):
    """The embedding of a model's ids, [1, T] -> [1, T, H]."""

    def __init__(self, module: nn.Embedding, *, scale: float | None, config: BuildConfig, prefix: str) -> None:
        super().__init__()
        self.embedding = VocabEmbedding(
            module.num_embeddings, module.embedding_dim, config=config, prefix=prefix, scale=scale
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        embedded: Tensor = self.embedding(input_ids.reshape(-1))
        return embedded.view(*input_ids.shape, -1)


class TiedHead(nn.Module):
    """An output head whose matrix is the embedding's."""

    def __init__(self, embedding: TokenEmbedding, *, config: BuildConfig) -> None:
        super().__init__()
        self._product = _bind(embedding.embedding.linear_weights, config)

    def forward(self, x: Tensor) -> Tensor:
        product = self._product(x.reshape(-1, x.shape[-1]).contiguous())
        return product.view(*x.shape[:-1], product.shape[-1])


def embedding_scale(module: nn.Module) -> float | None:
    """Return what an embedding multiplies its rows by, 1.0 for nothing; None where it does something else."""
    if type(module) is nn.Embedding:
        return 1.0
    if not isinstance(module, nn.Embedding):
        return None
    rows = 1.0 + torch.arange(8.0).view(2, 4)
    small: Any = copy.copy(module)
    small._parameters = {"weight": nn.Parameter(rows)}
    small.padding_idx = None
    try:
        with torch.no_grad():
            factors = small(torch.tensor([0, 1])) / rows
    except Exception:
        return None
    scale = float(factors[0, 0])
    return scale if torch.allclose(factors, torch.full_like(factors, scale)) else None


def _bind(weights: LinearWeights, config: BuildConfig) -> Linear:
    needs = LinearNeeds(dtype=config.dtype_name, linear=weights.spec)
    bound: Linear = config.ops.bind("linear", needs, LinearTensors(weights))
    return bound
