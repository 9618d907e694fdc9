"""What an observation may say, at each bound and one beyond it, and what becomes of what it leaves out."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from app.api.entry.access import ANONYMOUS, Caller
from app.api.telemetry.drafts import Desk, Draft, RetractionDraft, TimedHere, members, refuse_unknown, source_of
from app.api.telemetry.intake import Limits
from app.api.telemetry.redaction import Redactor
from app.domain.errors import BadRequest
from app.domain.ids import hash_actor
from app.domain.telemetry.events import CloudEvent, Observation
from app.domain.telemetry.turns import ToolCall, ToolVerdict
from tests.fakes.clock import FrozenClock
from tests.fakes.gateway import policy_config
from tests.fakes.served import turn

CLOCK = FrozenClock()
NOW = CLOCK()
BOUND = replace(ANONYMOUS, policy="composer")
UNDO: dict[str, Any] = {"name": "undo", "value": True, "inference_id": "i"}


def desk(limits: Limits | None = None, **config: Any) -> Desk:
    policies = {"composer": policy_config(**config), "tab": policy_config()}
    return Desk(policies=policies, redactor=Redactor(lambda _kind: None), actor_salt="salt", clock=CLOCK, limits=limits or Limits())


def draft(**changes: Any) -> Draft:
    return Draft(**(UNDO | changes))


def event(made: Draft, *, by: Caller = ANONYMOUS, at: Desk | None = None) -> CloudEvent:
    return (at or desk()).observation(made, by)


def observation(made: Draft, **more: Any) -> Observation:
    return msgspec.json.decode(event(made, **more).data, type=Observation)


def raw(size: int = 0, /, **changes: Any) -> bytes:
    return json.dumps(UNDO | changes).encode().ljust(size)


@pytest.mark.parametrize(
    ("field", "most", "beyond"),
    [
        ("name", "n" * 120, "n" * 121), ("name", "n", ""), ("inference_id", "i" * 64, "i" * 65), ("inference_id", "i", ""),
        ("episode_id", "e" * 64, "e" * 65), ("id", "i" * 180, "i" * 181), ("id", "i", ""), ("policy", "p" * 120, "p" * 121),
        ("source", "s" * 120, ""), ("actor", "a" * 400, "a" * 401), ("occurred_at", "2026-11-21T12:00:00Z", "2026-11-21T12:00:00"),
    ],
)  # fmt: skip
def test_a_field_is_read_at_its_bound_and_refused_by_its_name_one_beyond(field: str, most: str, beyond: str) -> None:
    desk().decode(raw(0, **{field: most}))
    with pytest.raises(BadRequest) as error:
        desk().decode(raw(0, **{field: beyond}))
    assert error.value.param == field


def test_an_event_is_as_large_as_it_may_be_to_the_byte() -> None:
    limits = Limits(event_bytes=200)
    assert desk(limits).decode(raw(200)).name == "undo"
    with pytest.raises(BadRequest) as error:
        desk(limits).decode(raw(201))
    assert error.value.code == "size"


def test_without_a_word_of_ours_an_event_is_bounded_as_the_documents_promise() -> None:
    """docs/api.md, "Limits": an event has 256 KB, and 64,000 characters (64 times 1,024) where texts are redacted."""
    assert desk().decode(raw(2**18)).name == "undo"
    with pytest.raises(BadRequest, match="larger than 262144 bytes"):
        desk().decode(raw(2**18 + 1))
    said = {"name": "follow_up", "policy": "composer"}
    event(draft(**said, value="x " * 2**15), at=desk(redact=True))
    with pytest.raises(BadRequest, match="more than 65536 characters"):
        event(draft(**said, value="x " * 2**15 + "x"), at=desk(redact=True))


def test_brackets_are_counted_before_an_event_is_decoded_where_it_has_more_bytes_than_values() -> None:
    """Ten values may have twenty brackets: one is the event's own."""
    limits = Limits(nodes=10)
    desk(limits).decode(raw(value="[" * 19))
    with pytest.raises(BadRequest) as error:
        desk(limits).decode(raw(value="[" * 20))
    assert (error.value.code, error.value.param) == ("too_many_values", "value")
    size = len(raw(value="[" * 19))
    desk(Limits(nodes=size)).refuse_crowded(b"[" * size)
    with pytest.raises(BadRequest):
        desk(Limits(nodes=4)).refuse_crowded(b"[" * 9)
    desk(Limits(nodes=4)).refuse_crowded(b"[" * 8)


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"inference_id": "i" * 65}, "inference_id", "size"), ({"inference_id": None, "episode_id": "e" * 65}, "inference_id", "size"),
        ({"id": "i" * 191}, "id", "size"), ({"id": "a\x00"}, "id", "nul"), ({"inference_id": "\x00"}, "id", "nul"),
        ({"inference_id": None, "episode_id": "\x00"}, "id", "nul"), ({"actor": "\x00"}, "id", "nul"),
        ({"inference_id": None}, "inference_id", "invalid_request"), ({"episode_id": "e"}, "inference_id", "invalid_request"),
        ({"policy": "nobody"}, "policy", "unknown_policy"), ({"tags": {"a": "\x00"}}, "tags", "nul"), ({"value": "\x00"}, "value", "nul"),
        ({"occurred_at": NOW + timedelta(days=1, seconds=1)}, "occurred_at", "invalid_request"), ({"value": 1}, "value", "invalid_request"),
        ({"source": "gateway"}, "source", "invalid_request"), ({"source": "sdk:"}, "source", "invalid_request"),
        ({"source": "sdk:a b"}, "source", "invalid_request"),
    ],
)  # fmt: skip
def test_what_another_system_made_up_is_held_to_the_same_bounds(changes: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as error:
        event(draft(**changes))
    assert (error.value.code, error.value.param) == (code, param)


@pytest.mark.parametrize(
    "changes",
    [
        {"inference_id": "i" * 64}, {"id": "i" * 190}, {"inference_id": None, "episode_id": "e" * 64},
        {"occurred_at": NOW + timedelta(days=1)},
        {"source": "sdk:vim-1.0"}, {"source": "import:chats"}, {"source": "collector"},
    ],
)  # fmt: skip
def test_what_lies_at_the_bound_is_taken(changes: dict[str, Any]) -> None:
    assert observation(draft(**changes)).name == "undo"


def test_what_is_left_out_is_filled_in() -> None:
    made = event(draft())
    assert isinstance(made, TimedHere)
    assert (made.time, made.source, made.key) == (NOW, "api", "i")
    said = msgspec.json.decode(made.data, type=Observation)
    assert (said.occurred_at, said.source, said.policy, said.actor, said.tags) == (NOW, "api", None, None, {})
    timed = event(draft(occurred_at=NOW - timedelta(hours=1), actor="ada", inference_id=None, episode_id="e", policy="tab"))
    assert type(timed) is CloudEvent
    assert (timed.time, timed.key) == (NOW - timedelta(hours=1), "e")
    said = msgspec.json.decode(timed.data, type=Observation)
    assert (said.actor, said.policy) == (hash_actor("ada", salt="salt"), "tab")


def test_without_an_id_the_same_words_at_the_same_moment_are_one_event_and_any_other_are_another() -> None:
    at = NOW - timedelta(hours=1)
    first = observation(draft(occurred_at=at)).id
    assert len(first) == 32
    assert observation(draft(occurred_at=at)).id == first
    others: list[dict[str, Any]] = [
        {"name": "regenerate"}, {"value": False}, {"inference_id": "j"}, {"inference_id": None, "episode_id": "i"}, {"actor": "ada"},
        {"policy": "tab"}, {"occurred_at": at + timedelta(seconds=1)},
    ]  # fmt: skip
    found = {observation(draft(**({"occurred_at": at} | other))).id for other in others}
    assert len(found | {first}) == 8
    assert len({observation(draft()).id for _ in range(3)}) == 3, "at no named moment each is its own"


def test_a_retraction_is_one_event_however_often_it_is_sent() -> None:
    made = desk().retraction(RetractionDraft(observation_id="o", occurred_at=NOW), BOUND)
    assert (made.id, made.source, made.key, made.time) == ("o:retracted", "api@composer", "o", NOW)
    assert desk().retraction(RetractionDraft(observation_id="o"), BOUND).time == NOW
    with pytest.raises(BadRequest):
        desk().retraction(RetractionDraft(observation_id="o", occurred_at=datetime(1999, 12, 31, tzinfo=UTC)), BOUND)


def test_a_retraction_of_what_no_row_can_be_called_is_refused_by_itself() -> None:
    with pytest.raises(BadRequest) as error:
        desk().retraction(RetractionDraft(observation_id="a\x00b"), BOUND)
    assert (error.value.param, error.value.code) == ("observation_id", "nul")


def test_a_key_of_one_policy_speaks_under_its_own_name_and_of_that_policy() -> None:
    assert observation(draft(), by=BOUND).policy == "composer"
    assert [source_of(said, BOUND) for said in (None, "sdk:vim", "sdk:vim@composer")] == [
        "api@composer",
        "sdk:vim@composer",
        "sdk:vim@composer",
    ]
    assert source_of("sdk:vim@tab", ANONYMOUS) == "sdk:vim@tab"
    with pytest.raises(BadRequest, match="may not speak as") as error:
        source_of("sdk:vim@tab", BOUND)
    assert (error.value.param, error.value.code) == ("source", "wrong_policy")
    with pytest.raises(BadRequest, match="for the policy 'composer' only"):
        event(draft(policy="tab"), by=BOUND)


def test_texts_are_searched_where_their_policy_asks_or_nobody_knows_whose_they_are() -> None:
    said = {"name": "follow_up", "value": "mail ada@example.org", "tags": {"a": "b@example.org"}}
    redacting = desk(redact=True)
    assert observation(draft(**said, policy="composer"), at=redacting).value == "mail [EMAIL]"
    unknown = observation(draft(**said), at=redacting)
    assert (unknown.value, unknown.tags) == ("mail [EMAIL]", {"a": "[EMAIL]"})
    assert observation(draft(**said, policy="tab"), at=redacting).value == "mail ada@example.org"
    assert observation(draft(**said), at=desk()).value == "mail ada@example.org"


@pytest.mark.parametrize(("policy", "redacted"), [("composer", True), ("tab", False)])
def test_an_imported_turn_is_searched_where_its_policy_asks_and_never_keeps_who_it_was(policy: str, *, redacted: bool) -> None:
    said = "mail ada@example.org"
    call = ToolCall(id="1", name="mail", arguments=said, verdict=ToolVerdict.VALID)
    sent = turn("i1", policy=policy, actor="ada", messages=[{"role": "user", "content": said}], completion=said, tool_calls=[call])
    kept, found = desk(redact=True).imported(sent), "mail [EMAIL]" if redacted else said
    assert (kept.messages[0]["content"], kept.completion, kept.tool_calls[0].arguments) == (found, found, found)
    assert kept.tags == ({"redacted": "true"} if redacted else {})
    assert kept.actor == hash_actor("ada", salt="salt")
    assert desk().imported(turn("i1", policy=policy, actor=None)).actor is None


def test_no_more_text_is_searched_than_may_be() -> None:
    tight = desk(Limits(redacted_chars=10), redact=True)
    assert observation(draft(name="follow_up", value="x" * 7, tags={"a": "bc"}), at=tight).value == "x" * 7
    with pytest.raises(BadRequest) as error:
        event(draft(name="follow_up", value="x" * 8, tags={"a": "bc"}), at=tight)
    assert (error.value.param, error.value.code) == ("value", "size")
    event(draft(name="follow_up", value="x" * 8, tags={"a": "bc"}, policy="tab"), at=tight)


@pytest.mark.parametrize("padding", [0, 40_000])
def test_a_batch_has_as_many_members_as_it_may(padding: int) -> None:
    def batch(count: int) -> bytes:
        return (b"[" + b",".join([b"1"] * count) + b"]").ljust(padding)

    assert [bytes(one) for one in members(batch(5), most=5)] == [b"1"] * 5
    assert members(batch(0), most=5) == []
    with pytest.raises(BadRequest) as error:
        members(batch(6), most=5)
    assert error.value.code == "too_many_events"
    for broken, code in ((b'{"a":1}', "invalid_request"), (b"[1,", "not_json"), (b"\xff", "not_json")):
        with pytest.raises(BadRequest) as error:
            members(broken.ljust(padding), most=5)
        assert error.value.code == code


class Inner(msgspec.Struct, frozen=True):
    a: int = 0


class Outer(msgspec.Struct):
    inner: Inner | None = None
    many: list[Inner] = []
    plain: Inner = Inner()


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ('{"plain": {"a": 1}, "many": [{"a": 1}]}', None), ('{"other": 1}', "other"), ('{"plain": {"b": 1}}', "plain.b"),
        ('{"many": [{"a": 1}, {"b": 1}]}', "many.1.b"), ("[1]", None),
    ],
)  # fmt: skip
def test_a_field_that_nobody_knows_is_named_by_its_place(sent: str, param: str | None) -> None:
    if param is None:
        refuse_unknown(msgspec.Raw(sent.encode()), Outer)
        return
    with pytest.raises(BadRequest) as error:
        refuse_unknown(msgspec.Raw(sent.encode()), Outer)
    assert (error.value.param, str(error.value)) == (param, f"{param}: Object contains unknown field `{param.rpartition('.')[2]}`")
