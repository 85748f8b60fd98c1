"""A causal language model of transformers' modules, as the worker calls it.

Tokens flow as one row [1, T] with their positions; attention reads the paged cache. Linear modules, the embedding and RMS norms
are replaced by Pelton's where they compute the same; every other module runs as it is. The output head is the model's own code:
it is called with hidden states of the rows that sample in place of its body's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.layers.attention import AttentionLayer
from pelton.layers.pooling_decoder import PoolingDecoder
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.transformers_models.attention import RUN, TORCH, PagedAttention, received_by, register
from pelton_plugins.transformers_models.checkpoint import Conversions
from pelton_plugins.transformers_models.norms import Norm, find_norm
from pelton_plugins.transformers_models.products import Products, TiedHead, TokenEmbedding, embedding_scale
from pelton_plugins.transformers_models.source import Source, find_source, refusal, set_ropes
from pelton_plugins.transformers_models.trace import Trace, trace

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class _Output:
    """The output of a body, of which the head reads the hidden states and hands on what else there may be: nothing."""

    def __init__(self, hidden: Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor | None:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """In the body's place while the head runs: hands it hidden states that are there already."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.hidden)


class TransformersForCausalLM(nn.Module):
    """A `pelton.model.interface.CausalLM`."""

    def __init__(self, *, config: BuildConfig, prefix: str = "") -> None:
        super().__init__()
        register()
        source = find_source(config)
        traced = trace(source, config.max_model_len)
        whole = source.build_without_matrices(TORCH if traced.calls_torch else RUN)
        set_ropes(whole, config.max_model_len)
        self.weights, self._conversions = config.weights, Conversions(whole)
        _Swap(source, whole, traced, config, prefix).run()
        self._attention = PagedAttention(_attention_layers(whole, traced, config, prefix))
        self._calls_torch = traced.calls_torch
        # Handed on as it is to every layer of those, where its place says that nothing else hides keys.
        self.register_buffer("_no_mask", torch.zeros(1, 1, 1, 1, device=config.device), persistent=False)
        self.body: Any = whole.get_submodule(traced.body)
        self.head: Any = None
        self._given = _Given()
        if config.pooling is None:
            parent, _, child = traced.body.rpartition(".")
            setattr(whole.get_submodule(parent), child, self._given)
            self.head = whole

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> [T, H]"""
        self._attention.batch = batch
        ids, positions = batch.input_ids[None], batch.positions[None]
        if self._calls_torch:
            with self._attention.torch_calls():
                output = self.body(input_ids=ids, position_ids=positions, attention_mask=self._no_mask, use_cache=False)
        else:
            with received_by(self._attention):
                output = self.body(input_ids=ids, position_ids=positions, use_cache=False)
        hidden: Tensor = output[0]
        return hidden[0]

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self._given.hidden = hidden[rows][None]
        logits: Tensor = self.head(input_ids=rows[None], use_cache=False).logits
        return logits[0].float()

    def hidden_states(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return, for a model that pools, final hidden states of the tokens `rows` [n], or of all."""
        return hidden if rows is None else hidden[rows]

    def as_pooling(self, *, config: BuildConfig) -> PoolingDecoder:
        return PoolingDecoder(self, config=config)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.weights.load(self._conversions.apply(weights, self.weights.expected()))


def _attention_layers(
    model: PreTrainedModel, traced: Trace, config: BuildConfig, prefix: str
) -> dict[nn.Module, AttentionLayer]:
    parameters = dict(model.named_parameters())
    return {
        model.get_submodule(name): AttentionLayer(
            one.num_heads, one.num_kv_heads, one.head_dim, rope=None, scale=one.scale, sliding_window=one.sliding_window,
            soft_cap=one.soft_cap, sinks=None if one.sinks is None else parameters[one.sinks], config=config,
            prefix=f"{prefix}{name}.attn",
        )
        for name, one in traced.attention.items()
    }  # fmt: skip


