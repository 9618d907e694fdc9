import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics import shiryaev_roberts as sr
from pipelines.evaluation.statistics.units import Units
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units

WATCH = sr.Detector(process=betting.harm(margin=0.01, variance=0.24))


def test_recursion_by_hand() -> None:
    # every treated failure multiplies by 1.125 (test_betting); looks of one unit: SR 1.125, then 2.125 * 1.125 = 2.390625
    process = betting.harm(margin=0.0, variance=0.24, targets=(0.1,))
    detector = sr.Detector(process=process, units_per_look=1, run_length_units=1000)
    units = Units.observed(outcome=[0.0, 0.0], treated=True, probability=0.5, baseline=0.6)
    state = sr.advance(detector, sr.start(detector), units)
    assert math.exp(state.log_statistic[0]) == pytest.approx(2.390625)


def test_a_look_is_used_only_when_full() -> None:
    state = sr.advance(WATCH, sr.start(WATCH), drawn_units(effect=0.0, n=199, seed=1))
    assert state.open_units == 199
    assert state.log_statistic[0] == -math.inf


@given(seed=st.integers(0, 100), cut=st.integers(0, 700))
@settings(max_examples=30)
def test_a_stream_cut_anywhere_gives_the_same_state_as_the_batch(seed: int, cut: int) -> None:
    units = drawn_units(effect=-0.05, n=700, seed=seed)
    whole = sr.advance(WATCH, sr.start(WATCH), units)
    parts = sr.start(WATCH)
    for part in (units.between(0, cut), units.between(cut, 700)):
        parts = sr.advance(WATCH, parts, part)
    assert parts.log_statistic == pytest.approx(whole.log_statistic, abs=1e-12)
    assert (parts.open_units, parts.units, parts.alarmed_at) == (whole.open_units, whole.units, whole.alarmed_at)


def test_good_early_evidence_does_not_mask_a_later_fall() -> None:
    good, bad = drawn_units(effect=0.05, n=40_000, seed=1), drawn_units(effect=-0.10, n=10_000, seed=2)
    state = sr.advance(WATCH, sr.advance(WATCH, sr.start(WATCH), good), bad)
    assert state.alarmed_at is not None
    assert 40_000 < state.alarmed_at < 44_000
    plain = betting.advance(WATCH.process, betting.start(WATCH.process), good)
    plain = betting.advance(WATCH.process, plain, bad.first(4000))
    assert betting.log_e(WATCH.process, plain) < 0.0  # the plain e-process is still in debt


def test_a_ten_point_fall_is_found_with_a_ten_percent_holdback() -> None:
    """The previous champion keeps 10 %, so the new one is the canary at a share of 90 %. Sheet S10: 5,000 units."""
    delays: list[int] = []
    for seed in range(60):
        state = sr.advance(WATCH, sr.start(WATCH), drawn_units(effect=-0.1, n=20_000, seed=seed, share=0.9))
        assert state.alarmed_at is not None
        delays.append(state.alarmed_at)
    assert np.median(delays) == pytest.approx(5000, rel=0.25)


def test_health_is_not_called_a_fall() -> None:
    alarms = [sr.advance(WATCH, sr.start(WATCH), drawn_units(effect=0.0, n=20_000, seed=s, share=0.9)).alarmed_at for s in range(100)]
    assert sum(a is not None for a in alarms) <= 7  # run length 1e6: 2 expected, 7 at three standard errors
