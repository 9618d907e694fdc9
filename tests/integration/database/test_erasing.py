"""What is forgotten is gone, whoever is forgotten at the same moment and whatever was killed on the way."""

import re
import threading
from collections.abc import Collection
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, insert, select, update

from app.db.access.erasures import SqlEraser, announce
from app.db.engine import reading, writing
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.segment_rows import GIVEN_UP, intend
from app.db.ingestion.streams import SqlEffects
from app.db.tables import batch_items, exposures, inbox, labels, observations, outbox, retractions, segments, turns
from app.domain.errors import Unavailable
from app.domain.learning.batches import payload_of
from app.domain.telemetry.events import Erasure
from app.domain.telemetry.streams import Effect, EffectBatch, ErasureReport, JoinRules
from app.domain.telemetry.turns import TurnServed
from tests.fakes.served import applied, at, erasure, event_of, exposure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments, acting

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)


class Killed(BaseException):
    """The process is gone at this point: nothing after it runs, no clean-up either."""


class Place:
    """A deployment's database and segments, with the acts of the tests."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.segments = MemorySegments()

    def store(self, **acts: Any) -> SqlEffects:
        return SqlEffects(self.engine, rules=lambda: RULES, segments=acting(self.segments, **acts))

    def apply(self, *effects: Effect, offset: int = 0, received: float = 1, now: float = 1, store: SqlEffects | None = None) -> int:
        events = tuple(applied(effect, offset=offset + n, received=received) for n, effect in enumerate(effects))
        return (store or self.store()).apply(EffectBatch(events=events), now=at(now))

    def erase(self, actor: str, *, occurred: float = 100, **acts: Any) -> ErasureReport:
        eraser = SqlEraser(self.engine, self.engine, segments=acting(self.segments, **acts))
        return eraser.erase(erasure(actor, occurred=occurred), now=at(occurred))

    def words(self) -> set[str]:
        """Turns whose words lie in some segment."""
        return {id_ for segment in self.segments.written.values() for id_ in segment}

    def rows(self, *columns: Any) -> list[Any]:
        with reading(self.engine) as connection:
            return sorted(connection.execute(select(*columns)).all(), key=repr)


@pytest.fixture
def place(engine: Engine) -> Place:
    return Place(engine)


@pytest.fixture
def on_postgres(postgres_engine: Engine) -> Place:
    return Place(postgres_engine)


def killed_before_the_commit(place: Place, *served: TurnServed) -> None:
    """What is left where ingestion is killed after the segment's file was written and before the transaction that points into it."""
    name = intend(place.engine, "ratchet.events-0-00000000000000000000", now=at(1))
    place.segments.write(name, [payload_of(turn) for turn in served])


def test_a_segment_orphaned_by_a_kill_is_known_and_swept(place: Place) -> None:
    killed_before_the_commit(place, *(turn(f"t{n}", actor=f"person-{n}") for n in range(20)))
    assert len(place.words()) == 20
    assert place.rows(segments.c.state) == [("writing",)]
    place.store().expire_parked(now=at(1) + GIVEN_UP)
    assert len(place.words()) == 20  # it may be alive
    place.store().expire_parked(now=at(2) + GIVEN_UP)
    assert place.words() == set()
    assert place.rows(segments) == []


def test_what_a_kill_left_behind_neither_survives_an_erasure_nor_is_overwritten(place: Place) -> None:
    both = (turn("a"), turn("b", actor="bob"))
    killed_before_the_commit(place, *both)
    assert place.apply(*both) == 2  # the same records again, under a name of their own
    assert len(place.segments.written) == 2
    place.erase("alice")
    place.store().expire_parked(now=at(100) + GIVEN_UP)
    assert place.words() == {"b"}
    (name,) = place.segments.written
    assert place.rows(segments.c.name, segments.c.state, segments.c.rows) == [(name, "whole", 1)]


