"""The door straight to the brokers: accepted means acknowledged, anything else is an error the caller hears."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ports import Receipt
from app.domain.telemetry.events import CloudEvent, EventType
from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent, Unsendable
from app.messaging.direct import DirectInbox

NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)


class ObedientSink:
    """Acknowledges everything but the events in `deaf_to`; `open` lets it work."""

    def __init__(self) -> None:
        self.sends: list[list[str]] = []
        self.deaf_to: set[str] = set()
        self.failure: Exception | None = None
        self.open = threading.Event()
        self.open.set()
        self.closed = 0

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        self.open.wait(5)
        if self.failure is not None:
            raise self.failure
        self.sends.append([item.event.id for item in events])
        return [self._outcome(e, i) for i, e in enumerate(events)]

    def _outcome(self, event: OutgoingEvent, offset: int) -> Sent:
        if event.event.id == "too-large":
            return Unsendable(reason="the broker does not take a record of 9 bytes")
        return None if event.event.id in self.deaf_to else Ack(topic=event.topic, partition=0, offset=offset)

    def check_topics(self) -> None: ...

    def live_topics(self) -> frozenset[str]:
        return frozenset()

    def rotate(self, *, applied_before: datetime) -> None: ...

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def sink() -> ObedientSink:
    return ObedientSink()


@pytest.fixture
def inbox(sink: ObedientSink) -> Iterator[DirectInbox]:
    made = DirectInbox(sink, clock=lambda: NOON, max_in_flight_bytes=2_000)
    yield made
    sink.open.set()
    made.close()


def event(name: str, size: int = 2) -> CloudEvent:
    return CloudEvent(id=name, source="api", type=EventType.OBSERVATION, time=NOON - timedelta(hours=1), key="k", data=b"x" * size)


def test_accepted_means_acknowledged(inbox: DirectInbox, sink: ObedientSink) -> None:
    assert asyncio.run(inbox.append([event("a"), event("b")])) == [Receipt.ACCEPTED, Receipt.ACCEPTED]
    assert sink.sends == [["a", "b"]]


def test_requests_that_wait_are_sent_together_and_each_hears_its_own(inbox: DirectInbox, sink: ObedientSink) -> None:
    sink.deaf_to = {"c"}

    async def story() -> list[list[Receipt] | BaseException]:
        sink.open.clear()
        first = asyncio.create_task(inbox.append([event("a")]))
        await asyncio.sleep(0.1)
        later = [asyncio.create_task(inbox.append([event(name)])) for name in ("b", "c")]
        await asyncio.sleep(0.1)
        sink.open.set()
        return await asyncio.gather(first, *later, return_exceptions=True)

    first, second, third = asyncio.run(story())
    assert (first, second) == ([Receipt.ACCEPTED], [Receipt.ACCEPTED])
    assert isinstance(third, Unavailable)
    assert sink.sends == [["a"], ["b", "c"]]


def test_unreachable_brokers_are_unavailable(inbox: DirectInbox, sink: ObedientSink) -> None:
    sink.failure = OSError("connection reset")
    with pytest.raises(Unavailable, match="send the events again"):
        asyncio.run(inbox.append([event("a")]))
    sink.failure = None
    assert asyncio.run(inbox.append([event("a")])) == [Receipt.ACCEPTED]


def test_what_the_brokers_never_take_is_refused_and_not_asked_for_again(inbox: DirectInbox) -> None:
    with pytest.raises(BadRequest, match="smaller parts"):
        asyncio.run(inbox.append([event("too-large")]))


def test_bytes_in_flight_are_bounded_and_given_back(inbox: DirectInbox) -> None:
    with pytest.raises(Overloaded):
        asyncio.run(inbox.append([event("a", size=1_800)]))
    for _ in range(5):
        asyncio.run(inbox.append([event("a", size=1_500)]))


def test_bytes_up_to_the_bound_are_taken_and_one_more_is_refused_until_the_first_are_answered(
    inbox: DirectInbox, sink: ObedientSink
) -> None:
    """Each event counts 300 bytes beside its data: 2 x 300 + 1,400 = 2,000."""

    async def story() -> list[Receipt]:
        sink.open.clear()
        first = asyncio.create_task(inbox.append([event("a", size=1_000), event("b", size=400)]))
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded, match="2000 bytes wait") as refused:
            await inbox.append([event("c", size=0)])
        assert refused.value.retry_after_s == 1.0
        sink.open.set()
        return await first

    assert asyncio.run(story()) == [Receipt.ACCEPTED] * 2
    with pytest.raises(Overloaded, match=r"^0 bytes"):
        asyncio.run(inbox.append([event("a", size=1_701)]))
    assert asyncio.run(inbox.append([event("a", size=1_700)])) == [Receipt.ACCEPTED]


def test_who_is_sent_together_are_at_most_two_thousand_events_and_whole_requests(sink: ObedientSink) -> None:
    inbox = DirectInbox(sink, clock=lambda: NOON)

    async def story() -> list[list[Receipt]]:
        sink.open.clear()
        waiting = [asyncio.create_task(inbox.append([event("first")]))]
        await asyncio.sleep(0.02)
        waiting += [asyncio.create_task(inbox.append([event(f"{size}")] * size)) for size in (1_000, 1_000, 1, 2_001, 1)]
        await asyncio.sleep(0.05)
        sink.open.set()
        return await asyncio.gather(*waiting)

    assert [len(receipts) for receipts in asyncio.run(story())] == [1, 1_000, 1_000, 1, 2_001, 1]
    inbox.close()
    assert [len(sent) for sent in sink.sends] == [1, 2_000, 1, 2_001, 1]


def test_of_a_request_all_is_acknowledged_or_the_caller_hears_how_much_is_not(inbox: DirectInbox, sink: ObedientSink) -> None:
    sink.deaf_to = {"b", "c"}
    with pytest.raises(Unavailable, match="did not acknowledge 2 of 3 events"):
        asyncio.run(inbox.append([event("a"), event("b"), event("c")]))
    with pytest.raises(BadRequest) as refused:
        asyncio.run(inbox.append([event("b"), event("too-large")]))
    assert refused.value.code == "too_large"


def test_what_waits_at_the_end_is_sent_and_nothing_is_taken_after_it(sink: ObedientSink) -> None:
    inbox = DirectInbox(sink, clock=lambda: NOON)
    inbox.close()
    with pytest.raises(Unavailable, match="the door is closing"):
        asyncio.run(inbox.append([event("late")]))
    assert sink.closed == 1


def test_an_answer_nobody_waits_for_any_more_harms_nobody(inbox: DirectInbox, sink: ObedientSink) -> None:
    async def story() -> list[Receipt]:
        sink.open.clear()
        gone = asyncio.create_task(inbox.append([event("a")]))
        await asyncio.sleep(0.02)
        gone.cancel()
        sink.open.set()
        return await inbox.append([event("b")])

    assert asyncio.run(story()) == [Receipt.ACCEPTED]


def test_an_answer_to_a_loop_that_is_closed_by_then_harms_nobody(inbox: DirectInbox, sink: ObedientSink) -> None:
    sink.open.clear()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(inbox.append([event("a")]), 0.02))
    sink.open.set()
    assert asyncio.run(asyncio.wait_for(inbox.append([event("b")]), 5)) == [Receipt.ACCEPTED]


def test_without_another_bound_thirty_two_mebibytes_are_in_flight(sink: ObedientSink) -> None:
    inbox = DirectInbox(sink, clock=lambda: NOON)
    half = event("a", size=16 * 1024 * 1024 - 300)
    assert asyncio.run(inbox.append([half, half])) == [Receipt.ACCEPTED] * 2
    with pytest.raises(Overloaded):
        asyncio.run(inbox.append([half, event("b", size=16 * 1024 * 1024 - 299)]))
    inbox.close()
