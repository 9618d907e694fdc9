"""The demo's words, verdict and configuration."""

from dataclasses import replace
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
from pipelines.commands.demonstration.planning import Part
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


def test_a_release_that_ended_without_a_reason_says_that_none_was_given() -> None:
    for state, reason, said in (
        (ReleaseState.ABORTED, None, "tiny-rl-s1 was taken back: no reason given"),
        (ReleaseState.ABORTED, "harm", "tiny-rl-s1 was taken back: harm"),
        (ReleaseState.EXPIRED, "late", "tiny-rl-s1 expired: late"),
    ):  # fmt: skip
        assert list(Narrator().tell(sight(releases=(release(state, reason=reason),)), SHARES)) == [said]


def test_a_canary_without_a_stage_is_in_its_first_and_the_oldest_news_comes_first() -> None:
    older, newer = release(ReleaseState.CANARY), replace(release(ReleaseState.TRAINED), id="r2", version_name="tiny-rl-s2")
    assert list(Narrator().tell(sight(releases=(newer, older)), SHARES)) == [
        "tiny-rl-s1 answers 5% of the people (canary)", "tiny-rl-s2 was trained",
    ]  # fmt: skip


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


@pytest.mark.parametrize("there", ["ratchet.toml", "ratchet.db"])
def test_the_demo_is_not_performed_on_somebody_s_deployment(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("[policies.ours]\n")
    with pytest.raises(BadConfig, match="holds a deployment that is not the demo's: name another folder"):
        write_config(PROFILES["tiny"], tmp_path, slot_s=30)
    assert (tmp_path / there).read_text() == "[policies.ours]\n"
    again = tmp_path / "demo"
    write_config(PROFILES["tiny"], again, slot_s=30)
    (again / "ratchet.db").touch()
    assert "slot" in write_config(PROFILES["tiny"], again, slot_s=60).read_text()


@pytest.mark.parametrize(("text", "found"), [("60", 60), ("60s", 60), ("2m", 120), ("5h", 18_000)])
def test_a_slot_may_have_a_unit(text: str, found: int) -> None:
    assert seconds(text) == found


@pytest.mark.parametrize("text", ["", "s", "soon", "-3s", "1.5m"])
def test_a_slot_that_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(BadConfig, match="--slot"):
        seconds(text)


def test_a_slot_too_short_for_a_cycle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="5s"):
        write_config(PROFILES["tiny"], tmp_path, slot_s=4)
    assert loop_config(read_toml(write_config(PROFILES["tiny"], tmp_path / "made" / "for" / "it", slot_s=5))).schedule.slot_s == 5
    write_config(PROFILES["tiny"], tmp_path / "made", slot_s=6)


def test_everything_that_waits_for_the_machine_is_stretched_by_its_patience(tmp_path: Path) -> None:
    config = loop_config(read_toml(write_config(replace(PROFILES["tiny"], patience=1.5), tmp_path, slot_s=30)))
    schedule, gates, offline = config.schedule, config.gates, config.offline
    assert (schedule.patience_s, schedule.lease_s, schedule.heartbeat_s) == (28.5, 30.0, 5.0)
    assert (offline.engine_wait_s, offline.engine_timeout_s) == (90.0, 450.0)
    assert (gates.turn_wait_s, gates.canary_max_s, gates.hold_max_s, gates.no_data_hold_s, gates.holdback_s) == (225, 900, 180, 90, 450)


def everything() -> Outcome:
    found = complete()
    found.harm = replace(planted("ROLLED_BACK", detect_s=5.126, roll_back_s=0.5), people=2, people_meanwhile=3)
    found.first, found.last, found.wall_s, found.planned_s, found.first_promotion_s = "v0", "v1", 100.16, 90.04, 44.4
    found.lengths = difference([10.0, 20.0], [30.0, 50.0])
    found.dissatisfied = difference([1.0, 0.0] * 8, [0.0, 0.0] * 8)
    found.anchor_budget_used, found.answers, found.events = [0.12345, 0.5], 12, 34
    found.waits, found.waits_training, found.parts = [1.0, 2.125, 9.0], [4.0, 6.0], [(Part.START, 12.34), (Part.HARM, 0.96)]
    found.time_cycles([cycle(CycleStatus.RUNNING, "train"), replace(cycle(CycleStatus.RUNNING, "judge"), timings={"train": 1.235})])
    return found


