"""Predictable baselines m_t: computed for each unit only from units that closed before it (sheet 3.1)."""

from __future__ import annotations

import numpy as np

from pipelines.evaluation.statistics.units import FloatArray


def running_mean(outcome: FloatArray, *, prior: float, strength: float = 100.0) -> FloatArray:
    """Mean of all earlier outcomes, started from `prior` worth `strength` units. [N] -> [N], in [0, 1]"""
    return (prior * strength + _before(outcome)) / (strength + np.arange(len(outcome)))


def with_usual(outcome: FloatArray, usual: FloatArray) -> FloatArray:
    """What is usual for each unit, moved by the mean of what earlier ones differed from theirs. [N], [N] -> [N], in [0, 1]"""
    return np.clip(usual + running_mean(outcome - usual, prior=0.0), 0.0, 1.0)


def _before(values: FloatArray) -> FloatArray:
    """Sum of the earlier entries only; cumsum - values would leak the entry itself through rounding."""
    return np.concatenate([[0.0], np.cumsum(values)[:-1]])[: len(values)]
