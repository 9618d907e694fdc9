"""The long-term holdout: drawn once, for as long as there is it, and in no stage of anything else."""

from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from app.api.chat.conversations import may_continue
from app.domain.release.assignment import assign, member_of
from app.domain.release.holdouts import BESIDE, ArmMean, Holdout, Member, Reading, told_difference
from app.domain.release.releases import Pointer, Route

AT = datetime(2026, 11, 23, tzinfo=UTC)
PEOPLE = [f"person-{n}" for n in range(20_000)]
HOLDOUT = Holdout(id="h1", policy="p", digest="old", share=0.02, began_at=AT, ends_at=AT + timedelta(days=90), counted_until=AT)
POINTER = Pointer(
    policy="p", digest="champion", generation=7, previous="before", anchor="anchor", holdback=0.1, release_id="r0", changed_at=AT
)
ROUTE = Route(policy="p", pointer=POINTER, holdout=HOLDOUT)
CANARY = replace(ROUTE, canary_digest="new", canary_release="r1", canary_stage=1, canary_share=0.25, canary_lasting=0.2)


def held(route: Route, *, days: float = 0.0) -> set[str]:
    return {person for person in PEOPLE if assign(route, person, at=AT + timedelta(days=days)).arm == "held"}


def test_the_same_people_are_held_on_every_day_in_every_generation_and_under_every_release() -> None:
    first = held(ROUTE)
    assert 0.017 < len(first) / len(PEOPLE) < 0.023
    later = replace(CANARY, pointer=replace(POINTER, generation=31, digest="v9"), canary_release="r9", canary_stage=2, canary_share=0.5)
    assert first == held(CANARY, days=1) == held(later, days=60)


def test_whoever_is_held_is_in_no_stage_and_on_the_version_of_its_beginning() -> None:
    person = next(iter(held(CANARY)))
    arm = assign(CANARY, person, at=AT)
    assert (arm.digest, arm.stage, arm.arm, arm.probability) == ("old", "holdout", "held", 0.02)
    assert (arm.release_id, arm.share, arm.holdback) == (None, 0.0, 0.0)


def test_the_others_have_the_arms_and_the_probabilities_that_they_would_have_without_it() -> None:
    without, drawn = replace(CANARY, holdout=None), held(CANARY)
    for person in PEOPLE[:4_000]:
        if person not in drawn:
            assert assign(CANARY, person, at=AT) == assign(without, person, at=AT)


def test_it_takes_as_many_of_each_arm_as_of_all() -> None:
    drawn, without = held(CANARY), replace(CANARY, holdout=None)
    arms = {person: assign(without, person, at=AT).arm for person in PEOPLE}
    everybody, of_them = Counter(arms.values()), Counter(arms[person] for person in drawn)
    for arm, number in everybody.items():
        expected = number / len(PEOPLE) * len(drawn)
        assert abs(of_them[arm] - expected) < 5 * expected**0.5, arm


def test_the_next_one_holds_others() -> None:
    again = held(replace(ROUTE, holdout=replace(HOLDOUT, id="h2")))
    assert len(held(ROUTE) & again) < 0.1 * len(again)


def test_four_others_are_followed_beside_each() -> None:
    members = Counter(member_of(HOLDOUT, person) for person in PEOPLE)
    assert 0.9 * BESIDE < members[Member.BESIDE] / members[Member.HELD] < 1.1 * BESIDE
    assert held(ROUTE) == {person for person in PEOPLE if member_of(HOLDOUT, person) is Member.HELD}


def test_nobody_is_held_who_cannot_be_recognised_when_it_is_over_or_on_a_version_that_is_barred() -> None:
    person = next(iter(held(ROUTE)))
    assert assign(ROUTE, person, at=AT, recognised=False).arm != "held"
    assert assign(ROUTE, person, at=HOLDOUT.ends_at).arm != "held"
    assert assign(replace(ROUTE, quarantined=frozenset({"old"})), person, at=AT).arm != "held"


def test_a_conversation_goes_on_where_it_is_held_only_while_it_is() -> None:
    arm = assign(ROUTE, next(iter(held(ROUTE))), at=AT)
    assert may_continue(arm, ROUTE)
    assert not may_continue(arm, replace(ROUTE, holdout=None))
    assert not may_continue(arm, replace(ROUTE, holdout=replace(HOLDOUT, id="h2", digest="newer")))
    assert not may_continue(arm, replace(ROUTE, quarantined=frozenset({"old"})))
    before = msgspec.structs.replace(arm, arm="champion", stage="champion")
    assert not may_continue(before, ROUTE), "who was not held does not stay on the version that others are held on"


def test_a_week_of_it_has_seven_days_and_the_last_moment_is_before_its_end() -> None:
    days = [0.0, 6.999, 7.0, 13.999, 14.0]
    assert [HOLDOUT.week_of(AT + timedelta(days=n)) for n in days] == [0, 0, 1, 1, 2]
    assert HOLDOUT.last_moment == HOLDOUT.ends_at - timedelta(microseconds=1)
    person = next(iter(held(ROUTE)))
    assert assign(ROUTE, person, at=HOLDOUT.last_moment).arm == "held"


def test_a_table_shows_the_newest_week_and_all_of_them() -> None:
    def reading(week: int | None) -> Reading:
        return Reading(metric="reward", week=week, held=ArmMean(), beside=ArmMean())

    weeks = (reading(None), reading(0), reading(1))
    assert [one.week for one in replace(HOLDOUT, readings=weeks).told] == [None, 1]
    assert [one.week for one in replace(HOLDOUT, readings=weeks[:2]).told] == [None, 0]
    assert HOLDOUT.told == []


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0.0123, -0.004, 0.03), ("+1.23 pp", "[-0.40, +3.00]")), ((None, -0.1, 0.1), ("-", "too few people yet")),
        ((0.1, None, 0.1), ("-", "too few people yet")), ((0.1, 0.1, None), ("-", "too few people yet")),
    ],
)  # fmt: skip
def test_a_difference_is_told_in_points(numbers: tuple[float | None, float | None, float | None], words: tuple[str, str]) -> None:
    difference, low, high = numbers
    assert told_difference(
        Reading(metric="m", week=None, held=ArmMean(), beside=ArmMean(), difference=difference, low=low, high=high)
    ) == words  # fmt: skip
