"""Four of each over one PostgreSQL: members that apply the same records in different orders, labellers, erasures, cuts. Nobody crashes."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial

import pytest
from sqlalchemy import Engine, func, select

from app.db.access.erasures import SqlEraser
from app.db.engine import open_engine, reading
from app.db.ingestion.members import SqlMembership
from app.db.ingestion.relay import SqlRelayOffice
from app.db.ingestion.streams import SqlEffects
from app.db.ingestion.turn_counts import read_turn_counts, recount
from app.db.learning.batches import SqlBatchStore
from app.db.learning.labels import SqlLabels
from app.db.tables import applied_events, labels, observations, turn_counts, turns
from app.domain.errors import Held
from app.domain.policies import PolicyConfig
from app.domain.telemetry.streams import AppliedEvent, EffectBatch, JoinRules
from pipelines.batching.config import BatchingConfig
from pipelines.batching.cut import cut_batch
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.fakes.served import applied, at, erasure, exposure, observation, retraction, turn
from tests.fakes.streaming import MemorySegments

RULES = JoinRules(policies={}, label_wait_s=60, lateness_s=600_000)
COMPOSER = PolicyConfig(model="m", base_name="m", base_model="m", held_out_share=0.0)
REPLICAS = 4
EPISODES, TURNS = 12, 4


@pytest.fixture
def opened(postgres_url: str) -> Iterator[Callable[[], Engine]]:
    """A replica's own engine. On a busy machine thirty threads wait longer for each other than a deployment may: no timeouts."""
    engines: list[Engine] = []

    def open_one() -> Engine:
        engines.append(open_engine(postgres_url, session={}))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.dispose()


@pytest.fixture
def engine(opened: Callable[[], Engine]) -> Engine:
    return opened()


def story() -> list[AppliedEvent]:
    """Episodes of four turns; every turn is commented on, every episode too, and some of it is taken back."""
    effects = []
    for episode in range(EPISODES):
        for n in range(TURNS):
            id_ = f"t{episode}-{n}"
            effects += [
                turn(id_, episode=f"e{episode}", actor=f"person-{episode}", finished=n),
                observation(f"o-{id_}", of=id_),
                observation(f"u-{id_}", episode=f"e{(episode + n) % EPISODES}"),
                exposure(id_, actor=f"person-{episode}"),
            ]
            if n % 2:
                effects.append(retraction(f"u-{id_}"))
    return [applied(effect, offset=n) for n, effect in enumerate(effects)]


