"""Drafting in numbers small enough to work out: which answers are taken, whom they are split by, and when a head is worth its cost."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from app.domain.errors import BadConfig
from app.domain.telemetry.turns import SamplingParams
from app.policy.decoding.draft_head import HeadDrafter
from app.policy.model import Policy
from pipelines.training.drafting import DraftingConfig
from pipelines.training.drafting.answers import LoggedAnswer, ReadAnswer, frequent, split, usable
from pipelines.training.drafting.costs import Always
from pipelines.training.drafting.distil import lessons_of
from pipelines.training.drafting.gate import Rate, Verdict, judge, rate
from pipelines.training.drafting.run import Room, _alternating  # pyright: ignore[reportPrivateUsage] - what reading sees of both sides
from tests.fakes.learning import FakeProgress

MODEL = cast(Policy, SimpleNamespace(context=8, vocabulary=10))
ANSWER = LoggedAnswer(unit="ada", prompt=(1, 2), completion=(3, 4, 5))


@pytest.mark.parametrize(
    ("taken", "left_out"),
    [
        ({"completion": (3, 4, 5)}, {"completion": (3, 4)}), ({"completion": (3,) * 6}, {"completion": (3,) * 7}),
        ({"completion": (9, 0, 5)}, {"completion": (10, 0, 5)}), ({"prompt": (0, 9)}, {"prompt": (-1, 9)}),
        ({"prompt": (1,)}, {"prompt": ()}),
    ],
    ids=["short", "long", "vocabulary", "negative", "no prompt"],
)  # fmt: skip
def test_an_answer_is_usable_up_to_each_of_its_bounds(taken: dict[str, Any], left_out: dict[str, Any]) -> None:
    good = replace(ANSWER, **taken)
    assert usable([good], MODEL, tokens=100) == [good]
    assert usable([replace(ANSWER, **left_out), ANSWER], MODEL, tokens=100) == [ANSWER], "and those behind it are taken"


def test_answers_are_taken_up_to_the_very_last_token_and_none_behind_the_first_that_is_too_much() -> None:
    long = replace(ANSWER, completion=(3, 4, 5, 6))
    assert usable([ANSWER, ANSWER], MODEL, tokens=6) == [ANSWER, ANSWER]
    assert usable([ANSWER, ANSWER], MODEL, tokens=5) == [ANSWER]
    assert usable([ANSWER, long, ANSWER], MODEL, tokens=6) == [ANSWER], "the newest first: a shorter old one does not jump the queue"


def test_nobody_and_everybody_can_be_held_out() -> None:
    answers = [replace(ANSWER, unit=f"person-{n}") for n in range(50)]
    assert split(answers, held_out=0.0) == (answers, [])
    assert split(answers, held_out=1.0) == ([], answers)
    assert 10 <= len(split(answers, held_out=0.5)[1]) <= 40


def test_of_equally_frequent_tokens_the_smaller_is_drafted_and_nothing_covers_nothing() -> None:
    assert frequent([replace(ANSWER, completion=(9, 9, 7, 7, 3))], most=1) == ([7], 0.4)
    assert frequent([replace(ANSWER, completion=(4,))], most=5) == ([4], 1.0)
    assert frequent([], most=5) == ([], 0.0)


def test_a_place_to_learn_from_has_two_tokens_of_the_same_answer_behind_it() -> None:
    read = [ReadAnswer(unit="a", tokens_T=torch.arange(n), states_TD=torch.full((n, 2), float(n))) for n in (3, 5)]
    lessons = lessons_of(read)
    assert lessons.starts_N.tolist() == [0, 3, 4, 5]
    assert lessons.tokens_T.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert lessons.teacher_TD[:, 0].tolist() == [3.0] * 3 + [5.0] * 5


def test_both_sides_are_read_in_their_shares_so_that_reading_may_end_anywhere() -> None:
    learnt, judged = ([replace(ANSWER, unit=f"{side}{n}") for n in range(count)] for side, count in (("l", 7), ("j", 2)))
    # one of each 9 / 2 ≈ 4 is judged
    assert [one.unit for one in _alternating(learnt, judged)] == ["j0", "l0", "l1", "l2", "j1", "l3", "l4", "l5", "l6"]
    assert [one.unit for one in _alternating(learnt[:1], judged)] == ["j0", "l0", "j1"]
    assert _alternating(learnt, []) == learnt
    assert _alternating([], judged) == judged


def test_a_measured_draft_is_as_long_as_it_is_told_and_no_longer_than_may_be() -> None:
    drafter = Always(3)
    assert (drafter.draft(5), drafter.draft(2), drafter.draft(0)) == ([0, 0, 0], [0, 0], [])


class Knowing:
    """Drafts the tokens that follow by one each, the first so many of a draft."""

    def __init__(self, right: int = 3) -> None:
        self.right = right

    def draft_all(self, states_ND: Tensor, tokens_N: Tensor, uniforms_NK: Tensor, sampling: Sequence[SamplingParams]) -> Tensor:
        assert uniforms_NK.tolist() == [[0.1, 0.2, 0.3], [0.2, 0.3, -1.0], [0.3, -1.0, -1.0]], "of the tokens to be drawn"
        assert [*sampling] == [SamplingParams(temperature=0.7)] * 3
        steps = torch.arange(1, uniforms_NK.shape[1] + 1)
        return torch.where(steps <= self.right, tokens_N[:, None] + steps, -7)


def read_answers(people: int, *, length: int = 4) -> list[ReadAnswer]:
    tokens, states, sampling = torch.arange(10, 10 + length), torch.zeros(length, 2), SamplingParams(temperature=0.7)
    return [ReadAnswer(unit=f"p{n}", tokens_T=tokens, states_TD=states, sampling=sampling) for n in range(people)]


def asked(costs: Mapping[int, float], *, people: int = 5, right: int = 3, **config: Any) -> Verdict:
    uniforms = [torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=torch.float64)] * people
    return judge(cast(HeadDrafter, Knowing(right)), read_answers(people), uniforms, costs, DraftingConfig(**config))


def test_what_a_head_is_worth_by_hand() -> None:
    # four tokens, three places: of three drafted 3, 2 and 1 are drawn before the answer ends, so 1 + (1 + 1 + 1)/3, 1 + 5/3, 1 + 6/3
    verdict = asked({1: 1.25, 2: 1.6, 3: 2.00004})
    assert verdict.passes
    assert verdict.figures == {
        "first_draft_acceptance": [1.0, 1.0], "tokens_per_verification": {"1": [2.0, 2.0], "2": [2.6667, 2.6667], "3": [3.0, 3.0]},
        "cost": {"1": 1.25, "2": 1.6, "3": 2.0}, "gain": {"1": [1.6, 1.6], "2": [1.6667, 1.6667], "3": [1.5, 1.5]}, "best_length": 2,
        "held_out_people": 5, "held_out_places": 15,
    }  # fmt: skip
    assert verdict.reason == (
        "100.0% of first drafts were drawn, 2.67 tokens per verification of 2 drafted at 1.60 times a step: gain 1.67, at least 1.67; "
        "above 1.05"
    )


def test_a_draft_counts_up_to_its_first_wrong_token() -> None:
    verdict = asked({1: 1.0, 2: 1.0, 3: 1.0}, right=1)
    assert verdict.figures["tokens_per_verification"] == {"1": [2.0, 2.0], "2": [2.0, 2.0], "3": [2.0, 2.0]}
    assert asked({1: 1.0, 2: 1.0, 3: 1.0}, right=0).figures["first_draft_acceptance"] == [0.0, 0.0]


def test_what_gains_exactly_what_it_must_is_not_kept_and_a_little_more_is() -> None:
    costs = {1: 1.0, 2: 4.0, 3: 4.0}
    refused = asked(costs, margin=1.0)
    assert not refused.passes
    assert refused.reason.endswith("gain 2.00, at least 2.00, and 2.00 is the least")
    assert asked(costs, margin=0.99).passes
    assert not asked({1: 1e-320, 2: 1e-320, 3: 1e-320}).passes, "a gain that is no number is no gain"


def test_fewer_people_than_the_least_judge_nothing() -> None:
    costs = {1: 1.0, 2: 1.0, 3: 1.0}
    four = asked(costs, people=4)
    assert (four.passes, four.figures) == (False, {"held_out_people": 4})
    assert four.reason == "4 held-out people answered for, 5 are the least: try again when more have asked"
    assert asked(costs, people=5).passes


def test_a_bound_is_wider_the_more_people_differ() -> None:
    # people with 1 of 2 and 3 of 4: mean 4/6; (1 − 4/3)² + (3 − 8/3)² = 2/9, times 2/1, root 2/3, over 6 places 1/9, times 2.128
    found = rate(["a", "b", "b"], [torch.tensor([1, 0]), torch.tensor([1, 1, 1]), torch.tensor([0])])
    assert found.mean == pytest.approx(2 / 3)
    assert found.lower == pytest.approx(2 / 3 - 2.128 / 9, abs=1e-4)
    assert Rate(mean=3.0, lower=1.5).over(1.5) == Rate(mean=2.0, lower=1.0)


@pytest.mark.parametrize("name", ["seconds", "steps", "tokens", "vocabulary", "inner", "positions", "learning_rate"])
def test_a_setting_of_nothing_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(BadConfig, match=f"drafting.{name} is 0: give a number above 0"):
        DraftingConfig(**{name: 0})
    DraftingConfig(**{name: 1})


@pytest.mark.parametrize(
    ("good", "bad", "why"),
    [
        ({"after_answers": 30}, {"after_answers": 29}, "a head is trained on 30 answers at least"),
        ({"held_out": 0.001}, {"held_out": 0.0}, "a share"),
        ({"held_out": 0.999}, {"held_out": 1.0}, "a share"), ({"margin": 0.0}, {"margin": -0.001}, "at least 0"),
        ({"least_people": 2}, {"least_people": 1}, "two people at least"),
    ],
    ids=["after_answers", "none held out", "all held out", "margin", "people"],
)  # fmt: skip
def test_a_setting_is_taken_up_to_its_bound(good: dict[str, Any], bad: dict[str, Any], why: str) -> None:
    DraftingConfig(**good)
    with pytest.raises(BadConfig, match=why):
        DraftingConfig(**bad)


class Hand:
    """A clock that stands where it is put."""

    def __init__(self) -> None:
        self.at = 1000.0

    def __call__(self) -> float:
        return self.at


def test_a_third_of_the_seconds_is_for_reading_and_how_far_it_is_is_told_every_two() -> None:
    hand, progress = Hand(), FakeProgress()
    go_on = Room(policy="tab", progress=progress, seconds=90.0, steps=100, monotonic=hand).reading(10)
    looks = ((0.0, 0, True), (1.99, 1, True), (2.0, 3, True), (3.9, 4, True), (4.0, 6, True), (29.9, 9, True), (30.0, 9, False))
    for seconds, done, goes_on in looks:
        hand.at = 1000.0 + seconds
        assert go_on(done) is goes_on
    told = [(task, pytest.approx(done), total, detail) for task, done, total, detail in progress.reports]
    assert told == [
        ("drafting", 0.1, 1.0, {"step": "reading", "answers": 3}), ("drafting", 0.2, 1.0, {"step": "reading", "answers": 6}),
        ("drafting", 0.3, 1.0, {"step": "reading", "answers": 9}),
    ]  # fmt: skip


def test_the_rest_is_for_training_by_the_clock_or_by_its_steps_whichever_is_further() -> None:
    hand, progress = Hand(), FakeProgress()
    room = Room(policy="tab", progress=progress, seconds=90.0, steps=100, monotonic=hand)
    left: list[float] = []
    for seconds, step in ((10.0, 1), (30.0, 2), (60.0, 10), (62.0, 80), (62.0, 100), (90.0, 20), (99.0, 21)):
        hand.at = 1000.0 + seconds
        left.append(room.left(step, 0.123456))
    assert left == pytest.approx([1.0, 1.0, 0.5, 28 / 60, 28 / 60, 0.0, 0.0])
    assert room.elapsed == 99.0
    # a third is over when training begins; 1 %, 2 %, then half of the seconds, 80 % of the steps, all of them at once, all of the seconds
    assert [done for _, done, _, _ in progress.reports] == pytest.approx([1 / 3 + 2 / 3 * part for part in (0.01, 0.02, 0.5, 0.8, 1, 1, 1)])
    assert {str(detail) for _, _, _, detail in progress.reports} == {"{'step': 'distilling', 'loss': 0.1235}"}
