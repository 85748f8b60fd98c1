"""Work that one rank of a model does for a token: operations and bytes, counted from its modules. Metrics are made of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pelton.layers.embedding import VocabEmbedding, VocabMatrix
from pelton.layers.linear import LinearModule

if TYPE_CHECKING:
    from pelton_platforms.device.loaded import LoadedModel


def work_of(loaded: LoadedModel) -> dict[str, float]:
    """See `DeviceReport.work`. Norms, activations and the embedding's look-up are left out: a thousandth of it or less."""
    token_flops, vocab_flops = (
        0.0,
        {True: 0.0, False: 0.0},
    )  # of the embedding's matrix, and of an output head of its own
    for module in loaded.model.modules():
        if isinstance(module, VocabMatrix):
            vocab_flops[isinstance(module, VocabEmbedding)] = 2.0 * module.spec.in_features * module.spec.out_features
        elif isinstance(module, LinearModule):
            token_flops += 2.0 * module.spec.in_features * module.spec.out_features
        routing, experts = getattr(module, "routing", None), getattr(module, "experts", None)
        if routing is not None and experts is not None:
            held = sum(parameter.numel() for parameter in experts.parameters())
            token_flops += 2.0 * held * routing.top_k / routing.num_experts
    found: defaultdict[str, float] = defaultdict(float)
    found["token_flops"], found["output_flops"] = token_flops, vocab_flops[False] or vocab_flops[True]
    for name, layer in loaded.build.cache_layers.items():
        chosen = getattr(layer, "chosen", None)  # of a sparse layer, which reads no more of a context than that
        window = getattr(layer, "sliding_window", None) or (0 if chosen is None else chosen.shape[1])
        found[f"context_flops {window}"] += 4.0 * getattr(layer, "num_heads", 0) * getattr(layer, "head_dim", 0)
        spec = loaded.specs.get(name)
        if spec is not None:  # the others read a cache that is another layer's
            found[f"context_bytes {window}"] += spec.page_size_bytes / spec.block_size
    return dict(found)
