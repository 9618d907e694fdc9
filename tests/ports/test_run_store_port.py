"""One suite over the stored training runs and their fake."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from app.db.engine import open_engine
from app.db.learning.runs import SqlRunStore
from app.domain.ports import RunStore
from app.domain.release.versions import HoldReason, RunStatus, TrainingRun
from tests.fakes.learning import FakeRuns

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
RUN = TrainingRun(
    id="composer-0", policy="composer", batch_id="b" * 32, parent="p" * 64, status=RunStatus.RUNNING, config={"learning_rate": 1e-5},
    started_at=NOON,
)  # fmt: skip


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Iterator[RunStore]:
    if request.param == "memory":
        yield FakeRuns()
        return
    engine = open_engine(request.getfixturevalue(f"{request.param}_url"))
    yield SqlRunStore(engine)
    engine.dispose()


def test_a_run_is_what_was_last_put(store: RunStore) -> None:
    assert store.get(RUN.id) is None
    store.put(RUN)
    assert store.get(RUN.id) == RUN
    held = replace(
        RUN, status=RunStatus.HELD, hold_reason=HoldReason.LOW_ESS, message="too far off-policy", finished_at=NOON,
        metrics={"steps": [{"loss": 0.5}], "left_out": {"too_long": 1}, "entropy": 1.25},
    )  # fmt: skip
    store.put(held)
    assert store.get(RUN.id) == held
    made = replace(held, status=RunStatus.SUCCEEDED, hold_reason=None, message=None, candidate="c" * 64)
    store.put(made)
    assert store.get(RUN.id) == made


def test_a_tracker_belongs_to_the_candidate_that_it_led_to(store: RunStore) -> None:
    assert store.tracker("c" * 64) is None
    store.put_tracker("c" * 64, "composer", {"mean": 0.5, "segments": {"task=edit": [8.0, 0.25]}})
    store.put_tracker("d" * 64, "composer", {"mean": 0.0, "segments": {}})
    store.put_tracker("d" * 64, "composer", {"mean": 0.75, "segments": {}})
    assert store.tracker("c" * 64) == {"mean": 0.5, "segments": {"task=edit": [8.0, 0.25]}}
    assert store.tracker("d" * 64) == {"mean": 0.75, "segments": {}}


def test_a_batch_nobody_knows_has_no_terms(store: RunStore) -> None:
    assert store.term_means("unknown") == {}
    assert store.term_shares("unknown") == {}
