"""Off-policy corrections: what the importance ratio ρ_t = π_θ(a_t) / π_behaviour(a_t) of each token may weigh. All detached.

    none     1                                          on-policy data, or its pretence
    tis      min(ρ, C)                                  truncated importance sampling (Espeholt et al. 2018; verl, slime: C = 2)
    icepop   ρ where low ≤ ρ ≤ C, else 0                IcePop (Ling team 2025; slime loss.py)
    cispo    clip(ρ, low, 1 + ε)                        CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4); low is normally off there
    seq_mis  ∏ρ of the turn where it is ≤ C and no ρ < 1e-4, else 0     masked sequence-level sampling (verl's rollout correction)
    opsm     min(ρ, C); 0 for a turn whose advantage is negative and whose mean log(π_behaviour/π_θ) > δ
                                                        off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556, section 3.1; slime)

The ratio of the first four is per token (first order): exact for one decision, and biased by the product of the earlier ratios for longer
completions. That of `seq_mis` is exact up to the mask, and its variance grows with the length. `opsm` leaves out what the policy has
moved away from already and is told to move away from further.
"""

import math

import torch

from app.domain.learning.training import LossSpec

VETO = 1e-4
"""A ratio so small says that the engine and the trainer did not see the same thing: `seq_mis` leaves its whole turn out."""


def token_weights(
    spec: LossSpec, logprobs: torch.Tensor, behaviour: torch.Tensor, *, advantages: torch.Tensor | None = None,
    turns: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Weights, detached, same shape as the two log-probability tensors; `turns` numbers the turn of each token, from 0 on, in order (all of
    one turn where it is not given). Only `opsm` looks at the advantages."""
    gap = logprobs.detach() - behaviour
    ratio = torch.exp(gap)
    if spec.correction in ("seq_mis", "opsm"):
        of = torch.zeros_like(gap, dtype=torch.long) if turns is None else turns
        if spec.correction == "seq_mis":
            return _masked_products(spec, gap, of)
        assert advantages is not None, "opsm asks whether a turn is praised or blamed"
        gone = _sums(-gap, of) > spec.delta * _sums(torch.ones_like(gap), of)
        return torch.where(gone & (_sums(advantages, of) < 0), 0.0, ratio.clamp(max=spec.clip_high))
    if spec.correction == "none":
        return torch.ones_like(ratio)
    if spec.correction == "tis":
        return ratio.clamp(max=spec.clip_high)
    if spec.correction == "icepop":
        return torch.where((ratio >= spec.clip_low) & (ratio <= spec.clip_high), ratio, 0.0)
    if spec.correction == "cispo":
        return ratio.clamp(spec.clip_low, spec.clip_high)
    raise ValueError(f"correction is {spec.correction!r}: give tis, icepop, cispo, seq_mis, opsm or none")


def _masked_products(spec: LossSpec, gap: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """∏ρ of each token's turn, or 0."""
    vetoed = _sums((gap < math.log(VETO)).to(gap.dtype), of) > 0
    whole = torch.exp(_sums(gap, of))
    return torch.where((whole <= spec.clip_high) & ~vetoed, whole, 0.0)


def _sums(values: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
    """The sum over each token's turn, at each token."""
    total = torch.zeros(int(of.max()) + 1, dtype=values.dtype, device=values.device).index_add_(0, of, values)
    return total[of]
