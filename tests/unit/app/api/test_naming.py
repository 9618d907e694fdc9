"""What other systems' scores mean here: names, flags and scales, corrections, ids."""

from datetime import UTC, datetime
from typing import Any

import pytest

from app.api.dialects.naming import Signal, drafts, inference_of, named_inference, observation_name, text_of
from app.api.telemetry.drafts import Desk
from app.api.telemetry.intake import Limits
from app.api.telemetry.redaction import Redactor
from app.domain.errors import BadRequest
from app.domain.policies import SignalConfig, SignalType
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import policy_config

AT = datetime(2026, 11, 24, tzinfo=UTC)


def desk(**signals: SignalConfig) -> Desk:
    policies = {"composer": policy_config(signals=signals)}
    return Desk(policies=policies, redactor=Redactor(lambda _kind: None), actor_salt="salt", clock=FrozenClock(), limits=Limits())


def signal(key: str, value: Any, **more: Any) -> Signal:
    return Signal(id="s1", key=key, value=value, inference_id="i1", occurred_at=AT, source="elsewhere", **more)


PLAIN, STARS = desk(), desk(rating=SignalConfig(type=SignalType.FLOAT, low=0, high=5))
OWN = desk(solved=SignalConfig(type=SignalType.BOOLEAN), speed=SignalConfig(type=SignalType.FLOAT))


def said(key: str, value: Any, at: Desk = PLAIN) -> tuple[str, Any]:
    (draft,) = drafts(signal(key, value), at)
    return draft.name, draft.value


@pytest.mark.parametrize(
    ("key", "value", "name", "meant"),
    [
        ("thumbs_up", 1, "rating", True), ("Thumbs-Up", 0, "rating", False), ("helpful", 1.0, "rating", True),
        ("like", "👎", "rating", False),
        ("user_score", "YES", "rating", True), ("rating", True, "rating", True), ("rating", "so so", "rating", "so so"),
        ("rating", 0.2, "rating", 0.2), ("undo", 1, "undo", True), ("regenerate", 0, "regenerate", False),
        ("task_success", "pass", "task_success", True),
        ("latency", 1, "latency", 1), ("correctness", 0.7, "correctness", 0.7), ("follow_up", "yes", "follow_up", "yes"),
    ],
)  # fmt: skip
def test_a_score_under_a_known_name_is_what_it_means(key: str, value: Any, name: str, meant: Any) -> None:
    found = said(key, value)
    assert found == (name, meant)
    assert type(found[1]) is type(meant), "a thumb is a boolean, a number a number"


def test_a_declared_signal_keeps_its_name_and_its_type() -> None:
    assert said("solved", 1, OWN) == ("solved", True)
    assert said("speed", 1, OWN) == ("speed", 1)
    assert observation_name("solved", {}) == "solved"
    assert said("stars", 4, desk(stars=SignalConfig(type=SignalType.FLOAT, low=0, high=5))) == ("stars", 4)


def test_a_number_under_a_thumbs_name_needs_a_scale_and_on_one_zero_is_zero() -> None:
    with pytest.raises(BadRequest, match=r"'user_rating' is 0.2, on which scale\? Declare") as refused:
        said("user_rating", 0.2)
    assert (refused.value.param, refused.value.code) == ("value", "scale")
    assert said("user_rating", 4.0, STARS) == ("rating", 4.0)
    assert said("user_rating", 0, STARS) == ("rating", 0)
    assert type(said("user_rating", 0, STARS)[1]) is int
    assert said("user_rating", "up", STARS) == ("rating", True)


def test_a_score_is_up_to_three_observations_with_ids_of_their_own() -> None:
    whole = signal("thumb", 1, comment="good", demonstration="better", actor="zoe", episode_id="e1", tags={"a": "b"})
    made = list(drafts(whole, PLAIN))
    assert [(one.id, one.name, one.value) for one in made] == [
        ("s1", "rating", True), ("s1:comment", "comment", "good"), ("s1:demonstration", "demonstration", "better"),
    ]  # fmt: skip
    assert {(one.inference_id, one.episode_id, one.occurred_at, one.source, one.actor) for one in made} == {
        ("i1", "e1", AT, "elsewhere", "zoe")
    }
    assert [one.tags for one in made] == [{"a": "b", "key": "thumb"}] * 3
    (own,) = drafts(signal("rating", 1), PLAIN)
    assert own.tags == {}, "under our own name nothing else was said"
    assert [one.name for one in drafts(signal("rating", None, comment="so"), PLAIN)] == ["comment"]
    with pytest.raises(BadRequest, match="neither a value nor a comment nor a correction"):
        list(drafts(signal("rating", None), PLAIN))


def test_a_correction_is_one_text() -> None:
    assert (text_of(None), text_of("so"), text_of({"answer": "so"})) == (None, "so", "so")
    for other in ({}, {"a": "so", "b": "or so"}, {"a": 1}, ["so"], 3):
        with pytest.raises(BadRequest, match="a correction is the text") as refused:
            text_of(other)
        assert refused.value.param == "correction"


def test_a_trace_is_the_inference_of_its_digits() -> None:
    digits, known = "0123456789abcdef0123456789ABCDEF", "01234567-89ab-cdef-0123-456789abcdef"
    assert (inference_of(digits), inference_of(f"tr-{digits}"), inference_of(None)) == (known, known, None)
    assert [inference_of(other) for other in ("i1", digits[:-1], f"{digits}0", f"x-{digits}")] == [
        "i1",
        digits[:-1],
        f"{digits}0",
        f"x-{digits}",
    ]
    assert (named_inference({"inference_id": "i1"}), named_inference({"inference_id": 1}), named_inference(["i1"])) == ("i1", None, None)
