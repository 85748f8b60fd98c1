"""Mamba and Falcon-Mamba: a norm and a layer with a state, and nothing else; no attention anywhere."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from pelton.model.build import BuildConfig
from pelton_plugins.models.mamba2 import BackboneDecoder
from pelton_plugins.models.selective import MambaMixer, rank_of


class MambaForCausalLM(BackboneDecoder):
    mixer: ClassVar[type[MambaMixer]] = MambaMixer

    def make_layer(self, index: int, config: BuildConfig, prefix: str) -> nn.Module:
        hf = config.hf
        return self.mixer(
            self.make_norm(config, f"{prefix}.norm"),
            inner=int(hf.get("intermediate_size", hf.get("expand", 2) * hf.hidden_size)), state_size=hf.state_size,
            rank=rank_of(hf.get("time_step_rank", "auto"), hf.hidden_size), conv_kernel=hf.conv_kernel,
            has_conv_bias=bool(hf.get("use_conv_bias", True)), has_bias=bool(hf.get("use_bias")), config=config,
            prefix=f"{prefix}.mixer",
        )  # fmt: skip


class FalconMambaMixer(MambaMixer):
    """Norms without weights before steps are made, and of what is written and read."""

    def make_norms(self, config: BuildConfig, prefix: str) -> None:
        self.eps = float(config.hf.get("mixer_rms_eps", 1e-6))

    def normed(self, dt: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dt, b, c = (F.rms_norm(x.float(), x.shape[-1:], None, self.eps).to(x.dtype) for x in (dt, b, c))
        return dt, b, c


class FalconMambaForCausalLM(MambaForCausalLM):
    mixer = FalconMambaMixer