def test_a_writer_that_wakes_up_after_its_intent_was_swept_leaves_no_file(place: Place) -> None:
    def write_slowly(name: str, payloads: Any) -> int:
        place.store().expire_parked(now=at(2) + GIVEN_UP)
        return place.segments.write_sized(name, payloads)

    with pytest.raises(Exception, match="was swept: the batch is applied again"):
        place.apply(turn("a"), store=place.store(write_sized=write_slowly))
    assert place.words() == set()
    assert place.rows(turns.c.inference_id) == []
    assert place.apply(turn("a")) == 1


def test_a_failure_to_write_leaves_neither_file_nor_intent(place: Place) -> None:
    def full(name: str, payloads: Any) -> int:
        raise OSError("no space left")

    with pytest.raises(Unavailable, match="no space"):
        place.apply(turn("a"), store=place.store(write_sized=full))
    assert place.rows(segments) == []


def test_of_a_segment_written_ahead_only_the_turns_that_are_new_stay(place: Place) -> None:
    def meanwhile(name: str, payloads: Any) -> int:
        size = place.segments.write_sized(name, payloads)
        other = tuple(applied(t, offset=7) for t in (turn("a"),))
        place.store().apply(EffectBatch(events=other), now=at(1))
        return size

    assert place.apply(turn("a"), turn("b"), store=place.store(write_sized=meanwhile)) == 1
    place_of = dict(place.rows(turns.c.inference_id, turns.c.payload_segment))
    assert {name: set(held) for name, held in place.segments.written.items()} == {place_of["a"]: {"a"}, place_of["b"]: {"b"}}


def test_two_people_of_one_segment_erased_at_the_same_time_are_both_gone(on_postgres: Place) -> None:
    """Each copies the file without its person: were the later copy to count as it is, it would bring the other's words back."""
    place = on_postgres
    place.apply(turn("a"), turn("b", actor="bob"), turn("c", actor="carol"))
    both_have_read = threading.Barrier(2, timeout=1)

    def copy(name: str, to: str, *, without: Collection[str]) -> int:
        with suppress(threading.BrokenBarrierError):
            both_have_read.wait()
        return place.segments.copy(name, to, without=without)

    erasing = [threading.Thread(target=place.erase, args=(actor,), kwargs={"copy": copy}) for actor in ("alice", "bob")]
    for thread in erasing:
        thread.start()
    for thread in erasing:
        thread.join(300)
    assert place.words() == {"c"}
    assert place.rows(segments.c.rows) == [(1,)]


def test_a_turn_that_is_being_applied_while_its_person_is_erased_is_found(on_postgres: Place) -> None:
    """The transaction began without knowing of the erasure, which therefore waits for it; all that begin later know."""
    place, began, go_on = on_postgres, threading.Event(), threading.Event()

    class Slow(SqlEffects):
        def _forget_erased(self, connection: Any, fresh: Any, counts: Any) -> Any:
            began.set()
            assert go_on.wait(300)
            return super()._forget_erased(connection, fresh, counts)

    slow = Slow(place.engine, rules=lambda: RULES, segments=place.segments)
    applying = threading.Thread(target=place.apply, args=(turn("a"), observation("o", of="a")), kwargs={"store": slow})
    erasing = threading.Thread(target=place.erase, args=("alice",))
    applying.start()
    assert began.wait(300)
    erasing.start()
    erasing.join(0.3)
    assert erasing.is_alive()
    go_on.set()
    applying.join(300)
    erasing.join(300)
    assert place.words() == set()
    assert place.rows(turns.c.inference_id, turns.c.actor, turns.c.completion) == [("a", None, "")]
    assert place.rows(observations) == []


def test_what_was_accepted_before_the_announcement_and_applied_after_it_is_a_shell(place: Place) -> None:
    announce(place.engine, erasure("alice"))
    place.apply(turn("a"), observation("o", of="a"), exposure("a"), received=50, now=120)
    assert place.rows(turns.c.inference_id, turns.c.actor, turns.c.completion) == [("a", None, "")]
    assert place.rows(observations) == []
    assert place.words() == set()


