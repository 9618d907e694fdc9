"""From records to effects: one decoder per event type, so that old versions stay readable beside new ones.

Fields that this version does not know are passed over: in a rolling upgrade the newer half writes them. What changes the meaning of a
record is a new version of its type.

A new version of a type is one more entry (its decoder translates to today's wire type); an unknown type or a value that does not
decode is a dead letter with the reason, never an exception.
"""

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

import msgspec

from app.domain.telemetry.events import CloudEvent, Erasure, EventType, Exposure, Observation, Retraction, payload_hash
from app.domain.telemetry.moments import LATEST, check_moments
from app.domain.telemetry.streams import AppliedEvent, DeadLetter, Delivery, Effect
from app.domain.telemetry.turns import TurnServed

Decoder = Callable[[bytes], Effect]

DECODERS: Mapping[str, Decoder] = {
    EventType.TURN: msgspec.json.Decoder(TurnServed).decode,
    EventType.OBSERVATION: msgspec.json.Decoder(Observation).decode,
    EventType.RETRACTION: msgspec.json.Decoder(Retraction).decode,
    EventType.EXPOSURE: msgspec.json.Decoder(Exposure).decode,
    EventType.ERASURE: msgspec.json.Decoder(Erasure).decode,
}


def sort_out(deliveries: Iterable[Delivery], decoders: Mapping[str, Decoder] = DECODERS) -> tuple[list[AppliedEvent], list[DeadLetter]]:
    """The deliveries as events to apply and dead letters, each in order."""
    events: list[AppliedEvent] = []
    dead: list[DeadLetter] = []
    for delivery in deliveries:
        try:
            events.append(understand(delivery, decoders))
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            dead.append(as_dead_letter(delivery, str(error)))
    return events, dead


def understand(delivery: Delivery, decoders: Mapping[str, Decoder] = DECODERS) -> AppliedEvent:
    """A delivery as the event it carries. Raises ValueError with what is wrong with it."""
    if delivery.event is None:
        raise ValueError(delivery.problem or "broken envelope")
    event = delivery.event
    return AppliedEvent(
        source=event.source,
        id=event.id,
        payload_hash=payload_hash(event),
        effect=decode_effect(event, decoders, received_at=delivery.received_at),
        delivery=delivery,
    )


def decode_effect(event: CloudEvent, decoders: Mapping[str, Decoder] = DECODERS, *, received_at: datetime = LATEST) -> Effect | None:
    """What an event does; None for a tombstone. Its times are judged by when it was received. Raises ValueError."""
    if not event.data:
        return None
    decoder = decoders.get(event.type)
    if decoder is None:
        raise ValueError(f"unknown type {event.type!r}; known are {', '.join(sorted(decoders))}")
    effect = decoder(event.data)
    _check(effect, received_at)
    return effect


def _check(effect: Effect, received_at: datetime) -> None:
    """What the types cannot say."""
    match effect:
        case TurnServed():
            check_moments(received_at=received_at, started_at=effect.started_at, finished_at=effect.finished_at)
            if effect.logprobs is not None and len(effect.logprobs) != len(effect.completion_tokens):
                raise ValueError(f"{len(effect.logprobs)} logprobs for {len(effect.completion_tokens)} completion tokens")
        case Observation():
            check_moments(received_at=received_at, occurred_at=effect.occurred_at)
            if (effect.inference_id is None) == (effect.episode_id is None):
                raise ValueError("exactly one of inference_id and episode_id is needed")
        case Exposure():
            check_moments(received_at=received_at, occurred_at=effect.occurred_at)
            if not 0 < effect.probability <= 1:
                raise ValueError(f"probability is {effect.probability}, not in (0, 1]")
        case Retraction() | Erasure():
            check_moments(received_at=received_at, occurred_at=effect.occurred_at)


def as_dead_letter(delivery: Delivery, reason: str) -> DeadLetter:
    """A delivery on its way to the dead-letter queue."""
    return DeadLetter(
        topic=delivery.topic, partition=delivery.partition, offset=delivery.offset, headers=delivery.headers, payload=delivery.value,
        reason=reason,
    )  # fmt: skip
