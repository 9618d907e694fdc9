import numpy as np
import pytest

from pipelines.evaluation.statistics import betting
from pipelines.evaluation.statistics.confidence import Interval
from pipelines.evaluation.statistics.proxy_gold import Lift, gap_alarm, gap_process, gap_units
from pipelines.evaluation.statistics.units import effect


def interval(low: float, high: float) -> Interval:
    return Interval(low=low, high=high, alpha=0.05, units=1000)


HACKED = Lift(version="b", proxy=interval(0.04, 0.08), gold=interval(-0.02, 0.02))
HONEST = Lift(version="a", proxy=interval(0.04, 0.08), gold=interval(0.01, 0.07))
UNSURE = Lift(version="c", proxy=interval(-0.01, 0.08), gold=interval(-0.02, 0.01))


@pytest.mark.parametrize(
    ("history", "alarm"),
    [
        ([HACKED, HACKED], True),
        ([HONEST, HACKED], False),
        ([HACKED, HONEST], False),
        ([HACKED, UNSURE], False),
        ([HACKED], False),
        ([HONEST, HACKED, HACKED], True),
    ],
)
def test_two_versions_running_raise_the_alarm(history: list[Lift], alarm: bool) -> None:
    assert gap_alarm(history) is alarm


def test_the_effect_of_gap_units_is_half_of_the_gap() -> None:
    # treated: proxy 1, gold 0 -> 1; control: proxy 0, gold 0 -> 0.5. Baseline 0 -> m 0.5: Z = 0.5/0.5 = 1 and 0
    units = gap_units(proxy=np.array([1.0, 0.0]), gold=np.zeros(2), treated=[1, 0], probability=0.5, baseline=0.0)
    assert effect(units).tolist() == [1.0, 0.0]


def test_sycophancy_is_caught_while_an_honest_lift_is_not() -> None:
    """Thumbs rise by 10 points; the audited quality rises as much in the honest version and not at all in the other."""
    process, needed = gap_process(margin=0.0, variance=0.48), betting.evidence_needed(0.01)
    caught = {"honest": 0, "hacked": 0}
    for seed in range(40):
        rng = np.random.default_rng(seed)
        treated = rng.random(6000) < 0.5
        proxy = (rng.random(6000) < 0.6 + 0.1 * treated).astype(float)
        for name, lift in (("honest", 0.1), ("hacked", 0.0)):
            gold = (rng.random(6000) < 0.6 + lift * treated).astype(float)
            units = gap_units(proxy=proxy, gold=gold, treated=treated, probability=0.5, baseline=0.0)
            caught[name] += bool(betting.log_e_path(process, units).max() >= needed)
    assert caught["hacked"] >= 36
    assert caught["honest"] <= 3
