"""Exactly once in effect, and the join: whatever order, repetition or earliness, the rows are the same."""

import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, Table, func, insert, select, update

from app.db.counters import read_counts
from app.db.engine import open_engine, reading, writing
from app.db.ingestion.streams import SqlEffects, SqlPositions, read_offsets, stream_metrics
from app.db.learning.labels import SqlLabels
from app.db.tables import (
    batch_items,
    dead_letters,
    exposures,
    labels,
    observations,
    outbox,
    retractions,
    segments,
    stream_offsets,
    turn_words,
    turns,
)
from app.domain.errors import BadRequest, Unavailable
from app.domain.learning.rewards import Label
from app.domain.telemetry.streams import AppliedEvent, DeadLetter, Effect, EffectBatch, JoinRules
from tests.fakes.served import applied, at, erasure, exposure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments, acting

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)


@dataclass
class Bench:
    """A store over a database, and short ways to look at what it wrote."""

    engine: Engine
    segments: MemorySegments = field(default_factory=MemorySegments)

    def store(self, write: Callable[..., int] | None = None) -> SqlEffects:
        return SqlEffects(self.engine, rules=lambda: RULES, segments=acting(self.segments, write_sized=write or self.segments.write_sized))

    def apply(self, *effects: Effect, received: float = 1, offset: int = 0, now: float = 1) -> int:
        events = [applied(effect, offset=offset + n, received=received) for n, effect in enumerate(effects)]
        return self.apply_events(events, now=now)

    def apply_events(self, events: Sequence[AppliedEvent], *, now: float = 1) -> int:
        return self.store().apply(EffectBatch(events=tuple(events)), now=at(now))

    def rows(self, table: Table, *columns: str) -> list[tuple[Any, ...]]:
        chosen = [table.c[name] for name in columns] if columns else list(table.c)
        with reading(self.engine) as connection:
            return sorted((tuple(row) for row in connection.execute(select(*chosen))), key=repr)

    def counts(self) -> Counter[str]:
        with reading(self.engine) as connection:
            total: Counter[str] = Counter()
            for (_, name), value in read_counts(connection).items():
                total[name] += value
            return total

    def statuses(self) -> dict[str, str]:
        return {str(id_): str(status) for id_, status in self.rows(observations, "id", "status")}

    def label_turns(self) -> None:
        """As if labelling had labelled every turn."""
        with writing(self.engine) as connection:
            connection.execute(update(turns).values(labelled_at=at(61), needs_relabel=False))

    def asked(self) -> set[str]:
        return {str(id_) for id_, asked in self.rows(turns, "inference_id", "needs_relabel") if asked}


@pytest.fixture
def bench(engine: Engine) -> Bench:
    return Bench(engine)


def test_a_turn_is_indexed_and_its_tokens_lie_in_the_segment_named_after_its_first_record(bench: Bench) -> None:
    assert bench.apply(turn("a", finished=10), turn("b"), offset=41) == 2
    (name,) = bench.segments.written
    assert name.startswith("ratchet.events.1-0-00000000000000000041.")
    assert bench.rows(turns, "inference_id", "payload_segment", "label_due_at", "segment") == [
        ("a", name, at(70), "task=edit"),
        ("b", name, at(60), "task=edit"),
    ]
    assert bench.segments.written[name]["a"].logprobs == (-0.5, -0.25)
    assert bench.rows(segments, "name", "rows", "bytes") == [(name, 2, 200)]


def test_the_same_records_again_change_nothing(bench: Bench) -> None:
    effects = (turn("a"), observation("o", of="a"), exposure("a"), retraction("o"))
    assert bench.apply(*effects) == 4
    before = [bench.rows(table) for table in (turns, observations, exposures, retractions, segments)]
    assert bench.apply(*effects) == 0
    assert [bench.rows(table) for table in (turns, observations, exposures, retractions, segments)] == before
    assert bench.counts()["redelivered"] == 4


def test_repetitions_within_one_batch_are_applied_once(bench: Bench) -> None:
    assert bench.apply(observation("o", of="a"), observation("o", of="a"), turn("a"), turn("a")) == 2


