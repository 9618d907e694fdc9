"""The benches compute from counts per look; here the same canary goes unit by unit through production code."""

import dataclasses

import numpy as np
import pytest

from pipelines.evaluation.statistics import betting, group_sequential, shiryaev_roberts
from pipelines.evaluation.statistics.betting import Tail
from pipelines.evaluation.statistics.group_sequential import GroupSequentialPlan
from pipelines.evaluation.statistics.units import Units
from tests.bench.gate_cells.canaries import NEVER, Canaries, drawn, group_sequential_stops, log_capital, log_growth
from tests.bench.gate_cells.release import shiryaev_roberts_stops


def ramped(effect: float, seed: int) -> tuple[Canaries, Units]:
    """One canary over two share epochs, as increments per unit and as units."""
    share = np.repeat([0.25, 0.5], [1000, 3000])
    one = drawn(np.random.default_rng(seed), repetitions=1, rate=0.6, effect=effect, share=share, looks=4000, units_per_look=1)
    tg, tb, cg, _ = (cell[0] for cell in one.cells)
    units = Units.observed(outcome=tg + cg, treated=tg + tb > 0, probability=share, baseline=0.6, stratum=(share > 0.3).astype(int))
    return one, units


@pytest.mark.parametrize("seed", range(5))
def test_log_e_agrees(seed: int) -> None:
    one, units = ramped(-0.05, seed)
    process = betting.harm(margin=0.0, variance=0.24)
    by_counts = betting.log_mixture(process, log_capital(process, one, 0.6))[0]
    assert by_counts == pytest.approx(betting.log_e_path(process, units))


@pytest.mark.parametrize("seed", range(5))
def test_group_sequential_looks_agree(seed: int) -> None:
    one, units = ramped(-0.05, seed)
    plan = GroupSequentialPlan(n_max=4000, alpha=0.025)
    stop = group_sequential.evaluate(plan, units, threshold=0.0, tail=Tail.BELOW).rejected_at
    assert group_sequential_stops(plan, one, threshold=0.0, tail=Tail.BELOW)[0] == (NEVER if stop is None else stop)


@pytest.mark.parametrize("seed", range(3))
def test_the_detector_agrees(seed: int) -> None:
    one, units = ramped(-0.2, seed)
    process = betting.harm(margin=0.01, variance=0.24)
    merged = dataclasses.replace(one.every(200), share=one.share[::200])
    stop = shiryaev_roberts_stops(process, log_growth(process, merged, 0.6))[0]
    detector = shiryaev_roberts.Detector(process=process)
    assert shiryaev_roberts.advance(detector, shiryaev_roberts.start(detector), units).alarmed_at == stop
