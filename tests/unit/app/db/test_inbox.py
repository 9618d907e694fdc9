"""The door's bounds, and what becomes of waiting callers when the database fails."""

import asyncio
import threading
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, text

from app.db.ingestion.inbox import SqlInbox
from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent


def event(id_: str, data: bytes = b"{}") -> CloudEvent:
    return CloudEvent(id=id_, source="api", type="ratchet.observation.v1", time=datetime(2026, 11, 21, tzinfo=UTC), key="k", data=data)


def wait_for_refusal(inbox: SqlInbox) -> Overloaded:
    """The door looks at backlog and disk once a second, after a commit or a second of silence."""
    pause = threading.Event()
    for n in range(100):
        try:
            inbox.append_blocking([event(f"probe-{n}")])
        except Overloaded as error:
            return error
        pause.wait(0.05)
    raise AssertionError("the inbox never refused")


def test_what_was_accepted_is_committed(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine)
    assert inbox.append_blocking([event("1", b'{"a":1}')]) == [Receipt.ACCEPTED]
    with sqlite_engine.connect() as connection:
        row = connection.execute(text("SELECT event_id, payload, relayed_at FROM inbox")).one()
    inbox.close()
    assert tuple(row) == ("1", b'{"a":1}', None)


def test_memory_is_bounded_in_bytes(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine, max_in_flight_bytes=10_000)
    with pytest.raises(Overloaded, match="smaller batches") as refused:
        inbox.append_blocking([event("1", b"x" * 20_000)])
    assert 0 < refused.value.retry_after_s <= 30
    assert inbox.in_flight_bytes == 0
    inbox.close()


def test_a_full_backlog_shuts_the_door(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine, max_backlog_rows=3, free_bytes=lambda: 1 << 40)
    assert "ratchet relay" in str(wait_for_refusal(inbox))
    inbox.close()


def test_a_full_disk_shuts_the_door(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine, free_bytes=lambda: 1000)
    assert "make room" in str(wait_for_refusal(inbox))
    inbox.close()


def test_the_door_opens_again_by_itself(sqlite_engine: Engine) -> None:
    free = [1000]
    inbox = SqlInbox(sqlite_engine, free_bytes=lambda: free[0])
    wait_for_refusal(inbox)
    free[0] = 1 << 40
    for _ in range(60):
        try:
            assert inbox.append_blocking([event("later")]) == [Receipt.ACCEPTED]
            break
        except Overloaded:
            threading.Event().wait(0.1)
    else:
        raise AssertionError("the door stayed shut")
    inbox.close()


def test_a_failed_commit_answers_unavailable_and_the_next_one_works(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine)
    with sqlite_engine.begin() as connection:
        connection.execute(text("ALTER TABLE inbox RENAME TO elsewhere"))
    with pytest.raises(Unavailable, match="send again"):
        inbox.append_blocking([event("1")])
    with sqlite_engine.begin() as connection:
        connection.execute(text("ALTER TABLE elsewhere RENAME TO inbox"))
    for _ in range(30):
        try:
            assert inbox.append_blocking([event("1")]) == [Receipt.ACCEPTED]
            break
        except Unavailable:  # until it has looked again
            threading.Event().wait(0.1)
    else:
        raise AssertionError("the door stayed shut")
    inbox.close()


@pytest.mark.parametrize("id_", ["", "a\x00b", "\ud800", "x" * 201])
def test_a_name_the_database_would_refuse_fails_its_own_request_only(sqlite_engine: Engine, id_: str) -> None:
    inbox = SqlInbox(sqlite_engine)
    with pytest.raises(BadRequest):
        inbox.append_blocking([event(id_)])
    assert inbox.append_blocking([event("fine")]) == [Receipt.ACCEPTED]
    inbox.close()


@pytest.mark.parametrize("moment", [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)])
def test_an_envelope_of_an_impossible_time_fails_its_own_request_only(sqlite_engine: Engine, moment: datetime) -> None:
    inbox = SqlInbox(sqlite_engine)
    with pytest.raises(BadRequest, match=r"time is .*check the sender's clock"):
        inbox.append_blocking([replace(event("odd"), time=moment)])
    assert inbox.append_blocking([event("fine")]) == [Receipt.ACCEPTED]
    inbox.close()


def test_what_the_database_refuses_is_refused_by_itself_and_not_with_its_neighbours(sqlite_engine: Engine) -> None:
    """All in one group commit: a rule that the door does not know is no reason to send anything again."""
    with sqlite_engine.begin() as connection:
        stricter = "CREATE TRIGGER stricter BEFORE INSERT ON inbox WHEN NEW.event_id = 'odd' "
        connection.execute(text(stricter + "BEGIN SELECT RAISE(ABORT, 'CHECK constraint failed: stricter'); END"))
    inbox = SqlInbox(sqlite_engine)

    async def at_once() -> list[list[Receipt] | BaseException]:
        with sqlite_engine.begin() as connection:  # so long the writer waits, and all of them come together
            connection.execute(text("DELETE FROM counters"))
            waiting = [asyncio.create_task(inbox.append([event(id_)])) for id_ in ("first", "1", "odd", "2")]
            await asyncio.sleep(0.2)
        return await asyncio.gather(*waiting, return_exceptions=True)

    first, one, odd, two = asyncio.run(at_once())
    assert [first, one, two] == [[Receipt.ACCEPTED]] * 3
    assert isinstance(odd, BadRequest)
    assert "the database refuses a record: CHECK constraint failed: stricter" in str(odd)
    assert inbox.in_flight_bytes == 0
    inbox.close()


def test_duplicates_and_conflicts_at_the_door_are_counted(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine)
    inbox.append_blocking([event("1"), event("1"), event("1", b"other"), event("1")])
    with sqlite_engine.connect() as connection:
        counts = dict(connection.execute(text("SELECT name, value FROM counters")).all())
    inbox.close()
    assert counts == {"door_duplicate": 2, "door_conflict": 1}


def test_a_caller_that_went_away_harms_nobody(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine)

    async def scenario() -> list[Receipt]:
        gone = asyncio.create_task(inbox.append([event("1")]))
        await asyncio.sleep(0)
        gone.cancel()
        return await inbox.append([event("2")])

    assert asyncio.run(scenario()) == [Receipt.ACCEPTED]
    inbox.close()


def test_an_answer_to_a_loop_that_is_closed_by_then_harms_nobody(sqlite_engine: Engine) -> None:
    inbox = SqlInbox(sqlite_engine)
    with sqlite_engine.begin(), pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(inbox.append([event("1")]), 0.05))
    assert inbox.append_blocking([event("2")], timeout_s=5) == [Receipt.ACCEPTED]
    inbox.close()
