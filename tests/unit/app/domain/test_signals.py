"""Observation names and the shapes of their values."""

from typing import Any

import pytest

from app.domain.errors import BadConfig, BadRequest
from app.domain.policies import Direction, Level, SignalConfig, SignalType
from app.domain.telemetry.signals import check_value

DECLARED = {"kept": SignalConfig(type=SignalType.FLOAT), "mood": SignalConfig(type=SignalType.TEXT, level=Level.EPISODE)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("edit_persistence", {"horizon_s": 0, "four_gram": 1, "no_revert": None, "length": 12, "ended": True}),
        ("edit_persistence", {"horizon_s": 900, "before": "", "inserted": "x", "after": "y", "start": 3, "replaced": 0}),
        ("edit_persistence", {"horizon_s": 0, "four_gram": 1, "length": 10**9}),
        ("follow_up", ""),
        ("rating", True),
        ("rating", -1),
        ("task_success", 0.5),
        ("tool_call", {"name": "f", "ok": False, "error": "timeout"}),
        ("latency", 0.2),
        ("latency", {"total_s": 3, "time_to_first_token_s": 0.1}),
        ("demonstration", "text"),
        ("kept", 3),
    ],
)
def test_accepted(name: str, value: Any) -> None:
    check_value(name, value, DECLARED, level=Level.TURN)


@pytest.mark.parametrize(
    ("name", "value", "param"),
    [
        ("edit_persistence", {"horizon_s": 0}, "value.four_gram"),
        ("edit_persistence", {"horizon_s": -1, "four_gram": 1}, "value.horizon_s"),
        ("edit_persistence", {"horizon_s": 1, "inserted": "x", "before": "y"}, "value.after"),
        ("edit_persistence", {"horizon_s": 0, "four_gram": 1, "length": 10**9 + 1}, "value.length"),
        ("edit_persistence", {"horizon_s": 0, "four_gram": 1, "length": 10**310}, "value.length"),
        ("edit_persistence", 1, "value"),
        ("rating", 1.5, "value"),
        ("rating", "good", "value"),
        ("undo", 1, "value"),
        ("task_success", 2, "value"),
        ("tool_call", {"name": "f"}, "value.ok"),
        ("latency", -1, "value"),
        ("kept", True, "value"),
        ("kept", "3", "value"),
        ("mood", "fine", "episode_id"),
        ("unknown", 1, "name"),
    ],
)
def test_refused_by_name(name: str, value: Any, param: str) -> None:
    with pytest.raises(BadRequest) as raised:
        check_value(name, value, DECLARED, level=Level.TURN)
    assert raised.value.param == param


STARS = SignalConfig(type=SignalType.FLOAT, low=0, high=5)


@pytest.mark.parametrize("value", [0, 4, 5.0, True])
def test_stars_are_accepted_where_ratings_are_declared_as_stars(value: Any) -> None:
    check_value("rating", value, {"rating": STARS}, level=Level.TURN)


@pytest.mark.parametrize(("name", "value"), [("rating", 6), ("rating", -1), ("rating", "good"), ("stars", 5.5)])
def test_what_lies_beyond_the_declared_scale_is_refused(name: str, value: Any) -> None:
    with pytest.raises(BadRequest) as raised:
        check_value(name, value, {"rating": STARS, "stars": STARS}, level=Level.TURN)
    assert raised.value.param == "value"


@pytest.mark.parametrize(
    ("signal", "value", "worth"),
    [
        (STARS, 0, -1.0), (STARS, 2.5, 0.0), (STARS, 4, 0.6), (STARS, 5, 1.0), (STARS, 9, 1.0),
        (SignalConfig(type=SignalType.FLOAT, low=0, high=1), 0.1, -0.8),
        (SignalConfig(type=SignalType.FLOAT, low=0, high=1, optimize=Direction.DOWN), 0.1, 0.8),
        (SignalConfig(type=SignalType.BOOLEAN), True, 1.0), (SignalConfig(type=SignalType.BOOLEAN, optimize=Direction.DOWN), True, -1.0),
        (SignalConfig(type=SignalType.FLOAT), 3.0, None), (SignalConfig(type=SignalType.TEXT), "fine", None),
    ],
)  # fmt: skip
def test_a_value_is_worth_what_its_place_on_the_scale_says(signal: SignalConfig, value: Any, worth: float | None) -> None:
    assert signal.reward(value) == (worth if worth is None else pytest.approx(worth))


@pytest.mark.parametrize(
    "ends", [{"low": 0.0}, {"high": 5.0}, {"low": 5.0, "high": 0.0}, {"type": SignalType.TEXT, "low": 0.0, "high": 1.0}]
)
def test_a_scale_that_makes_no_sense_is_refused(ends: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="low"):
        SignalConfig(**{"type": SignalType.FLOAT, **ends})
