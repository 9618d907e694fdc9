"""Several observations of one kind on one turn become one value."""

import statistics
from collections.abc import Sequence

from app.domain.learning.rewards import Aggregation


def aggregate(values: Sequence[float], how: Aggregation) -> float:
    """`values` in the order in which they occurred, at least one."""
    match how:
        case Aggregation.EARLIEST:
            return values[0]
        case Aggregation.LATEST:
            return values[-1]
        case Aggregation.AVERAGE:
            return statistics.fmean(values)
        case Aggregation.MEDIAN:
            return statistics.median(values)
        case Aggregation.SUM:
            return sum(values)
        case Aggregation.MIN:
            return min(values)
        case Aggregation.MAX:
            return max(values)
