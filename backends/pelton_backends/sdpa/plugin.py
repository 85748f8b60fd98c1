"""Attention through torch's scaled_dot_product_attention: the reference on CPU."""

from __future__ import annotations

from collections.abc import Sequence

from pelton.entries import BackendEntry
from pelton.hookspecs import hookimpl

PELTON_API = ">=1,<2"

_STATES = (
    ("state_space", "state_space:StateSpaceBackend", "states of Mamba-2's layers"),
    ("delta_rule", "delta_rule:DeltaRuleBackend", "states of layers with the gated delta rule"),
    (
        "key_delta_rule",
        "delta_rule:KeyDeltaRuleBackend",
        "states of layers whose keys' numbers each have a decay (Kimi Linear)",
    ),
    ("selective_scan", "selective_scan:SelectiveScanBackend", "states of Mamba's layers"),
    ("lightning", "lightning:LightningBackend", "states of lightning attention (MiniMax-Text-01)"),
    ("rg_lru", "rg_lru:RgLruBackend", "states of real-gated linear recurrent units (RecurrentGemma)"),
    ("short_conv", "short_conv:ShortConvBackend", "short convolutions between gates"),
)
"""Layers with states: name, class, what it computes."""


@hookimpl
def pelton_attention_backends(device_type: str) -> Sequence[BackendEntry]:
    if device_type not in ("cpu", "cuda", "rocm"):
        return []
    encoder = BackendEntry(
        name="sdpa_encoder",
        load="pelton_backends.sdpa.encoder:SDPAEncoderBackend",
        priority=10,
        device_types=(device_type,),
        doc="attention in both directions without a cache, in torch",
    )
    sdpa = BackendEntry(
        name="sdpa",
        load="pelton_backends.sdpa.backend:SDPABackend",
        priority=10,
        device_types=(device_type,),
        aliases=("TORCH_SDPA",),
        doc="torch's scaled_dot_product_attention over gathered blocks",
    )
    if device_type != "cpu":
        return [encoder, sdpa]
    return [
        encoder,
        sdpa,
        BackendEntry(
            name="sdpa_mla",
            load="pelton_backends.sdpa.mla:SDPAMLABackend",
            priority=10,
            device_types=("cpu",),
            doc="attention over gathered latents (MLA), in torch",
        ),
        *(
            BackendEntry(
                name=name,
                load=f"pelton_backends.sdpa.{load}",
                priority=10,
                device_types=("cpu",),
                doc=f"{doc}, in torch",
            )
            for name, load, doc in _STATES
        ),
        BackendEntry(
            name="sdpa_sparse",
            load="pelton_backends.sdpa.sparse:SDPASparseBackend",
            priority=10,
            device_types=("cpu",),
            doc="attention over latents that an indexer chooses, and its choice, in torch",
        ),
    ]
