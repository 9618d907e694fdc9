"""What a run says of itself, by hand."""

import math

import pytest

from pipelines.training.measurement import RATIO_EDGES, kl_from_sampler, kl_to_reference, ratio_histogram, terms_from_sampler


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
