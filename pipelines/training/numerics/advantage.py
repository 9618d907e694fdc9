"""A_t = r − b − β · (K_t − b_t), K_t = Σ_{s≥t} (log π_old − log π_ref)_s: reward above expectation, less what the rest of the turn drifts
from the anchor above expectation.

The k1 estimate of KL(π ‖ anchor) sits in the advantage, detached. As a differentiated loss term it has zero expected gradient
(E[∇log π] = 0), and without the sum over the rest of the turn it is biased: a token also answers for the divergence it leads to
(facts/rl.md 4.4). π_old is the policy that sampled, so its log-probabilities are the logged ones.

b_t is what K_t is at the same place of other turns, on average: it depends on nothing that the turn's own tokens decide, so the gradient
stays what it is, and all tokens of a turn are not pushed down merely because every turn drifts. Without it the penalty of a policy
that has gone some way, the sum of many tokens, is louder than the reward, and its noise is a drift of its own.
"""

from collections.abc import Sequence


def advantages(*, reward: float, baseline: float, count: int, drift: Sequence[float] | None = None, beta: float = 0.0) -> tuple[float, ...]:
    """One advantage for each of `count` tokens, in reward units; `drift` is K_t − b_t in nats."""
    above = reward - baseline
    return (above,) * count if drift is None or beta == 0 else tuple(above - beta * further for further in drift)


def to_go(behaviour: Sequence[float], anchor: Sequence[float]) -> list[float]:
    """K_t from natural log-probabilities of the same tokens."""
    found: list[float] = []
    total = 0.0
    for old, reference in zip(reversed(behaviour), reversed(anchor), strict=True):
        total += old - reference
        found.append(total)
    return found[::-1]


def above_expectation(drifts: Sequence[Sequence[float] | None], units: Sequence[str]) -> list[list[float] | None]:
    """K_t − b_t of every turn that was scored under the anchor; turns of one unit (an episode) do not serve as each other's expectation.

    At place t a turn that had ended before has K_t = 0, as it has.
    """
    scored = [(unit, drift) for unit, drift in zip(units, drifts, strict=True) if drift is not None]
    longest = max((len(drift) for _, drift in scored), default=0)
    total = [0.0] * longest
    own: dict[str, list[float]] = {}
    turns: dict[str, int] = {}
    for unit, drift in scored:
        mine = own.setdefault(unit, [0.0] * longest)
        turns[unit] = turns.get(unit, 0) + 1
        for place, further in enumerate(drift):
            total[place] += further
            mine[place] += further

    def less(unit: str, drift: Sequence[float]) -> list[float]:
        others = len(scored) - turns[unit]
        return [further - (total[t] - own[unit][t]) / others if others else 0.0 for t, further in enumerate(drift)]

    return [less(unit, drift) if drift is not None else None for unit, drift in zip(units, drifts, strict=True)]


def penalty(kl: float, *, target: float, least: float, most: float) -> float:
    """β for a champion that is `kl` nats per token from the anchor, so that the line of versions settles around `target`:

        β = least · (most / least)^x     x = KL/target − 1/2, cut to [0, 1]

    It stays at `least` up to half the target and grows as a power up to `most` at one and a half of it. A controller that multiplies β
    while KL is too high (Ziegler et al. 2019, arXiv 1909.08593, 2.2) sums up errors of what is itself a sum of steps, and swings: over 60
    cycles of the toy it took the reward from 0.64 back to 0.42 and up again. This one sums up nothing, and is given where the champion is
    going, `kl_look_ahead` of its last updates further on, instead of where it is: that says too late that a climb was too fast, and the
    way back costs reward. (The derivative term of a controller; the update's own figure of how far it moved, on the same tokens, varies
    less than the difference of two measurements.) β = 0 stays 0: nobody wanted one.
    """
    if least == 0:
        return 0.0
    return least * (max(most, least) / least) ** min(max(kl / target - 0.5, 0.0), 1.0)
