"""The forward pass of sampling: hidden states of new tokens, their keys and values into the cache.

`PackedBody` runs the decoders of Llama's kind (Llama, Qwen2, Mistral) from their packed products, without the stack of modules between:
decoding a batch is a few hundred small operations, and what they cost beside the products is half of a step. Every other model goes through
transformers' own modules.

What one pass is fed are parts: rows that decode, and prompts beside them. A part has its own attention, and all of them one product each.

Bit for bit the same, whatever else is in the batch. Packed products see to that (`app.policy.packing.products`); attention is two plain
products (the fused kernel differs rarely, and one difference spreads everywhere) over a width that is a multiple of `LANES`, masked with
-inf, of `TOGETHER` queries where they are float32; everything else is element by element or along one row.
Measured on AVX512-BF16, and in float32 on AVX2; `app.policy.decoding.invariance` asks the machine at hand.

Rows that decode are read whole in bfloat16, as far as there is room: a part of every row is not one piece of memory, and oneDNN's batched
product copies it first. Of 64 rows, 160 of 256 tokens wide, that took 1.5 ms where reading all 256 takes 0.7 (one AVX512-BF16 core). In
float32 MKL reads the part where it lies: of 32 rows, 96 of 128 tokens take .63 of the time (one AVX2 core).

Products take all threads; what lies between them takes one while it is small. torch wakes the others for 32,768 numbers, and to wake them
takes longer than those do: on two cores a step of 1, 8 and 32 rows takes .87, .90 and .98 of the time so in float32, and about .75 in
bfloat16; passes of prompts .95 and .82.

Shapes: N rows of a part, Q new tokens of each, T tokens of all parts, W width of the cache, D hidden size, H query heads, K key/value heads
(H = K·G), d per head.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from app.policy.decoding.between import Elements, activated, normed, placed, prepare
from app.policy.decoding.keyvalues import Fed, KeyValues, Plan
from app.policy.packing.linear import PackedLinear, PackedPart

LANES = 16
PADDED = 16
TOGETHER = 4
"""Rows of a product in float32, or a multiple of it, whose bits do not depend on how many there are: MKL has kernels of their own for
one to three, and gives what is not a multiple of four to threads in such pieces."""
WORTH_WAKING = 1 << 20
"""Numbers between two products, at the widest, from which on all threads take part in that too."""
KINDS = frozenset({"llama", "qwen2", "mistral"})
STATIC_ROPE = frozenset({"default", "llama3", "linear"})
"""Rotations that depend on the position alone."""


class Body(Protocol):
    """Everything of a model but its head."""

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        """Hidden states [N, Q, D] of each part; its keys and values are in the cache afterwards. A token sees its row up to itself."""
        ...


def body_of(model: PreTrainedModel) -> Body:
    """The quickest that this model has."""
    packed = _packed(model)
    return TransformersBody(model) if packed is None else packed


class TransformersBody:
    """transformers' modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._body = cast("Any", model.base_model)

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
    """See above. Reads the model's own packed weights: no copy."""

    def __init__(self, model: PreTrainedModel, layers: list[Layer]) -> None:
        body, config = cast("Any", model.base_model), model.config.get_text_config()
        self._embedding: Tensor = body.embed_tokens.weight
        self._norm = _elements(body.norm.weight.detach())
        self._layers = layers
        self._epsilon = float(config.rms_norm_eps)
        self._heads, self._groups = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._size = layers[0].out.columns // self._heads
        self._scale = self._size**-0.5
        self._low = model.dtype == torch.bfloat16
        prepare()
        # what is fed ahead of a row near the end of the context is padded beyond it, and never read
        at = torch.arange(int(config.max_position_embeddings) + PADDED)[None]
        cos_1Cd, sin_1Cd = body.rotary_emb(self._embedding[:1], at)
        low_Ch, high_Ch = sin_1Cd[0].chunk(2, dim=-1)
        self._cos_Cd, self._sin_Cd = _elements(cos_1Cd[0].contiguous()), _elements(torch.cat([-low_Ch, high_Ch], dim=-1))

    def __call__(self, parts: Sequence[Fed], cache: KeyValues) -> list[Tensor]:
        """See `Body`."""
        for fed in parts:  # all of them first: how wide rows are read depends on how long the longest one is
            if fed.width > len(self._cos_Cd):
                raise IndexError(f"position {fed.width - 1} is behind the end of the context")
            cache.reserve(fed, lanes=LANES)
        sizes = [fed.tokens_nQ.numel() for fed in parts]
        tokens_T = torch.cat([fed.tokens_nQ.flatten() for fed in parts])
        hidden_TD = functional.embedding(tokens_T, self._embedding)
        attended_TD = hidden_TD.new_zeros(len(hidden_TD), self._heads * self._size)
        seen = [self._seen(fed, cache, to=to) for fed, to in zip(parts, attended_TD.split(sizes), strict=True)]
        normed_TD = torch.empty_like(hidden_TD)
        active_TM = hidden_TD.new_empty(len(hidden_TD), self._layers[0].down.columns)
        hidden, out, active = _elements(hidden_TD), _elements(normed_TD), _elements(active_TM)
        widest = max(len(hidden_TD) * self._layers[0].gate_up.rows, *(self._heads * part.mask_N1QW.numel() for part in seen))
        with _threads(between=widest) as product:
            for index, layer in enumerate(self._layers):
                normed(hidden, layer.before_attention, self._epsilon, out)
                qkv_TSd = product(layer.qkv, normed_TD).view(len(hidden_TD), -1, self._size)
                for part, of_it in zip(seen, qkv_TSd.split(sizes), strict=True):
                    self._attend(index, part, of_it, cache)
                hidden_TD += product(layer.out, attended_TD)
                normed(hidden, layer.before_mlp, self._epsilon, out)
                activated(_elements(product(layer.gate_up, normed_TD)), active)
                hidden_TD += product(layer.down, active_TM)
        normed(hidden, self._norm, self._epsilon, out)
        return [of_it.view(*fed.tokens_nQ.shape, -1) for of_it, fed in zip(normed_TD.split(sizes), parts, strict=True)]

    def _seen(self, fed: Fed, cache: KeyValues, *, to: Tensor) -> "_Seen":
        """A part whose attention is written `to` [T, H·d]. In float32 each group has idle heads, up to a multiple of `TOGETHER` queries."""
        plan, (rows, new) = cache.plan(fed, lanes=LANES, whole=self._low), fed.positions_nQ.shape
        barred = torch.arange(plan.width) > fed.positions_nQ[:, :, None]
        group = self._heads // self._groups
        idle = -group % TOGETHER if not self._low and group * new % TOGETHER else 0
        return _Seen(
            plan=plan,
            positions_NQ=fed.positions_nQ.contiguous().numpy(),
            mask_N1QW=torch.zeros(barred.shape, dtype=torch.float32).masked_fill_(barred, -torch.inf)[:, None, None],
            queries_NKGQd=to.new_zeros(rows, self._groups, group + idle, new, self._size),
            to_NKGQd=to.view(rows, new, self._groups, group, self._size).permute(0, 2, 3, 1, 4),
        )

    def _attend(self, index: int, part: "_Seen", qkv_TSd: Tensor, cache: KeyValues) -> None:
        """Write keys and values of one part to the cache, and attention over everything up to each token where it belongs."""
        queries, rows = part.queries_NKGQd, part.plan.rows
        keys, values = cache.room(index, queries[:, :, 0])
        placed(
            _elements(qkv_TSd), part.positions_NQ, rows.start, self._cos_Cd, self._sin_Cd,
            _elements(keys), _elements(values), _elements(queries),
        )  # fmt: skip
        # the G heads of a group stand in the place of queries, so that keys are read once, not G times
        keys, values = (held[rows, :, : part.plan.width].flatten(0, 1) for held in (keys, values))
        query = queries.view(len(keys), -1, self._size)
        scores = torch.bmm(query, keys.transpose(1, 2)).view(*queries.shape[:-1], -1).float().mul_(self._scale)
        weights = torch.softmax(scores.add_(part.mask_N1QW), dim=-1).to(values.dtype).view(len(keys), -1, part.plan.width)
        part.to_NKGQd.copy_(torch.bmm(weights, values).view(queries.shape)[:, :, : part.to_NKGQd.shape[2]])


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A part of a pass, the same for every layer."""

    plan: Plan
    positions_NQ: NDArray[np.int64]
    mask_N1QW: Tensor
    """Added to the scores of attention: -inf behind each token."""
    queries_NKGQd: Tensor
    """Where the queries of a layer are put, with as many heads as are multiplied together."""
    to_NKGQd: Tensor
    """Where attention is written."""


def _elements(tensor: Tensor) -> Elements:
    """As compiled loops take them; shares memory."""
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


@contextmanager
def _threads(*, between: int) -> Iterator[Callable[[PackedLinear, Tensor], Tensor]]:
    """How to multiply within: on all threads, while everything else, of so many numbers at the widest, takes one if that is better."""
    most = torch.get_num_threads()
    if most == 1 or between >= WORTH_WAKING:
        yield lambda layer, inputs_NI: layer.product(inputs_NI)
        return

    def product(layer: PackedLinear, inputs_NI: Tensor) -> Tensor:
        torch.set_num_threads(most)
        outputs_NO = layer.product(inputs_NI)
        torch.set_num_threads(1)
        return outputs_NO

    torch.set_num_threads(1)
    try:
        yield product
    finally:
        torch.set_num_threads(most)


def _packed(model: PreTrainedModel) -> PackedBody | None:
    """The packed body of a model of a known kind whose products are all packed; None of any other."""
    config = model.config.get_text_config()
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    windowed = getattr(config, "use_sliding_window", False) or (config.model_type == "mistral" and getattr(config, "sliding_window", None))
    if config.model_type not in KINDS or rope not in STATIC_ROPE or windowed or getattr(config, "hidden_act", "") != "silu":
        return None
    layers: list[Layer] = []
    for layer in cast("Any", model.base_model).layers:
        first, up = layer.self_attn.q_proj, layer.mlp.gate_proj
        if not (isinstance(first, PackedPart) and isinstance(up, PackedPart) and _is_packed(layer.self_attn.o_proj, layer.mlp.down_proj)):
            return None
        layers.append(Layer(
            before_attention=_elements(layer.input_layernorm.weight.detach()), qkv=first.shared.product, out=layer.self_attn.o_proj,
            before_mlp=_elements(layer.post_attention_layernorm.weight.detach()), gate_up=up.shared.product, down=layer.mlp.down_proj,
        ))  # fmt: skip
    return PackedBody(model, layers) if layers else None


def _is_packed(*modules: nn.Module) -> bool:
    return all(isinstance(module, PackedLinear) for module in modules)
