"""What applying a batch counts, names and says, from both sides of each bound; on SQLite alone."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine, update

from app.db.engine import reading, writing
from app.db.ingestion.streams import SqlEffects, SqlPositions, stream_lag, stream_metrics
from app.db.tables import segments, stream_offsets, turns
from app.domain.telemetry.streams import EffectBatch
from app.domain.telemetry.turns import PayloadClaim
from tests.fakes.served import applied, at, erasure, exposure, observation, retraction, turn
from tests.integration.database.test_effects import RULES, Bench


@pytest.fixture
def bench(sqlite_engine: Engine) -> Bench:
    return Bench(sqlite_engine)


def test_repetitions_and_conflicts_are_told_apart_within_a_batch_and_between_two(bench: Bench) -> None:
    one, other = applied(observation("o", of="a", value=1.0)), applied(observation("o", of="a", value=0.0), offset=1)
    assert bench.apply_events([one, replace(one), other]) == 1
    assert (bench.counts()["redelivered"], bench.counts()["conflict"]) == (1, 1)
    assert bench.apply_events([one]) == 0
    assert bench.apply_events([other]) == 0
    assert (bench.counts()["redelivered"], bench.counts()["conflict"]) == (2, 2)


def test_a_turn_that_came_before_is_ignored_and_counted_and_so_is_what_was_shown_twice(bench: Bench) -> None:
    bench.apply(turn("a"), exposure("a"))
    again = replace(applied(turn("a", completion="another")), id="another-event")
    shown = replace(applied(exposure("a")), id="another-exposure")
    assert bench.apply_events([again, shown]) == 2
    assert (bench.counts()["turn_ignored"], bench.counts()["exposure_ignored"]) == (1, 1)


@pytest.mark.parametrize(("received", "kept"), [(50, False), (50.001, True)])
def test_what_was_received_at_the_moment_of_an_erasure_is_forgotten_and_what_came_after_it_stays(
    bench: Bench, received: float, kept: bool
) -> None:
    bench.apply(erasure("alice", occurred=50), received=50, now=50)
    bench.apply(turn("a", finished=received), observation("o", of="b", actor="alice"), received=received, now=60)
    assert bench.rows(turns, "inference_id", "actor") == [("a", "alice" if kept else None)]
    assert (bench.statuses(), bench.counts()["erased"]) == (({"o": "parked"}, 0) if kept else ({}, 1))


def test_a_segment_is_named_after_the_first_of_its_records_and_has_its_size(bench: Bench) -> None:
    events = [applied(turn("b"), offset=9), applied(turn("a"), offset=7), applied(observation("o", of="a"), offset=3)]
    bench.apply_events(events)
    ((name, rows, size),) = bench.rows(segments, "name", "rows", "bytes")
    assert (name.rpartition(".")[0], rows, size) == ("ratchet.events.1-0-00000000000000000007", 2, 200)
    bench.apply_events([*events, applied(turn("c"), offset=5)])
    names = {str(name).rpartition(".")[0][-1] for (name,) in bench.rows(segments, "name")}
    assert names == {"5", "7"}, "of what is new alone"
    bench.apply(observation("p", of="a"), offset=20)
    assert len(bench.rows(segments)) == 2, "nobody's tokens are no segment"


def test_a_turn_without_its_payload_is_applied_counted_and_told(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    claim = PayloadClaim(segment="claim-a", digest="d", bytes=7, has_logprobs=True)
    claimed = turn("a", payload=claim, prompt_tokens=None, completion_tokens=None, logprobs=None)
    other = PayloadClaim(segment="claim-b", digest="d", bytes=7, has_logprobs=True)
    held = turn("b", payload=other, prompt_tokens=None, completion_tokens=None, logprobs=None)
    store = SqlEffects(
        bench.engine, rules=lambda: RULES, segments=bench.segments,
        holds=lambda claim: claim.segment == "claim-b",
    )  # fmt: skip
    store.apply(EffectBatch(events=(applied(claimed), applied(held, offset=1), applied(claimed, offset=2))), now=at(1))
    assert bench.rows(turns, "inference_id", "payload_segment") == [("a", None), ("b", "claim-b")]
    assert bench.rows(segments, "name", "rows", "bytes") == [("claim-b", 1, 7)]
    assert bench.counts()["claim_missing"] == 1
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["event=claim_missing inference_id=a alarm=the payload of a turn is not in the trajectory store"]


def test_positions_are_a_group_s_own_and_the_end_is_never_before_where_it_is(bench: Bench) -> None:
    for group, offset, end in (("one", 10, 8), ("two", 3, 20)):
        bench.store().apply(EffectBatch(next_offsets={("t", 0): offset, ("t", 1): 1}, high_waters={("t", 0): end}, group=group), now=at(1))
    assert bench.rows(stream_offsets, "consumer_group", "partition", "next_offset", "high_water") == [
        ("one", 0, 10, 10), ("one", 1, 1, 1), ("two", 0, 3, 20), ("two", 1, 1, 1),
    ]  # fmt: skip
    with reading(bench.engine) as connection:
        assert stream_lag(connection) == 17
    one, two = (SqlPositions(bench.engine, group=group) for group in ("one", "two"))
    one.forget([("t", 0), ("t", 1)])
    assert (one.read(), len(two.read()), bench.counts()["offsets_reset"]) == ({}, 2, 2)


def test_a_batch_that_moved_nothing_on_leaves_when_it_was_and_where_it_ends(bench: Bench) -> None:
    for now, offset, end in ((1, 10, 12), (2, 10, 30), (3, 11, 30)):
        bench.store().apply(EffectBatch(next_offsets={("t", 0): offset}, high_waters={("t", 0): end}), now=at(now))
        if now == 2:
            assert bench.rows(stream_offsets, "updated_at", "high_water") == [(at(1), 12)]
    assert bench.rows(stream_offsets, "updated_at", "high_water") == [(at(3), 30)]


def test_what_waits_for_its_turn_and_for_its_label_is_counted(bench: Bench) -> None:
    bench.apply(turn("a", finished=10), turn("b", finished=5), observation("o", of="a"), observation("p", of="x"))
    with reading(bench.engine) as connection:
        found = stream_metrics(connection)
    assert (found["turns_unlabelled"], found["oldest_due_at"], found["parked"], found["lag"]) == (2, at(65), 1, 0)
    with writing(bench.engine) as connection:
        connection.execute(update(turns).where(turns.c.inference_id == "b").values(labelled_at=at(70)))
    with reading(bench.engine) as connection:
        assert (stream_metrics(connection)["turns_unlabelled"], stream_metrics(connection)["oldest_due_at"]) == (1, at(70))


def test_dead_letters_that_are_applied_again_are_counted_by_those_that_died(bench: Bench) -> None:
    assert bench.store().apply(EffectBatch(), now=at(1)) == 0
    assert bench.counts()["dead_lettered"] == 0
    bench.apply(retraction("o"), observation("o", of="a"))
    assert bench.statuses() == {"o": "parked"}
