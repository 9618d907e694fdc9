"""Which versions an engine takes up, keeps and drops, when, and what it tells the ledger: one round after the other, without threads."""

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from app.contact import Contact, Part
from app.domain.errors import BadInput, RatchetError, Unavailable
from app.domain.ports import EngineState, EngineWeights
from app.policy.model import Policy
from app.policy.precision import Precision
from app.serving.residency import COPIES, REPORT_EVERY_S, RETRY_S, ROUTED_S, Residency
from app.serving.worker import Worker
from tests.fakes.engines import MemoryEngineLedger

READY, FAILED, LOADING, DROPPED = EngineState.READY, EngineState.FAILED, EngineState.LOADING, EngineState.DROPPED


class Memory:
    """A worker that only keeps books."""

    def __init__(self) -> None:
        self.here: dict[str, bool] = {}
        """By digest, whether its log-probabilities are sent."""
        self.dropped: list[str] = []
        self.freed = 0
        self.is_dropping = False
        self.more = 0
        """Copies beside those that are here."""

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(self.here)

    @property
    def copies(self) -> int:
        return len(self.here) + self.more

    def holds(self, digest: str) -> bool:
        return digest in self.here

    def add(self, policy: Policy, *, logged: bool = True) -> float:
        self.here[policy.digest] = logged
        return 0.002

    def drop(self, digest: str) -> None:
        self.dropped.append(digest)
        if self.here.pop(digest, None) is not None:
            self.freed += 1


class Store:
    """Weights by name alone."""

    def __init__(self) -> None:
        self.faults: dict[str, Exception] = {}
        self.asked: list[tuple[str, frozenset[str]]] = []

    def path(self, digest: str) -> Path:
        return Path("/weights") / digest

    def way(self, digest: str, resident: Collection[str]) -> None:
        self.asked.append((digest, frozenset(resident)))
        if digest in self.faults:
            raise self.faults[digest]

    def read_beside(self, digest: str, name: str) -> None:
        return None


class Room:
    """An engine's loading thread that is told when to take its turn."""

    def __init__(self, **options: Any) -> None:
        self.worker, self.ledger, self.store, self.contact = Memory(), MemoryEngineLedger(), Store(), Contact()
        self.loaded: list[str] = []
        self.faults: dict[str, list[Exception]] = {}
        self.doubts: dict[str, str] = {}
        self.brought: list[float] = []
        self.freed = 0
        usual: dict[str, Any] = {"load": self._load, "check": lambda policy: self.doubts.get(policy.digest), "freed": self._free}
        self.residency = Residency(
            cast("Worker", self.worker), self.ledger, cast("EngineWeights", self.store), brought=self.brought.append, contact=self.contact,
            **usual | options,
        )  # fmt: skip
        self.residency.invariance = cast("Any", SimpleNamespace(holds=True))

    def _load(self, path: Path, *, digest: str) -> Policy:
        self.loaded.append(str(path))
        if self.faults.get(digest):
            raise self.faults[digest].pop(0)
        return cast("Policy", SimpleNamespace(digest=digest, precision=Precision.BF16))

    def _free(self) -> None:
        self.freed += 1

    def wants(self, *digests: str, policy: str = "composer") -> None:
        self.ledger.wants = {(policy, digest) for digest in digests}

    def turn(self) -> dict[str, tuple[EngineState, str | None]]:
        self.residency.turn()
        return self.residency.states()

    def age(self, digest: str, seconds: float) -> None:
        """As if it had been wanted so long ago."""
        self.residency._wanted_at[digest] -= seconds


def test_a_version_that_is_wanted_is_loaded_taken_up_and_told_with_what_it_cost() -> None:
    room = Room()
    room.wants("a")
    assert room.turn() == {"a": (READY, None)}
    assert (room.loaded, room.worker.here) == (["/weights/a"], {"a": True})
    assert room.ledger.history == [("a", LOADING), ("a", READY)]
    swap = room.residency.last_swap
    assert swap is not None
    assert (swap["digest"], swap["way"], swap["pause_ms"], "mismatch" in swap) == ("a", "load", 2.0, False)
    assert [round(seconds, 3) for seconds in room.brought] == [swap["took_s"]]
    assert room.turn() == {"a": (READY, None)}
    assert len(room.loaded) == 1
    assert room.store.asked == [("a", frozenset())]


