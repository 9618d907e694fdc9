"""Alpha-investing: many candidates are held against one suite, and few of those that pass may be worse (Foster and Stine 2008).

Every test of a candidate spends from a budget of false passes, and every pass earns the next ones their level back. A month that begins
with wealth W0 passes at most W0 candidates that are worse by the margin for nothing, and alpha of those that pass besides:

    E[false passes] <= alpha E[passes] + W0
"""

from collections.abc import Iterable

ALPHA = 0.05
BUDGET = 0.5
"""W0: half a false pass in a month without a single good candidate. At the fixed level 0.05, 144 bad candidates would pass 7 times."""


def level_now(tested: Iterable[tuple[float, bool]], *, alpha: float = ALPHA, budget: float = BUDGET) -> float:
    """The level of the next test, at most `alpha`; `tested`: (level, passed) of those before, oldest first.

    A test at level a costs a/(1 - a) where it does not pass and earns alpha where it does. What is spent on one test is in proportion to
    the wealth that is left, so that a run of bad candidates makes the suite stricter by degrees and never shuts it.
    """
    wealth = budget
    for level, passed in tested:
        wealth += alpha if passed else -level / (1.0 - level)
    spent = alpha / (1.0 - alpha) * min(1.0, max(0.0, wealth) / budget)
    return spent / (1.0 + spent)
