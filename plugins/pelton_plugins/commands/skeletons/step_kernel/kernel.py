"""The kernel: one decode step of Llama from token ids to logits, in torch's own ops. T rows of one token, H hidden size.

A real one launches a kernel of its own on the same tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F

from pelton.worker.step_kernel import StepKernel, StepNeeds

if TYPE_CHECKING:
    from pelton.attention.metadata import CommonMetadata, ForwardBatch
    from torch import Tensor


class SkeletonStep(StepKernel):
    is_recordable: ClassVar[bool] = True  # torch's ops, and no value of a tensor is asked for

    @classmethod
    def unsupported(cls, needs: StepNeeds) -> list[str]:
        reasons = []
        if needs.architecture != "LlamaForCausalLM":
            reasons.append(f"architecture {needs.architecture}")
        if needs.dtype != "float32":
            reasons.append(f"dtype {needs.dtype}")
        if needs.hf.get("hidden_act", "silu") != "silu":
            reasons.append(f"activation {needs.hf.hidden_act}")
        if needs.hf.get("attention_bias") or needs.hf.get("mlp_bias"):
            reasons.append("biases")
        return reasons

    def __call__(self, batch: ForwardBatch) -> Tensor:
        model, (group,) = self.model, batch.groups
        hidden = F.embedding(batch.input_ids, model.embed_tokens.weight)
        for layer in model.layers:
            hidden = hidden + self._attention(layer, self._norm(hidden, layer.input_layernorm), batch, group)
            hidden = hidden + self._mlp(layer, self._norm(hidden, layer.post_attention_layernorm))
        head = getattr(model.lm_head, "matrix", model.embed_tokens)  # tied, or a matrix of its own
        logits = F.linear(self._norm(hidden, model.norm), head.weight)
        return logits[:, : model.embed_tokens.vocab_size]

    def _attention(self, layer: Any, x: Tensor, batch: ForwardBatch, group: CommonMetadata) -> Tensor:
        attn = layer.attn
        heads, kv_heads, head_dim = attn.num_heads, attn.num_kv_heads, attn.head_dim
        qkv = F.linear(x, layer.qkv_proj.weight).view(len(x), heads + 2 * kv_heads, head_dim)
        cos, sin = attn.write_tensors.cos_sin[batch.positions][:, None].chunk(2, dim=-1)
        query, key = rotate(qkv[:, :heads], cos, sin), rotate(qkv[:, heads : heads + kv_heads], cos, sin)
        # Padding has slot -1: its keys go to block 0, which nobody reads.
        slot, size = group.slot_mapping.clamp(min=0), attn.k_cache.shape[1]
        attn.k_cache[slot // size, slot % size] = key
        attn.v_cache[slot // size, slot % size] = qkv[:, heads + kv_heads :]
        place = torch.arange(group.block_table.shape[1] * size, device=x.device)
        is_known = place < group.seq_lens[:, None]  # [T, C]
        keys, values = (
            # Selected away, not multiplied by 0: NaN of others may lie behind a row's end.
            torch.where(is_known[:, :, None, None], cache[group.block_table.long()].flatten(1, 2), 0.0)
            for cache in (attn.k_cache, attn.v_cache)
        )
        query = query.view(len(x), kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("tkgd,tckd->tkgc", query, keys) * attn.scale
        weights = scores.masked_fill(~is_known[:, None, None], torch.finfo(scores.dtype).min).softmax(dim=-1)
        return F.linear(torch.einsum("tkgc,tckd->tkgd", weights, values).flatten(1), layer.o_proj.weight)

    @staticmethod
    def _mlp(layer: Any, x: Tensor) -> Tensor:
        gate, up = F.linear(x, layer.gate_up_proj.weight).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, layer.down_proj.weight)

    @staticmethod
    def _norm(x: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.spec.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]; cos, sin [T, 1, head_dim / 2]"""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
