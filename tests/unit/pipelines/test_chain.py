"""Slots train on while a canary of days runs: each continues from the newest candidate, as far as labels are fresh enough."""

import pytest

from app.domain.errors import BadConfig
from app.domain.release.releases import Release, ReleaseState
from pipelines.chain import ahead_of
from pipelines.config import loop_config
from tests.fakes.clock import FrozenClock

S = ReleaseState
PARENTS = {"v2": "v1", "v3": "v2", "v4": "v3", "v5": "v4", "other": "v0", "v0": None, "v1": "v0"}


def release(digest: str, state: ReleaseState) -> Release:
    now = FrozenClock().now
    return Release(
        id=digest, policy="p", digest=digest, version_name=digest, state=state, generation=1, stage=None, champion_digest="v1",
        champion_generation=1, evidence_digest=None, reason=None, created_at=now, changed_at=now,
    )  # fmt: skip


def ahead(*newest_first: Release, chain: int = 2) -> tuple[str | None, int]:
    return ahead_of("v1", list(newest_first), PARENTS.__getitem__, chain=chain)


def test_without_a_candidate_the_champion_is_continued_from() -> None:
    assert ahead() == (None, 0)
    assert ahead(release("v2", S.REJECTED), release("v2", S.READY)) == (None, 0)


def test_the_newest_candidate_is_continued_from_over_those_that_made_room() -> None:
    assert ahead(release("v2", S.CANARY)) == ("v2", 1)
    queue = (release("v4", S.QUEUED), release("v3", S.SUPERSEDED_BY_NEWER), release("v2", S.CANARY))
    assert ahead(*queue) == ("v4", 3), "three are ahead where two may be: the slot waits"
    assert ahead(*queue[1:]) == ("v2", 1)


def test_what_comes_from_elsewhere_is_not_continued_from() -> None:
    assert ahead(release("other", S.QUEUED)) == (None, 0)
    assert ahead(release("v5", S.QUEUED)) == (None, 0), "four updates away: nobody asks further back than may be ahead"


def test_a_candidate_is_continued_from_within_the_chain_and_one_more_update() -> None:
    assert ahead(release("v3", S.JUDGING), chain=1) == ("v3", 2)
    assert ahead(release("v4", S.QUEUED), chain=1) == (None, 0)
    assert ahead(release("v2", S.QUEUED), chain=0) == ("v2", 1)
    assert ahead(release("v5", S.QUEUED), release("v2", S.CANARY)) == ("v2", 1), "the next one is asked"


def test_a_chain_longer_than_labels_are_fresh_is_refused() -> None:
    assert loop_config({"schedule": {"chain": 2}}).schedule.chain == 2
    with pytest.raises(BadConfig, match="staleness"):
        loop_config({"schedule": {"chain": 3}})
