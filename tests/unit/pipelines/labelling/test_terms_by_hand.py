"""What each built-in term pays and says, by hand and at its bounds."""

from datetime import timedelta
from typing import Any

import pytest

from app.domain.learning.rewards import TermScore
from app.domain.policies import SignalConfig, SignalType
from app.domain.telemetry.turns import FinishReason, ToolCall, ToolVerdict
from pipelines.labelling.follow_up.classifier import Judgement, Mood, Unread
from pipelines.labelling.follow_up.term import FollowUp
from pipelines.labelling.terms import (
    DeclaredSignal,
    EditPersistence,
    Finish,
    LatencyCost,
    Length,
    Practice,
    Rating,
    TaskSuccess,
    ToolCalls,
    is_question,
    length_penalty,
)
from tests.fakes.labelling import NOON, facts, observed


@pytest.mark.parametrize(
    ("reason", "value"),
    [
        (FinishReason.TIMEOUT, -0.5),
        (FinishReason.ABORTED, -0.3),
        (FinishReason.LENGTH, -0.1),
        (FinishReason.STOP, None),
        (FinishReason.ERROR, None),
    ],
)
def test_an_exit_has_the_price_that_the_default_rules_promise(reason: FinishReason, value: float | None) -> None:
    said = Finish().score(facts(finish_reason=reason), [], weight=2.0)
    assert (said.value, said.weight) == (value, 2.0)
    assert said.abstained == (None if value is not None else "ended_by_itself")


@pytest.mark.parametrize(("tokens", "value"), [(0, 0.0), (256, -2 * (2**0.5 - 1)), (768, -2.0), (2048, -4.0)])
def test_a_length_is_priced_in_units_of_256_tokens(tokens: int, value: float) -> None:
    # 768 tokens: x = 3, (sqrt(1 + 3) - 1)/.5 = 2; 2,048: x = 8, (3 - 1)/.5 = 4
    assert Length().score(facts(completion_tokens=tokens), [], weight=1.0).value == pytest.approx(value)


def test_a_length_is_priced_by_parameters_that_make_sense() -> None:
    turn = facts(completion_tokens=30)
    assert Length(k=2.0, q=0.0, scale_tokens=10).score(turn, [], weight=1.0).value == pytest.approx(-3.0)
    for wrong in ({"k": 0.0}, {"k": -1.0}, {"q": -0.1}, {"scale_tokens": 0.0}):
        with pytest.raises(ValueError, match="k and scale_tokens must be positive"):
            Length(**wrong)
    # bounded by 1/(k (q - 1)): k = 2, q = 3, x = 4: (1 - 9^-2)/(2 * 2)
    assert length_penalty(4.0, k=2.0, q=3.0) == pytest.approx((1 - 1 / 81) / 4)


@pytest.mark.parametrize(
    ("felt", "value"),
    [(9.0, 0.0), (10.0, 0.0), (15.0, -0.5), (20.0, -1.0), (40.0, -1.0), ({"total_s": 12.5, "time_to_first_token_s": 1.0}, -0.25)],
)
def test_waiting_costs_beyond_ten_seconds_and_no_more_than_one_at_twenty(felt: Any, value: float) -> None:
    said = LatencyCost().score(facts(), [observed("latency", 99.0, id_="old"), observed("latency", felt)], weight=1.0)
    assert said.value == pytest.approx(value)
    assert said.evidence == ("old", "o")
    assert said.detail == {"felt_s": felt["total_s"] if isinstance(felt, dict) else felt}


def test_waiting_is_what_the_service_measured_where_nobody_felt_it() -> None:
    said = LatencyCost(target_s=4.0).score(facts(finished_at=NOON + timedelta(seconds=5)), [], weight=1.0)
    assert (said.value, said.detail, said.evidence) == (-0.25, {"felt_s": 5.0}, ())


