"""What a run says of itself, by hand."""

import math

from pipelines.training.measurement import RATIO_EDGES, ratio_histogram


def test_a_ratio_is_counted_between_the_bounds_it_lies_between() -> None:
    middles = [0.1, 0.3, 0.6, 0.85, 0.93, 0.97, 1.0, 1.03, 1.07, 1.2, 1.5, 3.0, 5.0]  # one in each bin, of which the outer two are open
    assert len(middles) == len(RATIO_EDGES) + 1
    assert ratio_histogram([math.log(ratio) for ratio in middles], [0.0] * 13) == [1] * 13
    assert ratio_histogram([-2.0, -2.0], [-2.0, -1.0]) == [0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]  # e^0 and e^-1 = 0.37
