"""Predictable baselines m_t: computed for each unit only from units that closed before it (sheet 3.1)."""

from __future__ import annotations

import numpy as np

from pipelines.evaluation.statistics.units import FloatArray


def running_mean(outcome: FloatArray, *, prior: float, strength: float = 100.0) -> FloatArray:
    """Mean of all earlier outcomes, started from `prior` worth `strength` units. [N] -> [N], in [0, 1]"""
    return (prior * strength + _before(outcome)) / (strength + np.arange(len(outcome)))


def running_regression(outcome: FloatArray, covariate: FloatArray, *, prior: float, strength: float = 100.0) -> FloatArray:
    """CUPED: ridge regression of earlier outcomes on earlier covariates, read at this unit's own covariate.

    Shrinks the variance of Z by 1 - R^2 (Deng et al. 2013) and stays exactly valid because each m_t is known before
    Y_t (sheet 3.1). `covariate` is pre-period behaviour of the unit, scaled to mean 0, variance 1. [N], [N] -> [N], in [0, 1]
    """
    residual = outcome - prior
    count = strength + np.arange(len(outcome))
    sx, sy = _before(covariate) / count, _before(residual) / count
    sxx, sxy = _before(covariate**2), _before(covariate * residual)
    slope = (sxy - count * sx * sy) / (strength + sxx - count * sx**2)
    return np.clip(prior + sy + slope * (covariate - sx), 0.0, 1.0)


def _before(values: FloatArray) -> FloatArray:
    """Sum of the earlier entries only; cumsum - values would leak the entry itself through rounding."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])[: len(values)]
