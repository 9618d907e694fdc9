"""When an engine asks for a version's draft head again, what it says of it, and what it measures of itself."""

import hashlib
import logging
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import pytest

from app.domain.errors import Unavailable
from app.domain.ports import Beside, EngineState
from app.policy.storage.heads import HeadRecord
from app.policy.storage.snapshot import HEAD, HEAD_RECORD, PARENT
from app.serving.heads import Heads
from app.serving.measures import gpu_memory, measured
from app.serving.residency import Residency
from app.serving.worker import Worker
from app.telemetry.instruments import Instruments

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Store:
    """Files beside versions; counts what is read."""

    def __init__(self, **files: bytes) -> None:
        self.files = files
        self.read: list[tuple[str, str]] = []
        self.fault: Exception | None = None

    def read_beside(self, digest: str, name: str) -> bytes | None:
        self.read.append((digest, name))
        if self.fault is not None:
            raise self.fault
        return self.files.get(f"{digest}_{name}")


class Serving:
    """A worker that notes which heads it was given."""

    def __init__(self) -> None:
        self.equipped: list[tuple[str, Any]] = []
        self.drafters: dict[str, dict[str, dict[str, Any]]] = {}

    def equip(self, digest: str, head: Any) -> None:
        self.equipped.append((digest, head))


def record(trained_for: str = "own", *, kept: bool = False, reason: str = "gains nothing") -> bytes:
    sha256 = hashlib.sha256(b"").hexdigest()
    made = HeadRecord(trained_for=trained_for, kept=kept, reason=reason, made_at=NOON, figures={}, sha256=sha256)
    return msgspec.json.encode(made)


def heads(store: Store, *, every_s: float = 1000.0) -> tuple[Heads, Serving]:
    worker = Serving()
    return Heads(cast("Worker", worker), cast("Beside", store), every_s=every_s), worker


def test_a_head_that_was_refused_is_taken_up_as_none_and_is_no_news_again() -> None:
    store = Store(**{f"own_{HEAD_RECORD}": record()})
    found, worker = heads(store, every_s=0.0)
    for _ in range(3):
        found.look("own")
    assert worker.equipped == [("own", None)]
    store.files[f"own_{HEAD_RECORD}"] = record(reason="another training")
    found.look("own")
    assert worker.equipped == [("own", None)] * 2


def test_the_store_is_asked_again_after_a_while_and_for_ancestors_once_alone() -> None:
    store = Store(**{f"child_{PARENT}": b"own\n", f"own_{HEAD_RECORD}": record()})
    found, worker = heads(store)
    found.look("child")
    assert [name for name, _ in store.read] == ["child", "child", "own"]
    assert worker.equipped == [("child", None)]
    found.look("child")
    assert len(store.read) == 3, "not yet"
    found.forget("child")
    found.look("child")
    assert len(store.read) == 6
    assert worker.equipped == [("child", None)] * 2, "it is loaded again, without a head"
    again, _ = heads(store, every_s=0.0)
    again.look("child")
    store.read.clear()
    again.look("child")
    assert store.read == [("child", HEAD_RECORD)]


def test_a_fault_is_logged_once_told_with_the_version_and_over_when_the_store_answers(caplog: pytest.LogCaptureFixture) -> None:
    store = Store(**{f"own_{HEAD_RECORD}": record(kept=True), f"own_{HEAD}": b"torn"})
    found, worker = heads(store, every_s=0.0)
    with caplog.at_level(logging.WARNING):
        found.look("own")
        found.look("own")
    assert caplog.text.count("draft head not used digest=own") == 1
    assert "is not what its record says" in found.said()["own"]["head"]["fault"]
    store.fault = Unavailable("away")
    with caplog.at_level(logging.WARNING):
        found.look("own")
    assert caplog.text.count("draft head not used digest=own") == 2
    assert found.said() == {"own": {"head": {"fault": "away"}}}
    store.fault = None
    store.files.clear()
    found.look("own")
    worker.drafters.clear()
    assert found.said() == {}
    store.fault = Unavailable("away")
    found.look("own")
    found.forget("own")
    worker.drafters.clear()
    assert found.said() == {}, "with the version went its fault"


def test_which_version_a_head_was_trained_for_is_told_where_it_drafts() -> None:
    found, worker = heads(Store())
    kept = msgspec.json.decode(record("parent", kept=True), type=HeadRecord)
    found._records |= {"own": kept, "other": kept, "refused": msgspec.structs.replace(kept, kept=False)}
    worker.drafters = {"own": {"head": {"drafted": 1}, "lookup": {}}, "other": {"lookup": {}}, "refused": {"head": {"drafted": 2}}}
    assert found.said() == {
        "own": {"head": {"drafted": 1, "trained_for": "parent"}, "lookup": {}}, "other": {"lookup": {}},
        "refused": {"head": {"drafted": 2}},
    }  # fmt: skip


# --- what it measures of itself ------------------------------------------------------------------------------------------------


class Silent:
    """Contact that was lost two seconds ago."""

    def seconds(self) -> dict[tuple[str, ...], float]:
        return {("eu", "database"): 2.0}


class Holding:
    """A worker and a residency, as far as they are measured."""

    load, capacity, sampled_tokens = 3, 80, 500
    contact = Silent()

    def states(self) -> dict[str, tuple[EngineState, str | None]]:
        return {
            "a": (EngineState.READY, None), "b": (EngineState.READY, "other log-probabilities"),
            "c": (EngineState.FAILED, "no memory"), "e": (EngineState.FAILED, "torn"),
            "d": (EngineState.READY, None),
        }  # fmt: skip


def test_an_engine_measures_its_load_its_versions_and_those_whose_numbers_are_doubted() -> None:
    own, held = Instruments("engine"), Holding()
    assert not own.ready
    assert measured(own, cast("Worker", held), cast("Residency", held)) is own
    assert own.ready
    text = own.text().decode()
    for line in (
        "ratchet_engine_load 3.0", "ratchet_engine_capacity 80.0", "ratchet_engine_sampled_tokens_total 500.0",
        'ratchet_engine_versions{state="ready"} 3.0', 'ratchet_engine_versions{state="failed"} 2.0',
        "ratchet_engine_mismatched_versions 1.0",
    ):  # fmt: skip
        assert line in text.splitlines()
    silent = next(line for line in text.splitlines() if line.startswith("ratchet_control_plane_silent_seconds{"))
    assert silent.endswith(" 2.0")
    assert isinstance(gpu_memory(), dict)
