"""Who gets which version: over every life of a release, the probability that is logged is the share that is drawn."""

import math
from collections import defaultdict
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import numpy as np

from app.domain.release.assignment import assign, is_lasting
from app.domain.release.releases import Pointer, Route
from app.domain.release.sessions import Era, Session
from pipelines.evaluation.counting.drawings import Drawing, canary_drawing, era_drawing, lasting_drawing

AT = datetime(2026, 11, 22, tzinfo=UTC)
POINTER = Pointer(
    policy="p", digest="champion", generation=7, previous="before", anchor="anchor", holdback=0.10, release_id="r0", changed_at=AT
)
QUIET = Route(policy="p", pointer=POINTER)
ANCHORED = Route(policy="p", pointer=replace(POINTER, generation=8, holdback=0.03, holdback_digest="anchor"))


def canary(route: Route, release: str, stage: int, share: float) -> Route:
    return replace(route, canary_digest=f"of {release}", canary_release=release, canary_stage=stage, canary_share=share, canary_lasting=0.2)


LIFE = (
    QUIET,
    *(canary(QUIET, "r1", stage, share) for stage, share in enumerate((0.05, 0.25, 0.5))),
    QUIET,
    *(canary(QUIET, "r2", stage, share) for stage, share in enumerate((0.05, 0.25, 0.5))),
    ANCHORED,
    *(canary(ANCHORED, "r3", stage, share) for stage, share in enumerate((0.05, 0.25, 0.5))),
    *(canary(ANCHORED, "r4", stage, share) for stage, share in enumerate((0.05, 0.25, 0.5))),
)
"""A champion from its promotion on: alone, with a canary that ends, alone, with another; then the same on the anchor's holdback."""


def sessions_of(route: Route, number: int, people: int) -> list[Session]:
    """One answer each to people of whom two thirds come in this part of the life."""
    came = np.random.default_rng(number).random(people) < 2 / 3
    found: list[Session] = []
    for person in np.flatnonzero(came).tolist():
        arm = assign(route, f"person-{person}", at=AT + timedelta(hours=number))
        session = Session(
            inference_id=f"{number}-{person}", actor=f"person-{person}", episode_id="e", release_id=arm.release_id, stage=arm.stage,
            arm=arm.arm, probability=arm.probability, share=arm.share, holdback=arm.holdback, digest=arm.digest,
            exposed_at=AT + timedelta(hours=number), served=True, completion_tokens=40,
        )  # fmt: skip
        found.append(session)
    return found


def units_of(drawing: Drawing, sessions: list[Session]) -> dict[int, dict[str, tuple[bool, float]]]:
    """Arm and probability of each person, by stratum."""
    units: dict[int, dict[str, tuple[bool, float]]] = defaultdict(dict)
    for session in sessions:
        draw = drawing(session)
        if draw is not None:
            units[draw.stratum].setdefault(session.actor, (draw.treated, draw.probability))
    return units


def era_of(route: Route) -> Era:
    pointer = route.pointer
    return Era(
        generation=pointer.generation, since=AT, until=None, champion=pointer.digest, reference=pointer.reference,
        holdback=pointer.holdback, anchor=pointer.anchor, action="promote", release_id=pointer.release_id,
    )  # fmt: skip


def shares_are_true(units: dict[int, dict[str, tuple[bool, float]]]) -> bool:
    """Within five standard errors in every stratum."""
    for people in units.values():
        treated, probability = np.array([t for t, _ in people.values()]), np.array([p for _, p in people.values()])
        if abs(treated.sum() - probability.sum()) > 5 * math.sqrt((probability * (1 - probability)).sum()):
            return False
    return True


def test_over_every_life_of_a_release_the_logged_probability_is_the_empirical_share() -> None:
    lived = [sessions_of(route, number, 3000) for number, route in enumerate(LIFE)]
    for route in (QUIET, ANCHORED):
        mine = [s for part, r in zip(lived, LIFE, strict=True) if r.pointer == route.pointer for s in part if s.arm != "candidate"]
        units = units_of(era_drawing(era_of(route)), mine)
        assert len(units) == 13  # alone, and three stages of each of two canaries, the lasting cohort in each by itself
        assert shares_are_true(units)
    for release in ("r1", "r2", "r3", "r4"):
        mine = [s for part in lived for s in part if s.release_id == release and s.stage.startswith("canary-")]
        drawn = [s for s in mine if not is_lasting(s.stage)]
        assert shares_are_true(units_of(canary_drawing(digest=f"of {release}", champion="champion"), drawn))
        assert shares_are_true(units_of(lasting_drawing(share=0.2), mine))


def test_an_arm_in_one_stratum_says_nothing_about_the_next() -> None:
    lived = [session for number, route in enumerate(LIFE[:8]) for session in sessions_of(route, number, 3000) if session.arm != "candidate"]
    cohorts = ([session for session in lived if is_lasting(session.stage) is lasting] for lasting in (False, True))
    strata = [list(units_of(era_drawing(era_of(QUIET)), cohort).values()) for cohort in cohorts]
    for one, other in (pair for cohort in strata for pair in pairwise(cohort)):
        both = sorted(one.keys() & other.keys())
        arms = np.array([[one[person][0], other[person][0]] for person in both], dtype=np.float64)
        centred = arms - arms.mean(axis=0)
        correlation = (centred[:, 0] @ centred[:, 1]) / math.sqrt((centred[:, 0] @ centred[:, 0]) * (centred[:, 1] @ centred[:, 1]))
        assert abs(correlation) < 5 / math.sqrt(len(both))