def test_a_survival_is_told_with_its_horizons_and_edits_and_shifted_where_the_rules_say_so() -> None:
    said = [
        observed("edit_persistence", {"horizon_s": 30, "four_gram": 1.0, "edit": "a"}, id_="p"),
        observed("edit_persistence", {"horizon_s": 600, "four_gram": 0.5, "edit": "a"}, id_="q"),
        observed("edit_persistence", {"horizon_s": 30, "four_gram": 0.5, "edit": "b"}, id_="r"),
    ]
    plain, shifted = (term.score(facts(), said, weight=1.0) for term in (EditPersistence(), EditPersistence(shift=-0.3)))
    # at 30 s (1 + .5)/2, at 600 s .5
    assert plain.value == pytest.approx(0.625)
    assert shifted.value == pytest.approx(0.325)
    assert shifted.detail == {"survival": 0.625, "horizons": {"30": 0.75, "600": 0.5}, "edits": 2}
    assert plain.evidence == ("p", "q", "r")


def test_edits_without_names_are_the_first_and_the_second_at_each_horizon() -> None:
    looks = [(30, 1.0), (30, 0.0), (600, 1.0), (600, 0.5), (600, 0.0)]
    said = [observed("edit_persistence", {"horizon_s": h, "four_gram": v}, id_=f"o{n}") for n, (h, v) in enumerate(looks)]
    found = EditPersistence().score(facts(), said, weight=1.0)
    assert found.detail == {"survival": 0.5, "horizons": {"30": 0.5, "600": 0.5}, "edits": 3}


def texts(before: str, inserted: str, after: str, **more: Any) -> dict[str, Any]:
    return {"horizon_s": 30, "before": before, "inserted": inserted, "after": after, **more}


def test_an_edit_of_texts_weighs_the_longer_of_what_it_replaced_and_what_it_put_there() -> None:
    gone, kept = texts("a" * 30, "bcdefghijk", ""), texts("", "z" * 10, "z" * 10)
    said = [observed("edit_persistence", value, id_=f"o{n}") for n, value in enumerate((gone, kept))]
    assert EditPersistence().score(facts(), said, weight=1.0).value == pytest.approx(10 / 40)


def test_one_edit_looked_at_twice_is_one_and_one_elsewhere_is_another() -> None:
    def edits(*values: dict[str, Any]) -> object:
        said = [observed("edit_persistence", value, id_=f"o{n}") for n, value in enumerate(values)]
        return EditPersistence().score(facts(), said, weight=1.0).detail["edits"]

    file = "one\ntwo\nthree\n"
    here = texts(file, "TWO\n", "one\nTWO\nthree\n", start=4, replaced=4)
    assert edits(here, here | {"horizon_s": 600}) == 1
    assert edits(here, here | {"start": 8, "replaced": 6}) == 2
    assert edits(here, here | {"replaced": 0}) == 2
    assert edits(texts("a", "b", "b"), texts("a", "c", "c")) == 2


def test_a_rating_is_a_thumb_or_its_place_on_the_declared_scale() -> None:
    def worth(value: Any, term: Rating) -> float | None:
        return term.score(facts(), [observed("rating", value)], weight=1.0).value

    stars = Rating(signals={"rating": SignalConfig(type=SignalType.FLOAT, low=1, high=5)})
    assert [worth(value, Rating()) for value in (True, False, 0.5, -1)] == [1.0, -1.0, 0.5, -1.0]
    assert [worth(value, stars) for value in (5, 3, 1)] == [1.0, 0.0, -1.0]
    silent = Rating().score(facts(), [observed("undo", True)], weight=1.0)
    assert (silent.value, silent.abstained) == (None, "no_observation")


def test_a_declared_signal_tells_what_was_said() -> None:
    term = DeclaredSignal(of="score", signals={"score": SignalConfig(type=SignalType.FLOAT, low=0, high=10)})
    said = term.score(facts(), [observed("score", 10.0, id_="a"), observed("other", 1.0, id_="b"), observed("score", 5.0)], weight=1.0)
    assert (said.name, said.value, said.evidence, said.detail) == ("signal:score", 0.0, ("a", "o"), {"said": [10.0, 5.0]})
    assert term.score(facts(), [], weight=1.0).abstained == "no_observation"


def test_broken_calls_are_counted() -> None:
    calls = tuple(
        ToolCall(id=str(n), name="t", arguments="{}", verdict=v) for n, v in enumerate((ToolVerdict.VALID, ToolVerdict.UNPARSABLE))
    )
    failed = [observed("tool_call", {"name": "t", "ok": ok}, id_=str(ok)) for ok in (True, False)]
    said = ToolCalls().score(facts(tool_calls=calls), failed, weight=1.0)
    assert (said.value, said.detail, said.evidence) == (-1.0, {"broken": 2}, ("True", "False"))
    assert ToolCalls(valid=0.5).score(facts(tool_calls=calls[:1]), [], weight=1.0).value == 0.5
    assert ToolCalls().score(facts(), [], weight=1.0).abstained == "no_tool_call"


