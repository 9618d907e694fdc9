"""Start-up check of the sign convention with a planted harm (sheet I7; growthbook#6020 swapped the arms)."""

from __future__ import annotations

import numpy as np

from pipelines.evaluation.statistics import betting, group_sequential
from pipelines.evaluation.statistics.betting import Tail
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan
from pipelines.evaluation.statistics.units import Units

_N = 4000


def signs_are_right() -> bool:
    """True if a canary that loses 30 pp is called harm by both halves and one that gains 30 pp by neither."""
    planted, mirrored = _planted(canary=0.4, champion=0.7), _planted(canary=0.7, champion=0.4)
    return all(_found(planted)) and not any(_found(mirrored))


def _planted(*, canary: float, champion: float) -> Units:
    """Deterministic units: arms alternate, outcomes are spread evenly at each arm's rate."""
    treated = np.arange(_N) % 2 == 0
    turn = np.arange(_N) // 2
    rate = np.where(treated, canary, champion)
    outcome = np.floor((turn + 1) * rate + 1e-9) - np.floor(turn * rate + 1e-9)
    return Units.observed(outcome=outcome, treated=treated, probability=0.5, baseline=champion)


def _found(units: Units) -> tuple[bool, bool]:
    process = betting.harm(margin=0.0, variance=0.24)
    by_betting = float(betting.log_e_path(process, units).max()) >= betting.evidence_needed(0.025)
    plan = GroupSequentialPlan(n_max=_N, alpha=0.025)
    return by_betting, group_sequential.evaluate(plan, units, threshold=0.0, tail=Tail.BELOW).rejected
