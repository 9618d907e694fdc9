import math
from datetime import timedelta

import numpy as np
import pytest

from pipelines.evaluation.statistics import betting, non_inferiority, power
from pipelines.evaluation.statistics.non_inferiority import NonInferiorityPlan
from pipelines.evaluation.statistics.power import Accepted, Refused, Requirement, Stage
from tests.unit.pipelines.evaluation.statistics.draws import drawn_units


@pytest.mark.parametrize(("share", "effect", "units"), [(0.5, 0.10, 980), (0.25, 0.10, 1300), (0.05, 0.10, 5200), (0.5, 0.05, 3920)])
def test_time_to_detect_matches_the_sheet(share: float, effect: float, units: float) -> None:
    assert power.time_to_detect(effect=effect, variance=0.24, share=share) == pytest.approx(units, rel=0.02)


@pytest.mark.parametrize(("margin", "units"), [(0.01, 77_000), (0.015, 34_000), (0.02, 19_300), (0.03, 8600), (0.05, 3100)])
def test_sample_size_matches_the_sheet(margin: float, units: float) -> None:
    assert power.sample_size(margin=margin, variance=0.24, share=0.5) == pytest.approx(units, rel=0.02)


def test_power_of_the_declared_sample_is_eighty_percent() -> None:
    n = power.sample_size(margin=0.02, variance=0.24, share=0.5)
    assert power.power_of(margin=0.02, variance=0.24, information=n / 4) == pytest.approx(0.80, abs=1e-3)
    assert power.power_of(margin=0.02, variance=0.24, information=0.0) == pytest.approx(0.05)


def test_attainable_margin_reaches_exactly_the_minimum_power() -> None:
    margin = power.attainable_margin(variance=0.24, information=2000.0)
    assert power.power_of(margin=margin, variance=0.24, information=2000.0) == pytest.approx(power.MINIMUM_POWER)
    assert power.attainable_margin(variance=0.24, information=0.0) == math.inf


def test_the_ramp_leaves_the_rest_of_the_window_to_the_last_stage() -> None:
    stages = power.ramp(shares=[0.05, 0.25, 0.5], units_per_hour=6000, window=timedelta(hours=2), dwell=timedelta(minutes=10))
    assert [(s.share, s.units) for s in stages] == [(0.05, 1000), (0.25, 1000), (0.5, 10_000)]


def requirement(margin: float, explained: float = 0.0) -> Requirement:
    return Requirement(metric="task_success", margin=margin, variance=0.24, explained=explained)


def test_enough_traffic_is_accepted_with_its_declared_end() -> None:
    plan = power.plan_canary([Stage(share=0.5, units=40_000)], [requirement(0.02)])
    assert isinstance(plan, Accepted)
    assert plan.n_max["task_success"] == power.sample_size(margin=0.02, variance=0.24, share=0.5)
    assert plan.power["task_success"] > 0.9


def test_too_little_traffic_is_refused_and_every_alternative_would_be_accepted() -> None:
    stages = [Stage(share=0.5, units=4000)]
    refused = power.plan_canary(stages, [requirement(0.10), Requirement(metric="gold", margin=0.02, variance=0.24)])
    assert isinstance(refused, Refused)
    assert refused.metric == "gold"
    assert refused.power < 0.6
    assert isinstance(power.plan_canary(stages, [requirement(refused.attainable_margin * 1.001)]), Accepted)
    longer = [Stage(share=0.5, units=4000 * refused.window_factor * 1.001)]
    assert isinstance(power.plan_canary(longer, [requirement(0.02)]), Accepted)
    assert refused.explained_needed is not None
    assert isinstance(power.plan_canary(stages, [requirement(0.02, refused.explained_needed + 0.001)]), Accepted)
    for word in ("gold", "margin", "window", "fewer metrics"):
        assert word in refused.message


def test_no_traffic_is_refused() -> None:
    refused = power.plan_canary([Stage(share=0.5, units=0)], [requirement(0.02)])
    assert isinstance(refused, Refused)
    assert refused.explained_needed is None


def test_a_canary_without_a_required_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="gold metric"):
        power.plan_canary([Stage(share=0.5, units=1000)], [])


def test_the_promised_power_is_kept() -> None:
    """Simulated: at the declared N_max a harmless candidate is promoted in about 80 % of canaries."""
    n = power.sample_size(margin=0.05, variance=0.24, share=0.5)
    plan = NonInferiorityPlan(margin=0.05, variance=0.24, n_max=n)
    promoted = [non_inferiority.judge(plan, drawn_units(effect=0.0, n=n, seed=s)).rejected for s in range(400)]
    assert np.mean(promoted) >= 0.72


def test_the_promised_delay_is_kept() -> None:
    process, needed = betting.harm(margin=0.0, variance=0.24), betting.evidence_needed(0.025)
    found = [int(np.argmax(betting.log_e_path(process, drawn_units(effect=-0.1, n=6000, seed=s)) >= needed)) for s in range(200)]
    assert np.median(found) <= power.time_to_detect(effect=0.1, variance=0.24, share=0.5)


@pytest.mark.parametrize("promised", [0.5, 0.75, 0.9])
def test_a_harm_is_found_with_the_power_that_its_number_of_units_was_worked_out_for(promised: float) -> None:
    units = math.ceil(power.time_to_detect(effect=0.1, variance=0.24, share=0.5, alpha=0.001, power=promised))
    process, needed = betting.harm(margin=0.0, variance=0.24), betting.evidence_needed(0.001)
    ended = [float(betting.log_e_path(process, drawn_units(effect=-0.1, n=units, seed=s))[-1]) for s in range(400)]
    found = float(np.mean(np.array(ended) >= needed))
    assert promised - 0.075 <= found <= promised + 0.15  # three standard errors below; more, for another target may pay as well


