"""One suite over the progress log in the database and its fake: the newest word on each task of each policy is what can be read."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import select

from app.db.engine import open_engine, reading
from app.db.progress import SqlProgressLog
from app.db.tables import progress
from app.domain.ports import ProgressLog
from tests.fakes.learning import FakeProgress

Newest = Callable[[str], tuple[float, float, dict[str, Any]]]
"""What was last said of a task: done, total, detail."""


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def log(request: pytest.FixtureRequest) -> Iterator[tuple[ProgressLog, Newest]]:
    if request.param == "memory":
        fake = FakeProgress()
        yield fake, lambda task: next(report[1:] for report in reversed(fake.reports) if report[0] == task)
        return
    engine = open_engine(request.getfixturevalue(f"{request.param}_url"))

    def stored(task: str) -> tuple[float, float, dict[str, Any]]:
        with reading(engine) as connection:
            row = connection.execute(select(progress).where(progress.c.policy == "composer", progress.c.task == task)).one()
        return row.done, row.total, row.detail

    yield SqlProgressLog(engine), stored
    engine.dispose()


def test_a_report_takes_the_place_of_the_one_before_it(log: tuple[ProgressLog, Newest]) -> None:
    told, newest = log
    told.report("composer", "training", 1, 4, {"phase": "anchor", "loss": 0.0})
    told.report("composer", "evaluation", 3, 3, {})
    told.report("composer", "training", 2.5, 4, {"phase": "update", "loss": -0.25, "run": "composer-0"})
    assert newest("training") == (2.5, 4, {"phase": "update", "loss": -0.25, "run": "composer-0"})
    assert newest("evaluation") == (3, 3, {})
