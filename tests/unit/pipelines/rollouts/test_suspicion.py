"""Tasks that their own tries speak against."""

from dataclasses import replace

from app.domain.learning.rollouts import Outcome, Rollout
from pipelines.rollouts.suspicion import FEWEST, WINDOW, suspicious

TRY = Rollout(id="0", policy="p", taskset="t", task="a", task_hash="h", group="g", attempt=0, harness_hash="x", outcome=Outcome.FAILED)


def tries(count: int, start: int = 0, **changes: object) -> list[Rollout]:
    return [replace(TRY, id=f"{start + number:04d}", **changes) for number in range(count)]  # type: ignore[arg-type]


def held(history: list[Rollout], **since: str) -> dict[str, str]:
    return suspicious(history, since=since, most_flagged=0.5, most_faults=0.25)


def test_more_than_the_share_holds_a_task_and_the_share_itself_does_not() -> None:
    flagged = [*tries(FEWEST // 2 - 1, flags=("ends its process", "reward")), *tries(1, flags=("skips", "ends its process", "reward"))]
    assert held([*flagged, *tries(FEWEST // 2)]) == {}
    assert held([*flagged, *tries(1, flags=("reward",)), *tries(FEWEST // 2 - 1)]) == {
        "a": "5 of its last 8 transcripts are flagged (reward, ends its process): look at them"  # the two most frequent reasons
    }
    faulty = tries(3, outcome=Outcome.GRADER_FAILED)
    assert held([*tries(5), *faulty]) == {"a": "3 of its last 8 tries were failed by a part of ours (grader_failed): see the log"}


def test_few_tries_old_ones_and_those_that_a_person_looked_at_hold_nothing() -> None:
    flagged = tries(FEWEST, flags=("reward",))
    assert held(flagged[1:]) == {}
    assert held([*flagged, *tries(WINDOW - 4, start=100)]) == {}
    assert held(flagged, a="0003") == {}
    assert held([*flagged, *tries(FEWEST, start=100, flags=("reward",))], a="0099").keys() == {"a"}


def test_what_is_no_task_s_fault_holds_none() -> None:
    away = tries(FEWEST, outcome=Outcome.GATEWAY_FAILED)
    assert held([*away, *tries(FEWEST, start=50, task="b", outcome=Outcome.STALE)]) == {}
    assert held(tries(FEWEST, outcome=None, flags=("reward",))) == {}, "those that are at work are not over"


def test_a_task_s_newest_thirty_two_tries_count_from_the_eighth_on() -> None:
    flagged = tries(17, flags=("reward",))
    assert held([*flagged, *tries(15, start=100)]) == {"a": "17 of its last 32 transcripts are flagged (reward): look at them"}
    assert held([*flagged, *tries(16, start=100)]) == {}, "the oldest is the thirty-third"
    assert held(flagged[:7]) == {}
    assert held(flagged[:8]).keys() == {"a"}


def test_the_two_most_frequent_faults_are_told() -> None:
    faulty = [
        *tries(4, outcome=Outcome.SETUP_FAILED),
        *tries(3, start=10, outcome=Outcome.BOX_LOST),
        *tries(1, start=20, outcome=Outcome.GRADER_FAILED),
    ]
    assert held(faulty) == {"a": "8 of its last 8 tries were failed by a part of ours (setup_failed, box_lost): see the log"}
    assert held([*tries(6), *tries(2, start=10, outcome=Outcome.BOX_LOST)]) == {}, "the share itself"