def test_what_is_detected_by_hand() -> None:
    # L = ln 40 + ln 4 = 5.0752; 2 * 5.0752 * .24/(.25 * .01) = 974.43 units; at a power of .8 z = .8416: (z + sqrt(z^2 + 2 L))^2/2
    assert power.time_to_detect(effect=0.1, variance=0.24, share=0.5) == pytest.approx(974.433, abs=0.01)
    growth = (0.841621 + math.sqrt(0.841621**2 + 10.150348)) ** 2 / 2
    assert power.time_to_detect(effect=0.1, variance=0.24, share=0.5, power=0.8) == pytest.approx(192 * growth, abs=0.01)
    one = power.time_to_detect(effect=0.1, variance=0.24, share=0.5, alpha=math.exp(-5.0), targets=1)
    assert one == pytest.approx(960.0), "2 * 5 * .24/.0025"


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_what_is_detectable_is_what_so_many_units_detect(share: float) -> None:
    for effect in (0.02, 0.1):
        units = power.time_to_detect(effect=effect, variance=0.24, share=share)
        assert power.detectable(units=units, variance=0.24, share=share) == pytest.approx(effect)
        units = power.time_to_detect(effect=effect, variance=0.24, share=share, alpha=0.01, targets=7)
        assert power.detectable(units=units, variance=0.24, share=share, alpha=0.01, targets=7) == pytest.approx(effect)
    assert power.detectable(units=0.0, variance=0.24, share=share) == math.inf
    assert power.detectable(units=0.5, variance=0.24, share=share) < math.inf


def test_a_window_that_ends_in_the_ramp_leaves_nothing_to_the_stages_after_it() -> None:
    stages = power.ramp(shares=[0.05, 0.25, 0.5], units_per_hour=6000, window=timedelta(minutes=15), dwell=timedelta(minutes=10))
    assert [s.share for s in stages] == [0.05, 0.25, 0.5]
    assert [s.units for s in stages] == pytest.approx([1000, 500, 0])
    assert [s.information for s in stages] == pytest.approx([47.5, 93.75, 0.0])


def test_the_declared_end_is_what_the_window_holds_where_that_is_less() -> None:
    # 19,290 units give 80 % at a margin of 2 pp, 11,242 give 60 %
    assert power.sample_size(margin=0.02, variance=0.24, share=0.5) == 19_290
    for units, declared in ((15_000.7, 15_000), (30_000.0, 19_290), (11_243.0, 11_243)):
        plan = power.plan_canary([Stage(share=0.5, units=units)], [requirement(0.02)])
        assert isinstance(plan, Accepted)
        assert (plan.n_max, plan.share) == ({"task_success": declared}, 0.5)
    assert isinstance(power.plan_canary([Stage(share=0.5, units=11_241.0)], [requirement(0.02)]), Refused)
    exactly = power.power_of(margin=0.02, variance=0.24, information=2000.0)
    for minimum, kind in ((exactly, Accepted), (exactly + 1e-9, Refused)):
        assert isinstance(power.plan_canary([Stage(share=0.5, units=8000.0)], [requirement(0.02)], minimum=minimum), kind)


def test_a_metric_that_half_of_the_units_enter_needs_twice_as_many_and_an_explained_one_fewer() -> None:
    halved = Requirement(metric="m", margin=0.02, variance=0.24, coverage=0.5)
    plan = power.plan_canary([Stage(share=0.5, units=40_000)], [halved])
    alone = power.plan_canary([Stage(share=0.5, units=20_000)], [requirement(0.02)])
    assert isinstance(plan, Accepted)
    assert isinstance(alone, Accepted)
    assert plan.power["m"] == pytest.approx(alone.power["task_success"])
    explained = power.plan_canary([Stage(share=0.5, units=10_000)], [requirement(0.02, 0.5)])
    assert isinstance(explained, Accepted)
    assert explained.power["task_success"] == pytest.approx(alone.power["task_success"])


def test_a_refusal_by_hand() -> None:
    # needed: 11,241.878/4 = 2,810.47 of information at 2 pp; 2,000 units at 10 % are worth 180; the other stage is worth 250
    stages = [Stage(share=0.1, units=2000), Stage(share=0.5, units=1000)]
    refused = power.plan_canary(stages, [requirement(0.02, 0.1)])
    assert isinstance(refused, Refused)
    assert refused.window_factor == pytest.approx(0.9 * 2810.469 / 430.0, rel=1e-5)
    assert refused.explained_needed == pytest.approx(1.0 - 430.0 / 2810.469, rel=1e-5)
    assert refused.attainable_margin == pytest.approx(0.02 * math.sqrt(0.9 * 2810.469 / 430.0), rel=1e-5)
    assert "variance reduction with R^2 >= 0.85" in refused.message
    little = power.plan_canary([Stage(share=0.5, units=1120)], [requirement(0.02)])
    assert isinstance(little, Refused)
    assert little.explained_needed is None, "a tenth of what is needed: no history explains so much"
    nothing = power.plan_canary([Stage(share=0.5, units=0)], [requirement(0.02)])
    assert isinstance(nothing, Refused)
    assert (nothing.window_factor, nothing.attainable_margin) == (math.inf, math.inf)
