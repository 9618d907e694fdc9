"""Payloads that were deposited before their events: pointed at, noticed when missing, gone with their person, swept when orphaned."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import Engine, select, update

from app import wiring
from app.db.counters import read_counts
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.claims import SqlClaimSweep
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.streams import SqlEffects
from app.db.tables import inbox, segments, turns
from app.domain.learning.batches import payload_of, without_payload
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.settings import from_environment
from app.trajectories.segments import ParquetSegments
from tests.fakes.served import applied, at, erasure, event_of, turn


@dataclass
class Bench:
    """Effects over a database and real segments."""

    engine: Engine
    files: ParquetSegments

    def apply(self, *effects: object, received: float = 1) -> int:
        store = SqlEffects(
            self.engine, rules=lambda: JoinRules(policies={}), segments=self.files,
            holds=self.files.holds,
        )  # fmt: skip
        events = tuple(applied(effect, offset=n, received=received) for n, effect in enumerate(effects))  # type: ignore[arg-type]
        return store.apply(EffectBatch(events=events), now=at(received))

    def claimed(self, id_: str) -> TurnServed:
        """A turn whose payload was deposited."""
        whole = turn(id_)
        return without_payload(whole, self.files.deposit(payload_of(whole)))

    def located(self) -> dict[str, str | None]:
        with reading(self.engine) as connection:
            return {row.inference_id: row.payload_segment for row in connection.execute(select(turns))}

    def missing(self) -> int:
        with reading(self.engine) as connection:
            return read_counts(connection).get(("", "claim_missing"), 0)


@pytest.fixture
def bench(database_url: str, tmp_path: Path) -> Iterator[Bench]:
    engine = open_engine(database_url)
    yield Bench(engine, ParquetSegments(str(tmp_path / "segments")))
    engine.dispose()


def test_a_turn_with_a_claim_points_at_the_segment_that_was_written_before_it(bench: Bench) -> None:
    claimed = bench.claimed("large")
    assert bench.apply(claimed, turn("small")) == 2
    assert claimed.payload
    assert bench.located()["large"] == claimed.payload.segment
    with reading(bench.engine) as connection:
        known = {row.inference_id: (row.has_logprobs, row.completion_tokens) for row in connection.execute(select(turns))}
        assert set(connection.execute(select(segments.c.name)).scalars()) == {name for name in bench.located().values() if name}
    assert known == {"large": (True, 2), "small": (True, 2)}
    read = bench.files.read([(name, id_) for id_, name in bench.located().items() if name])
    assert read == {id_: payload_of(turn(id_)) for id_ in ("large", "small")}


def test_a_turn_whose_payload_is_gone_is_applied_without_it_and_counted(bench: Bench) -> None:
    claimed = bench.claimed("large")
    assert claimed.payload
    bench.files.drop(claimed.payload.segment)
    assert bench.apply(claimed) == 1
    assert bench.located() == {"large": None}
    assert bench.missing() == 1


def test_the_payload_of_a_person_who_was_erased_before_their_turn_was_applied_goes(bench: Bench) -> None:
    claimed = bench.claimed("large")
    bench.apply(erasure("alice", occurred=50), received=50)
    bench.apply(claimed, received=40)
    assert claimed.payload
    assert bench.located() == {"large": None}
    assert not bench.files.holds(claimed.payload)


def test_orphaned_claims_are_dropped_and_those_on_their_way_or_in_use_stay(bench: Bench) -> None:
    used, waiting, orphan = (bench.claimed(id_) for id_ in ("used", "waiting", "orphan"))
    bench.apply(used)
    door = SqlInbox(bench.engine, free_bytes=lambda: 1 << 40)
    door.append_blocking([event_of(waiting)])
    door.close()
    sweep = SqlClaimSweep(bench.engine, bench.engine, claims=bench.files.claims, drop=bench.files.drop).sweep
    now = datetime.now(UTC)
    assert sweep(now) == 0  # too young
    assert sweep(now + timedelta(hours=2)) == 0  # an event that waits in the inbox may be its
    with writing(bench.engine) as connection:
        connection.execute(update(inbox).values(relayed_at=now, applied_at=now))
    bench.apply(waiting)
    assert sweep(now + timedelta(hours=2)) == 1
    assert [bool(turn.payload and bench.files.holds(turn.payload)) for turn in (used, waiting, orphan)] == [True, True, False]


def test_the_payload_of_a_turn_that_came_days_later_stays_while_its_event_waits_to_be_applied(bench: Bench) -> None:
    late, week = bench.claimed("late"), timedelta(days=7)
    now = datetime.now(UTC)
    door = SqlInbox(bench.engine, clock=lambda: now + timedelta(days=3), free_bytes=lambda: 1 << 40)
    door.append_blocking([event_of(late)])
    door.close()
    sweep = SqlClaimSweep(bench.engine, bench.engine, claims=bench.files.claims, drop=bench.files.drop, min_age=week).sweep
    assert sweep(now + 2 * week) == 0
    assert bench.apply(late) == 1
    assert late.payload
    assert bench.located() == {"late": late.payload.segment}


def test_a_large_turn_s_payload_stays_for_a_week_in_which_its_event_may_lie_in_a_spool(tmp_path: Path, postgres_url: str) -> None:
    settings = from_environment({"RATCHET_DATA": str(tmp_path), "RATCHET_DATABASE_URL": postgres_url})
    files, claims, now = wiring.trajectories(settings), wiring.claim_sweep(settings), datetime.now(UTC)
    claim = files.deposit(payload_of(turn("large")))
    assert claims.sweep(now + timedelta(days=6)) == 0
    assert files.holds(claim)
    assert claims.sweep(now + timedelta(days=8)) == 1
    for opened in (claims._state, claims._inbox):
        opened.dispose()