def test_what_waited_on_a_gateway_s_disk_while_its_person_was_erased_comes_back_as_a_shell(place: Place) -> None:
    place.erase("alice", occurred=100)
    waited = turn("before", finished=99), exposure("before"), turn("at", finished=100), turn("since", finished=101)
    place.apply(*waited, received=200, now=200)
    assert place.rows(turns.c.inference_id, turns.c.actor, turns.c.erased_at) == [
        ("at", None, at(100)), ("before", None, at(100)), ("since", "alice", None),
    ]  # fmt: skip
    assert place.words() == {"since"}
    assert place.rows(exposures) == []


def test_a_time_that_a_client_says_makes_nothing_older_than_its_receipt(place: Place) -> None:
    place.erase("alice", occurred=100)
    history = turn("history", finished=50, source="import:old")
    place.apply(observation("said", of="x", occurred=50, actor="alice"), history, received=200, now=200)
    assert place.rows(observations.c.id) == [("said",)]
    assert place.rows(turns.c.inference_id, turns.c.actor) == [("history", "alice")]


def test_an_erasure_that_was_killed_is_finished_by_the_next_attempt(place: Place) -> None:
    place.apply(turn("a"), observation("o", of="a"), turn("b", actor="bob"))

    def die(*_: Any, **__: Any) -> int:
        raise Killed

    for act in ("turns", "copy", "drop"):
        with pytest.raises(Killed):
            place.erase("alice", occurred=100, **{act: die})
        assert "a" in place.words(), "the rows are gone, the file is not"
    assert place.erase("alice").already_erased
    place.store().expire_parked(now=at(101) + GIVEN_UP)  # the copy that was begun
    assert place.words() == {"b"}
    assert place.rows(segments.c.state, segments.c.rows) == [("whole", 1)]


