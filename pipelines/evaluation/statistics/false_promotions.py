"""False-promotion rate across candidates, as a report and never as a gate (sheet 4.7).

e-LOND (Xu & Ramdas 2024, "Online multiple testing with e-values"): with levels alpha gamma_t (R_(t-1) + 1) the share of
false promotions among all that pass is at most alpha in expectation, whatever depends on what.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALPHA = 0.10


def e_lond(log_e: Sequence[float], *, alpha: float = ALPHA) -> list[bool]:
    """Which promotions, in order, still stand when their e-values are judged together; gamma_t = 6/(pi t)^2."""
    standing: list[bool] = []
    for t, value in enumerate(log_e, start=1):
        level = alpha * 6.0 / (math.pi * t) ** 2 * (sum(standing) + 1)
        standing.append(value >= -math.log(level))
    return standing
