"""Whose limits are burnt: an arm's where the other is healthier, nobody's where nothing is; each threshold from both sides."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pipelines.evaluation.config import GatesConfig
from pipelines.evaluation.counting.evidence import Evidence
from pipelines.evaluation.live.absolute_limits import SloCount
from pipelines.evaluation.live.slo import burnt, incident, keeps_limits, to_blame

CONFIG = GatesConfig()
SURE = -math.log(CONFIG.alpha_slo)
BURNT = SloCount(
    source="fault", arm="treated", limit=0.1, bad=30, total=100, people=3, log_e=SURE, beside=-math.log(0.05), calm=0.0,
)  # fmt: skip


def seen(*counts: SloCount) -> Evidence:
    return cast(Evidence, SimpleNamespace(slos=counts))


SENTENCE = "fault of the treated arm: 30 of 100 turns, the limit is 10.0%"


def test_a_limit_is_burnt_for_sure_by_several_people_and_while_it_lasts() -> None:
    assert burnt(CONFIG, seen(BURNT)) == [SENTENCE]
    for less in (replace(BURNT, log_e=SURE - 0.01), replace(BURNT, people=2), replace(BURNT, calm=3.0)):
        assert burnt(CONFIG, seen(less)) == []
    other = replace(BURNT, arm="control")
    assert [line.split(" arm")[0] for line in burnt(CONFIG, seen(other, BURNT))] == ["fault of the treated", "fault of the control"]


def test_a_version_is_to_blame_where_the_one_beside_it_is_healthier() -> None:
    assert to_blame(CONFIG, seen(BURNT), arm="treated") == [f"{SENTENCE}, and the version beside it is healthier"]
    assert to_blame(CONFIG, seen(BURNT), arm="control") == []
    assert to_blame(CONFIG, seen(replace(BURNT, beside=BURNT.beside - 0.01)), arm="treated") == []


def test_where_nothing_is_healthier_it_is_an_incident() -> None:
    alike = replace(BURNT, beside=BURNT.beside - 0.01)
    assert incident(CONFIG, seen(alike)) == f"{SENTENCE}, and no version is shown to be healthier: an incident, nothing moves"
    assert incident(CONFIG, seen(BURNT)) is None
    assert incident(CONFIG, seen(alike, replace(BURNT, source="latency"))) is None, "one of its limits says whose fault it is"
    assert incident(CONFIG, seen(replace(alike, arm="control"))) is None
    assert incident(CONFIG, seen()) is None


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({"calm": 3.0}, True), ({"calm": 2.99}, False), ({"calm": 3.0, "arm": "control"}, False), ({"calm": 3.0, "limit": 0.0}, False),
        ({"calm": 3.0, "limit": 1.0}, False),
    ],
)  # fmt: skip
def test_every_limit_that_can_be_kept_is_seen_to_be_kept(changes: dict[str, Any], keeps: bool) -> None:
    assert keeps_limits(seen(replace(BURNT, **changes))) is keeps
    if keeps:
        assert keeps_limits(seen(replace(BURNT, **changes), replace(BURNT, total=0))), "its turns say nothing about the other one"
        assert not keeps_limits(seen(replace(BURNT, **changes), BURNT))
