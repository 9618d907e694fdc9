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

    def close(self) -> None: ...


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
