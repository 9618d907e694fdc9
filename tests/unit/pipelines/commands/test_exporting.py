"""Decisions as Vowpal Wabbit reads them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from app.domain.learning.decisions import Decision
from pipelines.commands.export import dsjson_record


def record(**changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "inference_id": "a", "policy": "composer", "version": "v2", "finished_at": datetime(2026, 11, 21, 12, 0, 0, 250_000, tzinfo=UTC),
        "arm": "champion", "stage": "canary-1.5", "probability": 0.75, "reward": 0.5, "exclusion": None,
        "segment": "language=python,task=edit",
    }  # fmt: skip
    return dsjson_record(Decision(**made | changes))


def test_a_canary_is_a_choice_of_two_the_chosen_one_first_with_its_probability() -> None:
    for arm, action in (("champion", 1), ("candidate", 2)):
        told = record(arm=arm)
        assert (told["_label_Action"], told["_labelIndex"], told["a"]) == (action, action - 1, [action, 3 - action])
        assert (told["p"], told["_label_probability"]) == ([0.75, 0.25], 0.75)
        assert told["c"]["_multi"] == [{"arm": {"champion": 1}}, {"arm": {"challenger": 1}}]
        assert told["c"]["policy"] == {"composer": 1}
        assert told["c"]["segment"] == {"language": "python", "task": "edit"}


def test_outside_of_an_experiment_there_was_nothing_to_choose() -> None:
    told = record(probability=1.0)
    assert (told["a"], told["p"], told["c"]["_multi"]) == ([1], [1.0], [{"arm": {"champion": 1}}])


@pytest.mark.parametrize(("exclusion", "skipped"), [(None, False), ("held_out", True)])
def test_what_may_not_be_learned_from_says_so_and_a_reward_is_a_cost(exclusion: str | None, skipped: bool) -> None:
    told = record(exclusion=exclusion)
    assert (told["_skipLearn"], told["_label_cost"], told["_original_label_cost"]) == (skipped, -0.5, -0.5)
    assert told["o"] == [{"v": -0.5, "EventId": "a", "ActionTaken": False}]
    assert told["Timestamp"] == "2026-11-21T12:00:00.2500000Z"
