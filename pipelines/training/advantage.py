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


def penalty(kl: float, *, target: float, least: float, most: float) -> float:
    """β for a champion that is `kl` nats per token from the anchor, so that the line of versions settles around `target`:

        β = least · (most / least)^x     x = KL/target − 1/2, cut to [0, 1]

    It stays at `least` up to half the target and grows as a power up to `most` at one and a half of it. A controller that multiplies β
    while KL is too high (Ziegler et al. 2019, arXiv 1909.08593, 2.2) sums up errors of what is itself a sum of steps, and swings: over 60
    cycles of the toy it took the reward from 0.64 back to 0.42 and up again. This one has no memory. β = 0 stays 0: nobody wanted one.
    """
    if least == 0:
        return 0.0
    return least * (max(most, least) / least) ** min(max(kl / target - 0.5, 0.0), 1.0)
