"""What a fault run is judged by: every effect there, none twice, and labels byte for byte those of a run without faults."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Engine, func, select

from app.db.engine import open_engine, reading
from app.db.ingestion.streams import SqlEffects
from app.db.learning.labels import SqlLabels
from app.db.migrate import upgrade
from app.db.tables import applied_events, inbox, labels, observations, retractions, turns
from app.domain.ids import hash_actor, utc_now
from app.domain.policies import PolicyConfig
from app.domain.telemetry.events import CloudEvent, EventType, Observation, Retraction, payload_hash
from app.domain.telemetry.streams import AppliedEvent, Delivery, Effect, EffectBatch, JoinRules
from app.domain.telemetry.turns import TurnServed
from app.trajectories.segments import ParquetSegments
from pipelines.labelling.labeller import label_due
from pipelines.labelling.rule_set import default_toml, parse_rule_set
from tests.bench.faulty.story import POLICY, SOURCE, Story

SALT = "the bench's own salt"
COMPOSER = PolicyConfig(model="unused", base_name="faults", base_model="none", label_wait_s=1, lateness_s=2_592_000)
RULES = JoinRules(policies={POLICY: COMPOSER})


def lost(engine: Engine, story: Story) -> list[str]:
    """What was said and has no effect: turns, observations and retractions without their row."""
    said_back = {event["data"]["observation_id"] for event in story.happened if event["type"] == EventType.RETRACTION}
    with reading(engine) as connection:
        have = set(connection.execute(select(turns.c.inference_id)).scalars())
        have |= set(connection.execute(select(observations.c.id)).scalars())
        taken_back = set(connection.execute(select(retractions.c.observation_id)).scalars())
    return sorted((story.turns | story.observations) - have) + sorted(said_back - taken_back)


def duplicated(engine: Engine, segments: ParquetSegments, story: Story) -> int:
    """Effects beyond one per event: extra rows, a second current label, or tokens of a turn in two segments that are referred to."""
    with reading(engine) as connection:
        rows = connection.execute(select(func.count()).select_from(turns)).scalar_one()
        rows += connection.execute(select(func.count()).select_from(observations)).scalar_one()
        current = connection.execute(select(func.count()).select_from(labels).where(labels.c.current)).scalar_one()
        located = connection.execute(select(turns.c.payload_segment, turns.c.inference_id)).all()
    extra = max(0, rows - len(story.turns | story.observations)) + max(0, current - len(story.turns))
    absent = len(located) - len(segments.read([(name, id_) for name, id_ in located if name]))
    return extra + absent


def label_lines(engine: Engine) -> list[str]:
    """The current labels, sorted, without when they were made and how often they were corrected on the way."""
    names = ("inference_id", "policy", "version", "reward", "terms", "rule_set", "exclusion", "segment", "actor", "held_out")
    chosen = [labels.c[name] for name in names]
    with reading(engine) as connection:
        rows = connection.execute(select(*chosen).where(labels.c.current)).all()
    return sorted(json.dumps(list(row), sort_keys=True) for row in rows)


def settled(engine: Engine, story: Story) -> bool:
    """Whether everything is applied and labelled and nothing waits for another label."""
    with reading(engine) as connection:
        waiting = turns.c.labelled_at.is_(None) | turns.c.needs_relabel
        open_turns = connection.execute(select(func.count()).select_from(turns).where(waiting)).scalar_one()
        known = connection.execute(select(func.count()).select_from(turns)).scalar_one()
        said = connection.execute(select(func.count()).select_from(observations)).scalar_one()
        crossed = connection.execute(select(func.count()).select_from(observations).where(observations.c.status == "parked")).scalar_one()
        crossed += connection.execute(select(func.count()).select_from(retractions).where(~retractions.c.matched)).scalar_one()
    return crossed == 0 and open_turns == 0 and known >= len(story.turns) and said >= len(story.observations) and not lost(engine, story)


def applied_p99_s(inbox_engine: Engine, engine: Engine) -> float:
    """99th percentile of the time from the commit at the door to the effect."""
    with reading(inbox_engine) as connection:
        door = connection.execute(select(inbox.c.source, inbox.c.event_id, inbox.c.received_at))
        received = {(row.source, row.event_id): row.received_at for row in door}
    with reading(engine) as connection:
        took = [
            (row.applied_at - received[row.source, row.event_id]).total_seconds()
            for row in connection.execute(select(applied_events.c.source, applied_events.c.event_id, applied_events.c.applied_at))
            if (row.source, row.event_id) in received
        ]
    took.sort()
    return took[int(len(took) * 0.99)] if took else float("nan")


# --- the run without faults ------------------------------------------------------------------------------------------------------


def fault_free_labels(story: Story, folder: Path) -> list[str]:
    """The labels of the same events, applied in the order in which they happened by one process that nobody disturbs."""
    url = f"sqlite:///{folder}/fault-free.db"
    upgrade(url)
    engine = open_engine(url)
    segments = ParquetSegments(str(folder / "fault-free-segments"))
    store = SqlEffects(engine, rules=lambda: RULES, segments=segments)
    events = [_applied(event, number) for number, event in enumerate(story.happened)]
    for start in range(0, len(events), 2_000):
        store.apply(EffectBatch(events=tuple(events[start : start + 2_000])), now=utc_now())
    book, rule_set = SqlLabels(engine), parse_rule_set(default_toml())
    while label_due(book, policy=POLICY, config=COMPOSER, rule_set=rule_set, now=utc_now(), limit=1_000):
        pass
    lines = label_lines(engine)
    engine.dispose()
    return lines


def _applied(event: dict[str, Any], number: int) -> AppliedEvent:
    effect = _effect(event)
    key = event["id"]
    cloud = CloudEvent(id=key, source=SOURCE, type=event["type"], time=utc_now(), key=key, data=msgspec.json.encode(effect))
    delivery = Delivery(topic="story", partition=0, offset=number, headers={}, value=cloud.data, event=cloud, received_at=utc_now())
    return AppliedEvent(source=SOURCE, id=key, payload_hash=payload_hash(cloud), effect=effect, delivery=delivery)


def _effect(event: dict[str, Any]) -> Effect:
    """What the door makes of a posted event."""
    data = event["data"]
    match event["type"]:
        case EventType.TURN:
            turn = msgspec.convert(data, TurnServed)
            return msgspec.structs.replace(turn, actor=hash_actor(turn.actor or "", salt=SALT))
        case EventType.OBSERVATION:
            return msgspec.convert(data | {"id": event["id"], "source": SOURCE}, Observation)
        case _:
            return msgspec.convert(data | {"source": SOURCE}, Retraction)


def differences(found: Sequence[str], wanted: Sequence[str]) -> int:
    """Labels that are not byte for byte in both, but for the sign of a zero, which SQLite does not keep and PostgreSQL does."""
    return len(unlike(found, wanted)) + abs(len(found) - len(wanted))


def unlike(found: Sequence[str], wanted: Sequence[str]) -> set[str]:
    """Those that are in one of both alone."""
    return {_unsigned(line) for line in found} ^ {_unsigned(line) for line in wanted}


def _unsigned(line: str) -> str:
    return re.sub(r"-0\.0(?![\d.e])", "0.0", line)
