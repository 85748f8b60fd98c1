"""The op of experts that several engines share: each brings its tokens, each computes what its experts give for those it gets.

Tokens are gathered and results summed up where they belong (all-gather, reduce-scatter), around the op that is chosen for the experts
that this rank has. On a CPU, in steps where that saves enough rows, each token goes with its choice to those engines alone that have its
experts, and what they give comes back (all-to-all).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from pelton_backends.reference.ops import Bind, Composed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from pelton.ops.moe import Moe, MoeNeeds, MoeParts, MoeTensors, TokenExchange


LEAST_SAVED = 64
"""Rows that a rank has to get less, by all-to-all, than by a gather. Measured with two and four ranks on two cores that had other work
(32 and 64 experts, rows of 1,024 and 512 numbers): with 64 to 96 both take about as long (0.83 to 1.6 x), with 200 and more all-to-all
was faster in the few shapes that were tried (1.07 to 4.5 x)."""


class ExchangedMoe(Composed):
    handles = frozenset(["num_engines", "has_router_bias", "counts_load", "has_copies"])
    is_recordable = False  # how many tokens the others bring is another number in each step

    @staticmethod
    def unsupported(needs: MoeNeeds) -> list[str]:
        return [] if needs.num_engines > 1 else ["only experts that several engines share"]

    @staticmethod
    def compose(needs: MoeNeeds, tensors: MoeTensors, bind: Bind) -> Moe:
        exchange, size = tensors.exchange, needs.num_engines
        assert exchange is not None, "several engines have an exchange"
        has_parts = tensors.router.device.type == "cpu"  # elsewhere the host would wait for the choice
        own_needs = replace(needs, num_engines=1, max_num_tokens=needs.max_num_tokens * size, has_parts=has_parts)
        moe: Moe = bind("moe", own_needs, replace(tensors, exchange=None))
        hidden, router = needs.experts.hidden_size, tensors.router
        sent = sent_apart(cast("MoeParts", moe), exchange, tensors.held_by) if has_parts else None

        def exchanged(x: Tensor, slot_mapping: Tensor) -> Tensor:
            if sent is not None and goes_apart(exchange.rows, needs.routing.top_k):
                return sent(x, slot_mapping)
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


def goes_apart(rows: Sequence[int], top_k: int) -> bool:
    """Say for a step of so many tokens of each engine which way they take: the same in all engines. A gather brings as many of each as
    the largest has; by all-to-all a rank gets, of a router that spreads its choice, this share of all tokens."""
    size = len(rows)
    return size > 1 and size * max(rows) - sum(rows) * (1 - (1 - 1 / size) ** top_k) >= LEAST_SAVED


def sent_apart(moe: MoeParts, exchange: TokenExchange, held_by: Sequence[range]) -> Callable[[Tensor, Tensor], Tensor]:
    """The op by all-to-all. A row on its way is its numbers, its places and its weights, as bytes."""
    firsts = torch.tensor([places.start for places in held_by])
    lasts = torch.tensor([places.stop for places in held_by])

    def sent(x: Tensor, slot_mapping: Tensor) -> Tensor:
        parts = x, *moe.choose(x, slot_mapping)
        places = parts[1].unsqueeze(-1)
        is_for = ((places >= firsts) & (places < lasts)).any(dim=1)  # [T, engines]
        tokens = [torch.nonzero(is_for[:, engine]).flatten() for engine in range(exchange.size)]
        counts, order = [len(part) for part in tokens], torch.cat(tokens)
        rows = [part.index_select(0, order).view(torch.uint8) for part in parts]
        found, came = exchange.swap(torch.cat(rows, dim=1), counts)
        pieces = found.split([part.shape[1] for part in rows], dim=1)
        of_all = [piece.contiguous().view(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
        given, _ = exchange.swap(moe.compute(*of_all), came, counts)
        total = torch.zeros(x.shape, dtype=torch.float32)
        return total.index_add_(0, order, given.float()).to(x.dtype)

    return sent
