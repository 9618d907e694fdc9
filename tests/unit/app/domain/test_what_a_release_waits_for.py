"""What a release waits for, said before anybody has to ask the log of the watch."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from app.domain.release.alarms import UNTIL, Alarm, AlarmKind
from app.domain.release.releases import IN_FLIGHT, Release, ReleaseState
from app.domain.views.story import story_of
from app.domain.views.waiting import AN_ENGINE, BY_ITSELF, Scene, waits_for

S = ReleaseState
AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
QUIET = Scene(others=(), alarms=(), frozen=None, yes=0, held=True, now=AT + timedelta(hours=1))


def release(state: ReleaseState, **changes: Any) -> Release:
    values: dict[str, Any] = {
        "id": "r2", "policy": "tab", "digest": "v2", "version_name": "tab-v2", "generation": 4, "stage": 0, "champion_digest": "v1",
        "champion_generation": 1, "evidence_digest": None, "reason": None, "created_at": AT, "changed_at": AT,
    }  # fmt: skip
    return Release(state=state, **{**values, **changes})


def incident(*, ended: datetime | None = None) -> Alarm:
    return Alarm(
        id="a", policy="tab", kind=AlarmKind.INCIDENT, release_id="r1", generation=1, reason="40 % fail on all versions", raised_at=AT,
        raised_by="system:watch", until=UNTIL[AlarmKind.INCIDENT], ended_at=ended, ended_by=None if ended is None else "system:watch",
    )  # fmt: skip


def waits(state: ReleaseState, scene: Scene = QUIET, **changes: Any) -> str:
    said = waits_for(release(state, **changes), scene)
    assert said is not None
    return said


@pytest.mark.parametrize("state", [S.CANARY, S.JUDGING])
def test_a_queued_one_waits_for_the_one_that_is_judged(state: ReleaseState) -> None:
    other = release(state, id="r1", version_name="tab-v9", created_at=AT - timedelta(hours=3), changed_at=AT - timedelta(hours=2))
    assert waits(S.QUEUED, replace(QUIET, others=[other], held=False)) == (
        f"the end of tab-v9, which is {state} since 2026-11-24 04:00 UTC: one at a time"
    )


def test_a_queued_one_waits_for_a_newer_one_and_not_for_an_older() -> None:
    newer = release(S.QUEUED, id="r3", version_name="tab-v3", created_at=AT + timedelta(minutes=1))
    older = release(S.QUEUED, id="r0", version_name="tab-v0", created_at=AT - timedelta(minutes=1))
    assert waits(S.QUEUED, replace(QUIET, others=[newer, older])) == "tab-v3, which is newer and goes first"
    assert waits(S.QUEUED, replace(QUIET, others=[older])) == BY_ITSELF


@pytest.mark.parametrize("state", [S.QUEUED, S.PROMOTING])
def test_without_an_engine_that_holds_it_it_waits_for_one(state: ReleaseState) -> None:
    assert waits(state, replace(QUIET, held=False)) == AN_ENGINE
    assert waits(state) == BY_ITSELF


@pytest.mark.parametrize("state", [S.QUEUED, S.CANARY, S.READY, S.APPROVED, S.PROMOTING])
def test_in_an_incident_it_waits_for_its_end(state: ReleaseState) -> None:
    open_ = replace(QUIET, alarms=[incident()])
    assert waits(state, open_).startswith("calm: an incident of tab is open (40 % fail on all versions): it ends when the champion keeps")
    ended = replace(QUIET, alarms=[incident(ended=AT + timedelta(minutes=1))])
    assert "incident" not in waits(state, ended)
    season = {"reentry_season_s": 86_400.0}
    assert "nothing moves forward until that hour has come again, at 2026-11-25 06:00 UTC" in waits(state, ended, config=season)


@pytest.mark.parametrize("state", [S.APPROVED, S.PROMOTING])
def test_what_was_approved_waits_for_two_people_where_promotions_are_frozen(state: ReleaseState) -> None:
    said = waits(state, replace(QUIET, frozen="two rollbacks within a day"))
    assert said == "people: promotions are frozen (two rollbacks within a day); two of them run `ratchet release unfreeze`"


def test_an_approved_one_is_promoted_at_the_next_look_whatever_engines_hold() -> None:
    assert waits(S.APPROVED, replace(QUIET, held=False)) == BY_ITSELF, "promotion begins, and waits for the engine then"


def test_a_ready_one_waits_for_the_approvals_that_are_missing() -> None:
    until = AT + timedelta(hours=4)
    asked = {"approvals_needed": 2, "approval_expires_at": until}
    assert waits(S.READY, **asked) == "2 approvals of 2, until 2026-11-24 10:00 UTC"
    assert waits(S.READY, replace(QUIET, yes=1), **asked) == "1 approval of 2, until 2026-11-24 10:00 UTC"
    frozen = waits(S.READY, replace(QUIET, yes=1, frozen="a gap"), **asked)
    assert frozen == "1 approval of 2, until 2026-11-24 10:00 UTC; then for people: promotions are frozen (a gap); two of them run " \
        "`ratchet release unfreeze`"  # fmt: skip


def test_a_canary_waits_for_people_and_a_jury_for_votes() -> None:
    assert waits(S.CANARY, stage=1, config={"stages": (0.05, 0.25, 0.5)}) == "people: 25% of them are asked, in stage 2 of 3"
    judged = waits(S.JUDGING, config={"people": {"votes": 40, "longest_s": 86_400.0}})
    assert judged.startswith("40 blind votes that count, until 2026-11-25 06:00 UTC")


@pytest.mark.parametrize("state", sorted(ReleaseState))
def test_whatever_is_in_flight_waits_for_something_and_nothing_else_does(state: ReleaseState) -> None:
    assert (waits_for(release(state), QUIET) is not None) is (state in IN_FLIGHT)


def test_the_story_ends_with_it() -> None:
    told = story_of(release(S.QUEUED), champion="tab-v1", steps=[], scene=replace(QUIET, held=False))
    assert (told[-1].at, told[-1].words) == (QUIET.now, f"it waits for {AN_ENGINE}")
    over = story_of(release(S.REJECTED, config={"people": {"of": "another version of Ratchet"}}), champion="tab-v1", steps=[], scene=QUIET)
    assert over[-1].words == "by now nobody met it while it was judged"
