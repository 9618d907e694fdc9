"""What forgetting somebody counts, says and leaves behind, thing by thing; on SQLite alone."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine, insert, select, update

from app.db.access.erasures import PAGE, SqlEraser, announce, erased_at
from app.db.engine import reading, writing
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.turn_counts import count_labelled, read_turn_counts, recount
from app.db.release import audit
from app.db.tables import (
    batch_items,
    batches,
    dead_letters,
    inbox,
    labels,
    observations,
    outbox,
    returned_items,
    training_runs,
    turns,
    versions,
)
from app.db.tables import erasures as erasures_table
from app.domain.errors import Unavailable
from tests.fakes.served import at, erasure, event_of, exposure, observation, turn
from tests.integration.database.test_erasing import Place

LABEL = {
    "inference_id": "a", "revision": 1, "current": True, "policy": "composer", "version": "v1", "reward": 0.5, "terms": [],
    "rule_set": "r", "segment": "", "held_out": False, "finished_at": at(0), "labelled_at": at(60), "actor": "alice",
}  # fmt: skip


@pytest.fixture
def place(sqlite_engine: Engine) -> Place:
    return Place(sqlite_engine)


def letter(number: int, payload: bytes) -> dict[str, Any]:
    return {
        "topic": "t", "partition": 0, "offset": number, "reason": "odd", "headers": {}, "payload": payload, "first_seen_at": at(0),
        "last_seen_at": at(0),
    }  # fmt: skip


def buried(place: Place, *rows: dict[str, Any]) -> None:
    with writing(place.engine) as connection:
        connection.execute(insert(dead_letters), rows)


def test_a_report_counts_everything_once_and_what_came_since_again(place: Place) -> None:
    said = observation("o1", of="a"), observation("o2", episode="e"), observation("o3", of="x", actor="alice"), observation("o4", of="x")
    place.apply(turn("a", episode="e"), turn("b", episode="e"), turn("x", actor="bob"), *said, exposure("a"))
    door = SqlInbox(place.engine, clock=lambda: at(1))
    door.append_blocking([event_of(turn("a", episode="e"))])
    door.close()
    buried(place, letter(1, b'{"actor": "alice"}'))
    with writing(place.engine) as connection:
        connection.execute(insert(labels), LABEL)
    heard = list[tuple[str, Any]]()

    def forget() -> Any:
        eraser = SqlEraser(place.engine, place.engine, segments=place.segments, note=lambda actor, moment: heard.append((actor, moment)))
        return eraser.erase(erasure("alice", occurred=100), now=at(200))

    report = forget()
    assert (report.turns, report.observations, report.labels, report.exposures) == (2, 3, 1, 1)
    assert (report.inbox_payloads, report.dead_letters, report.segments, report.trained_versions) == (1, 1, 1, ())
    assert (report.actor, report.already_erased, heard) == ("alice", False, [("alice", at(100))])
    place.apply(observation("o5", of="x", actor="alice"), received=300, now=300)
    again = forget()
    assert (again.turns, again.observations, again.labels, again.already_erased) == (0, 1, 0, True)
    ((stored,),) = place.rows(erasures_table.c.report)
    assert stored == {
        "turns": 2, "observations": 4, "labels": 1, "exposures": 1, "inbox_payloads": 1, "dead_letters": 1, "segments": 1,
        "trained_versions": [],
    }  # fmt: skip
    with reading(place.engine) as connection:
        told = [entry for entry in audit.entries(connection, subject="alice") if entry.action == "erase"]
    assert {entry.actor for entry in told} == {"user:tester"}
    assert sorted((entry.detail["turns"], entry.detail["again"]) for entry in told) == [(0, True), (2, False)]


def test_a_shell_is_due_at_once_and_whatever_was_read_of_it_is_stale(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"))
    with writing(place.engine) as connection:
        connection.execute(update(turns).values(labelled_at=at(61), needs_relabel=True))
        connection.execute(insert(labels), LABEL)
        count_labelled(connection, [("composer", "v1")] * 2)
    before = {row.inference_id: row.evidence for row in place.rows(turns.c.inference_id, turns.c.evidence)}
    place.erase("alice", occurred=100)
    shell, other = place.rows(
        turns.c.inference_id, turns.c.erased_at, turns.c.labelled_at, turns.c.needs_relabel, turns.c.label_due_at, turns.c.evidence
    )
    assert shell == ("a", at(100), None, False, at(100), before["a"] + 1)
    assert (other.erased_at, other.labelled_at, other.needs_relabel, other.evidence) == (None, at(61), True, before["b"])
    with reading(place.engine) as connection:
        assert read_turn_counts(connection) == recount(connection) == [("composer", "v1", 2, 1)]


def test_every_turn_and_episode_has_a_tombstone_on_both_topics(place: Place) -> None:
    place.apply(turn("a", episode="e"), turn("b", episode="e"))
    place.erase("alice")
    found = [tuple(row) for row in place.rows(outbox.c.topic, outbox.c.key, outbox.c.payload) if not row.payload]
    assert sorted((topic, key) for topic, key, _ in found) == [
        (topic, key) for topic in ("ratchet.events", "ratchet.labels") for key in ("a", "b", "e")
    ]


@pytest.mark.parametrize(("occurred", "counts"), [(99, 100), (100, 100), (101, 101)])
def test_the_newest_of_two_requests_is_kept(place: Place, occurred: int, counts: int) -> None:
    announce(place.engine, erasure("alice", occurred=100))
    announce(place.engine, erasure("alice", occurred=occurred))
    with reading(place.engine) as connection:
        assert erased_at(connection, ["alice", "bob"]) == {"alice": at(counts)}


def test_letters_are_looked_into_page_after_page_and_word_by_word(place: Place) -> None:
    harmless = [letter(number, b'{"actor": "alice-too", "said": "malice"}') for number in range(PAGE)]
    named = [letter(PAGE, b'{"actor":"alice"}'), letter(PAGE + 1, b"odd {turn:a} words"), letter(PAGE + 2, b"['alice'\\n")]
    place.apply(turn("a"))
    buried(place, *harmless, *named)
    copies = [
        {"event_id": key, "topic": "ratchet.dead-letters", "key": key, "type": "x", "payload": b"words", "created_at": at(0)}
        for key in (f"t:0:{PAGE}", "t:0:0")
    ]
    with writing(place.engine) as connection:
        connection.execute(insert(outbox), copies)
    assert place.erase("alice").dead_letters == 3
    assert len(place.rows(dead_letters.c.id)) == PAGE
    assert [row.key for row in place.rows(outbox.c.key, outbox.c.payload) if row.payload] == ["t:0:0"]


def test_versions_that_learned_from_somebody_are_named_and_by_their_digest_where_they_have_no_name(place: Place) -> None:
    place.apply(turn("a"), turn("b", actor="bob"))
    batch = {
        "policy": "composer", "slot": 1, "champion": "c", "anchor": "c", "rule_set": "r", "window_from": at(0), "window_to": at(1),
        "left_out": {}, "created_at": at(0),
    }  # fmt: skip
    run = {"policy": "composer", "parent": "p", "status": "succeeded", "metrics": {}, "config": {}, "started_at": at(0)}
    item = {"episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
    version = {
        "policy": "composer", "kind": "rl", "step": 1, "base_model": "m", "licence": "l", "tags": {}, "created_at": at(0),
    }  # fmt: skip
    with writing(place.engine) as connection:
        connection.execute(insert(batches), [batch | {"id": id_, "slot": n} for n, id_ in enumerate(("mine", "named", "bobs", "back"))])
        made = {"mine": "d1", "named": "d2", "bobs": "d3", "back": "d4"}
        connection.execute(insert(training_runs), [run | {"id": f"r-{id_}", "batch_id": id_, "candidate": made[id_]} for id_ in made])
        connection.execute(insert(training_runs), run | {"id": "held", "batch_id": "mine", "candidate": None, "status": "held"})
        connection.execute(insert(versions), [version | {"digest": "d2", "name": "tiny-2"}, version | {"digest": "d3", "name": "tiny-3"}])
        mine = [
            item | {"inference_id": "a", "batch_id": "mine", "actor": None},
            item | {"inference_id": "z", "batch_id": "named", "actor": "alice"},
        ]
        connection.execute(insert(batch_items), [*mine, item | {"inference_id": "b", "batch_id": "bobs", "actor": "bob"}])
        connection.execute(insert(returned_items), item | {"inference_id": "y", "batch_id": "back", "actor": "alice"})
    assert place.erase("alice").trained_versions == ("d1", "d4", "tiny-2")
    assert place.rows(batch_items.c.inference_id, batch_items.c.actor) == [("a", None), ("b", "bob"), ("z", None)]
    assert place.rows(returned_items.c.actor) == [(None,)]


def test_of_what_was_not_sent_every_body_is_looked_into_and_what_belongs_to_it_goes_too(place: Place) -> None:
    door = SqlInbox(place.engine, clock=lambda: at(1))
    waiting, about = turn("w", episode="e"), observation("o", of=None, episode="e", name="comment", value="words")
    door.append_blocking([event_of(effect) for effect in (waiting, about, turn("b", actor="bob"), turn("m", actor="malice"))])
    door.close()
    assert place.erase("alice").inbox_payloads >= 2
    left = {row.event_id for row in place.rows(inbox.c.event_id, inbox.c.payload) if row.payload}
    assert "turn-b" in left
    assert not left & {"turn-w", "o"}


def test_what_was_said_about_an_episode_stays_while_another_turn_of_it_does(place: Place) -> None:
    place.apply(turn("mine", episode="e", actor="bob"), observation("said", episode="e"), received=1)
    announce(place.engine, erasure("alice"))
    place.apply(turn("late", episode="e"), received=50, now=120)
    assert place.rows(observations.c.id) == [("said",)]


def test_a_letter_that_made_room_for_another_goes_with_its_copy(place: Place) -> None:
    buried(place, letter(1, b'{"actor":"alice"}') | {"topic": "t~1"})
    copy = {"event_id": "c", "topic": "ratchet.dead-letters", "key": "t:0:1", "type": "x", "payload": b"words", "created_at": at(0)}
    with writing(place.engine) as connection:
        connection.execute(insert(outbox), [copy])
    assert place.erase("alice").dead_letters == 1
    assert [row.key for row in place.rows(outbox.c.key, outbox.c.payload) if row.payload] == []


def test_letters_about_the_persons_episodes_go_with_their_copies(place: Place) -> None:
    place.apply(turn("a", episode="chat-1"), turn("b", episode="chat-2", actor="bob"))
    buried(place, letter(1, b'{"episode_id":"chat-1","value":"words"}'), letter(2, b'{"episode_id":"chat-2","value":"words"}'))
    copies = [
        {"event_id": key, "topic": "ratchet.dead-letters", "key": key, "type": "x", "payload": b"words", "created_at": at(0)}
        for key in ("t:0:1", "t:0:2")
    ]
    with writing(place.engine) as connection:
        connection.execute(insert(outbox), copies)
    assert place.erase("alice").dead_letters == 1
    assert place.rows(dead_letters.c.offset) == [(2,)]
    assert [row.key for row in place.rows(outbox.c.key, outbox.c.payload) if row.payload] == ["t:0:2"]


@pytest.mark.parametrize("id_", ["run:42", "chat 42", "langfuse:trace/7", 'a"b', "zoë", "tab\tbed"])
def test_letters_about_turns_are_found_whatever_their_ids_are_made_of(place: Place, id_: str) -> None:
    place.apply(turn(id_))
    told = {"inference_id": id_, "value": "words"}
    others = [b'{"inference_id": "42"}', b'{"inference_id": "run", "of": "7"}', b'{"chat": "x", "id": "42 run"}']
    letters = [json.dumps(told).encode(), msgspec.json.encode(told), *others]
    buried(place, *(letter(number, payload) for number, payload in enumerate(letters)))
    assert place.erase("alice").dead_letters == 2
    assert sorted(row.payload for row in place.rows(dead_letters.c.payload)) == sorted(others)


def bytes_with(place: Place, words: bytes) -> int:
    """How often the database's files have these words."""
    file = Path(place.engine.url.database or "")
    return sum(path.read_bytes().count(words) for path in file.parent.glob(f"{file.name}*"))


