"""The eight planted bugs of `facts/ingestion.md`, section 9.2: each is put into a small line of the real parts, and must be caught.

The line runs in this process, with a broker in memory that forgets and a clock that is moved by hand; a crash is where SIGKILL would
strike: what was committed stays, the rest of the step never happens. Every bug runs beside the sound version of the same scenario,
which must be clean.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

from sqlalchemy import Connection, Engine, delete, insert, select

from app.db.engine import open_engine, reading, writing
from app.db.inbox import SqlInbox
from app.db.labels import SqlLabels
from app.db.relay import SqlRelayOffice
from app.db.streams import SqlEffects, save_offsets
from app.db.tables import applied_events, labels, observations, stream_offsets, turns
from app.domain.errors import LeaseLost
from app.domain.events import CloudEvent, Observation
from app.domain.policies import PolicyConfig
from app.domain.streams import EffectBatch, JoinRules
from app.trajectories.segments import ParquetSegments
from pipelines.ingestion.config import RelayConfig
from pipelines.ingestion.decode import decode_effect, sort_out
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

    def accept(self, *events: CloudEvent) -> None:
        """The sound door: returns after the commit."""
        door = SqlInbox(self.engine, clock=self.now, free_bytes=lambda: 1 << 40)
        door.append_blocking(list(events))
        door.close()

    def office(self, owner: str) -> Term:
        relay = Relay(
            office=SqlRelayOffice(self.engine, self.engine, group="ratchet-ingest"), sink=self.broker, store=self.store(),
            config=RelayConfig(), clock=self.now, pause=lambda _: None, owner=owner,
        )  # fmt: skip
        term = relay.office.take(owner, now=self.now())
        assert term is not None
        return Term(relay=relay, term=term)

    def store(self) -> SqlEffects:
        return SqlEffects(self.engine, rules=lambda: RULES, write_segment=self.segments.write_sized, erase_from_segment=self.segments.erase)

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
        """The sound consumer: one transaction."""
        self.store().apply(self.fetch(), now=self.now())

    def restart_ingest(self) -> None:
        """A new consumer reads on where the database says."""
        with reading(self.engine) as connection:
            topic = f"ratchet.events.{self.broker.epoch}"
            self.read = connection.execute(select(stream_offsets.c.next_offset).where(stream_offsets.c.topic == topic)).scalar() or 0

    def run_on(self, *, reconcile: bool = True) -> None:
        """Everybody works soundly for a minute: the final phase."""
        self.seconds += 10
        self.work(self.office("final"), reconcile=reconcile)

    def work(self, term: Term, *, reconcile: bool = True) -> None:
        """One relay in office and one consumer, for a minute."""
        for _ in range(12):
            self.seconds += 5
            term.term.renew(now=self.now())
            if reconcile:
                term.reconcile()
            term.send_inbox()
            self.ingest()

    def label(self) -> None:
        rule_set = parse_rule_set(default_toml())
        while label_due(SqlLabels(self.engine), policy="composer", config=POLICY, rule_set=rule_set, now=self.now(), limit=100):
            pass

    # --- the checker ------------------------------------------------------------------------------------------------------

    def count(self, *, acknowledged: set[str], wanted_rewards: dict[str, float] | None = None) -> Counter[str]:
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


SAID = [event_of(turn("a")), event_of(turn("b")), event_of(observation("o", of="a", value=-1.0)), event_of(observation("p", of="b"))]
ACKNOWLEDGED = {"a", "b", "o", "p"}
Scenario = Callable[[Line, bool], Counter[str]]
"""Runs with the bug (True) or without (False) and returns the checker's counts."""


def ack_before_commit(line: Line, bug: bool) -> Counter[str]:
    """The door answers, then dies before its commit."""
    if not bug:
        line.accept(*SAID)
    # with the bug: the client has its 202, the rows were in memory only, and the process is gone
    line.run_on()
    return line.count(acknowledged=ACKNOWLEDGED)


def dedupe_apart(line: Line, bug: bool) -> Counter[str]:
    """The deduplication row is committed, the process dies, and the repetition is taken for a duplicate (langfuse#16017)."""
    line.accept(*SAID)
    line.office("one").send_inbox()
    if bug:
        batch = line.fetch()
        with writing(line.engine) as connection:
            _remember(connection, batch, line.now())
        line.restart_ingest()  # died here, before the effects
    line.seconds = 30
    line.run_on()
    return line.count(acknowledged=ACKNOWLEDGED)


def _remember(connection: Connection, batch: EffectBatch, now: datetime) -> None:
    rows = [{"source": e.source, "event_id": e.id, "payload_hash": e.payload_hash, "applied_at": now} for e in batch.events]
    connection.execute(insert(applied_events), rows)


def offset_first(line: Line, bug: bool) -> Counter[str]:
    """The offset is committed, the process dies before the effect; the checker looks between, before the reconciler mends it."""
    line.accept(*SAID)
    line.office("one").send_inbox()
    batch = line.fetch()
    if bug:
        with writing(line.engine) as connection:
            save_offsets(connection, batch, now=line.now())
        line.restart_ingest()
    else:
        line.store().apply(batch, now=line.now())
    with reading(line.engine) as connection:
        passed = connection.execute(select(stream_offsets.c.next_offset)).scalar() or 0
        applied = set(connection.execute(select(applied_events.c.event_id)).scalars())
    line.violations["poll-skip"] += sum(out.event.id not in applied for out in line.broker.sent[:passed])
    line.seconds = 30
    line.run_on()
    return line.count(acknowledged=ACKNOWLEDGED)


