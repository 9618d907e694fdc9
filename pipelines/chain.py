"""Training on while a canary of days runs: each slot continues from the newest candidate, and the last one of them gets the next canary.

    champion v1 ◀── v2, in its canary ◀── v3 (made room for v4) ◀── v4, queued: what the next slot continues from

v4 holds what v3 and v2 learned. Is v2 promoted, v4 is compared with it; is v2 inconclusive, v4 is compared with v1, as one larger step.
Does v2 harm, or does a person reject it, what continues from it ends with it (`app.release.promotion.end_descendants`). The labels are the
champion's, so each candidate is one version further from whoever answered: at most `[batching] staleness` of them may be ahead.
"""

from collections.abc import Callable

from app.domain.release.releases import Release, ReleaseState

S = ReleaseState
AHEAD = frozenset({S.QUEUED, S.CANARY, S.JUDGING})
"""Where a candidate is one to continue from."""
Parent = Callable[[str], str | None]
"""The version that one continues from, by digest."""


def ahead_of(champion: str, releases: list[Release], parent: Parent, *, chain: int) -> tuple[str | None, int]:
    """(the candidate to continue from, how many updates it is ahead): (None, 0) where it is the champion.

    `releases`: newest first. One that does not continue from the champion within `chain` updates and one more is not one to continue from.
    """
    for release in releases:
        if release.state in AHEAD and (depth := _depth(release.digest, champion, parent, most=chain + 1)) is not None:
            return release.digest, depth
    return None, 0


def _depth(digest: str, champion: str, parent: Parent, *, most: int) -> int | None:
    """Updates between the champion and a version; None where it does not continue from it within so many."""
    found: str | None = digest
    for depth in range(1, most + 1):
        found = parent(found)
        if found is None:
            return None
        if found == champion:
            return depth
    return None