class _Swap:
    """Gives every tensor of a model its memory and its place in the checkpoint, in modules of Pelton's where they fit."""

    def __init__(self, source: Source, model: PreTrainedModel, traced: Trace, config: BuildConfig, prefix: str) -> None:
        self._source, self._model, self._traced, self._config, self._prefix = source, model, traced, config, prefix
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        self._kept = list(model.parameters())  # so that no other object gets an id of theirs
        self._done: set[int] = set()  # parameters that have their place

    def run(self) -> None:
        self._ends()
        for group in self._traced.products:
            self._products(group)
        for name, module in list(self._model.named_modules()):
            spec = None if isinstance(module, Norm) else find_norm(module)
            if spec is not None and len(self._names[id(module.weight)]) == 1:
                self._done.add(id(module.weight))
                self._put(name, Norm(spec, config=self._config, prefix=self._prefix + name))
        self._others()

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self._model.get_submodule(parent), child, module)

    def _ends(self) -> None:
        """The embedding, and the head where it has the same matrix and nothing else."""
        module: Any = self._model.get_input_embeddings()
        names = self._names[id(module.weight)]
        scale = embedding_scale(module)
        if scale is None:
            return
        head: Any = self._model.get_output_embeddings()
        is_tied = head is not None and head.weight is module.weight
        if is_tied and (
            head.bias is not None or not any(self._name_of(head) in group for group in self._traced.products)
        ):
            return
        if len(names) > 1 + is_tied:
            return
        name = self._name_of(module)
        self._done.add(id(module.weight))
        embedding = TokenEmbedding(
            module, scale=None if scale == 1.0 else scale, config=self._config, prefix=self._prefix + name
        )
        if is_tied:
            self._put(self._name_of(head), TiedHead(embedding, config=self._config))
        self._put(name, embedding)
        self._ignore(set(names) - {f"{name}.weight"})

    def _products(self, group: list[str]) -> None:
        linears: list[Any] = [self._model.get_submodule(name) for name in group]
        if not all(isinstance(one, nn.Linear) and len(self._names[id(one.weight)]) == 1 for one in linears):
            return
        for one in linears:
            self._done.update(id(parameter) for parameter in one.parameters())
        products = Products(
            [self._prefix + name for name in group], linears, config=self._config,
            is_vocabulary=self._model.get_output_embeddings() in linears,
        )  # fmt: skip
        for name, part in zip(group, products.parts(), strict=True):
            self._put(name, part)

    def _others(self) -> None:
        """Parameters and buffers of the modules that stay."""
        config = self._config
        moved: dict[int, nn.Parameter] = {}
        for module_name, module in self._model.named_modules():
            for name, parameter in list(module._parameters.items()):
                full = f"{module_name}.{name}" if module_name else name
                if parameter is None or full not in self._names.get(id(parameter), ()) or id(parameter) in self._done:
                    continue
                if id(parameter) not in moved:
                    memory = config.empty(*parameter.shape, dtype=parameter.dtype)
                    moved[id(parameter)] = nn.Parameter(memory, requires_grad=False)
                    first, *others = self._names[id(parameter)]
                    config.weights.expect(self._prefix + first, tuple(parameter.shape), moved[id(parameter)])
                    self._ignore(others)
                setattr(module, name, moved[id(parameter)])
            for name, buffer in list(module._buffers.items()):
                full = f"{module_name}.{name}" if module_name else name
                if buffer is None:
                    continue
                if buffer.is_meta:
                    raise refusal(f"{self._source.name} ({full})", "it is a buffer that is not filled where it is made")
                setattr(module, name, buffer.to(config.device))
                if name not in module._non_persistent_buffers_set:
                    config.weights.expect(self._prefix + full, tuple(buffer.shape), getattr(module, name))
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor):
                    setattr(module, name, value.to(config.device))

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, one in self._model.named_modules() if one is module)

    def _ignore(self, names: Iterable[str]) -> None:
        for name in names:
            self._config.weights.ignore(re.escape(self._prefix + name))