def no_reconciler(line: Line, bug: bool) -> Counter[str]:
    """The broker restarts empty; nobody sends again."""
    line.accept(*SAID)
    line.office("one").send_inbox()
    line.broker.lose_everything()
    line.read, line.seconds = 0, 30
    line.run_on(reconcile=not bug)
    return line.count(acknowledged=ACKNOWLEDGED)


def two_relays(line: Line, bug: bool) -> Counter[str]:
    """A paused relay wakes up after another took office, and goes on as if nothing had happened."""
    line.accept(*SAID[:2])
    old = line.office("paused")
    old.send_inbox()
    line.seconds = 30
    new = line.office("new")
    line.accept(*SAID[2:])
    stale_marks = 0
    try:
        if bug:
            old.term = new.term  # unfenced: it writes with whatever token is the newest
        stale_marks = old.send_inbox()
    except LeaseLost:
        stale_marks = 0
    line.violations["stale-relay"] += stale_marks
    line.work(new)
    return line.count(acknowledged=ACKNOWLEDGED)


def drop_orphans(line: Line, bug: bool) -> Counter[str]:
    """An observation whose turn is not there yet is dropped (langfuse#13592)."""
    early = [SAID[2], SAID[3], SAID[0], SAID[1]]
    line.accept(*early)
    line.office("one").send_inbox()
    if bug:
        line.store().apply(line.fetch(), now=line.now())
        with writing(line.engine) as connection:  # `if parent is None: return`
            connection.execute(delete(observations).where(observations.c.id.in_(_without_turn_first(early))))
    line.seconds = 30
    line.run_on()
    return line.count(acknowledged=ACKNOWLEDGED)


def _without_turn_first(events: list[CloudEvent]) -> list[str]:
    """Observations that came before their turn."""
    known: set[str] = set()
    dropped: list[str] = []
    for event in events:
        effect = decode_effect(event)
        if isinstance(effect, Observation):
            dropped += [effect.id] if effect.inference_id not in known else []
        else:
            known.add(getattr(effect, "inference_id", ""))
    return dropped


def timers_in_memory(line: Line, bug: bool) -> Counter[str]:
    """Deadlines live in the labeller's memory; it is restarted between arming and firing (bytewax#138)."""
    line.accept(*SAID)
    line.run_on()
    armed = {"a", "b"}
    if bug:
        armed = set()  # the restart: what was armed is gone, and no new record comes to arm it again
    line.seconds = 200
    if armed:
        line.label()
    return line.count(acknowledged=ACKNOWLEDGED, wanted_rewards=_rewards())


def late_overwrites(line: Line, bug: bool) -> Counter[str]:
    """An observation beyond the lateness bound changes the label."""
    line.accept(*SAID)
    line.run_on()
    line.seconds = 200
    line.label()
    line.seconds = 5_000
    line.accept(event_of(observation("late", of="a", value=1.0, occurred=4_000)))
    line.run_on()
    if bug:
        with writing(line.engine) as connection:
            connection.execute(observations.update().where(observations.c.id == "late").values(status="joined"))
            connection.execute(turns.update().where(turns.c.inference_id == "a").values(needs_relabel=True))
    line.label()
    return line.count(acknowledged=ACKNOWLEDGED | {"late"}, wanted_rewards=_rewards())


def _rewards() -> dict[str, float]:
    """Labels of the story without faults, from a line of its own."""
    with _line(Path(_template[0])) as line:
        line.accept(*SAID)
        line.run_on()
        line.seconds = 200
        line.label()
        with reading(line.engine) as connection:
            return dict(connection.execute(select(labels.c.inference_id, labels.c.reward).where(labels.c.current)).all())


BUGS: dict[str, Scenario] = {
    "1 ack before the commit": ack_before_commit,
    "2 dedupe row in a separate transaction": dedupe_apart,
    "3 offset before the effect": offset_first,
    "4 no reconciler": no_reconciler,
    "5 two relays": two_relays,
    "6 drop on a null parent": drop_orphans,
    "7 timers in memory only": timers_in_memory,
    "8 a late outcome overwrites": late_overwrites,
}
_template: list[str] = []


@contextmanager
def _line(template: Path) -> Iterator[Line]:
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{shutil.copyfile(template, Path(folder) / 'line.db')}")
        yield Line(engine, ParquetSegments(str(Path(folder) / "segments")))
        engine.dispose()


def hunt(template: Path) -> dict[str, tuple[Counter[str], Counter[str]]]:
    """Per bug, the checker's counts without it (must be empty) and with it (must not be)."""
    _template[:] = [str(template)]
    found: dict[str, tuple[Counter[str], Counter[str]]] = {}
    for name, scenario in BUGS.items():
        with _line(template) as sound, _line(template) as broken:
            found[name] = (scenario(sound, False), scenario(broken, True))
    return found
