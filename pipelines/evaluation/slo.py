"""Absolute limits: canary and champion can degrade together, and a comparison would not see it (`facts/gates.md`, section 4.4)."""

import math

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.evidence import Evidence, SloCount

ALTERNATIVES = (1.5, 2.0, 4.0, 8.0)
"""Rates that the limit is held against, as multiples of it."""


def burnt(config: GatesConfig, evidence: Evidence) -> list[str]:
    """Limits that an arm exceeds for sure, each in a sentence, the treated arm's first."""
    found = [count for count in evidence.slos if log_e(count) >= -math.log(config.alpha_slo)]
    order = sorted(found, key=lambda count: count.arm != "treated")
    return [f"{c.source} of the {c.arm} arm: {c.bad} of {c.total} turns, the limit is {c.limit:.1%}" for c in order]


def both_arms_burn(config: GatesConfig, evidence: Evidence) -> bool:
    """The same limit is exceeded in both arms: not the candidate's doing."""
    arms = {(c.source, c.arm) for c in evidence.slos if log_e(c) >= -math.log(config.alpha_slo)}
    return any((source, "treated") in arms and (source, "control") in arms for source, _ in arms)


def log_e(count: SloCount) -> float:
    """log of the mean likelihood ratio of higher rates against the limit: an e-process under "rate ≤ limit", so peeking is free."""
    if not 0.0 < count.limit < 1.0:
        return 0.0
    rates = [rate for rate in (m * count.limit for m in ALTERNATIVES) if rate < 1.0] or [(1.0 + count.limit) / 2.0]
    logs = [
        count.bad * math.log(p / count.limit)
        + (count.total - count.bad) * math.log1p(-p)
        - (count.total - count.bad) * math.log1p(-count.limit)
        for p in rates
    ]
    top = max(logs)
    return top + math.log(math.fsum(math.exp(value - top) for value in logs) / len(logs))
