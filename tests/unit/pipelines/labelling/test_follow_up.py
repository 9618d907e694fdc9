"""The follow-up classifier and its term, on messages that are in no training set."""

import time
from datetime import UTC, datetime

import pytest

from app.domain.learning.rewards import TurnFacts
from app.domain.telemetry.events import Observation
from app.domain.telemetry.turns import FinishReason
from pipelines.labelling.follow_up.classifier import Judgement, Mood, judge, model
from pipelines.labelling.follow_up.term import FollowUp

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
FACTS = TurnFacts(
    inference_id="i", episode_id="e", policy="p", version="v", kind="answer", source="gateway", started_at=NOW, finished_at=NOW, actor=None,
    segment="", finish_reason=FinishReason.STOP, train_consent=True, has_logprobs=True, prompt_tokens=1, completion_tokens=1, tool_calls=(),
    time_to_first_token_s=None, completion="def f(): ...", tags={}, erased=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "mood"),
    [
        ("Thank you, that solved it!", Mood.SATISFIED),
        ("perfect, now it runs", Mood.SATISFIED),
        ("That is not correct, the sum is off by one.", Mood.DISSATISFIED),
        ("It still doesn't compile: error: expected ';' before '}' token", Mood.DISSATISFIED),
        ("You forgot the second parameter again.", Mood.DISSATISFIED),
    ],
)
def test_clear_messages_are_read_as_what_they_are(text: str, mood: Mood) -> None:
    assert judge(text).mood is mood


@pytest.mark.parametrize(
    "text",
    [
        "Now add a docstring.",
        "Can you convert this to TypeScript?",
        "make it shorter",
        "How do I deploy this?",
        "Please translate it to German.",
    ],
)
def test_a_change_request_that_is_simply_the_next_step_is_not_punished(text: str) -> None:
    satisfaction = judge(text).satisfaction(confident=0.6)
    assert satisfaction is None or satisfaction >= 0.0


def test_a_punishment_needs_as_much_as_its_reader_asks_for_and_praise_does_not() -> None:
    def read(dissatisfied: float, satisfied: float) -> float | None:
        rest = 1.0 - dissatisfied - satisfied
        shares = {Mood.DISSATISFIED: dissatisfied, Mood.SATISFIED: satisfied, Mood.REFINEMENT: 0.0, Mood.NEUTRAL: rest}
        return Judgement(probabilities=shares, by="t", punish_from=0.7).satisfaction(confident=0.6)

    assert read(0.65, 0.1) is None
    assert read(0.75, 0.1) == pytest.approx(-0.65)
    assert read(0.1, 0.65) == pytest.approx(0.55)
    assert read(0.1, 0.1) == 0.0


def test_the_shipped_model_asks_for_a_punishment_to_be_right_nine_times_in_ten() -> None:
    assert 0.6 <= model().punish_from < 0.95
    assert judge("That is wrong.").punish_from == model().punish_from


def test_a_message_is_read_within_five_milliseconds() -> None:
    text = "It still doesn't work, I get the same error as before: TypeError. Can you look at the second function again? " * 3
    judge(text)
    taken: list[float] = []
    for _ in range(9):
        started = time.thread_time()
        judge(text, answer=text)
        taken.append(time.thread_time() - started)
    assert sorted(taken)[4] < 0.005


def test_probabilities_sum_to_one_and_an_uncertain_message_abstains() -> None:
    judgement = judge("hmm ok")
    assert sum(judgement.probabilities.values()) == pytest.approx(1.0)
    assert judgement.satisfaction(confident=1.0) is None


def test_a_long_hostile_message_is_read_in_bounded_time() -> None:
    text = "it " * 30_000 + "(a+)+ " * 5_000 + "!" * 10_000
    started = time.perf_counter()
    judge(text)
    assert time.perf_counter() - started < 2.0  # generous: a pattern that backtracks would take minutes


def observed(text: str, number: int) -> Observation:
    return Observation(id=f"o{number}", inference_id="i", name="follow_up", value=text, occurred_at=NOW, source="t")


def test_the_term_says_which_observations_it_read_and_why_it_abstains() -> None:
    term = FollowUp()
    silent = term.score(FACTS, [], weight=0.4)
    assert (silent.value, silent.abstained) == (None, "no_observation")
    spoken = term.score(FACTS, [observed("Thanks, works great!", 1), observed("No, that's wrong.", 2)], weight=0.4)
    assert spoken.value is not None
    assert spoken.value > 0.5  # earliest by default
    assert spoken.evidence == ("o1", "o2")
    assert spoken.detail["moods"] == ["satisfied", "dissatisfied"]