class Crew:
    """Threads whose every exception is kept."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.over = threading.Event()

    @contextmanager
    def working(self, *until_done: Callable[[], object], beside: Sequence[Callable[[], object]] = ()) -> Iterator[None]:
        """Everybody of `until_done` works to the end, and everybody of `beside` again and again until then."""
        first = [threading.Thread(target=self._once, args=(work,)) for work in until_done]
        rest = [threading.Thread(target=self._again, args=(work,)) for work in beside]
        for thread in [*first, *rest]:
            thread.start()
        yield
        for thread in first:
            thread.join(600)
        self.over.set()
        for thread in rest:
            thread.join(600)

    def _once(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the test tells
            self.errors.append(error)

    def _again(self, work: Callable[[], object]) -> None:
        while not self.over.is_set() and not self.errors:
            self._once(work)


def test_four_of_each_work_beside_each_other_without_a_crash(engine: Engine, opened: Callable[[], Engine]) -> None:
    """Two labellers and three members gave four unique violations and six deadlocks in 75 seconds."""
    records, segments = story(), MemorySegments()
    rule_set, policy = parse_rule_set(default_toml()), COMPOSER
    slots = iter(range(1_000_000))

    def ingest(number: int) -> None:
        store = SqlEffects(opened(), rules=lambda: RULES, segments=segments)
        mine = list(records)
        random.Random(number).shuffle(mine)
        for start in range(0, len(mine), 24):
            store.apply(EffectBatch(events=tuple(mine[start : start + 24]), next_offsets={("t", 0): start}), now=at(1))
            store.expire_parked(now=at(2))

    def label(own: Engine) -> None:
        label_due(SqlLabels(own), policy="composer", config=policy, rule_set=rule_set, now=at(1_000), limit=20)

    def cut(own: Engine) -> None:
        config = BatchingConfig(min_turns=4, max_turns=8)
        with suppress(Held):
            cut_batch(
                SqlBatchStore(own), policy="composer", slot=next(slots), champion="v1", anchor="v1", config=config, now=at(1_001)
            )  # fmt: skip

    def erase(own: Engine) -> None:
        eraser = SqlEraser(own, own, segments=segments)
        for person in range(3):
            eraser.erase(erasure(f"person-{person}", occurred=50), now=at(50))

    def take(own: Engine) -> None:
        office = SqlRelayOffice(own, own, group="g")
        if term := office.take(threading.current_thread().name, now=at(0)):
            term.leave(now=at(0))

    members = [SqlMembership(opened(), group="g") for _ in range(REPLICAS)]
    crew = Crew()
    ingesting = [lambda n=n: ingest(n) for n in range(REPLICAS)]
    beside = [partial(act, opened()) for act in (*[label] * REPLICAS, cut, cut, erase, take)]
    beside += [member.partitions for member in members]
    with crew.working(*ingesting, beside=beside):
        pass
    assert crew.errors == []
    label(engine)
    _everything_is_there_once(engine, records)


def _everything_is_there_once(engine: Engine, records: list[AppliedEvent]) -> None:
    with reading(engine) as connection:
        assert connection.execute(select(func.count()).select_from(applied_events)).scalar_one() == len(records)
        assert connection.execute(select(func.count()).select_from(turns)).scalar_one() == EPISODES * TURNS
        current = select(labels.c.inference_id, func.count()).where(labels.c.current).group_by(labels.c.inference_id)
        assert all(count == 1 for _, count in connection.execute(current))
        assert set(connection.execute(select(observations.c.status)).scalars()) == {"joined"}
        assert read_turn_counts(connection) == recount(connection)
        assert connection.execute(select(turn_counts.c.turns)).scalar_one() == EPISODES * TURNS


def test_two_labellers_with_the_same_turns_in_hand_write_one_label_each(engine: Engine) -> None:
    segments = MemorySegments()
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    store.apply(EffectBatch(events=tuple(applied(turn(f"t{n}"), offset=n) for n in range(6))), now=at(1))
    rule_set, policy = parse_rule_set(default_toml()), COMPOSER
    both_have_read = threading.Barrier(2, timeout=300)

    class Meets(SqlLabels):
        def write(self, made: object, *, now: object) -> None:
            both_have_read.wait()
            super().write(made, now=now)  # type: ignore[arg-type]

    crew = Crew()
    work = [
        lambda: label_due(Meets(engine), policy="composer", config=policy, rule_set=rule_set, now=at(1_000), limit=20) for _ in range(2)
    ]
    with crew.working(*work):
        pass
    assert crew.errors == []
    with reading(engine) as connection:
        assert connection.execute(select(labels.c.revision)).scalars().all() == [1] * 6
        assert read_turn_counts(connection) == [("composer", "v1", 6, 6)]


def test_a_member_that_is_gone_is_forgotten_while_others_forget_it_too(engine: Engine) -> None:
    gone = [SqlMembership(engine, group="g", clock=lambda: at(0)) for _ in range(3)]
    for member in gone:
        member.partitions()
    later = at(0) + timedelta(hours=1)
    members = [SqlMembership(engine, group="g", clock=lambda: later) for _ in range(REPLICAS)]
    crew = Crew()
    with crew.working(*(member.partitions for member in members)):
        pass
    assert crew.errors == []
    assert sorted(partition for member in members for partition in member.partitions()) == list(range(6))
