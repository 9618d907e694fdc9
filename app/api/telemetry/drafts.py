"""Observations as they come over HTTP: what may be left out is filled in, what is wrong is refused with the field's name."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Annotated, Any, cast, get_args

import msgspec

from app.api.entry.access import Caller
from app.api.telemetry.intake import BRACKETS, Limits, characters, check_tags, check_tree, more_than
from app.api.telemetry.redaction import Redactor, redact
from app.domain.errors import BadRequest
from app.domain.ids import hash_actor, uuid7
from app.domain.policies import Level, PolicyConfig, SignalConfig
from app.domain.ports import Clock
from app.domain.telemetry.events import RETRACTED, CloudEvent, EventType, Observation, Retraction
from app.domain.telemetry.moments import check_moments
from app.domain.telemetry.signals import BUILT_IN, ObservationName, check_value, split_path
from app.domain.telemetry.turns import TurnServed

AwareTime = Annotated[datetime, msgspec.Meta(tz=True)]
TARGET_CHARS, STORED_CHARS = 64, 190
"""Of what an observation is about, and of its own id: what columns hold, with `:retracted` behind it. Dialects make up ids."""
TargetId = Annotated[str, msgspec.Meta(min_length=1, max_length=TARGET_CHARS)]
EventId = Annotated[str, msgspec.Meta(min_length=1, max_length=180)]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=120)]
_SOURCE = re.compile(r"(api|collector|(sdk|import):[\w.\-]+)(@[\w.\-]+)?")


class Draft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An observation before the door has filled in what the caller may leave out; see `Observation` for the fields."""

    name: Label
    value: Any
    inference_id: TargetId | None = None
    episode_id: TargetId | None = None
    id: EventId | None = None
    """Makes repeats harmless. Left out: a hash of the content where `occurred_at` is given, else a fresh id."""
    policy: Label | None = None
    occurred_at: AwareTime | None = None
    """Left out: now."""
    source: Label | None = None
    """Left out: `api`."""
    actor: Annotated[str, msgspec.Meta(min_length=1, max_length=400)] | None = None
    """Who, in the product's own terms; stored as a pseudonym only."""
    tags: dict[str, str] = {}

    @property
    def said(self) -> list[Any]:
        """What may hold personal data: value and tags."""
        return [self.value, self.tags]