def test_the_same_identity_with_another_payload_is_a_conflict_and_the_first_stays(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a", value=1.0))
    bench.apply(observation("o", of="a", value=0.0))
    assert bench.rows(observations, "id", "value") == [("o", 1.0)]
    assert bench.counts()["conflict"] == 1


def test_an_early_observation_is_parked_and_joined_when_its_turn_comes(bench: Bench) -> None:
    bench.apply(observation("o", of="a"), observation("p", episode="episode-of-a"))
    assert bench.statuses() == {"o": "parked", "p": "parked"}
    bench.apply(turn("a"))
    assert bench.statuses() == {"o": "joined", "p": "joined"}
    assert bench.counts()["early"] == 2
    assert bench.rows(observations, "id", "policy") == [("o", "composer"), ("p", None)], "an episode may have turns of several policies"


def test_lateness_is_judged_by_when_the_inbox_received_it(bench: Bench) -> None:
    bench.apply(turn("a"))  # due at 60, late after 660
    bench.apply(observation("in-time", of="a"), received=660)
    bench.apply(observation("late", of="a"), received=661)
    bench.apply(observation("old-news", of="a", occurred=-1000), received=2)
    assert bench.statuses() == {"in-time": "joined", "late": "late", "old-news": "joined"}
    assert bench.counts()["late"] == 1


def test_an_observation_of_an_episode_is_in_time_as_long_as_its_last_turn_is(bench: Bench) -> None:
    bench.apply(turn("a", episode="e"))
    bench.apply(observation("o", episode="e"), received=700)
    assert bench.statuses() == {"o": "late"}
    bench.apply(turn("b", episode="e", finished=500))  # due at 560, late after 1160
    assert bench.statuses() == {"o": "joined"}


def test_a_labelled_turn_that_is_in_no_batch_is_labelled_again_after_a_correction(bench: Bench) -> None:
    bench.apply(turn("a"), turn("b"), turn("batched"))
    bench.label_turns()
    with writing(bench.engine) as connection:
        row = {"inference_id": "batched", "batch_id": "1", "episode_id": "e", "reward": 1.0, "label_revision": 1, "segment": ""}
        connection.execute(insert(batch_items), row)
    bench.apply(observation("1", of="a"), observation("2", of="batched"), received=100)
    bench.apply(observation("3", of="b"), received=10_000)
    assert bench.asked() == {"a"}
    assert bench.counts()["correcting"] == 2


def test_an_unlabelled_turn_is_not_asked_for_again(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a"))
    assert bench.asked() == set()


def test_a_retraction_takes_back_an_observation_that_is_here_or_will_come(bench: Bench) -> None:
    bench.apply(turn("a"), observation("here", of="a"))
    bench.label_turns()
    bench.apply(retraction("here", occurred=5), retraction("coming", occurred=6))
    assert bench.asked() == {"a"}
    bench.apply(observation("coming", of="a"))
    assert bench.rows(observations, "id", "retracted_at") == [("coming", at(6)), ("here", at(5))]
    assert bench.counts()["retracted"] == 1


def test_a_parked_observation_becomes_an_orphan_and_still_joins_when_its_turn_comes_after_all(bench: Bench) -> None:
    bench.apply(observation("o", of="a"))
    assert bench.store().expire_parked(now=at(600)) == 0
    assert bench.store().expire_parked(now=at(602)) == 1
    assert (bench.statuses(), bench.counts()["orphaned"]) == ({"o": "orphan"}, 1)
    bench.apply(turn("a"))
    assert bench.statuses() == {"o": "joined"}


def test_offsets_move_forward_only(bench: Bench) -> None:
    place = ("ratchet.events.1", 3)
    seen: list[int] = []
    for offset in (10, 7, 12, 9):
        bench.store().apply(EffectBatch(next_offsets={place: offset}, high_waters={place: 20}), now=at(1))
        seen.append(read_offsets(bench.engine, "ratchet-ingest")[place])
    assert seen == [10, 10, 12, 12]
    with reading(bench.engine) as connection:
        assert stream_metrics(connection)["lag"] == 8


def test_offsets_of_a_topic_made_anew_take_the_place_of_the_old_ones_and_forgetting_is_counted(bench: Bench) -> None:
    place = ("ratchet.events", 3)
    positions = SqlPositions(bench.engine, group="ratchet-ingest")
    for offset, topic in ((500, "cluster/one"), (7, "cluster/two"), (5, "cluster/two")):
        bench.store().apply(EffectBatch(next_offsets={place: offset}, incarnations={place[0]: topic}), now=at(1))
    assert positions.read() == {place: (7, "cluster/two")}
    positions.forget([place])
    assert positions.read() == {}
    assert bench.counts()["offsets_reset"] == 1


def test_nothing_is_kept_when_the_segment_cannot_be_written(bench: Bench) -> None:
    def fail(name: str, payloads: Sequence[Any]) -> int:
        raise OSError("disk full")

    with pytest.raises(Unavailable, match="disk full"):
        bench.store(write=fail).apply(EffectBatch(events=(applied(turn("a")),), next_offsets={("t", 0): 1}), now=at(1))
    assert bench.rows(turns) == bench.rows(stream_offsets) == []
    assert bench.apply(turn("a")) == 1


def test_what_the_database_refuses_is_bad_data_not_a_crash(bench: Bench) -> None:
    if bench.engine.dialect.name == "sqlite":
        bad = observation("o", of="a", name="\ud800")
        events = (applied(observation("fine", of="a")),)
        with pytest.raises((BadRequest, UnicodeEncodeError)):
            bench.store().apply(EffectBatch(events=(*events, applied(bad))), now=at(1))
        return
    for bad in (observation("o", of="a", name="nul\x00"), observation("o", of="x" * 65)):
        with pytest.raises(BadRequest, match="refuses"):
            bench.apply(observation("fine", of="a"), bad)
    assert bench.rows(observations) == []


def test_a_dead_letter_is_kept_once_counted_and_sent_to_its_topic(bench: Bench) -> None:
    letter = DeadLetter(topic="ratchet.events.1", partition=0, offset=5, headers={"ce_type": "x"}, payload=b"\xff", reason="malformed")
    for _ in range(2):
        bench.store().apply(EffectBatch(dead=(letter,)), now=at(1))
    assert bench.rows(dead_letters, "offset", "payload", "reason", "attempts") == [(5, b"\xff", "malformed", 2)]
    assert bench.counts()["dead_lettered"] == 2
    assert len(bench.rows(outbox)) == 2


def test_what_an_erased_person_said_before_is_forgotten_in_replays_too(bench: Bench) -> None:
    bench.apply(turn("a"), observation("o", of="a"), exposure("a"), turn("b", actor="bob"), observation("p", of="b"))
    bench.apply(erasure("alice", occurred=50), now=50, received=50)
    bench.apply(turn("a2"), observation("o2", of="a2", actor="alice"), exposure("a2"), received=40, now=60)
    bench.apply(observation("o3", of="a"), received=70, now=70)
    (left,) = bench.segments.written
    assert bench.rows(turns, "inference_id", "actor", "payload_segment") == [
        ("a", None, None),
        ("a2", None, None),
        ("b", "bob", left),
    ]
    assert bench.rows(turn_words, "inference_id", "completion") == [("b", "answer b")]
    assert bench.statuses() == {"p": "joined"}
    assert bench.rows(exposures) == []
    assert set(bench.segments.written[left]) == {"b"}
    assert bench.counts()["erased"] == 3
    bench.apply(turn("back", finished=80), received=90, now=90)  # they came back: that is new
    assert ("back", "alice") in bench.rows(turns, "inference_id", "actor")


# --- order, repetition and earliness do not matter -------------------------------------------------------------------------------

STORY: tuple[tuple[Effect, float], ...] = (
    (turn("a", episode="e"), 1),
    (turn("b", episode="e", finished=300), 301),
    (turn("c"), 1),
    (exposure("a"), 0.5),
    (observation("a1", of="a"), 2),
    (observation("a2", of="a"), 659),
    (observation("a3", of="a"), 670),  # late
    (observation("e1", episode="e"), 900),  # late for a, in time for b
    (observation("e2", episode="e"), 2_000),  # late for both
    (observation("c1", of="c"), 3),
    (retraction("a1", occurred=9), 9),
    (retraction("a1", occurred=8), 10),
    (retraction("never-seen", occurred=8), 10),
    (observation("lost", of="no-such-turn"), 5),
)


def outcome(template: Path, batches: Sequence[Sequence[AppliedEvent]]) -> list[Any]:
    """The rows after applying these batches to an empty database, without what tells when and where they were applied."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(open_engine(f"sqlite:///{shutil.copyfile(template, Path(folder) / 'x.db')}"))
        for batch in batches:
            bench.apply_events(batch)
        kept = {
            turns: [column.name for column in turns.c if column.name not in {"payload_segment", "evidence"}],
            observations: [column.name for column in observations.c],
            exposures: [],
            retractions: [],
        }
        rows: list[Any] = [bench.rows(table, *columns) for table, columns in kept.items()]
        payloads = {id_: payload for segment in bench.segments.written.values() for id_, payload in segment.items()}
        bench.engine.dispose()
    return [*rows, payloads]


@given(st.randoms(use_true_random=False), st.integers(0, 3), st.integers(1, 5))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_order_repetition_and_batching_gives_the_same_rows(
    sqlite_template: Path, chance: random.Random, repetitions: int, batches: int
) -> None:
    story = [applied(effect, offset=n, received=received) for n, (effect, received) in enumerate(STORY)]
    shuffled = story + [chance.choice(story) for _ in range(repetitions * 3)]
    chance.shuffle(shuffled)
    cut = [shuffled[n::batches] for n in range(batches)]
    assert outcome(sqlite_template, cut) == outcome(sqlite_template, [story])


def test_the_story_ends_as_worked_out_by_hand(bench: Bench) -> None:
    bench.apply_events([applied(effect, offset=n, received=received) for n, (effect, received) in enumerate(STORY)])
    assert bench.statuses() == {
        "a1": "joined", "a2": "joined", "a3": "late", "e1": "joined", "e2": "late", "c1": "joined", "lost": "parked",
    }  # fmt: skip
    assert dict(bench.rows(observations, "id", "retracted_at"))["a1"] == at(8)


def test_a_million_open_turns_would_not_be_held_in_memory(bench: Bench) -> None:
    """The join keeps nothing between batches: a second store over the same database knows all the first one did."""
    bench.apply(observation("o", of="a"))
    other = Bench(bench.engine)
    other.apply(turn("a"))
    assert other.statuses() == {"o": "joined"}
    with reading(bench.engine) as connection:
        assert connection.execute(select(func.count()).select_from(turns)).scalar() == 1
        assert at(0) + timedelta(seconds=60) == stream_metrics(connection)["oldest_due_at"]


def test_a_label_computed_before_an_observation_arrived_is_not_written(bench: Bench) -> None:
    book = SqlLabels(bench.engine)
    bench.apply(turn("a"), turn("b"))
    due = book.due("composer", now=at(100), limit=10)
    bench.apply(observation("o", of="a"), received=50)  # between the labeller's reading and its writing
    book.write([label_of(facts.facts.inference_id) for facts in due], now=at(100))
    assert bench.rows(labels, "inference_id", "revision") == [("b", 1)]
    again = book.due("composer", now=at(100), limit=10)
    assert [(turn_.facts.inference_id, [o.id for o in turn_.observations]) for turn_ in again] == [("a", ["o"])]


def label_of(id_: str) -> Label:
    return Label(
        inference_id=id_, policy="composer", version="v1", reward=0.0, terms=(), rule_set="r", revision=1, exclusion=None,
        labelled_at=at(100), segment="", actor=None, held_out=False,
    )  # fmt: skip


def test_history_is_joined_by_when_it_occurred_and_nothing_else_is(bench: Bench) -> None:
    year = 365 * 86_400
    bench.apply(turn("old", source="import:chats"), turn("real"), received=year)
    said = [("in time", "import:chats", "old", 30), ("too late", "import:chats", "old", 90_000), ("claims", "import:chats", "real", 30)]
    said.append(("live", "api", "old", 30))
    bench.apply(*(observation(id_, of=of, source=source, occurred=at_s) for id_, source, of, at_s in said), received=year)
    assert bench.statuses() == {"in time": "joined", "too late": "late", "claims": "late", "live": "late"}


@pytest.mark.parametrize("turn_first", [True, False])
def test_what_another_policy_s_key_says_about_a_turn_is_never_joined_to_it(bench: Bench, turn_first: bool) -> None:
    said = [observation("own", of="a", policy="composer"), observation("anybody", of="a"), observation("foreign", of="a", policy="tab")]
    for effects in ([turn("a")], said) if turn_first else (said, [turn("a")]):
        bench.apply(*effects)
    assert bench.statuses() == {"own": "joined", "anybody": "joined", "foreign": "parked"}
    assert bench.counts()["foreign"] == (1 if turn_first else 0)
    (due,) = SqlLabels(bench.engine).due("composer", now=at(100), limit=10)
    assert {o.id for o in due.observations} == {"own", "anybody"}
    bench.store().expire_parked(now=at(1000))
    assert bench.statuses()["foreign"] == "orphan"


def test_a_key_s_observation_of_an_episode_reaches_its_own_policy_s_turns_alone(bench: Bench) -> None:
    bench.apply(turn("a", episode="e"), turn("b", episode="e", policy="tab"))
    bench.apply(
        observation("of-tab", episode="e", policy="tab"), observation("of-both", episode="e"), observation("none", episode="e", policy="x")
    )
    found = {
        policy: {o.id for due in SqlLabels(bench.engine).due(policy, now=at(100), limit=10) for o in due.observations}
        for policy in ("composer", "tab")
    }
    assert found == {"composer": {"of-both"}, "tab": {"of-tab", "of-both"}}


def test_foreign_observations_do_not_keep_crossed_ones_from_being_settled(bench: Bench) -> None:
    bench.apply(turn("a"), observation("foreign", of="a", policy="tab"))
    before = bench.rows(observations)
    bench.store().expire_parked(now=at(2))
    assert bench.rows(observations) == before
    assert "orphaned" not in bench.counts()
