"""Units drawn at random for the tests of the gates' statistics."""

import numpy as np

from pipelines.evaluation.statistics.units import Units


def drawn_units(*, effect: float, n: int, seed: int, share: float = 0.5, rate: float = 0.6, baseline: float | None = None) -> Units:
    """n independent 0/1 outcomes; the champion succeeds at `rate`, the canary at `rate + effect`."""
    rng = np.random.default_rng(seed)
    treated = rng.random(n) < share
    outcome = (rng.random(n) < rate + effect * treated).astype(np.float64)
    return Units.observed(outcome=outcome, treated=treated, probability=share, baseline=rate if baseline is None else baseline)
