"""Turns, observations and the like for tests of the streaming rooms, with short ways to say what matters."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from app.domain.telemetry.events import CloudEvent, Erasure, EventType, Exposure, Observation, Retraction, is_imported, payload_hash
from app.domain.telemetry.streams import AppliedEvent, Delivery, Effect
from app.domain.telemetry.turns import FinishReason, SamplingParams, TurnServed, Usage

START = datetime(2026, 11, 21, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    """So many seconds after `START`."""
    return START + timedelta(seconds=seconds)


def turn(id_: str, *, episode: str = "", finished: float = 0, actor: str | None = "alice", **more: Any) -> TurnServed:
    """A turn of two sampled tokens."""
    fields: dict[str, Any] = {
        "inference_id": id_, "episode_id": episode or f"episode-of-{id_}", "policy": "composer", "version": "v1",
        "started_at": at(finished - 1), "finished_at": at(finished), "actor": actor, "segment": {"task": "edit"},
        "messages": [{"role": "user", "content": f"question {id_}"}], "completion": f"answer {id_}",
        "prompt_tokens": [1, 2, 3], "completion_tokens": [4, 5], "logprobs": [-0.5, -0.25], "sampling": SamplingParams(),
        "finish_reason": FinishReason.STOP, "usage": Usage(prompt_tokens=3, completion_tokens=2),
    }  # fmt: skip
    return TurnServed(**(fields | more))


def observation(id_: str, *, of: str | None = None, episode: str | None = None, occurred: float = 1, **more: Any) -> Observation:
    """A rating of a turn or an episode."""
    fields: dict[str, Any] = {
        "id": id_, "inference_id": of, "episode_id": episode, "name": "rating", "value": 1.0, "occurred_at": at(occurred), "source": "api",
    }  # fmt: skip
    return Observation(**(fields | more))


def retraction(of: str, *, occurred: float = 2) -> Retraction:
    """Takes an observation of source `api` back."""
    return Retraction(observation_id=of, source="api", occurred_at=at(occurred))


def exposure(of: str, *, actor: str = "alice") -> Exposure:
    """What was about to be served to somebody."""
    return Exposure(
        id=f"exposure-{of}", policy="composer", inference_id=of, episode_id=f"episode-of-{of}", actor=actor, release_id=None,
        stage="champion", arm="champion", probability=1.0, digest="v1", occurred_at=at(0),
    )  # fmt: skip


def erasure(actor: str, *, occurred: float = 100) -> Erasure:
    """Forget an actor."""
    return Erasure(id=f"erase-{actor}-{occurred}", actor=actor, requested_by="user:tester", occurred_at=at(occurred))


TYPES: dict[type, EventType] = {
    TurnServed: EventType.TURN, Observation: EventType.OBSERVATION, Retraction: EventType.RETRACTION, Exposure: EventType.EXPOSURE,
    Erasure: EventType.ERASURE,
}  # fmt: skip


def event_of(effect: Effect) -> CloudEvent:
    """The event that carries an effect."""
    match effect:
        case TurnServed():
            source = effect.source if is_imported(effect.source) else "gateway"
            id_, key = f"turn-{effect.inference_id}", effect.episode_id
        case Observation():
            id_, source, key = effect.id, effect.source, effect.episode_id or effect.inference_id or ""
        case Retraction():
            id_, source, key = f"retract-{effect.observation_id}-{effect.occurred_at.isoformat()}", effect.source, effect.observation_id
        case Exposure():
            id_, source, key = effect.id, "gateway", effect.episode_id
        case Erasure():
            id_, source, key = effect.id, "admin", effect.actor
    return CloudEvent(id=id_, source=source, type=TYPES[type(effect)], time=at(0), key=key, data=msgspec.json.encode(effect))


def delivery_of(
    event: CloudEvent, *, offset: int = 0, received: float = 1, topic: str = "ratchet.events.1", partition: int = 0
) -> Delivery:
    """The record that carries an event."""
    return Delivery(
        topic=topic, partition=partition, offset=offset, headers={"ce_type": str(event.type), "ce_id": event.id, "ce_source": event.source},
        value=event.data, event=event, received_at=at(received),
    )  # fmt: skip


def applied(effect: Effect, *, offset: int = 0, received: float = 1) -> AppliedEvent:
    """An effect on its way to the store."""
    event = event_of(effect)
    return AppliedEvent(
        source=event.source, id=event.id, payload_hash=payload_hash(event), effect=effect,
        delivery=delivery_of(event, offset=offset, received=received),
    )  # fmt: skip
