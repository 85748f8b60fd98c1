"""The op of experts that several engines share: each brings its tokens, each computes what its experts give for all of them.

Tokens are gathered and results summed up where they belong (all-gather, reduce-scatter), around the op that is chosen for the experts
that this rank has.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pelton_backends.reference.ops import Bind, Composed

if TYPE_CHECKING:
    from torch import Tensor

    from pelton.ops.moe import Moe, MoeNeeds, MoeTensors


class ExchangedMoe(Composed):
    handles = frozenset(["num_engines", "has_router_bias", "counts_load"])
    is_recordable = False  # how many tokens the others bring is another number in each step

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        return [] if needs.num_engines > 1 else ["only experts that several engines share"]

    @staticmethod
    def compose(needs: MoeNeeds, tensors: MoeTensors, bind: Bind) -> Moe:
        exchange, size = tensors.exchange, needs.num_engines
        assert exchange is not None, "several engines have an exchange"
        own_needs = replace(needs, num_engines=1, max_num_tokens=needs.max_num_tokens * size)
        moe: Moe = bind("moe", own_needs, replace(tensors, exchange=None))
        hidden, router = needs.experts.hidden_size, tensors.router

        def exchanged(x: Tensor, slot_mapping: Tensor) -> Tensor:
            is_token = (slot_mapping >= 0).to(x.dtype).unsqueeze(1)
            rows = exchange.gather(torch.cat([x, is_token], dim=1))
            if not len(rows):
                return torch.zeros_like(x)
            slots = rows[:, hidden].to(slot_mapping.dtype) - 1  # 0 for a token, -1 for padding
            return exchange.scatter(moe(rows[:, :hidden].contiguous(), slots), len(x))

        def join() -> Tensor:
            dtype: torch.dtype = getattr(torch, needs.dtype)
            nothing = torch.zeros(0, hidden, dtype=dtype, device=router.device)
            return exchanged(nothing, torch.zeros(0, dtype=torch.int64, device=router.device))

        exchange.add_layer(join)
        return exchanged