def test_words_that_a_reader_keeps_in_the_log_are_told_and_gone_after_another_attempt(place: Place) -> None:
    place.apply(turn("a", completion="VERYSECRET"))
    eraser = SqlEraser(place.engine, place.engine, segments=place.segments, patience_s=0.05)
    with reading(place.engine) as connection:
        assert connection.execute(select(turns.c.inference_id)).all() == [("a",)]
        with pytest.raises(Unavailable, match=r"the rows are erased, .*somebody reads .*erase again"):
            eraser.erase(erasure("alice"), now=at(100))
    assert place.words() == set()
    assert bytes_with(place, b"VERYSECRET")
    assert eraser.erase(erasure("alice"), now=at(101)).already_erased
    assert not bytes_with(place, b"VERYSECRET")


def test_the_erasure_s_own_event_stays_whole_for_whoever_replays_the_events(place: Place) -> None:
    asked = erasure("alice")
    door = SqlInbox(place.engine, clock=lambda: at(1))
    door.append_blocking([event_of(turn("a")), asked.as_event()])
    door.close()
    for _ in range(2):
        SqlEraser(place.engine, place.engine, segments=place.segments).erase(asked, now=at(100))
    assert [tuple(row) for row in place.rows(inbox.c.type, inbox.c.payload) if row.payload] == [
        ("ratchet.erasure.v1", asked.as_event().data)
    ]
