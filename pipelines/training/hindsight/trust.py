"""How much each correction weighs: one person's corrections cannot steer a policy."""

from collections import defaultdict
from collections.abc import Sequence

from app.domain.learning.corrections import Correction

NOBODY = ""
"""All who are not named count as one person."""


def trusted(corrections: Sequence[Correction], *, max_share: float, newcomer: float) -> dict[str, float]:
    """Weight by inference id; empty where no weights keep everybody within their share.

    A person's corrections weigh 1 each (`newcomer` where they are new or nobody is named), and together no more than a cap c that is the
    same for all: the largest one at which nobody has more than `max_share` of the sum. With fewer than 1/`max_share` people there is none.
    """
    sure = any(c.author is not None and not c.newcomer for c in corrections)
    own = {c.inference_id: newcomer if sure and (c.newcomer or c.author is None) else 1.0 for c in corrections}
    totals: defaultdict[str, float] = defaultdict(float)
    for correction in corrections:
        totals[correction.author or NOBODY] += own[correction.inference_id]
    cap = _cap(sorted(totals.values()), max_share)
    if cap is None:
        return {}
    return {c.inference_id: own[c.inference_id] * min(1.0, cap / totals[c.author or NOBODY]) for c in corrections}


def _cap(totals: Sequence[float], share: float) -> float | None:
    """The largest c with c ≤ share · Σ min(total, c): the sum is concave in c, so it is found among the k that stay below it.

    With the k smallest below c and the rest at it, c = share · (their sum + (n − k) · c).
    """
    if len(totals) * share < 1.0 - 1e-9:
        return None
    if totals[-1] <= share * sum(totals) + 1e-12:
        return totals[-1]
    for kept in range(len(totals) - 1, -1, -1):
        at_cap = len(totals) - kept
        rest = 1.0 - share * at_cap
        if rest <= 1e-12:
            break
        cap = share * sum(totals[:kept]) / rest
        if kept == 0 or totals[kept - 1] <= cap + 1e-12:
            return cap if cap > 0.0 else None
    return totals[0]  # everybody weighs the same
