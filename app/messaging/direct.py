"""`RATCHET_INGEST=direct`: the door without an inbox table, for a replicated cluster: an event is taken when the brokers say so.

The same shape as the inbox: many requests form one send, each hears about its own events. What differs is said here: a repeat is
answered `accepted` (ingestion finds it), and where the brokers did not acknowledge in time the caller hears `Unavailable` and sends
again, which is harmless.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from app.domain.errors import BadRequest, Overloaded, Unavailable
from app.domain.ids import utc_now
from app.domain.ports import Clock, Receipt
from app.domain.telemetry.events import CloudEvent, Topic
from app.domain.telemetry.streams import EventSink, OutgoingEvent, Sent, Unsendable

MAX_IN_FLIGHT_BYTES = 32 * 1024 * 1024
EVENT_OVERHEAD_BYTES = 300
MAX_SEND_EVENTS = 2_000
Answer = Callable[[list[Receipt] | Exception], object]


class DirectInbox:
    """The Inbox port over an `EventSink`; one per process, its thread is the sink's only user."""

    def __init__(self, sink: EventSink, *, clock: Clock = utc_now, max_in_flight_bytes: int = MAX_IN_FLIGHT_BYTES) -> None:
        self._sink = sink
        self._clock = clock
        self._max_in_flight = max_in_flight_bytes
        self._waiting: deque[tuple[list[OutgoingEvent], int, Answer]] = deque()
        self._wake = threading.Condition()
        self._in_flight = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="direct-inbox", daemon=True)
        self._thread.start()

    async def append(self, events: Sequence[CloudEvent]) -> list[Receipt]:
        """Send the events and wait for the brokers. Raises `Overloaded`, `Unavailable`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[Receipt]] = loop.create_future()

        def answer(result: list[Receipt] | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_resolve, future, result)

        self._submit(events, answer)
        return await future

    def close(self) -> None:
        """Send what waits, then stop."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._sink.close()

    def _submit(self, events: Sequence[CloudEvent], answer: Answer) -> None:
        now = self._clock()
        outgoing = [OutgoingEvent(seq=0, topic=Topic.EVENTS, event=event, received_at=now) for event in events]
        size = sum(len(event.data) + EVENT_OVERHEAD_BYTES for event in events)
        with self._wake:
            if self._closing:
                raise Unavailable("the door is closing: send the events again in a moment")
            if self._in_flight + size > self._max_in_flight:
                raise Overloaded(f"{self._in_flight} bytes wait for the brokers already: send more slowly", retry_after_s=1.0)
            self._in_flight += size
            self._waiting.append((outgoing, size, answer))
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._closing:
                    self._wake.wait()
                group = self._take()
            if not group:
                return
            self._send(group)

    def _take(self) -> list[tuple[list[OutgoingEvent], int, Answer]]:
        group: list[tuple[list[OutgoingEvent], int, Answer]] = []
        count = 0
        while self._waiting and (not group or count + len(self._waiting[0][0]) <= MAX_SEND_EVENTS):
            group.append(self._waiting.popleft())
            count += len(group[-1][0])
        return group

    def _send(self, group: list[tuple[list[OutgoingEvent], int, Answer]]) -> None:
        events = [event for outgoing, _, _ in group for event in outgoing]
        try:
            acks = self._sink.send(events)
        except Unavailable as error:
            self._answer(group, error)
        except Exception as error:  # noqa: BLE001 - whatever the client library raises, the callers must hear of it
            failure = Unavailable(f"the brokers could not be reached ({error}): send the events again")
            failure.__cause__ = error
            self._answer(group, failure)
        else:
            self._answer(group, acks)

    def _answer(self, group: list[tuple[list[OutgoingEvent], int, Answer]], outcome: list[Sent] | Exception) -> None:
        with self._wake:
            self._in_flight -= sum(size for _, size, _ in group)
        start = 0
        for outgoing, _, answer in group:
            answer(outcome if isinstance(outcome, Exception) else _receipts(outcome[start : start + len(outgoing)]))
            start += len(outgoing)


def _receipts(acks: Sequence[Sent]) -> list[Receipt] | Exception:
    """All of a request or none of it: sending the taken ones again with the others does no harm."""
    never = next((ack for ack in acks if isinstance(ack, Unsendable)), None)
    if never is not None:
        return BadRequest(f"{never.reason}: send it in smaller parts, or raise max_message_bytes in [kafka]", code="too_large")
    if None in acks:
        return Unavailable(f"the brokers did not acknowledge {list(acks).count(None)} of {len(acks)} events in time: send them again")
    return [Receipt.ACCEPTED] * len(acks)


def _resolve(future: "asyncio.Future[list[Receipt]]", result: list[Receipt] | Exception) -> None:
    if future.done():  # the caller went away
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
