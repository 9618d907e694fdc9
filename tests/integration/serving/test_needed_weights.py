"""Which weights something still needs, and what versions are wanted for, on both databases."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import Engine, insert

from app.db.engine import reading, writing
from app.db.release.engines import SqlEngineLedger
from app.db.release.holdouts import close_holdout, insert_holdout
from app.db.release.needed_weights import SqlNeededWeights
from app.db.release.pins import insert_pin
from app.db.release.pointer import read_pointer, swap_pointer, versions_by_role
from app.db.release.versions import SqlVersions
from app.db.tables import batches, cycles, releases, training_runs
from app.domain.ports import EngineState
from app.domain.release.holdouts import Holdout
from app.domain.release.releases import Pointer
from app.domain.release.versions import Version, VersionKind
from tests.fakes.clock import FrozenClock

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
FIRST = Pointer(policy="tab", digest="base", generation=1, previous=None, anchor="base", holdback=0.0, release_id=None, changed_at=AT)


@pytest.fixture
def engine(engine: Engine) -> Engine:
    book = SqlVersions(engine)
    for number in range(30):
        digest = "base" if number == 0 else f"v{number}"
        kind = VersionKind.BASE if number == 0 else VersionKind.RL
        book.add(
            Version(
                digest=digest, policy="tab", name=f"n{number}", kind=kind, parent=None, step=number, run_id=None, base_model="m",
                licence="x", optimizer_uri=None, created_at=AT + timedelta(hours=number),
            )
        )  # fmt: skip
    with writing(engine) as connection:
        swap_pointer(connection, FIRST, expected=None, action="bootstrap", actor="system:test", reason=None)
    return engine


def move(engine: Engine, digest: str, *, expected: int, **changes: str) -> None:
    with writing(engine) as connection:
        before = read_pointer(connection, "tab", lock=True)
        assert before is not None
        after = replace(before, digest=digest, previous=before.digest, generation=expected + 1, **changes)
        swap_pointer(connection, after, expected=expected, action="promote", actor="user:ada", reason=None)


def candidate(engine: Engine, state: str, digest: str, *, champion: str, hours: int = 0) -> None:
    row = {
        "id": f"r-{digest}", "policy": "tab", "digest": digest, "version_name": digest, "state": state, "generation": 1, "stage": None,
        "champion_digest": champion, "champion_generation": 1, "config": {"stages": [0.05]}, "created_at": AT,
        "changed_at": AT + timedelta(hours=hours),
    }  # fmt: skip
    with writing(engine) as connection:
        connection.execute(insert(releases), [row])


def test_everything_that_something_points_at_or_works_on_is_needed_and_the_rest_is_not(engine: Engine) -> None:
    clock = FrozenClock()
    move(engine, "v3", expected=1)
    move(engine, "v5", expected=2, anchor="v4", holdback_digest="v2")
    candidate(engine, "QUEUED", "v6", champion="v7")
    candidate(engine, "REJECTED", "v8", champion="v5")
    SqlEngineLedger(engine, engine_id="e", address="http://e", clock=clock).report("tab", "v9", EngineState.READY)
    SqlEngineLedger(engine, engine_id="e", address="http://e", clock=clock).report("tab", "v10", EngineState.DROPPED)
    with writing(engine) as connection:
        connection.execute(
            insert(training_runs), [_run("one", "v11", "v12", status="running"), _run("two", "v13", "v14", status="succeeded")]
        )
        connection.execute(insert(cycles), [_cycle()])
        connection.execute(insert(batches), [_batch()])
    rows = SqlNeededWeights(engine, newest=2, clock=clock)
    pointed = {"v5", "v3", "v4", "v2", "base"}
    assert rows.needed() == pointed | {"v6", "v7"} | {"v9"} | {"v11", "v12"} | {"v15", "v16"} | {"v28", "v29"}
    assert rows.known() >= rows.needed()
    clock.advance(2 * 3600)
    assert "v9" not in rows.needed()


def test_states_stay_of_what_is_served_compared_released_pinned_or_gone_back_to(engine: Engine) -> None:
    for number in range(1, 7):
        move(engine, f"v{number}", expected=number, anchor="base")
    for number, state in enumerate(("TRAINED", "OFFLINE", "QUEUED", "CANARY", "READY", "APPROVED", "PROMOTING"), start=10):
        candidate(engine, state, f"v{number}", champion="v6")
    for number, state in enumerate(("REJECTED", "ABORTED", "INCONCLUSIVE", "SUPERSEDED_BY_NEWER"), start=20):
        candidate(engine, state, f"v{number}", champion="v6")
    with writing(engine) as connection:
        insert_pin(connection, "tab", "v1", actor="user:ada", reason="compared with every month", now=AT)
        insert_pin(connection, "other", "v2", actor="user:ada", reason="another policy's", now=AT)
    stays = {"v6", "base", "v1"} | {f"v{number}" for number in range(10, 17)}
    assert SqlNeededWeights(engine).states("tab", rollbacks=3) == stays | {"v5", "v4", "v3"}
    assert SqlNeededWeights(engine).states("tab", rollbacks=4) == stays | {"v5", "v4", "v3", "v2"}


def test_versions_are_wanted_for_a_role_each(engine: Engine) -> None:
    move(engine, "v1", expected=1)
    candidate(engine, "OFFLINE", "v3", champion="v1", hours=3)
    candidate(engine, "CANARY", "v2", champion="v1", hours=1)
    with reading(engine) as connection:
        assert versions_by_role(connection, "tab") == {"champion": ["v1"], "candidate": ["v2", "v3"], "previous": ["base"], "held": []}
        assert versions_by_role(connection, "nobody") == {"champion": [], "candidate": [], "previous": [], "held": []}
    long = Holdout(id="h", policy="tab", digest="v0", share=0.02, began_at=AT, ends_at=AT + timedelta(days=90), counted_until=AT)
    with writing(engine) as connection:
        insert_holdout(connection, long)
        assert versions_by_role(connection, "tab")["held"] == ["v0"]
        assert close_holdout(connection, "h", reason="over", now=AT)
        assert versions_by_role(connection, "tab")["held"] == []


def _run(name: str, parent: str, made: str, *, status: str) -> dict[str, object]:
    return {
        "id": name, "policy": "tab", "batch_id": f"b-{name}", "parent": parent, "status": status, "candidate": made, "metrics": {},
        "config": {}, "started_at": AT,
    }  # fmt: skip


def _cycle() -> dict[str, object]:
    return {
        "policy": "tab", "slot": 7, "status": "running", "step": "batch", "fencing_token": 1, "attempt": 1, "batch_id": "b-cut",
        "timings": {}, "started_at": AT,
    }  # fmt: skip


def _batch() -> dict[str, object]:
    return {
        "id": "b-cut", "policy": "tab", "slot": 7, "champion": "v15", "anchor": "v16", "rule_set": "r", "window_from": AT, "window_to": AT,
        "left_out": {}, "created_at": AT,
    }  # fmt: skip
