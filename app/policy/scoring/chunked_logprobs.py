"""Log-probabilities of given tokens without ever holding the logits whole.

The vocabulary is walked in chunks, and walked again for the gradient.

Legend of shapes: M tokens asked for, E hidden width, V vocabulary, C chunk of it.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from app.policy.decoding.shaping import BendTensors

VOCABULARY_CHUNK = 8192
"""Logits held at once, per token: 512 tokens need 16 MiB in fp32."""


def chunked_logprobs(
    hidden_ME: torch.Tensor,
    weight_VE: torch.Tensor,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    bends: BendTensors | None = None,
    dtype: torch.dtype | None = None,
    chunk: int = VOCABULARY_CHUNK,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [M] of `targets_M` under softmax(hidden · weightᵀ / temperature), and entropies [M] (detached), both fp32, nats.

    `bends` is what the turns' shapes add to the logits first. `dtype` is that of the matrix products (None: the hidden state's); sums are
    always fp32.
    """
    if bias_V is not None:
        raise ValueError("the model's output layer has a bias, which none of the supported architectures has")
    outcome = cast("Any", _ChunkedLogProbs.apply)(hidden_ME, weight_VE, targets_M, temperature_M, dtype or hidden_ME.dtype, chunk, bends)
    return cast("tuple[torch.Tensor, torch.Tensor]", outcome)


class _ChunkedLogProbs(torch.autograd.Function):
    """log p = z_target − logsumexp(z); d log p / dz = onehot − softmax(z), recomputed chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch puts anything on it
        hidden_ME: torch.Tensor,
        weight_VE: torch.Tensor,
        targets_M: torch.Tensor,
        temperature_M: torch.Tensor,
        dtype: torch.dtype,
        chunk: int,
        bends: BendTensors | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = hidden_ME.to(dtype)
        count = hidden.shape[0]
        highest = hidden.new_full((count,), -torch.inf, dtype=torch.float32)
        total, weighted, chosen = (torch.zeros_like(highest) for _ in range(3))
        for start, logits_MC in _logits(hidden, weight_VE, temperature_M, chunk, bends):
            new_highest = torch.maximum(highest, logits_MC.amax(1))
            decay = torch.exp(highest - new_highest)
            inside = (targets_M >= start) & (targets_M < start + logits_MC.shape[1])
            local = (targets_M - start).clamp(0, logits_MC.shape[1] - 1)
            chosen = torch.where(inside, logits_MC.gather(1, local[:, None])[:, 0], chosen)
            masses_MC = torch.exp(logits_MC - new_highest[:, None])
            total = total * decay + masses_MC.sum(1)
            weighted = weighted * decay + torch.linalg.vecdot(masses_MC, logits_MC)
            highest = new_highest
        normaliser = highest + total.log()
        ctx.save_for_backward(hidden_ME, weight_VE, targets_M, temperature_M, normaliser)
        ctx.dtype, ctx.chunk, ctx.bends = dtype, chunk, bends
        entropy = normaliser - weighted / total
        ctx.mark_non_differentiable(entropy)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - torch declares *grad_outputs
        ctx: Any,  # noqa: ANN401 - as above
        grad_M: torch.Tensor,
        _entropy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ME, weight_VE, targets_M, temperature_M, normaliser_M = ctx.saved_tensors
        hidden = hidden_ME.to(ctx.dtype)
        grad_hidden = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        needs_weight = ctx.needs_input_grad[1]
        grad_weight = torch.empty(weight_VE.shape, dtype=weight_VE.dtype, device=hidden.device) if needs_weight else None
        scaled_M1 = (grad_M / temperature_M)[:, None]
        rows = torch.arange(len(targets_M), device=hidden.device)
        for start, logits_MC in _logits(hidden, weight_VE, temperature_M, ctx.chunk, ctx.bends):
            stop = start + logits_MC.shape[1]
            grad_logits = torch.exp(logits_MC - normaliser_M[:, None]).mul_(-scaled_M1)
            inside = (targets_M >= start) & (targets_M < stop)
            grad_logits[rows[inside], targets_M[inside] - start] += scaled_M1[inside, 0]
            low = grad_logits.to(ctx.dtype)
            grad_hidden += low @ weight_VE[start:stop].to(ctx.dtype)
            if grad_weight is not None:
                grad_weight[start:stop] = low.t() @ hidden
        return grad_hidden.to(hidden_ME.dtype), grad_weight, None, None, None, None, None


def _logits(
    hidden_ME: torch.Tensor, weight_VE: torch.Tensor, temperature_M: torch.Tensor, chunk: int, bends: BendTensors | None
) -> Iterator[tuple[int, torch.Tensor]]:
    """Logits, bent and divided by the temperature, fp32, one chunk of the vocabulary at a time, with the chunk's first token id."""
    for start in range(0, weight_VE.shape[0], chunk):
        part_CE = weight_VE[start : start + chunk].to(hidden_ME.dtype)
        logits_MC = (hidden_ME @ part_CE.t()).float()
        if bends is not None:
            bends.bend(logits_MC, start=start)
        yield start, logits_MC / temperature_M[:, None]
