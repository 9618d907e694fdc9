"""Looks at units that still grow: a person's turns keep coming, and their arm was drawn once.

A bet after every turn would not be fair: the arm is known by then, and people differ for good. So at each look the product over all people
is taken afresh, with what is known of each: by itself it is an e-value, its mean at most one, whatever people carry from turn to turn, for
one draw per person is all the chance that it uses. The looks' times are fixed before anything is seen. The sum of the e-values, each with
its share, only grows, and its mean is at most one, too: P(sum ever reaches 1/alpha) <= alpha by Markov's inequality, peeking or not.

    E_k = mean over targets of prod_i (1 + lambda (t - Z_i(k))),   S_k = sum of E_j / LOOKS over looks j <= k
"""

from __future__ import annotations

import math

import numpy as np

from pipelines.evaluation.statistics.betting import EProcess, log_e_path
from pipelines.evaluation.statistics.units import BoolArray, FloatArray, Units, with_usual

LOOKS = 64
FIRST_S = 30.0
GROWTH = 1.2
"""Each look comes a fifth later than the one before: 64 of them from half a minute to 34 days."""


def look_at_s(number: int) -> float:
    """Seconds after the first turn at which look `number` (0 ... 63) is due; never, beyond the last one."""
    return FIRST_S * GROWTH**number if number < LOOKS else math.inf


def log_e_value(
    process: EProcess, *, outcome: FloatArray, treated: BoolArray, probability: FloatArray, usual: FloatArray
) -> float:  # fmt: skip
    """log E of one look at all units as they are now, in the order in which they began; `usual` was known before. [N] each"""
    if len(outcome) == 0:
        return 0.0
    units = Units.observed(outcome=outcome, treated=treated, probability=probability, baseline=with_usual(outcome, usual))
    return float(log_e_path(process, units)[-1])


def log_sums(log_e: FloatArray) -> FloatArray:
    """log S after each look. [K] -> [K]"""
    return np.logaddexp.accumulate(log_e) - math.log(LOOKS) if len(log_e) else log_e
