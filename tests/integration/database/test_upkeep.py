"""What is old goes, what is needed stays, whatever else is true; what SQL decides is tried on both databases."""

import math
import random
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Engine, insert, select, update

from app.db.engine import reading, writing
from app.db.ingestion.segment_rows import DROPPING
from app.db.ingestion.streams import SqlEffects
from app.db.tables import (
    applied_events,
    audit,
    batch_items,
    batches,
    counters,
    cycles,
    dead_letters,
    deployment_pointer,
    exposures,
    gate_evidence,
    inbox,
    labels,
    observations,
    outbox,
    releases,
    retractions,
    segments,
    training_runs,
    turns,
)
from app.db.upkeep.keeper import SqlUpkeep
from app.domain.errors import BadConfig, LeaseLost, Unavailable
from app.domain.retention import Retention, retention
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from tests.fakes.served import applied, at, exposure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments

DAY = 86_400.0
NOW = at(100 * DAY)
RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600)
KEPT = Retention(inbox_days=1, dedupe_days=20, segments_days=30, turns_days=40, labels_days=35, exposures_days=30, observations_days=25)


class Files(MemorySegments):
    """Segments in memory."""

    def merge(self, sources: Any, *, target: Any, at_most_bytes: int) -> Any:
        """Nothing is merged here: see the tests of compaction."""
        raise AssertionError(sources)