@pytest.mark.parametrize(
    ("text", "asks"),
    [
        ("Which one?", True), ("Which one? \n", True), ("This one.", False), ("```x```?", False), ("So:\n    x = 1\nright?", False),
        ("So:\n   x = 1\nright?", True), ("", False),
    ],
)  # fmt: skip
def test_a_question_ends_as_one_and_has_no_code(text: str, asks: bool) -> None:
    assert is_question(text) is asks


def test_practice_says_what_the_task_did_under_its_own_name() -> None:
    said = [observed("task_success", 0.5)]
    practice, task = (term.score(facts(source="rollout:x"), said, weight=3.0) for term in (Practice(), TaskSuccess()))
    assert (practice.name, practice.value, practice.weight, practice.evidence) == ("practice", 0.5, 3.0, task.evidence)
    assert Practice().score(facts(), said, weight=1.0).abstained == "no_rollout"


# --- follow-ups -------------------------------------------------------------------------------------------------------------------


def read_as(satisfied: float, dissatisfied: float, *, punish_from: float = 0.0) -> Judgement:
    rest = 1.0 - satisfied - dissatisfied
    shares = {Mood.SATISFIED: satisfied, Mood.DISSATISFIED: dissatisfied, Mood.REFINEMENT: rest / 2, Mood.NEUTRAL: rest / 2}
    return Judgement(probabilities=shares, by="test", punish_from=punish_from)


@pytest.mark.parametrize(
    ("judgement", "confident", "value"),
    [
        (read_as(0.625, 0.125), 0.625, 0.5),
        (read_as(0.625, 0.125), 0.626, None),
        (read_as(0.125, 0.625), 0.625, -0.5),
        (read_as(0.125, 0.625, punish_from=0.625), 0.6, -0.5),
        (read_as(0.125, 0.625, punish_from=0.626), 0.6, None),
        (read_as(0.625, 0.125, punish_from=1.0), 0.6, 0.5),
        (read_as(0.125, 0.125), 0.75, 0.0),
        (read_as(0.125, 0.125), 0.76, None),
        (read_as(0.125, 0.25), 0.6, 0.0),
    ],
)
def test_a_reading_counts_from_its_confidence_on(judgement: Judgement, confident: float, value: float | None) -> None:
    assert judgement.satisfaction(confident=confident) == (None if value is None else pytest.approx(value))


def test_how_sure_a_reading_must_be_is_half_at_least_and_one_at_most() -> None:
    for confident in (0.5, 1.0):
        FollowUp(confident=confident)
    for confident in (0.499, 1.001):
        with pytest.raises(ValueError, match=r"from 0\.5 to 1"):
            FollowUp(confident=confident)


def asked(term: FollowUp, *texts: str) -> TermScore:
    return term.score(facts(), [observed("follow_up", text, id_=text[:2]) for text in texts], weight=1.0)


def test_a_reader_that_is_away_or_unsure_is_told_with_whom_it_was() -> None:
    def away(text: str, answer: str) -> Judgement:
        raise Unread("x" * 300)

    silent = asked(FollowUp(read=away), "hm")
    assert (silent.value, silent.abstained, silent.evidence, silent.detail) == (None, "unread", ("hm",), {"error": "x" * 200})
    unsure = asked(FollowUp(read=lambda text, answer: read_as(0.4, 0.3)), "hm")
    assert (unsure.value, unsure.abstained, unsure.evidence) == (None, "uncertain", ("hm",))
    assert unsure.detail == {"moods": ["satisfied"], "by": ["test"]}


def test_sixty_in_a_hundred_are_sure_enough_and_the_first_that_is_counts() -> None:
    readings = {"so": read_as(0.599, 0.2), "ok": read_as(0.6, 0.2), "no": read_as(0.0, 1.0)}
    term = FollowUp(read=lambda text, answer: readings[text])
    assert asked(term, "so").abstained == "uncertain"
    assert asked(term, "so", "ok", "no").value == pytest.approx(0.4)
    assert asked(term, "so", "no", "ok").value == pytest.approx(-1.0)
