"""Attention as sampling and scoring use it: plain scaled dot products, grouped heads without copying keys, masks handed in.

Shapes: B sequences, Q queries each, T keys each, H query heads, K key/value heads (H = K·G), D per head.
"""

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

IMPLEMENTATION = "ratchet"
"""Name of this attention in a model's configuration. transformers builds no mask for a name it does not know: no mask means
plain causal attention here, and sampling hands in its own (as `attention_mask` with four dimensions, passed through as it is)."""


def register_attention() -> None:
    """Make `IMPLEMENTATION` known to transformers; harmless when repeated."""
    AttentionInterface.register(IMPLEMENTATION, attend)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """Softmax(Q·Kᵀ·scaling)·V for query [B, H, Q, D], key and value [B, K, T, D]; returns [B, Q, H, D].

    Without a mask: causal, and the sequence is its own keys (Q = T). With one ([B, 1, Q, T], true where allowed): as it says.
    One query per sequence (decoding) puts the G heads of a group in the place of queries, so that keys are read once, not G times.
    """
    groups = query.shape[1] // key.shape[1]
    if query.shape[2] == 1 and groups > 1:
        batch, heads, _, size = query.shape
        packed = query.view(batch, heads // groups, groups, size)
        out = scaled_dot_product_attention(packed, key, value, attn_mask=attention_mask, dropout_p=dropout, scale=scaling)
        return out.reshape(batch, 1, heads, value.shape[-1]), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    causal = attention_mask is None and query.shape[2] > 1
    out = scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, dropout_p=dropout, is_causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
