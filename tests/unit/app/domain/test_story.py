"""The story of a release: each thing that happened is one sentence, in its order, with who and why."""

from datetime import UTC, datetime, timedelta

import pytest

from app.domain.release.alarms import UNTIL, Alarm, AlarmKind
from app.domain.release.releases import MOVES, Release, ReleaseState
from app.domain.views.pages import Served
from app.domain.views.rows import StepRow
from app.domain.views.story import story_of

S = ReleaseState
AT = datetime(2026, 11, 22, 6, tzinfo=UTC)


def release(**changes: object) -> Release:
    values: dict[str, object] = {
        "id": "r", "policy": "tab", "digest": "v2", "version_name": "tab-v2", "state": S.CANARY, "generation": 4, "stage": 0,
        "champion_digest": "v1", "champion_generation": 1, "evidence_digest": None, "reason": None, "created_at": AT,
        "changed_at": AT + timedelta(hours=2),
    }  # fmt: skip
    return Release(**{**values, **changes})  # type: ignore[arg-type] - the test's own names


def step(
    before: ReleaseState | None, after: ReleaseState, *, minutes: int = 0, actor: str = "system:watch", why: str = "so it is"
) -> StepRow:
    return StepRow(from_state=before, to_state=after, stage=None, reason=why, actor=actor, occurred_at=AT + timedelta(minutes=minutes))


def words(*steps: StepRow, **more: object) -> list[str]:
    return [told.words for told in story_of(release(**more), champion="tab-v1", steps=steps)[:-1]]


def test_a_ramp_a_hand_over_and_a_rollback_read_like_this() -> None:
    moves = (
        (None, S.TRAINED, "system:loop", "a candidate was trained"), (S.QUEUED, S.CANARY, "system:watch", "canary starts at 5%"),
        (S.CANARY, S.CANARY, "system:watch", "now 25%"), (S.CANARY, S.READY, "system:watch", "non-inferior"),
        (S.READY, S.READY, "user:ada", "1 of 2 approvals"), (S.READY, S.APPROVED, "user:bob", "approved by 2 of 2"),
        (S.APPROVED, S.READY, "system:watch", "its data are in doubt"), (S.PROMOTING, S.CHAMPION, "system:watch", "promoted"),
        (S.CHAMPION, S.ROLLED_BACK, "user:ada", "it is rude"), (S.ROLLED_BACK, S.SUPERSEDED, "user:bob", "it was the network"),
        (S.SUPERSEDED, S.CHAMPION, "system:watch", "came back when tab-v3 was rolled back"),
    )  # fmt: skip
    assert words(*(step(before, after, actor=actor, why=why) for before, after, actor, why in moves)) == [
        "tab-v2 comes, to be held against tab-v1: a candidate was trained", "the first people meet it: canary starts at 5%",
        "more people meet it: now 25%", "the evidence is there, and people are asked: non-inferior", "ada: 1 of 2 approvals",
        "bob said yes: approved by 2 of 2", "what was approved holds no more, and people are asked again: its data are in doubt",
        "it serves, in the place of tab-v1: promoted", "ada took it back and barred it: it is rude",
        "it is barred no more: it was the network", "it serves again: came back when tab-v3 was rolled back",
    ]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [(a, b) for a, moves in MOVES.items() for b in sorted(moves)])
def test_every_move_there_is_has_words_of_its_own_and_its_reason(before: ReleaseState, after: ReleaseState) -> None:
    (said,) = words(step(before, after, why="the reason on record"))
    assert said.endswith(": the reason on record")
    assert after.value.lower() not in said.split(":")[0].lower().split(), "the state's own name explains nothing"


def test_an_alarm_is_told_when_it_was_raised_and_again_when_it_ended() -> None:
    alarm = Alarm(
        id="a", policy="tab", kind=AlarmKind.INCIDENT, release_id="r", generation=1, reason="40 % fail on all versions",
        raised_at=AT + timedelta(minutes=5), raised_by="system:watch", until=UNTIL[AlarmKind.INCIDENT],
        ended_at=AT + timedelta(minutes=20), ended_by="system:watch", end_reason="the limits are kept again",
    )  # fmt: skip
    steps = [step(S.QUEUED, S.CANARY), step(S.CANARY, S.CANARY, minutes=10)]
    told = story_of(release(), champion="tab-v1", steps=steps, alarms=[alarm])
    assert [one.words.partition(":")[0] for one in told[:-1]] == [
        "the first people meet it", "an alarm was raised (incident)", "more people meet it", "the alarm (incident) was ended by the watch",
    ]  # fmt: skip
    assert "it ends when the champion keeps its limits again" in told[1].sentence()


def test_it_ends_with_whom_it_met() -> None:
    rows = [
        Served(stage=stage, arm=arm, digest="v2", requests=1000, people=people)
        for stage, arm, people in (("canary-0", "candidate", 50), ("canary-1", "candidate", 300), ("canary-1", "champion", 900))
    ]
    last = story_of(release(), champion="tab-v1", steps=[], served=rows)[-1]
    assert last.words == "by now 2,000 of its answers reached people while it was judged, at most 300 of them in one stage"
    assert story_of(release(), champion="tab-v1", steps=[])[-1].words == "by now nobody met it while it was judged"
    assert "people judged it, not traffic" in story_of(release(config={"by_people": "too small"}), champion="tab-v1", steps=[])[-1].words