def test_where_files_cannot_be_reached_the_rows_are_erased_and_the_next_attempt_does_the_rest(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"))

    def away(*_: Any, **__: Any) -> int:
        raise OSError("503 slow down")

    with pytest.raises(Unavailable, match=r"the rows are erased, and the store .*503 slow down.*erase again; `ratchet loop` does so"):
        place.erase("alice", copy=away)
    assert set(place.rows(turns.c.inference_id, turns.c.actor)) == {("a", None), ("b", "bob")}
    place.erase("alice")
    assert place.words() == {"b"}


def test_what_a_batch_leaves_in_files_is_done_later_where_it_cannot_be_done_now(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    def meanwhile(name: str, payloads: Any) -> int:
        announce(place.engine, erasure("alice"))
        return place.segments.write_sized(name, payloads)

    def away(*_: Any) -> None:
        raise OSError("503 slow down")

    place.apply(turn("a"), received=50, now=120, store=place.store(write_sized=meanwhile, drop=away))
    assert "event=segments_owing count=1" in caplog.text
    assert place.words() == {"a"}
    place.store().expire_parked(now=at(121))
    assert place.words() == set()


def test_a_commit_whose_answer_was_lost_keeps_its_file(place: Place) -> None:
    class Cut(SqlEffects):
        def _apply(self, connection: Connection, batch: Any, segment: Any, missing: Any, now: Any) -> Any:
            lost.append(super()._apply(connection, batch, segment, missing, now))
            connection.commit()
            raise Unavailable("the connection broke before the answer came")

    lost: list[Any] = []
    with pytest.raises(Unavailable, match="before the answer"):
        place.apply(turn("a"), store=Cut(place.engine, rules=lambda: RULES, segments=place.segments))
    assert lost
    ((segment,),) = place.rows(turns.c.payload_segment)
    assert place.segments.turns(segment) == ["a"]
    assert place.apply(turn("a")) == 0


@pytest.mark.parametrize("order", [(100, 50), (50, 100)], ids=["the older one later", "in order"])
def test_of_several_requests_to_forget_somebody_the_newest_counts(place: Place, order: tuple[float, float]) -> None:
    for occurred in order:
        announce(place.engine, erasure("alice", occurred=occurred))
    place.apply(turn("a"), received=70)
    assert place.rows(turns.c.actor) == [(None,)]


def test_what_others_said_about_a_persons_turns_and_episodes_goes_with_them(place: Place) -> None:
    place.apply(turn("a", episode="e"), turn("b", episode="f", actor="bob"))
    place.apply(observation("turn", of="a", actor="bob"), observation("episode", episode="e"), observation("other", episode="f"))
    place.erase("alice")
    assert place.rows(observations.c.id) == [("other",)]


def test_what_took_it_back_goes_too(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"), retraction("never came"))
    place.apply(observation("on-a", of="a", actor="bob"), observation("on-b", of="b"), observation("by-alice", of="b", actor="alice"))
    place.apply(retraction("on-a"), retraction("on-b"), retraction("by-alice"))
    place.erase("alice")
    assert place.rows(retractions.c.observation_id) == [("never came",), ("on-b",)]


def test_what_was_said_about_a_turn_before_it_came_goes_when_it_comes_too_late(place: Place) -> None:
    place.apply(observation("early", of="a", name="comment", value="words"), observation("episode", episode="episode-of-a"))
    place.erase("alice")
    place.apply(turn("a"), received=50, now=120)
    assert place.rows(observations) == []


def test_the_inbox_forgets_what_was_applied_by_name_and_what_was_not_by_looking_into_it(place: Place) -> None:
    about_bob = observation("on-bob", of="b", actor="alice", name="comment", value="words")
    waiting = turn("w", episode="w-e")
    on_waiting = observation("on-waiting", episode="w-e", name="comment", value="words")
    bob = turn("b", actor="bob")
    door = SqlInbox(place.engine, clock=lambda: at(1))
    door.append_blocking([event_of(effect) for effect in (turn("a"), about_bob, bob, waiting, on_waiting)])
    door.close()
    place.apply(turn("a"), about_bob, bob)
    with writing(place.engine) as connection:
        done = inbox.c.event_id.in_(["turn-a", "on-bob", "turn-b"])
        connection.execute(update(inbox).where(done).values(relayed_at=at(1), applied_at=at(1)))
    assert place.erase("alice").inbox_payloads == 4
    assert [row.event_id for row in place.rows(inbox.c.event_id, inbox.c.payload) if row.payload] == ["turn-b"]


def test_labels_batches_and_copies_in_the_outbox_forget_too(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"))
    row = {
        "revision": 1, "current": True, "policy": "composer", "version": "v1", "reward": 0.5, "terms": [], "rule_set": "r", "segment": "",
        "held_out": False, "finished_at": at(0), "labelled_at": at(60),
    }  # fmt: skip
    item = {"batch_id": "B", "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
    with writing(place.engine) as connection:
        for id_, actor in (("a", "alice"), ("b", "bob")):
            connection.execute(insert(labels), row | {"inference_id": id_, "actor": actor})
            connection.execute(insert(batch_items), item | {"inference_id": id_, "actor": actor})
            copy = {"event_id": id_, "topic": "ratchet.labels", "key": id_, "type": "x", "payload": b"words", "created_at": at(0)}
            connection.execute(insert(outbox), copy)
    place.erase("alice")
    assert place.rows(labels.c.inference_id) == [("b",)]
    assert place.rows(batch_items.c.inference_id, batch_items.c.actor) == [("a", None), ("b", "bob")]
    assert [r.key for r in place.rows(outbox.c.key, outbox.c.payload) if r.payload] == ["b"]


def test_an_intent_takes_a_name_of_its_own(place: Place) -> None:
    names = [intend(place.engine, "s-0-1", now=at(0) + timedelta(seconds=n)) for n in range(3)]
    names.append(intend(place.engine, names[0], now=at(4)))
    assert len(set(names)) == 4
    assert all(re.fullmatch(r"s-0-1\.[0-9a-f]{8}", name) for name in names), "a copy of a copy has no longer name"


def test_an_erasure_event_that_comes_with_other_records_is_applied_with_them(place: Place) -> None:
    place.apply(turn("a"), received=1)
    forget: Erasure = erasure("alice", occurred=50)
    place.apply(turn("late", finished=2), forget, turn("b", actor="bob"), received=40, offset=10, now=60)
    assert place.rows(turns.c.inference_id, turns.c.actor) == [("a", None), ("b", "bob"), ("late", None)]
    assert place.words() == {"b"}
