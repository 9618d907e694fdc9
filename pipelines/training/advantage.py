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
