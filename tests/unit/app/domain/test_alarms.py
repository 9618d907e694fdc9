"""Alarms: each has an end, and after an incident nothing moves until the hour in which it began has come again."""

from datetime import UTC, datetime, timedelta

import pytest

from app.domain.release.alarms import FREEZING, UNTIL, Alarm, AlarmKind, calm_again, finding_of, open_of, stood_still, why_still

AT = datetime(2026, 11, 24, 6, tzinfo=UTC)
HOUR, DAY_S = timedelta(hours=1), 86_400.0


def incident(
    *, began: datetime = AT, lasted: timedelta | None = HOUR, by: str = "system:watch", kind: AlarmKind = AlarmKind.INCIDENT
) -> Alarm:
    return Alarm(
        id="a", policy="tab", kind=kind, release_id="r", generation=1, reason="40 % fail", raised_at=began, raised_by="system:watch",
        until=UNTIL[kind], ended_at=None if lasted is None else began + lasted, ended_by=None if lasted is None else by,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lasted", "days"),
    [(timedelta(), 1), (HOUR, 1), (timedelta(days=1, seconds=-1), 1), (timedelta(days=1), 2), (timedelta(days=2, hours=3), 3)],
)
def test_calm_is_the_hour_of_its_beginning_that_comes_next_after_its_end(lasted: timedelta, days: int) -> None:
    assert calm_again(incident(lasted=lasted), season_s=DAY_S) == AT + timedelta(days=days)


def test_there_is_no_season_to_wait_for_while_it_is_open_without_one_and_where_people_ended_it() -> None:
    assert calm_again(incident(lasted=None), season_s=DAY_S) is None
    assert calm_again(incident(), season_s=0.0) is None
    assert calm_again(incident(by="user:ada"), season_s=DAY_S) is None
    assert calm_again(incident(), season_s=0.5) == AT + HOUR + timedelta(seconds=0.5)


def test_nothing_moves_until_that_very_moment_and_the_latest_season_decides() -> None:
    later = incident(began=AT + 5 * HOUR)
    alarms = [incident(), later, incident(began=AT + 9 * HOUR, kind=AlarmKind.GAP)]
    tomorrow = AT + timedelta(days=1)
    said = why_still(alarms, policy="tab", season_s=DAY_S, now=tomorrow - HOUR)
    assert said is not None
    assert "began at 2026-11-24 11:00 UTC" in said
    assert "at 2026-11-25 11:00 UTC" in said
    assert why_still(alarms[:1], policy="tab", season_s=DAY_S, now=tomorrow - timedelta(microseconds=1)) is not None
    assert why_still(alarms[:1], policy="tab", season_s=DAY_S, now=tomorrow) is None
    assert why_still(alarms, policy="tab", season_s=0.0, now=AT + 2 * HOUR) is None


def test_an_open_incident_is_told_before_any_season() -> None:
    said = why_still([incident(), incident(began=AT + 2 * HOUR, lasted=None)], policy="tab", season_s=DAY_S, now=AT + 3 * HOUR)
    assert said == f"an incident of tab is open (40 % fail): it ends when {UNTIL[AlarmKind.INCIDENT]}"


def test_the_one_that_stands_is_of_its_kind_and_open() -> None:
    gap, over, standing = incident(kind=AlarmKind.GAP, lasted=None), incident(), incident(began=AT + HOUR, lasted=None)
    assert open_of([gap, over, standing], AlarmKind.INCIDENT) is standing
    assert open_of([gap, over], AlarmKind.INCIDENT) is None


def test_time_that_two_incidents_share_stood_still_once() -> None:
    now = AT + 100 * HOUR
    two = [incident(began=AT + 2 * HOUR, lasted=2 * HOUR), incident(lasted=3 * HOUR)]
    assert stood_still(two, season_s=0.0, since=AT - HOUR, now=now) == 4 * HOUR
    assert stood_still(two, season_s=0.0, since=AT + HOUR, now=now) == 3 * HOUR
    assert stood_still(two, season_s=0.0, since=AT - HOUR, now=AT + HOUR) == HOUR
    assert stood_still(two, season_s=0.0, since=AT + 4 * HOUR, now=now) == timedelta()
    inside = [incident(lasted=5 * HOUR), incident(began=AT + HOUR, lasted=HOUR), incident(began=AT + 8 * HOUR, lasted=HOUR)]
    assert stood_still(inside, season_s=0.0, since=AT, now=now) == 6 * HOUR


def test_an_open_one_stands_until_now_and_a_season_until_it_is_over() -> None:
    assert stood_still([incident(lasted=None)], season_s=DAY_S, since=AT, now=AT + 7 * HOUR) == 7 * HOUR
    assert stood_still([incident()], season_s=DAY_S, since=AT, now=AT + 100 * HOUR) == 24 * HOUR
    assert stood_still([incident()], season_s=DAY_S, since=AT, now=AT + 5 * HOUR) == 5 * HOUR


def test_a_finding_is_told_without_its_numbers_and_every_alarm_but_an_incident_freezes() -> None:
    assert finding_of("the gap grew: 0.4 against 0.1: by far") == "the gap grew"
    assert set(AlarmKind) - FREEZING == {AlarmKind.INCIDENT}
    assert all("unfreeze" in UNTIL[kind] for kind in AlarmKind)
