"""Off-policy corrections: what the importance ratio ρ_t = π_θ(a_t) / π_behaviour(a_t) of each token may weigh. All detached.

    none     1                                          on-policy data, or its pretence
    tis      min(ρ, C)                                  truncated importance sampling (Espeholt et al. 2018; verl, slime: C = 2)
    icepop   ρ where low ≤ ρ ≤ C, else 0                IcePop (Ling team 2025; slime loss.py)
    cispo    clip(ρ, low, 1 + ε)                        CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4); low is normally off there

The ratio is per token (first order): exact for one decision, and biased by the product of the earlier ratios for longer completions.
"""

import torch

from app.domain.training import LossSpec


def token_weights(spec: LossSpec, logprobs: torch.Tensor, behaviour: torch.Tensor) -> torch.Tensor:
    """Weights, detached, same shape as the two log-probability tensors."""
    ratio = torch.exp(logprobs.detach() - behaviour)
    if spec.correction == "none":
        return torch.ones_like(ratio)
    if spec.correction == "tis":
        return ratio.clamp(max=spec.clip_high)
    if spec.correction == "icepop":
        return torch.where((ratio >= spec.clip_low) & (ratio <= spec.clip_high), ratio, 0.0)
    if spec.correction == "cispo":
        return ratio.clamp(spec.clip_low, spec.clip_high)
    raise ValueError(f"correction is {spec.correction!r}: give tis, icepop, cispo or none")
