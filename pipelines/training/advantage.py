"""A_t = r − b − β · Σ_{s≥t} (log π_old − log π_ref)_s: reward above expectation, less what the rest of the turn drifts from the anchor.

The k1 estimate of KL(π ‖ anchor) sits in the advantage, detached. As a differentiated loss term it has zero expected gradient
(E[∇log π] = 0), and without the sum over the rest of the turn it is biased: a token also answers for the divergence it leads to
(facts/rl.md 4.4). π_old is the policy that sampled, so its log-probabilities are the logged ones.
"""

from collections.abc import Sequence


def advantages(
    *, reward: float, baseline: float, behaviour: Sequence[float], anchor: Sequence[float] | None, beta: float
) -> tuple[float, ...]:
    """One advantage per token, in reward units; `behaviour` and `anchor` are natural log-probabilities of the same tokens."""
    above = reward - baseline
    if anchor is None or beta == 0:
        return (above,) * len(behaviour)
    found: list[float] = []
    to_go = 0.0
    for old, reference in zip(reversed(behaviour), reversed(anchor), strict=True):
        to_go += old - reference
        found.append(above - beta * to_go)
    return tuple(reversed(found))


def next_beta(beta: float, *, kl: float, target: float, least: float, most: float) -> float:
    """β of the next update, steered so that the divergence from the anchor settles at `target` (nats per token): β·2^e with
    e = KL/target − 1 cut to [−1, 1], the proportional controller of Ziegler et al. 2019 (arXiv 1909.08593, 2.2) with a gain for one
    update per five hours instead of one per batch. β = 0 stays 0: then nobody wanted a penalty."""
    if beta == 0:
        return 0.0
    error = min(max(kl / target - 1.0, -1.0), 1.0)
    return min(max(beta * 2.0**error, least), most)
