"""One suite over the inbox in memory and the real one on both databases."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from app.db.engine import open_engine
from app.db.ingestion.inbox import SqlInbox
from app.domain.ports import Inbox, Receipt
from app.domain.telemetry.events import CloudEvent, EventType
from tests.fakes.inbox import MemoryInbox

A, D, C = Receipt.ACCEPTED, Receipt.DUPLICATE, Receipt.CONFLICT


def event(id_: str, data: bytes = b"{}", source: str = "api") -> CloudEvent:
    return CloudEvent(id=id_, source=source, type=EventType.OBSERVATION, time=datetime(2026, 11, 21, tzinfo=UTC), key="e1", data=data)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def inbox(request: pytest.FixtureRequest) -> Iterator[Inbox]:
    if request.param == "memory":
        yield MemoryInbox()
        return
    engine = open_engine(request.getfixturevalue(f"{request.param}_url"))
    real = SqlInbox(engine, free_bytes=lambda: 1 << 40)
    yield real
    real.close()
    engine.dispose()


def test_a_new_event_is_accepted_and_its_repetition_is_a_duplicate_for_ever(inbox: Inbox) -> None:
    async def scenario() -> list[list[Receipt]]:
        return [await inbox.append([event("1")]), await inbox.append([event("1"), event("2")]), await inbox.append([event("1")])]

    assert asyncio.run(scenario()) == [[A], [D, A], [D]]


def test_the_same_id_with_another_payload_is_a_conflict_and_the_first_stays(inbox: Inbox) -> None:
    async def scenario() -> list[list[Receipt]]:
        return [await inbox.append([event("1", b"a")]), await inbox.append([event("1", b"b")]), await inbox.append([event("1", b"a")])]

    assert asyncio.run(scenario()) == [[A], [C], [D]]


def test_repetitions_within_one_batch_are_told_apart(inbox: Inbox) -> None:
    batch = [event("1", b"a"), event("1", b"a"), event("1", b"b"), event("2")]
    assert asyncio.run(inbox.append(batch)) == [A, D, C, A]


def test_the_same_id_from_another_source_is_another_event(inbox: Inbox) -> None:
    assert asyncio.run(inbox.append([event("1", source="a"), event("1", source="b")])) == [A, A]


def test_concurrent_requests_each_get_their_own_answers(inbox: Inbox) -> None:
    async def scenario() -> list[list[Receipt]]:
        return await asyncio.gather(*(inbox.append([event(f"{n}"), event(f"{n % 10}")]) for n in range(10, 200)))

    answers = asyncio.run(scenario())
    assert [pair[0] for pair in answers] == [A] * 190
    assert sum(pair[1] is A for pair in answers) == 10


def test_a_large_batch_with_a_known_event_in_the_middle_keeps_its_order(inbox: Inbox) -> None:
    async def scenario() -> list[Receipt]:
        await inbox.append([event("700", b"other")])
        return await inbox.append([event(str(n)) for n in range(1500)])

    receipts = asyncio.run(scenario())
    assert receipts[700] is C
    assert receipts.count(A) == 1499
