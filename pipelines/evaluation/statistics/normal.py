"""The normal distribution, from the standard library, so that the gates need nothing but numpy."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from pipelines.evaluation.statistics.units import FloatArray

_STANDARD = NormalDist()


def quantile(probability: float) -> float:
    """z with P(Z <= z) = probability."""
    return _STANDARD.inv_cdf(probability)


def below(z: float) -> float:
    """P(Z <= z)."""
    return _STANDARD.cdf(z)


def above(z: FloatArray) -> FloatArray:
    """P(Z > z), accurate in the far tail. [...] -> [...]"""
    return np.array([0.5 * math.erfc(x / math.sqrt(2.0)) for x in z.ravel().tolist()]).reshape(z.shape)


def density(z: FloatArray) -> FloatArray:
    """Standard normal density. [...] -> [...]"""
    return np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
