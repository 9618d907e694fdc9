"""One suite over every BatchStore: what a cutter sees, what it leaves behind, and that a turn is in one batch at most."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, Protocol

import pytest
from sqlalchemy import Engine, insert
from sqlalchemy.exc import IntegrityError

from app.db.engine import open_engine, writing
from app.db.learning.batches import SqlBatchStore
from app.db.tables import cycles
from app.domain.errors import Refused
from app.domain.learning.batches import BatchItem, BatchManifest
from app.domain.ports import BatchStore
from tests.fakes.batching import MemoryBatchStore
from tests.integration.batching.rows import NOON, add_turn, add_version
from tests.unit.pipelines.batching.test_choosing import turn

LATER = NOON + timedelta(hours=1)


class Filled(Protocol):
    """A store that can be given versions and labels."""

    @property
    def store(self) -> BatchStore: ...

    def version(self, digest: str, parent: str | None = None) -> None: ...
    def label(self, name: str, *, version: str = "v2", minute: int = 0) -> None: ...
    def held(self, slot: int) -> None: ...


class InMemory:
    """The fake."""

    def __init__(self) -> None:
        self.store = MemoryBatchStore()

    def version(self, digest: str, parent: str | None = None) -> None:
        self.store.parents[digest] = parent

    def label(self, name: str, *, version: str = "v2", minute: int = 0) -> None:
        at = NOON + timedelta(minutes=minute)
        self.store.labels.append(replace(turn(0), inference_id=name, version=version, finished_at=at, labelled_at=at))

    def held(self, slot: int) -> None:
        self.store.ended.add(slot)


class InDatabase:
    """The real one."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.store = SqlBatchStore(engine)

    def version(self, digest: str, parent: str | None = None) -> None:
        add_version(self.engine, digest, parent=parent)

    def label(self, name: str, *, version: str = "v2", minute: int = 0) -> None:
        add_turn(self.engine, name, version=version, minute=minute)

    def held(self, slot: int) -> None:
        row = {"policy": "composer", "slot": slot, "status": "held", "step": "batch", "fencing_token": 1, "attempt": 1, "timings": {}}
        with writing(self.engine) as connection:
            connection.execute(insert(cycles).values(**row, started_at=NOON))


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def filled(request: pytest.FixtureRequest) -> Iterator[Filled]:
    if request.param == "memory":
        yield InMemory()
        return
    engine = open_engine(request.getfixturevalue(f"{request.param}_url"))
    yield InDatabase(engine)
    engine.dispose()


def manifest(*names: str, slot: int = 0, **changes: Any) -> BatchManifest:
    items = tuple(
        BatchItem(
            inference_id=name, episode_id=f"episode-of-{name}", reward=0.5, label_revision=1, segment="task=edit", actor=None, version="v2",
            payload_segment="segment-1",
        )
        for name in names
    )  # fmt: skip
    given: dict[str, Any] = {
        "id": f"batch-{slot}", "policy": "composer", "slot": slot, "champion": "v2", "anchor": "v1", "rule_set": "rules-1",
        "window_from": NOON, "window_to": LATER, "items": items, "left_out": {"no_consent": 2},
    }  # fmt: skip
    return BatchManifest(**given | changes)


def seen(filled: Filled, *versions: str, since: int | None = None, until: int = 60) -> list[str]:
    """Names of the unused labels, in minutes after noon."""
    with filled.store.cutting("composer") as session:
        start = None if since is None else NOON + timedelta(minutes=since)
        labels = session.unused_labels(versions=versions, since=start, until=NOON + timedelta(minutes=until))
    return [label.inference_id for label in labels]


def test_the_lineage_ends_where_no_parent_is_known(filled: Filled) -> None:
    for digest, parent in (("v0", None), ("v1", "v0"), ("v2", "v1")):
        filled.version(digest, parent)
    with filled.store.cutting("composer") as session:
        assert session.lineage("v2", 0) == ("v2",)
        assert session.lineage("v2", 1) == ("v2", "v1")
        assert session.lineage("v2", 9) == ("v2", "v1", "v0")
        assert session.known_versions() == {"v0", "v1", "v2"}


def test_labels_of_the_asked_versions_are_seen_whenever_made_and_others_since_the_last_window(filled: Filled) -> None:
    filled.label("b", minute=1)
    filled.label("a", minute=30)
    filled.label("of-another-old", version="v1", minute=5)
    filled.label("of-another-new", version="v1", minute=20)
    filled.label("too-late", minute=61)
    assert seen(filled, "v2", since=10) == ["a", "b", "of-another-new"]
    assert seen(filled, "v2", "v1", since=10) == ["a", "b", "of-another-new", "of-another-old"]
    assert seen(filled, "v2") == ["a", "b", "of-another-new", "of-another-old"]


def test_a_saved_batch_is_the_slots_and_uses_its_labels_up(filled: Filled) -> None:
    for name in ("a", "b", "c"):
        filled.label(name)
    with filled.store.cutting("composer") as session:
        assert session.existing(0) is None
        assert session.last_window_end() is None
        session.save(manifest("a", "b"))
    with filled.store.cutting("composer") as session:
        assert session.existing(0) == manifest("a", "b")
        assert session.existing(1) is None
        assert session.last_window_end() == LATER
    with filled.store.cutting("tab") as session:
        assert session.existing(0) is None
    assert seen(filled, "v2") == ["c"]


def test_a_block_that_fails_leaves_nothing(filled: Filled) -> None:
    filled.label("a")
    with pytest.raises(ZeroDivisionError), filled.store.cutting("composer") as session:
        session.save(manifest("a"))
        raise ZeroDivisionError
    with filled.store.cutting("composer") as session:
        assert session.existing(0) is None
    assert seen(filled, "v2") == ["a"]


def test_a_turn_that_is_in_a_batch_is_refused_by_the_next(filled: Filled) -> None:
    for name in ("a", "b"):
        filled.label(name)
    with filled.store.cutting("composer") as session:
        session.save(manifest("a"))
    with pytest.raises((IntegrityError, Refused)), filled.store.cutting("composer") as session:
        session.save(manifest("a", "b", slot=1))
    with filled.store.cutting("composer") as session:
        assert session.existing(1) is None


def test_a_held_batch_gives_its_labels_back_once_and_stays_readable(filled: Filled) -> None:
    for name in ("a", "b"):
        filled.label(name)
    with filled.store.cutting("composer") as session:
        session.save(manifest("a", "b"))
        assert session.give_back() == 0, "its cycle still runs"
    filled.held(0)
    with filled.store.cutting("composer") as session:
        assert session.give_back() == 2
        assert session.give_back() == 0
        labels = session.unused_labels(versions=("v2",), since=None, until=LATER)
        assert [(label.inference_id, label.tries) for label in labels] == [("a", 1), ("b", 1)]
        assert session.existing(0) == manifest("a", "b")
        session.save(manifest("a", slot=1))
    assert seen(filled, "v2") == ["b"]
