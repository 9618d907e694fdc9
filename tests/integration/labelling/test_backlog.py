"""Labels wait for what was accepted in time and is on its way, on both databases; and for nothing else."""

from datetime import datetime

from sqlalchemy import Engine, update

from app.db.engine import writing
from app.db.ingestion.backlog import SqlBacklog
from app.db.ingestion.inbox import SqlInbox
from app.db.learning.labels import SqlLabels
from app.db.tables import inbox
from app.domain.ports import Receipt
from app.domain.telemetry.events import Observation
from pipelines.labelling.labeller import label_due
from tests.fakes.served import at, event_of, observation, turn
from tests.integration.labelling.test_label_book import ONLY_RATING, POLICY, Bench, rule_set


def accept(engine: Engine, said: Observation, *, received: float) -> None:
    """What the door commits."""
    door = SqlInbox(engine, clock=lambda: at(received), free_bytes=lambda: 1 << 40)
    assert door.append_blocking([event_of(said)]) == [Receipt.ACCEPTED]
    door.close()


def label(engine: Engine, now: datetime) -> int:
    """As the label process does it, with a fresh memory."""
    complete = SqlBacklog(engine, engine).complete_until(now=now)
    rules = rule_set(ONLY_RATING)
    return label_due(SqlLabels(engine), policy="composer", config=POLICY, rule_set=rules, now=now, limit=100, complete_until=complete)


def test_a_label_waits_for_what_was_accepted_before_it_was_due_and_does_not_miss_it(engine: Engine) -> None:
    bench = Bench(engine)
    bench.apply(turn("a"))  # due at 60
    said = observation("o", of="a", value=-1.0)
    accept(engine, said, received=59)
    assert label(engine, at(70)) == 0  # ingestion lags: the thumb is in the inbox alone
    bench.apply(said, received=59)
    assert label(engine, at(71)) == 1
    assert bench.rows("revision", "reward") == [(1, -1.0)]


def test_a_label_does_not_wait_for_what_was_accepted_after_it_was_due(engine: Engine) -> None:
    bench = Bench(engine)
    bench.apply(turn("a"), turn("later", finished=5))
    accept(engine, observation("o", of="a"), received=62)
    assert label(engine, at(70)) == 1
    assert bench.rows("inference_id") == [("a",)]  # and `later`, due at 65, waits


def test_without_any_traffic_labels_come_by_the_clock(engine: Engine) -> None:
    Bench(engine).apply(turn("a"))
    assert label(engine, at(60)) == 1


def test_what_was_buried_or_applied_from_the_inbox_holds_nothing_up(engine: Engine) -> None:
    Bench(engine).apply(turn("a"))
    accept(engine, observation("poison", of="a"), received=10)
    assert label(engine, at(70)) == 0
    with writing(engine) as connection:  # what the reconciler says of it in the end
        connection.execute(update(inbox).values(relayed_at=at(20), applied_at=at(71)))
    assert label(engine, at(72)) == 1


def test_applied_rows_are_remembered_and_a_new_one_is_seen(engine: Engine) -> None:
    bench, backlog = Bench(engine), SqlBacklog(engine, engine)
    assert backlog.complete_until(now=at(0)) == at(0)
    for number in range(3):
        accept(engine, observation(f"o{number}", of="a"), received=number)
    assert backlog.complete_until(now=at(100)) == at(0)
    bench.apply(observation("o0", of="a"), observation("o1", of="a"))
    assert backlog.complete_until(now=at(100)) == at(2)
    bench.apply(observation("o2", of="a"))
    assert backlog.complete_until(now=at(100)) == at(100)
    accept(engine, observation("o3", of="a"), received=101)
    assert backlog.complete_until(now=at(102)) == at(101)
