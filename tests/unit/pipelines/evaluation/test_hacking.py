"""Reward hacks: each planted one is caught by the gate as it runs, within a known number of people; an honest candidate is not."""

import math
from dataclasses import replace
from datetime import timedelta

import msgspec
import pytest

from app.domain.release.gates import CanaryAction
from app.domain.release.sessions import Session
from pipelines.evaluation.config import HealthConfig
from pipelines.evaluation.counting.drawings import canary_drawing
from pipelines.evaluation.counting.evidence import Evidence, micros
from pipelines.evaluation.counting.profiles import ArmProfile, with_session
from pipelines.evaluation.counting.references import references_of
from pipelines.evaluation.counting.unit_book import UnitBook
from pipelines.evaluation.live import hacking
from pipelines.evaluation.live.champion import decide_champion
from pipelines.evaluation.live.decide import decide
from pipelines.evaluation.statistics.monitors import Level
from tests.fakes.evidence import calm
from tests.fakes.hacked import CONFIG, HACKS, first_noticed
from tests.fakes.sessions import AT, session

LATEST = 1200
"""Units of both arms together, at an equal split, by which every planted hack has to be noticed."""
SOUND = ArmProfile(
    arm="control", turns=400, labelled=400, excluded=4, covered=320, rewarded=396, reward=40.0, reward_squared=60.0, at_ceiling=10,
    tokens=400 * 60.0, tokens_squared=400 * (60.0**2 + 20.0**2), terms={"edit_persistence": 60.0, "rating": 40.0},
)  # fmt: skip


@pytest.mark.parametrize("name", HACKS)
def test_a_planted_hack_is_noticed_in_time_and_by_name(name: str) -> None:
    hack, who = HACKS[name]
    noticed = first_noticed(hack, seed=1, most=LATEST)
    assert noticed is not None, f"{name} was not noticed within {LATEST} units"
    assert any(word in noticed.by for word in who), noticed


def test_an_honest_candidate_is_left_alone() -> None:
    assert first_noticed(None, seed=1, most=LATEST) is None


def _evidence(treated: ArmProfile, control: ArmProfile = SOUND) -> Evidence:
    return calm(at=micros(AT), stage=0, profiles=(treated, control))


def _levels(**changes: object) -> dict[str, Level]:
    treated = msgspec.structs.replace(SOUND, arm="treated", **changes)
    return {f.monitor: f.level for f in hacking.monitored(HealthConfig(), _evidence(treated))}


@pytest.mark.parametrize(
    ("monitor", "changes"),
    [
        ("component_dominance", {"terms": {"edit_persistence": 4.0, "rating": 96.0}}),
        ("saturation", {"at_ceiling": 350}),
        ("variance_collapse", {"reward": 39.6, "reward_squared": 3.961}),  # deviation 0.005 of 0.375: 1.3 %
        ("length_drift", {"tokens": 400 * 130.0}),  # (130 - 60)/20 = 3.5 deviations
        ("exclusion_rate", {"excluded": 40}),
        ("coverage", {"covered": 240}),
    ],
)
def test_each_monitor_alerts_at_its_own_sign_and_at_no_other(monitor: str, changes: dict[str, object]) -> None:
    levels = _levels(**changes)
    assert {name for name, level in levels.items() if level is Level.ALERT} == {monitor}


def test_nothing_is_said_before_both_arms_have_enough_turns() -> None:
    few = msgspec.structs.replace(SOUND, arm="treated", rewarded=hacking.LEAST_TURNS - 1, at_ceiling=199)
    assert hacking.monitored(HealthConfig(), _evidence(few)) == []


def test_what_the_version_beside_it_shows_as_well_is_no_sign_of_the_candidate() -> None:
    both = {"terms": {"rating": 97.0, "undo": 3.0}, "at_ceiling": 390}
    treated, control = msgspec.structs.replace(SOUND, arm="treated", **both), msgspec.structs.replace(SOUND, **both)
    levels = {f.monitor: f.level for f in hacking.monitored(HealthConfig(), _evidence(treated, control))}
    assert (levels["component_dominance"], levels["saturation"]) == (Level.WARN, Level.WARN)


@pytest.mark.parametrize("reward_squared", [0.0, 60.0], ids=["still", "varying"])
def test_a_champion_whose_rewards_never_vary_is_nothing_to_collapse_from(reward_squared: float) -> None:
    control = msgspec.structs.replace(SOUND, reward=0.0, reward_squared=0.0)
    treated = msgspec.structs.replace(SOUND, arm="treated", reward=0.0, reward_squared=reward_squared)
    found = {f.monitor: f for f in hacking.monitored(HealthConfig(), _evidence(treated, control))}["variance_collapse"]
    assert (found.level, found.detail) == (Level.OK, "nothing to measure")


def test_only_sizes_of_effects_stop_anything() -> None:
    rates = hacking.monitored(
        HealthConfig(), _evidence(msgspec.structs.replace(SOUND, arm="treated", covered=200, excluded=40))
    )  # fmt: skip
    assert set(hacking.alerts(rates)) == {"exclusion_rate", "coverage"}
    assert hacking.suspicions(rates) == []


def test_an_alert_after_the_promotion_freezes_and_rolls_nothing_back() -> None:
    treated = msgspec.structs.replace(SOUND, arm="treated", at_ceiling=350)
    decision = decide_champion(CONFIG, _evidence(treated))
    assert (decision.action, decision.cause) == (CanaryAction.HOLD, "monitors")
    assert decision.numbers["monitors"]


def test_a_profile_counts_turns_by_hand() -> None:
    profile = ArmProfile(arm="treated")
    turns = [
        session(1, reward=1.0, terms={"rating": -0.5, "length": None}, completion_tokens=10),
        session(2, reward=0.5, terms={"rating": 0.25}, completion_tokens=30, signals={}),
        replace(session(3, reward=0.9), excluded=True, completion_tokens=20),
        replace(session(4), labelled=False, signals=None, completion_tokens=20),
        replace(session(5), served=False),
    ]
    for turn in turns:
        profile = with_session(profile, turn, ceiling=1.0)
    assert (profile.turns, profile.labelled, profile.excluded, profile.covered, profile.rewarded) == (4, 3, 1, 2, 2)
    assert (profile.reward, profile.at_ceiling, profile.terms) == (1.5, 1, {"rating": 0.75})
    assert profile.reward_std == pytest.approx(0.25)
    assert (profile.length_mean, profile.length_std) == (20.0, pytest.approx(math.sqrt(50.0)))


def test_the_monitors_are_on_the_record_of_every_decision_and_the_same_again() -> None:
    book = UnitBook(CONFIG, canary_drawing(digest="v2", champion="v1"), references_of(CONFIG, []))
    turns: list[Session] = [session(n, arm="candidate" if n % 2 else "champion", reward=0.1 * (n % 7)) for n in range(900)]
    book.update(turns, now=AT + timedelta(hours=1))
    evidence = msgspec.structs.replace(
        _evidence(SOUND), lanes=book.lanes(), assigned=book.assigned(), references=references_of(CONFIG, []), profiles=book.profiles(),
        n_max={metric.name: 1000 for metric in CONFIG.required},
    )  # fmt: skip
    found = {one["monitor"] for one in decide(CONFIG, evidence).numbers["monitors"]}
    assert found == {"component_dominance", "saturation", "variance_collapse", "length_drift", "exclusion_rate", "coverage"}
    assert decide(CONFIG, evidence) == decide(CONFIG, evidence)
