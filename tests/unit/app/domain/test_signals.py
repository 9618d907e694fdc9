"""Observation names and the shapes of their values."""

from typing import Any

import pytest

from app.domain.errors import BadRequest
from app.domain.policies import Level, SignalConfig, SignalType
from app.domain.signals import check_value

DECLARED = {"kept": SignalConfig(type=SignalType.FLOAT), "mood": SignalConfig(type=SignalType.TEXT, level=Level.EPISODE)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("edit_persistence", {"horizon_s": 0, "four_gram": 1, "no_revert": None, "length": 12, "ended": True}),
        ("edit_persistence", {"horizon_s": 900, "before": "", "inserted": "x", "after": "y", "start": 3, "replaced": 0}),
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
