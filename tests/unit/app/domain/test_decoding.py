"""What becomes of records: every broken one a dead letter with its reason, every version readable for ever."""

from datetime import UTC, datetime

import msgspec
import pytest

from app.domain.telemetry.decoding import DECODERS, Decoder, decode_effect, sort_out
from app.domain.telemetry.events import CloudEvent, EventType, Exposure, Observation
from app.domain.telemetry.turns import TurnServed
from tests.fakes.served import at, delivery_of, erasure, event_of, exposure, observation, retraction, turn


def timed(**times: str) -> bytes:
    return msgspec.json.encode(msgspec.to_builtins(observation("o", of="t")) | times)


def raw(type_: str, data: bytes) -> CloudEvent:
    return CloudEvent(id="1", source="api", type=type_, time=at(0), key="k", data=data)


@pytest.mark.parametrize("effect", [turn("t"), observation("o", of="t"), retraction("o"), exposure("t"), erasure("alice")])
def test_every_type_decodes_to_what_was_encoded(effect: TurnServed) -> None:
    assert decode_effect(event_of(effect)) == effect


def test_a_tombstone_does_nothing_and_is_no_dead_letter() -> None:
    assert decode_effect(raw(EventType.TURN, b"")) is None


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (raw("ratchet.hologram.v1", b"{}"), "unknown type 'ratchet.hologram.v1'"),
        (raw(EventType.OBSERVATION, b"\xff\xfe"), "malformed"),
        (raw(EventType.OBSERVATION, b"{}"), "missing required field"),
        (raw(EventType.OBSERVATION, b"[" * 100_000), "malformed|depth|recursion|expected|Expected|truncated"),
        (raw(EventType.OBSERVATION, msgspec.json.encode(observation("o", of="t")).replace(b"1.0", b"NaN")), "malformed"),
        (raw(EventType.OBSERVATION, msgspec.json.encode(observation("o"))), "exactly one of"),
        (raw(EventType.OBSERVATION, msgspec.json.encode(observation("o", of="t", episode="e"))), "exactly one of"),
        (raw(EventType.OBSERVATION, msgspec.json.encode(observation("o", of="t", occurred_at=datetime(2026, 1, 1)))), "no timezone"),  # noqa: DTZ001
        (raw(EventType.TURN, msgspec.json.encode(turn("t", logprobs=[-1.0]))), "1 logprobs for 2 completion tokens"),
        (raw(EventType.OBSERVATION, timed(occurred_at="0001-01-01T00:00:00+14:00")), "occurred_at is .* before 2000"),
        (raw(EventType.OBSERVATION, timed(occurred_at="9999-12-31T23:59:59-14:00")), "occurred_at is .* in the future"),
        (
            raw(EventType.TURN, msgspec.json.encode(turn("t", finished_at=datetime(9999, 12, 31, tzinfo=UTC)))),
            "finished_at is .* in the future",
        ),
        (raw(EventType.TURN, msgspec.json.encode(turn("t", started_at=datetime(1, 1, 1, tzinfo=UTC)))), "started_at is .* before 2000"),
    ],
)
def test_a_broken_record_is_a_dead_letter_with_its_reason_and_the_others_go_on(event: CloudEvent, reason: str) -> None:
    good = delivery_of(event_of(observation("fine", of="t")), offset=8)
    events, dead = sort_out([delivery_of(event, offset=7), good])
    assert [applied.id for applied in events] == ["fine"]
    assert [(letter.offset, letter.payload) for letter in dead] == [(7, event.data)]
    with pytest.raises(ValueError, match=reason):
        decode_effect(event, received_at=at(0))


class ObservationV2(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a second version might look like: one target with its kind."""

    id: str
    target: str
    target_kind: str
    name: str
    value: float
    occurred_at: datetime
    source: str


def read_v2(data: bytes) -> Observation:
    new = msgspec.json.decode(data, type=ObservationV2)
    turn_id, episode_id = (new.target, None) if new.target_kind == "turn" else (None, new.target)
    return Observation(
        id=new.id, inference_id=turn_id, episode_id=episode_id, name=new.name, value=new.value, occurred_at=new.occurred_at,
        source=new.source,
    )  # fmt: skip


def test_an_old_record_still_reads_when_the_next_version_exists() -> None:
    decoders: dict[str, Decoder] = {**DECODERS, "ratchet.observation.v2": read_v2}
    new = {"id": "o2", "target": "t", "target_kind": "turn", "name": "rating", "value": 1.0, "occurred_at": at(1), "source": "api"}
    old_event, new_event = event_of(observation("o1", of="t")), raw("ratchet.observation.v2", msgspec.json.encode(new))
    assert decode_effect(old_event, decoders) == observation("o1", of="t")
    assert decode_effect(new_event, decoders) == observation("o2", of="t")
    with pytest.raises(ValueError, match="unknown type"):
        decode_effect(new_event)


def test_a_record_that_says_no_more_than_it_must_is_read_as_it_was_agreed() -> None:
    """The first version of each type: what is left out has the meaning that its first consumers gave it."""
    moment = {"occurred_at": at(0).isoformat()}
    served = {
        "inference_id": "i", "episode_id": "e", "policy": "p", "version": "v", "started_at": at(0).isoformat(),
        "finished_at": at(1).isoformat(), "messages": [], "completion": "x", "prompt_tokens": [1], "completion_tokens": [2],
        "logprobs": [-0.5], "sampling": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 1, "completion_tokens": 1},
    }  # fmt: skip
    turn_ = decode_effect(raw(EventType.TURN, msgspec.json.encode(served)))
    assert isinstance(turn_, TurnServed)
    sampling, drawn = turn_.sampling, turn_.assignment
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens, sampling.seed, sampling.stop) == (1.0, 1.0, 256, None, ())
    assert (drawn.release_id, drawn.stage, drawn.arm, drawn.probability) == (None, "champion", "champion", 1.0)
    assert (turn_.consent.train, turn_.kind, turn_.source, turn_.tags, turn_.segment, turn_.tool_calls) == (
        True,
        "answer",
        "gateway",
        {},
        {},
        [],
    )
    assert (turn_.actor, turn_.routed_experts, turn_.kept_log_mass, turn_.shape, turn_.payload) == (
        None, None, None, msgspec.UNSET, msgspec.UNSET,
    )  # fmt: skip
    said = decode_effect(
        raw(
            EventType.OBSERVATION,
            msgspec.json.encode({"id": "o", "inference_id": "i", "name": "undo", "value": True, "source": "api"} | moment),
        )
    )
    assert said == Observation(id="o", inference_id="i", name="undo", value=True, source="api", occurred_at=at(0))
    shown = {
        "id": "x",
        "policy": "p",
        "inference_id": "i",
        "episode_id": "e",
        "actor": "a",
        "release_id": None,
        "stage": "s",
        "arm": "champion",
        "digest": "d",
    }
    for probability, good in ((1, True), (0.001, True), (0, False), (1.001, False), (-0.1, False)):
        data = msgspec.json.encode(shown | moment | {"probability": probability})
        if good:
            effect = decode_effect(raw(EventType.EXPOSURE, data))
            assert isinstance(effect, Exposure)
            assert (effect.share, effect.holdback) == (0.0, 0.0)
        else:
            with pytest.raises(ValueError, match=r"not in \(0, 1\]"):
                decode_effect(raw(EventType.EXPOSURE, data))