class RetractionDraft(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A retraction before the door has filled in what the caller may leave out."""

    observation_id: EventId
    source: Label | None = None
    occurred_at: AwareTime | None = None


class TimedHere(CloudEvent, frozen=True, kw_only=True):
    """An observation whose sender left the time to us: sent again it differs in nothing but that."""


_drafts = msgspec.json.Decoder(Draft)
_encode = msgspec.json.Encoder().encode


def decode(decoder: "msgspec.json.Decoder[Any]", raw: bytes | memoryview | msgspec.Raw) -> Any:  # noqa: ANN401 - the decoder's type
    """Decode JSON; raises `BadRequest` with the field's path."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="not_json") from error
    except RecursionError as error:
        raise BadRequest("the body is nested too deep", code="too_deep") from error


LONG_BYTES = 32 * 1024
"""Of an array, from which on its members are counted while it is read, and not afterwards."""


def members(raw: bytes, *, most: int) -> list[msgspec.Raw]:
    """The JSON of an array's members. Raises `BadRequest`; for more than `most` where they begin: a megabyte of small ones takes 60 ms."""
    if len(raw) <= LONG_BYTES:
        found: list[msgspec.Raw] = decode(_list, raw)
    else:
        try:
            found = [member for member in msgspec.structs.astuple(_at_most(most).decode(raw)) if member]
        except msgspec.ValidationError as error:
            raise _too_many(most) if "at most" in str(error) else _wrong_field(str(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(f"the body is not JSON: {error}", code="not_json") from error
    if len(found) > most:
        raise _too_many(most)
    return found


_list = msgspec.json.Decoder(list[msgspec.Raw])


@lru_cache(maxsize=8)
def _at_most(members: int) -> "msgspec.json.Decoder[Any]":
    """Reads an array and stops at the first member that is one too many: no list type does."""
    fields = [(f"m{n}", msgspec.Raw, msgspec.Raw(b"")) for n in range(members)]
    return msgspec.json.Decoder(msgspec.defstruct("Members", fields, array_like=True, forbid_unknown_fields=True))


def _too_many(most: int) -> BadRequest:
    return BadRequest(f"more than {most} in one body: send smaller batches", code="too_many_events")


def refuse_unknown(raw: msgspec.Raw, kind: type[msgspec.Struct]) -> None:
    """A client's field that the type does not know is a mistake of the client. Raises `BadRequest` with its path."""
    for path in _unknown(msgspec.json.decode(raw), kind, ""):
        raise BadRequest(f"{path}: Object contains unknown field `{path.rpartition('.')[2]}`", param=path)


def _unknown(sent: object, kind: Any, at: str) -> Iterator[str]:  # noqa: ANN401 - a type, or a list of one
    if isinstance(sent, list):
        for index, member in enumerate(cast("list[object]", sent)):
            yield from _unknown(member, get_args(kind)[0] if get_args(kind) else None, f"{at}{index}.")
    elif isinstance(sent, dict) and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        known = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        for name, value in cast("dict[str, object]", sent).items():
            if name not in known:
                yield at + name
            else:
                yield from _unknown(value, known[name], f"{at}{name}.")


def _wrong_field(text: str) -> BadRequest:
    message, path = split_path(text)
    named = re.search(r"(?:unknown|required) field `([^`]*)`", message)
    param = ".".join(part for part in (path.strip("."), named.group(1) if named else "") if part)
    return BadRequest(f"{param}: {message}" if param else message, param=param or None)


@dataclass(frozen=True, kw_only=True)
class Desk:
    """Turns drafts into events. Pure but for the clock."""

    policies: Mapping[str, PolicyConfig]
    redactor: Redactor
    actor_salt: str
    clock: Clock
    limits: Limits

    @cached_property
    def _signals_of_all(self) -> Mapping[str, SignalConfig]:
        return {name: signal for config in self.policies.values() for name, signal in config.signals.items()}

    def vocabularies(self, policy: str | None) -> Sequence[Mapping[str, SignalConfig]]:
        """The declared signals of the policy; of each where the policy is not known."""
        known = self.policies.values() if policy is None else [self.policies[policy]] if policy in self.policies else []
        return [config.signals for config in known] or [{}]

    @cached_property
    def redacts(self) -> bool:
        """Whether any policy asks for redaction."""
        return any(config.redact for config in self.policies.values())

    def decode(self, raw: msgspec.Raw | bytes) -> Draft:
        """One event's JSON. Raises `BadRequest`."""
        if len(memoryview(raw)) > self.limits.event_bytes:
            raise BadRequest(f"the event is larger than {self.limits.event_bytes} bytes", code="size")
        self.refuse_crowded(raw)
        draft: Draft = decode(_drafts, raw)
        return draft

    def refuse_crowded(self, raw: msgspec.Raw | bytes) -> None:
        """Refuse what would be refused once it is decoded, in one piece in which nobody else is answered. Raises `BadRequest`."""
        if len(memoryview(raw)) > self.limits.nodes and more_than(2 * self.limits.nodes, bytes(raw), *BRACKETS):
            raise BadRequest(f"there are more than {self.limits.nodes} values in it", param="value", code="too_many_values")

    def observation(self, draft: Draft, caller: Caller) -> CloudEvent:
        """The event of a draft. Raises `BadRequest` naming the field."""
        policy = self._policy(draft.policy, caller)
        level = _level(draft)
        check_tree(draft.value, self.limits)
        if draft.tags:
            check_tags(draft.tags, self.limits)
        check_value(draft.name, draft.value, self._signals(policy, draft), level=level)
        now = self.clock()
        occurred_at = draft.occurred_at or now
        _check_time(occurred_at, now)
        value, tags = self._redacted(policy, draft.said)
        observation = Observation(
            id=draft.id or _content_id(draft, policy),
            policy=policy,
            inference_id=draft.inference_id,
            episode_id=draft.episode_id,
            name=draft.name,
            value=value,
            occurred_at=occurred_at,
            source=source_of(draft.source, caller),
            actor=hash_actor(draft.actor, salt=self.actor_salt) if draft.actor else None,
            tags=tags,
        )
        kind = CloudEvent if draft.occurred_at is not None else TimedHere
        return kind(
            id=observation.id, source=observation.source, type=EventType.OBSERVATION.value, time=occurred_at,
            key=observation.episode_id or observation.inference_id or "", data=_encode(observation),
        )  # fmt: skip

    def retraction(self, draft: RetractionDraft, caller: Caller) -> CloudEvent:
        """The event that takes an observation back; the same retraction twice is one event. Raises `BadRequest` naming the field."""
        if "\x00" in draft.observation_id:
            raise BadRequest("an id contains the character U+0000", param="observation_id", code="nul")
        source = source_of(draft.source, caller)
        now = self.clock()
        occurred_at = draft.occurred_at or now
        _check_time(occurred_at, now)
        retraction = Retraction(observation_id=draft.observation_id, source=source, occurred_at=occurred_at)
        return CloudEvent(
            id=draft.observation_id + RETRACTED, source=source, type=EventType.RETRACTION.value, time=occurred_at,
            key=draft.observation_id, data=_encode(retraction),
        )  # fmt: skip

    def imported(self, turn: TurnServed) -> TurnServed:
        """An imported turn with its actor hashed and, where the policy asks for it, its texts redacted."""
        actor = hash_actor(turn.actor, salt=self.actor_salt) if turn.actor else None
        turn = redact(turn, self.redactor) if self.policies[turn.policy].redact else turn
        return msgspec.structs.replace(turn, actor=actor)

    def _policy(self, named: str | None, caller: Caller) -> str | None:
        if caller.policy is not None and named not in (None, caller.policy):
            raise BadRequest(f"this key is for the policy {caller.policy!r} only", param="policy", code="wrong_policy")
        if named is not None and named not in self.policies:
            known = ", ".join(sorted(self.policies))
            raise BadRequest(f"no policy is named {named!r} (declared: {known})", param="policy", code="unknown_policy")
        return named or caller.policy

    def _signals(self, policy: str | None, draft: Draft) -> Mapping[str, SignalConfig]:
        """The declared signals of the policy; of all of them where the policy is not known. Raises `BadRequest` where those differ."""
        if policy is not None:
            return self.vocabularies(policy)[0]
        if draft.name == ObservationName.RATING:  # a thumb is one on every scale, and without a scale a number is from -1 to 1
            scales = [signals.get(draft.name) for signals in self.vocabularies(None)] if not isinstance(draft.value, bool) else []
        else:
            scales = [signals[draft.name] for signals in self.vocabularies(None) if draft.name in signals and draft.name not in BUILT_IN]
        if len({None if one is None else (one.type, one.level, one.low, one.high) for one in scales}) > 1:
            raise ambiguous(draft.name)
        return self._signals_of_all

    def _redacted(self, policy: str | None, value: list[Any]) -> list[Any]:
        """Texts of policies that ask for it; of every caller whose policy is not known when any policy asks for it."""
        named = self.policies.get(policy) if policy is not None else None
        asked = named.redact if named is not None else self.redacts
        if not asked:
            return value
        if characters(value, at_most=self.limits.redacted_chars) > self.limits.redacted_chars:
            raise BadRequest(
                f"the texts have more than {self.limits.redacted_chars} characters, more than are searched for personal data in one event",
                param="value", code="size",
            )  # fmt: skip
        return self.redactor.value(value)


def ambiguous(name: str) -> BadRequest:
    """For a name that means one thing to one policy and another to another, of a caller who did not say which it is about."""
    return BadRequest(
        f"the policies declare {name!r} differently: name one in `policy`, or use a key of one", param="policy", code="ambiguous"
    )


def _check_time(occurred_at: datetime, now: datetime) -> None:
    try:
        check_moments(received_at=now, occurred_at=occurred_at)
    except ValueError as error:
        raise BadRequest(str(error), param="occurred_at") from error


def _level(draft: Draft) -> Level:
    if (draft.inference_id is None) == (draft.episode_id is None):
        raise BadRequest("set exactly one of inference_id and episode_id", param="inference_id")
    if len(draft.inference_id or draft.episode_id or "") > TARGET_CHARS:
        raise BadRequest(f"what it is about has an id of at most {TARGET_CHARS} characters", param="inference_id", code="size")
    if len(draft.id or "") > STORED_CHARS:
        raise BadRequest(f"the id has, with what is said of its parts, more than {STORED_CHARS} characters", param="id", code="size")
    if "\x00" in f"{draft.inference_id}{draft.episode_id}{draft.id}{draft.actor}":
        raise BadRequest("an id contains the character U+0000", param="id", code="nul")
    return Level.TURN if draft.inference_id is not None else Level.EPISODE


def source_of(named: str | None, caller: Caller) -> str:
    """The source of an event: part of its identity, so a key for one policy has a name space of its own.

    `gateway` and other words of ours cannot be claimed over HTTP.
    """
    return _source(named or "api", caller.policy)


@lru_cache(maxsize=4096)
def _source(source: str, policy: str | None) -> str:
    if not _SOURCE.fullmatch(source):
        raise BadRequest(f"source {source!r} is not allowed: use `api`, `collector`, `sdk:<name>` or `import:<name>`", param="source")
    if policy is None:
        return source
    name, _, space = source.partition("@")
    if space not in ("", policy):
        raise BadRequest(f"this key is for the policy {policy!r}: it may not speak as {source!r}", param="source", code="wrong_policy")
    return f"{name}@{policy}"


def _content_id(draft: Draft, policy: str | None) -> str:
    if draft.occurred_at is None:
        return uuid7()
    content = [policy, draft.name, draft.inference_id, draft.episode_id, draft.occurred_at, draft.value, draft.actor]
    return hashlib.sha256(_encode(content)).hexdigest()[:32]
