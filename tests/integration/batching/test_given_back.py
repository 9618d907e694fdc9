"""What becomes of a batch's labels under every end that its cycle, its run and its candidate's release can have."""

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, insert, select

from app.db.engine import reading, writing
from app.db.learning.batches import SqlBatchStore
from app.db.learning.lineage import versions_that_saw
from app.db.tables import cycles, gate_results, labels, releases, returned_items, training_runs, turns
from app.domain.errors import Held
from app.domain.learning.batches import BatchManifest
from pipelines.batching import BatchingConfig, cut_batch
from tests.integration.batching.rows import NOON, add_turn, add_version

CANDIDATE = "candidate"


@pytest.fixture
def engine(engine: Engine) -> Engine:
    for number in range(4):
        add_turn(engine, f"turn-{number}", reward=number, actor=f"actor-{number}")
    return engine


def cut(engine: Engine, slot: int, **config: Any) -> BatchManifest:
    return cut_batch(
        SqlBatchStore(engine), policy="composer", slot=slot, champion="champion", anchor="champion",
        config=BatchingConfig(min_turns=2, **config), now=NOON + timedelta(minutes=60 + slot),
    )  # fmt: skip


def ended(engine: Engine, batch: BatchManifest, *, cycle: str, run: str, release: str | None = None, verdict: str | None = None) -> None:
    """The cycle of the batch's slot, its run, and the release and its gate where a candidate came of it."""
    with writing(engine) as connection:
        connection.execute(insert(cycles).values(
            policy="composer", slot=batch.slot, status=cycle, step="train", fencing_token=1, attempt=1, timings={}, batch_id=batch.id,
            started_at=NOON,
        ))  # fmt: skip
        connection.execute(insert(training_runs).values(
            id=f"run-{batch.slot}", policy="composer", batch_id=batch.id, parent="champion", status=run, metrics={}, config={},
            candidate=CANDIDATE if run == "succeeded" else None, started_at=NOON,
        ))  # fmt: skip
        if release is not None:
            connection.execute(insert(releases).values(_release(release)))
        if verdict is not None:
            connection.execute(insert(gate_results).values(
                release_id="release", gate="offline", digest=CANDIDATE, verdict=verdict, reason="", evidence={}, config_hash="c",
                evidence_hash="e", decided_at=NOON,
            ))  # fmt: skip


def _release(state: str) -> dict[str, Any]:
    row = {
        "id": "release", "policy": "composer", "digest": CANDIDATE, "version_name": "tiny-s1", "state": state, "generation": 1,
        "champion_digest": "champion", "champion_generation": 1, "initiator": "system:loop", "config": {}, "config_hash": "c",
        "created_at": NOON, "changed_at": NOON,
    }  # fmt: skip
    return {key: value for key, value in row.items() if key in releases.c}


def next_batch(engine: Engine, **config: Any) -> list[str]:
    """Who is in the next slot's batch; nobody where it is held."""
    try:
        return [item.inference_id for item in cut(engine, 1, **config).items]
    except Held:
        return []


FAULTS: list[dict[str, Any]] = [
    {"cycle": "held", "run": "held"},
    {"cycle": "failed", "run": "failed"},
    {"cycle": "failed", "run": "running"},
    {"cycle": "failed", "run": "succeeded"},
    {"cycle": "failed", "run": "succeeded", "release": "ABORTED"},
    {"cycle": "failed", "run": "succeeded", "release": "ABORTED", "verdict": "pass"},
]
JUDGED: list[dict[str, Any]] = [
    {"cycle": "running", "run": "running"},
    {"cycle": "failed", "run": "succeeded", "release": "OFFLINE"},
    {"cycle": "failed", "run": "succeeded", "release": "QUEUED"},
    {"cycle": "failed", "run": "succeeded", "release": "ABORTED", "verdict": "fail"},
    *({"cycle": "done", "run": "succeeded", "release": state} for state in (
        "CHAMPION", "REJECTED", "INCONCLUSIVE", "EXPIRED", "SUPERSEDED_BY_NEWER", "ABORTED", "ROLLED_BACK",
    )),
]  # fmt: skip


def words(end: dict[str, Any]) -> str:
    return "-".join(end.values())


@pytest.mark.parametrize("end", FAULTS, ids=words)
def test_labels_of_a_batch_that_a_fault_ended_are_in_the_next_one(engine: Engine, end: dict[str, Any]) -> None:
    first = cut(engine, 0)
    ended(engine, first, **end)
    second = cut(engine, 1)
    assert [item.inference_id for item in second.items] == [item.inference_id for item in first.items]
    assert second.id != first.id
    with SqlBatchStore(engine).cutting("composer") as session:
        assert session.existing(0) == first, "what a held run learned from can still be read"


@pytest.mark.parametrize("end", JUDGED, ids=words)
def test_labels_stay_used_up_while_the_candidate_is_on_its_way_and_after_it_was_judged(engine: Engine, end: dict[str, Any]) -> None:
    ended(engine, cut(engine, 0), **end)
    assert next_batch(engine) == []


def test_a_label_that_was_in_three_batches_held_for_a_fault_is_left_out_by_name(engine: Engine) -> None:
    for slot in range(3):
        ended(engine, cut(engine, slot), cycle="held", run="held")
    with pytest.raises(Held, match="4 held_again"):
        cut(engine, 3)
    for number in range(2):
        add_turn(engine, f"new-{number}", reward=number, minute=61)
    assert [item.inference_id for item in cut(engine, 4).items] == ["new-0", "new-1"]


def test_what_was_said_while_a_label_was_in_a_held_batch_is_asked_for(engine: Engine) -> None:
    ended(engine, cut(engine, 0), cycle="held", run="held")
    with SqlBatchStore(engine).cutting("composer") as session:
        assert session.give_back() == 4
        assert session.give_back() == 0
    with reading(engine) as connection:
        assert set(connection.execute(select(turns.c.needs_relabel)).scalars()) == {True}
        assert set(connection.execute(select(labels.c.batch_id)).scalars()) == {None}


def test_a_person_whose_turns_were_given_back_is_still_told_which_version_saw_them(engine: Engine) -> None:
    add_version(engine, CANDIDATE, parent="champion")
    ended(engine, cut(engine, 0), cycle="failed", run="succeeded", release="ABORTED")
    cut(engine, 1)
    with reading(engine) as connection:
        assert connection.execute(select(returned_items.c.actor).order_by(returned_items.c.actor)).scalars().first() == "actor-0"
        assert versions_that_saw(connection, "actor-0")["trained"] == [f"composer-{CANDIDATE}"]


def test_a_label_that_was_replaced_is_not_cut_beside_the_one_that_replaced_it(engine: Engine) -> None:
    with writing(engine) as connection:
        old = connection.execute(select(labels).where(labels.c.inference_id == "turn-1")).one()
        connection.execute(insert(labels).values({**old._mapping, "revision": 0, "current": False, "reward": -9.0}))
    assert [(item.inference_id, item.label_revision) for item in cut(engine, 0).items] == [(f"turn-{n}", 1) for n in range(4)]
