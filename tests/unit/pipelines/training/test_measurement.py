"""What a run says of itself, by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest

from app.domain.errors import Held
from pipelines.training.config import GuardLimits, TrainingConfig
from pipelines.training.guards import Estimate
from pipelines.training.judgement import JudgedTurn, Judgement, compare, wish_for_renewal
from pipelines.training.measurement import (
    RATIO_EDGES,
    kl_from_sampler,
    kl_to_reference,
    ratio_histogram,
    terms_from_sampler,
    terms_to_reference,
)


def test_a_ratio_is_counted_between_the_bounds_it_lies_between() -> None:
    middles = [0.1, 0.3, 0.6, 0.85, 0.93, 0.97, 1.0, 1.03, 1.07, 1.2, 1.5, 3.0, 5.0]  # one in each bin, of which the outer two are open
    assert len(middles) == len(RATIO_EDGES) + 1
    assert ratio_histogram([math.log(ratio) for ratio in middles], [0.0] * 13) == [1] * 13
    assert ratio_histogram([-2.0, -2.0], [-2.0, -1.0]) == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]  # e^0 and e^-1 = 0.37


def test_divergence_from_the_sampler_by_hand() -> None:
    # twice as probable: 2 − 1 − ln 2; half: .5 − 1 + ln 2; the same: nothing
    gaps = [math.log(2.0), -math.log(2.0), 0.0]
    terms = terms_from_sampler([-1.0] * 3, [gap - 1.0 for gap in gaps])
    assert terms == pytest.approx([1.0 - math.log(2.0), math.log(2.0) - 0.5, 0.0])
    assert kl_from_sampler([-1.0] * 3, [gap - 1.0 for gap in gaps]) == pytest.approx(0.5 / 3)
    assert math.isnan(kl_from_sampler([], []))
    with pytest.raises(ValueError, match=r"shorter|longer"):
        kl_from_sampler([-1.0], [-1.0, -2.0])


def test_one_token_that_became_likely_counts_along_the_tangent_and_not_for_all() -> None:
    """At a ratio of e² the term is e² − 1 − 2; beyond it grows by e² − 1 per nat, where the exact one would be e⁵ − 6 at five."""
    far = terms_from_sampler([-6.0, -6.0], [-4.0, -1.0])
    assert far == pytest.approx([math.exp(2) - 3, math.exp(2) - 3 + 3 * (math.exp(2) - 1)])
    assert far[1] < math.exp(5) - 6


def test_divergence_to_the_reference_by_hand() -> None:
    # ratios to the sampler 2 and e⁴, the latter counted as the cap; times what the new one has above the reference
    sampler, new, reference = [-1.0, -5.0], [math.log(2.0) - 1.0, -1.0], [-1.0, -1.5]
    assert kl_to_reference(sampler, new, reference) == pytest.approx((2 * math.log(2.0) + 10 * 0.5) / 2)
    assert kl_to_reference(sampler, new, reference, cap=3.0) == pytest.approx((2 * math.log(2.0) + 3 * 0.5) / 2)


def test_a_gap_at_the_tail_counts_exactly_and_a_ratio_at_an_edge_is_above_it() -> None:
    assert terms_from_sampler([-2.0], [0.0]) == pytest.approx([math.exp(2) - 3])
    assert terms_from_sampler([-2.5], [0.0])[0] == pytest.approx(math.exp(2) - 3 + 0.5 * (math.exp(2) - 1))
    assert ratio_histogram([math.log(2.0)], [0.0]) == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]


def test_a_ratio_to_the_reference_counts_up_to_ten_and_none_overflows() -> None:
    assert terms_to_reference([math.log(0.1)], [0.0], [-1.0]) == pytest.approx([10.0])
    assert terms_to_reference([math.log(0.11)], [0.0], [-1.0]) == pytest.approx([1 / 0.11])
    assert terms_to_reference([-1000.0], [0.0], [-1.0]) == [10.0]
    assert terms_to_reference([-1000.0], [0.0], [-1.0], cap=1e30) == pytest.approx([math.exp(50.0)])


# --- what a judgement of a candidate allows ---------------------------------------------------------------------------------------

SOUND = Judgement(
    champion=Estimate(mean=0.1, error=0.0), anchor=Estimate(mean=0.5, error=0.0), anchor_before=Estimate(mean=0.4, error=0.0),
    entropy_before=1.0, entropy_after=1.0, drift=0.0,
)  # fmt: skip
LIMITS = GuardLimits(max_kl_champion=0.2, max_kl_anchor=1.0, anchor_alarm=0.75)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, None),
        ({"champion": Estimate(mean=0.2, error=0.0)}, None),
        ({"champion": Estimate(mean=0.8, error=0.0)}, 0.95 * 0.5),
        ({"entropy_after": 0.5}, None),
        ({"entropy_after": 0.49}, 0.5),
        ({"anchor": Estimate(mean=1.0, error=0.0)}, None),
        ({"anchor": Estimate(mean=1.6, error=0.0)}, 0.95 * 0.5),
        ({"anchor": Estimate(mean=1.6, error=0.0), "anchor_before": Estimate(mean=1.0, error=0.0)}, None),
        ({"anchor": Estimate(mean=1.6, error=0.0), "anchor_before": Estimate(mean=1.7, error=0.0)}, None),
        ({"anchor": Estimate(mean=1.6, error=0.0), "anchor_before": Estimate(mean=1.6, error=0.0)}, None),
    ],
)
def test_how_much_of_the_way_is_kept(changes: dict[str, Any], kept: float | None) -> None:
    assert replace(SOUND, **changes).kept(LIMITS) == (None if kept is None else pytest.approx(kept))


def test_who_is_as_far_from_the_anchor_as_its_parent_is_held_and_who_came_nearer_is_not() -> None:
    far = replace(SOUND, anchor=Estimate(mean=1.6, error=0.0), anchor_before=Estimate(mean=1.6, error=0.0))
    with pytest.raises(Held):
        far.check(LIMITS)
    replace(far, anchor=Estimate(mean=1.59, error=0.0)).check(LIMITS)
    with pytest.raises(Held):
        replace(SOUND, entropy_after=math.nan).kept(LIMITS)


def test_people_are_asked_to_renew_the_anchor_from_the_alarm_on() -> None:
    config = TrainingConfig(guards=LIMITS)
    asked = [
        wish_for_renewal(replace(SOUND, anchor=Estimate(mean=mean, error=0.0)), config, beta=0.02, policy="p") for mean in (0.7499, 0.75)
    ]
    assert asked[0] is None
    assert str(asked[1]).startswith("75% of the KL budget to the anchor is used (0.750, up to 0.750, of 1.0 nats per token; the penalty")
    assert replace(SOUND, anchor=Estimate(mean=0.5, error=0.0)).metrics(LIMITS)["anchor_budget_used"] == 0.5


def test_a_comparison_by_hand() -> None:
    turn = JudgedTurn(champion=[-1.0], anchor=[-2.0], candidate=[-0.5], entropy_before=[1.0, 3.0], entropy_after=[1.0])
    found = compare([turn], before=Estimate(mean=0.3, error=0.1))
    half = math.exp(0.5)
    assert found.champion.mean == pytest.approx(half - 1.5)
    # the ratio to the sampler is the root of e; the candidate is 1.5 above the anchor, the champion was 1
    assert found.anchor.mean == pytest.approx(0.3 + 1.5 * half - 1.0)
    assert (found.entropy_before, found.entropy_after, found.drift, found.anchor_before.mean) == (2.0, 1.0, 0.5, 0.3)
