"""The demo's words, verdict and configuration."""

from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from app.domain.errors import BadConfig
from app.domain.learning.cycles import Cycle, CycleStatus
from app.domain.policies import PolicyConfig
from app.domain.release.releases import Release, ReleaseState
from app.domain.views.measures import difference
from app.settings import policies, read_toml
from pipelines.commands.demonstration.narrator import Narrator
from pipelines.commands.demonstration.outcome import Harm, Outcome
from pipelines.commands.demonstration.profiles import PROFILES, seconds, write_config
from pipelines.commands.demonstration.screen import Screen
from pipelines.commands.demonstration.sight import Sight
from pipelines.config import loop_config
from pipelines.evaluation.config import GatesConfig, check

NOW = datetime(2026, 1, 1, tzinfo=UTC)
SHARES = (0.05, 0.25, 0.5)


def release(state: ReleaseState, *, stage: int | None = None, reason: str | None = None) -> Release:
    return Release(
        id="r1", policy="composer", digest="d", version_name="tiny-rl-s1", state=state, generation=1, stage=stage, champion_digest="c",
        champion_generation=1, evidence_digest=None, reason=reason, created_at=NOW, changed_at=NOW,
    )  # fmt: skip


def cycle(status: CycleStatus, step: str, reason: str | None = None) -> Cycle:
    return Cycle(
        policy="composer", slot=60, status=status, step=step, reason=reason, owner="o", fencing_token=1, attempt=1, lease_expires_at=None,
        batch_id=None, run_id=None, release_id=None, timings={"batch": 0.1, "train": 4.2}, started_at=NOW, finished_at=None,
    )  # fmt: skip


def sight(*, releases: tuple[Release, ...] = (), cycles: tuple[Cycle, ...] = ()) -> Sight:
    return Sight(
        seen_at=NOW,
        pointer=None,
        releases=releases,
        versions=(),
        labels=(),
        labels_read_at=NOW,
        cycles=cycles,
        progress=(),
        accepted_events=0,
        waiting_turns=0,
    )


def test_a_change_is_told_once() -> None:
    narrator = Narrator()
    canary = sight(releases=(release(ReleaseState.CANARY, stage=0),))
    assert list(narrator.tell(canary, SHARES)) == ["tiny-rl-s1 answers 5% of the people (canary)"]
    assert list(narrator.tell(canary, SHARES)) == []
    assert list(narrator.tell(sight(releases=(release(ReleaseState.CANARY, stage=1),)), SHARES)) == [
        "tiny-rl-s1 answers 25% of the people (canary)"
    ]


@pytest.mark.parametrize("state", list(ReleaseState))
def test_there_is_a_sentence_for_every_state(state: ReleaseState) -> None:
    [sentence] = Narrator().tell(sight(releases=(release(state, stage=2, reason="why"),)), SHARES)
    assert "tiny-rl-s1" in sentence


def test_a_held_cycle_is_told_with_its_reason() -> None:
    assert list(Narrator().tell(sight(cycles=(cycle(CycleStatus.HELD, "elected", "too few labels"),)), SHARES)) == [
        "the cycle was held: too few labels"
    ]


def test_the_view_can_be_kept_as_a_picture(tmp_path: Path) -> None:
    screen = Screen(title="Ratchet", url="http://127.0.0.1:8400", console=Console(file=StringIO()), shares=SHARES)
    screen.say("a slot began")
    screen.save(sight(releases=(release(ReleaseState.CANARY, stage=1),)), tmp_path / "view.svg")
    shown = " ".join("".join(ElementTree.parse(tmp_path / "view.svg").getroot().itertext()).split())
    assert "CANARY" in shown
    assert "a slot began" in shown.replace("\xa0", " ")


def complete() -> Outcome:
    outcome = Outcome(model="tiny", seed=1, promoted=["a", "b"])
    outcome.persistence = difference([0.0, 0.1, 0.2] * 10, [0.8, 0.9, 1.0] * 10)
    outcome.harm = planted("ABORTED", detect_s=5.0, roll_back_s=0.5)
    return outcome


def planted(state: str, *, detect_s: float = 0.0, roll_back_s: float = 0.0) -> Harm:
    return Harm(
        version="p", state=state, reason="harm", requests=9, people=9, people_meanwhile=90, units=120, detect_s=detect_s,
        roll_back_s=roll_back_s,
    )  # fmt: skip


def test_the_planted_regression_is_told_in_units_seconds_and_share_of_people() -> None:
    told = complete().as_json()["harm"]
    assert (told["units"], told["to_roll_back_s"], told["share_exposed"]) == (120, 5.5, 0.1)
    shown = Console(width=160, record=True)
    shown.print(complete().table())
    assert "9 requests of 9 of 90 people (10%), in 120 units of both arms" in " ".join(shown.export_text().split())


def test_an_outcome_with_all_that_was_promised_has_no_failures() -> None:
    assert complete().failures == []


def test_every_missing_promise_is_a_failure() -> None:
    empty = Outcome(model="tiny", seed=1).failures
    assert len(empty) == 3
    uncaught, vague = complete(), complete()
    uncaught.harm = planted("CANARY")
    vague.persistence = difference([0.0, 1.0], [0.1, 1.0])
    assert "was not taken back" in uncaught.failures[0]
    assert "exclude zero" in vague.failures[0]


def test_a_gain_that_may_be_chance_is_not_clear_and_a_later_look_says_its_level() -> None:
    outcome = complete()
    assert outcome.is_clear
    outcome.persistence = difference([0.0, 0.1, 0.2] * 10, [0.8, 0.9, 1.0] * 10, error=0.025)
    assert "97.5 % interval" in dict(outcome.rows())["  difference"]
    outcome.persistence = difference([0.0, 1.0] * 20, [0.1, 1.0] * 20)
    assert not outcome.is_clear


def test_trouble_is_a_failure_even_when_everything_else_happened() -> None:
    outcome = complete()
    outcome.trouble = "it was interrupted"
    assert outcome.failures == ["it was interrupted"]


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_a_profile_is_a_valid_configuration_with_production_s_error_probabilities(name: str, tmp_path: Path) -> None:
    path = write_config(PROFILES[name], tmp_path, slot_s=30)
    config = loop_config(read_toml(path))
    check(config.gates, rewarded=frozenset({"edit_persistence", "follow_up"}))
    default = GatesConfig()
    for alpha in ("alpha_abort_e", "alpha_abort_gst", "alpha_ni_e", "alpha_ni_gst", "alpha_post", "alpha_data", "alpha_slo"):
        assert getattr(config.gates, alpha) == getattr(default, alpha)
    declared = policies(read_toml(path), relative_to=path.parent)
    assert isinstance(declared["composer"], PolicyConfig)


@pytest.mark.parametrize(("text", "found"), [("60", 60), ("60s", 60), ("2m", 120), ("5h", 18_000)])
def test_a_slot_may_have_a_unit(text: str, found: int) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "s", "soon", "-3s", "1.5m"])
def test_a_slot_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="--slot"):
        seconds(text)


def test_a_slot_too_short_for_a_cycle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="5s"):
        write_config(PROFILES["tiny"], tmp_path, slot_s=1)