def test_a_version_whose_numbers_are_doubted_serves_and_its_log_probabilities_do_not() -> None:
    room = Room()
    room.doubts["a"] = "off by 0.2"
    room.wants("a", "b")
    assert room.turn() == {"a": (READY, "off by 0.2"), "b": (READY, None)}
    assert room.worker.here == {"a": False, "b": True}
    assert room.ledger.states["composer", "a"] == (READY, "off by 0.2")


def test_an_engine_of_one_policy_takes_up_no_other_s_versions_and_a_version_of_two_is_told_for_both() -> None:
    room = Room(only=frozenset({"composer"}))
    room.ledger.wants = {("composer", "a"), ("tab", "b")}
    assert room.turn() == {"a": (READY, None)}
    both = Room()
    both.ledger.wants = {("composer", "a"), ("tab", "a")}
    both.turn()
    assert both.ledger.states.keys() == {("composer", "a"), ("tab", "a")}
    assert len(both.loaded) == 1


@pytest.mark.parametrize(("retry_s", "tries"), [(0.0, 2), (1000.0, 1)])
def test_a_version_that_failed_is_tried_again_after_a_while(retry_s: float, tries: int) -> None:
    room = Room(retry_s=retry_s)
    room.faults["a"] = [BadInput("torn")]
    room.wants("a")
    assert room.turn() == {"a": (FAILED, "torn")}
    assert room.worker.here == {}
    assert room.contact.silences() == {}
    found = room.turn()
    assert (len(room.loaded), found["a"][0]) == (tries, READY if tries == 2 else FAILED)


@pytest.mark.parametrize(
    "error", [AttributeError("'list' has no attribute 'get'"), ZeroDivisionError("modulo by zero"), Exception("untagged")]
)
@pytest.mark.parametrize("patched", [False, True])
def test_files_that_make_a_library_raise_anything_fail_their_version_alone(error: Exception, *, patched: bool) -> None:
    room = Room()
    if patched:
        room.store.faults["a"] = error
    room.faults["a"] = [error]
    room.wants("a", "champion")
    found = room.turn()
    assert (found["a"][0], found["champion"]) == (FAILED, (READY, None))
    assert (found["a"][1] or "").startswith(f"its files cannot be read here ({type(error).__name__}: {error}): ")


def test_how_long_an_engine_waits_unless_it_is_told_otherwise() -> None:
    assert (RETRY_S, ROUTED_S, REPORT_EVERY_S, COPIES) == (10.0, 2.0, 3.0, 3)
    for digest, age_s, tried in (("a", 9.0, 1), ("b", 10.0, 2)):
        room = Room()
        room.faults[digest] = [BadInput("torn")]
        room.wants(digest)
        room.turn()
        room.residency._failed_at[digest] -= age_s
        room.turn()
        assert len(room.loaded) == tried


def test_storage_that_is_away_is_noted_until_it_answers_or_nobody_needs_it() -> None:
    room = Room(retry_s=0.0)
    room.faults["a"] = [Unavailable("no route"), Unavailable("no route")]
    room.wants("a")
    room.turn()
    assert room.contact.silences()[Part.STORAGE].why == "no route"
    room.wants()
    room.turn()
    assert room.contact.silences() == {}, "an alarm about it has to end"
    room.wants("a")
    room.turn()
    assert Part.STORAGE in room.contact.silences()
    room.turn()
    assert (room.contact.silences(), room.worker.here) == ({}, {"a": True})


