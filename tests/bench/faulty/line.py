"""A small line of the real parts (door, relay, ingestion, labelling) in this process, and the accidents that it meets.

The broker is in memory and forgets, the clock is moved by hand; a crash is where SIGKILL would strike: what was committed stays, the rest
of the step never happens. Nothing here knows of a bug: the code that is imported is sound, or somebody has planted one in it.
"""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from sqlalchemy import Engine, select, text

from app.db.engine import open_engine, reading, writing
from app.db.ingestion.inbox import SqlInbox
from app.db.ingestion.relay import SqlRelayOffice
from app.db.ingestion.streams import SqlEffects
from app.db.learning.labels import SqlLabels
from app.db.tables import applied_events, labels, observations, stream_offsets, turns
from app.domain.errors import LeaseLost, Unavailable
from app.domain.policies import PolicyConfig
from app.domain.telemetry.decoding import sort_out
from app.domain.telemetry.events import CloudEvent
from app.domain.telemetry.streams import EffectBatch, JoinRules
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.relay import Relay, Term
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.fakes.served import at, delivery_of, event_of, observation, turn
from tests.fakes.streaming import MemoryBroker

POLICY = PolicyConfig(model="unused", base_name="x", base_model="none", label_wait_s=60, lateness_s=600)
RULES = JoinRules(policies={"composer": POLICY})


@dataclass
class Line:
    """Door, relay, broker, ingestion and labelling over one database."""

    engine: Engine
    segments: ParquetSegments
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    seconds: float = 0
    read: int = 0
    violations: Counter[str] = field(default_factory=Counter[str])

    def now(self) -> datetime:
        return at(self.seconds)

    def accept(self, *events: CloudEvent) -> set[str]:
        """The door; returns the ids of what it acknowledged."""
        door = SqlInbox(self.engine, clock=self.now, free_bytes=lambda: 1 << 40)
        try:
            door.append_blocking(list(events))
        except Unavailable:
            return set()
        finally:
            door.close()
        return {event.id.removeprefix("turn-") for event in events}

    def office(self, owner: str) -> Term:
        relay = Relay(
            office=SqlRelayOffice(self.engine, self.engine, group="ratchet-ingest"), sink=self.broker, store=self.store(),
            config=RelayConfig(), clock=self.now, pause=lambda _: None, owner=owner,
        )  # fmt: skip
        term = relay.office.take(owner, now=self.now())
        assert term is not None
        return Term(relay=relay, term=term)

    def store(self, rules: Callable[[], JoinRules] = lambda: RULES) -> SqlEffects:
        return SqlEffects(self.engine, rules=rules, segments=self.segments)

    def fetch(self) -> EffectBatch:
        """What the broker has beyond what was read."""
        topic = f"ratchet.events.{self.broker.epoch}"
        fresh = self.broker.sent[self.read :]
        deliveries = [
            replace(delivery_of(out.event, offset=self.read + n, topic=topic), received_at=out.received_at) for n, out in enumerate(fresh)
        ]
        events, dead = sort_out(deliveries)
        self.read = len(self.broker.sent)
        return EffectBatch(events=tuple(events), dead=tuple(dead), next_offsets={(topic, 0): self.read})

    def ingest(self) -> None:
        """The consumer."""
        self.store().apply(self.fetch(), now=self.now())

    def restart_ingest(self) -> None:
        """A new consumer reads on where the database says."""
        with reading(self.engine) as connection:
            topic = f"ratchet.events.{self.broker.epoch}"
            self.read = connection.execute(select(stream_offsets.c.next_offset).where(stream_offsets.c.topic == topic)).scalar() or 0

    def run_on(self) -> None:
        """Everybody works undisturbed for a minute: the final phase."""
        self.seconds += 10
        self.work(self.office("final"))

    def work(self, term: Term) -> None:
        """One relay in office and one consumer, for a minute."""
        for _ in range(12):
            self.seconds += 5
            term.term.renew(now=self.now())
            term.reconcile()
            term.send_inbox()
            self.ingest()

    def label(self) -> None:
        rule_set = parse_rule_set(default_toml())
        while label_due(SqlLabels(self.engine), policy="composer", config=POLICY, rule_set=rule_set, now=self.now(), limit=100):
            pass

    # --- the checker ------------------------------------------------------------------------------------------------------

    def count(self, *, acknowledged: set[str], wanted_rewards: Mapping[str, float] | None = None) -> Counter[str]:
        """Jepsen-style counts; all zero means clean."""
        found = Counter(self.violations)
        with reading(self.engine) as connection:
            have = set(connection.execute(select(turns.c.inference_id)).scalars())
            have |= set(connection.execute(select(observations.c.id)).scalars())
            rewards = dict(connection.execute(select(labels.c.inference_id, labels.c.reward).where(labels.c.current)).all())
        found["lost-write"] += len(acknowledged - have)
        if wanted_rewards is not None:
            found["unseen"] += len(set(wanted_rewards) - set(rewards))
            found["label-diff"] += sum(rewards[id_] != wanted_rewards[id_] for id_ in set(rewards) & set(wanted_rewards))
        return +found


class Crash(BaseException):
    """Where SIGKILL strikes."""


