"""Who gets into a batch: segments in proportion, nobody more than the cap, and a count for everyone who does not."""

from collections import Counter
from typing import Any

import pytest

from app.domain.errors import BadConfig
from app.domain.learning.batches import LabelledTurn
from app.domain.learning.rewards import Exclusion
from pipelines.batching import BatchingConfig
from pipelines.batching.cut import choose, judge, pay_chains, seats
from tests.fakes.learning import NOON


def turn(number: int, **changes: Any) -> LabelledTurn:
    given: dict[str, Any] = {
        "inference_id": f"turn-{number:03d}", "episode_id": f"episode-{number:03d}", "version": "v1", "reward": 0.5, "label_revision": 1,
        "rule_set": "rules", "exclusion": None, "segment": "task=edit", "actor": f"actor-{number}", "held_out": False, "kind": "answer",
        "imported": False, "train_consent": True, "erased": False, "has_logprobs": True, "payload_segment": "s", "completion_tokens": 4,
        "finished_at": NOON, "labelled_at": NOON,
    }  # fmt: skip
    return LabelledTurn(**given | changes)


def chosen(turns: list[LabelledTurn], *, slot: int = 0, **limits: int) -> tuple[list[LabelledTurn], Counter[Exclusion]]:
    verdicts: dict[str, Exclusion | None] = {}
    found = choose(turns, verdicts, slot=slot, config=BatchingConfig(min_turns=1, **limits))  # type: ignore[arg-type]
    return found, Counter(verdict for verdict in verdicts.values() if verdict is not None)


def test_seats_are_given_by_largest_remainder() -> None:
    # 10 seats for 70 : 25 : 5 of 100 are exactly 7, 2.5 and 0.5: the whole parts take 9, the tenth goes to the first of equal remainders
    assert seats({"edit": 70, "chat": 25, "tool": 5}, 10) == {"edit": 7, "chat": 3, "tool": 0}
    assert seats({"edit": 2, "chat": 1}, 10) == {"edit": 2, "chat": 1}


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50, 99])
def test_all_seats_are_given_and_nobody_gets_more_than_there_are(total: int) -> None:
    sizes = {"a": 61, "b": 30, "c": 8, "d": 1}
    given = seats(sizes, total)
    assert sum(given.values()) == total
    assert all(0 <= given[name] <= sizes[name] for name in sizes)


def test_a_batch_is_stratified_by_segment_and_counts_the_rest() -> None:
    turns = [turn(n, segment="task=edit" if n % 4 else "task=chat") for n in range(80)]
    found, left_out = chosen(turns, max_turns=20)
    assert Counter(t.segment for t in found) == {"task=edit": 15, "task=chat": 5}
    assert left_out == {Exclusion.NOT_SAMPLED: 60}


def test_one_person_weighs_no_more_than_the_cap_and_people_without_a_name_are_not_one_person() -> None:
    turns = [turn(n, actor="loud") for n in range(30)] + [turn(30 + n, actor=None) for n in range(10)]
    found, left_out = chosen(turns, max_turns_per_actor=4)
    assert Counter(t.actor for t in found) == {"loud": 4, None: 10}
    assert left_out == {Exclusion.ACTOR_CAP: 26}


def test_the_choice_is_the_same_for_the_same_slot_and_another_for_the_next() -> None:
    turns = [turn(n) for n in range(60)]
    first, again, later = (chosen(turns, max_turns=10, slot=slot)[0] for slot in (0, 0, 1))
    assert first == again
    assert {t.inference_id for t in first} != {t.inference_id for t in later}


def test_limits_that_cannot_be_met_are_refused_by_name() -> None:
    with pytest.raises(BadConfig, match=r"batching\.min_turns is 0"):
        BatchingConfig(min_turns=0)
    with pytest.raises(BadConfig, match="max_turns_per_actor"):
        BatchingConfig(max_turns_per_actor=0)


def test_a_final_outcome_does_not_erase_what_the_turns_themselves_did() -> None:
    # two broken calls, a question, and an edit that stayed: the outcome 0.7 reaches all four, beside -1, -1 and -0.3 of their own
    own = [(-1.0, -1.0, False), (-1.0, -1.0, False), (-0.3, -0.3, False), (0.7, 0.0, True)]
    turns = [turn(n, episode_id="e", reward=reward, process=process, has_outcome=told) for n, (reward, process, told) in enumerate(own)]
    for how, expected in (("final", [-0.3, -0.3, 0.4, 0.7]), ("mean", [-0.3, -0.3, 0.4, 0.7]), ("own", [-1.0, -1.0, -0.3, 0.7])):
        paid = pay_chains(turns, turns, BatchingConfig(episode_reward=how))  # type: ignore[arg-type]
        assert [one.reward for one in paid] == pytest.approx(expected)


def test_what_was_said_after_an_answer_that_cannot_be_trained_on_still_is_what_came_of_the_chain() -> None:
    turns = [
        turn(0, episode_id="e", reward=0.1, process=0.1, has_outcome=False),
        turn(1, episode_id="e", reward=-1.0, exclusion="empty_completion", completion_tokens=0),
    ]
    assert [one.reward for one in pay_chains(turns[:1], turns, BatchingConfig())] == pytest.approx([-0.9])


def test_a_silent_turn_is_paid_by_its_chain_only_where_something_came_of_it() -> None:
    silent = turn(0, episode_id="e", reward=-0.05, process=-0.05, exclusion="no_signal", has_outcome=False)
    broken = turn(1, episode_id="e", reward=-1.0, process=-1.0, has_outcome=False)
    told = turn(2, episode_id="e", reward=1.0)
    judged = {"versions": ("v1",), "known": frozenset({"v1"}), "config": BatchingConfig()}
    assert judge([silent, broken], **judged)["turn-000"] is Exclusion.NO_SIGNAL
    assert judge([silent, broken, told], **judged)["turn-000"] is None
    assert pay_chains([silent], [silent, broken, told], BatchingConfig())[0].reward == pytest.approx(0.95)


def test_a_full_batch_takes_what_the_newest_version_sampled_first() -> None:
    turns = [turn(n, version="v2" if n % 2 else "v1") for n in range(40)]
    verdicts: dict[str, Exclusion | None] = {}
    found = choose(turns, verdicts, slot=0, config=BatchingConfig(min_turns=1, max_turns=24), versions=("v2", "v1"))
    assert Counter(t.version for t in found) == {"v2": 20, "v1": 4}
    assert Counter(verdicts.values()) == {Exclusion.NOT_SAMPLED: 16}
