import math

import numpy as np

from pipelines.evaluation.statistics.false_promotions import e_lond


def test_levels_by_hand() -> None:
    # gamma_1 = 6/pi^2 = 0.6079: the first needs e >= 1/0.06079 = 16.45; the second 1/(0.1 * 0.15198 * 2) = 32.9
    assert e_lond([math.log(16.5), math.log(32.8)]) == [True, False]
    assert e_lond([math.log(16.4), math.log(65.9)]) == [False, True]


def test_false_promotions_among_all_stay_below_alpha() -> None:
    rng, shares = np.random.default_rng(1), list[float]()
    for _ in range(300):
        # every candidate at the margin: log e-values of a bet that wins nothing, N(-v/2, v)
        standing = e_lond(rng.normal(-4.0, math.sqrt(8.0), 40).tolist())
        shares.append(1.0 if any(standing) else 0.0)
    assert np.mean(shares) <= 0.10
