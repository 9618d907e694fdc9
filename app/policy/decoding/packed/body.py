"""Decoders of Llama's kind (Llama, Qwen2, Mistral) from their packed products, without the stack of modules between.

Decoding a batch is a few hundred small operations, and what they cost beside the products is half of a step. So what lies between products
is compiled (`app.policy.decoding.packed.between`, `app.policy.decoding.packed.attending`). Each part of a pass has its own attention, and
all of them one product each.

Bit for bit the same, whatever else is in the batch: packed products see to that (`app.policy.packing.products`), and everything else is
computed token by token, in an order of the token's own. `app.policy.decoding.invariance` asks the machine at hand.

Products take all threads; what lies between them takes one while it is small: to wake the others takes longer than that does.

Shapes: N rows of a part, Q new tokens of each, T tokens of all parts, D hidden size, H query heads, K key/value heads (H = K·G), M = Q·G,
d per head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from app.policy.decoding.keyvalues import Fed, KeyValues
from app.policy.decoding.packed import attending
from app.policy.decoding.packed.attending import attended
from app.policy.decoding.packed.between import Elements, activated, normed, placed
from app.policy.packing.linear import PackedLinear
from app.policy.packing.tiles import OUTPUTS

PADDED = 16
"""Positions behind the end of the context: what is fed ahead of a row near it is padded beyond it, and never read."""
WORTH_WAKING = 1 << 20
"""Numbers between two products, at the widest, from which on all threads take part in that too."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """The parts of one decoder layer."""

    before_attention: Elements
    qkv: PackedLinear
    out: PackedLinear
    before_mlp: Elements
    gate_up: PackedLinear
    down: PackedLinear


class PackedBody:
    """See above; a `Body`. Reads the model's own packed weights: no copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        body, config = cast("Any", model.base_model), model.config.get_text_config()
        self._embedded: Callable[[Tensor], Tensor] = body.embed_tokens
        self._norm = _elements(body.norm.weight.detach())
        self._layers = [_layer(layer) for layer in body.layers]
        self._epsilon = float(config.rms_norm_eps)
        self._heads, self._groups = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._size = self._layers[0].out.columns // self._heads
        self._scale = self._size**-0.5
        at = torch.arange(int(config.max_position_embeddings) + PADDED)[None]
        cos_1Cd, sin_1Cd = body.rotary_emb(torch.empty(0, dtype=model.dtype), at)
        low_Ch, high_Ch = sin_1Cd[0].chunk(2, dim=-1)
        self._cos_Cd, self._sin_Cd = _elements(cos_1Cd[0].contiguous()), _elements(torch.cat([-low_Ch, high_Ch], dim=-1))

    def cache(self, *, max_rows: int) -> KeyValues:
        """See `Body`."""
        return KeyValues(max_rows=max_rows, tiled=OUTPUTS)

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        """See `Body`."""
        for fed in parts:  # all of them first: the cache is another one once it has grown
            if fed.width > len(self._cos_Cd):
                raise IndexError(f"position {fed.width - 1} is behind the end of the context")
            cache.reserve(fed)
        sizes = [fed.tokens_nQ.numel() for fed in parts]
        hidden_TD = self._embedded(torch.cat([fed.tokens_nQ.flatten() for fed in parts]))
        attended_TD = hidden_TD.new_empty(len(hidden_TD), self._heads * self._size)
        seen = [self._seen(fed, to=to) for fed, to in zip(parts, attended_TD.split(sizes), strict=True)]
        normed_TD = torch.empty_like(hidden_TD)
        active_TM = hidden_TD.new_empty(len(hidden_TD), self._layers[0].down.columns)
        hidden, out, active = _elements(hidden_TD), _elements(normed_TD), _elements(active_TM)
        threads = torch.get_num_threads() if len(hidden_TD) * self._layers[0].gate_up.rows >= WORTH_WAKING else 1
        added_TD = torch.zeros_like(hidden_TD)
        for index, layer in enumerate(self._layers):
            normed(threads, hidden, _elements(added_TD), layer.before_attention, self._epsilon, out)
            qkv_TSd = layer.qkv.product(normed_TD).view(len(hidden_TD), -1, self._size)
            for part, of_it in zip(seen, qkv_TSd.split(sizes), strict=True):
                self._attend(index, part, of_it, cache, threads)
            added_TD = layer.out.product(attended_TD)
            normed(threads, hidden, _elements(added_TD), layer.before_mlp, self._epsilon, out)
            activated(threads, _elements(layer.gate_up.product(normed_TD)), active)
            added_TD = layer.down.product(active_TM)
        normed(threads, hidden, _elements(added_TD), self._norm, self._epsilon, out)
        return [of_it.view(*fed.tokens_nQ.shape, -1) for of_it, fed in zip(normed_TD.split(sizes), parts, strict=True)]

    def _seen(self, fed: Fed, *, to: Tensor) -> "_Seen":
        """A part whose attention is written `to` [T, H·d]."""
        (rows, new), group = fed.positions_nQ.shape, self._heads // self._groups
        multiplied = self._heads * self._size * 2 * rows * new * fed.width
        return _Seen(
            first=fed.first,
            positions_NQ=fed.positions_nQ.contiguous().numpy(),
            queries_NKMd=np.empty((rows, self._groups, new * group, self._size), dtype=np.float32),
            to_NQKGd=_elements(to.view(rows, new, self._groups, group, self._size)),
            threads=torch.get_num_threads() if multiplied >= attending.WORTH_WAKING else 1,
        )

    def _attend(self, index: int, part: "_Seen", qkv_TSd: Tensor, cache: KeyValues, threads: int) -> None:
        """Write keys and values of one part to the cache, and attention over everything up to each token where it belongs."""
        keys, values = (_elements(held) for held in cache.tiled(index, qkv_TSd[None, :, : self._groups].transpose(1, 2)))
        placed(threads, _elements(qkv_TSd), part.positions_NQ, part.first, self._cos_Cd, self._sin_Cd, keys, values, part.queries_NKMd)
        attended(part.threads, part.queries_NKMd, keys, values, part.first, part.positions_NQ, self._scale, part.to_NQKGd)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A part of a pass, the same for every layer."""

    first: int
    """Of its rows in the cache."""
    positions_NQ: NDArray[np.int64]
    queries_NKMd: NDArray[np.float32]
    """Where the queries of a layer are put."""
    to_NQKGd: Elements
    """Where attention is written."""
    threads: int
    """That attention takes."""


def _elements(tensor: Tensor) -> Elements:
    """As compiled loops take them; shares memory."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


def _layer(layer: Any) -> Layer:  # noqa: ANN401 - of whichever model it is
    return Layer(
        before_attention=_elements(layer.input_layernorm.weight.detach()), qkv=layer.self_attn.q_proj.shared.product,
        out=layer.self_attn.o_proj, before_mlp=_elements(layer.post_attention_layernorm.weight.detach()),
        gate_up=layer.mlp.gate_proj.shared.product, down=layer.mlp.down_proj,
    )  # fmt: skip
