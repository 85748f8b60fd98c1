"""A causal language model of transformers' modules, as the worker calls it.

Tokens flow as one row [1, T] with their positions; attention reads the paged cache. Linear modules, the embedding and RMS norms
are replaced by Pelton's where they compute the same; every other module runs as it is. The output head is the model's own code:
it is called with hidden states of the rows that sample in place of its body's.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pelton.attention.metadata import ForwardBatch
from pelton.errors import ConfigError
from pelton.layers.attention import AttentionLayer
from pelton.layers.pooling_decoder import PoolingDecoder
from pelton.layers.rope import Rope, RopeParameters
from pelton.model.build import BuildConfig
from pelton.model.loading import LazyWeight
from pelton_plugins.transformers_models.attention import (
    RUN,
    TORCH,
    PagedAttention,
    Receiver,
    TorchCalls,
    received_by,
    register,
)
from pelton_plugins.transformers_models.checkpoint import Conversions
from pelton_plugins.transformers_models.norms import Norm, find_norm
from pelton_plugins.transformers_models.parts import FusedAttention, GatedMLP
from pelton_plugins.transformers_models.products import Products, TiedHead, TokenEmbedding, embedding_scale
from pelton_plugins.transformers_models.rows import NUM_CHECKED, AloneAttention, check_rows
from pelton_plugins.transformers_models.source import Source, find_source, refusal, set_ropes
from pelton_plugins.transformers_models.trace import Trace, TracedAttention, trace
from pelton_plugins.transformers_models.trials import AttentionPart, Trials

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
        method = (config.hf.get("quantization_config") or {}).get("quant_method")
        self.weights, self._conversions = config.weights, Conversions(whole, method)
        self._attention = PagedAttention({})
        swap = _Swap(source, whole, traced, config, prefix, self._attention)
        swap.run()
        self._attention.layers = _attention_layers(whole, traced, swap.fused, config, prefix)
        self._calls_torch = traced.calls_torch
        # Handed on as it is to every layer of those, where its place says that nothing else hides keys.
        self.register_buffer("_no_mask", torch.zeros(1, 1, 1, 1, device=config.device), persistent=False)
        self.body: Any = whole.get_submodule(traced.body)
        self._chain = _chain_of(self.body, [name.removeprefix(f"{traced.body}.") for name in traced.attention])
        self._body_name, self._name = traced.body, source.name
        self._padding = getattr(whole.config.get_text_config(decoder=True), "pad_token_id", None)
        self.head: Any = None
        self._given = _Given()
        if config.pooling is None:
            parent, _, child = traced.body.rpartition(".")
            setattr(whole.get_submodule(parent), child, self._given)
            self.head = whole

    @property
    def layers(self) -> nn.ModuleList:
        """Layers that follow each other: warm-up steps go through few of them. There is no such attribute where they are not in one list,
        or are found by their place in it."""
        if self._chain is None or self._calls_torch:
            raise AttributeError("layers")
        found: nn.ModuleList = self.body.get_submodule(self._chain)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        """Put layers where the body has them: torch would put them beside the property."""
        if name != "layers":
            super().__setattr__(name, value)
            return
        assert self._chain is not None
        parent, _, child = self._chain.rpartition(".")
        setattr(self.body.get_submodule(parent), child, value)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """-> [T, H]"""
        self._attention.batch = batch
        return self._run(batch.input_ids, batch.positions, self._attention)

    def _run(self, ids: Tensor, positions: Tensor | None, receiver: Receiver) -> Tensor:
        """-> [T, H]"""
        given = {"input_ids": ids[None], "use_cache": False}
        if positions is not None:
            given["position_ids"] = positions[None]
        if self._calls_torch:
            modules = iter(self._attention.layers)
            with TorchCalls(receiver, lambda: next(modules)):
                output = self.body(**given, attention_mask=self._no_mask)
        else:
            with received_by(receiver):
                output = self.body(**given)
        hidden: Tensor = output[0]
        return hidden[0]

    @torch.inference_mode()
    def weights_loaded(self) -> None:
        """Raise `ConfigError` where a token's hidden states follow from more than it, its position and attention."""
        device = self._no_mask.device
        ids = torch.arange(NUM_CHECKED + 1, device=device)
        ids = ids[ids != self._padding][:NUM_CHECKED] if self._padding is not None else ids[:NUM_CHECKED]
        alone = AloneAttention()

        def run(ids: Tensor, positions: Tensor | None) -> Tensor:
            places = torch.arange(len(ids), device=device) if positions is None else positions
            self._attention.batch = ForwardBatch(input_ids=ids, positions=places, attention=(), num_tokens=len(ids))
            return self._run(ids, positions, alone)

        def refuse(module: str, why: str) -> ConfigError:
            kind = type(self.body.get_submodule(module)).__name__
            name = ".".join(filter(None, (self._body_name, module)))
            return refusal(f"{self._name} ({name}, {kind})", why)

        check_rows(run, self.body, ids, refuse)

    def compute_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        self._given.hidden = hidden[rows][None]
        logits: Tensor = self.head(input_ids=rows[None], use_cache=False).logits
        return logits[0].float()

    def hidden_states(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return, for a model that pools, final hidden states of the tokens `rows` [n], or of all."""
        return hidden if rows is None else hidden[rows]

    def as_pooling(self, *, config: BuildConfig) -> PoolingDecoder:
        return _Pooling(self, config=config)

    def load_weights(self, weights: Iterable[tuple[str, LazyWeight]]) -> set[str]:
        return self.weights.load(self._conversions.apply(weights, self.weights.expected()))


class _Pooling(PoolingDecoder):
    def weights_loaded(self) -> None:
        self.model.weights_loaded()


def _chain_of(body: nn.Module, attention: Sequence[str]) -> str | None:
    """Return the name of the list whose modules have one of these each."""
    for name, module in body.named_modules():
        is_as_long = isinstance(module, nn.ModuleList) and len(module) == len(attention)
        if is_as_long and all(one.startswith(f"{name}.{index}.") for index, one in enumerate(attention)):
            return name
    return None


def _attention_layers(
    model: PreTrainedModel, traced: Trace, fused: Container[str], config: BuildConfig, prefix: str
) -> dict[nn.Module, AttentionLayer]:
    """Return the layers of modules that stay."""
    parameters = dict(model.named_parameters())
    return {
        model.get_submodule(name): AttentionLayer(
            one.num_heads, one.num_kv_heads, one.head_dim, rope=None, scale=one.scale, sliding_window=one.sliding_window,
            soft_cap=one.soft_cap, sinks=None if one.sinks is None else parameters[one.sinks], config=config,
            prefix=f"{prefix}{name}.attn",
        )
        for name, one in traced.attention.items() if name not in fused
    }  # fmt: skip


class _Swap:
    """Gives every tensor of a model its memory and its place in the checkpoint, in modules of Pelton's where they fit."""

    def __init__(
        self,
        source: Source,
        model: PreTrainedModel,
        traced: Trace,
        config: BuildConfig,
        prefix: str,
        paged: PagedAttention,
    ) -> None:
        self._source, self._model, self._traced, self._config, self._prefix = source, model, traced, config, prefix
        self._paged = paged
        self._ropes: dict[int, Rope] = {}
        self._taken: set[str] = set()  # linear modules that have their place
        self._unused: set[nn.Module] = set()
        self.fused: set[str] = set()
        """Names of attention modules that Pelton's whole attention replaces."""
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)
        tied = model.all_tied_weights_keys  # from names that checkpoints leave out to the names that they have
        for names in self._names.values():
            names.sort(key=lambda name: name in tied)
        self._kept = list(model.parameters())  # so that no other object gets an id of theirs
        self._done: set[int] = set()  # parameters that have their place

    def run(self) -> None:
        for name in self._traced.unused:
            self._empty(name)
        self._ends()
        if not self._traced.calls_torch:
            self._parts()
        for group in self._traced.products:
            self._products(group)
        for name, module in list(self._model.named_modules()):
            spec = None if isinstance(module, Norm) or module in self._unused else find_norm(module)
            if spec is not None and len(self._names[id(module.weight)]) == 1:
                self._done.add(id(module.weight))
                self._put(name, Norm(spec, config=self._config, prefix=self._prefix + name))
        self._others()

    def _empty(self, name: str) -> None:
        """Leave a part that no step calls without memory. It stays where it is: its dtype and device may be asked for."""
        self._config.weights.ignore(re.escape(f"{self._prefix}{name}.") + ".*")
        nothing = nn.Parameter(self._config.empty(0), requires_grad=False)
        for module in self._model.get_submodule(name).modules():
            self._unused.add(module)
            module._parameters = {key: None if one is None else nothing for key, one in module._parameters.items()}
            module._buffers = {key: None if one is None else nothing.data for key, one in module._buffers.items()}

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

    def _parts(self) -> None:
        """Modules of several products that compute what Pelton's ops do."""
        trials = Trials(self._model, self._traced)
        for name, traced in self._traced.attention.items():
            part = trials.attention(name, traced) if traced.sinks is None else None
            norms = [] if part is None else [one for one in (part.q_norm, part.k_norm) if one is not None]
            if part is not None and self._are_own([*part.qkv, part.output]) and self._are_alone(norms):
                self._put(name, self._fused_attention(name, part, traced, trials))
                self.fused.add(name)
        for name in dict.fromkeys(group[0].rpartition(".")[0] for group in self._traced.products):
            gated = trials.gated(name) if name and name not in self._traced.attention else None
            if gated is not None and self._are_own([*gated.gate_up, gated.down]):
                products = self._product(gated.gate_up), self._product([gated.down])
                self._put(name, GatedMLP(gated, *products, config=self._config))

    def _fused_attention(
        self, name: str, part: AttentionPart, traced: TracedAttention, trials: Trials
    ) -> FusedAttention:
        config = self._config
        norms: list[Any] = [None if one is None else self._norm(one) for one in (part.q_norm, part.k_norm)]
        if part.rope is not None and id(part.rope) not in self._ropes:
            table = trials.cos_sin(part.rope, config.max_model_len).to(config.device)
            self._ropes[id(part.rope)] = Rope(
                RopeParameters(
                    rope_type="default", theta=0.0, rotary_dim=table.shape[1], max_position_embeddings=len(table)
                ),
                table,
            )
        layer = AttentionLayer(
            traced.num_heads, traced.num_kv_heads, traced.head_dim, scale=traced.scale,
            rope=None if part.rope is None else self._ropes[id(part.rope)], sliding_window=traced.sliding_window,
            soft_cap=traced.soft_cap, q_norm=norms[0], k_norm=norms[1], config=config, prefix=f"{self._prefix}{name}.attn",
        )  # fmt: skip
        return FusedAttention(part, self._product(part.qkv), layer, self._product([part.output]), self._paged)

    def _norm(self, name: str) -> Norm:
        module: Any = self._model.get_submodule(name)
        spec = find_norm(module)
        assert spec is not None
        self._done.add(id(module.weight))
        return Norm(spec, config=self._config, prefix=self._prefix + name)

    def _are_own(self, names: Sequence[str]) -> bool:
        """Return whether these are linear modules that share their matrices with no other."""
        linears: list[Any] = [self._model.get_submodule(name) for name in names]
        return all(isinstance(one, nn.Linear) for one in linears) and self._are_alone(names)

    def _are_alone(self, names: Iterable[str]) -> bool:
        """Return whether no other module has the weights of these."""
        modules: list[Any] = [self._model.get_submodule(name) for name in names]
        return all(len(self._names[id(one.weight)]) == 1 for one in modules)

    def _product(self, group: list[str]) -> Products:
        self._taken.update(group)
        linears: list[Any] = [self._model.get_submodule(name) for name in group]
        for one in linears:
            self._done.update(id(parameter) for parameter in one.parameters())
        return Products(
            [self._prefix + name for name in group], linears, config=self._config,
            is_vocabulary=self._model.get_output_embeddings() in linears,
            reads_tokens=self._traced.read_tokens.issuperset(group),
        )  # fmt: skip

    def _products(self, group: list[str]) -> None:
        if self._taken.intersection(group) or not self._are_own(group):
            return
        for name, part in zip(group, self._product(group).parts(), strict=True):
            self._put(name, part)

    def _others(self) -> None:
        """Parameters and buffers of the modules that stay."""
        config = self._config
        moved: dict[int, nn.Parameter] = {}
        for module_name, module in self._model.named_modules():
            if module in self._unused:
                continue
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
                    if parameter.dim() > 1 and config.adapters is not None:
                        why = f"it is {type(module).__name__} of transformers, whose own code computes it"
                        config.adapters.refuse(self._prefix + module_name, why)
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
