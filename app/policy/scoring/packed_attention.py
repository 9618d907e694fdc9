"""Attention over a packed row: each node looks at its ancestors and, causally, at itself.

Registered with transformers under `ratchet_packed`; the row's nodes travel as the keyword `packed_nodes` through the model's forward.
The cost is that of the sequences themselves; a block mask over the whole row would cost the square of the row.

Legend of shapes: H query heads, G key/value heads, N tokens of the row, D head width, Q tokens of a node, K tokens a node sees.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from app.policy.scoring.packing import Node

NAME = "ratchet_packed"


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make `model` accept `packed_nodes`. It then serves packed rows only."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    model.set_attn_implementation(NAME)


def packed_attention(
    module: torch.nn.Module,
    query_1HND: torch.Tensor,
    key_1GND: torch.Tensor,
    value_1GND: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed_nodes: Sequence[Node],
    scaling: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Answers [1, N, H, D] in the shape transformers expects of an attention function."""
    grouped = query_1HND.shape[1] != key_1GND.shape[1]
    dtype, device = query_1HND.dtype, query_1HND.device.type
    inner = attends_in(value_1GND)
    # One layout change for all nodes: a node's rows are then contiguous, and the many small calls below copy nothing.
    query, key, value = (x.transpose(1, 2).contiguous().to(inner) for x in (query_1HND, key_1GND, value_1GND))
    with torch.autocast(device, enabled=False):
        parts = [_attend(node, query, key, value, scaling=scaling, grouped=grouped) for node in packed_nodes]
    return torch.cat(parts, dim=1).to(dtype), None


def attends_in(value: torch.Tensor) -> torch.dtype:
    """The dtype that attention over these values is computed in.

    On a processor float32: the gradient of bfloat16 attention takes twice as long as casting and taking that of float32. On a GPU the
    values' own, which is autocast's: rotated queries and keys are float32 beside them, and for float32 with grouped heads only the kernel
    is left that writes all scores down (H200, 0.5 B parameters: 3.2 times as long and 2.7 times the memory of a whole step).
    """
    return torch.float32 if value.device.type == "cpu" else value.dtype


def _attend(
    node: Node, query_1NHD: torch.Tensor, key_1NGD: torch.Tensor, value_1NGD: torch.Tensor, *, scaling: float | None, grouped: bool
) -> torch.Tensor:
    """The node's own rows, [1, Q, H, D]."""
    own = slice(node.start, node.end)
    key, value, mask = key_1NGD[:, own], value_1NGD[:, own], None
    if node.ancestors:
        key = torch.cat([*(key_1NGD[:, start:end] for start, end in node.ancestors), key], dim=1)
        value = torch.cat([*(value_1NGD[:, start:end] for start, end in node.ancestors), value], dim=1)
        mask = _sees(node.end - node.start, key.shape[1], key.device)
    attended_1HQD = scaled_dot_product_attention(
        query_1NHD[:, own].transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped,
    )  # fmt: skip
    return attended_1HQD.transpose(1, 2)


def _sees(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[Q, K] bool: the last `queries` keys are the node's own and seen causally, the ones before are seen by all."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
