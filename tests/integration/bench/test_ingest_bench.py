"""A benchmark that cannot fail says nothing: plant a loss, a double and slowness, and see `make bench-ingest` say so."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from app.domain.telemetry.streams import Ack, EventSink, OutgoingEvent, Sent
from tests.bench import ingest
from tests.bench.common.accounts import Accounts, Rate, settle
from tests.bench.common.driving import Load, drive
from tests.bench.ingesting.door import DoorFigures, running_api
from tests.bench.ingesting.peers import MlflowFigures
from tests.bench.ingesting.streams import Faults, StreamFigures, WriteSegment, measure_streams

EVENTS = 400
GOOD = Load(rate=Rate(per_cpu_s=1e5, per_s=1e5), events=1, refused=0, p50_ms=1.0, p99_ms=1.0, accepted=("a",))
CLEAN = Accounts(lost=0, duplicated=0, unsaid=0)
FAST = Rate(per_cpu_s=1e6, per_s=1e6)


def summary(streams: StreamFigures, door: Accounts = CLEAN) -> dict[str, Any]:
    """The bench's line with everything else well within its bounds."""
    figures = DoorFigures(single=GOOD, alone=GOOD, batch100=GOOD, accounts=door)
    return {
        **ingest.door_keys(figures), **ingest.peer_keys(MlflowFigures(single=GOOD, alone=GOOD)), "karapace_single_per_cpu_s": None,
        "karapace_batch100_per_cpu_s": None, **ingest.stream_keys(streams, streams), **ingest.totals(door, streams.accounts),
        "rss_mb_at_open_turns": 100,
    }  # fmt: skip


def quick(streams: StreamFigures) -> StreamFigures:
    """With rates that satisfy every bound: what is asked here is not the machine's speed."""
    return replace(streams, relay=FAST, ingest=FAST, labels=FAST)


@dataclass
class Around:
    """A sink that passes everything on; the faulty ones change `send`."""

    inner: EventSink

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """As the inner one."""
        return self.inner.send(events)

    def check_topics(self) -> None:
        """As the inner one."""
        self.inner.check_topics()

    def live_topics(self) -> frozenset[str]:
        """As the inner one."""
        return self.inner.live_topics()

    def rotate(self, *, applied_before: datetime) -> None:
        """As the inner one."""
        self.inner.rotate(applied_before=applied_before)

    def close(self) -> None:
        """As the inner one."""
        self.inner.close()


class Forgetful(Around):
    """Says of one event that the broker has it, and never sends it."""

    forgot: str = ""

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Leave the first event out."""
        if self.forgot or not events:
            return self.inner.send(events)
        self.forgot = events[0].event.id
        return [Ack(topic="ratchet.events.1", partition=0, offset=0), *self.inner.send(events[1:])]


class Stammering(Around):
    """Sends everything twice."""

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Send and send."""
        self.inner.send(events)
        return self.inner.send(events)


class Sleepy(Around):
    """Takes long over everything without using the processor."""

    def send(self, events: Sequence[OutgoingEvent]) -> list[Sent]:
        """Wait, then send."""
        time.sleep(0.2 if events else 0.0)
        return self.inner.send(events)


def test_a_sound_line_loses_and_doubles_nothing_and_counts_only_what_its_clock_saw() -> None:
    found = measure_streams(EVENTS, None)
    assert (found.accounts, found.sent_twice, found.events) == (CLEAN, 0, EVENTS)
    assert found.ingest_left_out > 0, "joining brings the first records"
    assert ingest.missed(summary(quick(found))) == []


def test_an_event_that_the_relay_forgets_is_lost_in_the_line_and_in_the_exit_code() -> None:
    found = measure_streams(EVENTS, None, Faults(sink=Forgetful, patience_s=3.0))
    # the first event is a turn: its row, its tokens and its label are missing
    assert found.accounts.lost == 3
    assert ingest.missed(summary(quick(found))) == ["lost is 3, above 0"]


def test_an_event_that_is_sent_twice_is_seen_on_the_broker_and_has_one_effect() -> None:
    found = measure_streams(EVENTS, None, Faults(sink=Stammering))
    assert (found.sent_twice, found.accounts) == (EVENTS, CLEAN)


def test_tokens_that_are_written_twice_are_duplicates_in_the_line_and_in_the_exit_code() -> None:
    def twice(write: WriteSegment) -> WriteSegment:
        return lambda name, payloads: write(f"{name}-again", payloads) + write(name, payloads)

    found = measure_streams(EVENTS, None, Faults(write=twice))
    assert found.accounts.duplicated == EVENTS / 4, "every fourth event is a turn"
    assert ingest.missed(summary(quick(found))) == ["duplicated is 100, above 0"]


def test_waiting_shows_by_the_wall_and_work_in_both() -> None:
    def slow(write: WriteSegment) -> WriteSegment:
        def work(name: str, payloads: Any) -> int:
            until = time.process_time() + 0.3
            while time.process_time() < until:
                pass
            return write(name, payloads)

        return work

    found = measure_streams(EVENTS, None, Faults(sink=Sleepy, write=slow))
    assert found.relay.per_s < EVENTS / 0.2 < 30_000
    said = ingest.missed(summary(found))
    assert any(sentence.startswith("relay_events_per_s is") for sentence in said)
    assert found.ingest.per_cpu_s < EVENTS / 0.3 < 10_000
    assert any(sentence.startswith("ingest_events_per_cpu_s_sqlite is") for sentence in said)


def test_the_accounts_compare_ids_and_not_totals() -> None:
    """Before, thousands of warm-up rows stood in for thousands of lost ones, because two totals were subtracted."""
    assert settle(acknowledged=["a", "b"], kept=["b", "b", "c"]) == Accounts(lost=1, duplicated=1, unsaid=1)


def test_a_figure_that_is_no_number_is_missed() -> None:
    figures = StreamFigures(
        relay=FAST, ingest=FAST, labels=FAST, events=EVENTS, ingest_left_out=1, sent_twice=0, accounts=CLEAN
    )  # fmt: skip
    line = summary(figures) | {"single_p99_ms": float("nan"), "labels_per_cpu_s": float("nan")}
    assert [sentence.split()[0] for sentence in ingest.missed(line)] == ["labels_per_cpu_s", "single_p99_ms"]


@pytest.mark.parametrize("key", ["", "wrong"])
def test_what_the_door_refuses_is_not_counted_as_an_event(tmp_path: Path, key: str) -> None:
    with running_api(tmp_path) as (process, port, good):
        refused = drive([process], port, "/v1/events", batch=2, connections=1, seconds=0.2, key=key or f"{good}x")
        taken = drive([process], port, "/v1/events", batch=2, connections=1, seconds=0.2, key=good)
    assert (refused.events, refused.accepted) == (0, ())
    assert refused.refused > 0
    assert taken.events == len(taken.accepted) == len(set(taken.accepted)) > 0
