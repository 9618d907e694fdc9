"""The forward pass of sampling: hidden states of new tokens, their keys and values into the cache.

What one pass is fed are parts: rows that decode, and prompts beside them. Decoders of Llama's kind whose products are packed have a body of
their own (`app.policy.decoding.packed.body`). Every other model goes through transformers' own modules.

Shapes: N rows of a part, Q new tokens of each, D hidden size.
"""

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from app.policy.decoding.keyvalues import Fed, KeyValues
from app.policy.packing import products
from app.policy.packing.linear import PackedLinear, PackedPart

KINDS = frozenset({"llama", "qwen2", "mistral"})
STATIC_ROPE = frozenset({"default", "llama3", "linear"})
"""Rotations that depend on the position alone."""


class Body(Protocol):
    """Everything of a model but its head."""

    def cache(self, *, max_rows: int) -> KeyValues:
        """A cache that it can read."""
        ...

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        """Hidden states [N, Q, D] of each part; its keys and values are in the cache afterwards. A token sees its row up to itself."""
        ...


def body_of(model: PreTrainedModel) -> Body:
    """The quickest that this model has."""
    if not _is_packed(model):
        return TransformersBody(model)
    prepare()
    from app.policy.decoding.packed.body import PackedBody  # imports numba, which whoever only knows of models does not need

    return PackedBody(model)


def prepare() -> None:
    """Have compiled whatever bodies are made of, or fetched: where nothing was kept that holds Python's lock for twenty seconds."""
    if not (products.can_pack(torch.bfloat16) or products.can_pack(torch.float32)):
        return  # nothing is packed here
    from app.policy.decoding.packed import attending, between  # they bring numba along

    products.prepare()
    between.prepare()
    attending.prepare()


class TransformersBody:
    """transformers' modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body = cast("Any", model.base_model)

    def cache(self, *, max_rows: int) -> KeyValues:
        """See `Body`."""
        return KeyValues(max_rows=max_rows)

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        """See `Body`."""
        return [self._part(fed.tokens_nQ, fed.positions_nQ, cache, width=cache.plan(fed).width) for fed in parts]

    def _part(self, tokens_NQ: Tensor, positions_NQ: Tensor, cache: KeyValues, *, width: int) -> Tensor:
        mask = None
        is_whole = tokens_NQ.shape[1] == width  # a prompt from its beginning: plainly causal
        if not is_whole and not (tokens_NQ.shape[1] == 1 and bool((positions_NQ == width - 1).all())):
            mask = (torch.arange(width, device=tokens_NQ.device) <= positions_NQ[:, :, None])[:, None]
        return self._body(
            input_ids=tokens_NQ, position_ids=positions_NQ, attention_mask=mask, past_key_values=cache, use_cache=True
        ).last_hidden_state


def _is_packed(model: PreTrainedModel) -> bool:
    """Whether it is a decoder of a known kind, and all its products are packed."""
    config = model.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windowed = getattr(config, "use_sliding_window", False) or (config.model_type == "mistral" and getattr(config, "sliding_window", None))
    if config.model_type not in KINDS or rope not in STATIC_ROPE or windowed or getattr(config, "hidden_act", "") != "silu":
        return False
    layers = cast("Any", model.base_model).layers
    return len(layers) > 0 and all(
        _are(PackedPart, layer.self_attn.q_proj, layer.mlp.gate_proj) and _are(PackedLinear, layer.self_attn.o_proj, layer.mlp.down_proj)
        for layer in layers
    )


def _are(kind: type[nn.Module], *modules: nn.Module) -> bool:
    return all(isinstance(module, kind) for module in modules)
