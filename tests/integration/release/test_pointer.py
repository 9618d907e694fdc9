"""The deployment pointer on both databases: compare-and-swap, history, routes."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TypeVar

import pytest
from sqlalchemy import Engine, insert, text

from app.db.engine import reading, writing
from app.db.release.pointer import SqlRoutes, champion_moved_since, good_versions, read_history, read_pointer, swap_pointer, wanted_versions
from app.db.tables import quarantine, releases, versions
from app.domain.errors import StaleGeneration, Unavailable
from app.domain.release.releases import Pointer

AT = datetime(2026, 11, 21, 12, tzinfo=UTC)
FIRST = Pointer(policy="tab", digest="v1", generation=1, previous=None, anchor="v1", holdback=0.0, release_id=None, changed_at=AT)

Answer = TypeVar("Answer")


@pytest.fixture
def engine(engine: Engine) -> Engine:
    with writing(engine) as connection:
        swap_pointer(connection, FIRST, expected=None, action="bootstrap", actor="system:test", reason=None)
    return engine


def _move(engine: Engine, digest: str, *, expected: int, action: str = "promote") -> None:
    with writing(engine) as connection:
        before = read_pointer(connection, "tab", lock=True)
        assert before is not None
        after = replace(
            before, digest=digest, previous=before.digest, generation=expected + 1, changed_at=AT + timedelta(hours=expected), holdback=0.1
        )
        swap_pointer(connection, after, expected=expected, action=action, actor="user:ada", reason=None)


def test_a_swap_from_a_generation_that_is_gone_is_refused_and_changes_nothing(engine: Engine) -> None:
    _move(engine, "v2", expected=1)
    with pytest.raises(StaleGeneration, match="no longer at generation 1"):
        _move(engine, "v3", expected=1)
    with reading(engine) as connection:
        pointer = read_pointer(connection, "tab")
        assert pointer is not None
        assert (pointer.digest, pointer.previous, pointer.generation) == ("v2", "v1", 2)
        assert [row.digest for row in read_history(connection, "tab")] == ["v2", "v1"]


def test_previous_pointer_is_right_under_concurrent_promotions(engine: Engine) -> None:
    """MLflow's aliases got this wrong in 10 of 10 trials: two promotions both succeed there."""
    outcomes: list[str] = []

    def promote(digest: str) -> None:
        try:
            _move(engine, digest, expected=1)
            outcomes.append(digest)
        except StaleGeneration:
            outcomes.append("refused")

    threads = [threading.Thread(target=promote, args=(f"v{n}",)) for n in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("refused") == 7
    with reading(engine) as connection:
        pointer = read_pointer(connection, "tab")
    assert pointer is not None
    assert pointer.previous == "v1"
    assert pointer.digest in outcomes


def test_a_rollback_finds_the_newest_good_version_that_is_not_quarantined(engine: Engine) -> None:
    _move(engine, "v2", expected=1)
    _move(engine, "v3", expected=2)
    with writing(engine) as connection:
        connection.execute(insert(quarantine).values(policy="tab", digest="v2", reason="harm", since=AT))
    with reading(engine) as connection:
        assert good_versions(connection, "tab", besides=frozenset({"v3"})) == ["v1"]


def test_a_moved_holdback_is_not_a_moved_champion(engine: Engine) -> None:
    _move(engine, "v1", expected=1, action="holdback")
    with reading(engine) as connection:
        assert not champion_moved_since(connection, "tab", 1)
    _move(engine, "v2", expected=2)
    with reading(engine) as connection:
        assert champion_moved_since(connection, "tab", 1)


def _release(state: str, digest: str, *, stage: int | None, champion: str = "v1") -> dict[str, object]:
    return {
        "id": f"r-{digest}", "policy": "tab", "digest": digest, "version_name": digest, "state": state, "generation": 1, "stage": stage,
        "champion_digest": champion, "champion_generation": 1, "config": {"stages": [0.05, 0.25, 0.5]}, "created_at": AT, "changed_at": AT,
    }  # fmt: skip


def test_a_canary_takes_the_traffic_over_from_a_release_that_waits_for_people(engine: Engine) -> None:
    routes = SqlRoutes(engine, max_age_s=0.0)
    assert routes.route("tab").canary_digest is None
    with writing(engine) as connection:
        connection.execute(insert(releases), [_release("READY", "v2", stage=2)])
    waiting = routes.route("tab")
    assert (waiting.canary_digest, waiting.canary_stage, waiting.canary_share) == ("v2", 2, 0.5)
    with writing(engine) as connection:
        connection.execute(insert(releases), [_release("CANARY", "v3", stage=0)])
    route = routes.route("tab")
    assert (route.canary_digest, route.canary_release, route.canary_share) == ("v3", "r-v3", 0.05)
    with reading(engine) as connection:
        assert wanted_versions(connection) == {("tab", "v1"), ("tab", "v2"), ("tab", "v3")}


def test_a_canary_against_another_champion_gets_no_traffic(engine: Engine) -> None:
    """argo-rollouts keeps comparing v1.4 with v1.3 after v1.5 arrived."""
    with writing(engine) as connection:
        connection.execute(insert(releases), [_release("CANARY", "v2", stage=1, champion="v0")])
    assert SqlRoutes(engine).route("tab").canary_digest is None


def test_a_policy_without_a_deployment_says_what_to_start(engine: Engine) -> None:
    with pytest.raises(Unavailable, match="ratchet loop"):
        SqlRoutes(engine).route("composer")


def test_a_route_is_read_again_after_a_second_only(engine: Engine) -> None:
    routes = SqlRoutes(engine, max_age_s=3600.0)
    assert routes.route("tab").pointer.digest == "v1"
    _move(engine, "v2", expected=1)
    assert routes.route("tab").pointer.digest == "v1"
    assert SqlRoutes(engine).route("tab").pointer.digest == "v2"


@contextmanager
def _silent(engine: Engine, table: str) -> Iterator[None]:
    """A table that nobody may read, as while it is migrated."""
    with engine.connect() as connection:
        connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        yield


def _again(asked: Callable[[], Answer]) -> Answer:
    """The answer, once what was asked while it was silent is answered."""
    patient_until = time.monotonic() + 10
    while True:
        try:
            return asked()
        except Unavailable:
            assert time.monotonic() < patient_until, "it never answered"
            time.sleep(0.01)


def _refused(asked: Callable[[], object]) -> None:
    """It is not answered, and whoever asked goes on."""
    with pytest.raises(Unavailable, match="nothing within 1 s"):
        asked()


def test_a_silent_database_holds_up_who_asks_for_a_route_that_was_never_read_for_a_second_and_nobody_after(postgres_engine: Engine) -> None:
    with writing(postgres_engine) as connection:
        swap_pointer(connection, FIRST, expected=None, action="bootstrap", actor="system:test", reason=None)
    routes = SqlRoutes(postgres_engine)
    with ThreadPoolExecutor(1) as threads, _silent(postgres_engine, "deployment_pointer"):
        threads.submit(_refused, lambda: routes.route("tab")).result(4)
        threads.submit(_refused, lambda: routes.route("tab")).result(0.5)
    assert _again(lambda: routes.route("tab")).pointer.digest == "v1"


def test_a_silent_database_holds_up_who_pins_a_version_that_was_never_asked_for_for_a_second(postgres_engine: Engine) -> None:
    with writing(postgres_engine) as connection:
        swap_pointer(connection, FIRST, expected=None, action="bootstrap", actor="system:test", reason=None)
        version = {"policy": "tab", "digest": "v1", "name": "tab-1", "kind": "train", "step": 1, "base_model": "m", "licence": "Apache-2.0"}
        connection.execute(insert(versions).values(**version, tags={}, created_at=AT))
    routes = SqlRoutes(postgres_engine)
    with ThreadPoolExecutor(1) as threads, _silent(postgres_engine, "versions"):
        threads.submit(_refused, lambda: routes.knows("tab", "v1")).result(4)
        threads.submit(_refused, lambda: routes.knows("tab", "v1")).result(0.5)
        assert routes.route("tab").pointer.digest == "v1"
    assert [_again(lambda: routes.knows("tab", "v1")), routes.knows("tab", "v2"), routes.knows("tab", "v2")] == [True, False, False]