def test_a_version_is_loaded_whole_where_it_cannot_be_patched_and_not_from_a_storage_that_is_away() -> None:
    room = Room()
    room.store.faults["a"] = BadInput("no delta")
    room.wants("a")
    assert room.turn() == {"a": (READY, None)}
    away = Room()
    away.store.faults["a"] = Unavailable("no route")
    away.wants("a")
    assert away.turn() == {"a": (FAILED, "no route")}
    assert away.loaded == []


@pytest.mark.parametrize(("age_s", "dropped"), [(4.9, False), (5.0, True)])
def test_a_version_that_nobody_wants_is_kept_five_seconds(age_s: float, dropped: bool) -> None:
    room = Room()
    room.wants("a", "b")
    room.turn()
    room.wants("b")
    room.age("a", age_s)
    states = room.turn()
    assert (room.worker.dropped == ["a"], "a" in states) == (dropped, not dropped)
    assert room.ledger.history[-1] == (("a", DROPPED) if dropped else ("b", READY))
    assert room.freed == int(dropped)
    room.turn()
    assert room.freed == int(dropped), "once for each that left"


@pytest.mark.parametrize(
    ("age_s", "copies", "linger_s", "dropped"),
    [(1.9, 2, 5.0, False), (2.1, 2, 5.0, True), (2.1, 1, 5.0, False), (1.1, 2, 1.0, True), (4.9, 1, 5.0, False)],
)
def test_a_version_makes_room_for_another_as_soon_as_no_route_leads_to_it(
    age_s: float, copies: int, linger_s: float, dropped: bool
) -> None:
    room = Room(linger_s=linger_s)
    room.wants("a")
    room.turn()
    room.worker.more = copies - 1
    room.wants("b")
    room.age("a", age_s)
    room.turn()
    assert (room.worker.dropped == ["a"]) is dropped
    assert "b" in room.worker.here


@pytest.mark.parametrize(("dropping", "copies", "brought"), [(True, 3, False), (True, 2, True), (False, 3, True), (True, 4, False)])
def test_nothing_new_is_made_while_one_of_three_only_finishes_its_answers(dropping: bool, copies: int, brought: bool) -> None:
    room = Room()
    room.worker.is_dropping, room.worker.more = dropping, copies
    room.wants("a")
    room.turn()
    assert (room.loaded != []) is brought


def test_an_unchanged_state_is_repeated_every_few_seconds_and_a_dropped_one_told_once() -> None:
    told: list[tuple[str, EngineState]] = []
    room = Room(report_every_s=1000.0, linger_s=1e-9)
    report = room.ledger.report

    def note(policy: str, digest: str, state: EngineState, detail: str | None = None) -> None:
        told.append((digest, state))
        report(policy, digest, state, detail)

    room.ledger.report = note  # type: ignore[method-assign] - counts
    room.wants("a")
    for _ in range(3):
        room.turn()
    assert told == [("a", LOADING), ("a", READY)]
    room.residency._report_every_s = 0.0
    room.turn()
    assert told[2:] == [("a", READY)]
    room.wants()
    room.turn()
    room.turn()
    assert told[3:] == [("a", DROPPED)]
    room.wants("a")
    room.turn()
    assert told[4:] == [("a", LOADING), ("a", READY), ("a", READY)], "it comes back as if it had never been here"


def test_a_failed_version_that_nobody_wants_is_forgotten() -> None:
    room = Room(linger_s=0.0)
    room.faults["a"] = [BadInput("torn")]
    room.wants("a")
    room.turn()
    room.wants()
    assert room.turn() == {}
    assert room.ledger.history[-1] == ("a", DROPPED)


def test_a_ledger_that_does_not_answer_changes_nothing_and_an_engine_that_stops_makes_nothing() -> None:
    room = Room()
    room.wants("a")
    room.turn()
    room.ledger.fault = Unavailable("away")
    with pytest.raises(RatchetError):
        room.turn()
    assert room.residency.states() == {"a": (READY, None)}
    room.ledger.fault = None
    room.residency._stop.set()
    room.wants("a", "b")
    room.turn()
    assert "b" not in room.worker.here