class Place:
    """A deployment with a past."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.files = Files()
        self.offset = 0

    def serve(self, *served: TurnServed, day: float, said: bool = True, labelled: bool = True) -> None:
        """Turns of one day in one segment, with a rating, a retracted one and an exposure each; labelled an hour later."""
        ids = [one.inference_id for one in served]
        effects: list[Any] = [*served, *(exposure(id_) for id_ in ids)]
        if said:
            effects += [observation(f"o-{id_}", of=id_) for id_ in ids] + [observation(f"r-{id_}", of=id_) for id_ in ids]
            effects += [retraction(f"r-{id_}") for id_ in ids]
        moment = at(day * DAY)
        self.apply(*effects, day=day)
        with writing(self.engine) as connection:
            mine = turns.c.inference_id.in_(ids)
            later = moment + timedelta(hours=1)
            connection.execute(update(turns).where(mine).values(finished_at=moment, labelled_at=later if labelled else None))
            for one in served:
                shown = exposures.c.inference_id == one.inference_id
                connection.execute(update(exposures).where(shown).values(occurred_at=moment, policy=one.policy))
            if labelled:
                connection.execute(insert(labels), [label(one, later) for one in served])

    def apply(self, *effects: Any, day: float) -> None:
        store = SqlEffects(self.engine, rules=lambda: RULES, segments=self.files)
        events = tuple(applied(effect, offset=self.offset + n, received=day * DAY) for n, effect in enumerate(effects))
        self.offset += len(events)
        store.apply(EffectBatch(events=events), now=at(day * DAY))

    def take_back(self, id_: str, *, day: float) -> None:
        self.apply(retraction(id_), day=day)

    def add(self, table: Any, **values: Any) -> None:
        with writing(self.engine) as connection:
            connection.execute(insert(table).values(**values))

    def keeper(self, kept: Retention = KEPT, *, owner: str = "one", now: datetime = NOW, rows: int = 8) -> SqlUpkeep:
        return SqlUpkeep(self.engine, self.engine, files=self.files, retention=kept, owner=owner, clock=lambda: now, rows=rows)

    def retire(self, kept: Retention = KEPT) -> dict[str, int]:
        keeper = self.keeper(kept)
        with keeper.office() as lease:
            assert lease is not None
            return keeper.retire(lease)

    def rows(self, *columns: Any) -> set[Any]:
        with reading(self.engine) as connection:
            return {row[0] if len(row) == 1 else tuple(row) for row in connection.execute(select(*columns))}

    def words(self) -> set[str]:
        return {id_ for segment in self.files.written.values() for id_ in segment}


def label(of: TurnServed, moment: datetime) -> dict[str, Any]:
    return {
        "inference_id": of.inference_id, "revision": 1, "current": True, "policy": of.policy, "version": of.version, "reward": 1.0,
        "terms": [], "rule_set": "r", "segment": "", "held_out": False, "finished_at": moment, "labelled_at": moment,
    }  # fmt: skip


def batched(place: Place, ids: list[str], *, batch: str = "b", slot: int = 1, status: str) -> None:
    place.add(batches, id=batch, policy="composer", slot=slot, champion="v1", anchor="v1", rule_set="r", window_from=at(0), window_to=at(1),
              left_out={}, created_at=at(0))  # fmt: skip
    place.add(cycles, policy="composer", slot=slot, status=status, step="train", fencing_token=1, attempt=1, timings={}, started_at=at(0),
              batch_id=batch)  # fmt: skip
    for id_ in ids:
        place.add(batch_items, inference_id=id_, batch_id=batch, episode_id=f"episode-of-{id_}", reward=0.5, label_revision=1, segment="")


def release(place: Place, *, state: str, created: float, policy: str = "composer", digest: str = "c1") -> None:
    moments = {"created_at": at(created * DAY), "changed_at": at(created * DAY)}
    place.add(releases, id=f"r-{policy}-{digest}", policy=policy, digest=digest, version_name=digest, state=state, generation=1,
              champion_digest="v1", champion_generation=1, config={}, **moments)  # fmt: skip


@pytest.fixture
def place(sqlite_engine: Engine) -> Place:
    return Place(sqlite_engine)


@pytest.fixture
def anywhere(engine: Engine) -> Place:
    return Place(engine)


def test_every_class_goes_when_its_days_are_over_and_not_before(anywhere: Place) -> None:
    anywhere.serve(turn("old"), turn("old-too"), day=10)
    anywhere.serve(turn("unlabelled-again"), day=62)  # 38 days: beyond 30 for tokens and 35 for labels, not beyond 40 for turns
    anywhere.serve(turn("tokens-only"), day=65)  # an hour within 35 days for labels
    anywhere.serve(turn("young"), day=98)
    told = anywhere.retire()
    assert anywhere.rows(turns.c.inference_id, turns.c.payload_segment.is_not(None)) == {
        ("unlabelled-again", False), ("tokens-only", False), ("young", True)
    }  # fmt: skip
    assert anywhere.words() == {"young"}
    assert anywhere.rows(labels.c.inference_id) == {"tokens-only", "young"}
    said = {"unlabelled-again", "tokens-only", "young"}
    assert anywhere.rows(observations.c.id) == {f"{kind}-{id_}" for kind in "or" for id_ in said}
    assert anywhere.rows(retractions.c.observation_id) == {f"r-{id_}" for id_ in said}
    assert anywhere.rows(exposures.c.inference_id) == {"young"}
    assert anywhere.rows(segments.c.state) == {"whole"}
    assert (told["turns"], told["labels"], told["segments"]) == (2, 1, 4)
    assert anywhere.rows(counters.c.name, counters.c.value) >= {(f"retired_{name}", count) for name, count in told.items()}
    assert anywhere.retire() == {}  # and a second time nothing


def test_a_turn_stays_as_long_as_its_tokens_its_label_or_its_episode_are_not_over(place: Place) -> None:
    place.serve(turn("a", episode="chain"), turn("alone"), day=10)
    place.serve(turn("b", episode="chain"), day=90)  # the same conversation, went on
    place.serve(turn("unlabelled"), day=11, labelled=False)
    place.serve(turn("asked-anew"), day=11)
    with writing(place.engine) as connection:
        connection.execute(update(turns).where(turns.c.inference_id == "asked-anew").values(needs_relabel=True))
    place.retire()
    assert place.rows(turns.c.inference_id) == {"a", "b", "unlabelled", "asked-anew"}
    assert place.words() == {"b", "unlabelled"}  # of the labelled old ones nobody reads the words again


def test_what_takes_back_an_observation_that_never_comes_goes_as_a_stray_one_does(anywhere: Place) -> None:
    anywhere.take_back("never", day=74)
    anywhere.take_back("coming", day=76)  # by its sender's clock as old as the other one
    told = anywhere.retire()
    assert anywhere.rows(retractions.c.observation_id) == {"coming"}
    assert told["retractions"] == 1
    anywhere.apply(turn("a"), observation("coming", of="a"), day=98)
    assert anywhere.rows(observations.c.id, observations.c.retracted_at) == {("coming", at(2))}


@pytest.mark.parametrize("why", ["cycle", "run", "release"])
def test_what_a_batch_at_work_holds_is_kept_until_it_is_over(place: Place, why: str) -> None:
    place.serve(turn("held"), turn("free"), day=10)
    batched(place, ["held"], status="running" if why == "cycle" else "done")
    run = {"id": "run", "policy": "composer", "batch_id": "b", "parent": "v1", "metrics": {}, "config": {}, "started_at": at(0)}
    place.add(training_runs, **run, status="running" if why == "run" else "done", candidate="c1" if why == "release" else None)
    if why == "release":
        release(place, state="READY", created=20)
    place.retire()
    assert place.rows(turns.c.inference_id) == {"held"}
    assert place.words() == {"held"}  # the file was rewritten without the other one
    with writing(place.engine) as connection:
        connection.execute(update(cycles).values(status="done"))
        connection.execute(update(training_runs).values(status="done"))
        connection.execute(update(releases).values(state="SUPERSEDED"))
    place.retire()
    assert (place.rows(turns.c.inference_id), place.rows(labels.c.inference_id), place.words()) == (set(), set(), set())
    assert place.rows(batch_items.c.inference_id, batch_items.c.reward) == {("held", 0.5)}  # what was trained on is known for ever


def test_turns_without_tokens_are_kept_for_the_same_reasons(place: Place) -> None:
    """What a chat with `store: false` leaves, or what let go of its tokens already."""
    place.serve(turn("held"), turn("free"), turn("half", episode="chain"), day=10)
    place.serve(turn("young", episode="chain"), day=90)
    place.serve(turn("compared", policy="tab"), day=11)
    batched(place, ["held"], status="running")
    release(place, state="CANARY", created=10, policy="tab")
    with writing(place.engine) as connection:
        connection.execute(update(turns).values(payload_segment=None))
    place.retire()
    assert place.rows(turns.c.inference_id) == {"held", "half", "young", "compared"}


def test_a_comparison_under_way_keeps_its_policy_s_past_and_no_other_one_s(place: Place) -> None:
    place.serve(turn("before"), day=9)
    place.serve(turn("within"), turn("other", policy="tab"), day=11)
    release(place, state="CANARY", created=10)
    place.retire()
    assert place.rows(turns.c.inference_id) == {"within"}
    assert place.rows(exposures.c.inference_id) == {"within"}


def test_a_holdback_keeps_what_it_compares(place: Place) -> None:
    place.serve(turn("before"), day=9)
    place.serve(turn("within"), day=11)
    place.add(deployment_pointer, policy="composer", digest="v1", generation=1, anchor="v1", holdback=0.1, changed_at=at(10 * DAY))
    place.retire()
    assert place.rows(turns.c.inference_id) == {"within"}
    with writing(place.engine) as connection:
        connection.execute(update(deployment_pointer).values(holdback=0.0))
    place.retire()
    assert place.rows(turns.c.inference_id) == set()


def test_nothing_of_an_audit_is_ever_touched(place: Place) -> None:
    place.add(audit, seq=1, occurred_at=at(0), actor="a", action="b", subject="c", detail={}, previous_hash="0", hash="1")
    place.add(gate_evidence, hash="h", release_id="r", payload=b"units", created_at=at(0))
    release(place, state="SUPERSEDED", created=1)
    place.retire()
    assert place.rows(audit.c.seq) == {1}
    assert place.rows(gate_evidence.c.hash) == {"h"}
    assert len(place.rows(releases.c.id)) == 1


def test_identities_letters_and_what_was_said_to_kafka(anywhere: Place) -> None:
    def event(name: str, **more: Any) -> None:
        row = {"source": "s", "event_id": name, "payload_hash": b"h"}
        anywhere.add(inbox, **row, type="t", key="k", time=at(0), payload=b"", received_at=at(0), **more)
        anywhere.add(applied_events, **row, applied_at=more.get("applied_at") or at(0))

    event("stuck", relayed_at=at(0))  # at the head of the table, and not applied
    for n in range(20):
        event(f"old-{n}", relayed_at=at(0), applied_at=at(n))
    event("young", relayed_at=at(0), applied_at=at(85 * DAY))
    for n, (topic, sent) in enumerate([("ratchet.releases", 1), ("ratchet.labels", 1), ("ratchet.labels", 99.5), ("ratchet.events", None)]):
        anywhere.add(outbox, event_id=f"e{n}", topic=topic, key="k", type="t", payload=b"x", created_at=at(0),
                  sent_at=None if sent is None else at(sent * DAY))  # fmt: skip
    for offset, seen in ((1, 1), (2, 90)):
        anywhere.add(dead_letters, topic="t", partition=0, offset=offset, reason="r", headers={}, payload=b"p", first_seen_at=at(0),
                  last_seen_at=at(seen * DAY))  # fmt: skip
    told = anywhere.retire()
    assert anywhere.rows(inbox.c.event_id) == {"stuck", "young"}
    assert anywhere.rows(applied_events.c.event_id) == {"young"}
    assert anywhere.rows(outbox.c.event_id) == {"e0", "e2", "e3"}  # a release's webhooks may be sent again
    assert anywhere.rows(dead_letters.c.offset) == {2}
    assert (told["identities"], told["applied"], told["outbox"], told["dead_letters"]) == (20, 21, 1, 1)


@pytest.mark.parametrize("seed", range(2))  # in the second draw tokens go after a day: what keeps turns is not their tokens
def test_whatever_the_past_was_only_what_is_old_and_unneeded_goes(anywhere: Place, seed: int) -> None:
    """The promise as a property: drawn ages, episodes, batches and comparisons."""
    draw, kept = random.Random(seed), replace(KEPT, segments_days=30 if seed == 0 else 1)
    born: dict[str, tuple[float, str, bool]] = {}
    for n in range(16):
        id_, day, labelled = f"t{n}", draw.choice([5, 30, 55, 62, 69, 71, 95]) + draw.random() / 2, draw.random() < 0.85
        episode = draw.choice([f"e{n}", f"e{draw.randrange(6)}"])
        anywhere.serve(turn(id_, episode=episode), day=day, labelled=labelled)
        born[id_] = (day, episode, labelled)
    held = set(draw.sample(sorted(born), 3))
    batched(anywhere, sorted(held), status="running")
    batched(anywhere, sorted(draw.sample(sorted(set(born) - held), 3)), batch="over", slot=2, status="done")
    opened = draw.choice([50, 200])
    if opened < 100:
        release(anywhere, state="OFFLINE", created=opened)

    def needed(id_: str) -> bool:
        return id_ in held or not born[id_][2] or born[id_][0] >= opened

    episodes = {episode: [i for i, (_, other, _) in born.items() if other == episode] for _, episode, _ in born.values()}
    # 100 − 40 − 1/24: labelled an hour after it was served. An episode goes when all of it is old, and nothing of it needed.
    goes = {i for ids in episodes.values() if all(born[i][0] + 1 / 24 < 60 and not needed(i) for i in ids) for i in ids}
    silent = {i for i in born if born[i][0] < (70 if seed == 0 else 99) and not needed(i)}
    items = anywhere.rows(batch_items)
    anywhere.retire(kept)
    assert anywhere.rows(turns.c.inference_id) == set(born) - goes
    assert anywhere.words() == set(born) - silent
    assert {o.removeprefix("o-") for o in anywhere.rows(observations.c.id) if o.startswith("o-")} == set(born) - goes
    assert anywhere.rows(labels.c.inference_id) <= set(born) - goes
    assert held <= anywhere.rows(labels.c.inference_id) | {i for i in held if not born[i][2]}
    assert anywhere.rows(batch_items) == items


def test_a_kill_between_the_row_and_the_file_is_finished_by_the_next(place: Place) -> None:
    place.serve(turn("old"), day=10)
    (name,) = place.files.written

    class Killed(BaseException):
        pass

    def dead(*_: Any) -> int:
        raise Killed

    whole, place.files.drop = place.files.drop, dead  # type: ignore[method-assign] - the process ends when it reaches the file
    with pytest.raises(Killed):
        place.retire()
    assert place.rows(segments.c.name, segments.c.state) == {(name, DROPPING)}
    assert place.rows(turns.c.payload_segment) == {None}
    place.files.drop = whole  # type: ignore[method-assign]
    with writing(place.engine) as connection:
        connection.execute(update(turns).values(labelled_at=NOW))  # so that nothing else is due
    place.retire()
    assert place.words() == set()
    assert place.rows(segments.c.name) == set()


def test_one_keeps_house_and_whoever_lost_the_office_stops(place: Place) -> None:
    place.serve(turn("old"), day=10)
    first, second = place.keeper(), place.keeper(owner="two")
    with first.office() as lease:
        assert lease is not None
        with second.office() as none:
            assert none is None
        later = place.keeper(owner="two", now=NOW + timedelta(minutes=3))
        with later.office() as taken:
            assert taken is not None
            with pytest.raises(LeaseLost):
                first.retire(lease)
    assert place.rows(turns.c.inference_id) == {"old"}


def test_nothing_is_dropped_by_a_clock_that_another_one_contradicts(place: Place) -> None:
    place.serve(turn("old"), day=10)
    for wrong, told in ((timedelta(hours=2), "more than 1:00:00 apart"), (timedelta(minutes=30), None)):
        keeper = SqlUpkeep(
            place.engine, place.engine, files=place.files, retention=KEPT, owner="one", clock=lambda: NOW, own=lambda off=wrong: NOW - off
        )  # fmt: skip
        with keeper.office() as lease:
            assert lease is not None
            if told is None:
                assert keeper.retire(lease)["turns"] == 1
            else:
                with pytest.raises(Unavailable, match=told):
                    keeper.retire(lease)
                assert place.rows(turns.c.inference_id) == {"old"}


def test_an_officer_sees_how_old_the_oldest_of_each_class_is(place: Place) -> None:
    place.serve(turn("old"), day=10)
    oldest = place.keeper().oldest()
    assert set(oldest) == {"inbox", "identities", "dead_letters", "turns", "observations", "exposures", "labels", "segments"}
    assert oldest["turns"] == at(10 * DAY + 3600)
    assert oldest["segments"] == at(10 * DAY)
    assert oldest["dead_letters"] is None


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ({"turns_days": 0}, "turns_days is 0"),
        ({"turns_days": 30}, "segments_days is above turns_days"),
        ({"turns_days": 95, "segments_days": 90, "labels_days": 99}, "labels_days is above"),
        ({"dedupe_days": 3}, "inbox_days is above dedupe_days"),
        ({"turn_days": 3}, "turn_days"),
    ],
)
def test_a_setting_that_cannot_be_kept_to_is_refused_with_the_reason(toml: dict[str, Any], said: str) -> None:
    with pytest.raises(BadConfig, match=said):
        retention({"retention": toml})


def test_for_ever_is_a_setting(place: Place) -> None:
    place.serve(turn("old"), day=1)
    never = dict.fromkeys([name for name in Retention.__struct_fields__ if name.endswith("_days")], math.inf)
    assert place.retire(retention({"retention": never})) == {}
    assert place.rows(turns.c.inference_id) == {"old"}
