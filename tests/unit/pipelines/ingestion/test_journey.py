"""What is on its way to ingestion, and rows that the broker never takes; each rule by hand."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest

from app.domain.telemetry.streams import Ack, OutgoingEvent, Sent, Unsendable
from pipelines.ingestion.journey import Journey, Setbacks
from tests.fakes.served import event_of, observation

NOON = datetime(2026, 11, 24, 12, tzinfo=UTC)
SECOND = timedelta(seconds=1)
HERE, THERE = ("events.1", 0), ("events.1", 1)


def row(seq: int, relayed_at: datetime | None = None) -> OutgoingEvent:
    return OutgoingEvent(seq=seq, topic="ratchet.events", event=event_of(observation(f"o{seq}")), received_at=NOON, relayed_at=relayed_at)


def ack(offset: int, place: tuple[str, int] = HERE) -> Ack:
    return Ack(topic=place[0], partition=place[1], offset=offset)


def under_way(journey: Journey, relayed_at: datetime | None, now: datetime = NOON + 5 * SECOND) -> bool:
    return journey.is_under_way(row(1, relayed_at), now, stalled_after=10 * SECOND)


def test_a_batch_is_under_way_until_ingestion_has_passed_its_last_record_in_each_partition() -> None:
    journey = Journey()
    journey.sent(NOON, [ack(4), ack(6), ack(5), ack(2, THERE)])
    journey.arrived({HERE: 6, THERE: 3}, NOON + SECOND)
    assert under_way(journey, NOON), "the seventh record, offset 6, was not read yet"
    journey.arrived({HERE: 7, THERE: 2}, NOON + SECOND)
    assert under_way(journey, NOON)
    journey.arrived({HERE: 7, THERE: 3}, NOON + SECOND)
    assert not under_way(journey, NOON)
    assert not journey.batches


def test_what_was_sent_before_the_oldest_batch_is_not_under_way() -> None:
    journey = Journey()
    journey.sent(NOON, [ack(0)])
    journey.sent(NOON + SECOND, [ack(5)])
    journey.sent(NOON + SECOND, [])
    assert len(journey.batches) == 2, "nothing was acknowledged, nothing is on its way"
    journey.arrived({HERE: 1}, NOON + 2 * SECOND)
    assert [under_way(journey, at) for at in (NOON, NOON + SECOND, NOON + 2 * SECOND, None)] == [False, True, True, False]


def test_ingestion_that_stands_still_gets_everything_again() -> None:
    journey = Journey()
    journey.sent(NOON, [ack(3)])
    assert not under_way(journey, NOON), "nobody has ever heard of ingestion"
    journey.arrived({HERE: 1}, NOON)
    journey.arrived({HERE: 1}, NOON + 9 * SECOND)  # it says so again, and has not moved
    assert under_way(journey, NOON, NOON + 9.9 * SECOND)
    assert not under_way(journey, NOON, NOON + 10 * SECOND)


def test_what_lies_in_a_lost_topic_is_never_waited_for() -> None:
    journey = Journey()
    journey.sent(NOON, [ack(3)])
    journey.sent(NOON, [ack(3), ack(0, ("events.2", 0))])
    journey.sent(NOON, [ack(1, ("events.2", 0))])
    journey.forget_lost(frozenset({"events.2"}))
    assert [batch for _, batch in journey.batches] == [{("events.2", 0): 2}]


def test_the_wait_doubles_while_nothing_is_acknowledged_and_ends_with_the_first_success() -> None:
    setbacks, waits = Setbacks(), list[float]()
    assert setbacks.patience_s == 0.0
    for _ in range(6):
        setbacks.count([row(1)], [None], alone=False)
        waits.append(setbacks.patience_s)
    assert waits == pytest.approx([0.3, 0.6, 1.2, 2.4, 4.8, 5.0])
    setbacks.count([row(1), row(2)], [None, ack(0)], alone=False)
    assert (setbacks.patience_s, setbacks.one_by_one) == (0.0, False)


def counted(setbacks: Setbacks, outcomes: Sequence[Sent], *, alone: bool = False) -> dict[int, str]:
    return setbacks.count([row(seq) for seq in range(len(outcomes))], outcomes, alone=alone)


def test_after_three_barren_sends_rows_are_tried_by_themselves() -> None:
    setbacks, seen = Setbacks(), list[bool]()
    for _ in range(4):
        seen.append(setbacks.one_by_one)
        assert counted(setbacks, [None, None]) == {}, "while nobody gets through it is the broker's fault"
    assert seen == [False, False, False, True]


@pytest.mark.parametrize("alone", [True, False])
def test_a_row_that_fails_three_times_at_a_broker_that_answers_is_given_up(alone: bool) -> None:
    setbacks, outcomes = Setbacks(), [None] if alone else [None, ack(0)]
    found = [counted(setbacks, outcomes, alone=alone) for _ in range(4)]
    assert [list(one) for one in found] == [[], [], [0], []], "and counted from nothing again"
    assert found[2][0] == "the broker did not take it 3 times, and answers otherwise"


def test_a_row_that_gets_through_between_begins_anew_and_one_that_cannot_be_sent_is_given_up_at_once() -> None:
    setbacks = Setbacks()
    for _ in range(2):
        counted(setbacks, [None, ack(0)])
    counted(setbacks, [ack(0), ack(1)])
    assert counted(setbacks, [None, ack(0)]) == {}
    assert counted(setbacks, [Unsendable(reason="too large"), ack(1)]) == {0: "too large"}
    assert counted(setbacks, [None, ack(0)]) == {}, "what was given up is not held against it"


def test_the_first_record_of_a_partition_that_nobody_has_read_is_under_way() -> None:
    journey = Journey()
    journey.sent(NOON, [ack(0), ack(0, THERE)])
    journey.arrived({HERE: 1}, NOON)
    assert under_way(journey, NOON)
    journey.arrived({HERE: 1, THERE: 1}, NOON)
    assert not under_way(journey, NOON)
