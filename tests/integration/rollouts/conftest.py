"""What these tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine

from tests.integration.rollouts.practising import Answer, Open, Practice


@pytest.fixture
def practising(sqlite_engine: Engine, tmp_path: Path) -> Iterator[Open]:
    """Begins practices, which end with the test."""
    opened: list[Practice] = []

    def begin(answer: Answer) -> Practice:
        opened.append(Practice(sqlite_engine, tmp_path, answer))
        return opened[-1]

    yield begin
    for practice in opened:
        practice.close()
