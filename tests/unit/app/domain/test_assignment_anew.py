"""Every stage, candidate, generation and day draws everybody anew, and names it."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.release.assignment import Arm, assign, is_lasting, pin, practise
from app.domain.release.releases import Pointer, Route

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
PEOPLE = [f"person-{n}" for n in range(5_000)]
POINTER = Pointer(
    policy="tab", digest="v1", generation=4, previous="v0", anchor="v0", holdback=0.0, release_id="r1", changed_at=AT
)  # fmt: skip
CANARY = Route(policy="tab", pointer=POINTER, canary_digest="v2", canary_release="r2", canary_stage=1, canary_share=0.25)
HELD = Route(policy="tab", pointer=replace(POINTER, holdback=0.1))


def _on(route: Route, digest: str, at: datetime = AT) -> set[str]:
    return {person for person in PEOPLE if assign(route, person, at=at).digest == digest}


def _is(observed: int, of: int, share: float) -> bool:
    """Within four standard errors."""
    return abs(observed / of - share) <= 4.0 * (share * (1.0 - share) / of) ** 0.5


def test_the_logged_probability_is_the_share_that_is_served() -> None:
    both = replace(CANARY, pointer=HELD.pointer)
    for route in (CANARY, HELD, both):
        served: dict[tuple[str, float], int] = {}
        for person in PEOPLE:
            arm = assign(route, person, at=AT)
            served[(arm.arm, arm.probability)] = served.get((arm.arm, arm.probability), 0) + 1
        outside = sum(count for (arm, _), count in served.items() if arm != "previous")
        for (arm, probability), count in served.items():
            # a canary's probabilities are conditional on being outside the holdback
            of = outside if route is both and arm != "previous" else len(PEOPLE)
            assert _is(count, of, probability), (arm, probability, count)


def test_a_person_keeps_their_arm_for_the_stage_and_the_day() -> None:
    assert _on(CANARY, "v2") == _on(CANARY, "v2", AT + timedelta(hours=11))
    assert _on(HELD, "v0") == _on(HELD, "v0", AT - timedelta(hours=11))


@pytest.mark.parametrize(
    ("route", "again", "at", "digest", "share"),
    [
        (CANARY, replace(CANARY, canary_stage=2), AT, "v2", 0.25),
        (CANARY, CANARY, AT + timedelta(days=1), "v2", 0.25),
        (CANARY, replace(CANARY, canary_release="r3"), AT, "v2", 0.25),
        (HELD, replace(HELD, pointer=replace(HELD.pointer, generation=5)), AT, "v0", 0.1),
        (HELD, HELD, AT + timedelta(days=1), "v0", 0.1),
    ],
    ids=["stage", "day of a canary", "candidate", "generation", "day of a holdback"],
)
def test_everybody_is_drawn_anew(route: Route, again: Route, at: datetime, digest: str, share: float) -> None:
    """Whoever was on the version is on it again no more often than anybody else: a second unit of a person is a fresh draw."""
    before = _on(route, digest)
    assert _is(len(before & _on(again, digest, at)), len(before), share)


def test_the_holdback_says_nothing_about_the_canarys_arm() -> None:
    both = replace(CANARY, pointer=HELD.pointer)
    held = _on(both, "v0")
    assert _is(len(_on(both, "v2")), len(PEOPLE) - len(held), 0.25)
    assert _is(len(held & _on(CANARY, "v2")), len(held), 0.25)


def test_the_stage_names_the_day_of_the_draw() -> None:
    def arm(route: Route) -> Arm:
        return assign(route, "ada", at=datetime(1970, 1, 3, 23, 59, tzinfo=UTC))

    assert (arm(CANARY).stage, arm(HELD).stage, arm(Route(policy="tab", pointer=POINTER)).stage) == (
        "canary-1.2", "holdback.2", "champion",
    )  # fmt: skip


def test_the_lasting_cohort_is_drawn_once_and_never_gets_the_candidate() -> None:
    """Assigned once for the whole ramp, a fifth of the people, on the control version through all stages and days."""
    route = replace(CANARY, canary_lasting=0.2)
    kept = {person for person in PEOPLE if is_lasting(assign(route, person, at=AT).stage)}
    assert _is(len(kept), len(PEOPLE), 0.2)
    for stage, share in enumerate((0.05, 0.25, 0.5)):
        for day in range(3):
            now = replace(route, canary_stage=stage, canary_share=share)
            got = _on(now, "v2", AT + timedelta(days=day))
            assert not got & kept
            assert _is(len(got), len(PEOPLE) - len(kept), share)


def test_a_canary_that_asks_for_no_lasting_cohort_has_none() -> None:
    route = Route(policy="tab", pointer=POINTER, canary_digest="v2", canary_release="r2", canary_stage=1, canary_share=0.25)
    assert not any(is_lasting(assign(route, person, at=AT).stage) for person in PEOPLE[:500])


def test_the_holdback_takes_as_many_of_the_lasting_cohort_as_of_the_others() -> None:
    """Else whoever is seen in the canary at all would say something about the cohort; both are told apart by their stage."""
    route = replace(CANARY, pointer=HELD.pointer, canary_lasting=0.2)
    arms = [assign(route, person, at=AT) for person in PEOPLE]
    kept = [arm for arm in arms if is_lasting(arm.stage)]
    assert _is(sum(arm.arm == "previous" for arm in kept), len(kept), 0.1)
    assert _is(sum(arm.arm != "previous" for arm in kept), sum(arm.arm != "previous" for arm in arms), 0.2)
    assert {(arm.probability, arm.share) for arm in kept if arm.arm == "champion"} == {(1.0, 0.0)}


def test_practice_and_pinned_requests_are_no_experiment_and_certain() -> None:
    plain = {"release_id": None, "probability": 1.0, "share": 0.0, "holdback": 0.0}
    assert practise(CANARY) == Arm(digest="v1", stage="rollout", arm="rollout", **plain)
    assert pin("v7") == Arm(digest="v7", stage="pinned", arm="pinned", **plain)


@pytest.mark.parametrize("missing", ["canary_digest", "canary_release"])
def test_a_canary_without_a_version_or_a_release_is_none_and_nobody_is_drawn_into_it(missing: str) -> None:
    for pointer in (POINTER, HELD.pointer):
        plain, half = Route(policy="tab", pointer=pointer), replace(CANARY, pointer=pointer, canary_lasting=0.2, **{missing: None})
        assert [assign(half, person, at=AT) for person in PEOPLE[:200]] == [assign(plain, person, at=AT) for person in PEOPLE[:200]]