def test_the_summary_for_programs_holds_everything_rounded() -> None:
    told = everything().as_json()
    # 1.96 · √50 / √2 = 9.8 around 15, and 1.96 · √200 / √2 = 19.6 around 40; √(9.8² + 19.6²) = 21.9135
    assert told["lengths"] == {
        "first": {"n": 2, "mean": 15.0, "low": 5.2, "high": 24.8}, "second": {"n": 2, "mean": 40.0, "low": 20.4, "high": 59.6},
        "difference": 25.0, "low": 3.0865, "high": 46.9135, "level": 0.95,
    }  # fmt: skip
    assert (told["wall_s"], told["planned_s"], told["first_promotion_s"]) == (100.2, 90.0, 44.4)
    assert told["anchor_budget_used"] == [0.1235, 0.5]
    assert (told["waited_s"], told["waited_while_training_s"]) == (2.12, 5.0)
    assert told["parts_s"] == [["start", 12.3], ["harm", 1.0]]
    assert told["stages_s"] == {"batch": [0.1], "train": [4.2, 1.24]}
    assert (told["harm"]["share_exposed"], told["harm"]["to_roll_back_s"]) == (0.6667, 5.63)
    assert (told["promoted"], told["answers"], told["events"], told["failures"]) == (["a", "b"], 12, 34, [])
    assert told["dissatisfied"]["difference"] == -0.5


def test_an_outcome_of_nothing_is_told_too() -> None:
    told = Outcome(model="tiny", seed=1).as_json()
    assert (told["persistence"], told["harm"], told["waited_s"], told["first_promotion_s"]) == (None, None, 0.0, None)
    assert (told["wall_s"], told["planned_s"], told["answers"], told["events"]) == (0.0, 0.0, 0, 0)
    assert replace(planted("ABORTED"), people_meanwhile=0).share == 0.0


def test_the_findings_for_people_are_in_their_order_and_what_is_missing_is_last() -> None:
    outcome = everything()
    outcome.trouble = "it ended early"
    rows = outcome.rows()
    assert [name for name, _ in rows] == [
        "promoted", "answers, events", "edit persistence, held-out people", "  difference", "dissatisfied follow-ups", "  difference",
        "tokens an answer", "divergence from the anchor", "planted candidate", "served badly", "time to detect, to roll back",
        "people waited for an answer", "time", "MISSING",
    ]  # fmt: skip
    texts = [text for _, text in rows]
    assert texts[0] == "2: a, b"
    assert texts[3].startswith("+0.800, 95 % interval [+0.75")
    assert texts[6:9] == ["15 → 40", "12%, 50% of what is allowed", "p was ROLLED_BACK: harm"]
    assert texts[10:] == [
        "5.1 s, 0.5 s", "2.1 s (median); 5.0 s while an update computed on the same cores", "start 12 s, harm 1 s", "it ended early",
    ]  # fmt: skip
    assert outcome.title == "one real turn of the loop: tiny, 100 s"
    outcome.waits_training = []
    assert dict(outcome.rows())["people waited for an answer"] == "2.1 s (median)"


@pytest.mark.parametrize("state", list(ReleaseState))
def test_a_planted_version_counts_as_caught_where_it_was_taken_back(state: ReleaseState) -> None:
    assert planted(state.value).caught is (state in {ReleaseState.ABORTED, ReleaseState.REJECTED, ReleaseState.ROLLED_BACK})


def test_a_gain_whose_interval_begins_at_zero_is_not_clear() -> None:
    outcome = complete()
    assert outcome.persistence is not None
    outcome.persistence = replace(outcome.persistence, low=0.0)
    assert not outcome.is_clear
    assert outcome.failures == ["the interval of the gain in edit persistence does not exclude zero"]
