"""A region is as far behind as that engine of it which is least behind."""

from datetime import datetime, timedelta
from typing import Any

import pytest

from app.domain.release.regions import REMEMBERED, regions_of
from tests.unit.app.db.rows import NOON


def engine(region: str, champions: int | None, seconds: float, *, reports: bool = True, seen_at: datetime = NOON) -> dict[str, Any]:
    lag = {"champions": champions, "seconds": seconds}
    return {"policy": "composer", "region": region, "reports": reports, "lag": lag, "versions": [{"seen_at": seen_at}]}


def summed(*engines: dict[str, Any]) -> list[tuple[str, int, int | None, float | None]]:
    return [(r["region"], r["engines"], r["champions"], r["seconds"]) for r in regions_of(engines, now=NOON)]


@pytest.mark.parametrize(
    ("engines", "told"),
    [
        ([engine("eu", 0, 2.0), engine("eu", 3, 40.0), engine("us", 1, 9.0)], [("eu", 2, 0, 2.0), ("us", 1, 1, 9.0)]),
        ([engine("eu", 0, 2.0, reports=False), engine("eu", 3, 40.0)], [("eu", 1, 3, 40.0)]),
        ([engine("eu", 2, 30.0, reports=False), engine("eu", 1, 20.0, reports=False)], [("eu", 0, 1, 20.0)]),
        ([engine("eu", None, 4.0), engine("eu", 5, 4.0)], [("eu", 2, 5, 4.0)]),
        ([engine("eu", 3, 2.0), engine("eu", 1, 9.0)], [("eu", 2, 1, 9.0)]),
        ([{**engine("eu", 0, 0.0), "lag": None}], [("eu", 1, None, None)]),
        ([engine("eu", 0, 0.0, reports=False, seen_at=NOON - REMEMBERED)], [("eu", 0, 0, 0.0)]),
        ([engine("eu", 0, 0.0, reports=False, seen_at=NOON - REMEMBERED - timedelta(microseconds=1))], []),
        ([], []),
    ],
)
def test_how_far_a_region_is(engines: list[dict[str, Any]], told: list[tuple[str, int, int | None, float | None]]) -> None:
    assert summed(*engines) == told


def test_when_a_region_was_last_heard_of_is_said() -> None:
    older = engine("eu", 0, 0.0, reports=False, seen_at=NOON - timedelta(hours=1))
    (region,) = regions_of([older, engine("eu", 0, 0.0, reports=False, seen_at=NOON - timedelta(minutes=2))], now=NOON)
    assert region["heard_at"] == (NOON - timedelta(minutes=2)).isoformat()