SAID = [event_of(turn("a")), event_of(turn("b")), event_of(observation("o", of="a", value=-1.0)), event_of(observation("p", of="b"))]
Accident = Callable[[Line, Mapping[str, float]], Counter[str]]
"""Something happens to a line; gets the rewards of the same story without accidents, and returns the checker's counts."""


def the_commit_fails(line: Line, _: Mapping[str, float]) -> Counter[str]:
    """The disk is full when the door commits; the client, who was told nothing, is gone."""
    acknowledged = line.accept(*SAID[:2])
    with writing(line.engine) as connection:
        connection.execute(text("CREATE TRIGGER full BEFORE INSERT ON inbox BEGIN SELECT RAISE(ABORT, 'disk full'); END"))
    acknowledged |= line.accept(*SAID[2:])
    with writing(line.engine) as connection:
        connection.execute(text("DROP TRIGGER full"))
    line.run_on()
    return line.count(acknowledged=acknowledged)


def the_consumer_dies(line: Line, _: Mapping[str, float]) -> Counter[str]:
    """In the middle of its transaction; another reads on where the database says, and the reconciler looks later."""
    acknowledged = line.accept(*SAID)
    line.office("one").send_inbox()

    def crash() -> JoinRules:
        raise Crash

    with suppress(Crash):
        line.store(crash).apply(line.fetch(), now=line.now())
    line.restart_ingest()
    with reading(line.engine) as connection:
        applied = set(connection.execute(select(applied_events.c.event_id)).scalars())
    line.violations["poll-skip"] += sum(out.event.id not in applied for out in line.broker.sent[: line.read])
    line.seconds = 30
    line.run_on()
    return line.count(acknowledged=acknowledged)


def the_broker_restarts_empty(line: Line, _: Mapping[str, float]) -> Counter[str]:
    """After the acknowledgement, before anybody read."""
    acknowledged = line.accept(*SAID)
    line.office("one").send_inbox()
    line.broker.lose_everything()
    line.read, line.seconds = 0, 30
    line.run_on()
    return line.count(acknowledged=acknowledged)


def a_paused_relay_wakes_up(line: Line, _: Mapping[str, float]) -> Counter[str]:
    """After another took office, and goes on as if nothing had happened."""
    acknowledged = line.accept(*SAID[:2])
    old = line.office("paused")
    old.send_inbox()
    line.seconds = 30
    new = line.office("new")
    acknowledged |= line.accept(*SAID[2:])
    with suppress(LeaseLost):
        line.violations["stale-relay"] += old.send_inbox()
    line.work(new)
    return line.count(acknowledged=acknowledged)


def feedback_comes_first(line: Line, _: Mapping[str, float]) -> Counter[str]:
    """Observations are applied before anybody has heard of their turns."""
    acknowledged = line.accept(*SAID[2:])
    line.office("one").send_inbox()
    line.ingest()
    line.seconds = 30
    acknowledged |= line.accept(*SAID[:2])
    line.run_on()
    return line.count(acknowledged=acknowledged)


def everything_is_restarted(line: Line, wanted: Mapping[str, float]) -> Counter[str]:
    """Between the turn and the end of its wait: the process that labels never saw it come."""
    if (child := os.fork()) == 0:
        line.accept(*SAID)
        line.run_on()
        os._exit(0)
    os.waitpid(child, 0)
    line.seconds = 200
    line.label()
    return line.count(acknowledged={"a", "b", "o", "p"}, wanted_rewards=wanted)


def an_outcome_comes_too_late(line: Line, wanted: Mapping[str, float]) -> Counter[str]:
    """Beyond the lateness bound: it is kept, and changes nothing."""
    acknowledged = line.accept(*SAID)
    line.run_on()
    line.seconds = 200
    line.label()
    line.seconds = 5_000
    acknowledged |= line.accept(event_of(observation("late", of="a", value=1.0, occurred=4_000)))
    line.run_on()
    line.label()
    return line.count(acknowledged=acknowledged, wanted_rewards=wanted)


ACCIDENTS: tuple[Accident, ...] = (
    the_commit_fails, the_consumer_dies, the_broker_restarts_empty, a_paused_relay_wakes_up, feedback_comes_first, everything_is_restarted,
    an_outcome_comes_too_late,
)  # fmt: skip


def meet(accident: str, template: str, wanted: Mapping[str, float]) -> dict[str, int]:
    """The checker's counts after the named accident; all clean is empty."""
    act = next(one for one in ACCIDENTS if one.__name__ == accident)
    with _line(Path(template)) as line:
        return dict(act(line, wanted))


def rewards(template: str) -> dict[str, float]:
    """Labels of the story without accidents."""
    with _line(Path(template)) as line:
        line.accept(*SAID)
        line.run_on()
        line.seconds = 200
        line.label()
        with reading(line.engine) as connection:
            return dict(connection.execute(select(labels.c.inference_id, labels.c.reward).where(labels.c.current)).all())


@contextmanager
def _line(template: Path) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{shutil.copyfile(template, Path(folder) / 'line.db')}")
        yield Line(engine, ParquetSegments(str(Path(folder) / "segments")))
        engine.dispose()
